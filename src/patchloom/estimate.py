"""Estimates of the seconds and bytes of work, from a few steps of it, before it begins.

All verbs measure here. What is particular to a verb (which step it makes, and how many) is an argument.
"""

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
    """Seconds and bytes of some work.

    Attributes:
        steps: number of them.
        step: seconds of each, its images being there; None where that is unknown.
        reading: seconds in which the images of a step are read; 0 where that is in ``step``.
        apart: other processes read while the device computes.
        shared: seconds that both take of the cores that they share; 0 where they share none.
        start: seconds before the first step.
        validation: seconds of all validations.
        end: seconds after the last step.
        memory: bytes in use at the peak; None where that is unknown.
        disc: bytes of all files; None likewise.
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
        """Seconds in all; None where those of a step are unknown."""
        if self.step is None:
            return None
        each = with_reading(self.step, self.reading, self.apart, self.shared)
        return self.start + self.steps * each + self.validation + self.end


def with_reading(step: float, reading: float, apart: bool, shared: float = 0.0) -> float:
    """Return the seconds of a step with its reading, which other processes do meanwhile if ``apart``."""
    return max(step, reading, shared) if apart else step + reading


def time_steps(
    step: Callable[[], Any], *, least: int, seconds: float = 0.0, most: float = math.inf, slow: float = math.inf
) -> list[float]:
    """Return the seconds of each of some steps, after one that does not count, since it finds its memory.

    Args:
        step: makes one, and waits for the device.
        least: steps that are timed.
        seconds: time in all, in which more are timed.
        most: steps that are timed in it, if it is more than ``least``.
        slow: seconds after which no more are timed, however few.
    """
    step()
    taken: list[float] = []
    while not taken or ((len(taken) < least or (sum(taken) < seconds and len(taken) < most)) and sum(taken) < slow):
        begun = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begun)
    return taken


_PERIOD = 0.1  # seconds in which a quota of a CPU lets go and holds back


def typical_seconds(taken: Sequence[float]) -> float:
    """Return the median of the seconds of steps; short ones count together, since a quota may hold some back."""
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
    """Return the seconds of ``work`` on n images: those of few, and what each of some more adds.

    What does not depend on the images, such as the steps of a probe, is in both and is not multiplied. Some are twice
    as many as few where these take more than ``slow`` seconds; else they are done ``again``, if kernels are prepared
    for each new number of images, which would be multiplied.
    """
    few = min(n, few)
    first = _seconds(work, few)  # with the loading of what is needed
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


# A step with fake tensors, which have shapes and no numbers: nothing of what is counted is taken.


@dataclass
class StepCount:
    """A step, counted without its numbers.

    Attributes:
        kept: bytes of activations that are kept for the backward pass.
        peak: bytes of all tensors that are alive together, with weights and gradients.
        flops: operations of matrix products, forward and backward.
    """

    kept: int
    peak: int
    flops: float


def count_step(model: nn.Module, device: str, loss: Callable[[], Tensor]) -> StepCount | None:
    """Count a step of ``loss``, which calls the model on tensors that it makes.

    Fake tensors take the place of the model's weights: it cannot be trained after it. None for a model that needs
    numbers.
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
                alive.append(value)  # else a later one may have its place
                return value

            with FlopCounterMode(display=False, custom_mapping=_FUSED) as counter:
                with saved_tensors_hooks(keep, lambda value: value):
                    forward = loss()
                bytes_kept = sum(kept.values())  # the way back may keep more, to compute activations again
                alive.clear()
                forward.backward()  # there is none through teachers, nor through blocks that stay as they are
            return StepCount(bytes_kept, live.peak, float(counter.get_total_flops()))
    except PatchloomError:
        raise
    except Exception:  # a model of the user's own may do anything; then nothing is known, and nothing is said
        return None


@contextmanager
def fake_numbers(model: nn.Module, device: str) -> Iterator[LiveBytes]:
    """Inside, the model and whatever is made have shapes alone, and the bytes of them are counted."""
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        for part in model.modules():
            for name, one in list(part.named_parameters(recurse=False)):
                empty = torch.empty(one.shape, dtype=one.dtype, device=device)
                setattr(part, name, nn.Parameter(empty, one.requires_grad))
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
        yield live


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of the fused kernel on a CPU; from shapes [b h n d]."""
    b, h, n, d = query
    return 2 * b * h * n * key[2] * (d + value[3])


def _attention_back_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of its way back, which multiplies queries and keys once more."""
    b, h, n, d = query
    return 2 * b * h * n * key[2] * (3 * d + 2 * value[3])


# torch's counter does not know them
_FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_back_flops,
}
