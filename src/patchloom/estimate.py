"""Estimates of the time and memory of work before it begins, from a few trial steps, for all verbs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from patchloom.errors import PatchloomError
from patchloom.system.hardware import LiveBytes


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated time and memory.

    Attributes:
        steps: number of steps.
        step: seconds per step, without reading; None if unknown.
        reading: seconds for reading the images of a step; 0 if included in ``step``.
        apart: whether other processes read while the device computes.
        shared: seconds per step of both on the cores that they share; 0 if they share none.
        start: seconds before the first step.
        validation: seconds for all validations.
        end: seconds after the last step.
        memory: peak memory in bytes; None if unknown.
        disc: bytes of all files; None if unknown.
    """

    steps: int
    step: float | None
    reading: float = 0.0
    apart: bool = False
    shared: float = 0.0
    start: float = 0.0
    validation: float = 0.0
    end: float = 0.0
    memory: float | None = None
    disc: float | None = None

    @property
    def total(self) -> float | None:
        """Total time in seconds; None if unknown."""
        if self.step is None:
            return None
        each = with_reading(self.step, self.reading, self.apart, self.shared)
        return self.start + self.steps * each + self.validation + self.end


def with_reading(step: float, reading: float, apart: bool, shared: float = 0.0) -> float:
    """Return the seconds of a step with reading, done by other processes at the same time if ``apart``."""
    return max(step, reading, shared) if apart else step + reading


def time_steps(
    step: Callable[[], Any], *, least: int, seconds: float = 0.0, most: float = math.inf, slow: float = math.inf
) -> list[float]:
    """Time single steps, after one for warm-up.

    Args:
        step: function that makes one step and waits for the device.
        least: smallest number of timed steps.
        seconds: time for more than ``least`` steps.
        most: largest number of timed steps, if it is above ``least``.
        slow: seconds after which timing stops, even with fewer than ``least`` steps.

    Returns:
        Seconds of each timed step.
    """
    step()
    taken: list[float] = []
    while not taken or ((len(taken) < least or (sum(taken) < seconds and len(taken) < most)) and sum(taken) < slow):
        begun = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begun)
    return taken


_PERIOD = 0.1  # seconds, the period of a CPU quota


def typical_seconds(taken: Sequence[float]) -> float:
    """Return the median time of steps, after averaging short ones over a period of the CPU quota."""
    means, block = [], list[float]()
    for one in taken:
        block.append(one)
        if sum(block) >= _PERIOD:
            means.append(statistics.fmean(block))
            block = []
    return statistics.median(means or taken)


def scaled_seconds(
    work: Callable[[int], object], n: int, few: int, some: int, slow: float, again: bool = False
) -> float:
    """Extrapolate the seconds of ``work`` on n images from those on ``few`` and on ``some`` images.

    Time that does not depend on the number of images, such as the steps of a probe, is not multiplied. If the few
    images take more than ``slow`` seconds, twice as many are timed next instead of ``some``. Otherwise ``again``
    repeats the timing, so that preparing kernels for a new number of images does not count.
    """
    few = min(n, few)
    first = _seconds(work, few)  # includes one-time loading
    if few == n:
        return first
    least = _seconds(work, few)
    some = min(n, some if least <= slow else 2 * few)
    more = _seconds(work, some)
    if again and least <= slow:
        more = _seconds(work, some)
    return more + max(0.0, more - least) * (n - some) / (some - few)


def _seconds(work: Callable[[int], object], count: int) -> float:
    begun = time.perf_counter()
    work(count)
    return time.perf_counter() - begun


# A step on fake tensors, which allocate no memory.


@dataclass
class StepCount:
    """Memory and operations of a step on fake tensors.

    Attributes:
        kept: bytes of activations saved for the backward pass.
        peak: peak bytes of all tensors, with weights and gradients.
        flops: operations of matrix products, forward and backward.
    """

    kept: int
    peak: int
    flops: float


def count_step(model: nn.Module, device: str, loss: Callable[[], Tensor]) -> StepCount | None:
    """Count memory and operations of a training step with ``loss``, which makes inputs and calls the model.

    The model's weights are replaced by fake tensors, so it cannot be trained afterwards. Return None for a model that
    cannot run on fake tensors.
    """
    try:
        with fake_numbers(model, device) as live:
            own = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
            kept: dict[int, int] = {}
            alive: list[Tensor] = []

            def keep(value: Tensor) -> Tensor:
                storage = value.untyped_storage()
                if storage._cdata not in own:
                    kept[storage._cdata] = storage.nbytes()
                alive.append(value)  # keeps its address from being reused
                return value

            with FlopCounterMode(display=False, custom_mapping=_FUSED) as counter:
                with saved_tensors_hooks(keep, lambda value: value):
                    forward = loss()
                bytes_kept = sum(kept.values())  # before the backward pass, since checkpointing saves more in it
                alive.clear()
                forward.backward()  # skips teachers and frozen blocks
            return StepCount(bytes_kept, live.peak, float(counter.get_total_flops()))
    except PatchloomError:
        raise
    except Exception:  # a user's model may do anything; then there is no estimate
        return None


@contextmanager
def fake_numbers(model: nn.Module, device: str) -> Iterator[LiveBytes]:
    """Replace the model's weights by fake tensors, make all new tensors fake in this block, and count their bytes."""
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        for part in model.modules():
            for name, one in list(part.named_parameters(recurse=False)):
                empty = torch.empty(one.shape, dtype=one.dtype, device=device)
                setattr(part, name, nn.Parameter(empty, one.requires_grad))
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
        yield live


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Count the operations of torch's fused attention on a CPU, from shapes [b h n d]."""
    b, h, n, d = query
    return 2 * b * h * n * key[2] * (d + value[3])


def _attention_back_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Count the operations of its backward pass, which multiplies queries and keys once more."""
    b, h, n, d = query
    return 2 * b * h * n * key[2] * (3 * d + 2 * value[3])


# not in torch's own counter
_FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_back_flops,
}
