"""Seconds and bytes of work before it begins, for all verbs: from one timed step of it, and one count of its bytes."""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from patchloom.display import duration
from patchloom.errors import PatchloomError
from patchloom.system.device import synchronize
from patchloom.system.load import Load

_LONG = 24 * 3600.0  # seconds from which work gets a hint on how to make it shorter


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated time of a training.

    Attributes:
        steps: number of steps.
        step: seconds per step, without reading; None if unknown.
        reading: seconds for reading the images of a step; 0 if included in ``step``.
        apart: whether other processes read while the device computes.
        shared: seconds per step of both on the cores that they share; 0 if they share none.
        how: source of the seconds; without meaning if they are unknown.
        steps_alone: whether held-out measures and the final evaluation are left out of the seconds.
        load: load by other programs while the seconds were measured.
    """

    steps: int
    step: float | None
    reading: float = 0.0
    apart: bool = False
    shared: float = 0.0
    how: str = "measured"
    steps_alone: bool = True
    load: Load = Load()

    @property
    def total(self) -> float | None:
        """Total time in seconds; None if unknown."""
        if self.step is None:
            return None
        each = max(self.step, self.reading, self.shared) if self.apart else self.step + self.reading
        return self.steps * each

    def time_sentences(self) -> list[str]:
        """Return a line on the time of steps, with hints; on their number if the time is unknown."""
        if self.total is None or self.step is None:
            return [f"takes {self.steps:,} steps: the first ones will show how long"]
        each = f"{self.step:.2g} s" if self.step < 60 else duration(self.step)
        rest = "; without held-out measures and final evaluation" if self.steps_alone else ""
        said = [f"takes about {duration(max(1, self.total))}: {self.steps:,} steps of {each}, {self.how}{rest}"]
        if busy := self.load.sentence():
            said.append(f"  {busy}")
        if self.total > _LONG:
            said.append("  to shorten it: a GPU, a smaller --model, a smaller --img_size or fewer --epochs")
        return said


def time_steps(
    step: Callable[[], Any],
    *,
    least: int,
    seconds: float = 0.0,
    most: float = math.inf,
    slow: float = math.inf,
    warm_up: bool = True,
) -> list[float]:
    """Time single steps, by default after one for warm-up.

    Args:
        step: function that makes one step and waits for the device.
        least: smallest number of timed steps.
        seconds: time for more than ``least`` steps.
        most: largest number of timed steps, if it is above ``least``.
        slow: seconds after which timing stops, even with fewer than ``least`` steps.
        warm_up: whether a first step is left out: it loads libraries and prepares kernels for its number of images.

    Returns:
        Seconds of each timed step.
    """
    if warm_up:
        step()
    taken: list[float] = []
    while True:
        begun = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begun)
        enough = len(taken) >= least and (sum(taken) >= seconds or len(taken) >= most)
        if enough or sum(taken) >= slow:
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


def seconds_of(ways: Mapping[Any, Callable[[], Any]], device: str = "cpu", rounds: int = 5) -> dict[Any, list[float]]:
    """Time several implementations, interleaved, after a warm-up round; return the seconds of each round by name."""
    seconds: dict[Any, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, way in ways.items():
            synchronize(device)
            start = time.perf_counter()
            way()
            synchronize(device)
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def scaled_seconds(n: int, few: tuple[int, float], some: tuple[int, float]) -> float:
    """Extrapolate to n images from two numbers of images and their seconds.

    Time that does not depend on the number of images, such as the optimiser's, is not multiplied.
    """
    (small, least), (large, seconds) = few, some
    return seconds + (n - large) * max(0.0, seconds - least) / (large - small) if n > large else seconds


# Memory and operations of a step on fake tensors, which allocate no memory.


_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class LiveBytes(TorchDispatchMode):
    """Context that counts the bytes of tensors made in it, fake ones (`FakeTensorMode`) as if they were real.

    Workspaces that kernels allocate themselves are not seen. For convolutions, one is assumed: a copy of all inputs and
    outputs, as oneDNN makes for its own layouts.

    Attributes:
        now: bytes of tensors that are alive.
        peak: largest number of bytes that were alive together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self._add(one.untyped_storage())
        if func in _CONVOLUTIONS:
            copied = sum(one.nbytes for one in tree_leaves((args, made)) if isinstance(one, Tensor))
            self.peak = max(self.peak, self.now + copied)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()

        def gone(_: weakref.ref[torch.UntypedStorage]) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


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
        # Module.to_empty swaps tensors, which fails for one with a weak reference, such as a weight in an optimiser
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
