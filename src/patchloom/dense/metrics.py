"""Scores of segmentation and detection per image: mIoU and average precision, with intervals over the images.

COCO's numbers come from all finds of a class, sorted by their scores, so that they are no sums over images. But which
find is right is decided within its image. So that is done once, and for each weighting of the images the finds count as
often as their image does: the same as if images had been copied or left out, without any image being compared again
(among equal scores, the order may be another one). Objects of every size count. Letters: n images, t weightings, d
finds of a class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from patchloom.dense.annotations.base import IGNORED, Annotated, Objects
from patchloom.errors import PatchloomError, pip_install
from patchloom.results.intervals import student

# Which classes the pixels of label maps are taken for, and the scores of segmentation that follow from it.


def confusion(predicted: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Count the pixels of each true class (rows) by predicted class (columns), int64 [k k].

    Args:
        predicted: [h w], a class from 0 to k - 1 for each pixel; pixels whose truth is `IGNORED` do not count.
        truth: [h w], a class for each pixel, or `IGNORED`.
        classes: number k of classes.
    """
    if predicted.shape != truth.shape:
        raise ValueError(f"a prediction of {tuple(predicted.shape)} is no answer to {tuple(truth.shape)}")
    counted = truth != IGNORED
    rows, columns = truth[counted].long(), predicted[counted].long()
    if len(rows) and not 0 <= min(rows.min(), columns.min()) <= max(rows.max(), columns.max()) < classes:
        raise ValueError(f"classes go from 0 to {classes - 1}")
    return torch.bincount(rows * classes + columns, minlength=classes**2).view(classes, classes)


def overlaps(matrix: Tensor) -> Tensor:
    """Return intersection, union and true pixels of each class from a confusion matrix.

    They add up over images and are small enough to store per image, which makes intervals over images cheap.

    Args:
        matrix: [... k k] from `confusion`.

    Returns:
        [... 3 k]: number of pixels in the intersection, in the union, and in the truth, of each class.
    """
    common, truth = matrix.diagonal(dim1=-2, dim2=-1), matrix.sum(-1)
    return torch.stack([common, truth + matrix.sum(-2) - common, truth], -2)


def class_ious(found: Tensor) -> Tensor:
    """Return the intersection over union of each class, float64 [... k]; nan for classes without a pixel in the union.

    Args:
        found: [... 3 k], sum of `overlaps` over images.
    """
    common, either, _ = found.double().unbind(-2)
    return common / either


def mean_iou(found: Tensor) -> Tensor:
    """Return the mean intersection over union, float64 [...], over classes in truth or prediction, as in mmseg.

    A class without a pixel in the test images counts as 0 if a single pixel is predicted as it, and is left out
    otherwise; nan if no pixel counts.
    """
    return class_ious(found).nanmean(-1)


def foreground_iou(found: Tensor) -> Tensor:
    """Return the mean intersection over union, float64 [...], over classes but the most frequent one of the truth."""
    ious = class_ious(found)
    most = found[..., 2, :].argmax(-1, keepdim=True)
    return ious.scatter(-1, most, torch.nan).nanmean(-1)


def constant_overlaps(found: Tensor, place: int = 0) -> tuple[int, Tensor]:
    """Return the most frequent class, and what `overlaps` gives if it is the answer for every pixel.

    No other constant answer has a higher mIoU, since it is the fraction of its class over the number of classes. The
    best one by `foreground_iou` is the second most frequent class.

    Args:
        found: [n 3 k], `overlaps` of some answer for each image.
        place: place of the class by frequency, from 0.
    """
    truth = found[:, 2]
    best = int(truth.sum(0).argsort(descending=True, stable=True)[place])
    constant = torch.stack([torch.zeros_like(truth), truth, truth], 1)
    constant[:, 0, best] = truth[:, best]
    constant[:, 1, best] = truth.sum(1)
    return best, constant


def pixel_accuracy(found: Tensor) -> Tensor:
    """Return the fraction of correctly classified pixels (aAcc), float64 [...]."""
    common, _, truth = found.double().unbind(-2)
    return common.sum(-1) / truth.sum(-1)


# Intervals over the test images, of scores that come from sums over all of them.


# sums over images [t ...] -> scores [t ...]
Statistic = Callable[[Tensor], Tensor]


def pseudo_values(statistic: Statistic, per_image: Tensor, groups: np.ndarray | None = None) -> Tensor:
    """Return jackknife pseudo-values of a score, float64 [n ...]; nan if the score is undefined without an image.

    Args:
        statistic: function from sums over images to scores.
        per_image: [n ...], terms of the sums.
        groups: [n] groups of the images, which are left out instead of single ones; None: no groups.
    """
    if groups is not None:
        names, which = np.unique(groups, return_inverse=True)
        sums = per_image.new_zeros(len(names), *per_image.shape[1:])
        per_image = sums.index_add_(0, torch.from_numpy(which), per_image)
    total = per_image.sum(0)
    return jackknife_values(statistic(total), statistic(total - per_image))


def jackknife_values(score: Tensor, without: Tensor) -> Tensor:
    """Return jackknife pseudo-values [n ...] of a score [...] from the scores ``without`` [n ...] each image."""
    n = len(without)
    return n * score.double() - (n - 1) * without.double()


def interval(score: Tensor, pseudo: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 95 % interval over images of scores [...] in [0, 1]; [0, 1] if the pseudo-values are undefined.

    Args:
        score: [...], the scores.
        pseudo: [n ...], their pseudo-values.
    """
    n = len(pseudo)
    if n < 2:
        return torch.zeros_like(score), torch.ones_like(score)
    reach = (student(n - 1) * pseudo.std(0) / math.sqrt(n)).nan_to_num(nan=1.0)
    return (score - reach).clamp(min=0), (score + reach).clamp(max=1)


# What a detector found in an image, and its masks as run lengths: a mask of 4 megapixels takes a kilobyte then.


# COCO's compressed run lengths: {"size": [h, w], "counts": bytes}
RunLengths = dict[str, Any]


@dataclass(frozen=True)
class DetectedObjects:
    """Detected objects of an image, in its pixels. Letter: m objects.

    Attributes:
        boxes: float32 [m 4], x0 y0 x1 y1, x1 and y1 exclusive.
        labels: int64 [m], numbers of classes, from 0.
        scores: float32 [m], in [0, 1].
        masks: m run lengths; None without masks.
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    masks: tuple[RunLengths, ...] | None = None

    def __len__(self) -> int:
        return len(self.boxes)

    def above(self, score: float) -> DetectedObjects:
        """Return the detections of at least this score, the highest first."""
        order = self.scores.argsort(descending=True, stable=True)
        kept = order[self.scores[order] >= score]
        masks = None if self.masks is None else tuple(self.masks[i] for i in kept.tolist())
        return DetectedObjects(self.boxes[kept], self.labels[kept], self.scores[kept], masks)

    def objects(self, size: tuple[int, int]) -> Objects:
        """Return the objects without scores, with masks decoded for an image of ``size`` (h, w), to draw them."""
        masks = None if self.masks is None else from_run_lengths(self.masks, size)
        return Objects(self.boxes, self.labels, masks, torch.zeros(len(self), dtype=torch.bool))


def coco_tool(name: str) -> Any:
    """Import a module of faster-coco-eval, which implements COCO's scores and run lengths."""
    try:
        return import_module(f"faster_coco_eval.core.{name}")
    except ImportError as problem:
        raise PatchloomError(
            "detection is scored, and its masks are written, by faster-coco-eval, which is not here: "
            + pip_install("dense")
        ) from problem


def run_lengths(masks: Tensor) -> tuple[RunLengths, ...]:
    """Encode masks bool [m h w] as run lengths."""
    if not len(masks):
        return ()
    columns = np.asfortranarray(masks.cpu().numpy().transpose(1, 2, 0).astype(np.uint8))
    return tuple(coco_tool("mask").encode(columns))


def from_run_lengths(masks: Sequence[RunLengths], size: tuple[int, int]) -> Tensor:
    """Decode run lengths of masks of an image of ``size`` (h, w) to bool [m h w]."""
    if not masks:
        return torch.zeros(0, *size, dtype=torch.bool)
    columns = coco_tool("mask").decode(list(masks))
    return torch.from_numpy(np.ascontiguousarray(columns.transpose(2, 0, 1))).bool()


THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = torch.from_numpy(np.linspace(0, 1, 101))  # as COCO has them: torch.linspace rounds otherwise
_COUNTED = 100  # finds of an image and class
_GROUPS = 200  # of images, each left out once: some seconds on one core for COCO's 5,000
_AT_ONCE = 2**23  # numbers in memory


@dataclass(frozen=True)
class ClassMatches:
    """Detections of a class in all images, the highest score first.

    Attributes:
        images: int64 [d], image of each detection.
        right: bool [10 d], whether it matches an object, for each of `THRESHOLDS`.
        counted: bool [10 d], whether it counts as right or wrong; detections in a crowd do not.
        objects: int64 [n], number of objects in each image, without crowds.
    """

    images: Tensor
    right: Tensor
    counted: Tensor
    objects: Tensor


def matches_of(
    truth: Sequence[Objects] | Annotated[Objects],
    found: Sequence[DetectedObjects],
    classes: int,
    ious: Mapping[tuple[int, int], np.ndarray],
) -> tuple[ClassMatches, ...]:
    """Match detections and objects as COCO does: the highest score first, each with the object of largest overlap."""
    parts: list[list[tuple[np.ndarray, ...]]] = [[] for _ in range(classes)]
    none = torch.zeros(len(found), dtype=torch.int64)
    least, each = np.minimum(THRESHOLDS, 1 - 1e-10), np.arange(len(THRESHOLDS))
    objects: dict[int, Tensor] = {}  # by class: a list of classes may be far longer than the data's own
    for i, answer in enumerate(found):
        there = truth.outlined(i) if isinstance(truth, Annotated) else truth[i]
        labels, crowd = there.labels.numpy(), there.crowd.numpy()
        for k, count in zip(*np.unique(labels[~crowd], return_counts=True), strict=True):
            objects.setdefault(int(k), none.clone())[i] = int(count)
        answered = answer.labels.numpy()
        for k in np.unique(answered).tolist():
            scores = -np.sort(-answer.scores.numpy()[answered == k], kind="stable")[:_COUNTED]
            overlap = np.asarray(ious.get((i, k), ()), float).reshape(len(scores), -1)
            of_class = crowd[labels == k] if overlap.size else np.zeros(0, bool)
            right, counted = np.zeros((2, len(THRESHOLDS), len(overlap)), bool)
            counted[:] = True
            alone, groups = overlap[:, ~of_class], overlap[:, of_class]
            free = np.ones((len(THRESHOLDS), alone.shape[1]), bool)
            for d in np.flatnonzero((overlap >= least[0]).any(1)):
                if alone.shape[1]:
                    reach = np.where(free, alone[d], -1.0)
                    best = reach.shape[1] - 1 - reach[:, ::-1].argmax(1)  # of equal ones the last, as COCO's program
                    right[:, d] = reach[each, best] >= least
                    free[each[right[:, d]], best[right[:, d]]] = False
                if groups.shape[1]:
                    counted[:, d] = right[:, d] | (groups[d].max() < least)
            parts[k].append((scores, np.full(len(scores), i), right, counted))
    nothing = torch.zeros(len(THRESHOLDS), 0, dtype=torch.bool)
    joined = [ClassMatches(none[:0], nothing, nothing, objects.get(k, none)) for k in range(classes)]
    for k, part in enumerate(parts):
        if not part:
            continue
        scores, images, right, counted = (np.concatenate(some, -1) for some in zip(*part, strict=True))
        order = np.argsort(-scores, kind="stable")
        # what is less sure than the last right find changes nothing
        order = order[: 1 + max(np.flatnonzero(right[:, order].any(0)), default=-1)]
        is_right, counts = (torch.from_numpy(one[:, order]) for one in (right, counted))
        joined[k] = ClassMatches(torch.from_numpy(images[order]), is_right, counts, joined[k].objects)
    return tuple(joined)


def resampled_precision(matches: Sequence[ClassMatches], times: Tensor) -> Tensor:
    """Return the AP of each weighting, float64 [t]: mean over classes with an object; nan without one.

    Args:
        matches: matches of all images.
        times: float64 [t n], weight of each image; ones give the AP itself.
    """
    asked = [one for one in matches if one.objects.any()] or matches[:1]
    step = max(1, _AT_ONCE // max([1, *(len(one.images) for one in asked)]))
    return torch.cat([torch.stack([_of_class(one, chunk) for one in asked]).nanmean(0) for chunk in times.split(step)])


def _of_class(matches: ClassMatches, times: Tensor) -> Tensor:
    """Return the AP of a class in each weighting, [t]; nan without an object."""
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


def pseudo_precision(matches: Sequence[ClassMatches], groups: np.ndarray | None = None) -> Tensor:
    """Return jackknife pseudo-values of AP, float64 [n], for up to 200 images, or 200 groups of more images.

    Without ``groups`` [n] of the images, groups depend on their order, so compare two detectors on the same images.
    """
    n = len(matches[0].objects)
    each = np.arange(n) if groups is None else np.unique(groups, return_inverse=True)[1]
    which = torch.from_numpy(each % _GROUPS)
    without = torch.ones(int(which.max()) + 1, n, dtype=torch.float64)
    without[which, torch.arange(n)] = 0
    whole = resampled_precision(matches, torch.ones(1, n, dtype=torch.float64))[0]
    return jackknife_values(whole, resampled_precision(matches, without))


# Average precision of detection as COCO defines it (Lin et al., ECCV 2014; cocodataset.org/#detection-eval).


IouKind = Literal["bbox", "segm"]


@dataclass(frozen=True)
class AveragePrecision:
    """Average precisions in [0, 1]; nan without a suitable object.

    Attributes:
        means: the scores over all classes with an object, by their names in the literature, without undefined ones. AP
            is the mean over IoU thresholds of 0.5, 0.55, ... 0.95; AP50 and AP75 are at 0.5 and at 0.75; APs, APm and
            APl are of objects of up to 32 x 32 pixels, up to 96 x 96, and above. The area of an object is that of its
            mask, or of its box if the data has no masks.
        classes: AP of each class.
        matches: matches of the detections in each image.
    """

    means: dict[str, float]
    classes: tuple[float, ...]
    matches: Sequence[ClassMatches] = field(repr=False, compare=False)

    @property
    def ap(self) -> float:
        """AP of all classes."""
        return self.means.get("AP", math.nan)

    def by_class(self, names: Sequence[str]) -> dict[str, float]:
        """Return the AP of each class by name, without classes that have no object."""
        return {name: value for name, value in zip(names, self.classes, strict=True) if not math.isnan(value)}


def average_precision(
    truth: Sequence[Objects] | Annotated[Objects],
    found: Sequence[DetectedObjects],
    classes: Sequence[str],
    kind: IouKind,
) -> AveragePrecision:
    """Compare detections with ground truth; the 100 highest scores of each image count."""
    if len(truth) != len(found):
        raise ValueError(f"{len(found)} answers to {len(truth)} images")
    images: list[dict[str, Any]] = []
    there: list[dict[str, Any]] = []
    for i in range(len(truth)):
        objects = truth.outlined(i) if isinstance(truth, Annotated) else truth[i]
        if kind == "segm" and (not objects.has_masks or found[i].masks is None):
            raise ValueError(f"the {'answer' if objects.has_masks else 'truth'} has no masks to be compared")
        some, (h, w) = _annotations(i, len(there), objects, kind)
        images.append({"id": i, "height": h, "width": w})
        there += some
    categories = [{"id": i, "name": name} for i, name in enumerate(classes)]
    asked = coco_tool("coco").COCO({"images": images, "annotations": there, "categories": categories})
    results: list[dict[str, Any]] = []
    for i, answer in enumerate(found):
        each = zip(answer.boxes.tolist(), answer.labels.tolist(), answer.scores.tolist(), strict=True)
        for k, ((x0, y0, x1, y1), label, score) in enumerate(each):
            one = {"image_id": i, "category_id": label, "score": score}
            if kind == "segm" and answer.masks is not None:  # with a mask, a box would determine the area
                results.append(one | {"segmentation": answer.masks[k]})
            else:
                results.append(one | {"bbox": [x0, y0, x1 - x0, y1 - y0]})
    answers = asked.loadRes(results)
    run = coco_tool("faster_eval_api").COCOeval_faster(asked, answers, kind)
    # classes without an object have no precision, and a megabyte each
    scored = sorted({one["category_id"] for one in there}) or [0]
    run.params.catIds = scored
    run.evaluate()
    run.accumulate()
    # [thresholds recalls classes areas counts]: the last count is 100
    precision, thresholds = np.asarray(run.eval["precision"])[..., -1], run.params.iouThrs
    every = precision[:, :, :, 0]
    by_class = {k: _mean(every[:, :, place]) for place, k in enumerate(scored)}
    means = {"AP": _mean(every)} | {f"AP{at}": _mean(every[np.isclose(100 * thresholds, at)]) for at in (50, 75)}
    means |= {f"AP{size}": _mean(precision[:, :, :, area]) for area, size in enumerate("sml", 1)}
    return AveragePrecision(
        means={name: value for name, value in means.items() if not math.isnan(value)},
        classes=tuple(by_class.get(k, math.nan) for k in range(len(classes))),
        matches=matches_of(truth, found, len(classes), run.ious),
    )


def _mean(precision: np.ndarray) -> float:
    """Average over the defined values; COCO writes -1 for a class without objects."""
    there = precision[precision > -1]
    return float(there.mean()) if there.size else math.nan


def _annotations(
    image: int, before: int, objects: Objects, kind: IouKind
) -> tuple[list[dict[str, Any]], tuple[int, int]]:
    """Return the objects of an image in COCO's form, and its (h, w), 0 without masks; ``before`` objects precede."""
    found, size = [], (0, 0) if objects.masks is None else (objects.masks.shape[1], objects.masks.shape[2])
    for i, (box, label, crowd) in enumerate(
        zip(objects.boxes.tolist(), objects.labels.tolist(), objects.crowd.tolist(), strict=True)
    ):
        x0, y0, x1, y1 = box
        mask = objects.mask(i) if objects.has_masks else None  # one at a time: hundreds of large ones fill the memory
        size = size if mask is None else (mask.shape[0], mask.shape[1])
        one = {
            "id": before + i + 1,  # 0 means that nothing is matched
            "image_id": image,
            "category_id": label,
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "area": (x1 - x0) * (y1 - y0) if mask is None else int(mask.sum()),
            "iscrowd": int(crowd),
        }
        if kind == "segm" and mask is not None:
            one["segmentation"] = run_lengths(mask[None])[0]
        found.append(one)
    return found, size
