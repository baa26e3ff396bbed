"""Asking for agreement with a teacher: losses, the teacher's schedule, and the signs of a collapse.

Letters: b images, d width of the outputs, v masks of one image.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.processes import gathered, rank


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """Cosine [...] between outputs [... d], in float32."""
    return F.cosine_similarity(student.float(), teacher.float(), dim=-1)


def byol_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared distance of the normalised outputs [... d], averaged: 2 - 2 cos (BYOL Eq. 2, ExtreMA section 3.1)."""
    return (2 - 2 * cosine(student, teacher)).mean()


def info_nce(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """InfoNCE as MoCo v3 writes it (times 2τ): each student finds its teacher among those of all processes.

    Args:
        student: [v b d], gradients flow here only.
        teacher: [b d] of this process.
        temperature: τ.
    """
    q, k = F.normalize(student.float(), dim=-1), F.normalize(gathered(teacher).float(), dim=-1)
    right = torch.arange(len(teacher), device=q.device) + rank() * len(teacher)
    logits = q @ k.T / temperature
    return 2 * temperature * F.cross_entropy(logits.flatten(0, 1), right.repeat(len(q)))


def momentum(progress: float, start: float) -> float:
    """The teacher's momentum: ``start`` at the beginning, 1 at the end, a half cosine between (BYOL)."""
    return 1 - (1 - start) * (1 + math.cos(math.pi * progress)) / 2


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
    values = torch.linalg.svdvals(outputs.double().cpu())
    share = values / values.sum().clamp_min(1e-12)
    return math.exp(-(share * (share + 1e-12).log()).sum().item())


def others(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean cosine [b] of each student's output [b d] with the teacher's outputs [b d] of the other images.

    What agreement is worth nothing below: a collapsed pair agrees on everything. A single image is compared with
    itself.
    """
    all_pairs = F.normalize(student.float(), dim=-1) @ F.normalize(teacher.float(), dim=-1).T
    b = len(all_pairs)
    if b == 1:
        return all_pairs[:, 0]
    return (all_pairs.sum(1) - all_pairs.diagonal()) / (b - 1)
