"""The training loop, over lightning-fabric: one for every task, device and precision."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from patchloom.data import Batch, Source, normalize, steps_per_epoch, training_batches
from patchloom.errors import PatchloomError
from patchloom.nets.encode import compile_blocks
from patchloom.nets.weights import EncoderCard
from patchloom.tasks.measure import Measure
from patchloom.tasks.task import Task
from patchloom.train.checkpoint import load_checkpoint, save_checkpoint
from patchloom.train.folder import MetricsFile, RunFolder
from patchloom.train.optim import build_optimizer
from patchloom.train.progress import Pace, Reporter, line
from patchloom.train.schedule import learning_rate, points
from patchloom.train.settings import Settings
from patchloom.train.stop import Stop
from patchloom.train.watch import Watch

_LOGGED = 200  # rows of metrics.csv in a run
_MEASURED = 0.25  # the held-out measures are taken at the start and after every such share
_SAVE_EVERY = 60.0  # seconds between checkpoints
COLLAPSED = (
    "the teacher gives all images nearly the same output, so agreement with it means little: if this stays so, lower "
    "--blr, raise --warmup_epochs or the batch size, or choose another task"
)


def build_fabric(settings: Settings) -> Fabric:
    """The device and the precision; weights are float32 always."""
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # we say ourselves what precision is used
    precision = "bf16-mixed" if settings.precision == "bfloat16" else "32-true"
    return Fabric(accelerator=settings.device, devices=1, precision=precision)


class Loop:
    """One training run.

    Time is an argument everywhere: what a step sees (batch, draws, learning rate) follows from its number and the
    seed, so that going on after a stop is the same as never having stopped.

    Args:
        fabric: device and precision, launched.
        task: what is trained.
        source: the training images.
        settings: resolved.
        card: its mean and std normalise the images.
        folder: where the run lives.
        reporter: what prints.
        watch: the held-out measures.
    """

    def __init__(
        self,
        fabric: Fabric,
        task: Task,
        source: Source,
        settings: Settings,
        card: EncoderCard,
        folder: RunFolder,
        reporter: Reporter,
        watch: Watch,
    ):
        self.fabric, self.task, self.source, self.settings = fabric, task, source, settings
        self.card, self.folder, self.reporter, self.watch = card, folder, reporter, watch
        per_epoch = steps_per_epoch(len(source), settings.batch_size, fabric.world_size)
        self.per_epoch, self.steps = per_epoch, settings.epochs * per_epoch
        self.warmup = round(settings.warmup_epochs * per_epoch)
        self.global_batch = min(settings.batch_size, len(source) // fabric.world_size) * fabric.world_size
        self.peak = settings.blr * self.global_batch * settings.accumulate / 256
        if settings.compile:
            compile_blocks(task)
        optimizer = build_optimizer(task, settings.weight_decay, settings.device)
        self.module, self.optimizer = fabric.setup(task, optimizer)
        self.first = self._resume()
        self.metrics = MetricsFile(folder.metrics, self.first)
        self.measure: Measure | None = None
        self.unreadable: set[str] = set()

    def _resume(self) -> int:
        """Restore the checkpoint, if there is one; the step to go on with."""
        if not self.folder.checkpoint.exists():
            return 0
        return load_checkpoint(self.folder.checkpoint, self.task, self.optimizer.optimizer)["step"]

    def run(self) -> bool:
        """Train to the end, or until somebody stops it (Ctrl-C, SIGTERM), which writes a checkpoint.

        Returns:
            Whether the end was reached.

        Raises:
            PatchloomError: the loss is no longer a number, or the data cannot be read.
        """
        with Stop() as stop:
            return self._run(stop)

    def _run(self, stop: Stop) -> bool:
        generator = torch.Generator()
        self.task.train()
        pace = Pace(self.steps, self.first, self.global_batch)
        measured, logged = points(self.steps, _MEASURED), points(self.steps, 1 / _LOGGED)
        if self.first == 0:
            self._look(0, pace, {})
            self._save(0)
        saved, recent = time.perf_counter(), []
        for step, batch in enumerate(self._batches(pace), start=self.first):
            seed_step(self.settings.seed, step, self.fabric.global_rank, generator)
            recent.append(self._step(step, batch, generator))
            done = step + 1
            if done in logged or done in measured:
                row = self._log(done, recent, pace)
                recent = []
                self._look(done, pace, row) if done in measured else self.metrics.add(row)
            # gradients that wait for their update are in no checkpoint
            settled = done % self.settings.accumulate == 0 or done == self.steps
            if settled and (stop.asked or time.perf_counter() - saved > _SAVE_EVERY or done == self.steps):
                self._save(done)
                saved = time.perf_counter()
                if stop.asked and done < self.steps:
                    return False
        return True

    def _batches(self, pace: Pace) -> Iterator[Batch]:
        source = training_batches(
            self.source,
            self.task.augment,
            self.settings.batch_size,
            self.settings.seed,
            self.first,
            self.steps,
            self.settings.workers,
            self.settings.channels,
            self.fabric.global_rank,
            self.fabric.world_size,
        )
        while True:
            start = time.perf_counter()
            batch = next(source, None)
            pace.waiting += time.perf_counter() - start
            if batch is None:
                return
            if fresh := set(batch.unreadable) - self.unreadable:
                self.unreadable |= fresh
                self.folder.note_unreadable(sorted(fresh))
            yield batch

    def _step(self, step: int, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
        """One step; the loss and metrics as tensors, so that nothing waits for the device."""
        mean, std = self.card.mean, self.card.std
        views = [normalize(view, mean, std) for view in batch.finished(self.fabric.device)]
        last = (step + 1) % self.settings.accumulate == 0 or step + 1 == self.steps
        with nullcontext() if last else self.fabric.no_backward_sync(self.module):
            outcome = self.module(*views, progress=step / self.steps, generator=generator)
            self.fabric.backward(outcome.loss / self.settings.accumulate)
        if last:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(step, self.steps, self.warmup, self.peak)
            if self.settings.clip:
                self.fabric.clip_gradients(
                    self.module, self.optimizer, max_norm=self.settings.clip, error_if_nonfinite=False
                )
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.task.after_step((step + 1) / self.steps)
        return {"loss": outcome.loss.detach(), **outcome.metrics}

    def _log(self, done: int, recent: list[dict[str, Tensor]], pace: Pace) -> dict[str, Any]:
        """A row of ``metrics.csv``: means since the last one."""
        means = {name: torch.stack([values[name] for values in recent]).mean().item() for name in recent[0]}
        if not math.isfinite(means["loss"]):
            raise PatchloomError(self._diverged(done))
        self.reporter.flash(self._line(done, means["loss"], pace))
        row = {"step": done, "epoch": round(done / self.per_epoch, 4), "images": done * self.global_batch}
        row |= means | {"lr": learning_rate(done - 1, self.steps, self.warmup, self.peak), "seconds": pace.seconds()}
        return row

    def _diverged(self, done: int) -> str:
        return (
            f"loss or weights are no longer numbers after {done} steps: begin again with another --out and a lower "
            f"--blr (now {self.settings.blr:g}), or with --precision float32"
        )

    def _line(self, done: int, loss: float, pace: Pace) -> str:
        return line(done / self.per_epoch, self.settings.epochs, loss, self.measure, pace.describe(done))

    def _look(self, done: int, pace: Pace, row: dict[str, Any]) -> None:
        """Take the held-out measures and print the line that stays."""
        start = time.perf_counter()
        self.measure, columns = self.watch.look(self.fabric.device, self.fabric.autocast)
        if done == 0:
            row = {"step": 0, "epoch": 0.0, "images": 0}
            raw = self.watch.raw_pixel_knn()
            if raw is not None:
                columns |= {"knn:untrained": columns["knn"], "knn:raw pixels": raw}
        self.metrics.add(row | columns)
        pace.aside += time.perf_counter() - start
        if done:
            self.reporter.say(self._line(done, row["loss"], pace))
            if self.measure.collapsed():
                self.reporter.say(f"  warning: {COLLAPSED}")

    def _save(self, done: int) -> None:
        if not all(weight.isfinite().all() for weight in self.task.parameters()):
            raise PatchloomError(self._diverged(done))  # and what is on the disc stays
        if self.fabric.is_global_zero:
            save_checkpoint(self.folder.checkpoint, self.task, self.optimizer.optimizer, {"step": done})
            self.metrics.write()


def seed_step(seed: int, step: int, rank: int, generator: torch.Generator) -> None:
    """Make everything random in a step follow from its number: the task's draws, and torch's own (drop path)."""
    mixed = (seed * 1_000_003 + step) * 1_009 + rank
    generator.manual_seed(mixed)
    torch.manual_seed(mixed + 1)
