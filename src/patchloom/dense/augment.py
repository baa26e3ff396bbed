"""Changes of images with boxes: large-scale jitter for training, and the plain fit into a canvas for testing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.ops import clip_boxes_to_image, masks_to_boxes
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from patchloom.dense.annotations.base import IGNORED, Objects
from patchloom.errors import PatchloomError

# Random views of an image and its label map, as mmseg's recipes for ADE20K make them, and resizing for the test.


_MAX_SHARE, _TRIES = 0.75, 10  # mmseg's cat_max_ratio, and how often it draws another crop


class PixelAugment:
    """One random view of an image and its label map: resized, cut, mirrored, and with other colours.

    It is mmseg's training pipeline: the shorter side becomes ``side`` times a random factor, the aspect ratio stays,
    and a random crop of ``size`` is taken. A crop in which one class has over 75 % of the pixels that count is drawn
    again, up to 10 times. What the image lacks of ``size`` is filled up at the right and at the bottom, with the mean
    colour of the view and with `IGNORED`.

    The crop is cut out before it is resized, which takes the same time for images of any size; its sides in the image
    are whole numbers of pixels.

    Args:
        size: (h, w) of the view in pixels.
        side: what the shorter side becomes, in pixels; None: what it is.
        scale: range of the random factor, which is uniform.
        flip: whether to mirror every second view.
        color: whether to change brightness, contrast, saturation and hue, each with probability 0.5, where there are 3
            channels.
        rare: classes that some crops are aimed at.
        aimed: probability with which the crop of an image that shows one of them holds a pixel of it: a class of those
            in the image is drawn first, so that each counts alike, and then a pixel.
    """

    def __init__(
        self,
        size: tuple[int, int],
        side: int | None,
        scale: tuple[float, float] = (0.5, 2.0),
        flip: bool = True,
        color: bool = True,
        rare: Sequence[int] = (),
        aimed: float = 0.0,
    ) -> None:
        self.size, self.side, self.scale, self.flip = size, side, scale, flip
        self.rare, self.aimed = tuple(rare), aimed
        self.distort = PhotometricDistortion(hue=(-0.1, 0.1)) if color else None

    def __call__(self, image: Tensor, truth: Tensor, rng: np.random.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        """A view of an image [c h w], of the same dtype, and its label map, int16; both of ``size``."""
        height, width = image.shape[-2:]
        if truth.shape != (height, width):
            raise PatchloomError(
                f"an image of {height} x {width} pixels has a label map of {truth.shape[0]} x {truth.shape[1]}: label "
                "maps have the size of their images"
            )
        factor = (1.0 if self.side is None else self.side / min(height, width)) * rng.uniform(*self.scale)
        (h, high), (w, wide) = cut(height, factor, self.size[0]), cut(width, factor, self.size[1])
        target: tuple[int, int] | None = None  # row and column of a pixel of a rare class that the crop has to hold
        if self.aimed and rng.random() < self.aimed:
            labels = truth.numpy()
            if shown := [rare for rare in self.rare if (labels == rare).any()]:
                places = np.flatnonzero(labels == rng.choice(shown))
                row, column = divmod(int(rng.choice(places)), width)
                target = row, column
        for _ in range(_TRIES + 1):
            ranges = [(0, height - h), (0, width - w)]
            if target is not None:
                pairs = zip(ranges, (h, w), target, strict=True)
                ranges = [(max(0, place - length + 1), min(last, place)) for (_, last), length, place in pairs]
            top, left = (int(rng.integers(first, last + 1)) for first, last in ranges)
            part, becomes = (top, left, h, w), [high, wide]
            seen = F.resized_crop(truth[None], *part, becomes, v2.InterpolationMode.NEAREST_EXACT)
            counts = torch.bincount(seen.flatten() - IGNORED)[1:]
            varied = len(counts) and bool(counts.max() <= _MAX_SHARE * counts.sum())
            if target is not None or (h, w) == (height, width) or varied:
                break
        view = F.resized_crop(image, *part, becomes)
        if self.flip and rng.random() < 0.5:
            view, seen = F.horizontal_flip(view), F.horizontal_flip(seen)
        view = _distorted(view, self.distort, rng)
        return (fill_up(view, self.size),), _padded(seen, self.size, IGNORED)[0]


def fill_up(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Fill an image [c h w] up to at least ``size`` at the right and at the bottom, with its mean colour."""
    height, width = (max(pair) for pair in zip(image.shape[-2:], size, strict=True))
    if (height, width) == image.shape[-2:]:
        return image
    mean = image.mean((1, 2), dtype=torch.float32)
    return _padded(image, (height, width), (mean if image.is_floating_point() else mean.round()).tolist())


def resized_for_test(image: Tensor, side: int) -> Tensor:
    """An image [c h w] whose shorter side is ``side`` pixels; aspect ratio and dtype stay."""
    h, w = image.shape[-2:]
    size = [max(1, round(length * side / min(h, w))) for length in (h, w)]
    return F.resize(image, size)


class PhotometricDistortion(v2.RandomPhotometricDistort):
    """torchvision's, which is SSD's, but for the channels, which are never swapped: a sky does not become green."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw how much of each is changed."""
        return super().make_params(flat_inputs) | {"channel_permutation": None}


def cut(length: int, factor: float, size: int) -> tuple[int, int]:
    """Return the number of pixels to take along a side, and the number that they become, at most ``size``."""
    becomes = min(size, max(1, round(length * factor)))
    return (length if becomes < size else min(length, max(1, round(size / factor)))), becomes


def _distorted(view: Tensor, distort: v2.Transform | None, rng: np.random.Generator) -> Tensor:
    """A view [c h w] with other colours, drawn from ``rng``, where it has 3 channels."""
    if distort is None or len(view) != 3:
        return view
    with torch.random.fork_rng(devices=[]):  # torchvision draws from torch's global stream
        torch.default_generator.manual_seed(int(rng.integers(2**63)))  # and a GPU's stays as it is
        return distort(view)


_LEAST = 1.0  # pixels of the canvas that each side of an object must have
_CUT = 0.01  # pixels of the image by which a box is cut, if it is by more than rounding


class BoxTarget(NamedTuple):
    """Target of a canvas.

    Attributes:
        objects: objects in pixels of the canvas.
        size: (h, w) of the image at the top left; the rest is padding.
    """

    objects: Objects
    size: tuple[int, int]


class BoxAugment:
    """Large-scale jitter (Ghiasi et al. 2021, arXiv 2012.07177): a random scale, then a random crop or padding.

    The image is resized to fit into the canvas, times a factor drawn uniformly from ``scale``. Larger images are
    cropped at random, smaller ones are padded with 0 to the right and below. ViTDet (Li et al. 2022, arXiv 2203.16527)
    has a canvas of 1024 pixels and a scale of 0.1 to 2.

    Args:
        size: size of the canvas in pixels, (h, w) or one number for both.
        scale: range of the factor; (1, 1) without ``flip`` equals `fit_for_test`.
        flip: whether to mirror, with probability 0.5.
        color: whether to change brightness, contrast, saturation and hue, each with probability 0.5, where there are 3
            channels.
        sides: (least, largest) of the shorter side in pixels, drawn evenly in place of ``scale``, and the largest
            longer side, as mmdetection resizes; what is larger than the canvas is still cropped.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        scale: tuple[float, float] = (0.1, 2.0),
        flip: bool = True,
        color: bool = False,
        sides: tuple[int, int, int] | None = None,
    ) -> None:
        self.canvas, self.scale, self.flip, self.sides = _both(size), scale, flip, sides
        self.distort = PhotometricDistortion() if color else None

    def __call__(self, image: Tensor, truth: Objects, rng: np.random.Generator) -> tuple[tuple[Tensor, ...], BoxTarget]:
        """Return a canvas of an image [c h w], of the same dtype, and its objects.

        Objects outside the crop, or with less than a pixel inside, are dropped. The box of a cut object is that of the
        remaining mask, if there are masks.
        """
        height, width = image.shape[-2:]
        if self.sides is None:
            factor = _factor((height, width), self.canvas) * rng.uniform(*self.scale)
        else:
            least, largest, longer = self.sides
            factor = _by_sides((height, width), (int(rng.integers(least, largest + 1)), longer))
        # whole pixels of the image are cut out, so that only these are resized and boxes stay where their pixels are
        (h, out_h), (w, out_w) = cut(height, factor, self.canvas[0]), cut(width, factor, self.canvas[1])
        top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
        part, becomes = (top, left, h, w), [out_h, out_w]
        view, inside = F.resized_crop(image, *part, becomes), F.crop(_in_image(truth.boxes, (height, width)), *part)
        # resizing may round a box out of the image
        moved, left_over = F.sanitize_bounding_boxes(F.clamp_bounding_boxes(F.resize(inside, becomes)), min_size=_LEAST)
        boxes, labels, crowd = moved.as_subclass(Tensor), truth.labels[left_over], truth.crowd[left_over]
        masks: Tensor | None = None
        if truth.has_masks:
            masks = torch.zeros(len(labels), *becomes, dtype=torch.bool)
            for mask, k in zip(masks, left_over.nonzero()[:, 0].tolist(), strict=True):  # one whole mask in memory
                mask.copy_(F.resized_crop(truth.mask(k)[None], *part, becomes, v2.InterpolationMode.NEAREST_EXACT)[0])
            seen = masks.flatten(1).any(1)
            lost = _sides(truth.boxes) - _sides(inside.as_subclass(Tensor))
            redrawn = (lost > _CUT).any(1)[left_over] & seen
            boxes[redrawn] = masks_to_boxes(masks[redrawn]) + boxes.new_tensor([0, 0, 1, 1])  # theirs are inclusive
            boxes, labels, masks, crowd = boxes[seen], labels[seen], masks[seen], crowd[seen]
        boxes = _in_image(boxes, (out_h, out_w))
        if self.flip and rng.random() < 0.5:
            view, boxes = F.horizontal_flip(view), F.horizontal_flip(boxes)
            masks = None if masks is None else F.horizontal_flip(masks)
        view = _padded(_distorted(view, self.distort, rng), self.canvas)
        masks = None if masks is None else _padded(masks, self.canvas)
        objects = Objects(boxes.as_subclass(Tensor), labels, masks, crowd)
        return (view,), BoxTarget(objects, (out_h, out_w))


def fit_for_test(
    image: Tensor, size: int | tuple[int, int], sides: tuple[int, int] | None = None
) -> tuple[Tensor, float, tuple[int, int]]:
    """Resize an image [c h w] to fit into a canvas, at its top left, padded with zeros.

    Returns:
        The canvas [c h w]; the resize factors, for `to_original`; and (h, w) without the padding.
    """
    canvas = _both(size)
    height, width = image.shape[-2:]
    factor = _factor((height, width), canvas)
    if sides is not None:
        factor = min(factor, _by_sides((height, width), sides))
    fitted = _resized(height, canvas[0], factor), _resized(width, canvas[1], factor)
    return _padded(F.resize(image, list(fitted)), canvas), factor, fitted


def to_original(boxes: Tensor, factor: float, size: tuple[int, int]) -> Tensor:
    """Boxes on a canvas of `fit_for_test`, in pixels of the image itself and clipped to it.

    Args:
        boxes: float32 [m 4], x0 y0 x1 y1 in pixels of the canvas.
        factor: as `fit_for_test` returned it.
        size: (h, w) of the image.
    """
    height, width = size
    # what the resized sides were rounded to, so that the last pixel of the one is the last of the other
    across, down = width / max(1, round(width * factor)), height / max(1, round(height * factor))
    return clip_boxes_to_image(boxes * boxes.new_tensor([across, down, across, down]), size)


def _both(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _factor(size: tuple[int, int], canvas: tuple[int, int]) -> float:
    return min(canvas[0] / size[0], canvas[1] / size[1])


def _by_sides(size: tuple[int, int], sides: tuple[int, int]) -> float:
    """The factor that makes the shorter side the first of ``sides``, unless the longer one would exceed the second."""
    return min(sides[0] / min(size), sides[1] / max(size))


def _resized(length: int, canvas: int, factor: float) -> int:
    return min(canvas, max(1, round(length * factor)))


def _in_image(boxes: Tensor, size: tuple[int, int]) -> tv_tensors.BoundingBoxes:
    return tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size)


def _sides(boxes: Tensor) -> Tensor:
    return boxes[:, 2:] - boxes[:, :2]


def _padded(image: Tensor, canvas: tuple[int, int], fill: float | list[float] = 0) -> Tensor:
    """An image, or masks, [c h w] at the top left of a canvas of ``fill``."""
    height, width = image.shape[-2:]
    return F.pad(image, [0, 0, canvas[1] - width, canvas[0] - height], fill)
