"""What numbers allow to say: how far a result is from a baseline to perfect, and in which words that is told.

Two things decide on the words, and both must agree. The 95 % interval over images says whether there is an effect at
all; the size of the effect says whether it matters. With many images the first is true of effects that nobody would
see, and with few the second is true of noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

# Shares of the way from the baseline to perfect. Of the runs in benchmarks/README.md, raw pixels beat the features of
# all that stayed below `CLEAR`, by kNN, and of few above it; below `SMALL` nothing is seen in the pictures, either.
SMALL, CLEAR = 0.02, 0.10
LEAST = 5  # images; the deviation of fewer is not known well enough for any interval
_Z = 1.959963984540054  # standard normal quantile of a 95 % interval


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
        if self.n < LEAST or not math.isfinite(self.share):
            return Level.WORSE if self.n >= LEAST and self.share < 0 else Level.UNKNOWN
        if self.low > 0:
            if self.low >= CLEAR:
                return Level.CLEAR
            if self.high >= CLEAR and self.high - self.low > CLEAR - SMALL:
                return Level.UNSURE
            return Level.WEAK if self.share >= SMALL else Level.HARDLY
        if self.high < 0:
            return Level.WORSE
        return Level.UNKNOWN if self.high >= CLEAR else Level.NONE

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
    if n < LEAST:
        return Effect(share, -math.inf, math.inf, n)
    apart = [one - share * whole for one, whole in zip(gains, ways, strict=True)]
    reach = _student(n - 1) * math.sqrt(sum(one * one for one in apart) * n / (n - 1)) / abs(way)
    return Effect(share, share - reach, share + reach, n)


def effect_between(
    value: tuple[float, float, float], baseline: tuple[float, float, float], n: int, perfect: float = 1.0
) -> Effect:
    """The effect between two shares of right answers, of which the intervals are known and not each image's result.

    The interval of their difference is Newcombe's from the two score intervals (1998, method 10). It takes the two for
    independent, so on the same images it is rather too wide.

    Args:
        value: share of right answers, and its 95 % interval.
        baseline: likewise the baseline's.
        n: images.
        perfect: the best possible share.
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


def _student(freedom: int) -> float:
    """Student's quantile of a 95 % interval by Cornish and Fisher's series: within 0.5 %, from 4 degrees on."""
    z, v = _Z, freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3
