"""Which finds of a detector are right, image by image, and intervals of average precision over the images.

COCO's numbers come from all finds of a class, sorted by their scores, so that they are no sums over images. But which
find is right is decided within its image. So that is done once, and for each weighting of the images the finds count as
often as their image does: the same as if images had been copied or left out, without any image being compared again
(among equal scores, the order may be another one). Objects of every size count. Letters: n images, t weightings, d
finds of a class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from patchloom.data.annotated.base import Annotated, Objects
from patchloom.evaluate.dense.found import Found
from patchloom.evaluate.dense.intervals import of_left_out

THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = torch.from_numpy(np.linspace(0, 1, 101))  # as COCO has them: torch.linspace rounds otherwise
_COUNTED = 100  # finds of an image and class
_GROUPS = 200  # of images, each left out once: some seconds on one core for COCO's 5,000
_AT_ONCE = 2**23  # numbers in memory


@dataclass(frozen=True)
class ClassMatches:
    """The finds of a class in all images, the surest first.

    Attributes:
        images: int64 [d], in which image each is.
        right: bool [10 d], whether it is an object, for each of `THRESHOLDS`.
        counted: bool [10 d], whether it is right or wrong: what is found in a crowd is neither.
        objects: int64 [n], how many there are in each image, without crowds.
    """

    images: Tensor
    right: Tensor
    counted: Tensor
    objects: Tensor


@dataclass(frozen=True)
class Matches:
    """The finds in ``n`` images, by class."""

    n: int
    classes: tuple[ClassMatches, ...]


def matches_of(
    truth: Sequence[Objects] | Annotated[Objects],
    found: Sequence[Found],
    classes: int,
    ious: Mapping[tuple[int, int], np.ndarray],
) -> Matches:
    """Match finds and objects as COCO does, the surest find first, with the object that it overlaps most.

    Args:
        truth, found: of each image.
        classes: their number.
        ious: by image and class [finds objects], the surest find first, the objects in their order; with a crowd, the
            share of the find that lies in it.
    """
    parts: list[list[tuple[np.ndarray, ...]]] = [[] for _ in range(classes)]
    objects = torch.zeros(classes, len(found), dtype=torch.int64)
    for i, answer in enumerate(found):
        there = truth.outlined(i) if isinstance(truth, Annotated) else truth[i]
        labels, crowd = there.labels.numpy(), there.crowd.numpy()
        objects[:, i] = torch.from_numpy(np.bincount(labels[~crowd], minlength=classes))
        answered = answer.labels.numpy()
        for k in np.unique(answered).tolist():
            scores = -np.sort(-answer.scores.numpy()[answered == k], kind="stable")[:_COUNTED]
            overlap = np.asarray(ious.get((i, k), ()), float).reshape(len(scores), -1)
            of_class = crowd[labels == k] if overlap.size else np.zeros(0, bool)
            parts[k].append((scores, np.full(len(scores), i), *_matched(overlap, of_class)))
    return Matches(len(found), tuple(_joined(each, objects[k]) for k, each in enumerate(parts)))


def _matched(overlap: np.ndarray, crowd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of finds with ``overlap`` [d objects], right and counted [10 d]."""
    right, counted = np.zeros((2, len(THRESHOLDS), len(overlap)), bool)
    counted[:] = True
    alone, groups = overlap[:, ~crowd], overlap[:, crowd]
    free = np.ones((len(THRESHOLDS), alone.shape[1]), bool)
    least, each = np.minimum(THRESHOLDS, 1 - 1e-10), np.arange(len(THRESHOLDS))
    for d in np.flatnonzero((overlap >= least[0]).any(1)):
        if alone.shape[1]:
            reach = np.where(free, alone[d], -1.0)
            best = reach.shape[1] - 1 - reach[:, ::-1].argmax(1)  # of equal ones the last, as COCO's program takes
            right[:, d] = reach[each, best] >= least
            free[each[right[:, d]], best[right[:, d]]] = False
        if groups.shape[1]:
            counted[:, d] = right[:, d] | (groups[d].max() < least)
    return right, counted


def _joined(parts: Sequence[tuple[np.ndarray, ...]], objects: Tensor) -> ClassMatches:
    """What was found of a class in each image as one."""
    if not parts:
        nothing = torch.zeros(len(THRESHOLDS), 0, dtype=torch.bool)
        return ClassMatches(torch.zeros(0, dtype=torch.int64), nothing, nothing, objects)
    scores, images, right, counted = (np.concatenate(each, -1) for each in zip(*parts, strict=True))
    order = np.argsort(-scores, kind="stable")
    # what is less sure than the last right find changes nothing
    order = order[: 1 + max(np.flatnonzero(right[:, order].any(0)), default=-1)]
    flags = (torch.from_numpy(one[:, order]) for one in (right, counted))
    return ClassMatches(torch.from_numpy(images[order]), *flags, objects)


def drawn_precision(matches: Matches, times: Tensor) -> Tensor:
    """AP of each weighting, float64 [t]: the mean over the classes that have an object in it, nan without one.

    Args:
        matches: of all images.
        times: float64 [t n], how often each image counts; ones give AP itself.
    """
    step = max(1, _AT_ONCE // max([1, *(len(one.images) for one in matches.classes)]))
    chunks = times.split(step)
    return torch.cat([torch.stack([_of_class(one, chunk) for one in matches.classes]).nanmean(0) for chunk in chunks])


def _of_class(matches: ClassMatches, times: Tensor) -> Tensor:
    """AP of a class in each weighting, [t]; nan where it has no object of it."""
    objects = times @ matches.objects.double()
    weights = times[:, matches.images]
    total, every = weights.cumsum(1), bool(matches.counted.all())
    recalls = _RECALLS.expand(len(times), -1).contiguous()
    found = torch.zeros(len(times), dtype=torch.float64)
    for right, counted in zip(matches.right, matches.counted, strict=True):
        places = right.nonzero().flatten()
        if not len(places):
            continue
        hits = weights[:, places].cumsum(1)
        until = (total if every else (weights * counted).cumsum(1))[:, places]
        precision = (hits / until).nan_to_num(nan=0.0)
        # the best precision at this recall or above
        precision = precision.flip(1).cummax(1).values.flip(1)
        recall = (hits / objects[:, None]).nan_to_num(nan=0.0)
        at = torch.searchsorted(recall, recalls)
        reached = at < len(places)
        found += (precision.gather(1, at.clamp(max=len(places) - 1)) * reached).mean(1)
    return torch.where(objects > 0, found / len(THRESHOLDS), torch.nan)


def pseudo_precision(matches: Matches) -> Tensor:
    """Jackknife pseudo-values of AP, float64 [n], of up to 200 images; of more images, of 200 groups of them.

    They depend on the order of the images, so that two detectors are compared by those of the same images.
    """
    groups = min(matches.n, _GROUPS)
    without = torch.ones(groups, matches.n, dtype=torch.float64)
    without[torch.arange(matches.n) % groups, torch.arange(matches.n)] = 0
    whole = drawn_precision(matches, torch.ones(1, matches.n, dtype=torch.float64))[0]
    return of_left_out(whole, drawn_precision(matches, without))
