"""How one image becomes what a task sees. Calls return a tuple, since some tasks want several views."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from patchloom.data.colors import draw_colors, recolored
from patchloom.hints import check

Sharing = Literal["none", "shared", "own"]


class RandomCrop:
    """A random part of the image, resized to `size` (h, w), mirrored half of the time.

    scale: range of the part's share of the image's area. ratio: range of its width over its height, as a multiple of
    that of `size`. flip: may mirror.
    """

    def __init__(
        self,
        size: tuple[int, int],
        scale: tuple[float, float] = (0.2, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: bool = True,
    ) -> None:
        # ratios are relative to the target's, so that a wide target shows wide parts instead of stretched ones
        aspect = size[1] / size[0]
        self.size, self.scale, self.flip = size, scale, flip
        self.ratio = (ratio[0] * aspect, ratio[1] * aspect)

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor]:
        """[c h w] -> one view [c *size], of the same dtype."""
        view = resize_part(image, *self._part(*image.shape[-2:], rng), self.size)
        if self.flip and rng.random() < 0.5:
            view = view.flip(-1)
        return (view,)

    def _part(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """(top, left, h, w), as torchvision's RandomResizedCrop draws it."""
        for _ in range(10):
            area = height * width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < h <= height and 0 < w <= width:
                return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        return _centre(height, width, ratio)


class TwoViews(RandomCrop):
    """Two views of an image, for a student and a teacher.

    size, scale, ratio, flip: as for RandomCrop. crop: both see the centre (none), one random crop, or each its own.
    color: colours are left alone (none), changed alike (shared), or for each on its own, as `draw_colors` says.

    Raises: PatchloomError for a word that is none of these.
    """

    def __init__(
        self, size: tuple[int, int], *, crop: Sharing = "own", color: Sharing = "none", **crop_options: Any
    ) -> None:
        super().__init__(size, **crop_options)
        check("task.crop", crop, Sharing)
        check("task.color", color, Sharing)
        self.crop, self.color, self.centre = crop, color, CentreCrop(size)

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """[c h w] -> two views [c *size], of the same dtype."""
        views, draws = self.split(image, rng)
        if draws is None:
            return views
        return recolored(views[0], draws[0]), recolored(views[1], draws[1])

    def split(self, image: Tensor, rng: np.random.Generator) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """As a call, but for the colours: two views, and what `recolor` shall make of them [2 `DRAW`], or None.

        A whole batch's colours are changed at once, where the batch goes.
        """
        if self.crop == "own":
            views = [*super().__call__(image, rng), *super().__call__(image, rng)]
        else:
            views = [*(self.centre(image) if self.crop == "none" else super().__call__(image, rng))] * 2
        if self.color == "own":
            draws = torch.stack([draw_colors(rng), draw_colors(rng)])
        else:
            draws = None if self.color == "none" else draw_colors(rng).expand(2, -1)
        return (views[0], views[1]), draws


class CentreCrop:
    """The largest centred part of the aspect of `size` (h, w), resized to it; the same every time."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def __call__(self, image: Tensor, rng: np.random.Generator | None = None) -> tuple[Tensor]:
        """[c h w] -> one view [c *size], of the same dtype; `rng` is not used."""
        # Cutting before resizing shows the same picture and never builds a huge strip out of a long, thin image.
        return (resize_part(image, *_centre(*image.shape[-2:], self.size[1] / self.size[0]), self.size),)


def _centre(height: int, width: int, ratio: float) -> tuple[int, int, int, int]:
    """(top, left, h, w) of the largest centred part whose width is `ratio` times its height."""
    h, w = min(height, max(1, round(width / ratio))), min(width, max(1, round(height * ratio)))
    return (height - h) // 2, (width - w) // 2, h, w


def resize_part(image: Tensor, top: int, left: int, h: int, w: int, size: tuple[int, int]) -> Tensor:
    """A part of an image [c h w] by antialiased bicubic resampling [c *size], of the same dtype."""
    if image.dtype == torch.uint8 and len(image) == 3:
        # The same as below in one call, and with a first stride that shows memory to be channels-last, as decoders
        # leave it: torch then needs no other. Only its way for colour gains by that.
        strides = image.stride()
        start = image.storage_offset() + top * strides[1] + left * strides[2]
        part = image.as_strided((1, 3, h, w), (max(3 * strides[0], image.shape[1] * strides[1]), *strides), start)
    else:
        part = image[None, :, top : top + h, left : left + w]
    # uint8 stays uint8 all the way: torch resizes it several times faster than float.
    view = interpolate(part, size, mode="bicubic", antialias=True)[0]
    return view if view.dtype == torch.uint8 else view.clamp(0, 1)  # bicubic overshoots at edges
