"""Intervals over the test images, of scores that come from sums over all of them.

mIoU and AP are no means over images, so that they have no formula for their intervals. Each image is left out once, and
what that changes gives a pseudo-value of the image; the interval is Student's for their mean (jackknife; Tukey 1958;
Efron and Tibshirani 1993, chapter 11), around the score itself. It covers the choice of test images, not of seeds.
Percentile bootstraps, which draw images again, called equal models different in 12 % at 10 images; this one in 4 %
(benchmarks/effects.py). Letters: n images.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from patchloom.verdict import student

# sums over images [t ...] -> scores [t ...]
Statistic = Callable[[Tensor], Tensor]


def pseudo_values(statistic: Statistic, per_image: Tensor) -> Tensor:
    """Jackknife pseudo-values of a score, float64 [n ...]; nan where there is no score without an image.

    Args:
        statistic: from sums over images to scores.
        per_image: [n ...], what is summed.
    """
    total = per_image.sum(0)
    return of_left_out(statistic(total), statistic(total - per_image))


def of_left_out(score: Tensor, without: Tensor) -> Tensor:
    """Jackknife pseudo-values [n ...] of a score [...], from the scores ``without`` [n ...] each image."""
    n = len(without)
    return n * score.double() - (n - 1) * without.double()


def interval(score: Tensor, pseudo: Tensor) -> tuple[Tensor, Tensor]:
    """The 95 % interval of shares [...] in [0, 1] over images; all of [0, 1] where pseudo-values do not tell.

    Args:
        score: [...], the shares.
        pseudo: [n ...], their pseudo-values.
    """
    n = len(pseudo)
    if n < 2:
        return torch.zeros_like(score), torch.ones_like(score)
    reach = (student(n - 1) * pseudo.std(0) / math.sqrt(n)).nan_to_num(nan=1.0)
    return (score - reach).clamp(min=0), (score + reach).clamp(max=1)
