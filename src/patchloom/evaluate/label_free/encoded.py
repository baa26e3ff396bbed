"""What the measures are taken of: an encoder's features of whole images, of some of their patches, and of crops.

Letters: n images, q crops of one image, d width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.data import RandomCrop, Source
from patchloom.data.batches import Augment
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import one_pass, pixel_features, pixels_size
from patchloom.evaluate.label_free.crops import AreaCrop, CropsOf
from patchloom.evaluate.label_free.kept import partial_means
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.encode import input_size, patch_count
from patchloom.nets.hierarchical import Encoder, is_hierarchical
from patchloom.nets.pooling import pooled_tokens
from patchloom.nets.weights import EncoderCard
from patchloom.patches.partition import random_partition

AREAS = (0.9, 0.5, 0.25)  # of two crops of an image, as shares of its largest centre crop
SHARES = (0.5, 0.25, 0.1)  # of the patches that enter
CROPS = 10  # of an image for LiDAR
LEAST = 32  # images: of fewer, ten neighbours would be a third
WHOLE = "whole"


@dataclass(frozen=True)
class LabelFreeFeatures:
    """Features of n images, float32 on the CPU: means of patch tokens, or raw pixels.

    Attributes:
        n: images that could be read.
        whole: [n d] of whole images; None of raw pixels.
        parts: [n d] where a share of the patches enters, by share; empty of raw pixels, and of a Swin.
        pairs: [n d] twice, of two crops, by their area; empty of recordings.
        many: [n q d] of crops as pre-training takes them; None of raw pixels and of recordings.
        unreadable: names of images that could not be read.
    """

    n: int
    whole: Tensor | None = None
    parts: dict[float, Tensor] = field(default_factory=dict)
    pairs: dict[float, tuple[Tensor, Tensor]] = field(default_factory=dict)
    many: Tensor | None = None
    unreadable: tuple[str, ...] = ()


def drawn_images(source: Source, images: int, seed: int) -> Source:
    """At most so many ``images`` of a source, drawn with the seed, in their order.

    Raises:
        PatchloomError: that is fewer than 32.
    """
    _check_count(min(len(source), images), source)
    if len(source) <= images:
        return source
    return source.subset(np.sort(np.random.default_rng(seed).permutation(len(source))[:images]))


def _check_count(n: int, source: Source) -> None:
    if n < LEAST:
        raise PatchloomError(
            f"{n} test {source.noun} of {source.name} are too few to measure neighbours among: {LEAST} or more that "
            "can be read are needed (of a folder without a test part, a fifth is for testing: "
            f"give {5 * LEAST} or more)"
        )


def encoded(name: str, vit: Encoder, card: EncoderCard, source: Source, settings: EvalSettings) -> LabelFreeFeatures:
    """All features of an encoder that the measures need, in two passes over the images.

    Args:
        name: what the encoder is called where a line says what is being done.
        vit, card: the encoder; it is moved to the device of the settings.
        source: images or recordings, with or without labels.
        settings: the seed, by which patches and crops are drawn, alike for every encoder of one grid and size; device
            and reading.

    Raises:
        PatchloomError: fewer than 32 images can be read, or features are not finite.
    """
    n, drawn, done = patch_count(vit), torch.Generator().manual_seed(settings.seed), 0
    (order,) = random_partition(len(source), n, (n,), drawn)

    def wholes_and_parts(images: Tensor) -> dict[str, Tensor]:
        nonlocal done
        each = order[done : done + len(images)].to(images.device)
        done += len(images)
        found = {WHOLE: pooled_tokens(vit, images)["mean"]}
        if not is_hierarchical(vit):
            found |= {str(share): part for share, part in partial_means(vit, images, each, SHARES).items()}
        return found

    wholes = one_pass(vit, card, source, wholes_and_parts, settings.at, **_reading(source, name, settings))
    tokens = dict(wholes.tokens)
    whole = tokens.pop(WHOLE)
    _check_count(len(whole), source)
    parts = {float(share): part for share, part in tokens.items()}
    if source.sound is not None:
        return LabelFreeFeatures(len(whole), whole, parts, unreadable=tuple(wholes.unreadable))
    size = input_size(vit)
    crops = CropsOf(source, [*_pairs(size), *[RandomCrop(size)] * CROPS], settings.seed)

    def means(images: Tensor) -> dict[str, Tensor]:
        return {WHOLE: pooled_tokens(vit, images)["mean"]}

    cut = one_pass(vit, card, crops, means, settings.at, **_reading(crops, name, settings)).tokens[WHOLE]
    each = cut.unflatten(0, (-1, len(crops.crops)))  # an image that cannot be read has no crop at all
    many = each[:, -CROPS:]
    return LabelFreeFeatures(len(whole), whole, parts, _by_area(each), many, tuple(wholes.unreadable))


def encoded_pixels(
    name: str, size: tuple[int, int], card: EncoderCard, source: Source, settings: EvalSettings
) -> LabelFreeFeatures:
    """The same crops as raw pixels, of images as an encoder for ``size`` (h, w) is given them, at most 32 a side.

    Raises:
        PatchloomError: no image can be read.
    """
    small = pixels_size(size)
    crops = CropsOf(source, _pairs(small), settings.seed)
    found = pixel_features(crops, small, card.mean, card.std, **_reading(crops, name, settings), labels=False)
    each = found.tokens["pixels"].unflatten(0, (-1, len(crops.crops)))
    return LabelFreeFeatures(len(each), pairs=_by_area(each), unreadable=tuple(dict.fromkeys(found.unreadable)))


def _pairs(size: tuple[int, int]) -> list[Augment]:
    return [AreaCrop(size, area) for area in AREAS for _ in range(2)]


def _by_area(each: Tensor) -> dict[float, tuple[Tensor, Tensor]]:
    """Two crops of each area, from features [n crops d] in the order of `_pairs`."""
    return {area: (each[:, 2 * i], each[:, 2 * i + 1]) for i, area in enumerate(AREAS)}


def _reading(source: Source, name: str, settings: EvalSettings) -> dict[str, Any]:
    what = "crops" if isinstance(source, CropsOf) else source.noun
    return {**settings.reading(source), "what": f"{name}: features of {len(source):,} {what}"}
