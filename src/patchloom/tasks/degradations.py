"""Degradations as options of a task: which one, how strong, in which form, and on how large a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from patchloom.errors import PatchloomError
from patchloom.hints import check
from patchloom.tasks.task import Size, Task
from patchloom.withhold.degradation import CanvasFit, Degradation, Fill, Kind, Place
from patchloom.withhold.draws import KernelInit, KernelOf

Strength = float | list[float] | Literal["auto"]

# a degradation, and the option that says how strong it is
STRENGTHS = {
    "zoom_in": "scale",
    "zoom_out": "scale",
    "fisheye": "twist",
    "wave": "amplitude",
    "blur": "kernel",
    "decolorize": "saturation",
}
_WITH_CANVAS = ("zoom_in", "fisheye", "wave")
# an option that says in which form: for which degradations, what it takes, what auto becomes and why
_FORMS: dict[str, tuple[tuple[str, ...], Any, str, str]] = {
    "zoom_place": (("zoom_in",), Place, "centre", "the paper's"),
    "fill": (("zoom_out",), Fill, "mirror", "the paper's"),
    "kernel_init": (("blur",), KernelInit, "normal", "the paper's"),
    "kernel_of": (("blur",), KernelOf, "channel", "the paper's"),
    "canvas_fit": (("fisheye", "wave"), CanvasFit, "resize", "the paper's"),
}


def build_degradation(
    task: Task,
    kind: Kind,
    canvas: Size = "auto",
    strengths: dict[str, Strength] | None = None,
    forms: Mapping[str, str] | None = None,
) -> Degradation:
    """A degradation for ``task``'s images.

    Args:
        task: its image size, patch and channels decide what ``auto`` becomes.
        kind: which degradation.
        canvas: shorter side in pixels of the images that come; more than the encoder's image only for zooming in,
            fisheye and wave.
        strengths: by option (scale, twist, amplitude, kernel, saturation), a number, a list, or auto.
        forms: by option (zoom_place, fill, kernel_init, kernel_of, canvas_fit), a word or auto.

    Raises:
        PatchloomError: a degradation that does not exist or is not for such images, strengths out of range, or options
            that are for another degradation.
    """
    check("task.degradation", kind, Kind)
    if kind == "decolorize" and task.geometry.channels != 3:
        raise PatchloomError(
            f"decolorize is for images of 3 channels, and these have {task.geometry.channels}: choose another"
        )
    strengths = strengths or {}
    size = task.geometry.size
    option = STRENGTHS.get(kind)
    for other, value in strengths.items():
        if value != "auto" and other != option:
            raise PatchloomError(f"--task.{other} is not for the degradation {kind}: leave it out")
    whole = _canvas(task, kind, canvas, size, strengths.get("scale", "auto"))
    chosen = _forms(task, kind, whole != size, forms or {})
    if option is None or (kind == "zoom_in" and whole != size):
        return Degradation(kind, size, whole, (), task.geometry.p, **chosen)
    side = min(size)
    odd = max(3, round(9 * side / 224) // 2 * 2 + 1)
    usual = {
        "scale": (160 / 224, "the paper's 160 of 224 pixels"),
        "twist": ([0.2, 0.25], "the paper's"),
        "amplitude": ([0.05, 0.1], "patchloom's: up to 22 pixels of 224"),
        "kernel": (float(odd), "the paper's 9 pixels of 224, and at least 3"),
        "saturation": (0.3, "the paper's"),
    }
    drawn = task.resolve_auto(option, strengths.get(option, "auto"), *usual[option])
    drawn = tuple(drawn) if isinstance(drawn, list | tuple) else (drawn,)
    fits = {
        "scale": lambda x: 0 < x <= 1,
        "twist": lambda x: 0 <= x <= 1,
        "amplitude": lambda x: 0 <= x <= 1,
        "kernel": lambda x: x == round(x) and x % 2 == 1 and 0 < x <= side,
        "saturation": lambda x: 0 <= x <= 1,
    }
    if not drawn or not all(map(fits[option], drawn)):
        ranges = {
            "scale": "shares of the side in (0, 1]",
            "twist": "numbers in [0, 1]",
            "kernel": "odd sides in pixels",
        }
        # the option has another name in a mixture
        raise PatchloomError(
            f"the {option} of {kind} must be {ranges.get(option, 'numbers in [0, 1]')}, not {list(drawn)}"
        )
    degradation = Degradation(kind, size, whole, drawn, task.geometry.p, **chosen)
    if not degradation.padded and (len(drawn) > 1 or degradation.grid == task.geometry.grid):
        raise PatchloomError(
            "without padding the patches of the small picture alone enter, as many of every image and fewer than all: "
            f"give --task.scale one number, which leaves fewer than {task.geometry.grid[0]}x{task.geometry.grid[1]} "
            f"patches, not {list(drawn)}"
        )
    return degradation


def others_needed(options: Mapping[str, Any]) -> tuple[int, str] | None:
    """How many images a step needs where patches of other images are shown, with the reason; None where none are."""
    return (2, "the small picture is shown amid patches of other images") if options["fill"] == "images" else None


def _forms(task: Task, kind: Kind, on_canvas: bool, asked: Mapping[str, str]) -> dict[str, Any]:
    """Of the options that say in which form a picture is degraded, those that are for ``kind``."""
    found = {}
    for option, value in asked.items():
        kinds, words, usual, why = _FORMS[option]
        if kind in kinds and (on_canvas or option != "canvas_fit"):
            found[option] = value = task.resolve_auto(option, value, usual, why)
            check(f"task.{option}", value, words)
        elif value != "auto":
            lacking = f"is not for the degradation {kind}" if kind not in kinds else "is for a --task.canvas"
            raise PatchloomError(f"--task.{option} {lacking}: leave it out")
    return found


def _canvas(task: Task, kind: Kind, canvas: Size, size: tuple[int, int], scale: Strength) -> tuple[int, int]:
    wide = kind == "zoom_in" and scale == "auto"  # a scale zooms into images of the usual size
    share, why = (96 / 224, "the paper's 320 for 224 pixels") if wide else (0.0, "the images' own size")
    side = task.resolve_auto("canvas", canvas, min(size) + 2 * round(min(size) * share / 2), why)
    more = side - min(size)
    if more < 0 or more % 2 or (more and kind not in _WITH_CANVAS) or (more and kind == "zoom_in" and not wide):
        raise PatchloomError(
            f"--task.canvas {side} does not go with {kind}: give a size above {min(size)} by an even number of pixels, "
            f"for {' or '.join(_WITH_CANVAS)}, without --task.scale"
        )
    return tuple(along + 2 * round(along * more / min(size) / 2) for along in size)
