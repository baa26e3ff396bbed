"""How a comparison of `claims.py` is decided: paired over seeds and test images, with an interval by bootstrap.

The rule, which was fixed before the study ran: a comparison **holds** if the 95 % interval of the difference lies above
zero, is **contradicted** if it lies below, and is **undecided** otherwise.

Three seeds alone cannot give such an interval: drawn with replacement they never leave their own range, which holds the
truth in three of four cases. So what seeds do to an accuracy is told by all arms that were measured alike: the
residuals of a table of arms by seeds, once the mean of each arm and of each seed is taken away, as in an analysis of
variance with blocks. They are drawn with replacement for both arms, and widened as Student's distribution is for their
degrees of freedom; where the two arms that are compared differ by more from seed to seed than such draws would, by
their own. Test images are drawn with replacement besides, the same ones for both arms and all seeds.

Letters: a arms, s seeds, n test images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import stats

DRAWS = 4000
_AT_ONCE = 500  # draws of images, which bounds the memory
_Z = stats.norm.ppf(0.975)

HOLDS, CONTRADICTED, UNDECIDED = "holds", "contradicted", "undecided"


class Noise(NamedTuple):
    """What seeds do to an accuracy.

    Attributes:
        residuals: with the variance that one run of an arm has.
        freedom: degrees of freedom of that variance.
    """

    residuals: np.ndarray
    freedom: int

    @property
    def deviation(self) -> float:
        """Standard deviation of one run."""
        return float(np.sqrt(np.mean(self.residuals**2)))


class Decided(NamedTuple):
    """A comparison: how much better the one is than the other, in shares of the test images.

    Attributes:
        points: mean difference over seeds and images.
        low, high: its 95 % interval.
        each: the difference with each seed.
    """

    points: float
    low: float
    high: float
    each: tuple[float, ...]

    @property
    def verdict(self) -> str:
        """One of the three words of the rule."""
        return HOLDS if self.low > 0 else CONTRADICTED if self.high < 0 else UNDECIDED

    @property
    def could_see(self) -> float:
        """The smallest difference whose interval would exclude zero."""
        return (self.high - self.low) / 2


def noise_of(scores: Mapping[str, np.ndarray]) -> Noise:
    """What seeds do, by all arms that were measured alike.

    Args:
        scores: [s n] which test images each arm has right, with the same seeds.

    Raises:
        ValueError: fewer than two arms or two seeds.
    """
    table = np.stack([right.mean(1) for right in scores.values()])
    arms, seeds = table.shape
    freedom = (arms - 1) * (seeds - 1)
    if not freedom:
        raise ValueError("how far seeds move an accuracy is told by two arms and two seeds or more")
    residuals = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    return Noise(residuals.ravel() * np.sqrt(residuals.size / freedom), freedom)


def decide(better: np.ndarray, worse: np.ndarray, noise: Noise, draws: int = DRAWS) -> Decided:
    """How much better one arm is than the other.

    Args:
        better, worse: [s n] which test images they have right, with the same seeds and images.
        noise: of that measure.
        draws: of seeds and images.
    """
    gains = better.astype(float) - worse
    each = gains.mean(1)
    rng = np.random.default_rng(0)
    over_seeds = rng.choice(noise.residuals, (draws, 2, len(each))).mean(2)
    seeds = (over_seeds[:, 0] - over_seeds[:, 1]) * stats.t.ppf(0.975, noise.freedom) / _Z
    own = np.sqrt(each.var(ddof=1) / 2)
    seeds *= max(1.0, own / noise.deviation) if noise.deviation else 1.0
    of_image = gains.mean(0)
    n = len(of_image)
    parts = [min(_AT_ONCE, draws - first) for first in range(0, draws, _AT_ONCE)]
    images = np.concatenate([of_image[rng.integers(n, size=(count, n))].mean(1) for count in parts])
    points = float(gains.mean())
    low, high = np.quantile(images + seeds, (0.025, 0.975))
    return Decided(points, float(low), float(high), tuple(map(float, each)))
