"""Crops of one image. A call returns a tuple of views, because some tasks want several."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from patchloom.data.colors import draw_colors, recolored
from patchloom.hints import check

# what two views of an image have: neither a random crop or colours, the same ones, or each its own
Sharing = Literal["none", "shared", "own"]
Change = Callable[[Tensor, np.random.Generator], Tensor]

NATIVE = (0.5, 2.0)  # area in the image, over that of the view, of crops at native scale: sides differ by up to 1.4
_USUAL = 0.2  # smallest share of the area, for images that are hardly larger than the view


class RandomCrop:
    """A random crop of the image, resized to ``size`` and mirrored with probability 0.5 (Inception's crop).

    Args:
        size: (h, w) of the view in pixels.
        scale: range of the crop's area, as a share of the image's.
        ratio: range of the crop's width over its height, as a multiple of that of ``size``.
        flip: whether to mirror at all.
        randaugment: changes a view [c h w] after that, by what its generator draws; None leaves it as it is.
        native: draw the crop's area from `NATIVE` times that of the view, in pixels of the image, instead of by
            ``scale``: an image of any size is then seen at about its own scale. Of images hardly larger than the view,
            crops are the usual ones.

    Attributes:
        crops: different crops of an image that a call takes.
    """

    crops = 1

    def __init__(
        self,
        size: tuple[int, int],
        scale: tuple[float, float] = (0.2, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: bool = True,
        randaugment: Change | None = None,
        native: bool = False,
    ) -> None:
        # ratios are relative to the target's, so that a wide target shows wide parts instead of stretched ones
        aspect = size[1] / size[0]
        self.size, self.scale, self.flip, self.randaugment = size, scale, flip, randaugment
        self.ratio, self.native = (ratio[0] * aspect, ratio[1] * aspect), native

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """One view of an image [c h w], of the same dtype and resized to ``size``."""
        height, width = image.shape[-2:]
        view = resize_part(image, *self._part(height, width, rng), self.size)
        if self.flip and rng.random() < 0.5:
            view = view.flip(-1)
        return (self._changed(view, rng),)

    def _changed(self, view: Tensor, rng: np.random.Generator) -> Tensor:
        return view if self.randaugment is None else self.randaugment(view, rng)

    def _part(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """(top, left, h, w) in pixels, drawn as by torchvision's RandomResizedCrop."""
        scale = native_scale((height, width), self.size) if self.native else self.scale
        for _ in range(10):
            area = height * width * rng.uniform(*scale)
            ratio = math.exp(rng.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < h <= height and 0 < w <= width:
                return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        return centre_part(height, width, ratio)


def native_scale(image: tuple[int, int], view: tuple[int, int]) -> tuple[float, float]:
    """Range of a crop's area, as a share of the image's (h, w), for views (h, w) at about the image's own scale."""
    share = view[0] * view[1] / (image[0] * image[1])
    return min(_USUAL, NATIVE[0] * share), min(1.0, NATIVE[1] * share)


def cuts_natively(augment: object) -> bool:
    """Whether a task's augmentation cuts crops at native scale."""
    return bool(getattr(augment, "native", False))


class TwoViews(RandomCrop):
    """Two views of an image, for a student and a teacher; RandAugment changes both alike if they have the same crop.

    Args:
        size: (h, w) of each view in pixels.
        crop: the centre for both (none), one random crop for both (shared), or one for each (own).
        color: no colour jitter (none), the same for both (shared), or one for each (own); see `draw_colors`.
        crop_options: scale, ratio, flip and randaugment of `RandomCrop`.

    Raises:
        PatchloomError: another value of ``crop`` or ``color``.
    """

    def __init__(
        self, size: tuple[int, int], *, crop: Sharing = "own", color: Sharing = "none", **crop_options: Any
    ) -> None:
        super().__init__(size, **crop_options)
        check("task.crop", crop, Sharing)
        check("task.color", color, Sharing)
        self.crop, self.color = crop, color
        self.crops = 2 if crop == "own" else 1

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """Two views of an image [c h w], of the same dtype and resized to ``size``."""
        views, draws = self.split(image, rng)
        if draws is None:
            return views
        return recolored(views[0], draws[0]), recolored(views[1], draws[1])

    def split(self, image: Tensor, rng: np.random.Generator) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Two views before their colours are changed, and the draws [2 `DRAW`] for that, or None without colour jitter.

        `recolor` changes the colours of a whole batch at once, on the device to which it is sent.
        """
        if self.crop == "own":
            views = [*super().__call__(image, rng), *super().__call__(image, rng)]
        elif self.crop == "shared":
            views = [*super().__call__(image, rng)] * 2
        else:
            views = [self._changed(*CentreCrop(self.size, self.native)(image), rng)] * 2
        if self.color == "none":
            return (views[0], views[1]), None
        if self.color == "shared":
            return (views[0], views[1]), draw_colors(rng).expand(2, -1)
        return (views[0], views[1]), torch.stack([draw_colors(rng), draw_colors(rng)])


class CentreCrop:
    """The largest centre crop with the aspect ratio of ``size`` (h, w), resized to it. Nothing is random.

    With ``native`` it is the centre of that size where the image is larger, so that nothing is reduced.
    """

    def __init__(self, size: tuple[int, int], native: bool = False) -> None:
        self.size, self.native = size, native

    def __call__(self, image: Tensor, rng: np.random.Generator | None = None) -> tuple[Tensor]:
        """One view of an image [c h w], of the same dtype and resized to ``size``; ``rng`` is not used."""
        # Cutting before resizing shows the same picture and never builds a huge strip out of a long, thin image.
        height, width = image.shape[-2:]
        if self.native and height >= self.size[0] and width >= self.size[1]:
            top, left = (height - self.size[0]) // 2, (width - self.size[1]) // 2
            return (resize_part(image, top, left, *self.size, self.size),)
        return (resize_part(image, *centre_part(height, width, self.size[1] / self.size[0]), self.size),)


def centre_part(height: int, width: int, ratio: float) -> tuple[int, int, int, int]:
    """(top, left, h, w) in pixels of the largest centre crop whose width is ``ratio`` times its height."""
    h, w = min(height, max(1, round(width / ratio))), min(width, max(1, round(height * ratio)))
    return (height - h) // 2, (width - w) // 2, h, w


def resize_part(
    image: Tensor, top: int, left: int, h: int, w: int, size: tuple[int, int], mode: str = "bicubic"
) -> Tensor:
    """Resize a part of an image [c h w] to ``size`` by antialiased interpolation, bicubic or bilinear; dtype stays."""
    if image.dtype == torch.uint8 and len(image) == 3:
        # The same as below in one call, with a batch stride that marks the memory as channels-last, as decoders leave
        # it, so that torch makes no copy. Only its code for 3 channels gains by that.
        strides = image.stride()
        start = image.storage_offset() + top * strides[1] + left * strides[2]
        part = image.as_strided((1, 3, h, w), (max(3 * strides[0], image.shape[1] * strides[1]), *strides), start)
    else:
        part = image[None, :, top : top + h, left : left + w]
    if image.dtype != torch.uint8 and tuple(size) == (h, w):
        return part[0]  # pictures of recordings go beyond [0, 1]
    # uint8 stays uint8 all the way: torch resizes it several times faster than float.
    view = interpolate(part, size, mode=mode, antialias=True)[0]
    return view if view.dtype == torch.uint8 else view.clamp(0, 1)  # bicubic overshoots at edges
