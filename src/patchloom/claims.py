"""What numbers allow to say: whether a result is better than another one, and how far it is from a baseline to perfect.

`Difference` is the one rule of "better" and "worse" for all protocols and for `compare`. `Effect` is the share of the
way from a baseline to perfect, for the verdict on a pre-training. Two things decide on its words, and both must agree:
the 95 % interval over images says whether there is an effect at all; the size of the effect says whether it matters.
With many images the first is true of effects that nobody would see, and with few the second is true of noise.

Letters: s seeds, n test images.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from patchloom.errors import conforms

# Shares of the way from the baseline to perfect. Of the runs in benchmarks/README.md, raw pixels beat the features of
# all that stayed below `CLEAR`, by kNN, and of few above it; below `SMALL` nothing is seen in the pictures, either.
SMALL, CLEAR = 0.02, 0.10
MIN_VERDICT_IMAGES = 10  # images; of fewer, nothing is said to be better or worse than something else
Z = 1.959963984540054  # standard normal quantile of a 95 % interval
WIDE = 0.07  # so far from a share its interval may reach before a sentence says that the images are few
_SPLIT = 0.25  # test images of a split over its training images: a fifth is split off
_CALLED = {"untrained": "the untrained one", "from scratch": "training from scratch"}  # controls in a sentence


class Level(Enum):
    """What may be said of an effect."""

    UNKNOWN = "too few images to tell whether there is one"
    WORSE = "the baseline is better"
    NONE = "none is seen, and a clear one is ruled out"
    UNSURE = "there is one; too few images to tell how large"
    HARDLY = "there is one, but below `SMALL`"
    WEAK = "there is one, and it is not small"
    CLEAR = "at least `CLEAR`"

    @property
    def better(self) -> bool:
        """Whether the baseline is beaten, by however little."""
        return self in (Level.UNSURE, Level.HARDLY, Level.WEAK, Level.CLEAR)

    @property
    def visible(self) -> bool:
        """Whether the baseline is beaten by more than nobody would see, such as 0.5 % by which noise can be learnt."""
        return self.better and self is not Level.HARDLY

    @property
    def no_gain(self) -> bool:
        """Whether a clear gain over the baseline is ruled out."""
        return self in (Level.NONE, Level.WORSE)


class Effect(NamedTuple):
    """Where a result is on the way from a baseline (0) to perfect (1); negative: the baseline is better.

    Attributes:
        share: of the way.
        low, high: its 95 % interval, over images.
        n: images.
    """

    share: float
    low: float
    high: float
    n: int

    @property
    def level(self) -> Level:
        """What may be said."""
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
        """Whether the result is worse by at least a share of the way, and by more than chance.

        The interval is √2 times the 95 % one, which is 99.4 %: a run is asked at half a dozen measures.
        """
        return self.share <= -least and self.share + math.sqrt(2) * (self.high - self.share) < 0

    def plain(self) -> dict[str, Any]:
        """As values for JSON: what is not finite is None."""
        numbers = {name: finite_or_none(getattr(self, name)) for name in ("share", "low", "high")}
        return {**numbers, "n": self.n, "level": self.level.name.lower()}

    @staticmethod
    def of(values: Mapping[str, Any]) -> Effect:
        """From what `plain` made; an interval that was not finite is without bounds."""
        try:
            ends = number_of(values["low"], -math.inf), number_of(values["high"], math.inf)
            return Effect(number_of(values["share"], math.nan), *ends, count_of(values["n"]))
        except (KeyError, TypeError) as problem:
            raise ValueError(f"no effect: {problem}") from problem

    def text(self) -> str:
        """Formatted as "46 % [44, 48]", with digits behind the point where the interval needs them."""
        finite = all(map(math.isfinite, (self.low, self.high)))
        reach = self.high - self.low if finite else 1.0
        digits = 2 if reach < 0.002 else 1 if reach < 0.02 else 0
        # + 0.0: a share that is rounded to nothing has no sign
        share, low, high = (f"{round(100 * one, digits) + 0.0:.{digits}f}" for one in (self.share, self.low, self.high))
        return f"{share} % [{low}, {high}]" if finite else f"{share} %"


def effect_of(values: Sequence[float], baseline: Sequence[float], perfect: float) -> Effect:
    """The effect of results of images, beside a baseline's on the same images.

    The share is a ratio of two means over images, and its interval that of a ratio (linearised, with Student's
    quantile): what is easy for both does not widen it.

    Args:
        values: [n] the result on each image.
        baseline: [n] the baseline's.
        perfect: the best possible result, such as 0 for an error and 1 for an accuracy.
    """
    n = len(values)
    gains = [value - base for value, base in zip(values, baseline, strict=True)]
    ways = [perfect - base for base in baseline]
    gain, way = sum(gains), sum(ways)
    if not way:  # the baseline is perfect: it can be met, or missed
        share = 0.0 if not gain else -math.inf
        return Effect(share, share, share, n)
    share = gain / way
    if n < MIN_VERDICT_IMAGES:
        return Effect(share, -math.inf, math.inf, n)
    apart = [one - share * whole for one, whole in zip(gains, ways, strict=True)]
    reach = student(n - 1) * math.sqrt(sum(one * one for one in apart) * n / (n - 1)) / abs(way)
    return Effect(share, share - reach, share + reach, n)


def effect_between(
    value: tuple[float, float, float], baseline: tuple[float, float, float], n: int, perfect: float = 1.0
) -> Effect:
    """The effect between two shares of right answers, of which the intervals are known and not each image's result.

    The interval of their difference is Newcombe's from the two score intervals (1998, method 10). It takes the two for
    independent, so on the same images it is rather too wide.
    """
    (one, low, high), (other, other_low, other_high) = value, baseline
    gain, way = one - other, perfect - other
    if way <= 0:
        share = 0.0 if not gain else -math.inf
        return Effect(share, share, share, n)
    down = math.hypot(one - low, other_high - other)
    up = math.hypot(high - one, other - other_low)
    return Effect(gain / way, (gain - down) / way, (gain + up) / way, n)


def level_beside(effect: Effect, others: Iterable[Effect]) -> Level:
    """What may be said beside the effects against ``others``: no clear one, while one of them is better."""
    if effect.level in (Level.CLEAR, Level.UNSURE) and any(other.level is Level.WORSE for other in others):
        return Level.WEAK
    return effect.level


# A form of `format` for numbers; others, such as one of a million digits, are not taken from a file.
_FORM = re.compile(r",?(\.\d)?[%efg]?")
_LONGEST = 200  # characters of a name that is read from a file


@dataclass(frozen=True)
class MeasureResult:
    """Result of a measure beside what needs no learning: means over images, as files keep them.

    Attributes:
        name: of the measure.
        value: its mean.
        low, high: 95 % interval of the mean, over images.
        baselines: the mean of each, by name.
        effects: where the result is on the way from each baseline to perfect.
        to_beat: the baseline that has to be beaten before anything is learnt.
        barred: all baselines that have to be beaten; others may know what the network does not.
        higher_is_better: whether 1 is perfect; else 0 is.
        form: how a value is written, as for `format`.
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
        """% of a share, "" of what has no unit."""
        return "%" if self.form.endswith("%") else ""

    @property
    def effect(self) -> Effect:
        """Where the result is on the way from the baseline to beat to perfect."""
        return self.effects[self.to_beat]

    @property
    def level(self) -> Level:
        """What may be said of the task: nothing clear, while another baseline is better."""
        return level_beside(self.effect, self.effects.values())

    def show(self, value: float | None = None) -> str:
        """The result as people read it; another value in its unit, if one is given."""
        return format(self.value if value is None else value, self.form)

    def beside(self, called: str) -> str:
        """Formatted as "error 0.532, blurred copy 0.727": with the baseline to beat, as it is ``called``."""
        return f"{self.name} {self.show()}, {called} {self.show(self.baselines[self.to_beat])}"

    def plain(self) -> dict[str, Any]:
        """As values for JSON: what is not finite is None."""
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
        """From what `plain` made, checked: whoever wrote the file may have put anything there."""
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
            raise ValueError(f"no result of a measure: {problem}") from problem


def result_or_none(values: Any) -> MeasureResult | None:
    """As `MeasureResult.of`; None where there is none, or in words alone as an older version kept it."""
    try:
        return MeasureResult.of(values)
    except ValueError:
        return None


def finite_or_none(value: float) -> float | None:
    """A number for JSON, which has no infinity and no nan."""
    return float(value) if math.isfinite(value) else None


def number_of(value: Any, missing: float) -> float:
    """A number from a file; ``missing`` where it was not finite."""
    if value is None:
        return missing
    if not conforms(value, float):
        raise ValueError(f"{str(value)[:40]!r} is no number")
    return float(value)


def count_of(value: Any) -> int:
    """A number of images from a file."""
    if not conforms(value, int) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no number of images")
    return int(value)


def text_of(value: Any) -> str:
    """A name from a file: one line, and not a long one."""
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise ValueError(f"{str(value)[:40]!r} is no name")
    return value


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of a mean over images; without bounds for a single image."""
    found = np.asarray(values, dtype=np.float64)
    reach = student(len(found) - 1) * found.std(ddof=1) / math.sqrt(len(found)) if len(found) > 1 else math.inf
    return float(found.mean() - reach), float(found.mean() + reach)


def wilson(share: float, n: int, z: float = Z) -> tuple[float, float]:
    """Wilson's score interval for a ``share`` in [0, 1] of ``n`` trials (Wilson 1927); ``z`` = 1.96 gives 95 %.

    It covers the variation over test images, not over seeds.
    """
    if n < 1:
        raise ValueError("a share of no trials has no interval")
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def is_wide(value: float, low: float, high: float) -> bool:
    """Whether the interval of a share reaches so far that other images could have given a quite different one."""
    return low < high and max(high - value, value - low) > WIDE


def student(freedom: float) -> float:
    """Student's quantile of a 95 % interval."""
    return float(stdtrit(freedom, 0.975))


class Claim(Enum):
    """What a `Difference` allows to say."""

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
        control: its name in the rows of a report.
        value: the encoder's result less the control's; a share in [-1, 1] if the unit is %.
        low, high: its 95 % interval, over test images and, with several trainings a side, over these.
        n: test images; 0 if the two were tested on different ones.
        trainings: seeds a side.
        trained: whether chance in a training moves the result. False where the encoder is given, and what is fitted to
            its features has no randomness (kNN, logistic regression).
        unit: of the value.
        noun: what was tested: images or recordings.
        over_images, over_seeds: half of the interval by each alone; the second is 0 with one training a side.
        freedom: degrees of freedom of the second; 0 if there are none.
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

    @property
    def claim(self) -> Claim:
        """What may be said; the only place where that is decided.

        Nothing on fewer than `MIN_VERDICT_IMAGES` images. Nothing while the interval includes zero. After one training
        a side it covers images alone, so that another training may turn the difference round.
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
    def ahead(self) -> bool:
        """Whether the encoder is better, or would be if its one training were all."""
        return self.claim is Claim.BETTER or (self.claim is Claim.ONCE and self.value > 0)

    def effect(self, baseline: float, perfect: float = 1.0) -> Effect | None:
        """How far that is on the way from the control's result to perfect; None without an interval, or a way."""
        way = perfect - baseline
        return Effect(self.value / way, self.low / way, self.high / way, self.n) if self.n and way > 0 else None

    def amount(self, value: float, sign: str = "+") -> str:
        """A number in the unit of the difference, without its name."""
        return f"{100 * value:{sign}.1f}" if self.unit == "%" else f"{value:{sign}.2f}"

    def interval(self) -> str:
        """Formatted as "[+0.4, +3.8]"."""
        return f"[{self.amount(self.low)}, {self.amount(self.high)}]"

    def text(self) -> str:
        """Formatted as "+2.1 points [+0.4, +3.8]"."""
        return f"{self.amount(self.value)} {self._units()} {self.interval()}"

    def sentence(self) -> str:
        """The difference as a sentence on the encoder; the only place where these words are chosen."""
        called = _CALLED.get(self.control, self.control)
        by, claim = f"{self.amount(abs(self.value), '')} {self._units()}", self.claim
        if claim is Claim.APART:
            return f"The encoder cannot be compared with {called}: the two were tested on different {self.noun}."
        if claim is Claim.FEW:
            few = f"{self.n} test {self.noun} are" if self.n > 1 else f"1 test {self.noun.removesuffix('s')} is"
            return (
                f"{few} too few to compare the encoder with {called} ({self.amount(self.value)} {self._units()}): no "
                f"claim is made below {MIN_VERDICT_IMAGES}."
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
            return f"The encoder is not told apart from {called}{over} ({self.text()})."
        return f"The encoder is {by} {claim.value} than {called}{over} {self.interval()}."

    def short(self) -> str:
        """What may be said in a few words, as `explain_error` says it, without the numbers."""
        several = f" over {self.trainings} {'trainings' if self.trained else 'seeds'}" if self.trainings > 1 else ""
        return {
            Claim.APART: f"no claim: different {self.noun}",
            Claim.FEW: f"no claim below {MIN_VERDICT_IMAGES} test {self.noun}",
            Claim.NONE: f"not told apart{several}",
            Claim.ONCE: f"{'ahead' if self.value > 0 else 'behind'} in this one training; --seeds 3 tells",
        }.get(self.claim, f"{self.claim.value}{several}")

    def plain(self) -> dict[str, Any]:
        """As values for JSON."""
        names = ("control", "low", "high", "n", "trainings", "trained", "unit", "noun")
        values = {name: getattr(self, name) for name in names}
        return {**values, "difference": self.value, "claim": self.claim.value}

    @staticmethod
    def of(values: Mapping[str, Any]) -> Difference:
        """From what `plain` made."""
        try:
            numbers = {"value": float(values["difference"]), "low": float(values["low"]), "high": float(values["high"])}
            counts = {"n": int(values["n"]), "trainings": int(values["trainings"])}
            texts = {"unit": str(values.get("unit", "%")), "noun": str(values.get("noun", "images"))}
            return Difference(str(values["control"]), **numbers, **counts, trained=bool(values["trained"]), **texts)
        except (KeyError, TypeError) as problem:
            raise ValueError(f"no difference: {problem}") from problem

    def _units(self) -> str:
        return "points" if self.unit == "%" else self.unit


def difference(
    one: ArrayLike,
    other: ArrayLike,
    values: tuple[Sequence[float], Sequence[float]] | None = None,
    *,
    control: str = "",
    trained: bool = True,
    n: int | None = None,
    noun: str = "images",
) -> Difference:
    """Difference of two shares in [0, 1] on the same test images, with an interval over images and over seeds.

    The part over images is that of the paired difference of each image's mean over seeds: what is hard for both does
    not widen it. Shares of right answers have half a case added to each of the four outcomes (Agresti and Min 2005);
    jackknife pseudo-values have Student's quantile for n - 1 degrees of freedom. The part over seeds is Welch's, each
    side with a variance of its own. The two are added as squares, without what single images do by chance in single
    trainings, which is in both. benchmarks/effects.py measures how often that is wrong.

    Args:
        one, other: [s n] of the same images: 1 for a right answer and 0 for a wrong one, or pseudo-values. What is not
            trained has one row.
        values: [s] of each side, the result itself, if it is no mean over images; its pseudo-values come with it.
        control: name of the other.
        trained: whether chance in a training moves the result.
        n: test images, if the pseudo-values are of groups of them.
        noun: what was tested.
    """
    sides = [np.atleast_2d(np.asarray(side, dtype=np.float64)) for side in (one, other)]
    k, seeds = sides[0].shape[1], max(map(len, sides))
    if sides[1].shape[1] != k:
        raise ValueError(f"{k} and {sides[1].shape[1]} images are not the same")
    gains = sides[0].mean(0) - sides[1].mean(0)
    if values is None:
        results = [side.mean(1) for side in sides]
        middle = gains.sum() / (k + 2)
        quantile, images = Z, ((gains @ gains + 1) / (k + 2) - middle**2) / (k + 2)
    else:
        results = [np.asarray(value, dtype=np.float64) for value in values]
        middle = results[0].mean() - results[1].mean()
        quantile, images = (student(k - 1), gains.var(ddof=1) / k) if k > 1 else (math.inf, math.inf)
    images = max(0.0, images - sum(map(_flips, sides)))
    over_images = quantile * math.sqrt(images) if images else 0.0
    over_seeds, freedom = _welch(results)
    reach = math.hypot(over_images, over_seeds)
    value = float(results[0].mean() - results[1].mean())
    # nan: an image without which there is no score
    low, high = (-1.0, 1.0) if not math.isfinite(reach) else (middle - reach, middle + reach)
    ends, parts = (max(-1.0, low), min(1.0, high)), (over_images, over_seeds, freedom)
    return Difference(control, value, *ends, n or k, seeds, trained, "%", noun, *parts)


def _flips(side: np.ndarray) -> float:
    """Variance of a mean over s seeds and n images by what single images do by chance in single trainings."""
    seeds, n = side.shape
    if seeds < 2 or n < 2:
        return 0.0
    rest = side - side.mean(0) - side.mean(1, keepdims=True) + side.mean()
    return float((rest * rest).sum() / ((seeds - 1) * (n - 1) * seeds * n))


def _welch(results: Sequence[np.ndarray]) -> tuple[float, float]:
    """Half of Welch's interval of the difference of two means of results [s], and its degrees of freedom; 0 without."""
    parts = [(one.var(ddof=1) / len(one), len(one) - 1) for one in results if len(one) > 1]
    total = sum(part for part, _ in parts)
    if not total > 0:
        return 0.0, 0.0
    freedom = total**2 / sum(part**2 / own for part, own in parts)
    return student(freedom) * math.sqrt(total), freedom


def difference_over_splits(
    one: Sequence[float], other: Sequence[float], n: int, *, control: str = "", trained: bool = True, noun: str = ""
) -> Difference:
    """Difference of two shares where each seed has a test split of its own, drawn from the same images.

    The interval is Nadeau and Bengio's (2003, corrected resampled t-test): paired by seed, since both sides of a seed
    have the same split, and wider than Student's, since the splits share images.

    Args:
        one, other: [s] results by seed.
        n: test images of the smallest split.
        control, trained, noun: as for `difference`.
    """
    gains = np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    seeds, middle = len(gains), float(gains.mean())
    reach = student(seeds - 1) * math.sqrt(gains.var(ddof=1) * (1 / seeds + _SPLIT))
    low, high = max(-1.0, middle - reach), min(1.0, middle + reach)
    return Difference(control, middle, low, high, n, seeds, trained, noun=noun or "images")
