"""Small tasks for tests of their computations."""

import torch
from golden import close
from torch import nn

from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.tasks.task import Task

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}


def small(task_class: type[Task], size=(32, 32), p=4, channels=3, positions="sincos", encoder=None, **options) -> Task:
    """Build a task with ``options`` around a small encoder with options ``encoder``, with perturbed weights."""
    torch.manual_seed(0)
    spec = EncoderSpec("nano", size, p, channels, positions=positions, options=SIZES | (encoder or {}))
    task = task_class(build_encoder(spec), **options)
    with torch.no_grad():  # zero biases would hide mistakes
        for weight in task.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.05)
    return task


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same_loss_and_gradients(task: nn.Module, ours: torch.Tensor, other: nn.Module, theirs: torch.Tensor) -> None:
    """Check that losses and non-zero gradients of ``task`` and its copy ``other`` are equal."""
    close(ours, theirs.detach())
    ours.backward()
    theirs.backward()
    for (name, mine), its in zip(task.named_parameters(), other.parameters(), strict=True):
        if mine.requires_grad:
            assert its.grad.abs().max() > 0, name
            close(mine.grad, its.grad)


def indices_of(flags: torch.Tensor) -> torch.Tensor:
    """Return the indices [b m] of the flagged patches [b n], equally many per image."""
    return flags.nonzero()[:, 1].view(len(flags), -1)
