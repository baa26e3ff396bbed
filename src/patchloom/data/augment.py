"""Random augmentation of one image. A call returns a tuple of views, because some tasks need several."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from patchloom.errors import check_type
from patchloom.options.recipes import Border
from patchloom.options.tasks import Coloring, Sharing

# Colour jitter: drawn per image on the CPU, applied to a whole batch at once on any device.


_CHANCE, _GREY = 0.8, 0.2
_MAX_CHANGE = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
_LUMA = (0.2989, 0.587, 0.114)  # torchvision's
_RADIUS = 0.1, 2.0  # of a blur
# a draw: whether to jitter, to convert to grey and to solarise, the radius of a blur, the four factors, and their order
DRAW = 4 + 2 * len(_MAX_CHANGE)


def draw_colors(rng: np.random.Generator) -> Tensor:
    """Draw the colour jitter of one image: float32 [`DRAW`], for `plan_colors`.

    Brightness, contrast and saturation change by up to 0.4, 0.4 and 0.2, and hue by up to 0.1 of the circle, in random
    order, with probability 0.8; the image becomes grey with 0.2 (ExtreMA, as MoCo v3).
    """
    jitter, grey = rng.random() < _CHANCE, rng.random() < _GREY
    factors = [rng.uniform(-limit, limit) + (name != "hue") for name, limit in _MAX_CHANGE.items()]
    return torch.tensor([jitter, grey, 0, 0, *factors, *rng.permutation(len(_MAX_CHANGE))], dtype=torch.float32)


def draw_second_colors(rng: np.random.Generator) -> Tensor:
    """Draw the changes of the second view of LUT's program: float32 [`DRAW`].

    The colour jitter of `draw_colors` with probability 0.8, and then one of grey, solarised and blurred; each is as
    likely. The standard deviation of the blur is 0.1 to 2 pixels.
    """
    draw, kind = draw_colors(rng), int(rng.integers(3))
    draw[1:4] = torch.tensor([kind == 0, kind == 1, rng.uniform(*_RADIUS) if kind == 2 else 0.0])
    return draw


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

    Images without 3 channels are neither grey nor changed in saturation or hue; the rest is per channel.
    """
    jitter, grey, solarized, radius, factors, order = draws.split([1, 1, 1, 1, *[len(_MAX_CHANGE)] * 2], dim=1)
    names = [*_MAX_CHANGE][: len(_MAX_CHANGE) if channels == 3 else 2]
    parts = []
    for turn in order.T:
        for number, name in enumerate(names):
            rows = ((jitter[:, 0] > 0) & (turn == number)).nonzero()[:, 0]
            parts.append((name, rows, factors[rows, number]))
    afterwards = {"grey": grey, "solarize": solarized, "blur": radius}
    for name, strength in afterwards.items():
        if name != "grey" or channels == 3:
            rows = (strength[:, 0] > 0).nonzero()[:, 0]
            parts.append((name, rows, strength[rows, 0]))
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


def _luma(x: Tensor) -> Tensor:
    red, green, blue = (channel * weight for channel, weight in zip(x.split(1, dim=1), _LUMA, strict=True))
    return red + green + blue


def _blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(other, x, factor).clamp_(0, 1)


def _contrast(x: Tensor, factor: Tensor) -> Tensor:
    mean = _luma(x).mean((1, 2, 3), keepdim=True) if x.shape[1] == 3 else x.mean((2, 3), keepdim=True)
    return _blend(x, mean.expand_as(x), factor)


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
        parts.append(value - torch.minimum(k, 4 - k).clamp_(0, 1).mul_(chroma))
    return torch.stack(parts, dim=1)


def _blur(x: Tensor, radius: Tensor) -> Tensor:
    """Blur x [b c h w] by Gaussians with standard deviations ``radius`` [b 1 1 1] of at most 2 pixels, as Pillow does.

    Three passes of a box with a fraction of a pixel at its ends, first along rows, with the border repeated (Gwosdek et
    al. 2011; Pillow's GaussianBlur).
    """
    variance = radius.square() / 3
    whole = (((12 * variance + 1).sqrt() - 1) / 2).floor()
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1).square()))
    box = whole + part
    weights = [(box + 1 - apart).clamp(0, 1) / (2 * box + 1) for apart in range(3)]
    for axis, border in ((-1, (2, 2, 0, 0)), (-2, (0, 0, 2, 2))):
        for _ in range(3):
            wide, n = pad(x, border, mode="replicate"), x.shape[axis]
            x = x * weights[0]
            for apart in (1, 2):
                for start in (2 - apart, 2 + apart):
                    x.addcmul_(wide.narrow(axis, start, n), weights[apart])
    return x


_CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": lambda x, factor: (x * factor).clamp_(0, 1),
    "contrast": _contrast,
    "saturation": lambda x, factor: _blend(x, _luma(x).expand_as(x), factor),
    "hue": _hue,
    "grey": lambda x, _: _luma(x).expand(-1, 3, -1, -1),
    "solarize": lambda x, _: torch.where(x < 0.5, x, 1 - x),  # inverts the upper half of the values
    "blur": _blur,
}


# RandAugment of single views, in pre-training and in fine-tuning.


class RandAugment:
    """timm's RandAugment, ``rand-mM-mstdS-inc1``, as in DeiT's and MAE's programs (Cubuk et al. 2020).

    Two of 15 operations, each applied with probability 0.5. Colour operations change all channels of a view alike. A
    view with other than 1 or 3 channels is a stack of grey pictures: saturation does not change it, and contrast is
    that of each channel. timm's operations need 8 bits, so the range of a float view has 256 levels meanwhile.

    Args:
        magnitude: strength of the operations, in 0 ... `MAX_MAGNITUDE`.
        std: standard deviation of the strength, which is drawn for each operation.
        fill: values per channel, in [0, 1] units, for pixels from outside the view.
    """

    def __init__(self, magnitude: float, std: float, fill: Sequence[float]) -> None:
        self.magnitude, self.std, self.fill = magnitude, std, tuple(fill)

    def __call__(self, view: Tensor, rng: np.random.Generator) -> Tensor:
        """Change a view [c h w], uint8 or float in [0, 1], by operations that ``rng`` draws; shape and dtype stay."""
        seed = int(rng.integers(2**32))
        if len(view) in (1, 3):
            return self._changed(view, seed, self.fill)
        return torch.cat([self._changed(one[None], seed, self.fill[:1]) for one in view])

    def _changed(self, picture: Tensor, seed: int, fill: Sequence[float]) -> Tensor:
        """Change a picture [1 h w] or [3 h w]."""
        low, unit = 0.0, 1 / 255
        levels = picture
        if picture.is_floating_point():
            low, high = (value.item() for value in picture.aminmax())
            unit = (high - low) / 255 or 1.0
            levels = ((picture - low) / unit).round().to(torch.uint8)
        array = levels.permute(1, 2, 0).contiguous().numpy()
        filling = [min(255, max(0, round((value - low) / unit))) for value in fill]
        with _seeded(seed):
            made = self.transform(filling)(Image.fromarray(array if len(picture) == 3 else array[..., 0]))
        changed = np.array(made).reshape(array.shape)
        if picture.is_floating_point():
            if np.array_equal(changed, array):  # all bits stay
                return picture
            return (torch.from_numpy(changed).permute(2, 0, 1) * unit + low).to(picture.dtype)
        return torch.from_numpy(changed).permute(2, 0, 1)

    def transform(self, fill: Sequence[int]) -> Callable[[Image.Image], Image.Image]:
        """Return timm's transform, which draws from Python's and NumPy's global generators."""
        from timm.data import auto_augment  # slow to import, and most runs do not need it

        color = fill[0] if len(fill) == 1 else tuple(fill)
        hparams = {"img_mean": color, "interpolation": Image.Resampling.BICUBIC, "magnitude_std": self.std}
        names = auto_augment.rand_augment_choices("", increasing=True)
        operations = auto_augment.rand_augment_ops(self.magnitude, hparams=hparams, transforms=names)
        for one in operations:
            if one.name == "PosterizeIncreasing":
                one.aug_fn = partial(_posterize, one.aug_fn)
        return auto_augment.RandAugment(operations)


def _posterize(operation: Callable[..., Image.Image], picture: Image.Image, bits: int, **how: Any) -> Image.Image:
    """Posterise a picture; 0 bits, timm's at the largest magnitude, make it black, which newer Pillows refuse."""
    return operation(picture, bits, **how) if bits else picture.point([0] * (256 * len(picture.getbands())))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's global generators inside this block."""
    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


# random crop or colour jitter of two views: none, the same for both, or one for each
Change = Callable[[Tensor, np.random.Generator], Tensor]

# range of the area of crops at native scale, relative to the view's: sides differ by a factor of up to 1.4
_NATIVE = (0.5, 2.0)
# crops of the whole image with more pixels around it: black ones (DeiT at 32 pixels), or reflected ones (LUT's program)
_PADDING = 4  # pixels, in both programs
_LONGEST = 8  # times the view's aspect ratio: a longer, thinner image is cut before it is resized
_USUAL = 0.2  # smallest share of the area, for images that are hardly larger than the view


class ImagePart(NamedTuple):
    """Part of an image that is to be resized to a view.

    Attributes:
        image: whole image [c h w].
        box: top, left, height and width of the part in pixels.
        size: (h, w) of the view.
        mirrored: whether the view is mirrored.
    """

    image: Tensor
    box: tuple[int, int, int, int]
    size: tuple[int, int]
    mirrored: bool = False

    def view(self) -> Tensor:
        """Return the view [c h w], of the image's dtype."""
        view = resize_part(self.image, *self.box, self.size)
        return view.flip(-1) if self.mirrored else view


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
        border: crop of ``size`` from the whole image, which is resized to that size and padded by 4 pixels, instead
            of a part of it: with black pixels (padded) or reflected ones.

    Attributes:
        crops: number of different crops of an image in a call.
        n_views: number of views that a call returns; a task checks that it gets as many.
        resizes: whether it resizes crops, or leaves that to the device, see `without_resizing`.
    """

    crops = 1
    n_views = 1
    resizes = True

    def __init__(
        self,
        size: tuple[int, int],
        scale: tuple[float, float] = (0.2, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: bool = True,
        randaugment: Change | None = None,
        native: bool = False,
        border: Border | None = None,
    ) -> None:
        # ratios are relative to the target's, so that a wide target shows wide parts instead of stretched ones
        aspect = size[1] / size[0]
        self.size, self.scale, self.flip, self.randaugment = size, scale, flip, randaugment
        self.ratio, self.native, self.border = (ratio[0] * aspect, ratio[1] * aspect), native, border

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """Return one view of an image [c h w], of the same dtype and resized to ``size``."""
        if self.border is not None:
            view = self._padded(image, rng)
            mirrored = self.flip and rng.random() < 0.5
            return (self._changed(view.flip(-1) if mirrored else view, rng),)
        height, width = image.shape[-2:]
        box = self._part(height, width, rng)
        return (self._viewed(ImagePart(image, box, self.size, self.flip and rng.random() < 0.5), rng),)

    def _viewed(self, part: ImagePart, rng: np.random.Generator) -> Any:
        """Return the view of a part, or the part itself for the device to resize."""
        return self._changed(part.view(), rng) if self.resizes else part

    def without_resizing(self) -> RandomCrop:
        """Return a copy with the same draws, of which the device resizes every `ImagePart`, in `split` or a call."""
        if self.border is not None or self.randaugment is not None:
            raise ValueError("what follows resizing cannot precede it")
        one = copy.copy(self)
        one.resizes = False
        return one

    def _changed(self, view: Tensor, rng: np.random.Generator) -> Tensor:
        return view if self.randaugment is None else self.randaugment(view, rng)

    def _padded(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        """Crop the resized and padded image, like torchvision's Resize and RandomCrop with ``padding=4``."""
        (h, w), (height, width) = self.size, image.shape[-2:]
        tallest, widest = (max(1, _LONGEST * width * h // w), max(1, _LONGEST * height * w // h))
        for axis, side, longest in ((1, height, tallest), (2, width, widest)):
            if side > longest:
                image = image.narrow(axis, int(rng.integers(side - longest + 1)), longest)
        height, width = image.shape[-2:]
        # as little as covers the view; the other side may be longer than is needed
        whole = (h, h * width // height) if h * width >= w * height else (w * height // width, w)
        if whole != (height, width):
            image = resize_part(image, 0, 0, height, width, whole)
        places, inside = [], []
        for side, length in zip(whole, self.size, strict=True):
            start = int(rng.integers(side + 2 * _PADDING - length + 1)) - _PADDING
            place = torch.arange(start, start + length)
            inside.append((place >= 0) & (place < side))
            if self.border == "reflected":
                place = side - 1 - (side - 1 - place.abs()).abs()
            places.append(place.clamp(0, side - 1))
        view = image[:, places[0]][:, :, places[1]]
        return view if self.border == "reflected" else view * (inside[0][:, None] & inside[1])

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

    color: Coloring = "own"

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """Return the views of an image [c h w], of the same dtype and resized to ``size``."""
        views, draws = self.split(image, rng)
        if draws is None:
            return views
        made = []
        for view, draw in zip(views, draws, strict=True):
            changed = recolor(view[None], plan_colors(draw[None], len(view)))[0]
            made.append(changed if view.is_floating_point() else (changed * 255).round().to(view.dtype))
        return tuple(made)

    def split(self, image: Tensor, rng: np.random.Generator) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return the views before colour changes, and a draw [`DRAW`] for each, or None without colour jitter.

        `recolor` changes the colours of a whole batch at once, on its device.
        """
        return super().__call__(image, rng), draw_colors(rng)[None]


class TwoViews(ColoredCrop):
    """Two views of an image, for a student and a teacher; RandAugment changes both alike if they have the same crop.

    Args:
        size: (h, w) of each view in pixels.
        crop: the centre for both (none), one random crop for both (shared), or one for each (own).
        color: no colour jitter (none), the same for both (shared), or one for each (own), see `draw_colors`; or
            `draw_second_colors` for the second view alone (second).
        crop_options: scale, ratio, flip, randaugment and border of `RandomCrop`.
    """

    n_views = 2

    def __init__(
        self, size: tuple[int, int], *, crop: Sharing = "own", color: Coloring = "none", **crop_options: Any
    ) -> None:
        super().__init__(size, **crop_options)
        check_type("task.crop", crop, Sharing)
        check_type("task.color", color, Coloring)
        self.crop, self.color = crop, color
        self.crops = 2 if crop == "own" else 1

    def split(self, image: Tensor, rng: np.random.Generator) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if self.crop == "own":
            views = *RandomCrop.__call__(self, image, rng), *RandomCrop.__call__(self, image, rng)
        elif self.crop == "shared":
            views = RandomCrop.__call__(self, image, rng) * 2
        else:
            views = (self._viewed(CentreCrop(self.size, self.native).part(image), rng),) * 2
        if self.color == "none":
            return views, None
        if self.color == "shared":
            return views, draw_colors(rng).expand(2, -1)
        if self.color == "second":
            return views, torch.stack([torch.zeros(DRAW), draw_second_colors(rng)])
        return views, torch.stack([draw_colors(rng), draw_colors(rng)])


class CentreCrop:
    """Centre crop of ``size`` (h, w). Nothing is random.

    Args:
        size: height and width.
        native: crop an image that is larger to exactly that size, without resizing.
        test_crop: side of the crop over the short side of the resized image. 1 is the largest centre crop with the
            aspect ratio of ``size``. 0.875 is the test transform of the papers' programs: for 224, the short side is
            resized to 256, and the centre is cut, to the same pixels as torchvision's ``Resize`` and ``CenterCrop``.
    """

    def __init__(self, size: tuple[int, int], native: bool = False, test_crop: float = 1.0) -> None:
        self.size, self.native, self.test_crop = size, native, test_crop

    def __call__(self, image: Tensor, rng: np.random.Generator | None = None) -> tuple[Tensor]:
        """Return one view of an image [c h w], of the same dtype and resized to ``size``; ``rng`` is not used."""
        height, width = image.shape[-2:]
        if self.test_crop >= 1 or self._fits(height, width):
            return (self.part(image).view(),)
        rows, columns = self.size
        h = min(height, _LONGEST * math.ceil(width * rows / columns))
        w = min(width, _LONGEST * math.ceil(height * columns / rows))
        tall, wide = int(rows / self.test_crop), int(columns / self.test_crop)  # rounded down, as by the programs
        if tall * w >= wide * h:
            wide = max(wide, int(tall * w / h))
        else:
            tall = max(tall, int(wide * h / w))
        whole = resize_part(image, (height - h) // 2, (width - w) // 2, h, w, (tall, wide))
        # halves are rounded to even, as in torchvision
        top, left = round((tall - rows) / 2), round((wide - columns) / 2)
        return (whole[:, top : top + rows, left : left + columns],)

    def part(self, image: Tensor) -> ImagePart:
        """Return the part of an image [c h w] that is shown, unless ``test_crop`` is below 1."""
        # Cutting before resizing shows the same picture and never builds a huge strip out of a long, thin image.
        height, width = image.shape[-2:]
        if self._fits(height, width):
            return ImagePart(image, ((height - self.size[0]) // 2, (width - self.size[1]) // 2, *self.size), self.size)
        return ImagePart(image, centre_part(height, width, self.size[1] / self.size[0]), self.size)

    def _fits(self, height: int, width: int) -> bool:
        """Return whether an image is cut at its own scale."""
        return self.native and height >= self.size[0] and width >= self.size[1]


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
