"""Measures of an encoder that need no labels, one file each, and `label_free_rows`, all of them of one encoder.

What they are worth was measured: `benchmarks/label_free.py` compares them with the ranking by labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.augment import RandomCrop, centre_part, resize_part
from patchloom.data.loader import Augment
from patchloom.data.source import Source, digest
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import one_pass, pixel_features, pixels_size
from patchloom.evaluate.results import Row
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import encode, input_size, patch_count
from patchloom.nets.heads import pool, pooled_tokens
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.patches.partition import random_partition, share_of
from patchloom.questions.collapse import effective_rank
from patchloom.withhold.encoder_input import all_patches, mask_patches

# Whether an image is known again by another crop of it, among crops of many.


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
        top, left, height, width = centre_part(image.shape[-2], image.shape[-1], self.size[1] / self.size[0])
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


# Whether an image's neighbours stay the same when only some of its patches are seen.

_TIED = 1e-6  # difference of two cosines below which float32 features cannot tell which is the nearer one


def neighbour_overlap(whole: Tensor, partial: Tensor, k: int = 10) -> Tensor:
    """The share of each image's k nearest others that are so for a part of its patches as well, [n] float64.

    Nearest by cosine; the others are seen whole both times. By chance it is k / (n - 1). Others whose cosines differ by
    no more than float32 resolves are equally near, and share the places that are left among the k: what is counted is
    the expected share if chance chooses among them. Of constant features it is chance.

    Args:
        whole: [n d] features of all patches.
        partial: [n d] those of some patches of the same images.
        k: neighbours.
    """
    n = len(whole)
    if n - 1 <= k:
        raise ValueError(f"of {n} images each has {n - 1} others: {k} nearest would be all of them")
    found = []
    for own in torch.arange(n).split(_AT_ONCE):
        before, after = (_chosen(queries[own], whole, own, k) for queries in (whole, partial))
        found.append((before * after).sum(1) / k)
    return torch.cat(found)


def _chosen(queries: Tensor, others: Tensor, own: Tensor, k: int) -> Tensor:
    """Return how probable it is that each other is among the k nearest, [q n] float64; the sum of each row is k.

    Args:
        queries: [q d].
        others: [n d].
        own: [q] the place of each query among the others, where it is not looked for.
        k: neighbours.
    """
    near = F.normalize(queries.double(), dim=1) @ F.normalize(others.double(), dim=1).T
    near[torch.arange(len(own)), own] = -torch.inf
    last = near.topk(k, dim=1).values[:, -1:]
    above, level = near > last + _TIED, (near - last).abs() <= _TIED
    left = (k - above.sum(1, keepdim=True)) / level.sum(1, keepdim=True)
    return above.double() + left * level


def partial_means(vit: Encoder, images: Tensor, order: Tensor, shares: Sequence[float]) -> dict[float, Tensor]:
    """Means [b d] of the patch tokens where only a share of the patches enters, by the shares.

    Args:
        vit: a plain ViT: of a Swin no patches can be left out as these are.
        images: [b c h w] normalised.
        order: [b n] all patches of each image in a random order; the first ones enter, at least one.
        shares: of the patches.
    """
    n = patch_count(vit)
    given, found = all_patches(images, n), {}
    for share in shares:
        some = mask_patches(given, order[:, : max(1, share_of(n, share))])
        found[share] = pool(vit, encode(vit, some, norm=False), None)["mean"]
    return found


# LiDAR: in how many directions images differ more than crops of one image do.


DELTA = 1e-4  # of the paper


def lidar(features: Tensor, delta: float = DELTA) -> float:
    """LiDAR of features [n q d], of q augmented crops of each of n images (Thilak et al., ICLR 2024).

    The effective rank, as of RankMe, of the matrix of linear discriminant analysis whose classes are the images:
    Σ_w^-1/2 Σ_b Σ_w^-1/2 [d d]. Σ_b is the covariance of the images' means, Σ_w that of crops about their image's mean
    plus ``delta`` on the diagonal. From 1 to min(n - 1, d); directions in which crops of one image differ as much as
    images do count for little. Means are over n and over n·q, without a correction for small numbers.
    """
    n, q, d = features.shape
    if n < 2 or q < 2:
        raise ValueError(f"{q} crops of each of {n} images: LiDAR needs two crops or more of two images or more")
    crops = features.double().cpu()
    means = crops.mean(1)
    apart = means - means.mean(0)
    within = (crops - means[:, None]).flatten(0, 1)
    scatter = within.T @ within / (n * q) + delta * torch.eye(d, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(scatter)
    whitened = apart @ (vectors * values.rsqrt()) @ vectors.T
    # the matrix is symmetric and has no negative eigenvalue: its singular values are its eigenvalues
    return effective_rank(whitened.T @ whitened / n)


# What the spectrum of an encoder's features tells: how many directions they use, and how fast the others fade.


FIRST = 5  # the first eigenvalue of the fit, counted from 1: those before it follow no power law
LEAST_WIDTH = 16  # of r, so that at least four eigenvalues are fitted
_ROUNDING = 1e-10  # of the largest eigenvalue: what is below came from features in float32


def rankme(features: Tensor) -> float:
    """RankMe of features [n d] (Garrido et al., ICML 2023, Eq. 1-2): their effective rank, from 1 to min(n, d).

    As in the paper the features are neither centred nor scaled. It grows with n until n is many times d, so that only
    ranks of equally many images and equal widths can be compared.
    """
    return effective_rank(features)


def alpha_req(features: Tensor) -> float:
    """α-ReQ of features [n d] (Agrawal et al., NeurIPS 2022): the exponent α of their eigenspectrum, λ_j ∝ j^-α.

    α is the slope of a line through log λ_j over log j, where λ_j is the j-th largest eigenvalue of the covariance, for
    j from 5 to r/2. The paper leaves out the first eigenvalues and the tail as well, and leaves the range open. The
    line is that of least squares with weights 1/j, by which each octave of j counts the same (Stringer et al. 2019).
    Near 1 is best by the paper; a larger α means that few directions hold almost all variance. Few images raise it:
    of 300 features of 192 numbers that were drawn with 0.5, it was 0.56.
    """
    values = eigenvalues(features)
    if len(values) < LEAST_WIDTH:
        raise ValueError(f"a power law through {len(values)} eigenvalues tells nothing: {LEAST_WIDTH} are needed")
    j = torch.arange(FIRST, len(values) // 2 + 1, dtype=torch.float64)
    fitted = values[FIRST - 1 : len(values) // 2]
    if not fitted[-1] > _ROUNDING * values[0]:
        return math.inf
    x, y, weights = j.log(), fitted.log(), 1 / j
    x, y = (one - (weights * one).sum() / weights.sum() for one in (x, y))
    return -((weights * x * y).sum() / (weights * x * x).sum()).item()


def eigenvalues(features: Tensor) -> Tensor:
    """The r largest eigenvalues of the covariance of features [n d], descending, float64 [r]."""
    n, d = features.shape
    centred = features.double().cpu()
    centred = centred - centred.mean(0)
    return (torch.linalg.svdvals(centred).square() / n)[: min(n - 1, d)]


# What the measures are taken of: an encoder's features of whole images, of some of their patches, and of crops.


AREAS = (0.9, 0.5, 0.25)  # of two crops of an image, as shares of its largest centre crop
SHARES = (0.5, 0.25, 0.1)  # of the patches that enter
CROPS_PER_IMAGE = 10  # of an image for LiDAR
MIN_LABEL_FREE_IMAGES = 32  # images: of fewer, ten neighbours would be a third
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
    """At most so many ``images`` of a source, drawn with the seed, in their order."""
    _check_count(min(len(source), images), source)
    if len(source) <= images:
        return source
    return source.subset(np.sort(np.random.default_rng(seed).permutation(len(source))[:images]))


def _check_count(n: int, source: Source) -> None:
    if n < MIN_LABEL_FREE_IMAGES:
        raise PatchloomError(
            f"{n} test {source.noun} of {source.name} are too few to measure neighbours among: "
            f"{MIN_LABEL_FREE_IMAGES} or more that "
            "can be read are needed (of a folder without a test part, a fifth is for testing: "
            f"give {5 * MIN_LABEL_FREE_IMAGES} or more)"
        )


def extract_label_free(
    name: str, vit: Encoder, card: EncoderCard, source: Source, settings: EvalSettings
) -> LabelFreeFeatures:
    """All features of an encoder that the measures need, in two passes over the images."""
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

    wholes = one_pass(vit, card, source, wholes_and_parts, settings.torch_device, **_reading(source, name, settings))
    tokens = dict(wholes.tokens)
    whole = tokens.pop(WHOLE)
    _check_count(len(whole), source)
    parts = {float(share): part for share, part in tokens.items()}
    if not source.modality.resizable:
        return LabelFreeFeatures(len(whole), whole, parts, unreadable=tuple(wholes.unreadable))
    size = input_size(vit)
    crops = CropsOf(source, [*_pairs(size), *[RandomCrop(size)] * CROPS_PER_IMAGE], settings.seed)

    def means(images: Tensor) -> dict[str, Tensor]:
        return {WHOLE: pooled_tokens(vit, images)["mean"]}

    cut = one_pass(vit, card, crops, means, settings.torch_device, **_reading(crops, name, settings)).tokens[WHOLE]
    each = cut.unflatten(0, (-1, len(crops.crops)))  # an image that cannot be read has no crop at all
    many = each[:, -CROPS_PER_IMAGE:]
    return LabelFreeFeatures(len(whole), whole, parts, _by_area(each), many, tuple(wholes.unreadable))


def extract_label_free_pixels(
    name: str, size: tuple[int, int], card: EncoderCard, source: Source, settings: EvalSettings
) -> LabelFreeFeatures:
    """The same crops as raw pixels, of images as an encoder for ``size`` (h, w) is given them, at most 32 a side."""
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


# All measures without labels of one encoder, as rows of a report.


PROTOCOL = "label-free"
DEFAULT_IMAGES = 1000
NEIGHBOUR_COUNT = 10
RANKME, ALPHA, LIDAR = "RankMe", "α-ReQ", "LiDAR"
CHANCE = "chance"
_DIMENSIONS = "dimensions"


def own_crop(area: float) -> str:
    """The name of the measure of two crops of an ``area``."""
    return f"own crop {100 * area:g} %"


def overlap_measure(share: float) -> str:
    """The name of the measure where a ``share`` of the patches enters."""
    return f"neighbours at {100 * share:g} %"


MEASURES = (RANKME, ALPHA, LIDAR, *map(own_crop, AREAS), *map(overlap_measure, SHARES))


def label_free_rows(
    name: str,
    vit: Encoder,
    card: EncoderCard,
    source: Source,
    settings: EvalSettings,
    *,
    images: int = DEFAULT_IMAGES,
) -> list[Row]:
    """All measures of an encoder that need no labels, a row each, with the names of `MEASURES` as setting "measure".

    What is drawn depends on the seed of the settings alone, and is the same for every encoder of one size and grid: the
    images, their crops, and which patches enter. Rows of shares have an interval over images, and those of crops each
    image's result (``right``) for `compare_rows`. RankMe, α-ReQ and LiDAR are one number of all images. Recordings
    have no
    rows of crops, nor of LiDAR, which is of crops; a Swin has none of patches; features of fewer than 16 numbers have
    no α-ReQ.
    """
    return rows_from_features(
        name, extract_label_free(name, vit, card, drawn_images(source, images, settings.seed), settings)
    )


def rows_from_features(name: str, found: LabelFreeFeatures) -> list[Row]:
    """The rows of what an encoder made of the images; of raw pixels those of crops."""
    rows: list[Row] = []
    if found.whole is not None:
        rows.append(_exact(name, RANKME, rankme(found.whole), _DIMENSIONS))
        if min(found.n - 1, found.whole.shape[1]) >= LEAST_WIDTH:
            rows.append(_exact(name, ALPHA, alpha_req(found.whole), ""))
    if found.many is not None:
        rows.append(_exact(name, LIDAR, lidar(found.many), _DIMENSIONS))
    for area, pair in found.pairs.items():
        rows.append(Row.of_images(name, "-", PROTOCOL, {"measure": own_crop(area)}, own_crop_found(*pair)))
    if found.whole is not None:
        for share, part in found.parts.items():
            shares = neighbour_overlap(found.whole, part, NEIGHBOUR_COUNT).tolist()
            rows.append(Row.of_means(name, PROTOCOL, {"measure": overlap_measure(share)}, shares))
    return rows


def chance_rows(found: LabelFreeFeatures) -> list[Row]:
    """What guessing gives where a measure is a share; the same for every encoder of the images."""
    rows = [_exact(CHANCE, own_crop(area), 1 / found.n) for area in found.pairs]
    return rows + [_exact(CHANCE, overlap_measure(share), NEIGHBOUR_COUNT / (found.n - 1)) for share in found.parts]


def _exact(name: str, measure: str, value: float, unit: str = "%") -> Row:
    return Row.exact(name, PROTOCOL, {"measure": measure}, value, unit)
