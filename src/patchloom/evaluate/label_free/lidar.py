"""LiDAR: in how many directions images differ more than crops of one image do."""

from __future__ import annotations

import torch
from torch import Tensor

from patchloom.questions.collapse import effective_rank

DELTA = 1e-4  # of the paper


def lidar(features: Tensor, delta: float = DELTA) -> float:
    """LiDAR of features [n q d], of q augmented crops of each of n images (Thilak et al., ICLR 2024).

    The effective rank, as of RankMe, of the matrix of linear discriminant analysis whose classes are the images:
    Σ_w^-1/2 Σ_b Σ_w^-1/2 [d d]. Σ_b is the covariance of the images' means, Σ_w that of crops about their image's mean
    plus ``delta`` on the diagonal. From 1 to min(n - 1, d); directions in which crops of one image differ as much as
    images do count for little. Means are over n and over n·q, without a correction for small numbers.

    Raises:
        ValueError: fewer than two images, or than two crops of each.
    """
    n, q, d = features.shape
    if n < 2 or q < 2:
        raise ValueError(f"{q} crops of each of {n} images: LiDAR needs two crops or more of two images or more")
    crops = features.double().cpu()
    means = crops.mean(1)
    apart = means - means.mean(0)
    within = (crops - means[:, None]).flatten(0, 1)
    scatter = within.T @ within / (n * q) + delta * torch.eye(d, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(scatter)
    whitened = apart @ (vectors * values.rsqrt()) @ vectors.T
    # the matrix is symmetric and has no negative eigenvalue: its singular values are its eigenvalues
    return effective_rank(whitened.T @ whitened / n)
