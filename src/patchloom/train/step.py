"""One update: forward, backward, and the move of the weights, unless it is no number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor

from patchloom.data import Batch, normalize
from patchloom.nets.encode import compile_blocks
from patchloom.nets.weights import EncoderCard
from patchloom.processes import Shared, total
from patchloom.tasks.task import Task
from patchloom.train.optim import build_optimizer, clip_gradients
from patchloom.train.settings import Settings


class Forward(NamedTuple):
    """What one step left behind, still on the device: its loss (first) and metrics, and which images it saw."""

    values: dict[str, Tensor]
    indices: Tensor


class Moved(NamedTuple):
    """How an update went.

    good: loss and gradient are numbers, and the weights were moved. norm: of the gradient. names, values: of the loss
    (first) and the metrics, a row a step. answers: to each question, whether any process said yes.
    """

    good: bool
    norm: float
    names: tuple[str, ...]
    values: list[list[float]]
    answers: list[bool]


class Stepper:
    """A task, its optimiser, and the processes among which they are shared.

    Args:
        fabric: device and processes, launched.
        task: what is trained.
        settings: resolved.
        card: its mean and std normalise the images.
        rate: gives the learning rate of the update after so many steps.
    """

    def __init__(self, fabric: Fabric, task: Task, settings: Settings, card: EncoderCard, rate: Callable[[int], float]):
        self.fabric, self.task, self.settings, self.card, self.rate = fabric, task, settings, card, rate
        if settings.compile:
            compile_blocks(task)
        self.module = fabric.setup_module(task.to(fabric.device))
        self.optimizer = fabric.setup_optimizers(build_optimizer(task, settings.weight_decay, settings.device))
        # what a forward pass changes, and an update that is not made must not
        self.statistics = [
            buffer
            for module in task.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        self.keep()

    def keep(self) -> None:
        """Remember the running statistics as they are now."""
        self.kept = [buffer.clone() for buffer in self.statistics]

    def autocast(self) -> AbstractContextManager:
        """The precision in which the task computes; weights are float32 always."""
        half = self.settings.precision == "bfloat16"
        return torch.autocast(self.fabric.device.type, torch.bfloat16) if half else nullcontext()

    def forward(self, batch: Batch, progress: float, last: bool, generator: Shared) -> Forward:
        """Add a step's gradients to those that wait; with the ``last`` before an update, processes share them."""
        views = [normalize(view, self.card.mean, self.card.std) for view in batch.finished(self.fabric.device)]
        with nullcontext() if last else self.fabric.no_backward_sync(self.module):
            with self.autocast():
                outcome = self.module(*views, progress=progress, generator=generator)
            self.fabric.backward(outcome.loss / self.settings.accumulate)
        return Forward({"loss": outcome.loss.detach(), **outcome.metrics}, batch.indices)

    def update(self, done: int, progress: float, waiting: Sequence[Forward], questions: Sequence[bool]) -> Moved:
        """Move the weights by the gradients that wait, if they and the losses are numbers in every process.

        Args:
            done: steps that are done with this one.
            progress: of the training.
            waiting: the steps since the last update.
            questions: which any process may answer with yes.
        """
        norm = clip_gradients(self.optimizer.optimizer, self.settings.clip)
        at = self.fabric.device
        values = torch.stack([torch.stack([v.float().to(at) for v in one.values.values()]) for one in waiting])
        bad = ~(values[:, 0].isfinite().all() & norm.isfinite())
        # the one moment of an update at which processes agree and the device is waited for
        answers = total(torch.cat([bad[None].float(), torch.tensor(questions, dtype=torch.float32, device=at)]))
        bad, *answers = (count > 0 for count in answers.tolist())
        if bad:
            for buffer, before in zip(self.statistics, self.kept, strict=True):
                buffer.copy_(before)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(done)
            self.optimizer.step()
            self.task.after_step(progress)
            self.keep()
        self.optimizer.zero_grad(set_to_none=True)
        return Moved(not bad, norm.item(), tuple(waiting[0].values), values.tolist(), answers)


def seed_step(seed: int, step: int, rank: int, generator: torch.Generator) -> None:
    """Make everything random in a step follow from its number: the task's draws, which all processes share, and
    torch's own (drop path), which differ between them."""
    mixed = (seed * 1_000_003 + step) * 1_009
    generator.manual_seed(mixed)
    torch.manual_seed(mixed + rank + 1)
