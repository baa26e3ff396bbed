"""Whether an image is known again by another crop of it, among crops of many."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data import Source
from patchloom.data.batches import Augment
from patchloom.data.crop import centre_part, resize_part
from patchloom.data.sources.base import digest

_AT_ONCE = 1024  # queries


def own_crop_found(first: Tensor, second: Tensor) -> Tensor:
    """Whether each image's first crop is nearest to its own second crop, [n] bool.

    Nearest is what has the largest cosine among the second crops of all n images; by chance it is the own one for 1/n
    of them. What is retrieved is the image, no class of it: instance discrimination's question (Wu et al. 2018), asked
    of an encoder as it is.

    Args:
        first, second: [n d] features of two crops of each image.
    """
    gallery = F.normalize(second.float(), dim=1).T
    nearest = [(F.normalize(some.float(), dim=1) @ gallery).argmax(1) for some in first.split(_AT_ONCE)]
    return torch.cat(nearest) == torch.arange(len(first), device=first.device)


class AreaCrop:
    """A part of an image at a random place, resized to ``size`` (h, w): a share ``area`` of its largest centre crop.

    It has the shape of ``size`` and is not mirrored.
    """

    def __init__(self, size: tuple[int, int], area: float) -> None:
        self.size, self.area = size, area

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor]:
        """One crop of an image [c h w], of the same dtype."""
        top, left, height, width = centre_part(*image.shape[-2:], self.size[1] / self.size[0])
        side = math.sqrt(self.area)
        h, w = max(1, round(side * height)), max(1, round(side * width))
        down, along = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
        return (resize_part(image, top + down, left + along, h, w, self.size),)


class CropsOf(Source):
    """Crops of the images of a source, q of each, one image's after the other's.

    Args:
        source: images; each is read once for its crops where they are read in order.
        crops: [q] what cuts them, each another one.
        seed: of the places; a crop's place depends on it, on its image's index and on its number alone.
    """

    def __init__(self, source: Source, crops: Sequence[Augment], seed: int) -> None:
        self.source, self.crops, self.seed, self.name = source, crops, seed, source.name
        self.in_memory = source.in_memory
        self._last: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.source) * len(self.crops)

    def read(self, i: int) -> Tensor:
        image, crop = divmod(i, len(self.crops))
        if self._last is None or self._last[0] != image:
            self._last = image, self.source.read(image)
        return self.crops[crop](self._last[1], np.random.default_rng((self.seed, image, crop)))[0]

    def describe(self, i: int) -> str:
        return self.source.describe(i // len(self.crops))

    def fingerprint(self) -> str:
        return digest(["crops", str(len(self.crops)), str(self.seed), self.source.fingerprint()])
