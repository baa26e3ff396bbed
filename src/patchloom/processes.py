"""What the processes of one training tell each other. With a single process every function is the identity."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from patchloom.machine import Cores, cores, own_cores

T = TypeVar("T")


_alone = False


def world() -> int:
    """How many processes train together."""
    if _alone:
        return 1
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def alone() -> Iterator[None]:
    """While entered, this process does as if it were the only one: what the others take no part in would wait for them.

    It has to end before anything that all of them do.
    """
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if world() > 1 else 0


def total(values: Tensor) -> Tensor:
    """The sum of every process's ``values``, without gradient."""
    values = values.detach()
    if world() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def smallest(number: int) -> int:
    """The smallest of every process's ``number``; no GPU is waited for."""
    if world() == 1:
        return number
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=_of_cpus(dist.group.WORLD))
    return int(found)


def wait_for_all() -> None:
    """Wait until every process is here: a week if need be, where other waiting ends after half an hour."""
    if world() > 1:
        dist.barrier(group=_patient(dist.group.WORLD))


@cache
def _patient(group: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


@cache
def _of_cpus(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The processes of ``group``, joined for what is on CPUs."""
    return group if dist.get_backend(group) == "gloo" else dist.new_group(backend="gloo")


def gathered(values: Tensor) -> Tensor:
    """Every process's ``values`` [b ...], one below the other in the order of the ranks [world*b ...], no gradient.

    b must be the same in all of them, as everywhere here: the training loop sees to it (`smallest`).
    """
    values = values.detach().contiguous()
    if world() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(world())]
    dist.all_gather(parts, values)
    return torch.cat(parts)


def collected(values: list[T]) -> list[T]:
    """Every process's list, one after the other in the order of the ranks."""
    if world() == 1:
        return values
    parts: list[list[T]] = [[] for _ in range(world())]
    dist.all_gather_object(parts, values)
    return [value for part in parts for value in part]


def alike(buffers: Iterable[Tensor]) -> None:
    """Give every process the first one's values, in place: statistics of a BatchNorm are each process's own."""
    if world() > 1:
        for buffer in buffers:
            dist.broadcast(buffer, 0)


def cores_here() -> Cores:
    """Cores of this machine that the processes of this training may use, and how many these are. All must ask at once.

    They are counted, since each process may have cores of its own (SLURM), or all of them the same.
    """
    here = platform.node()
    known = [(own, count) for machine, own, count in collected([(here, own_cores(), cores())]) if machine == here]
    limits = {
        frozenset(own): count for own, count in known
    }  # processes on the same cores share a control group's quota
    return Cores(min(len(frozenset().union(*limits)), sum(limits.values())), len(known))


class Shared(torch.Generator):
    """A generator that every process of a training seeds alike.

    What is drawn with it is drawn for the images of all processes, and each process takes the rows of its own. So what
    happens to an image does not depend on how many processes there are.

    Args:
        device: where it draws. A GPU draws other numbers from a seed than a CPU does, and has nothing to wait for.
    """

    def __new__(cls, device: torch.device | str = "cpu") -> Shared:
        return super().__new__(cls, device)

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank, self.world = rank(), world()


def draw(
    kind: Callable[..., Tensor],
    shape: Sequence[int],
    generator: torch.Generator | None,
    device: torch.device | str,
    *bounds: int,
) -> Tensor:
    """Random numbers of ``shape`` (an image a row), where ``generator`` lives: from a seed on the CPU, every machine
    makes the same.

    Args:
        kind: torch.rand, torch.randn or torch.randint, with its ``bounds``.
        shape: b first.
        generator: one that is `Shared` gives this process its rows; the global one of ``device`` if absent.
        device: where the numbers will be needed.
    """
    at = generator.device if generator is not None else device
    if not isinstance(generator, Shared):
        return kind(*bounds, tuple(shape), generator=generator, device=at)
    b, *each = shape
    whole = kind(*bounds, (b * generator.world, *each), generator=generator, device=at)
    return whole[generator.rank * b : (generator.rank + 1) * b]


def averaged(values: Tensor) -> Tensor:
    """The mean of every process's ``values``, through which gradients flow back to all of them."""
    return _Averaged.apply(values) if world() > 1 else values


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return total(values) / world()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # each process's loss depends on everybody's values, so everybody's gradients add up
        return total(gradient) / world()
