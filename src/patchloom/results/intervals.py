"""95 % intervals of means and shares over test images, or over the groups that they come in.

If images come in groups that a split keeps together, such as the slides of one patient, other test images would be
other groups. Then variances are those of the sums of groups, with Student's quantile for their number, but never below
those of single images: the groups may be too few to show how alike their images are.

Letters: n test images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

Z = 1.959963984540054  # standard normal quantile of a 95 % interval


def mean_interval(
    values: Sequence[float], accuracy: bool = False, groups: ArrayLike | None = None
) -> tuple[float, float]:
    """Compute Student's 95 % interval of a mean over images; infinite for a single image.

    If ``accuracy`` is true and all values are 1, or all are 0, the interval is Wilson's. The images may be in
    ``groups`` [n].
    """
    found, n = np.asarray(values, dtype=np.float64), len(values)
    if accuracy and n > 1 and (ends := without_spread(values, groups)):
        return ends
    if n < 2:
        return -math.inf, math.inf
    apart = found - found.mean()
    quantile, variance = over_groups(apart, float(apart @ apart) * n / (n - 1), groups)
    reach = quantile * math.sqrt(variance) / n
    return float(found.mean() - reach), float(found.mean() + reach)


def accuracy_interval(right: ArrayLike, groups: ArrayLike | None = None) -> tuple[float, float]:
    """Compute the 95 % interval of an accuracy from its images [n], 1 or 0 each: Wilson's, or wider over ``groups``."""
    found = np.asarray(right, dtype=np.float64)
    mean, n = float(found.mean()), len(found)
    if groups is None:
        return wilson(mean, n)
    if ends := without_spread(found.tolist(), groups):
        return ends
    low, high = wilson(mean, n)
    apart = found - mean
    quantile, variance = over_groups(apart, float(apart @ apart), groups)
    reach = quantile * math.sqrt(variance) / n
    return max(0.0, min(low, mean - reach)), min(1.0, max(high, mean + reach))


def over_groups(apart: ArrayLike, variance: float, groups: ArrayLike | None) -> tuple[float, float]:
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


def without_spread(values: Sequence[float], groups: ArrayLike | None) -> tuple[float, float] | None:
    """Return Wilson's interval of accuracies that are all 0 or all 1, as if each image or group were one trial; else
    None."""
    first, n = values[0], len(values) if groups is None else len(np.unique(groups))
    return wilson(first, n) if first in (0, 1) and all(one == first for one in values) else None


def wilson(share: float, n: int) -> tuple[float, float]:
    """Compute Wilson's score interval for a ``share`` in [0, 1] of ``n`` trials (Wilson 1927).

    It covers the variation over test images, not over seeds.
    """
    if n < 1:
        raise ValueError("an interval needs at least one trial")
    middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    reach = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + (Z / (2 * n)) ** 2)
    # at 0 and at 1 an end is the share itself, from which rounding may take it away
    return max(0.0, min(share, middle - reach)), min(1.0, max(share, middle + reach))


def student(freedom: float) -> float:
    """Return Student's quantile of a 95 % interval."""
    from scipy.special import stdtrit  # takes long to import, and only intervals need it

    return float(stdtrit(freedom, 0.975))
