"""Claims about results: whether one is better than another, and how far it is from a baseline to perfect.

`Difference` decides "better" and "worse" for all protocols and for `compare`. `Effect` is the share of the way from a
baseline to perfect, for the verdict on a pre-training run. A claim about an effect needs two things: the 95 %
interval over images must exclude zero, and the effect must be large enough to matter. With many images, tiny effects
pass the first test; with few images, noise passes the second.

If images come in groups that a split keeps together, such as the slides of one patient, other test images would be
other groups. Then variances are those of the sums of groups, with Student's quantile for their number, but never below
those of single images: the groups may be too few to show how alike their images are.

Letters: s seeds, n test images.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from patchloom.errors import conforms, listing

# Shares of the way from the baseline to perfect. By kNN, raw pixels beat the features of all runs in
# benchmarks/README.md below `CLEAR`, and of few above it; below `SMALL`, the pictures show no effect either.
SMALL, CLEAR = 0.02, 0.10
MIN_VERDICT_IMAGES = 10  # with fewer images, nothing is called better or worse
Z = 1.959963984540054  # standard normal quantile of a 95 % interval
WIDE = 0.07  # half-width of an interval from which a sentence says that the images are few
_SPLIT = 0.25  # ratio of test to training images of a split: a fifth is split off
START = "start"  # the control of an adapted encoder: the weights that its run began with, unchanged
BLEND = "blend"  # a control of an adapted encoder: weights between its start and its own
OF_TEACHER = " (teacher)"  # end of the name of the moving average of a run
CONSTANT = "best constant"  # the control that answers with the most frequent class of the test images
RAW = ("raw pixels", "raw features")  # the controls without an encoder, `Modality.raw`
_FAR = 0.10  # difference in accuracy from which raw pixels are far ahead
_CALLED = {  # controls in a sentence
    "untrained": "the untrained one",
    "teacher": "its teacher",
    "from scratch": "training from scratch",
    START: "its start",
    BLEND: "the chosen blend",
}


def control_name(control: str) -> str:
    """Return the name of a control in a verdict on a run."""
    return _CALLED[START] if control == START else control


class Level(Enum):
    """Claim about an effect."""

    UNKNOWN = "too few images to tell whether there is an effect"
    WORSE = "the baseline is better"
    NONE = "no effect, and a clear one is ruled out"
    UNSURE = "an effect, but too few images to tell its size"
    HARDLY = "an effect below `SMALL`"
    WEAK = "an effect above `SMALL`"
    CLEAR = "an effect of at least `CLEAR`"

    @property
    def better(self) -> bool:
        """Whether the baseline is beaten, by however little."""
        return self in (Level.UNSURE, Level.HARDLY, Level.WEAK, Level.CLEAR)

    @property
    def visible(self) -> bool:
        """Whether the baseline is beaten by more than `SMALL`; noise can be learnt by 0.5 %."""
        return self.better and self is not Level.HARDLY

    @property
    def no_gain(self) -> bool:
        """Whether a clear gain over the baseline is ruled out."""
        return self in (Level.NONE, Level.WORSE)


class Effect(NamedTuple):
    """Share of the way from a baseline (0) to perfect (1); negative if the baseline is better.

    Attributes:
        share: share of the way.
        low, high: 95 % interval over images.
        n: number of images.
    """

    share: float
    low: float
    high: float
    n: int

    @property
    def level(self) -> Level:
        """Claim about the effect."""
        if self.n < MIN_VERDICT_IMAGES or not math.isfinite(self.share):
            return Level.WORSE if self.n >= MIN_VERDICT_IMAGES and self.share < 0 else Level.UNKNOWN
        if self.low > 0:
            if self.low >= CLEAR:
                return Level.CLEAR
            if self.high >= CLEAR and self.high - self.low > CLEAR - SMALL:
                return Level.UNSURE
            return Level.WEAK if self.share >= SMALL else Level.HARDLY
        if self.high < 0:
            return Level.WORSE
        return Level.UNKNOWN if self.high >= CLEAR else Level.NONE

    def fell(self, least: float) -> bool:
        """Return whether the result is significantly worse, by at least ``least``.

        A run is tested at half a dozen measures, so the interval is √2 times as wide as the 95 % one: it has 99.4 %.
        """
        return self.share <= -least and self.share + math.sqrt(2) * (self.high - self.share) < 0

    def plain(self) -> dict[str, Any]:
        """Return values for JSON, with None for numbers that are not finite."""
        numbers = {name: finite_or_none(getattr(self, name)) for name in ("share", "low", "high")}
        return {**numbers, "n": self.n, "level": self.level.name.lower()}

    @staticmethod
    def of(values: Mapping[str, Any]) -> Effect:
        """Read the result of `plain`; an interval that was not finite becomes infinite."""
        try:
            ends = number_of(values["low"], -math.inf), number_of(values["high"], math.inf)
            return Effect(number_of(values["share"], math.nan), *ends, count_of(values["n"]))
        except (KeyError, TypeError) as problem:
            raise ValueError(f"invalid effect: {problem}") from problem

    def text(self) -> str:
        """Format as "46 % [44, 48]", with decimals if the interval is narrow."""
        finite = all(map(math.isfinite, (self.low, self.high)))
        reach = self.high - self.low if finite else 1.0
        digits = 2 if reach < 0.002 else 1 if reach < 0.02 else 0
        # + 0.0: no minus sign on a share that is rounded to 0
        share, low, high = (f"{round(100 * one, digits) + 0.0:.{digits}f}" for one in (self.share, self.low, self.high))
        return f"{share} % [{low}, {high}]" if finite else f"{share} %"


def leave_open(n: int, images: str) -> str:
    """Return the beginning of a sentence such as "64 held-out images leave open whether ...", for ``n`` ``images``.

    Below `MIN_VERDICT_IMAGES` they are too few for any claim. More of them can decide only about larger effects.
    """
    if n < MIN_VERDICT_IMAGES:
        return f"{images} {'is' if n == 1 else 'are'} too few to tell"
    return f"{images} leave open"


def effect_of(
    values: Sequence[float], baseline: Sequence[float], perfect: float, groups: ArrayLike | None = None
) -> Effect:
    """Compute the effect of per-image results over a baseline on the same images.

    The share is a ratio of two means over images, with the linearised interval of a ratio and Student's quantile. It is
    paired, so differences in difficulty between images do not widen it. Accuracies that are 1 on every image, or 0 on
    every image, have no spread; their interval is Wilson's.

    Args:
        values: [n] result on each image.
        baseline: [n] result of the baseline.
        perfect: best possible result, such as 0 for an error and 1 for an accuracy.
        groups: [n] groups of the images; None: no groups.
    """
    n = len(values)
    gains = [value - base for value, base in zip(values, baseline, strict=True)]
    ways = [perfect - base for base in baseline]
    gain, way = sum(gains), sum(ways)
    if not way:  # a perfect baseline can be met or missed, but not beaten
        share = 0.0 if not gain else -math.inf
        return Effect(share, share, share, n)
    share = gain / way
    if n < MIN_VERDICT_IMAGES:
        return Effect(share, -math.inf, math.inf, n)
    apart = [one - share * whole for one, whole in zip(gains, ways, strict=True)]
    quantile, variance = _over_groups(apart, sum(one * one for one in apart) * n / (n - 1), groups)
    reach = quantile * math.sqrt(variance) / abs(way)
    if perfect == 1 and (ends := _without_spread(values, groups)):
        low, high = ((end - (perfect - way / n)) / (way / n) for end in ends)
        return Effect(share, min(share, low), max(share, high), n)
    return Effect(share, share - reach, share + reach, n)


def effect_between(
    value: tuple[float, float, float], baseline: tuple[float, float, float], n: int, perfect: float = 1.0
) -> Effect:
    """Compute the effect of an accuracy over a baseline from their intervals, without per-image results.

    The interval of the difference is Newcombe's, from the two score intervals (1998, method 10). It assumes independent
    samples, so on the same images it is rather too wide.
    """
    (one, low, high), (other, other_low, other_high) = value, baseline
    gain, way = one - other, perfect - other
    if way <= 0:
        share = 0.0 if not gain else -math.inf
        return Effect(share, share, share, n)
    down = math.hypot(one - low, other_high - other)
    up = math.hypot(high - one, other - other_low)
    return Effect(gain / way, (gain - down) / way, (gain + up) / way, n)


# Allowed formats of numbers in files; others might ask for a million digits.
_FORM = re.compile(r",?(\.\d)?[%efg]?")
_LONGEST = 200  # longest name in a file


@dataclass(frozen=True)
class MeasureResult:
    """Result of a measure with its baselines, as means over images.

    Attributes:
        name: name of the measure.
        value: mean over images.
        low, high: 95 % interval of the mean over images.
        baselines: means of the baselines by name.
        effects: effects over each baseline.
        to_beat: baseline that a model must beat to have learnt anything.
        barred: all baselines that must be beaten; others may have information that the network lacks.
        higher_is_better: whether 1 is perfect; otherwise 0 is.
        form: format specification of a value.
        outputs: spread and effective rank of a teacher's outputs; empty for tasks that cannot collapse.
    """

    name: str
    value: float
    low: float
    high: float
    baselines: dict[str, float]
    effects: dict[str, Effect]
    to_beat: str
    barred: tuple[str, ...]
    higher_is_better: bool
    form: str = ".1%"
    outputs: dict[str, float] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Number of images."""
        return self.effect.n

    @property
    def unit(self) -> str:
        """Unit: "%" or ""."""
        return "%" if self.form.endswith("%") else ""

    @property
    def effect(self) -> Effect:
        """Effect over the baseline to beat."""
        return self.effects[self.to_beat]

    @property
    def level(self) -> Level:
        """Claim about the task, from the baseline to beat alone: others may have information that the network lacks."""
        return self.effect.level

    def show(self, value: float | None = None) -> str:
        """Format the result, or another value in the same unit."""
        return format(self.value if value is None else value, self.form)

    def with_baseline(self, called: str) -> str:
        """Format as "error 0.532, blurred copy 0.727", with the baseline to beat under the name ``called``."""
        return f"{self.name} {self.show()}, {called} {self.show(self.baselines[self.to_beat])}"

    def plain(self) -> dict[str, Any]:
        """Return values for JSON, with None for numbers that are not finite."""
        numbers = {name: finite_or_none(getattr(self, name)) for name in ("value", "low", "high")}
        return {
            "name": self.name, "unit": self.unit, "form": self.form, **numbers, "n": self.n,
            "higher_is_better": self.higher_is_better, "to_beat": self.to_beat,
            "baselines": {
                name: {"value": finite_or_none(value), "to_beat": name in self.barred, **self.effects[name].plain()}
                for name, value in self.baselines.items()
            },
            "outputs": {name: finite_or_none(value) for name, value in self.outputs.items()},
        }  # fmt: skip

    @staticmethod
    def of(values: Any) -> MeasureResult:
        """Validate and read the result of `plain` from a file, which may have been edited."""
        try:
            baselines = {text_of(name): one for name, one in values["baselines"].items()}
            value, low, high = (number_of(values[name], math.nan) for name in ("value", "low", "high"))
            form, to_beat = text_of(values["form"]), text_of(values["to_beat"])
            if not _FORM.fullmatch(form) or to_beat not in baselines:
                raise ValueError(f"the form {form!r} or the baseline {to_beat!r} is unknown")
            return MeasureResult(
                text_of(values["name"]),
                value,
                low,
                high,
                {name: number_of(one["value"], math.nan) for name, one in baselines.items()},
                {name: Effect.of(one) for name, one in baselines.items()},
                to_beat,
                tuple(name for name, one in baselines.items() if one["to_beat"] is True),
                values["higher_is_better"] is True,
                form,
                {text_of(name): number_of(one, math.nan) for name, one in values["outputs"].items()},
            )
        except (KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"invalid result of a measure: {problem}") from problem


def result_or_none(values: Any) -> MeasureResult | None:
    """Read a `MeasureResult`; None if there is none, or only the words of an older version."""
    try:
        return MeasureResult.of(values)
    except ValueError:
        return None


def finite_or_none(value: float) -> float | None:
    """Return a number for JSON; None for infinity and nan."""
    return float(value) if math.isfinite(value) else None


def number_of(value: Any, missing: float) -> float:
    """Read a number from a file; ``missing`` if it was not finite."""
    if value is None:
        return missing
    if not conforms(value, float):
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return float(value)


def count_of(value: Any) -> int:
    """Read a number of images from a file."""
    if not conforms(value, int) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a number of images")
    return int(value)


def text_of(value: Any) -> str:
    """Read a name from a file: one line of limited length."""
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise ValueError(f"{str(value)[:40]!r} is not a name")
    return value


def mean_interval(
    values: Sequence[float], accuracy: bool = False, groups: ArrayLike | None = None
) -> tuple[float, float]:
    """Compute Student's 95 % interval of a mean over images; infinite for a single image.

    If ``accuracy`` is true and all values are 1, or all are 0, the interval is Wilson's. The images may be in
    ``groups`` [n].
    """
    found, n = np.asarray(values, dtype=np.float64), len(values)
    if accuracy and n > 1 and (ends := _without_spread(values, groups)):
        return ends
    if n < 2:
        return -math.inf, math.inf
    apart = found - found.mean()
    quantile, variance = _over_groups(apart, float(apart @ apart) * n / (n - 1), groups)
    reach = quantile * math.sqrt(variance) / n
    return float(found.mean() - reach), float(found.mean() + reach)


def accuracy_interval(right: ArrayLike, groups: ArrayLike | None = None) -> tuple[float, float]:
    """Compute the 95 % interval of an accuracy from its images [n], 1 or 0 each: Wilson's, or wider over ``groups``."""
    found = np.asarray(right, dtype=np.float64)
    mean, n = float(found.mean()), len(found)
    if groups is None:
        return wilson(mean, n)
    if ends := _without_spread(found.tolist(), groups):
        return ends
    low, high = wilson(mean, n)
    apart = found - mean
    quantile, variance = _over_groups(apart, float(apart @ apart), groups)
    reach = quantile * math.sqrt(variance) / n
    return max(0.0, min(low, mean - reach)), min(1.0, max(high, mean + reach))


def _over_groups(apart: ArrayLike, variance: float, groups: ArrayLike | None) -> tuple[float, float]:
    """Return Student's quantile, and the variance of a sum over images or over whole groups, whichever is larger.

    Args:
        apart: [n] deviations of the terms of the sum from their expectation.
        variance: of the sum, if the images are independent.
        groups: [n] groups of the images; None: no groups.
    """
    found = np.asarray(apart, dtype=np.float64)
    if groups is None:
        return student(len(found) - 1), variance
    sums = np.bincount(np.unique(np.asarray(groups), return_inverse=True)[1], found)
    g = len(sums)
    if g < 2:
        return math.inf, 1.0  # one group shows nothing about others
    return student(g - 1), max(variance, float(sums @ sums) * g / (g - 1))


def _without_spread(values: Sequence[float], groups: ArrayLike | None) -> tuple[float, float] | None:
    """Return Wilson's interval of accuracies that are all 0 or all 1, as if each image or group were one trial; else
    None."""
    first, n = values[0], len(values) if groups is None else len(np.unique(groups))
    return wilson(first, n) if first in (0, 1) and all(one == first for one in values) else None


def wilson(share: float, n: int, z: float = Z) -> tuple[float, float]:
    """Compute Wilson's score interval for a ``share`` in [0, 1] of ``n`` trials (Wilson 1927); ``z`` = 1.96 gives 95 %.

    It covers the variation over test images, not over seeds.
    """
    if n < 1:
        raise ValueError("an interval needs at least one trial")
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def is_wide(value: float, low: float, high: float) -> bool:
    """Return whether the interval of a share is so wide that other test images could give a very different one."""
    return low < high and max(high - value, value - low) > WIDE


def student(freedom: float) -> float:
    """Return Student's quantile of a 95 % interval."""
    from scipy.special import stdtrit  # takes long to import, and only intervals need it

    return float(stdtrit(freedom, 0.975))


class Claim(Enum):
    """Claim about a `Difference`."""

    APART = "different images"
    FEW = "too few images"
    NONE = "none"
    ONCE = "one training"
    BETTER = "better"
    WORSE = "worse"


@dataclass(frozen=True)
class Difference:
    """Difference between an encoder's result and a control's on the same test images.

    Attributes:
        control: name of the control in the rows of a report.
        value: result of the encoder minus that of the control; in [-1, 1] if the unit is %.
        low, high: 95 % interval over test images and, with several trainings per side, over trainings.
        n: number of test images; 0 if the two were tested on different images.
        trainings: number of seeds per side.
        trained: whether the result depends on a random training. False for a given encoder with a deterministic fit on
            its features (kNN, logistic regression).
        unit: unit of the value.
        noun: "images" or "recordings".
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
        return Claim.BETTER if self.low > 0 else Claim.WORSE

    @property
    def exceeds(self) -> bool:
        """Whether the encoder is better on these test images, or ahead if they are too few for a claim."""
        return self.low > 0 if self.n >= MIN_VERDICT_IMAGES else self.value > 0

    @property
    def ahead(self) -> bool:
        """Whether the encoder is better, possibly in one training only."""
        return self.claim is Claim.BETTER or (self.claim is Claim.ONCE and self.value > 0)

    def effect(self, baseline: float, perfect: float = 1.0) -> Effect | None:
        """Return the difference as a share of the way from ``baseline`` to perfect; None if that is undefined."""
        way = perfect - baseline
        return Effect(self.value / way, self.low / way, self.high / way, self.n) if self.n and way > 0 else None

    def amount(self, value: float, sign: str = "+") -> str:
        """Format a number in the unit of the difference, without the unit."""
        return f"{100 * value:{sign}.1f}" if self.unit == "%" else f"{value:{sign}.2f}"

    def interval(self) -> str:
        """Format as "[+0.4, +3.8]"."""
        return f"[{self.amount(self.low)}, {self.amount(self.high)}]"

    def text(self) -> str:
        """Format as "+2.1 points [+0.4, +3.8]"."""
        return f"{self.amount(self.value)} {self._units()} {self.interval()}"

    def sentence(self) -> str:
        """Return the claim as a sentence on the encoder; no other code words it."""
        called = _CALLED.get(self.control, self.control)
        by, claim = f"{self.amount(abs(self.value), '')} {self._units()}", self.claim
        if claim is Claim.APART:
            return f"The encoder cannot be compared with {called}: they were tested on different {self.noun}."
        if claim is Claim.FEW:
            few = f"{self.n} test {self.noun} are" if self.n > 1 else f"1 test {self.noun.removesuffix('s')} is"
            return (
                f"{few} too few to compare the encoder with {called} ({self.amount(self.value)} {self._units()}): no "
                f"claim is made below {MIN_VERDICT_IMAGES}. Label more: 100 test {self.noun} tell an accuracy to "
                "within 10 points."
            )
        if claim is Claim.ONCE:
            side = "ahead of" if self.value > 0 else "behind"
            return (
                f"The encoder is {by} {side} {called} in this one training {self.interval()}; --seeds 3 tells whether "
                "that holds."
            )
        over = ""
        if self.trainings > 1:
            over = f" over {self.trainings} {'trainings of each' if self.trained else 'seeds'}"
        elif self.trained:
            over = " in this one training"
        if claim is Claim.NONE:
            return f"The encoder is indistinguishable from {called}{over} ({self.text()})."
        if self.control == START and claim is Claim.BETTER:
            return f"Adaptation helped: the encoder is {by} better than its start{over} {self.interval()}."
        if self.control == START:
            harmed = f"the encoder is {by} worse than its start{over} {self.interval()}"
            return f"Adaptation harmed: {harmed}. Keep the start."
        return f"The encoder is {by} {claim.value} than {called}{over} {self.interval()}."

    def short(self) -> str:
        """Return the claim of `sentence` in a few words, without numbers."""
        several = f" over {self.trainings} {'trainings' if self.trained else 'seeds'}" if self.trainings > 1 else ""
        claim = {
            Claim.APART: f"no claim: different {self.noun}",
            Claim.FEW: f"no claim below {MIN_VERDICT_IMAGES} test {self.noun}",
            Claim.NONE: f"indistinguishable{several}",
            Claim.ONCE: f"{'ahead' if self.value > 0 else 'behind'} in this one training; try --seeds 3",
        }.get(self.claim, f"{self.claim.value}{several}")
        return f"{claim}; no better than always answering {self.constant}" if self.constant else claim

    def plain(self) -> dict[str, Any]:
        """Return values for JSON."""
        names = ("control", "low", "high", "n", "trainings", "trained", "unit", "noun")
        values = {name: getattr(self, name) for name in names}
        values |= {"constant": self.constant} if self.constant else {}
        return {**values, "difference": self.value, "claim": self.claim.value}

    @staticmethod
    def of(values: Mapping[str, Any]) -> Difference:
        """Read the result of `plain`."""
        try:
            return Difference(
                str(values["control"]),
                value=float(values["difference"]),
                low=float(values["low"]),
                high=float(values["high"]),
                n=int(values["n"]),
                trainings=int(values["trainings"]),
                trained=bool(values["trained"]),
                unit=str(values.get("unit", "%")),
                noun=str(values.get("noun", "images")),
                constant=str(values.get("constant", "")),
            )
        except (KeyError, TypeError) as problem:
            raise ValueError(f"invalid difference: {problem}") from problem

    def _units(self) -> str:
        return "points" if self.unit == "%" else self.unit


# What a score says about the data rather than about the encoder, beside controls that see no image, or no encoder.


def constant_remark(names: Sequence[str], answer: str, number: str) -> str:
    """Return a sentence on encoders that are not better than a constant answer.

    Args:
        names: the encoders, with their scores.
        answer: the class that is always answered.
        number: its score.
    """
    said = listing(names, "and")
    are = "are" if len(names) > 1 else "is"
    return (
        f"{said} {are} no better than always answering {answer} ({number}): these labels do not show that anything was "
        "learnt."
    )


def telling_remark(name: str, telling: str, measure: str, found: Difference) -> str:
    """Return a sentence on an encoder that is better than a constant answer, but not by the quoted measure; else "".

    Args:
        name: the encoder.
        telling: the measure by which it is better.
        measure: the quoted measure.
        found: difference from the best constant answer by ``telling``.
    """
    if found.claim is not Claim.BETTER:
        return ""
    return (
        f"By {telling}, {name} is {found.amount(found.value, '')} points better than a constant answer "
        f"{found.interval()}, so something was learnt, though by {measure} that is not clear on {found.n:,} test "
        f"{found.noun}."
    )


def raw_remark(found: Difference) -> str:
    """Return a sentence if a control without an encoder is far better than the encoder; else ""."""
    if found.control not in RAW or found.n < MIN_VERDICT_IMAGES or not found.high < 0 or found.value > -_FAR:
        return ""
    return (
        f"{found.control.capitalize()} are {found.amount(-found.value, '')} points better than the encoder: this may "
        f"mean near copies of test {found.noun} among those trained on (patchloom check), an encoder whose crop misses "
        "what tells the classes apart, or one that has learnt too little."
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
) -> Difference:
    """Compare two results in [0, 1] on the same test images, with an interval over images and over seeds.

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
    """
    sides = [np.atleast_2d(np.asarray(side, dtype=np.float64)) for side in (one, other)]
    k, seeds = sides[0].shape[1], max(map(len, sides))
    if sides[1].shape[1] != k:
        raise ValueError(f"the two sides have {k} and {sides[1].shape[1]} images, which are not the same")
    gains = sides[0].mean(0) - sides[1].mean(0)
    if values is None:
        results = [side.mean(1) for side in sides]
        middle = gains.sum() / (k + 2)
        quantile, images = Z, ((gains @ gains + 1) / (k + 2) - middle**2) / (k + 2)
        if groups is not None:
            quantile, images = _over_groups(gains - gains.mean(), images * k**2, groups)
            images /= k**2
    else:
        results = [np.asarray(value, dtype=np.float64) for value in values]
        middle = results[0].mean() - results[1].mean()
        quantile, images = (student(k - 1), gains.var(ddof=1) / k) if k > 1 else (math.inf, math.inf)
    if groups is None and math.isfinite(images):  # of groups it is not known: their interval is wider without it
        images = max(0.0, images - sum(map(_flips, sides)))
    over_images = quantile * math.sqrt(images) if images != 0 else 0.0
    over_seeds, freedom = _welch(results)
    reach = math.hypot(over_images, over_seeds)
    value = float(results[0].mean() - results[1].mean())
    # nan: without one of the images there is no score
    low, high = (-1.0, 1.0) if not math.isfinite(reach) else (middle - reach, middle + reach)
    ends, parts = (max(-1.0, low), min(1.0, high)), (over_images, over_seeds, freedom)
    return Difference(control, value, *ends, n or k, seeds, trained, "%", noun, *parts)


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
    one: Sequence[float], other: Sequence[float], n: int, *, control: str = "", trained: bool = True, noun: str = ""
) -> Difference:
    """Compare two results whose test split differs between seeds, drawn from the same images.

    The interval is Nadeau and Bengio's (2003, corrected resampled t-test): paired by seed, because both sides of a seed
    have the same split, and wider than Student's, because the splits overlap.

    Args:
        one, other: [s] results by seed.
        n: number of test images of the smallest split.
        control, trained, noun: as for `difference`.
    """
    gains = np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    seeds, middle = len(gains), float(gains.mean())
    reach = student(seeds - 1) * math.sqrt(gains.var(ddof=1) * (1 / seeds + _SPLIT))
    low, high = max(-1.0, middle - reach), min(1.0, middle + reach)
    return Difference(control, middle, low, high, n, seeds, trained, noun=noun or "images")
