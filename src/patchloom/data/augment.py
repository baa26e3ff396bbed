"""Random augmentation of one image. A call returns a tuple of views, because some tasks need several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from patchloom.errors import check_type

# Colour jitter: drawn per image on the CPU, applied to a whole batch at once on any device.


_CHANCE, _GREY = 0.8, 0.2
_MAX_CHANGE = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
_LUMA = (0.2989, 0.587, 0.114)  # torchvision's
# a draw: whether to jitter, whether to convert to grey, the four factors, and their order
DRAW = 2 + 2 * len(_MAX_CHANGE)


def draw_colors(rng: np.random.Generator) -> Tensor:
    """Draw the colour jitter of one image: float32 [`DRAW`], for `plan_colors`.

    Brightness, contrast and saturation change by up to 0.4, 0.4 and 0.2, and hue by up to 0.1 of the circle, in random
    order, with probability 0.8; the image becomes grey with 0.2 (ExtreMA, as MoCo v3).
    """
    jitter, grey = rng.random() < _CHANCE, rng.random() < _GREY
    factors = [rng.uniform(-limit, limit) + (name != "hue") for name, limit in _MAX_CHANGE.items()]
    return torch.tensor([jitter, grey, *factors, *rng.permutation(len(_MAX_CHANGE))], dtype=torch.float32)


class ColorPlan(NamedTuple):
    """Colour changes of a batch, in order, each with the images to which it applies.

    The plan is made on the CPU, where the draws are, so that applying it on a GPU never waits for a tensor's value.

    Attributes:
        rows: int64 [r], indices of images in the batch, those of the first change first.
        factors: float32 [r], strength of the change for each image.
        changes: name of each change, and its number of rows.
    """

    rows: Tensor
    factors: Tensor
    changes: tuple[tuple[str, int], ...]

    def to(self, device: torch.device | str) -> ColorPlan:
        """Copy the plan to a device, asynchronously."""
        rows, factors = (one.to(device, non_blocking=True) for one in (self.rows, self.factors))
        return ColorPlan(rows, factors, self.changes)

    def first(self, images: int) -> ColorPlan:
        """Return the plan for the first ``images`` images of the batch."""
        counts, chosen = [count for _, count in self.changes], self.rows < images
        left = (int(part.sum()) for part in chosen.split(counts))
        changes = tuple((name, count) for (name, _), count in zip(self.changes, left, strict=True))
        return ColorPlan(self.rows[chosen], self.factors[chosen], changes)


def plan_colors(draws: Tensor, channels: int) -> ColorPlan:
    """Make the plan for draws [b `DRAW`] and images with ``channels`` channels.

    Images without 3 channels get brightness and contrast changes only, per channel.
    """
    jitter, grey, factors, order = draws.split([1, 1, len(_MAX_CHANGE), len(_MAX_CHANGE)], dim=1)
    names = [*_MAX_CHANGE][: len(_MAX_CHANGE) if channels == 3 else 2]
    parts = []
    for turn in order.T:
        for number, name in enumerate(names):
            rows = ((jitter[:, 0] > 0) & (turn == number)).nonzero()[:, 0]
            parts.append((name, rows, factors[rows, number]))
    if channels == 3:
        rows = (grey[:, 0] > 0).nonzero()[:, 0]
        parts.append(("grey", rows, torch.zeros(len(rows))))
    parts = [part for part in parts if len(part[1])]
    changes = tuple((name, len(rows)) for name, rows, _ in parts)
    none = torch.empty(0)
    return ColorPlan(
        torch.cat([none.long(), *(rows for _, rows, _ in parts)]),
        torch.cat([none, *(strengths for *_, strengths in parts)]),
        changes,
    )


def recolor(images: Tensor, plan: ColorPlan) -> Tensor:
    """Apply a plan to images [b c h w] on the same device, uint8 or float in [0, 1]; gives float32 in [0, 1]."""
    x = images.float() / 255 if images.dtype == torch.uint8 else images.float().clone()
    counts = [count for _, count in plan.changes]
    for (name, _), rows, factors in zip(plan.changes, plan.rows.split(counts), plan.factors.split(counts), strict=True):
        x[rows] = _CHANGES[name](x[rows], factors.view(-1, 1, 1, 1))
    return x


def recolor_view(view: Tensor, draw: Tensor) -> Tensor:
    """Apply a draw [`DRAW`] to one view [c h w]; the dtype stays."""
    changed = recolor(view[None], plan_colors(draw[None], len(view)))[0]
    return changed if view.is_floating_point() else (changed * 255).round().to(view.dtype)


def _luma(x: Tensor) -> Tensor:
    red, green, blue = (channel * weight for channel, weight in zip(x.split(1, dim=1), _LUMA, strict=True))
    return red + green + blue


def _blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(other, x, factor).clamp(0, 1)


def _brightness(x: Tensor, factor: Tensor) -> Tensor:
    return (x * factor).clamp(0, 1)


def _contrast(x: Tensor, factor: Tensor) -> Tensor:
    mean = _luma(x).mean((1, 2, 3), keepdim=True) if x.shape[1] == 3 else x.mean((2, 3), keepdim=True)
    return _blend(x, mean.expand_as(x), factor)


def _saturation(x: Tensor, factor: Tensor) -> Tensor:
    return _blend(x, _luma(x).expand_as(x), factor)


def _hue(x: Tensor, turn: Tensor) -> Tensor:
    """Shift the hue of x [b 3 h w] by ``turn`` [b 1 1 1] full circles, through hue, chroma and value."""
    r, g, b = x.unbind(1)
    value = torch.maximum(torch.maximum(r, g), b)
    chroma = value - torch.minimum(torch.minimum(r, g), b)
    some = torch.where(chroma > 0, chroma, 1.0)
    sector = torch.where(value == r, (g - b) / some, torch.where(value == g, (b - r) / some + 2, (r - g) / some + 4))
    turned = sector + 6 * turn[:, 0]
    parts = []
    for start in (5, 3, 1):  # red, green, blue
        k = turned + start  # from -1 to 11; below 0 counts as 0 does
        k = torch.where(k >= 6, k - 6, k)
        parts.append(value - chroma * torch.minimum(k, 4 - k).clamp_(0, 1))
    return torch.stack(parts, dim=1)


def _grey(x: Tensor, factor: Tensor) -> Tensor:
    return _luma(x).expand(-1, 3, -1, -1)


_CHANGES = {"brightness": _brightness, "contrast": _contrast, "saturation": _saturation, "hue": _hue, "grey": _grey}


# RandAugment of single views, in pre-training and in fine-tuning.


MAX_MAGNITUDE = 10
# timm's RandAugment of the papers (rand-m9-mstd0.5-inc1): two operations, each with probability 0.5, in 0 ... 10; and
# torchvision's bins; its operations and their strengths differ somewhat from timm's, which DeiT has
_OPERATIONS, _PROBABILITY, _BINS = 2, 0.5, 31


class RandAugment:
    """Two random operations on a view, each with probability 0.5 (Cubuk et al. 2020, with DeiT's draws).

    Colour operations change all channels of a view alike. They treat a view with other than 1 or 3 channels as a stack
    of grey pictures: saturation does not change it, and contrast is that of each channel.

    Args:
        magnitude: strength of the operations, in 0 ... `MAX_MAGNITUDE`.
        std: standard deviation of the strength, which is drawn for each operation.
        fill: values per channel, in [0, 1] units, for pixels from outside the view.
    """

    def __init__(self, magnitude: float, std: float, fill: Sequence[float]) -> None:
        self.magnitude, self.std, self.fill = magnitude, std, tuple(fill)

    def __call__(self, view: Tensor, rng: np.random.Generator) -> Tensor:
        """Change a view [c h w], uint8 or float in [0, 1], by operations that ``rng`` draws; shape and dtype stay."""
        from torchvision.transforms import v2  # slow to import, and most runs do not need it

        colored = len(view) in (1, 3)  # to torchvision, any other number of channels is a batch of grey images
        unit = 255 if view.dtype == torch.uint8 else 1
        fill = [unit * value for value in (self.fill if colored else (float(np.mean(self.fill)),))]
        with torch.random.fork_rng(devices=[]):  # torchvision draws from torch's global generator
            torch.default_generator.manual_seed(int(rng.integers(2**63)))  # a GPU's generator is not changed
            for _ in range(_OPERATIONS):
                magnitude = np.clip(rng.normal(self.magnitude, self.std), 0, MAX_MAGNITUDE)
                if rng.random() < _PROBABILITY:
                    step = round(float(magnitude) / MAX_MAGNITUDE * (_BINS - 1))
                    augment = v2.RandAugment(1, step, _BINS, v2.InterpolationMode.BILINEAR, fill)
                    view = augment(view) if colored else augment(view[:, None])[:, 0]
        return view


# random crop or colour jitter of two views: none, the same for both, or one for each
Sharing = Literal["none", "shared", "own"]
Change = Callable[[Tensor, np.random.Generator], Tensor]

_NATIVE = (
    0.5,
    2.0,
)  # range of the area of crops at native scale, relative to the view's: sides differ by a factor of up to 1.4
_USUAL = 0.2  # smallest share of the area, for images that are hardly larger than the view


class RandomCrop:
    """Random crop of an image, resized to ``size`` and mirrored with probability 0.5 (Inception's crop).

    Args:
        size: (h, w) of the view in pixels.
        scale: range of the crop's area, as a share of the image's.
        ratio: range of the crop's width over its height, as a multiple of that of ``size``.
        flip: whether to mirror at all.
        randaugment: function that then changes a view [c h w], with a random generator; None for no change.
        native: whether the crop's area is drawn from 0.5 to 2 times that of the view, in pixels of the image, instead
            of by ``scale``: an image of any size is then seen at about its own scale. For images hardly larger than
            the view, crops are drawn as usual.

    Attributes:
        crops: number of different crops of an image in a call.
        n_views: number of views that a call returns; a task checks that it gets as many.
    """

    crops = 1
    n_views = 1

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
        """Return one view of an image [c h w], of the same dtype and resized to ``size``."""
        height, width = image.shape[-2:]
        view = resize_part(image, *self._part(height, width, rng), self.size)
        if self.flip and rng.random() < 0.5:
            view = view.flip(-1)
        return (self._changed(view, rng),)

    def _changed(self, view: Tensor, rng: np.random.Generator) -> Tensor:
        return view if self.randaugment is None else self.randaugment(view, rng)

    def _part(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Draw (top, left, h, w) in pixels, like torchvision's RandomResizedCrop."""
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
    """Return the range of a crop's area, as a share of the image's (h, w), for views (h, w) at about native scale."""
    share = view[0] * view[1] / (image[0] * image[1])
    return min(_USUAL, _NATIVE[0] * share), min(1.0, _NATIVE[1] * share)


def cuts_natively(augment: object) -> bool:
    """Return whether a task's augmentation crops at native scale."""
    return bool(getattr(augment, "native", False))


class ColoredCrop(RandomCrop):
    """Random crop with colour jitter, see `draw_colors`."""

    color = "own"

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """Return one view of an image [c h w], of the same dtype and resized to ``size``."""
        views, draws = self.split(image, rng)
        return (recolor_view(views[0], draws[0]),)

    def split(self, image: Tensor, rng: np.random.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the view before colour changes, and the draw [1 `DRAW`] for it, as `TwoViews.split`."""
        return super().__call__(image, rng), draw_colors(rng)[None]


class TwoViews(RandomCrop):
    """Two views of an image, for a student and a teacher; RandAugment changes both alike if they have the same crop.

    Args:
        size: (h, w) of each view in pixels.
        crop: the centre for both (none), one random crop for both (shared), or one for each (own).
        color: no colour jitter (none), the same for both (shared), or one for each (own); see `draw_colors`.
        crop_options: scale, ratio, flip and randaugment of `RandomCrop`.
    """

    n_views = 2

    def __init__(
        self, size: tuple[int, int], *, crop: Sharing = "own", color: Sharing = "none", **crop_options: Any
    ) -> None:
        super().__init__(size, **crop_options)
        check_type("task.crop", crop, Sharing)
        check_type("task.color", color, Sharing)
        self.crop, self.color = crop, color
        self.crops = 2 if crop == "own" else 1

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """Return two views of an image [c h w], of the same dtype and resized to ``size``."""
        views, draws = self.split(image, rng)
        if draws is None:
            return views
        return recolor_view(views[0], draws[0]), recolor_view(views[1], draws[1])

    def split(self, image: Tensor, rng: np.random.Generator) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Return two views before colour changes, and the draws [2 `DRAW`] for these, or None without colour jitter.

        `recolor` changes the colours of a whole batch at once, on its device.
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
    """Largest centre crop with the aspect ratio of ``size`` (h, w), resized to it. Nothing is random.

    With ``native``, an image that is larger is cropped to exactly that size, without resizing.
    """

    def __init__(self, size: tuple[int, int], native: bool = False) -> None:
        self.size, self.native = size, native

    def __call__(self, image: Tensor, rng: np.random.Generator | None = None) -> tuple[Tensor]:
        """Return one view of an image [c h w], of the same dtype and resized to ``size``; ``rng`` is not used."""
        # Cutting before resizing shows the same picture and never builds a huge strip out of a long, thin image.
        height, width = image.shape[-2:]
        if self.native and height >= self.size[0] and width >= self.size[1]:
            top, left = (height - self.size[0]) // 2, (width - self.size[1]) // 2
            return (resize_part(image, top, left, *self.size, self.size),)
        return (resize_part(image, *centre_part(height, width, self.size[1] / self.size[0]), self.size),)


def centre_part(height: int, width: int, ratio: float) -> tuple[int, int, int, int]:
    """Return (top, left, h, w) in pixels of the largest centre crop whose width is ``ratio`` times its height."""
    h, w = min(height, max(1, round(width / ratio))), min(width, max(1, round(height * ratio)))
    return (height - h) // 2, (width - w) // 2, h, w


def resize_part(
    image: Tensor, top: int, left: int, h: int, w: int, size: tuple[int, int], mode: str = "bicubic"
) -> Tensor:
    """Resize a part of an image [c h w] to ``size`` by antialiased interpolation, bicubic or bilinear; dtype stays."""
    if image.dtype == torch.uint8 and len(image) == 3:
        # The same as below in one call, with a batch stride that marks the memory as channels-last, as decoders leave
        # it, so that torch makes no copy. This is faster for 3 channels only.
        strides = image.stride()
        start = image.storage_offset() + top * strides[1] + left * strides[2]
        part = image.as_strided((1, 3, h, w), (max(3 * strides[0], image.shape[1] * strides[1]), *strides), start)
    else:
        part = image[None, :, top : top + h, left : left + w]
    if image.dtype != torch.uint8 and tuple(size) == (h, w):
        return part[0]  # pictures of recordings go beyond [0, 1]
    # uint8 is not converted: torch resizes it several times faster than float.
    view = interpolate(part, size, mode=mode, antialias=True)[0]
    return view if view.dtype == torch.uint8 else view.clamp(0, 1)  # bicubic overshoots at edges
