"""One update: forward, backward, and the move of the weights, unless loss or gradient are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from patchloom.data.loader import Batch
from patchloom.data.stats import normalize
from patchloom.nets.performance import compile_blocks
from patchloom.runs.settings import ResolvedSettings
from patchloom.system.distributed import Shared, total, world
from patchloom.tasks.task import Task

# The optimiser: AdamW with the usual groups.


_FREE = ("pos_embed", "reg_token", "relative_position_bias_table")


def parameter_groups(net: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: with weight decay, and without (biases, norms, tokens, positions).

    Tokens and positions are recognised by their shape: all their dimensions but the last are 1, or by what their name
    ends in: ``pos_embed``, or that of a Swin's table of relative position biases.
    """
    decayed, free = list[nn.Parameter](), list[nn.Parameter]()
    for name, weight in net.named_parameters():
        if weight.requires_grad:
            vector = weight.numel() == weight.shape[-1] or name.endswith(_FREE)
            (free if vector else decayed).append(weight)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    net: nn.Module, weight_decay: float, device: str, betas: tuple[float, float] = (0.9, 0.95)
) -> torch.optim.AdamW:
    """Build AdamW, fused where the device has it, by default with MAE's betas. The loop sets the rate."""
    fused = device in ("cpu", "cuda")
    return torch.optim.AdamW(parameter_groups(net, weight_decay), lr=0.0, betas=betas, fused=fused)


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float, scale: float = 1.0) -> Tensor:
    """Divide the gradient by ``scale``, then shorten it to the norm ``max_norm`` if it is longer (0: never)."""
    weights = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    gradients = [one.grad for one in weights]
    if scale != 1:
        torch._foreach_mul_(gradients, 1 / scale)
    norm = nn.utils.clip_grad_norm_(weights, max_norm) if max_norm else nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class Forward(NamedTuple):
    """What one step left behind, still on the device: its loss (first) and metrics, and which images it saw."""

    values: dict[str, Tensor]
    indices: Tensor


class Update(NamedTuple):
    """How an update went.

    Attributes:
        good: loss and gradient are finite, and the weights were moved.
        overflow: the losses are finite, and the gradient is not.
        norm: of the gradient.
        names, values: of the loss (first) and the metrics, a row a step, each the mean over the processes.
        answers: to each question, whether any process said yes.
    """

    good: bool
    overflow: bool
    norm: float
    names: tuple[str, ...]
    values: list[list[float]]
    answers: list[bool]


def autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    """The ``precision`` in which a task computes on a kind of device; weights are float32 always."""
    half = precision != "float32"
    return torch.autocast(device, getattr(torch, precision)) if half else nullcontext()


class Stepper:
    """A task, its optimiser, and the processes among which they are shared.

    Args:
        fabric: device and processes, launched.
        task: what is trained.
        settings: resolved.
        steps: of the whole training.

    Attributes:
        began: step at which the present schedule began; above 0 in a run that is trained on.
    """

    def __init__(self, fabric: Fabric, task: Task, settings: ResolvedSettings, steps: int):
        self.fabric, self.task, self.settings, self.steps = fabric, task, settings, steps
        self.began = 0
        if settings.compile:
            compile_blocks(task)
        self.module = fabric.setup_module(task.to(fabric.device))
        adam = build_optimizer(task, settings.weight_decay, settings.device, settings.betas)
        self.optimizer: Any = fabric.setup_optimizers(adam)
        # what a forward pass changes, and an update that is not made must not
        self.statistics = [
            buffer
            for module in task.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        self.remember_statistics()

    def remember_statistics(self) -> None:
        """Remember the running statistics as they are now: an update that is not made goes back to them."""
        self.before = [buffer.clone() for buffer in self.statistics]

    def progress(self, step: int) -> float:
        """Return the share of the present schedule that is done after ``step`` steps."""
        return (step - self.began) / (self.steps - self.began)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision in which the task computes."""
        return autocast(self.fabric.device.type, self.settings.precision)

    def forward(self, batch: Batch, step: int, last: bool, generator: Shared, scale: float = 1.0) -> Forward:
        """Add a step's gradients to those that wait; with the ``last`` before an update, processes share them."""
        seed_step(self.settings.seed, step, self.fabric.global_rank, generator)
        views = [normalize(view, self.task.mean, self.task.std) for view in batch.views]
        with nullcontext() if last else self.fabric.no_backward_sync(self.module):
            with self.autocast():
                outcome = self.module(*views, progress=self.progress(step), generator=generator)
            self.fabric.backward(outcome.loss * scale / self.settings.accumulate)
        return Forward({"loss": outcome.loss.detach(), **outcome.metrics}, batch.indices)

    def update(
        self, done: int, rate: float, forwards: Sequence[Forward], questions: Sequence[bool], scale: float = 1.0
    ) -> Update:
        """Move the weights by the gradients that wait, if they and the losses are finite in every process."""
        norm = clip_gradients(self.optimizer.optimizer, self.settings.clip, scale)
        at = self.fabric.device
        values = torch.stack([torch.stack([v.float().to(at) for v in one.values.values()]) for one in forwards])
        faults = torch.stack([~values[:, 0].isfinite().all(), ~norm.isfinite()])
        asked = torch.tensor(questions, dtype=torch.float32).to(at, non_blocking=True)
        summed = total(torch.cat([faults.float(), asked, values.flatten() / world()]))
        # the one moment of an update at which the device is waited for
        *counts, length = torch.cat([summed, norm.float()[None]]).tolist()
        agreed, width = len(faults) + len(asked), values.shape[1]
        (lost, unbounded, *answers), means = (count > 0 for count in counts[:agreed]), counts[agreed:]
        rows = [means[start : start + width] for start in range(0, len(means), width)]
        if lost or unbounded:
            for buffer, before in zip(self.statistics, self.before, strict=True):
                buffer.copy_(before)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.task.after_step(self.progress(done))
            self.remember_statistics()
        self.optimizer.zero_grad(set_to_none=True)
        names = tuple(forwards[0].values)
        return Update(not (lost or unbounded), unbounded and not lost, length, names, rows, answers)


def seed_step(seed: int, step: int, rank: int, generator: torch.Generator) -> None:
    """Make everything random in a step follow from its number: the task's draws, which all processes share, and
    torch's own (drop path), which differ between them."""
    mixed = (seed * 1_000_003 + step) * 1_009
    generator.manual_seed(mixed)
    torch.manual_seed(mixed + rank + 1)
