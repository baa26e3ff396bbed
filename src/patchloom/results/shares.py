"""Shares of the way from a baseline to perfect, for the verdict on a pre-training run.

A claim about the share of the way needs two things: its 95 % interval over images must exclude zero, and it must be
large enough to matter. With many images, tiny effects pass the first test; with few images, noise passes the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

from numpy.typing import ArrayLike

from patchloom.results.claims import MIN_VERDICT_IMAGES, Difference
from patchloom.results.intervals import over_groups, without_spread
from patchloom.results.result import SHARE, Result

# Shares of the way from the baseline to perfect. By kNN, raw pixels beat the features of all runs in
# benchmarks/README.md below `CLEAR`, and of few above it; below `SMALL`, the pictures show no effect either.
SMALL, CLEAR = 0.02, 0.10


class Level(Enum):
    """Claim about a share of the way."""

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


def level_of(share: Result) -> Level:
    """Return the claim about a share of the way."""
    if share.n < MIN_VERDICT_IMAGES or not math.isfinite(share.value):
        return Level.WORSE if share.n >= MIN_VERDICT_IMAGES and share.value < 0 else Level.UNKNOWN
    if share.low > 0:
        if share.low >= CLEAR:
            return Level.CLEAR
        if share.high >= CLEAR and share.high - share.low > CLEAR - SMALL:
            return Level.UNSURE
        return Level.WEAK if share.value >= SMALL else Level.HARDLY
    if share.high < 0:
        return Level.WORSE
    return Level.UNKNOWN if share.high >= CLEAR else Level.NONE


def fell(share: Result, least: float) -> bool:
    """Return whether a result is significantly worse than before, by at least ``least`` of the way to perfect.

    A run is tested at half a dozen measures, so the interval is √2 times as wide as the 95 % one: it has 99.4 %.
    """
    return share.value <= -least and share.value + math.sqrt(2) * (share.high - share.value) < 0


def _share(value: float, low: float, high: float, n: int) -> Result:
    """Return a share of the way, with decimals if its interval is narrow."""
    reach = high - low if math.isfinite(low) and math.isfinite(high) else 1.0
    digits = 2 if reach < 0.002 else 1 if reach < 0.02 else 0
    return Result(SHARE, value, low, high, n, digits=digits)


def share_of_way(
    values: Sequence[float], baseline: Sequence[float], perfect: float, groups: ArrayLike | None = None
) -> Result:
    """Compute the share of the way from a baseline (0) to perfect (1), from results on the same images.

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
    if not way:
        return _of_perfect(gain, n)
    share = gain / way
    if n < MIN_VERDICT_IMAGES:
        return _share(share, -math.inf, math.inf, n)
    apart = [one - share * whole for one, whole in zip(gains, ways, strict=True)]
    quantile, variance = over_groups(apart, sum(one * one for one in apart) * n / (n - 1), groups)
    reach = quantile * math.sqrt(variance) / abs(way)
    if perfect == 1 and (ends := without_spread(values, groups)):
        low, high = ((end - (perfect - way / n)) / (way / n) for end in ends)
        return _share(share, min(share, low), max(share, high), n)
    return _share(share, share - reach, share + reach, n)


def share_over(one: Result, control: Result, found: Difference) -> Result:
    """Compute the share of the way of an accuracy from that of a control (0) to 100 % (1), from their difference.

    If it is unknown (``found.n`` is 0), its interval is Newcombe's, from the two score intervals (1998, method 10). It
    assumes independent samples, so on the same images it is rather too wide.
    """
    way = 1 - control.value
    if way <= 0:
        return _of_perfect(one.value - control.value, one.n)
    if found.n:
        return _share(found.value / way, found.low / way, found.high / way, found.n)
    gain = one.value - control.value
    down = math.hypot(one.value - one.low, control.high - control.value)
    up = math.hypot(one.high - one.value, control.value - control.low)
    return _share(gain / way, (gain - down) / way, (gain + up) / way, one.n)


def _of_perfect(gain: float, n: int) -> Result:
    """Return the share from a perfect baseline, which can be met or missed, but not beaten."""
    share = 0.0 if not gain else -math.inf
    return _share(share, share, share, n)
