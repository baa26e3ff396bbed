"""Degradations as options of a task: kind, strength, form, and size of the canvas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from patchloom.options.refusals import PAPERS, resolved
from patchloom.sizes import Sides, scaled

if TYPE_CHECKING:
    from patchloom.nets.geometry import Geometry
    from patchloom.options.tasks import DegradationKind, Size, Strength

# option that sets the strength of each degradation
STRENGTHS: dict[DegradationKind, str] = {
    "zoom_in": "scale",
    "zoom_out": "scale",
    "fisheye": "twist",
    "wave": "amplitude",
    "blur": "kernel",
    "decolorize": "saturation",
}
_WITH_CANVAS = ("zoom_in", "fisheye", "wave")
_RANGES = {"scale": "fractions of the side in (0, 1]", "kernel": "odd sides in pixels"}


class Form(NamedTuple):
    """Option of form.

    Attributes:
        kinds: degradations that have it.
        usual: value of ``auto``.
        why: its reason.
    """

    kinds: tuple[DegradationKind, ...]
    usual: str
    why: str = PAPERS


FORMS = {
    "zoom_place": Form(("zoom_in",), "centre"),
    "fill": Form(("zoom_out",), "mirror"),
    "kernel_init": Form(("blur",), "normal", "the paper's; mean 1/k² and deviation 0.02 are its program's"),
    "kernel_of": Form(("blur",), "channel"),
    "canvas_fit": Form(("fisheye", "wave"), "resize"),
}


class DegradationOptions(NamedTuple):
    """Options of a degradation, some of them ``auto``.

    Attributes:
        kind: kind of degradation.
        canvas: shorter side of the image before it.
        strengths: values of the options in `STRENGTHS`, as far as the task has them.
        forms: values of the options in `FORMS`.
    """

    kind: DegradationKind
    canvas: Size
    strengths: Mapping[str, Strength]
    forms: Mapping[str, str]

    @property
    def option(self) -> str | None:
        return STRENGTHS.get(self.kind)

    @property
    def whole(self) -> bool:
        """Whether zoom_in has a canvas by default; with a scale, it works on images of the usual size."""
        return self.kind == "zoom_in" and self.strengths.get("scale", "auto") == "auto"

    def side(self, size: Sides) -> int:
        """Return the shorter side of the canvas of images of ``size``."""
        short = min(size)
        return resolved(self.canvas, short + 2 * round(short * 96 / 224 / 2) if self.whole else short)

    def canvas_of(self, size: Sides) -> Sides:
        more = self.side(size) - min(size)
        h, w = (along + 2 * round(along * more / min(size) / 2) for along in size)
        return h, w

    def has_band(self, size: Sides) -> bool:
        """Return whether zoom_in shows a part of a canvas, around which is a band."""
        return self.kind == "zoom_in" and self.canvas_of(size) != size

    def strength(self, size: Sides) -> tuple[float | list[float], str] | None:
        """Return the strength, and the reason of an ``auto``; None if there is nothing to set."""
        if self.option is None or self.has_band(size):
            return None
        odd = max(3, round(9 * min(size) / 224) // 2 * 2 + 1)
        usual: dict[str, tuple[float | list[float], str]] = {
            "scale": (160 / 224, "the paper's 160 of 224 pixels"),
            "twist": ([0.2, 0.25], PAPERS),
            "amplitude": ([0.05, 0.1], "patchloom's: up to 22 pixels of 224"),
            "kernel": (float(odd), "the paper's 9 pixels of 224, and at least 3"),
            "saturation": (0.3, PAPERS),
        }
        value, why = usual[self.option]
        return resolved(self.strengths.get(self.option, "auto"), value), why

    def drawn(self, size: Sides) -> tuple[float, ...]:
        found = self.strength(size)
        if found is None:
            return ()
        return tuple(found[0]) if isinstance(found[0], list | tuple) else (found[0],)

    def grid(self, whole: Sides, size: Sides) -> Sides:
        """Return rows and columns of the patches that enter, of a ``whole`` grid."""
        bare = self.kind == "zoom_out" and self.forms.get("fill") == "none"
        return scaled(whole, self.drawn(size)[0]) if bare else whole

    def refusals(self, g: Geometry) -> Iterator[tuple[bool, str]]:
        yield (
            self.kind == "decolorize" and g.channels != 3,
            f"decolorize is for images of 3 channels, and these have {g.channels}: choose another",
        )
        for other, given in self.strengths.items():
            yield (
                given != "auto" and other != self.option,
                f"--task.{other} is not for the degradation {self.kind}: leave it out",
            )
        short, side = min(g.size), self.side(g.size)
        unfit = self.kind not in _WITH_CANVAS or (self.kind == "zoom_in" and not self.whole)
        yield (
            side < short or (side - short) % 2 != 0 or (side != short and unfit),
            f"--task.canvas {side} does not go with {self.kind}: give a size above {short} by an even number of "
            f"pixels, for {' or '.join(_WITH_CANVAS)}, without --task.scale",
        )
        for name, value in self.forms.items():
            given = value != "auto"
            lacks = given and self.kind not in FORMS[name].kinds
            yield lacks, f"--task.{name} is not for the degradation {self.kind}: leave it out"
            bare = given and name == "canvas_fit" and side == short
            yield bare, f"--task.{name} is for a --task.canvas: leave it out"
        if self.option is None or self.strength(g.size) is None:
            return
        drawn = self.drawn(g.size)
        if self.option == "kernel":
            fits = all(x % 2 == 1 and 0 < x <= short for x in drawn)
        else:
            fits = all(0 <= x <= 1 and (x > 0 or self.option != "scale") for x in drawn)
        # a mixture has another name for the option
        yield (
            not drawn or not fits,
            f"the {self.option} of {self.kind} must be {_RANGES.get(self.option, 'numbers in [0, 1]')}, not "
            f"{list(drawn)}",
        )
        yield (
            self.forms.get("fill") == "none" and (len(drawn) > 1 or self.grid(g.grid, g.size) == g.grid),
            "without padding only the patches of the small picture enter, equally many of every image and fewer than "
            f"all: give --task.scale one number that leaves fewer than {g.grid[0]}x{g.grid[1]} patches, not "
            f"{list(drawn)}",
        )


def forms_of(options: Any) -> dict[str, str]:
    return {name: getattr(options, name) for name in FORMS}
