"""How a comparison of `claims.py` is decided: paired over seeds and test images, with an interval by bootstrap.

The rule: a comparison **holds** if the 95 % interval of the difference lies above
zero, is **contradicted** if it lies below, and is **undecided** otherwise.

Three seeds alone cannot give such an interval: drawn with replacement they never leave their own range, which holds the
truth in three of four cases. So what seeds do to an accuracy is told by all arms that were measured alike: the
residuals of a table of arms by seeds, once the mean of each arm and of each seed is taken away, as in an analysis of
variance with blocks. They are drawn with replacement for both arms, and widened as Student's distribution is for their
degrees of freedom; where the two arms that are compared differ by more from seed to seed than such draws would, by
their own. Test images are drawn with replacement besides, the same ones for both arms and all
seeds, without what the flips of single answers from run to run add to them, since the residuals hold that.

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


# [s n] which test images are right, by arm
Scores = Mapping[str, np.ndarray]


def verdict_by(low: float, high: float) -> str:
    """The rule: the word for an interval of a difference."""
    return HOLDS if low > 0 else CONTRADICTED if high < 0 else UNDECIDED


class Noise(NamedTuple):
    """What seeds do to an accuracy.

    Attributes:
        residuals: with the variance that one run of an arm has.
        freedom: degrees of freedom of that variance.
        arms: by which it is told.
    """

    residuals: np.ndarray
    freedom: int
    arms: int

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
        unrest: how far seeds move it, over how far they move that of other arms.
    """

    points: float
    low: float
    high: float
    each: tuple[float, ...]
    unrest: float

    @property
    def verdict(self) -> str:
        """One of the three words of the rule."""
        return verdict_by(self.low, self.high)

    @property
    def could_see(self) -> float:
        """The true difference that four of five such studies would tell from zero."""
        return (self.high - self.low) / 2 * (1 + stats.norm.ppf(0.8) / _Z)


def noise_of(scores: Scores) -> Noise:
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
    return Noise(residuals.ravel() * np.sqrt(residuals.size / freedom), freedom, arms)


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
    unrest = float(np.sqrt(each.var(ddof=1) / 2) / noise.deviation) if noise.deviation else 1.0
    seeds *= max(1.0, unrest)
    of_image, n = gains.mean(0), gains.shape[1]
    parts = [min(_AT_ONCE, draws - first) for first in range(0, draws, _AT_ONCE)]
    images = np.concatenate([of_image[rng.integers(n, size=(count, n))].mean(1) for count in parts])
    points = float(gains.mean())
    images = points + (images - points) * _common(gains)
    low, high = np.quantile(images + seeds, (0.025, 0.975))
    return Decided(points, float(low), float(high), tuple(map(float, each)), unrest)


def _common(gains: np.ndarray) -> float:
    """What is left of the spread over images without the flips from run to run, which the noise over seeds holds, too.

    Args:
        gains: [s n] by how much the one arm is better.
    """
    seeds, n = gains.shape
    of_image = gains.mean(0)
    whole = of_image.var(ddof=1) if n > 1 else 0.0
    if not whole:
        return 1.0
    flips = gains - of_image - gains.mean(1, keepdims=True) + gains.mean()
    within = (flips**2).sum() / ((seeds - 1) * (n - 1))
    return float(np.sqrt(max(0.0, 1 - within / seeds / whole)))


def wrongly_decided(spread: float, trials: int = 400, arms: int = 24, images: int = 5000) -> float:
    """The share of comparisons of two arms alike that are decided, by simulation with three seeds.

    Args:
        spread: how far seeds move the accuracy of the two, over how far they move that of the others, 0.8 points.
        trials: comparisons.
        arms: of a study, the two among them.
        images: of the test, some of them harder than others.
    """
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(trials):
        chance = rng.beta(0.5, 0.8, images)
        moved = 0.008 * np.array([spread, spread, *[1.0] * (arms - 2)])[:, None, None]
        shares = (chance + moved * rng.standard_normal((arms, 3, 1))).clip(0, 1)
        answers = {str(number): right for number, right in enumerate(rng.random(shares.shape) < shares)}
        wrong += decide(answers["0"], answers["1"], noise_of(answers), draws=1000).verdict != UNDECIDED
    return wrong / trials


if __name__ == "__main__":
    for arms, spread in ((24, 1.0), (24, 2.0), (24, 3.0), (7, 1.0), (7, 2.0), (4, 1.0)):
        wrong = wrongly_decided(spread, arms=arms)
        print(f"{wrong:.1%} of comparisons decided where nothing differs, spread x{spread:g}, {arms} arms", flush=True)
