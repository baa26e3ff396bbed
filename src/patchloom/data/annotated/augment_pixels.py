"""Random views of an image and its label map, as mmseg's recipes for ADE20K make them, and resizing for the test."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from patchloom.data.annotated.base import IGNORED
from patchloom.data.crop import resize_part
from patchloom.errors import PatchloomError

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
        self.distort = Distort(hue=(-0.1, 0.1)) if color else None

    def __call__(self, image: Tensor, truth: Tensor, rng: np.random.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        """A view of an image [c h w], of the same dtype, and its label map, int16; both of ``size``.

        Raises:
            PatchloomError: the label map [h w] is of another size than the image.
        """
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
            seen = labels[top + nearest(h, high)[:, None], left + nearest(w, wide)]
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


class Distort(v2.RandomPhotometricDistort):
    """torchvision's, which is SSD's, but for the channels, which are never swapped: a sky does not become green."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw how much of each is changed."""
        return super().make_params(flat_inputs) | {"channel_permutation": None}


def cut(length: int, factor: float, size: int) -> tuple[int, int]:
    """How many pixels of a side are taken, and how many they become: at most ``size``."""
    becomes = min(size, max(1, round(length * factor)))
    return (length if becomes < size else min(length, max(1, round(size / factor)))), becomes


def nearest(length: int, becomes: int) -> np.ndarray:
    """For each pixel of a resized side the one at its centre, int64 [becomes]."""
    return ((2 * np.arange(becomes) + 1) * length) // (2 * becomes)


def _varied(labels: np.ndarray) -> bool:
    """Whether no class has over 75 % of the pixels that count, and any does."""
    counts = np.bincount(labels.ravel().astype(np.int64) - IGNORED)[1:]
    return bool(len(counts)) and counts.max() <= _MAX_SHARE * counts.sum()
