"""One update: forward, backward and optimiser step, skipped if loss or gradient are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from patchloom.data.loader import Batch
from patchloom.data.stats import normalize
from patchloom.nets.heads import layer_groups
from patchloom.nets.performance import compile_blocks
from patchloom.runs.settings import ResolvedSettings
from patchloom.system.distributed import Shared, total, world
from patchloom.tasks.task import Task
from patchloom.train.clock import Piece

_FREE = ("pos_embed", "reg_token", "rope.freqs", "relative_position_bias_table")


def parameter_groups(net: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into two groups: with weight decay, and without (biases, norms, tokens, positions).

    Biases, norms and tokens are recognised by their shape (all dimensions but the last are 1), and positions by the
    end of their name.
    """
    decayed, free = list[nn.Parameter](), list[nn.Parameter]()
    for name, weight in net.named_parameters():
        if weight.requires_grad:
            (free if _is_free(name, weight) else decayed).append(weight)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _is_free(name: str, weight: Tensor) -> bool:
    """Return whether a parameter has no weight decay."""
    return weight.ndim == 0 or weight.numel() == weight.shape[-1] or name.endswith(_FREE)


def adaptation_groups(task: Task, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
    """Return `parameter_groups` split by layer and by owner.

    ``lr_scale`` is the layer's factor of the learning rate, and ``new`` tells parts of the task from the encoder.
    """
    free = {name for name, weight in task.named_parameters() if _is_free(name, weight)}
    own = {id(weight) for weight in task.encoder.parameters()}
    found = []
    for group in layer_groups(task, "encoder", free, weight_decay, layer_decay):
        for new in (False, True):
            if weights := [one for one in group["params"] if (id(one) not in own) == new]:
                found.append({**group, "params": weights, "new": new})
    return found


def build_optimizer(
    net: nn.Module,
    weight_decay: float,
    device: str,
    betas: tuple[float, float] = (0.9, 0.95),
    layer_decay: float = 1.0,
    heads_first: float = 0.0,
) -> torch.optim.AdamW:
    """Build AdamW, fused if the device supports it, with MAE's betas by default. The loop sets the learning rate.

    Only with layer decay, or if the heads train first, are there more groups than the two of `parameter_groups`: their
    order affects the last digits of the gradient norm.
    """
    fused = device in ("cpu", "cuda")
    if layer_decay == 1 and not heads_first:
        groups = parameter_groups(net, weight_decay)
    else:
        groups = adaptation_groups(cast(Task, net), weight_decay, layer_decay)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=fused)


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float, scale: float = 1.0) -> Tensor:
    """Divide the gradients by ``scale``, clip them to the norm ``max_norm`` (0: never), and return their norm."""
    weights = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    gradients = [one.grad for one in weights]
    if scale != 1:
        torch._foreach_mul_(gradients, 1 / scale)
    norm = nn.utils.clip_grad_norm_(weights, max_norm) if max_norm else nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class Forward(NamedTuple):
    """Result of one step, still on the device: loss (first) and metrics, and the indices of its images."""

    values: dict[str, Tensor]
    indices: Tensor


class Update(NamedTuple):
    """Result of an update.

    Attributes:
        good: whether loss and gradient were finite and the weights were updated.
        overflow: whether the losses were finite, but not the gradient.
        norm: gradient norm.
        names, values: names and values of the loss (first) and the metrics, one row per step, averaged over processes.
        answers: for each question, whether any process answered yes.
    """

    good: bool
    overflow: bool
    norm: float
    names: tuple[str, ...]
    values: list[list[float]]
    answers: list[bool]


def autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    """Return torch's autocast context for a kind of device and a ``precision``; weights stay float32."""
    half = precision != "float32"
    return torch.autocast(device, getattr(torch, precision)) if half else nullcontext()


class Stepper:
    """A task with its optimiser, set up for all processes.

    Args:
        fabric: device and processes, launched.
        task: task to train.
        settings: resolved settings.
        steps: number of steps of the whole training.

    Attributes:
        began: first step of the present schedule; above 0 in a run that is trained longer.
        piece: present part of the schedule of a run with ``--minutes``, else None.
        heads_only: number of steps at the start of the first schedule in which the encoder keeps its weights.
    """

    def __init__(self, fabric: Fabric, task: Task, settings: ResolvedSettings, steps: int):
        self.fabric, self.task, self.settings, self.steps = fabric, task, settings, steps
        self.began = 0
        self.piece: Piece | None = None
        if settings.compile:
            compile_blocks(task)
        self.module = fabric.setup_module(task.to(fabric.device))
        gentle = settings.layer_decay, settings.heads_first
        adam = build_optimizer(task, settings.weight_decay, settings.device, settings.betas, *gentle)
        self.heads_only = round(settings.heads_first * steps) if any(g.get("new") for g in adam.param_groups) else 0
        self.optimizer: Any = fabric.setup_optimizers(adam)
        # buffers that a forward pass changes, restored if the update is skipped
        self.statistics = [
            buffer
            for module in task.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        self.remember_statistics()

    def remember_statistics(self) -> None:
        """Save the running statistics, to restore them if the next update is skipped."""
        self.before = [buffer.clone() for buffer in self.statistics]

    def progress(self, step: int) -> float:
        """Return the fraction of the present schedule that is done after ``step`` steps."""
        if self.piece is not None:
            return self.piece.at(step)
        return (step - self.began) / (self.steps - self.began)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of the task."""
        return autocast(self.fabric.device.type, self.settings.precision)

    def forward(self, batch: Batch, step: int, window: range, generator: Shared, scale: float = 1.0) -> Forward:
        """Accumulate the gradients of a step of an update, which takes the mean over the steps of ``window``.

        The last step of the window averages them over processes. The last window of a training may be shorter than
        ``--accumulate``.
        """
        seed_step(self.settings.seed, step, self.fabric.global_rank, generator)
        views = [normalize(view, self.task.mean, self.task.std) for view in batch.views]
        known: dict[str, Any] = {}
        if self.task.uses_indices:
            known["indices"] = batch.indices.to(self.fabric.device, non_blocking=True)
        with nullcontext() if step == window[-1] else self.fabric.no_backward_sync(self.module):
            with self.autocast():
                outcome = self.module(*views, progress=self.progress(step), generator=generator, **known)
            self.fabric.backward(outcome.loss * scale / len(window))
        return Forward({"loss": outcome.loss.detach(), **outcome.metrics}, batch.indices)

    def update(
        self, done: int, rate: float, forwards: Sequence[Forward], questions: Sequence[bool], scale: float = 1.0
    ) -> Update:
        """Apply the accumulated gradients if they and the losses are finite in every process."""
        norm = clip_gradients(self.optimizer.optimizer, self.settings.clip, scale)
        at = self.fabric.device
        values = torch.stack([torch.stack([v.float().to(at) for v in one.values.values()]) for one in forwards])
        faults = torch.stack([~values[:, 0].isfinite().all(), ~norm.isfinite()])
        asked = torch.tensor(questions, dtype=torch.float32).to(at, non_blocking=True)
        summed = total(torch.cat([faults.float(), asked, values.flatten() / world()]))
        # the only synchronisation with the device in an update
        *counts, length = torch.cat([summed, norm.float()[None]]).tolist()
        agreed, width = len(faults) + len(asked), values.shape[1]
        (lost, unbounded, *answers), means = (count > 0 for count in counts[:agreed]), counts[agreed:]
        rows = [means[start : start + width] for start in range(0, len(means), width)]
        if lost or unbounded:
            for buffer, before in zip(self.statistics, self.before, strict=True):
                buffer.copy_(before)
        else:
            waits = not self.began and done <= self.heads_only  # the moments of the encoder are gathered meanwhile
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0 if waits and not group.get("new", True) else rate * group.get("lr_scale", 1.0)
            self.optimizer.step()
            self.task.after_step(self.progress(done))
            self.remember_statistics()
        self.optimizer.zero_grad(set_to_none=True)
        names = tuple(forwards[0].values)
        return Update(not (lost or unbounded), unbounded and not lost, length, names, rows, answers)


def seed_step(seed: int, step: int, rank: int, generator: torch.Generator) -> None:
    """Seed the random draws of a step: those of the task, shared by all processes, and torch's own (drop path), which
    differ between processes."""
    mixed = (seed * 1_000_003 + step) * 1_009
    generator.manual_seed(mixed)
    torch.manual_seed(mixed + rank + 1)
