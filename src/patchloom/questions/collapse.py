"""Whether outputs collapse: how far apart they lie, and in how many directions."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def output_spread(outputs: Tensor) -> float:
    """How far apart the normalised outputs [b d] lie: 0 if all are the same, 1 if they point everywhere.

    The root mean square distance from their mean, √(1 - ‖mean‖²).
    """
    mean = F.normalize(outputs.float(), dim=-1).mean(0)
    return math.sqrt(max(0.0, 1 - mean.square().sum().item()))


def effective_rank(outputs: Tensor) -> float:
    """RankMe of outputs [b d]: exp of the entropy of their singular values' shares (Garrido et al. 2023, Eq. 1-2).

    1 if all outputs lie on one line, min(b, d) if they fill the space evenly.
    """
    values = torch.linalg.svdvals(outputs.cpu().double())  # Apple GPUs have no float64
    share = values / values.sum().clamp_min(1e-12)
    return math.exp(-(share * (share + 1e-12).log()).sum().item())


def deviation(features: Tensor) -> float:
    """The root mean square of what features [b d] are apart from their mean over b, in their own unit: 0 if all are
    the same, whatever they are.
    """
    features = features.cpu().double()
    return math.sqrt((features - features.mean(0)).square().mean().item())


def centred_rank(features: Tensor) -> float:
    """`effective_rank` of features [b d] without their mean over b: in how many directions they differ.

    What all of them have in common is one direction of `effective_rank`, and where it is large, nearly the only one.
    """
    features = features.cpu().double()
    return effective_rank(features - features.mean(0))


def distance_from_mean(values: Tensor) -> float:
    """How far values [b d] are from their mean over b, as a share of their deviation over all of them.

    The root of the variance within columns over the whole variance: 0 if all rows are the same, 1 if no column's mean
    says more than the mean of all.
    """
    values = values.cpu().double()
    whole = (values - values.mean()).square().mean().item()
    within = (values - values.mean(0)).square().mean().item()
    return math.sqrt(within / whole) if whole > 0 else 0.0
