"""Asking for positions: DropPos' classification of where each patch was."""

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.processes import draw, total, world
from patchloom.views.tokens import take


def affinity(features: Tensor, prefix: int, temperature: float, has_class_token: bool = True) -> Tensor:
    """How much each patch matters to the image's whole: attentive reconstruction's weights [b n] (DropPos Eq. 9).

    Softmax over all patches of cos(class token, patch) / τ. An encoder without a class token is asked with the mean of
    its patch tokens.

    Args:
        features: [b prefix+n d] of the full image with all positions.
        prefix: class and register tokens in front.
        temperature: τ > 0.
        has_class_token: whether the first of them is one.
    """
    patches = features[:, prefix:]
    query = features[:, :1] if has_class_token else patches.mean(1, keepdim=True)
    return (F.cosine_similarity(query, patches, dim=-1) / temperature).softmax(dim=-1)


def position_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy [b k] of logits [b k n] with soft labels [b k n], in float32 (DropPos Eq. 6)."""
    return -(labels * logits.float().log_softmax(-1)).sum(-1)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Σ weights · values / Σ weights over all patches of all images of all processes (DropPos Eq. 8, with a divisor).

    Each process gets its share of the sum, so that the mean over the processes, which is what their gradients are
    averaged to, is the value that one process with all images would have.
    """
    return (values * weights).sum() / (total(weights.sum()) / world())


def loss_weights(dropped: Tensor, visible: Tensor, affinities: Tensor | None = None) -> Tensor:
    """What each visible patch counts in the loss: zero where its position was known.

    Args:
        dropped: [b k] True where the position was withheld.
        visible: [b k] patch indices.
        affinities: [b n] from `affinity`, renormalised here over the visible patches; None counts all alike.
    """
    counted = dropped.float()
    if affinities is None:
        return counted
    among_visible = take(affinities, visible)
    return counted * among_visible / among_visible.sum(1, keepdim=True)


def foreign_places(visible: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
    """For each visible patch [b k] the index of another patch, uniform over the ``n`` - 1 others."""
    step = draw(torch.randint, visible.shape, generator, visible.device, 1, n)
    return (visible + step.to(visible.device, non_blocking=True)) % n
