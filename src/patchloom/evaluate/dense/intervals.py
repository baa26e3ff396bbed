"""Intervals over the test images, of scores that come from sums over all of them.

mIoU is no mean over images, so that it has no formula for its interval. The images are drawn again, with replacement,
many times, and the middle 95 % of the scores are the interval (percentile bootstrap; Efron and Tibshirani 1993, chapter
13). It covers the choice of test images, not of seeds; below some twenty images it is too narrow. Letters: n images, t
draws.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

MIDDLE = (0.025, 0.975)  # quantiles of a 95 % interval

# sums over images [t ...] -> scores [t ...]
Statistic = Callable[[Tensor], Tensor]


def draws(n: int, seed: int, times: int) -> Tensor:
    """How often each of n images is drawn in each of ``times`` draws of n with replacement, float64 [times n]."""
    return torch.from_numpy(np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), times)).double()


def resampled(statistic: Statistic, per_image: Tensor, seed: int, times: int = 1000) -> Tensor:
    """The scores of ``times`` draws of the images, [times ...].

    Args:
        statistic: from sums over images to scores.
        per_image: [n ...], what is summed.
        seed: of the draws; equal seeds draw the same images.
        times: draws.
    """
    n, *rest = per_image.shape
    return statistic((draws(n, seed, times) @ per_image.double().flatten(1)).unflatten(1, rest))


def middle(scores: Tensor) -> Tensor:
    """The bounds of the middle 95 % of scores [t ...], [2 ...]; draws without a score (nan) are left out."""
    return scores.nanquantile(torch.tensor(MIDDLE, dtype=scores.dtype), 0)


def bootstrap(statistic: Statistic, per_image: Tensor, seed: int, times: int = 1000) -> tuple[float, float]:
    """The 95 % interval of a share in [0, 1] over the images; all of [0, 1] for a single image, which tells none.

    Args:
        statistic, per_image, seed, times: as for `resampled`; the statistic is one number a draw.
    """
    if len(per_image) < 2:
        return 0.0, 1.0
    low, high = middle(resampled(statistic, per_image, seed, times)).tolist()
    return low, high


def paired_bootstrap(
    statistic: Statistic, one: Tensor, other: Tensor, seed: int, times: int = 1000
) -> tuple[float, float, float]:
    """How much higher a share in [0, 1] is than another one on the same images, and the 95 % interval of that.

    Both are drawn together: what is hard in an image is hard for both, so that the interval is narrower than two
    separate ones suggest.

    Args:
        one, other: [n ...] of the same images in the same order.
        statistic, seed, times: as for `bootstrap`.

    Raises:
        ValueError: not of the same images.
    """
    if len(one) != len(other):
        raise ValueError(f"{len(one)} and {len(other)} images are not the same")
    difference = float(statistic(one.sum(0)) - statistic(other.sum(0)))
    if len(one) < 2:
        return difference, -1.0, 1.0
    scores = [resampled(statistic, per_image, seed, times) for per_image in (one, other)]
    low, high = middle(scores[0] - scores[1]).tolist()
    return difference, low, high
