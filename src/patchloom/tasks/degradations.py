"""Degradations as options of a task: which one, how strong, and what is then to be recovered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.hints import check
from patchloom.objectives.restoration import centre_of
from patchloom.tasks.task import Size, Task
from patchloom.views import degrade

Degradation = Literal["masked", "zoom_in", "zoom_out", "fisheye", "blur", "decolorize", "none"]
Strength = float | list[float] | Literal["auto"]

_WITH_CANVAS = ("zoom_in", "fisheye")


class Degraded(NamedTuple):
    """Images [b c h w] as the encoder may see them, and the share [b] of the side that they show (None: all)."""

    images: Tensor
    share: Tensor | None


@dataclass(frozen=True)
class Degrader:
    """One degradation with its strengths, of which each image draws its own.

    Attributes:
        kind: which one.
        size: height and width that the encoder sees.
        canvas: height and width of the images that come, of which the encoder may see a part.
        strengths: what is drawn from: shares of the side, bounds of the twist, sides of kernels, or saturations.
    """

    kind: Degradation
    size: tuple[int, int]
    canvas: tuple[int, int]
    strengths: tuple[float, ...]

    def __call__(self, images: Tensor, mean: Tensor, std: Tensor, generator: torch.Generator | None) -> Degraded:
        """Degrade images [b c H W] of the canvas's size, normalised by ``mean`` and ``std`` [c 1 1]."""
        b, device = len(images), images.device
        draw = {"generator": generator, "device": device}
        if self.kind == "zoom_in":
            if self.canvas != self.size:
                share = torch.full((b,), self.size[0] / self.canvas[0], device=device)
                return Degraded(centre_of(images, self.size), share)
            share = degrade.draw_from(self.strengths, b, **draw)
            return Degraded(degrade.zoom_in(images, share), share)
        if self.kind == "zoom_out":
            sizes = [tuple(max(1, round(side * one)) for side in self.size) for one in self.strengths]
            which = degrade.draw_index(len(sizes), b, **draw)
            places = degrade.random_places(sizes, which, self.size, **draw)
            return Degraded(degrade.zoom_out(images, sizes, which, *places), None)
        if self.kind == "fisheye":
            centre = degrade.draw_uniform(-1, 1, (b, 2), **draw)
            twist = degrade.draw_uniform(min(self.strengths), max(self.strengths), (b,), **draw)
            return Degraded(centre_of(degrade.fisheye(images, centre, twist), self.size), None)
        if self.kind == "blur":
            sides = [round(side) for side in self.strengths]
            kernels = degrade.random_kernels(sides, degrade.draw_index(len(sides), b, **draw), **draw)
            return Degraded(degrade.blur(images, kernels), None)
        if self.kind == "decolorize":
            saturation = degrade.draw_from(self.strengths, b, **draw)
            plain = (images * std + mean).clamp(0, 1)
            return Degraded((degrade.decolorize(plain, saturation) - mean) / std, None)
        return Degraded(images, None)

    def frame(self, images: Tensor) -> Tensor:
        """The clean picture [b c h w] that is to be recovered from canvas images [b c H W]."""
        if self.canvas == self.size:
            return images
        if self.kind == "fisheye":
            return centre_of(images, self.size)
        return F.interpolate(images, self.size, mode="area")

    def placed(self, seen: Tensor, share: Tensor | None) -> Tensor:
        """What is seen [b c h w] at its place in the frame, its edges drawn out: a guess that needs no learning."""
        if share is None:
            return seen
        scale = torch.zeros(len(seen), 2, 3, device=seen.device)
        scale[:, 0, 0] = scale[:, 1, 1] = 1 / share
        grid = F.affine_grid(scale, list(seen.shape), align_corners=False)
        return F.grid_sample(seen.float(), grid, padding_mode="border", align_corners=False)


def build_degrader(task: Task, kind: Degradation, canvas: Size = "auto", strengths: dict[str, Strength] | None = None):
    """A degrader for ``task``'s images.

    Args:
        task: its image size, patch and channels decide what ``auto`` becomes.
        kind: which degradation.
        canvas: shorter side in pixels of the images that come; more than the encoder's image only for zooming in and
            fisheye.
        strengths: by option (scale, twist, kernel, saturation), a number, a list, or auto.

    Raises:
        PatchloomError: a degradation that does not exist or is not for such images, or strengths out of range.
    """
    check("task.degradation", kind, Degradation)
    if kind == "decolorize" and task.channels != 3:
        raise PatchloomError(f"decolorize is for images of 3 channels, and these have {task.channels}: choose another")
    strengths = strengths or {}
    size = tuple(task.encoder.patch_embed.img_size)
    asked = {"zoom_in": "scale", "zoom_out": "scale", "fisheye": "twist", "blur": "kernel", "decolorize": "saturation"}
    option = asked.get(kind)
    for other, value in strengths.items():
        if value != "auto" and other != option:
            raise PatchloomError(f"--task.{other} is not for the degradation {kind}: leave it out")
    whole = _canvas(task, kind, canvas, size, strengths.get("scale", "auto"))
    if option is None or (kind == "zoom_in" and whole != size):
        return Degrader(kind, size, whole, ())
    side = min(size)
    odd = max(3, round(9 * side / 224) // 2 * 2 + 1)
    usual = {
        "scale": (160 / 224, "the paper's 160 of 224 pixels"),
        "twist": ([0.2, 0.25], "the paper's"),
        "kernel": (float(odd), "the paper's 9 pixels of 224, and at least 3"),
        "saturation": (0.3, "the paper's"),
    }
    drawn = task.choose(option, strengths.get(option, "auto"), *usual[option])
    drawn = tuple(drawn) if isinstance(drawn, list | tuple) else (drawn,)
    fits = {
        "scale": lambda x: 0 < x <= 1,
        "twist": lambda x: 0 <= x <= 1,
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
    return Degrader(kind, size, whole, drawn)


def _canvas(task: Task, kind: Degradation, canvas: Size, size: tuple[int, int], scale: Strength) -> tuple[int, int]:
    wide = kind == "zoom_in" and scale == "auto"  # a scale zooms into images of the usual size
    share, why = (96 / 224, "the paper's 320 for 224 pixels") if wide else (0.0, "the images' own size")
    side = task.choose("canvas", canvas, min(size) + 2 * round(min(size) * share / 2), why)
    more = side - min(size)
    if more < 0 or more % 2 or (more and kind not in _WITH_CANVAS) or (more and kind == "zoom_in" and not wide):
        raise PatchloomError(
            f"--task.canvas {side} does not go with {kind}: give a size above {min(size)} by an even number of pixels, "
            f"for {' or '.join(_WITH_CANVAS)}, without --task.scale"
        )
    return tuple(along + 2 * round(along * more / min(size) / 2) for along in size)
