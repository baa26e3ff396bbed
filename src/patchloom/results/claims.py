"""Claims about results: whether one is better than another.

`Difference` decides "better" and "worse" for all protocols and for `compare`. If images come in groups, see
`patchloom.results.intervals`.

Letters: s seeds, n test images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from patchloom.errors import listing, typed_fields
from patchloom.results.intervals import Z, over_groups, student

MIN_VERDICT_IMAGES = 10  # with fewer images, nothing is called better or worse
_SPLIT = 0.25  # ratio of test to training images of a split: a fifth is split off
UNTRAINED = "untrained"  # the control with the encoder's architecture and random weights
START = "start"  # the control of an adapted encoder: the weights that its run began with, unchanged
BLEND = "blend"  # a control of an adapted encoder: weights between its start and its own
OF_TEACHER = " (teacher)"  # end of the name of the moving average of a run
CONSTANT = "best constant"  # the control that answers with the most frequent class of the test images
MEAN = "mean predictor"  # the control that predicts the mean of the training images' numbers
PIXELS = "raw pixels"  # the control without an encoder, of images
RAW = (PIXELS, "raw features")  # those of images and of recordings, `Modality.raw`
_FAR = 0.10  # difference in accuracy from which raw pixels are far ahead
_CALLED = {  # controls in a sentence
    UNTRAINED: "the untrained one",
    "teacher": "its teacher",
    "from scratch": "training from scratch",
    START: "its start",
    BLEND: "the chosen blend",
    MEAN: "the mean predictor",
}


def control_name(control: str) -> str:
    """Return the name of a control in a verdict on a run."""
    return _CALLED[START] if control == START else control


class Claim(Enum):
    """Claim about a `Difference`."""

    APART = "different images"
    FEW = "too few images"
    NONE = "none"
    ONCE = "one training"
    BETTER = "better"
    WORSE = "worse"


_KEPT = (  # of a difference, in files
    *("control", "low", "high", "n", "trainings", "trained", "unit", "digits", "noun", "constant", "higher_is_better"),
)


@dataclass(frozen=True)
class Difference:
    """Difference between an encoder's result and a control's on the same test images.

    Attributes:
        control: name of the control in the rows of a report.
        value: result of the encoder minus that of the control; in [-1, 1] if the unit is %.
        low, high: 95 % interval over test images and, with several trainings per side, over trainings; infinite if
            images or groups are too few and the unit is not %.
        n: number of test images; 0 if the two were tested on different images.
        trainings: number of seeds per side.
        trained: whether the result depends on a random training. False for a given encoder with a deterministic fit on
            its features (kNN, logistic regression).
        unit: unit of the value.
        digits: decimals when it is shown, of points or of the number; None: 1 and 2.
        noun: "images" or "recordings".
        higher_is_better: whether the encoder is better if the difference is positive; false for an error.
        over_images, over_seeds: half-width of the interval over each alone; 0 over seeds with one training per side.
        freedom: degrees of freedom of the half-width over seeds; 0 if there are none.
        constant: the class whose constant answer the encoder is not better than; "" if it is better, or unknown.
    """

    control: str
    value: float
    low: float
    high: float
    n: int
    trainings: int = 1
    trained: bool = False
    unit: str = "%"
    noun: str = "images"
    over_images: float = field(default=0.0, compare=False, repr=False)
    over_seeds: float = field(default=0.0, compare=False, repr=False)
    freedom: float = field(default=0.0, compare=False, repr=False)
    constant: str = ""
    digits: int | None = None
    higher_is_better: bool = True

    @property
    def claim(self) -> Claim:
        """Claim about the difference; no other code decides on it.

        No claim below `MIN_VERDICT_IMAGES` images, or if the interval includes zero. With one training per side, the
        interval covers images only, so another training may reverse the difference.
        """
        if not self.n:
            return Claim.APART
        if self.n < MIN_VERDICT_IMAGES:
            return Claim.FEW
        if not (self.low > 0 or self.high < 0):
            return Claim.NONE
        if self.trained and self.trainings < 2:
            return Claim.ONCE
        return Claim.BETTER if self._least > 0 else Claim.WORSE

    @property
    def exceeds(self) -> bool:
        """Whether the encoder is better on these test images, or ahead if they are too few for a claim."""
        return self._least > 0 if self.n >= MIN_VERDICT_IMAGES else self._gain > 0

    @property
    def ahead(self) -> bool:
        """Whether the encoder is better, possibly in one training only."""
        return self.claim is Claim.BETTER or (self.claim is Claim.ONCE and self._gain > 0)

    @property
    def _gain(self) -> float:
        return self.value if self.higher_is_better else -self.value

    @property
    def _least(self) -> float:
        """Lower end of the interval of the gain."""
        return self.low if self.higher_is_better else -self.high

    def amount(self, value: float, sign: str = "+") -> str:
        """Format a number in the unit of the difference, without the unit."""
        percent = self.unit == "%"
        digits = self.digits if self.digits is not None else 1 if percent else 2
        return f"{100 * value if percent else value:{sign}.{digits}f}"

    def interval(self) -> str:
        """Format as "[+0.4, +3.8]"; "" if it is infinite."""
        known = math.isfinite(self.low) and math.isfinite(self.high)
        return f"[{self.amount(self.low)}, {self.amount(self.high)}]" if known else ""

    def text(self) -> str:
        """Format as "+2.1 points [+0.4, +3.8]"."""
        return " ".join(filter(None, (self.amount(self.value), self._units(), self.interval())))

    def sentence(self, encoder: str = "the encoder", error: str = "error") -> str:
        """Return the claim as a sentence on the encoder, perhaps by its name; no other code words it.

        If lower is better, it is on the encoder's ``error``, which is lower or higher than that of the control.
        """
        subject = encoder if encoder != "the encoder" else "The encoder"
        called = _CALLED.get(self.control, self.control)
        by, claim = " ".join(filter(None, (self.amount(abs(self.value), ""), self._units()))), self.claim
        if claim is Claim.APART:
            return f"{subject} cannot be compared with {called}: they were tested on different {self.noun}."
        if claim is Claim.FEW:
            few = f"{self.n} test {self.noun} are" if self.n > 1 else f"1 test {self.noun.removesuffix('s')} is"
            more = f"Label more: 100 test {self.noun} tell an accuracy to within 10 points."
            return (
                f"{few} too few to compare {encoder} with {called} "
                f"({' '.join(filter(None, (self.amount(self.value), self._units())))}): no claim is made below "
                f"{MIN_VERDICT_IMAGES}. {more if self.unit == '%' else f'Label more {self.noun}.'}"
            )
        sides = ("ahead of", "behind"), ("better", "worse")
        if not self.higher_is_better:
            subject, encoder, called = f"{subject}'s {error}", f"{encoder}'s {error}", f"that of {called}"
            sides = ("below", "above"), ("lower", "higher")
        side, word = (pair[0 if self._gain > 0 else 1] for pair in sides)
        if claim is Claim.ONCE:
            return (
                f"{subject} is {by} {side} {called} in this one training {self.interval()}; --seeds 3 tells whether "
                "that holds."
            )
        over = ""
        if self.trainings > 1:
            over = f" over {self.trainings} {'trainings of each' if self.trained else 'seeds'}"
        elif self.trained:
            over = " in this one training"
        if claim is Claim.NONE:
            return f"{subject} is indistinguishable from {called}{over} ({self.text()})."
        if self.control == START and claim is Claim.BETTER:
            return f"Adaptation helped: {encoder} is {by} {word} than {called}{over} {self.interval()}."
        if self.control == START:
            harmed = f"{encoder} is {by} {word} than {called}{over} {self.interval()}"
            return f"Adaptation harmed: {harmed}. Keep the start."
        return f"{subject} is {by} {word} than {called}{over} {self.interval()}."

    def plain(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in _KEPT}
        found |= {name: found[name] if math.isfinite(found[name]) else None for name in ("low", "high")}
        return {**found, "difference": self.value, "claim": self.claim.value}

    @staticmethod
    def of(values: Mapping[str, Any]) -> Difference:
        """Validate and read the result of `plain`.

        Raises:
            ValueError: a value is of another type.
        """
        plain = {name: values[name] for name in _KEPT} | {"value": values["difference"]}
        ends: dict[str, Any] = {
            name: end for name, end in (("low", -math.inf), ("high", math.inf)) if plain[name] is None
        }
        finite, counts = (-1e100, 1e100), {"n": (0, math.inf), "trainings": (1, math.inf), "digits": (0, 6)}
        known = {name: value for name, value in plain.items() if name not in ends}
        ranges = counts | dict.fromkeys(("value", "low", "high"), finite)
        return Difference(**typed_fields(Difference, known, ranges), **ends)

    def _units(self) -> str:
        return "points" if self.unit == "%" else self.unit


# What a score says about the data rather than about the encoder, beside controls that see no image, or no encoder.


def constant_remark(names: Sequence[str], answer: str, number: str) -> str:
    """Return a sentence on encoders, with their scores, that are not better than a constant ``answer`` of a score."""
    said = listing(names, "and")
    are = "are" if len(names) > 1 else "is"
    return (
        f"{said} {are} no better than always answering {answer} ({number}): these labels do not show that anything was "
        "learnt."
    )


def raw_remark(found: Difference) -> str:
    """Return a sentence if a control without an encoder is far better than the encoder; else ""."""
    if found.control not in RAW or found.n < MIN_VERDICT_IMAGES or not found.high < 0 or found.value > -_FAR:
        return ""
    points, misses = (" points", "tells the classes apart") if found.unit == "%" else ("", "the numbers depend on")
    return (
        f"{found.control.capitalize()} are {found.amount(-found.value, '')}{points} better than the encoder: this may "
        f"mean near copies of test {found.noun} among those trained on (patchloom check), an encoder whose crop misses "
        f"what {misses}, or one that has learnt too little."
    )


def difference(
    one: ArrayLike,
    other: ArrayLike,
    values: tuple[Sequence[float], Sequence[float]] | None = None,
    *,
    control: str = "",
    trained: bool = True,
    n: int | None = None,
    noun: str = "images",
    groups: ArrayLike | None = None,
    classes: ArrayLike | None = None,
    **shown: Any,
) -> Difference:
    """Compare two results on the same test images, with an interval over images and over seeds.

    The part over images is paired, from each image's mean over seeds, so images that are hard for both sides do not
    widen it. Accuracies have half a case added to each of the four outcomes (Agresti and Min 2005); jackknife
    pseudo-values use Student's quantile for n - 1 degrees of freedom. The part over seeds is Welch's, with a separate
    variance for each side. The squares of both are added, without the variance of single images in single trainings,
    which both contain. benchmarks/effects.py measures the error rate.

    Args:
        one, other: [s n] per image: 1 for a right answer and 0 for a wrong one, or pseudo-values. One row for a side
            that is not trained.
        values: [s] results of each side, for results that are no means over images; requires pseudo-values.
        control: name of the other side.
        trained: whether the result depends on a random training.
        n: number of test images, if the pseudo-values belong to groups of images.
        noun: "images" or "recordings".
        groups: [n] groups of the images; None: no groups. Only without ``values``.
        classes: [n] true classes, for balanced accuracies: means over classes, each of which has the half cases of an
            accuracy. Only without ``values``.
        shown: ``unit``, ``digits`` and ``higher_is_better`` of the difference, if they are not those of an accuracy;
            such results have ``values``.
    """
    sides = [np.atleast_2d(np.asarray(side, dtype=np.float64)) for side in (one, other)]
    k, seeds = sides[0].shape[1], max(map(len, sides))
    if sides[1].shape[1] != k:
        raise ValueError(f"the two sides have {k} and {sides[1].shape[1]} images, which are not the same")
    gains = sides[0].mean(0) - sides[1].mean(0)
    # images of each mean: of each class of a balanced accuracy, or all of them
    each: list[Any] = [slice(None)]
    if classes is not None:
        each = [np.flatnonzero(np.asarray(classes) == label) for label in np.unique(classes)]
    if values is None:
        results = [np.mean([side[:, its].mean(1) for its in each], 0) for side in sides]
        middle, images, apart = 0.0, 0.0, np.zeros(k)
        for its in each:
            own = gains[its]
            m = len(own)
            centre = own.sum() / (m + 2)
            middle += centre / len(each)
            images += ((own @ own + 1) / (m + 2) - centre**2) / (m + 2) / len(each) ** 2
            apart[its] = (own - own.mean()) / (m * len(each))
        quantile = Z
        if groups is not None:
            quantile, images = over_groups(apart, images, groups)
    else:
        results = [np.asarray(value, dtype=np.float64) for value in values]
        middle = results[0].mean() - results[1].mean()
        quantile, images = (student(k - 1), gains.var(ddof=1) / k) if k > 1 else (math.inf, math.inf)
    if groups is None and math.isfinite(images):  # of groups it is not known: their interval is wider without it
        images = max(0.0, images - sum(_flips(side[:, its]) for side in sides for its in each) / len(each) ** 2)
    over_images = quantile * math.sqrt(images) if images != 0 else 0.0
    over_seeds, freedom = _welch(results)
    reach = math.hypot(over_images, over_seeds)
    value = float(results[0].mean() - results[1].mean())
    # nan: without one of the images there is no score
    ends, parts = _ends(middle, reach, **shown), (over_images, over_seeds, freedom)
    found = Difference(control, value, *ends, n or k, seeds, trained, "%", noun, *parts)
    return replace(found, **shown)


def _ends(middle: float, reach: float, unit: str = "%", **_: Any) -> tuple[float, float]:
    """Return the ends of an interval, at most from -1 to 1 if the unit is %."""
    most = 1.0 if unit == "%" else math.inf
    if not math.isfinite(reach):
        return -most, most
    return max(-most, middle - reach), min(most, middle + reach)


def _flips(side: np.ndarray) -> float:
    """Return the variance of a mean over s seeds and n images due to the interaction of seeds and images."""
    seeds, n = side.shape
    if seeds < 2 or n < 2:
        return 0.0
    rest = side - side.mean(0) - side.mean(1, keepdims=True) + side.mean()
    return float((rest * rest).sum() / ((seeds - 1) * (n - 1) * seeds * n))


def _welch(results: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the half-width of Welch's interval for two means of results [s], and its degrees of freedom; 0 if none."""
    parts = [(one.var(ddof=1) / len(one), len(one) - 1) for one in results if len(one) > 1]
    total = sum(part for part, _ in parts)
    if not total > 0:
        return 0.0, 0.0
    freedom = total**2 / sum(part**2 / own for part, own in parts)
    return student(freedom) * math.sqrt(total), freedom


def difference_over_splits(
    one: Sequence[float],
    other: Sequence[float],
    n: int,
    *,
    control: str = "",
    trained: bool = True,
    noun: str = "images",
    **shown: Any,
) -> Difference:
    """Compare two results whose test split differs between seeds, drawn from the same images.

    The interval is Nadeau and Bengio's (2003, corrected resampled t-test): paired by seed, because both sides of a seed
    have the same split, and wider than Student's, because the splits overlap.

    Args:
        one, other: [s] results by seed.
        n: number of test images of the smallest split.
        control, trained, noun, shown: as for `difference`.
    """
    gains = np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    seeds, middle = len(gains), float(gains.mean())
    reach = student(seeds - 1) * math.sqrt(gains.var(ddof=1) * (1 / seeds + _SPLIT))
    found = Difference(control, middle, *_ends(middle, reach, **shown), n, seeds, trained, noun=noun)
    return replace(found, **shown)
