"""The teacher: a moving average of the student, which no gradient reaches."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn


class Teacher(nn.Module):
    """Copies of the student's parts that follow them slowly.

    The copies are always in eval mode, so batch norms use running statistics, which are averaged like weights, and
    nothing in them is dropped.

    Args:
        parts: what is copied, by the name under which the copy is found; each starts equal to the student's.
    """

    def __init__(self, **parts: nn.Module):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, deepcopy(part).requires_grad_(False))
        self.eval()

    def train(self, mode: bool = True) -> Teacher:
        """Nothing: a teacher stays in eval mode."""
        return super().train(False)

    @torch.no_grad()
    def follow(self, momentum: float, **parts: nn.Module) -> None:
        """Move each copy: teacher = momentum · teacher + (1 - momentum) · student, buffers included.

        Raises:
            ValueError: other parts than were copied.
        """
        own = dict(self.named_children())
        if own.keys() != parts.keys():
            raise ValueError(f"the teacher has {', '.join(own)}, and was told to follow {', '.join(parts)}")
        for name, part in parts.items():
            # apart, since under FSDP parameters are in parts and buffers are not
            for mine, theirs in ((own[name].parameters(), part.parameters()), (own[name].buffers(), part.buffers())):
                _follow(list(mine), [one.detach() for one in theirs], momentum)


def _follow(mine: list[torch.Tensor], theirs: list[torch.Tensor], momentum: float) -> None:
    moving = []
    for copy, source in zip(mine, theirs, strict=True):
        if copy.is_floating_point():
            moving.append((copy, source))
        else:  # the count of batches
            copy.copy_(source)
    if moving:
        torch._foreach_lerp_(*map(list, zip(*moving, strict=True)), 1 - momentum)
