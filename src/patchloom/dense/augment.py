"""Changes of images with boxes: large-scale jitter for training, and the plain fit into a canvas for testing."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from patchloom.data.augment import resize_part
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
    """

    def __init__(
        self,
        size: tuple[int, int],
        side: int | None,
        scale: tuple[float, float] = (0.5, 2.0),
        flip: bool = True,
        color: bool = True,
    ) -> None:
        self.size, self.side, self.scale, self.flip = size, side, scale, flip
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
        labels = truth.numpy()
        for _ in range(_TRIES + 1):
            top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
            seen = labels[top + nearest_indices(h, high)[:, None], left + nearest_indices(w, wide)]
            if (h, w) == (height, width) or _varied(seen):
                break
        view = resize_part(image, top, left, h, w, (high, wide), "bilinear")
        if self.flip and rng.random() < 0.5:
            view, seen = view.flip(-1), seen[:, ::-1]
        if self.distort is not None and len(view) == 3:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(rng.integers(2**63)))
                view = self.distort(view)
        return (self._filled(view),), self._filled_labels(seen)

    def _filled(self, view: Tensor) -> Tensor:
        if view.shape[-2:] == self.size:
            return view
        mean = view.mean((1, 2), dtype=torch.float32)
        filled = (mean if view.is_floating_point() else mean.round()).to(view.dtype)
        whole = filled[:, None, None].repeat(1, *self.size)
        whole[:, : view.shape[1], : view.shape[2]] = view
        return whole

    def _filled_labels(self, seen: np.ndarray) -> Tensor:
        whole = np.full(self.size, IGNORED, np.int16)
        whole[: seen.shape[0], : seen.shape[1]] = seen
        return torch.from_numpy(whole)


def resized_for_test(image: Tensor, side: int) -> Tensor:
    """An image [c h w] whose shorter side is ``side`` pixels; aspect ratio and dtype stay."""
    h, w = image.shape[-2:]
    size = tuple(max(1, round(length * side / min(h, w))) for length in (h, w))
    return image if size == (h, w) else resize_part(image, 0, 0, h, w, (size[0], size[1]), "bilinear")


class PhotometricDistortion(v2.RandomPhotometricDistort):
    """torchvision's, which is SSD's, but for the channels, which are never swapped: a sky does not become green."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw how much of each is changed."""
        return super().make_params(flat_inputs) | {"channel_permutation": None}


def cut(length: int, factor: float, size: int) -> tuple[int, int]:
    """How many pixels of a side are taken, and how many they become: at most ``size``."""
    becomes = min(size, max(1, round(length * factor)))
    return (length if becomes < size else min(length, max(1, round(size / factor)))), becomes


def nearest_indices(length: int, becomes: int) -> np.ndarray:
    """For each pixel of a resized side the one at its centre, int64 [becomes]."""
    return ((2 * np.arange(becomes) + 1) * length) // (2 * becomes)


def _varied(labels: np.ndarray) -> bool:
    """Whether no class has over 75 % of the pixels that count, and any does."""
    counts = np.bincount(labels.ravel().astype(np.int64) - IGNORED)[1:]
    return bool(len(counts)) and counts.max() <= _MAX_SHARE * counts.sum()


_LEAST = 1.0  # pixels of the canvas that each side of an object must have
_CUT = 0.01  # pixels by which a box reaches out of the crop, if more than rounding does so


class BoxTarget(NamedTuple):
    """What is known of a canvas.

    Attributes:
        objects: in pixels of the canvas.
        size: (h, w) of the part that shows the image, at the top left; the rest is padding.
    """

    objects: Objects
    size: tuple[int, int]


class BoxAugment:
    """Large-scale jitter (Ghiasi et al. 2021, arXiv 2012.07177): a random scale, then a random crop or padding.

    The image is resized so that it would just fit into the canvas, times a factor that is drawn evenly from ``scale``.
    What is larger than the canvas is cropped at random, what is smaller is padded with 0 to the right and below. ViTDet
    (Li et al. 2022, arXiv 2203.16527) has a canvas of 1024 pixels and a scale of 0.1 to 2.

    Args:
        size: of the canvas in pixels, (h, w) or both.
        scale: range of the factor; (1, 1) without ``flip`` is what `fit_for_test` does.
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
        """A canvas of an image [c h w], of the same dtype, and its objects.

        Objects out of the crop are dropped, and those of which less than a pixel is left. Of an object that is cut, the
        box is that of the mask that is left, where there are masks.
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
        view = resize_part(image, top, left, h, w, (out_h, out_w), "bilinear")
        objects = _moved(truth, (top, left, h, w), (out_h, out_w))
        if self.flip and rng.random() < 0.5:
            view, objects = view.flip(-1), _mirrored(objects, out_w)
        if self.distort is not None and len(view) == 3:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(rng.integers(2**63)))
                view = self.distort(view)
        masks = None if objects.masks is None else _padded(objects.masks, self.canvas)
        objects = Objects(objects.boxes, objects.labels, masks, objects.crowd)
        return (_padded(view, self.canvas),), BoxTarget(objects, (out_h, out_w))


def fit_for_test(
    image: Tensor, size: int | tuple[int, int], sides: tuple[int, int] | None = None
) -> tuple[Tensor, float, tuple[int, int]]:
    """An image [c h w] resized to fit just into a canvas, at its top left, with zeros around.

    Returns:
        The canvas [c h w]; by how much the image was resized, for `to_original`; and (h, w) of what is not padding.
    """
    canvas = _both(size)
    height, width = image.shape[-2:]
    factor = _factor((height, width), canvas)
    if sides is not None:
        factor = min(factor, _by_sides((height, width), sides))
    fitted = _resized(height, canvas[0], factor), _resized(width, canvas[1], factor)
    return _padded(resize_part(image, 0, 0, height, width, fitted, "bilinear"), canvas), factor, fitted


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
    return _clipped(boxes * boxes.new_tensor([across, down, across, down]), size)


def _both(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _factor(size: tuple[int, int], canvas: tuple[int, int]) -> float:
    return min(canvas[0] / size[0], canvas[1] / size[1])


def _by_sides(size: tuple[int, int], sides: tuple[int, int]) -> float:
    """The factor that makes the shorter side the first of ``sides``, unless the longer one would exceed the second."""
    return min(sides[0] / min(size), sides[1] / max(size))


def _resized(length: int, canvas: int, factor: float) -> int:
    return min(canvas, max(1, round(length * factor)))


def _moved(truth: Objects, part: tuple[int, int, int, int], size: tuple[int, int]) -> Objects:
    """The objects of a part (top, left, h, w) of an image that is resized to ``size``; those that are left."""
    (top, left, h, w), (out_h, out_w) = part, size
    by = truth.boxes.new_tensor([out_w / w, out_h / h, out_w / w, out_h / h])
    reaching = (truth.boxes - truth.boxes.new_tensor([left, top, left, top])) * by
    boxes = _clipped(reaching, size)
    left_over = ((boxes[:, 2:] - boxes[:, :2]) >= _LEAST).all(1)
    objects = _chosen(Objects(boxes, truth.labels, None, truth.crowd), left_over)
    if not truth.has_masks:
        return objects
    # NumPy picks single bytes several times faster than torch, and stops at the first pixel that is there
    across, down = left + nearest_indices(w, out_w), top + nearest_indices(h, out_h)
    masks = np.zeros((len(objects.labels), out_h, out_w), bool)
    for mask, k in zip(masks, left_over.nonzero()[:, 0].tolist(), strict=True):  # one whole mask in memory at a time
        mask[:] = np.take(np.take(truth.mask(k).numpy(), across, 1), down, 0)
    seen = torch.tensor([bool(mask.any()) for mask in masks], dtype=torch.bool)
    cut = ((reaching - boxes).abs().amax(1) > _CUT)[left_over]
    for k in (cut & seen).nonzero()[:, 0].tolist():
        ys, xs = np.flatnonzero(masks[k].any(1)), np.flatnonzero(masks[k].any(0))
        objects.boxes[k] = objects.boxes.new_tensor([xs[0], ys[0], xs[-1] + 1, ys[-1] + 1])
    return _chosen(Objects(objects.boxes, objects.labels, torch.from_numpy(masks), objects.crowd), seen)


def _mirrored(objects: Objects, width: int) -> Objects:
    x0, y0, x1, y1 = objects.boxes.unbind(1)
    masks = None if objects.masks is None else objects.masks.flip(-1)
    return Objects(torch.stack([width - x1, y0, width - x0, y1], 1), objects.labels, masks, objects.crowd)


def _chosen(objects: Objects, which: Tensor) -> Objects:
    """Some of the objects, by a mask bool [m]."""
    if which.all():
        return objects
    masks = None if objects.masks is None else objects.masks[which]
    return Objects(objects.boxes[which], objects.labels[which], masks, objects.crowd[which])


def _clipped(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    height, width = size
    return torch.minimum(boxes.clamp(min=0), boxes.new_tensor([width, height, width, height]))


def _padded(image: Tensor, canvas: tuple[int, int]) -> Tensor:
    """An image, or masks, [c h w] at the top left of a canvas of zeros."""
    height, width = image.shape[-2:]
    if (height, width) == canvas:
        return image
    whole = image.new_zeros(len(image), *canvas)
    whole[:, :height, :width] = image
    return whole
