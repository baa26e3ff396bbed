"""Measures without labels: effective dimension of the features, and retrieval of an image by crops and parts of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.augment import RandomCrop, centre_part, resize_part
from patchloom.data.loader import Augment
from patchloom.data.source import Source, digest
from patchloom.data.sources.in_memory import DataLike
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.features import one_pass, pixel_features, pixels_size
from patchloom.evaluate.settings import EvalSettings, open_subjects, parts_of
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import encode, final_norm, input_size, patch_count, prefix_count
from patchloom.nets.heads import pool, pooled_tokens
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.options.protocols import DEFAULT_IMAGES, LabelFree
from patchloom.patches.partition import random_partition
from patchloom.questions.collapse import effective_rank
from patchloom.results.evaluation import Evaluation, as_control, note_unreadable
from patchloom.results.result import Result
from patchloom.sizes import share_of
from patchloom.withhold.encoder_input import all_patches, mask_patches

# results of benchmarks/label_free.py
_WORTH = (
    "None of these numbers is a verdict. Among equally long trainings, RankMe correlated with the accuracy of kNN on "
    "two data sets (Spearman's ρ 0.5 to 0.6), but not clearly with that of a linear probe; no other measure did so on "
    "both, and an untrained encoder also has a high RankMe. To choose between encoders, label a few hundred "
    "items and use knn."
)


def label_free(run: str | Path, data: DataLike, settings: EvalSettings, options: LabelFree) -> Evaluation:
    """Measure an encoder without labels: rank of its features, and retrieval of images by crops and by few patches.

    Args:
        run, settings, options: as in `patchloom.evaluate.protocols.evaluate`.
        data: images, as for `patchloom.data.sources.open.open_data`; labels are not needed.

    Raises:
        PatchloomError: unknown encoder or data, or fewer than 32 images.
    """
    subjects = open_subjects(run, settings)
    _, vit, card, *_ = subjects.ours
    parts = parts_of(data, settings, labels=False, card=card, run=run)
    source, story = drawn_images(parts.test, options.images, settings.seed), parts.story
    if len(source) < len(parts.test):
        story += f" {len(source):,} of {len(parts.test):,} test {source.noun} were drawn (seed {settings.seed})."
    settings.end_if_dry(source, f"label-free would measure {card.name} on {len(source):,} {source.noun}.", story)
    cropped = source.modality.resizable
    ours = extract_label_free(card.name, vit, card, source, settings)
    rows = [rows_from_features(card.name, ours)]
    rows += [
        rows_from_features(one.name, extract_label_free(one.name, one.vit, one.card, source, settings))
        for one in subjects.controls
    ]
    if cropped:  # the same crops as raw pixels, at most 32 a side
        small, name = pixels_size(input_size(vit)), card.modality.raw
        crops = CropsOf(source, _pairs(small), settings.seed)
        found = pixel_features(crops, small, card.mean, card.std, **_reading(crops, name, settings), labels=False)
        each = found.tokens["pixels"].unflatten(0, (-1, len(crops.crops)))
        rows.append(rows_from_features(name, LabelFreeFeatures(len(each), pairs=_by_area(each))))
    measured = [row.measure for row in rows[0]]
    measure = next(one for one in (own_crop(AREAS[-1]), overlap_measure(SHARES[1]), RANKME) if one in measured)
    quoted = tuple(row for each in rows for row in each if row.measure == measure)
    by_chance = [
        Result.exact(one, CHANCE, PROTOCOL, {}, chance(ours.n)) for one in measured if (chance := MEASURES[one].chance)
    ]
    title, against = f"{measure[0].upper()}{measure[1:]}", listing([as_control(row) for row in quoted[1:]], "and")
    report = Evaluation.of_test(
        source,
        settings.seed,
        ours.n,
        results=[*sum(rows, []), *by_chance],
        method=" ".join(
            [
                *_sentences(ours, source.noun, cropped, is_hierarchical(vit)),
                story,
                *note_unreadable(ours.unreadable, source.noun),
            ]
        ),
        headline=f"{title}: {quoted[0].text()} against {against} on {ours.n:,} test {source.noun}.",
        quoted=quoted,
        across="measure",
        down=True,
    )
    return report if quoted[0].outcomes is None else report.with_differences(False)


def _sentences(found: LabelFreeFeatures, noun: str, cropped: bool, swin: bool) -> list[str]:
    assert found.whole is not None
    n, d = found.whole.shape
    said = [
        f"Label-free: mean patch tokens of {n:,} {noun}, without labels. RankMe: effective number of directions "
        f"that the {d} numbers of a feature use, at most {min(n, d)}. α-ReQ: decay of the variance over directions, as "
        "j^-α; large if few directions hold almost all variance."
    ]
    if not cropped:
        said.append(
            f"LiDAR and own crops are left out: a crop of a {noun.removesuffix('s')} would be a different sound."
        )
    else:
        areas = _listed(AREAS)
        said.append(
            f"LiDAR: effective number of directions in which images differ more than {CROPS_PER_IMAGE} random crops of "
            f"one image (δ {DELTA:g}). "
            f"Own crop: two random crops of each image, each of {areas} of its area; the fraction of the images whose "
            f"first crop is nearest to its own second crop among those of all {n:,}."
        )
    said.append("IdEst: intrinsic dimension of the features, by minimum spanning trees; its paper prefers a lower one.")
    if found.dense is not None:
        said.append(
            f"DSE, for dense use: separation of {DSE_CLUSTERS} clusters of patches per {noun.removesuffix('s')}, plus "
            f"the fraction of dimensions that patches at one position use, in {min(n, DSE_IMAGES)} {noun}. Compare it "
            "among checkpoints of one run."
        )
    if swin:
        said.append("Neighbours kept is left out: a Swin cannot leave out any of its patches.")
    else:
        said.append(
            f"Neighbours kept: fraction of the {NEIGHBOUR_COUNT} nearest neighbours (by cosine) that remain so if only "
            f"{_listed(SHARES)} of the patches, drawn at random, are seen."
        )
    return [*said, "Nothing was trained or chosen.", _WORTH]


def _listed(shares: Sequence[float]) -> str:
    *first, last = (f"{100 * share:g}" for share in shares)
    return f"{', '.join(first)} or {last} %"


# Measures of an encoder without labels, and `label_free_rows`, which computes all of them.

# Retrieval of an image by another crop of it, among crops of many images.


_AT_ONCE = 1024  # queries


def own_crop_found(first: Tensor, second: Tensor) -> Tensor:
    """Return whether each image's first crop is nearest to its own second crop, [n] bool.

    Nearest means the largest cosine among the second crops of all n images; chance is 1/n. The target is the image, not
    a class: this is instance discrimination (Wu et al. 2018), applied to an encoder without further training.

    Args:
        first, second: [n d] features of two crops of each image.
    """
    gallery = F.normalize(second.float(), dim=1).T
    nearest = [(F.normalize(some.float(), dim=1) @ gallery).argmax(1) for some in first.split(_AT_ONCE)]
    return torch.cat(nearest) == torch.arange(len(first), device=first.device)


class AreaCrop:
    """Crop at a random place, with a fraction ``area`` of the image's largest centre crop, resized to ``size`` (h, w).

    It has the aspect ratio of ``size`` and is not mirrored.
    """

    def __init__(self, size: tuple[int, int], area: float) -> None:
        self.size, self.area = size, area

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor]:
        """Return one crop of an image [c h w] with the same dtype."""
        top, left, height, width = centre_part(image.shape[-2], image.shape[-1], self.size[1] / self.size[0])
        side = math.sqrt(self.area)
        h, w = max(1, round(side * height)), max(1, round(side * width))
        down, along = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
        return (resize_part(image, top + down, left + along, h, w, self.size),)


class CropsOf(Source):
    """Crops of the images of a source, q consecutive ones per image.

    Args:
        source: images; reading in order reads each image once.
        crops: [q] cropping functions.
        seed: seed of the places; a crop's place depends only on the seed, the image's index and the crop's number.
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


# Overlap of nearest neighbours between the whole image and some of its patches.

_TIED = 1e-6  # cosines closer than this are equal within float32 precision


def neighbour_overlap(whole: Tensor, partial: Tensor, k: int = 10) -> Tensor:
    """Return the fraction of each image's k nearest neighbours that remain so for part of its patches, [n] float64.

    Nearest is by cosine; only the query is seen in part. Chance is k / (n - 1). Neighbours whose cosines are equal
    within float32 precision share the remaining places among the k: the result is the expected fraction if ties are
    broken at random. Constant features give chance.

    Args:
        whole: [n d] features of all patches.
        partial: [n d] features of some patches of the same images.
        k: number of neighbours.
    """
    n = len(whole)
    if n - 1 <= k:
        raise ValueError(f"{n} images are too few for {k} nearest neighbours: all others would be neighbours")
    found = []
    for own in torch.arange(n).split(_AT_ONCE):
        before, after = (_chosen(queries[own], whole, own, k) for queries in (whole, partial))
        found.append((before * after).sum(1) / k)
    return torch.cat(found)


def _chosen(queries: Tensor, others: Tensor, own: Tensor, k: int) -> Tensor:
    """Return the probability that each other image is among the k nearest, [q n] float64; each row sums to k.

    Args:
        queries: [q d] features.
        others: [n d] features.
        own: [q] index of each query among the others, which is excluded.
        k: number of neighbours.
    """
    near = F.normalize(queries.double(), dim=1) @ F.normalize(others.double(), dim=1).T
    near[torch.arange(len(own)), own] = -torch.inf
    last = near.topk(k, dim=1).values[:, -1:]
    above, level = near > last + _TIED, (near - last).abs() <= _TIED
    left = (k - above.sum(1, keepdim=True)) / level.sum(1, keepdim=True)
    return above.double() + left * level


def partial_means(vit: Encoder, images: Tensor, order: Tensor, shares: Sequence[float]) -> dict[float, Tensor]:
    """Return means [b d] of the patch tokens if only a fraction of the patches enters, by fraction.

    Args:
        vit: plain ViT; a Swin cannot leave out patches.
        images: [b c h w] normalised.
        order: [b n] random order of each image's patches; the first ones enter, at least one.
        shares: fractions of the patches.
    """
    n = patch_count(vit)
    given, found = all_patches(images, n), {}
    for share in shares:
        some = mask_patches(given, order[:, : max(1, share_of(n, share))])
        found[share] = pool(vit, encode(vit, some, norm=False), None)["mean"]
    return found


# LiDAR: number of directions in which images differ more than crops of one image.


DELTA = 1e-4  # as in the paper


def lidar(features: Tensor) -> float:
    """Return LiDAR of features [n q d] of q augmented crops of each of n images (Thilak et al., ICLR 2024).

    LiDAR is the effective rank, as in RankMe, of the matrix of linear discriminant analysis with images as classes:
    Σ_w^-1/2 Σ_b Σ_w^-1/2 [d d]. Σ_b is the covariance of the images' means, Σ_w that of crops about their image's mean
    plus `DELTA` on the diagonal. It lies between 1 and min(n - 1, d); directions in which crops of one image vary as
    much as images do contribute little. Means are over n and over n·q, without a correction for small numbers.
    """
    n, q, d = features.shape
    if n < 2 or q < 2:
        raise ValueError(f"{q} crops of each of {n} images: LiDAR needs two crops or more of two images or more")
    crops = features.double().cpu()
    means = crops.mean(1)
    apart = means - means.mean(0)
    within = (crops - means[:, None]).flatten(0, 1)
    scatter = within.T @ within / (n * q) + DELTA * torch.eye(d, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(scatter)
    whitened = apart @ (vectors * values.rsqrt()) @ vectors.T
    # the matrix is symmetric and positive semidefinite: its singular values are its eigenvalues
    return effective_rank(whitened.T @ whitened / n)


# Spectrum of an encoder's features: decay of the eigenvalues.


FIRST = 5  # first eigenvalue of the fit, counted from 1: earlier ones follow no power law
LEAST_WIDTH = 16  # smallest r, so that at least four eigenvalues are fitted
_ROUNDING = 1e-10  # relative to the largest eigenvalue: smaller ones are float32 noise


def alpha_req(features: Tensor) -> float:
    """Return α-ReQ of features [n d] (Agrawal et al., NeurIPS 2022): the exponent α of the eigenspectrum, λ_j ∝ j^-α.

    α is the negative slope of log λ_j over log j, where λ_j is the j-th largest eigenvalue of the covariance, for
    j from 5 to r/2. The paper also leaves out the first eigenvalues and the tail, but does not state the range. The
    line is a least-squares fit with weights 1/j, so that each octave of j counts the same (Stringer et al. 2019).
    According to the paper, values near 1 are best; a larger α means that few directions hold almost all variance. Few
    images raise it: 300 features of 192 numbers drawn with α = 0.5 gave 0.56.
    """
    values = eigenvalues(features)
    if len(values) < LEAST_WIDTH:
        raise ValueError(f"a power law cannot be fitted to {len(values)} eigenvalues: {LEAST_WIDTH} are needed")
    j = torch.arange(FIRST, len(values) // 2 + 1, dtype=torch.float64)
    fitted = values[FIRST - 1 : len(values) // 2]
    if not fitted[-1] > _ROUNDING * values[0]:
        return math.inf
    x, y, weights = j.log(), fitted.log(), 1 / j
    x, y = (one - (weights * one).sum() / weights.sum() for one in (x, y))
    return -((weights * x * y).sum() / (weights * x * x).sum()).item()


def eigenvalues(features: Tensor) -> Tensor:
    """Return the r largest eigenvalues of the covariance of features [n d], descending, float64 [r]."""
    n, d = features.shape
    centred = features.double().cpu()
    centred = centred - centred.mean(0)
    return (torch.linalg.svdvals(centred).square() / n)[: min(n - 1, d)]


# IdEst: intrinsic dimension of the features.


IDEST_SUBSETS = 16  # nested subsets, N/16 points apart
_LEAST_POINTS = 16  # in the smallest of them
_MOST_POINTS = 2000  # time and memory grow with their square


def id_est(features: Tensor, order: Tensor) -> float:
    """Return IdEst of features [n d] (Mordacq et al., ICML 2026): their intrinsic dimension, by minimum spanning trees.

    The tree over m points drawn from a set of dimension d̂ has a length L that grows as m^((d̂ - 1) / d̂). The slope s of
    a least-squares line of log L over log m, over nested subsets, gives d̂ = 1 / (1 - s). The paper has no program that
    could be found. It draws up to 50,000 points; here at most 2,000 in subsets that grow by a sixteenth, of 16 points
    or more. According to the paper, a lower dimension goes with a higher accuracy of a linear probe. So few points give
    1.95 for a square, 8.7 for a cube of 10 dimensions and 15.0 for one of 20 (1,000 points, mean of five draws). Copies
    of an image lower it.

    Args:
        features: of n images, neither centred nor scaled.
        order: [n] permutation of the images, whose first m are a subset: features in the order of their classes would
            grow class by class.

    Returns:
        A dimension of 1 or more; nan for fewer than 32 points, and if s is not between 0 and 1, such as for equal
        features.
    """
    points = features[order][:_MOST_POINTS].double().cpu()
    n = len(points)
    sizes = sorted({round(n * i / IDEST_SUBSETS) for i in range(1, IDEST_SUBSETS + 1)})
    sizes = [size for size in sizes if size >= _LEAST_POINTS]
    if n < 2 * _LEAST_POINTS:
        return math.nan
    # by differences: a matrix product would round distances between neighbours
    apart = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").numpy()
    lengths = np.array([tree_length(apart[:size, :size]) for size in sizes])
    if not (lengths > 0).all():
        return math.nan
    slope = np.polyfit(np.log(sizes), np.log(lengths), 1)[0]
    return float(1 / (1 - slope)) if 0 < slope < 1 else math.nan


def tree_length(apart: np.ndarray) -> float:
    """Return the length of the minimum spanning tree of points with these distances [n n], by Prim's algorithm.

    scipy's trees take a distance of 0, such as that of two copies, as a missing edge.
    """
    left = np.ones(len(apart), bool)
    left[0], nearest, length = False, apart[0].copy(), 0.0  # distance of each point from the tree
    for _ in range(len(apart) - 1):
        point = int(np.where(left, nearest, np.inf).argmin())
        length += nearest[point]
        left[point] = False
        np.minimum(nearest, apart[point], out=nearest)
    return float(length)


# DSE: separation and dimensions of patch tokens, for dense use.


DSE_CLUSTERS = 3  # per image
DSE_GROUP = 8  # images that are clustered together, too
DSE_IMAGES, DSE_PATCHES = 128, 256  # at most; patches of each image
DSE_POSITIONS = 8  # for the number of dimensions
_ITERATIONS = 20  # of k-means
DSE_LEAST_PATCHES = 3 * DSE_CLUSTERS


@dataclass(frozen=True)
class DenseStructure:
    """Parts of DSE of one encoder, each without a unit.

    Attributes:
        separation: distance of patches from the nearest other cluster, minus the spread within clusters.
        dimensions: effective rank of patches at one position in many images, as a fraction of the largest possible.
    """

    separation: float
    dimensions: float

    @property
    def dse(self) -> float:
        """DSE with λ = 1, as the authors' program prints it."""
        return self.separation + self.dimensions


def dense_structure(tokens: Tensor, seed: int = 0) -> DenseStructure:
    """Return the parts of DSE of patch tokens [m p d] of m images (Dai et al., NeurIPS 2025).

    This follows the authors' program, EldercatSAM/SSL-Degradation, by which the published values were computed. The
    paper differs: it has neither normalised tokens nor the division by their spread, so its value depends on their
    scale; its distances between clusters are squared; its nuclear norm is divided by N_j - 1; its number of dimensions
    is not divided by the largest one. In the program, and here:

    - Tokens are divided by their length, and the two terms of the separation by the mean distance of the tokens from
      their mean.
    - Clusters are found twice: 3 in each image, and 3 per image in groups of 8 images. Separation is the mean of the
      two. k-means draws its first centres with probabilities in proportion to their distance from those drawn before,
      takes 20 iterations, and runs once.
    - Separation: the mean over clusters of the mean distance of their tokens from the nearest other centre, minus
      the mean over clusters of two or more tokens of ‖Z_j - μ_j‖_* / sqrt(max(N_j - 1, d)).
    - Dimensions: effective rank of the tokens [m d] at one position, over min(m, d), averaged over positions.

    Ours are the numbers of images and patches, and 8 positions: the program takes 2,048 images and all patches.

    Args:
        tokens: at equal positions in all images, after the encoder's last norm.
        seed: seed of k-means and of the positions.
    """
    m, p, d = tokens.shape
    if m < 2 or p < DSE_LEAST_PATCHES:
        raise ValueError(f"{p} patches of {m} images: DSE needs {DSE_LEAST_PATCHES} or more of two images or more")
    lots = torch.Generator().manual_seed(seed)
    unit = F.normalize(tokens.float().cpu(), dim=2)
    spread = (unit - unit.flatten(0, 1).mean(0)).norm(dim=2).mean().item()
    groups = [*unit, *(group.flatten(0, 1) for group in unit.split(DSE_GROUP))]
    labels = [*k_means(unit, DSE_CLUSTERS, lots)]
    for group in groups[m:]:
        labels += k_means(group[None], DSE_CLUSTERS * len(group) // p, lots)
    apart = [separation(points, found) for points, found in zip(groups, labels, strict=True)]
    by_level = (sum(apart[:m]) / m + sum(apart[m:]) / len(apart[m:])) / 2
    places = torch.randperm(p, generator=lots)[:DSE_POSITIONS].tolist()
    ranks = [effective_rank(unit[:, place]) / min(m, d) for place in places]
    return DenseStructure(by_level / max(spread, 1e-12), sum(ranks) / len(ranks))


def separation(points: Tensor, labels: Tensor) -> float:
    """Return M_inter - M_intra of clustered points [n d], as `dense_structure` defines them; labels [n] int64.

    0 minus the spread if there is a single cluster. A cluster without points counts nowhere.
    """
    points, d = points.double(), points.shape[1]
    clusters = [points[labels == label] for label in labels.unique().tolist()]
    centres = torch.stack([cluster.mean(0) for cluster in clusters])
    apart, within = list[Tensor](), list[Tensor]()
    for number, cluster in enumerate(clusters):
        others = torch.cat([centres[:number], centres[number + 1 :]])
        if len(others):
            apart.append(torch.cdist(cluster, others).min(1).values.mean())
        if len(cluster) > 1:
            off = cluster - centres[number]
            # the smaller of both Gram matrices has the squared singular values
            gram = off @ off.T if len(off) < d else off.T @ off
            nuclear = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().sum()
            within.append(nuclear / math.sqrt(max(len(cluster) - 1, d)))
    inter, intra = (torch.stack(found).mean().item() if found else 0.0 for found in (apart, within))
    return inter - intra


def k_means(points: Tensor, k: int, lots: torch.Generator) -> Tensor:
    """Return the clusters [g n] int64 of g sets of points [g n d], by k-means as `dense_structure` describes it.

    A cluster that loses all its points keeps its centre.
    """
    g, n, d = points.shape
    rows = torch.arange(g)
    centres = points[rows, torch.randint(n, (g,), generator=lots)][:, None]
    for _ in range(k - 1):
        near = torch.cdist(points, centres).min(2).values.clamp_min(1e-9)  # of equal points, any
        drawn = torch.multinomial(near, 1, generator=lots)[:, 0]
        centres = torch.cat([centres, points[rows, drawn][:, None]], 1)
    for _ in range(_ITERATIONS):
        chosen = F.one_hot(torch.cdist(points, centres).argmin(2), k).to(points)  # [g n k]
        counts = chosen.sum(1)[..., None]
        centres = torch.where(counts > 0, chosen.mT @ points / counts.clamp_min(1), centres)
    return torch.cdist(points, centres).argmin(2)


def weighted_dse(structures: Sequence[DenseStructure]) -> list[float]:
    """Return DSE of several checkpoints of one run, with the paper's λ: the ratio of the parts' standard deviations.

    λ = std(separation) / std(dimensions) over the checkpoints, so that both parts weigh the same; 1 if the dimensions
    are all equal. The values of two runs cannot be compared.
    """
    apart, dimensions = (np.array([getattr(one, part) for one in structures]) for part in ("separation", "dimensions"))
    weight = apart.std() / dimensions.std() if dimensions.std() > 0 else 1.0
    return (apart + weight * dimensions).tolist()


# Inputs of the measures: features of whole images, of some of their patches, and of crops.


AREAS = (0.9, 0.5, 0.25)  # of two crops, as fractions of the largest centre crop
SHARES = (0.5, 0.25, 0.1)  # of the patches
CROPS_PER_IMAGE = 10  # for LiDAR
MIN_LABEL_FREE_IMAGES = 32  # with fewer, ten neighbours would be a third of all
WHOLE, DENSE = "whole", "dense"


@dataclass(frozen=True)
class LabelFreeFeatures:
    """Features of n images, float32 on the CPU: means of patch tokens, or raw pixels.

    Attributes:
        n: number of readable images.
        whole: [n d] features of whole images; None for raw pixels.
        parts: [n d] features of part of the patches, by fraction; empty for raw pixels and a Swin.
        pairs: [n d] features of two crops, by their area; empty for recordings.
        many: [n q d] features of pre-training's crops; None for raw pixels and recordings.
        dense: parts of DSE of the first images; None for raw pixels, and for encoders of few patches.
        seed: seed of all random draws.
        unreadable: names of images that could not be read.
    """

    n: int
    whole: Tensor | None = None
    parts: dict[float, Tensor] = field(default_factory=dict)
    pairs: dict[float, tuple[Tensor, Tensor]] = field(default_factory=dict)
    many: Tensor | None = None
    dense: DenseStructure | None = None
    seed: int = 0
    unreadable: tuple[str, ...] = ()


def drawn_images(source: Source, images: int, seed: int) -> Source:
    """Draw at most ``images`` images of a source, and keep their order."""
    _check_count(min(len(source), images), source)
    if len(source) <= images:
        return source
    return source.subset(np.sort(np.random.default_rng(seed).permutation(len(source))[:images]))


def _check_count(n: int, source: Source) -> None:
    if n < MIN_LABEL_FREE_IMAGES:
        raise PatchloomError(
            f"{n} test {source.noun} of {source.name} are too few to measure neighbours among: give "
            f"{MIN_LABEL_FREE_IMAGES} or more readable ones, or {5 * MIN_LABEL_FREE_IMAGES} or more if the data has no "
            "test part (a fifth is split off)"
        )


def extract_label_free(
    name: str, vit: Encoder, card: EncoderCard, source: Source, settings: EvalSettings
) -> LabelFreeFeatures:
    """Compute all features of an encoder that the measures need, in two passes over the images."""
    n, drawn, done = patch_count(vit), torch.Generator().manual_seed(settings.seed), 0
    (order,) = random_partition(len(source), n, (n,), drawn)

    def wholes_and_parts(images: Tensor) -> dict[str, Tensor]:
        nonlocal done
        each = order[done : done + len(images)].to(images.device)
        tokens = encode(vit, all_patches(images, n), norm=False)
        patches = final_norm(vit, tokens[: max(0, DSE_IMAGES - done)])[:, prefix_count(vit) :]
        some = torch.randperm(patches.shape[1], generator=torch.Generator().manual_seed(settings.seed))[:DSE_PATCHES]
        found = {WHOLE: pool(vit, tokens, None)["mean"], DENSE: patches[:, some.to(patches.device)]}
        done += len(images)
        if not is_hierarchical(vit):
            found |= {str(share): part for share, part in partial_means(vit, images, each, SHARES).items()}
        return found

    wholes = one_pass(vit, card, source, wholes_and_parts, settings.torch_device, **_reading(source, name, settings))
    tokens = dict(wholes.tokens)
    whole, patches = tokens.pop(WHOLE), tokens.pop(DENSE)
    _check_count(len(whole), source)
    parts = {float(share): part for share, part in tokens.items()}
    dense = dense_structure(patches, settings.seed) if patches.shape[1] >= DSE_LEAST_PATCHES else None
    found = LabelFreeFeatures(
        len(whole), whole, parts, dense=dense, seed=settings.seed, unreadable=tuple(wholes.unreadable)
    )
    if not source.modality.resizable:
        return found
    size = input_size(vit)
    crops = CropsOf(source, [*_pairs(size), *[RandomCrop(size)] * CROPS_PER_IMAGE], settings.seed)

    def means(images: Tensor) -> dict[str, Tensor]:
        return {WHOLE: pooled_tokens(vit, images)["mean"]}

    cut = one_pass(vit, card, crops, means, settings.torch_device, **_reading(crops, name, settings)).tokens[WHOLE]
    each = cut.unflatten(0, (-1, len(crops.crops)))  # an unreadable image has no crops
    return replace(found, pairs=_by_area(each), many=each[:, -CROPS_PER_IMAGE:])


def _pairs(size: tuple[int, int]) -> list[Augment]:
    return [AreaCrop(size, area) for area in AREAS for _ in range(2)]


def _by_area(each: Tensor) -> dict[float, tuple[Tensor, Tensor]]:
    """Group features [n crops d], in the order of `_pairs`, into two crops of each area."""
    return {area: (each[:, 2 * i], each[:, 2 * i + 1]) for i, area in enumerate(AREAS)}


def _reading(source: Source, name: str, settings: EvalSettings) -> dict[str, Any]:
    what = "crops" if isinstance(source, CropsOf) else source.noun
    return {**settings.reading(source), "what": f"{name}: features of {len(source):,} {what}"}


# All measures without labels of one encoder, as rows of a report.


PROTOCOL = "label-free"
NEIGHBOUR_COUNT = 10
RANKME, ALPHA, LIDAR, IDEST = "RankMe", "α-ReQ", "LiDAR", "IdEst"
DSE, SEPARATION, DENSE_DIMENSIONS = "DSE", "DSE: separation", "DSE: dimensions"
CHANCE = "chance"


def own_crop(area: float) -> str:
    """Return the name of the measure for two crops of an ``area``."""
    return f"own crop {100 * area:g} %"


def overlap_measure(share: float) -> str:
    """Return the name of the measure for a ``share`` of the patches."""
    return f"neighbours at {100 * share:g} %"


class Measure(NamedTuple):
    """A measure of frozen features.

    Attributes:
        of: function from the features to a number, or to the outcome of each image; None if they lack what it needs.
        unit: its unit, "" without one.
        paper: key of its paper in `patchloom.report.papers.PAPERS`; "" without one.
        chance: function from the number of images to its value for features that know nothing.
    """

    of: Callable[[LabelFreeFeatures], float | Tensor | None]
    unit: str = ""
    paper: str = ""
    chance: Callable[[int], float] | None = None


def rankme(found: LabelFreeFeatures) -> float | None:
    """Return RankMe (Garrido et al., ICML 2023, Eq. 1-2): the effective rank of features [n d], from 1 to min(n, d).

    As in the paper, features are neither centred nor scaled. It grows with n until n is many times d, so only values
    of equal n and equal d can be compared.
    """
    return None if found.whole is None else effective_rank(found.whole)


def _alpha(found: LabelFreeFeatures) -> float | None:
    if found.whole is None or min(found.n - 1, found.whole.shape[1]) < LEAST_WIDTH:
        return None
    return alpha_req(found.whole)


def _dimension(found: LabelFreeFeatures) -> float | None:
    if found.whole is None:
        return None
    dimension = id_est(found.whole, torch.randperm(found.n, generator=torch.Generator().manual_seed(found.seed)))
    return dimension if math.isfinite(dimension) else None


def _own_crop(area: float, found: LabelFreeFeatures) -> Tensor | None:
    return own_crop_found(*found.pairs[area]) if area in found.pairs else None


def _overlap(share: float, found: LabelFreeFeatures) -> Tensor | None:
    if found.whole is None or share not in found.parts:
        return None
    return neighbour_overlap(found.whole, found.parts[share], NEIGHBOUR_COUNT)


MEASURES = {
    RANKME: Measure(rankme, "dimensions", "garrido2023rankme"),
    ALPHA: Measure(_alpha, paper="agrawal2022alphareq"),
    LIDAR: Measure(lambda found: None if found.many is None else lidar(found.many), "dimensions", "thilak2024lidar"),
    IDEST: Measure(_dimension, "dimensions", "mordacq2026idest"),
    DSE: Measure(lambda found: None if found.dense is None else found.dense.dse, paper="dai2025dse"),
    SEPARATION: Measure(lambda found: None if found.dense is None else found.dense.separation),
    DENSE_DIMENSIONS: Measure(lambda found: None if found.dense is None else found.dense.dimensions),
    **{own_crop(area): Measure(partial(_own_crop, area), "%", chance=lambda n: 1 / n) for area in AREAS},
    **{
        overlap_measure(share): Measure(partial(_overlap, share), "%", chance=lambda n: NEIGHBOUR_COUNT / (n - 1))
        for share in SHARES
    },
}


def label_free_rows(
    name: str,
    vit: Encoder,
    card: EncoderCard,
    source: Source,
    settings: EvalSettings,
    *,
    images: int = DEFAULT_IMAGES,
) -> list[Result]:
    """Return all measures of an encoder without labels, a row each, named as in `MEASURES` by the setting "measure".

    All random draws (images, crops and patches) depend only on the seed of the settings, and are the same for every
    encoder of one size and grid. Fractions have an interval over images, and those of crops also have `Outcomes`.
    RankMe, α-ReQ, LiDAR, IdEst and DSE are single numbers for all images. Recordings have no results of crops or LiDAR;
    a Swin has none of few patches; features of fewer than 16 numbers have no α-ReQ, equal ones no IdEst, and encoders
    of fewer than 9 patches no DSE.
    """
    return rows_from_features(
        name, extract_label_free(name, vit, card, drawn_images(source, images, settings.seed), settings)
    )


def rows_from_features(name: str, found: LabelFreeFeatures) -> list[Result]:
    """Return the rows for features of the images; raw pixels have those of crops only."""
    rows = []
    for measure, about in MEASURES.items():
        value = about.of(found)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            rows.append(Result.exact(measure, name, PROTOCOL, {}, value, about.unit))
        elif value.dtype == torch.bool:
            rows.append(Result.of_images(name, PROTOCOL, {}, value, measure=measure))
        else:
            rows.append(Result.of_means(measure, name, PROTOCOL, {}, value.tolist()))
    return rows
