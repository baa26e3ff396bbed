"""What the spectrum of an encoder's features tells: how many directions they use, and how fast the others fade.

Letters: n images, d width, r = min(n - 1, d) eigenvalues that a covariance of n images can have.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from patchloom.questions.collapse import effective_rank

FIRST = 5  # the first eigenvalue of the fit, counted from 1: those before it follow no power law
LEAST_WIDTH = 16  # of r, so that at least four eigenvalues are fitted
_ROUNDING = 1e-10  # of the largest eigenvalue: what is below came from features in float32


def rankme(features: Tensor) -> float:
    """RankMe of features [n d] (Garrido et al., ICML 2023, Eq. 1-2): their effective rank, from 1 to min(n, d).

    As in the paper the features are neither centred nor scaled. It grows with n until n is many times d, so that only
    ranks of equally many images and equal widths can be compared.
    """
    return effective_rank(features)


def alpha_req(features: Tensor) -> float:
    """α-ReQ of features [n d] (Agrawal et al., NeurIPS 2022): the exponent α of their eigenspectrum, λ_j ∝ j^-α.

    α is the slope of a line through log λ_j over log j, where λ_j is the j-th largest eigenvalue of the covariance, for
    j from 5 to r/2. The paper leaves out the first eigenvalues and the tail as well, and leaves the range open. The
    line is that of least squares with weights 1/j, by which each octave of j counts the same (Stringer et al. 2019).
    Near 1 is best by the paper; a larger α means that few directions hold almost all variance. Few images raise it:
    of 300 features of 192 numbers that were drawn with 0.5, it was 0.56.

    Returns:
        α; infinity if the eigenvalues vanish within the range, which is faster than any power.

    Raises:
        ValueError: there are fewer than 16 eigenvalues.
    """
    values = eigenvalues(features)
    if len(values) < LEAST_WIDTH:
        raise ValueError(f"a power law through {len(values)} eigenvalues tells nothing: {LEAST_WIDTH} are needed")
    j = torch.arange(FIRST, len(values) // 2 + 1, dtype=torch.float64)
    fitted = values[FIRST - 1 : len(values) // 2]
    if not fitted[-1] > _ROUNDING * values[0]:
        return math.inf
    x, y, weights = j.log(), fitted.log(), 1 / j
    x, y = (one - (weights * one).sum() / weights.sum() for one in (x, y))
    return -((weights * x * y).sum() / (weights * x * x).sum()).item()


def eigenvalues(features: Tensor) -> Tensor:
    """The r largest eigenvalues of the covariance of features [n d], descending, float64 [r]."""
    n, d = features.shape
    centred = features.double().cpu()
    centred = centred - centred.mean(0)
    return (torch.linalg.svdvals(centred).square() / n)[: min(n - 1, d)]
