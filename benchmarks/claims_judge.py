"""Decision rule of `claims.py`: differences paired over seeds and test images, with a bootstrap interval.

The rule: a comparison **holds** if the 95 % interval of the difference lies above
zero, is **contradicted** if it lies below, and is **undecided** otherwise.

Three seeds alone cannot give such an interval: draws with replacement stay within their range, which contains the true
value in three of four cases. Therefore the spread over seeds is pooled over all arms that were measured alike: the
residuals of a table of arms by seeds, after subtracting the mean of each arm and of each seed, as in an analysis of
variance with blocks. They are drawn with replacement for both arms, and widened as Student's distribution is for their
degrees of freedom; if the difference of the two arms varies more over seeds than such draws, its own spread is used.
Test images are drawn with replacement, too, the same ones for both arms and all seeds. The flips of single answers from
run to run are subtracted from their spread, because the residuals contain them.

Letters: a arms, s seeds, n test images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import stats

DRAWS = 4000
_AT_ONCE = 500  # draws of images at a time, which limits the memory
_Z = stats.norm.ppf(0.975)

HOLDS, CONTRADICTED, UNDECIDED = "holds", "contradicted", "undecided"


# by arm: [s n] whether each test image is classified correctly
Scores = Mapping[str, np.ndarray]


def verdict_by(low: float, high: float) -> str:
    """Return the verdict for the interval of a difference."""
    return HOLDS if low > 0 else CONTRADICTED if high < 0 else UNDECIDED


class Noise(NamedTuple):
    """Spread of an accuracy over seeds.

    Attributes:
        residuals: residuals with the variance of a single run.
        freedom: degrees of freedom of that variance.
        arms: number of arms from which it is estimated.
    """

    residuals: np.ndarray
    freedom: int
    arms: int

    @property
    def deviation(self) -> float:
        """Standard deviation of a single run."""
        return float(np.sqrt(np.mean(self.residuals**2)))


class Decided(NamedTuple):
    """Result of a comparison, in shares of the test images.

    Attributes:
        points: mean difference over seeds and images.
        low, high: its 95 % interval.
        each: difference with each seed.
        unrest: its spread over seeds, relative to that of other arms.
    """

    points: float
    low: float
    high: float
    each: tuple[float, ...]
    unrest: float

    @property
    def verdict(self) -> str:
        """The verdict by the rule."""
        return verdict_by(self.low, self.high)

    @property
    def could_see(self) -> float:
        """The true difference that four of five such studies would distinguish from zero."""
        return (self.high - self.low) / 2 * (1 + stats.norm.ppf(0.8) / _Z)


def noise_of(scores: Scores) -> Noise:
    """Estimate the spread over seeds from all arms that were measured alike.

    Args:
        scores: by arm, [s n] whether each test image is correct, with the same seeds.

    Raises:
        ValueError: fewer than two arms or two seeds.
    """
    table = np.stack([right.mean(1) for right in scores.values()])
    arms, seeds = table.shape
    freedom = (arms - 1) * (seeds - 1)
    if not freedom:
        raise ValueError("the spread over seeds needs two arms and two seeds or more")
    residuals = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    return Noise(residuals.ravel() * np.sqrt(residuals.size / freedom), freedom, arms)


def decide(better: np.ndarray, worse: np.ndarray, noise: Noise, draws: int = DRAWS) -> Decided:
    """Decide a comparison of two arms.

    Args:
        better, worse: [s n] whether each test image is correct, with the same seeds and images.
        noise: spread of that measure over seeds.
        draws: number of bootstrap draws of seeds and images.
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
    """Return the gains per image without the flips from run to run, which the spread over seeds already contains.

    Args:
        gains: [s n] difference of the two arms.
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
    """Simulate the share of comparisons of two equal arms that are decided, with three seeds.

    Args:
        spread: spread of the two arms over seeds, relative to that of the others, which is 0.8 points.
        trials: number of comparisons.
        arms: number of arms in a study, including the two.
        images: number of test images, which differ in difficulty.
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
