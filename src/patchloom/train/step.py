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
from patchloom.nets.compiling import compiling
from patchloom.nets.optimizer import build_optimizer, is_free, layer_groups, parameter_groups
from patchloom.runs.settings import ResolvedSettings
from patchloom.schedules import cosine_between
from patchloom.system.device import fetch_behind
from patchloom.system.distributed import Shared, total, world
from patchloom.tasks.task import Task
from patchloom.train.clock import Piece


def pretraining_optimizer(
    net: nn.Module,
    weight_decay: float,
    device: str,
    betas: tuple[float, float] = (0.9, 0.95),
    layer_decay: float = 1.0,
    heads_first: float = 0.0,
) -> torch.optim.Optimizer:
    """Build AdamW, fused if the device supports it, with MAE's betas by default. The loop sets the learning rate.

    Only with layer decay, or if the heads train first, are there more groups than the two of `parameter_groups`: their
    order affects the last digits of the gradient norm. Then they are split by layer, with ``lr_scale`` as its factor of
    the learning rate, and by owner: ``new`` tells parts of the task from the encoder.
    """
    if layer_decay == 1 and not heads_first:
        groups = parameter_groups(net, weight_decay)
    else:
        task, groups = cast(Task, net), []
        free = {name for name, weight in task.named_parameters() if is_free(name, weight)}
        own = {id(weight) for weight in task.encoder.parameters()}
        for group in layer_groups(task, "encoder", free, weight_decay, layer_decay):
            for new in (False, True):
                if weights := [one for one in group["params"] if (id(one) not in own) == new]:
                    groups.append({**group, "params": weights, "new": new})
    return build_optimizer(groups, "adamw", device, betas=betas)


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float, scale: Tensor | None = None) -> Tensor:
    """Divide the gradients by ``scale``, clip them to the norm ``max_norm`` (0: never), and return their norm."""
    weights = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    gradients = [one.grad for one in weights]
    if scale is not None:
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
        scaling: loss scale for the next update, and number of updates since it changed; None without a scale.
    """

    good: bool
    overflow: bool
    norm: float
    names: tuple[str, ...]
    values: list[list[float]]
    answers: list[bool]
    scaling: tuple[float, int] | None


class Pending:
    """Update that is queued on the device, with the numbers of its `Update` on their way to the CPU.

    Args:
        row: these numbers [m], on the device.
        names: names of the loss and the metrics.
        questions: number of questions.
        scaled: whether the row ends with the scaling.
    """

    def __init__(self, row: Tensor, names: tuple[str, ...], questions: int, scaled: bool):
        self.names, self.questions, self.scaled = names, questions, scaled
        self.row, self.sent = fetch_behind(row)

    def read(self) -> Update:
        """Wait until the device has made the update, and return its result."""
        if self.sent is not None:
            self.sent.synchronize()
        norm, *numbers = self.row.tolist()
        scaling = None
        if self.scaled:
            *numbers, scale, steady = numbers
            scaling = scale, int(steady)
        agreed, width = 2 + self.questions, len(self.names)
        (lost, unbounded, *answers), means = (count > 0 for count in numbers[:agreed]), numbers[agreed:]
        rows = [means[start : start + width] for start in range(0, len(means), width)]
        return Update(not (lost or unbounded), unbounded and not lost, norm, self.names, rows, answers, scaling)


_STEADY = 2000  # updates without an overflow after which the loss scale is doubled


def adapt_scale(scaling: Tensor, lost: Tensor, unbounded: Tensor) -> Tensor:
    """Return the loss scale and the number of updates since it changed [2] after an update, from those before it.

    The scale is halved, to at least 1, after an overflow, and doubled after 2,000 updates without one: the rule of
    `torch.amp.GradScaler` (Micikevicius et al. 2018, section 3.2). An update whose loss is ``lost`` does not count.
    """
    scale, steady = scaling
    halved = torch.stack([(scale / 2).clamp(min=1), torch.zeros_like(steady)])
    grown = steady + 1 == _STEADY
    followed = torch.stack([torch.where(grown, scale * 2, scale), torch.where(grown, 0, steady + 1)])
    return torch.where(lost, scaling, torch.where(unbounded, halved, followed))


def autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    """Return torch's autocast context for a kind of device and a ``precision``; weights stay float32.

    TF32 is no dtype: `patchloom.system.device.float32_products` has it computed.
    """
    half = precision in ("bfloat16", "float16")
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
        ahead: number of updates that may be queued behind one whose result is not read yet: a GPU never idles then.
        scaling: loss scale and number of updates since it changed [2], for float16; else None.
    """

    def __init__(self, fabric: Fabric, task: Task, settings: ResolvedSettings, steps: int):
        self.fabric, self.task, self.settings, self.steps = fabric, task, settings, steps
        self.began = 0
        self.piece: Piece | None = None
        self.module = fabric.setup_module(task.to(fabric.device))
        gentle = settings.layer_decay, settings.heads_first
        adam = pretraining_optimizer(task, settings.weight_decay, settings.device, settings.betas, *gentle)
        self.heads_only = round(settings.heads_first * steps) if any(g.get("new") for g in adam.param_groups) else 0
        self.optimizer: Any = fabric.setup_optimizers(adam)
        self.ahead = int(settings.device == "cuda")
        self.scaling: Tensor | None = None
        # buffers that a forward pass changes, restored if the update is skipped
        self.statistics = [
            buffer
            for module in task.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        self.before = [buffer.clone() for buffer in self.statistics]

    def begin(self, scale: float, steady: int) -> None:
        """Begin from the present weights, with a loss scale that was unchanged for ``steady`` updates (float16)."""
        self.remember_statistics()
        if self.settings.precision == "float16":
            self.scaling = torch.tensor([scale, steady], dtype=torch.float32).to(self.fabric.device)

    def remember_statistics(self) -> None:
        """Save the running statistics, to restore them if the next update is skipped."""
        if self.statistics:
            torch._foreach_copy_(self.before, self.statistics)

    def progress(self, step: int) -> float:
        """Return the fraction of the present schedule that is done after ``step`` steps."""
        if self.piece is not None:
            return self.piece.at(step)
        return (step - self.began) / (self.steps - self.began)

    def weight_decay(self, step: int) -> float:
        """Return the weight decay of the update that ends with ``step`` (from 0), see ``--final_weight_decay``."""
        first, last = self.settings.weight_decay, self.settings.final_weight_decay
        return first if last is None else cosine_between(first, last, self.progress(step))

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.fabric.device.type, self.settings.precision)

    def forward(self, batch: Batch, step: int, window: range, generator: Shared) -> Forward:
        """Accumulate the gradients of a step of an update, which takes the mean over the steps of ``window``.

        The last step of the window averages them over processes. The last window of a training may be shorter than
        ``--accumulate``.
        """
        seed_step(self.settings.seed, step, self.fabric.global_rank, generator)
        views = [normalize(view, self.task.mean, self.task.std) for view in batch.views]
        known: dict[str, Any] = {}
        if self.task.uses_indices:
            known["indices"] = batch.indices.to(self.fabric.device, non_blocking=True)
        scale = 1.0 if self.scaling is None else self.scaling[0]
        with nullcontext() if step == window[-1] else self.fabric.no_backward_sync(self.module):
            with self.autocast(), compiling(self.settings.compile):
                outcome = self.module(*views, progress=self.progress(step), generator=generator, **known)
            self.fabric.backward(outcome.loss * scale / len(window))
        return Forward({"loss": outcome.loss.detach(), **outcome.metrics}, batch.indices)

    def update(self, done: int, rate: float, forwards: Sequence[Forward], questions: Sequence[bool]) -> Pending:
        """Apply the accumulated gradients if they and the losses are finite in every process.

        Whether they are is decided on the device, and nothing here waits for it: what must not change is kept by
        arithmetic, not by a branch.
        """
        adam, scaling = self.optimizer.optimizer, self.scaling
        norm = clip_gradients(adam, self.settings.clip, None if scaling is None else scaling[0])
        at = self.fabric.device
        values = torch.stack([torch.stack([v.float().to(at) for v in one.values.values()]) for one in forwards])
        faults = torch.stack([~values[:, 0].isfinite().all(), ~norm.isfinite()])
        asked = values.new_zeros(len(questions))
        for place, answer in enumerate(questions):
            if answer:
                asked[place].fill_(1)  # nothing is copied to the device
        summed = total(torch.cat([faults.float(), asked, values.flatten() / world()]))
        lost, unbounded = summed[:2] > 0
        skipped = lost | unbounded
        for buffer, before in zip(self.statistics, self.before, strict=True):
            buffer.copy_(torch.where(skipped, before, buffer))
        waits = not self.began and done <= self.heads_only  # the moments of the encoder are gathered meanwhile
        for group in adam.param_groups:
            group["lr"] = 0.0 if waits and not group.get("new", True) else rate * group.get("lr_scale", 1.0)
            if group["weight_decay"]:  # not for biases, norms and positions
                group["weight_decay"] = self.weight_decay(done - 1)
        if adam.defaults["fused"]:
            adam.found_inf = skipped.float()  # exactly 1 keeps weights and moments
            self.optimizer.step()
        elif not skipped:  # waits: torch's other implementations have no such flag
            self.optimizer.step()
        self.task.after_step(self.progress(done), (~skipped).float())
        self.remember_statistics()
        self.optimizer.zero_grad(set_to_none=True)
        parts = [norm.float()[None], summed]
        if scaling is not None:
            self.scaling = adapt_scale(scaling, lost, unbounded)
            parts.append(self.scaling)
        return Pending(torch.cat(parts), tuple(forwards[0].values), len(questions), scaling is not None)


def seed_step(seed: int, step: int, rank: int, generator: torch.Generator) -> None:
    """Seed the random draws of a step: those of the task, shared by all processes, and torch's own (drop path), which
    differ between processes."""
    mixed = (seed * 1_000_003 + step) * 1_009
    generator.manual_seed(mixed)
    torch.manual_seed(mixed + rank + 1)
