"""What no gradient reaches: the teacher, a moving average of the student, and whatever else only answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy

import torch
from torch import Tensor, nn


@contextmanager
def no_grad_autocast(module: nn.Module, images: Tensor) -> Iterator[None]:
    """Without gradient; in bfloat16 if ``module``, whose passes these are, was told so by `use_half_without_grad`."""
    half = torch.autocast(images.device.type, torch.bfloat16) if module.half_no_grad else nullcontext()
    with torch.no_grad(), half:
        yield


def use_half_without_grad(net: nn.Module) -> bool:
    """Have what computes under `no_grad_autocast` inside ``net`` do so in bfloat16, even where the rest is in float32.

    Returns:
        Whether there is any.
    """
    found = [module for module in net.modules() if hasattr(module, "half_no_grad")]
    for module in found:
        module.half_no_grad = True
    return bool(found)


class Teacher(nn.Module):
    """Copies of the student's parts that follow them slowly.

    The copies are always in eval mode, so batch norms use running statistics, which are averaged like weights, and
    nothing in them is dropped.

    Args:
        parts: what is copied, by the name under which the copy is found; each starts equal to the student's.
    """

    def __init__(self, **parts: nn.Module):
        super().__init__()
        self.half_no_grad = False
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
