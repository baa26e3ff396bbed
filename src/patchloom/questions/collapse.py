"""Measures of collapse: spread and effective rank of outputs."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def output_spread(outputs: Tensor) -> float:
    """Return how far apart the normalised outputs [b d] lie: 0 if all are equal, 1 if they point in all directions.

    The root mean square distance from their mean, √(1 - ‖mean‖²).
    """
    mean = F.normalize(outputs.float(), dim=-1).mean(0)
    return math.sqrt(max(0.0, 1 - mean.square().sum().item()))


def effective_rank(outputs: Tensor) -> float:
    """Return RankMe of outputs [b d]: exp of the entropy of their normalised singular values (Garrido 2023, Eq. 1-2).

    1 if all outputs lie on one line, min(b, d) if they fill the space evenly.
    """
    values = torch.linalg.svdvals(outputs.cpu().double())  # Apple GPUs have no float64
    share = values / values.sum().clamp_min(1e-12)
    return math.exp(-(share * (share + 1e-12).log()).sum().item())


def deviation(features: Tensor) -> float:
    """Return the root-mean-square deviation of features [b d] from their mean over b, in their unit; 0 if all are
    equal.
    """
    features = features.cpu().double()
    return math.sqrt((features - features.mean(0)).square().mean().item())


def centred_rank(features: Tensor) -> float:
    """Return the `effective_rank` of features [b d] minus their mean over b: the number of directions they differ in.

    Without centring, a large common mean counts as one direction, and as nearly the only one.
    """
    features = features.cpu().double()
    return effective_rank(features - features.mean(0))


def distance_from_mean(values: Tensor) -> float:
    """Return the deviation of values [b d] from their mean over b, relative to their deviation over all values.

    Square root of the variance within columns over the total variance: 0 if all rows are equal, 1 if all columns have
    the same mean.
    """
    values = values.cpu().double()
    whole = (values - values.mean()).square().mean().item()
    within = (values - values.mean(0)).square().mean().item()
    return math.sqrt(within / whole) if whole > 0 else 0.0
