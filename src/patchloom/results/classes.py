"""Measures of classifiers by class, for data with rare classes, where accuracy misleads.

`class_results` makes all results of one encoder's answers to test images, for every classification protocol. The
headline quotes one of them, by the rule of `quoted_measure`. benchmarks/effects.py measures the coverage of intervals.

Letters: n test images, c classes, t resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from patchloom.results.intervals import Z, accuracy_interval, over_groups, wilson
from patchloom.results.result import ACCURACY, Outcomes, Result

BALANCED = "balanced accuracy"
RECALL = "recall of "  # before the name of a class
IN_GROUP = "accuracy in group "  # before the name of a group
MACRO_F1, AUROC, PRECISION = "macro F1", "AUROC", "average precision"
FEW = 30  # test images of a class below which intervals of its measures are rough
_ABOVE = 1.2  # a constant answer's accuracy over the even share, above which balanced accuracy is quoted
_DRAWS, _SEED = 1000, 57  # resamples of macro F1 and average precision
_AT_ONCE = 2**24  # numbers in memory at once
_MOST_CELLS = 50  # classes up to which the confusion matrix is stored
_MOST_GROUPS = 100  # groups with results of their own: the worst ones


@dataclass(frozen=True)
class Answers:
    """Answers of a classifier to labelled test images.

    Attributes:
        labels: [n] int, true classes.
        answers: [n] int, predicted classes.
        scores: [n c] score of each class, such as probabilities or logits; None if unknown.
        groups: [n] int, groups of the images; None: no groups.
        names: [c] names of the classes; (): their numbers.
        group_names: names of the groups by their number; (): their numbers.
    """

    labels: np.ndarray
    answers: np.ndarray
    scores: np.ndarray | None = None
    groups: np.ndarray | None = None
    names: Sequence[str] = ()
    group_names: Sequence[str] = ()

    @cached_property
    def present(self) -> np.ndarray:
        """Classes among the labels, in ascending order."""
        return np.unique(self.labels)

    @property
    def right(self) -> np.ndarray:
        """[n] whether each answer is right."""
        return self.labels == self.answers

    def name(self, label: int) -> str:
        return str(self.names[label]) if label < len(self.names) else str(label)

    def group(self, number: int) -> str:
        return str(self.group_names[number]) if number < len(self.group_names) else str(number)

    def confusion(self) -> np.ndarray:
        """Return the confusion matrix [c c], true classes in rows, answers in columns."""
        c = max(1 + int(self.labels.max()), 1 + int(self.answers.max()), len(self.names))
        return np.bincount(c * self.labels + self.answers, minlength=c * c).reshape(c, c)


# The rule of the headline.


def quoted_measure(labels: np.ndarray) -> str:
    """Return the measure that headline, differences and claims are about, from the labels [n] of the test images.

    It is balanced accuracy if the best constant answer is right more than 1.2 times as often as with equally frequent
    classes, else accuracy.
    """
    counts = np.unique(labels, return_counts=True)[1]
    return BALANCED if counts.max() * len(counts) > _ABOVE * len(labels) else ACCURACY


def called(one: Result) -> str:
    """Return the name of a quoted measure for a headline, which names accuracy by its protocol alone."""
    return "" if one.measure == ACCURACY else f"{one.measure} "


def score_of_choice(right: np.ndarray, labels: np.ndarray, among: np.ndarray | None = None) -> float:
    """Return the score by which a choice is made on held-out images: accuracy, or balanced accuracy by the same rule.

    Args:
        right: [n] right answers.
        labels: [n] classes.
        among: [m] labels to which the rule is applied; by default those of the images themselves.
    """
    if quoted_measure(labels if among is None else among) == BALANCED:
        return float(recalls(right, labels)[0].mean())
    return float(right.mean())


def explain_measure(labels: np.ndarray, names: Sequence[str] = (), noun: str = "images") -> str:
    """Return sentences on the quoted measure, the reason for it, and classes with few test images.

    Args:
        labels: [n] classes of the test images.
        names: names of the classes.
        noun: "images" or "recordings".
    """
    found = Answers(labels, labels, names=names)
    classes, counts = np.unique(labels, return_counts=True)
    best, n, c = int(counts.argmax()), len(labels), len(classes)
    share = f"always answering {found.name(int(classes[best]))} is right for {counts[best] / n:.1%} of the test {noun}"
    if quoted_measure(found.labels) == ACCURACY:
        said = f"Quoted is accuracy: {share}, at most a fifth above an even share ({1 / c:.1%})."
    else:
        said = (
            f"Quoted is balanced accuracy, the mean recall of {c} classes, not accuracy: {share}, more than a fifth "
            f"above an even share ({1 / c:.1%}). Choices on held-out {noun} are by the same rule."
        )
    few = [f"{found.name(int(label))} {count}" for label, count in zip(classes, counts, strict=True) if count < FEW]
    if few and quoted_measure(found.labels) == BALANCED:
        more = f" and {len(few) - 5} more classes" if len(few) > 5 else ""
        said += f" Few test {noun} (below {FEW}): {', '.join(few[:5])}{more}; intervals are rough there."
    return said


# Values and intervals.


def recalls(right: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the recall of each class among the labels, in ascending order, and its number of images."""
    _, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return np.bincount(places, right, len(counts)) / counts, counts


def balanced_interval(right: np.ndarray, labels: np.ndarray, groups: np.ndarray | None = None) -> tuple[float, float]:
    """Compute the 95 % interval of balanced accuracy from right answers [n] and true classes [n].

    Wilson's intervals of the recalls are combined as variance estimates at either end (MOVER, Zou and Donner 2008).
    With groups it is wider, by the variance of the sums of groups.
    """
    each, counts = recalls(right, labels)
    c, value = len(counts), float(each.mean())
    ends = np.array([wilson(share, n) for share, n in zip(each.tolist(), counts.tolist(), strict=True)])
    low, high = (math.sqrt(float(((each - end) ** 2).sum())) / c for end in ends.T)
    if groups is not None:
        places = np.unique(labels, return_inverse=True)[1]
        apart = (right - each[places]) / (c * counts[places])
        quantile, variance = over_groups(apart, float(apart @ apart), groups)
        low, high = (max(reach, quantile * math.sqrt(variance)) for reach in (low, high))
    return max(0.0, value - low), min(1.0, value + high)


def auroc(scores: np.ndarray, labels: np.ndarray, groups: np.ndarray | None = None) -> tuple[float, float, float]:
    """Compute the area under the ROC curve with its 95 % interval: value, low, high.

    With two classes it is that of the rarer one, else the mean over classes of one against the rest. The variance is
    DeLong's (1988), on the log-odds scale, with half a case above all others and half a case below them added to each
    side, without which the interval of few or of perfectly ranked images is too short.

    Args:
        scores: [n c] scores; a class of the labels without a column has equal scores.
        labels: [n] classes, at least two of them.
        groups: [n] groups of the images; None: no groups.
    """
    present, counts = np.unique(labels, return_counts=True)
    chosen = _scored_classes(present, counts)
    values, middles, variance, apart = list[float](), list[float](), 0.0, np.zeros(len(labels))
    for label in chosen:
        positive, score = labels == label, _column(scores, label)
        ordered = np.sort(score[~positive]), np.sort(score[positive])
        n, m = map(len, ordered)
        above = np.empty(len(labels))
        above[positive] = _below(ordered[0], score[positive]) / n
        above[~positive] = 1 - _below(ordered[1], score[~positive]) / m
        values.append(float(above[positive].mean()))
        middles.append((values[-1] * m + 0.5) / (m + 1))
        apart += (above - values[-1]) / np.where(positive, m, n) / len(chosen)
        variance += 0.25 * (1 / m**2 + 1 / n**2) / len(chosen) ** 2
    quantile, variance = Z, variance + float(apart @ apart)
    if groups is not None:
        quantile, variance = over_groups(apart, variance, groups)
    middle = float(np.mean(middles))
    odds, reach = math.log(middle / (1 - middle)), quantile * math.sqrt(variance) / (middle * (1 - middle))
    value = float(np.mean(values))
    return value, min(value, _logistic(odds - reach)), max(value, _logistic(odds + reach))


def _logistic(odds: float) -> float:
    return (1 + math.tanh(odds / 2)) / 2


def _scored_classes(present: np.ndarray, counts: np.ndarray) -> list[int]:
    """Return the classes whose scores are judged: of two the rarer one, else all."""
    rarer = present[[int(counts.argmin())]] if counts[0] != counts[-1] else present[1:]
    return [int(label) for label in (rarer if len(present) == 2 else present)]


def _column(scores: np.ndarray, label: int) -> np.ndarray:
    return scores[:, label] if label < scores.shape[1] else np.zeros(len(scores))


def _below(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return how many numbers of an ascending array are below each value; equal ones count half."""
    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / 2


def macro_f1(confusion: np.ndarray) -> np.ndarray:
    """Return the mean F1 score of classes in truth or answers, from confusion matrices [... c c]."""
    both = np.diagonal(confusion, axis1=-2, axis2=-1)
    sizes = confusion.sum(-1) + confusion.sum(-2)
    return (2 * both / np.maximum(sizes, 1e-300)).sum(-1) / (sizes > 0).sum(-1)


def average_precision(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return average precision [t] for the numbers of draws of each image [t n]: of the rarer of two classes, else
    the mean over classes."""
    present, counts = np.unique(labels, return_counts=True)
    values = []
    for label in _scored_classes(present, counts):
        score = _column(scores, label)
        order = np.argsort(-score, kind="stable")
        last = np.append(np.diff(score[order]) != 0, True)  # of images with equal scores
        drawn = weights[:, order].astype(np.float64)
        found = np.cumsum(drawn * (labels[order] == label), 1)[:, last]
        named = np.cumsum(drawn, 1)[:, last]
        gains = np.diff(found, axis=1, prepend=0)
        values.append((gains * found / np.maximum(named, 1)).sum(1) / np.maximum(found[:, -1], 1))
    return np.mean(values, 0)


def resampled(labels: np.ndarray, groups: np.ndarray | None, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Draw how often each image is in each of ``draws`` resamples [t n]: within its class, or by whole groups."""
    if groups is not None:
        places = np.unique(groups, return_inverse=True)[1]
        g = int(places.max()) + 1
        return rng.multinomial(g, np.full(g, 1 / g), draws)[:, places]
    drawn = np.empty((draws, len(labels)), np.int64)
    for label in np.unique(labels):
        its = np.flatnonzero(labels == label)
        drawn[:, its] = rng.multinomial(len(its), np.full(len(its), 1 / len(its)), draws)
    return drawn


def bootstrap_interval(
    found: Answers, statistic: Callable[[np.ndarray], np.ndarray], draws: int = _DRAWS
) -> tuple[float, float]:
    """Return the 95 % percentile interval of a statistic of the numbers of draws of each image [t n], with a fixed
    seed."""
    rng, n = np.random.default_rng(_SEED), len(found.labels)
    values, step = [], max(1, _AT_ONCE // (4 * n))
    for first in range(0, draws, step):
        values.append(statistic(resampled(found.labels, found.groups, min(step, draws - first), rng)))
    low, high = np.quantile(np.concatenate(values), (0.025, 0.975))
    return float(low), float(high)


# All results of one encoder.


def class_results(
    encoder: str,
    protocol: str,
    settings: Mapping[str, Any],
    found: Answers,
    *,
    quoted: bool = True,
    every: bool = False,
) -> list[Result]:
    """Return all results of the answers of one encoder, or control, to the test images.

    Accuracy and balanced accuracy come first. `Result.quoted` is set for one of them (`quoted_measure`).

    Args:
        encoder: name of the encoder or control.
        protocol: name of the protocol.
        settings: settings of the protocol.
        found: its answers.
        quoted: whether this is the setting that the headline quotes: then the recall of each class follows.
        every: whether macro F1, AUROC, average precision and accuracies of groups follow, too (``--measures all``).
    """
    name = encoder, protocol, settings
    accuracy = Result.of_images(*name, found.right, found.groups)
    ends = balanced_interval(found.right, found.labels, found.groups)
    outcomes = Outcomes(found.right, groups=found.groups, classes=found.labels)
    value = float(recalls(found.right, found.labels)[0].mean())
    balanced = replace(accuracy, measure=BALANCED, value=value, low=ends[0], high=ends[1], outcomes=outcomes)
    rows = [accuracy, balanced]
    for label in found.present.tolist() if quoted else ():
        its, named = found.labels == label, float((found.answers == label).sum())
        groups = None if found.groups is None else found.groups[its]
        rows.append(_part(accuracy, found.right[its], f"{RECALL}{found.name(label)}", groups, answers=named))
    if quoted and every:
        rows += _scored(accuracy, found)
        if found.groups is not None:
            each = {group: found.right[found.groups == group] for group in np.unique(found.groups).tolist()}
            parts = [_part(accuracy, right, f"{IN_GROUP}{found.group(group)}") for group, right in each.items()]
            worst = sorted(parts, key=lambda one: (one.value, one.high))[:_MOST_GROUPS]
            rows += [replace(one, groups=0) for one in worst]
    measure = quoted_measure(found.labels)
    return [replace(row, quoted=quoted and row.measure == measure) for row in rows]


def cell_name(of: str, to: str) -> str:
    """Return the name of a number of the confusion matrix, in `Result.also` of a macro F1."""
    return f"{of} as {to}"


def confusion_of(one: Result, classes: Sequence[str]) -> np.ndarray:
    """Return the confusion matrix [c c] of a macro F1."""
    return np.array([[int(one.also.get(cell_name(of, to), 0)) for to in classes] for of in classes])


def headline_row(rows: Sequence[Result], labels: Any) -> Result:
    """Return the result of one encoder and setting by the measure that the headline quotes, for ``labels`` [n]."""
    measure = quoted_measure(np.asarray(labels))
    return next(row for row in rows if row.measure == measure)


def quoted_first(rows: Sequence[Result], labels: Any) -> list[Result]:
    """Return results with those of the measure that the headline quotes first, for ``labels`` [n]."""
    measure = quoted_measure(np.asarray(labels))
    return sorted(rows, key=lambda row: row.measure != measure)


def _part(accuracy: Result, right: np.ndarray, measure: str, groups: np.ndarray | None = None, **also: float) -> Result:
    """Return the accuracy of some of the images from their correctness [m], with their number and others ``also``."""
    low, high = accuracy_interval(right, groups)
    about: dict[str, Any] = {"also": {"images": float(len(right)), **also}, "outcomes": None}
    return replace(accuracy, measure=measure, value=float(right.mean()), low=low, high=high, **about)


def _scored(accuracy: Result, found: Answers) -> list[Result]:
    """Return macro F1 with the confusion matrix and, where there are scores and two classes, AUROC and average
    precision."""
    matrix, labels, c = found.confusion(), found.labels, len(found.present)
    cells = [(int(i), int(j)) for i, j in zip(*matrix.nonzero(), strict=True)] if len(matrix) <= _MOST_CELLS else []
    also = {cell_name(found.name(i), found.name(j)): float(matrix[i, j]) for i, j in cells}
    whole = np.ones((1, len(labels)), np.int64)

    def row(measure: str, value: float, low: float, high: float, also: Mapping[str, float]) -> Result:
        ends: dict[str, Any] = {"low": min(low, value), "high": max(high, value)}
        return replace(accuracy, measure=measure, value=value, **ends, outcomes=None, also=also)

    def f1(weights: np.ndarray) -> np.ndarray:
        size, pairs = len(matrix), len(matrix) * labels + found.answers
        drawn = np.stack([np.bincount(pairs, one, size * size) for one in weights])
        return macro_f1(drawn.reshape(-1, size, size))

    rows = [row(MACRO_F1, float(f1(whole)[0]), *bootstrap_interval(found, f1), also)]
    if found.scores is None or c < 2:
        return rows
    scores = np.asarray(found.scores, np.float64)

    def precision(weights: np.ndarray) -> np.ndarray:
        return average_precision(scores, labels, weights)

    draws = _DRAWS if c <= _MOST_CELLS else _DRAWS // 5
    prevalence = {"of a random order": float(average_precision(np.zeros_like(scores), labels, whole)[0])}
    rows.append(row(AUROC, *auroc(scores, labels, found.groups), {}))
    ends = bootstrap_interval(found, precision, draws)
    return [*rows, row(PRECISION, float(precision(whole)[0]), *ends, prevalence)]
