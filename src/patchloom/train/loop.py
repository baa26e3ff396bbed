"""The training loop: one for every task, device, precision, and number of processes."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import Any

import torch
from lightning_fabric import Fabric

from patchloom.data import Arriving, Source, steps_per_epoch, training_batches
from patchloom.errors import PatchloomError
from patchloom.processes import Shared, collected, total, world
from patchloom.questions.measure import Measure
from patchloom.runs.checkpoint import finite, restore, tensors_of
from patchloom.runs.folder import RunFolder, metrics_row, write_metrics
from patchloom.runs.settings import Settings
from patchloom.stopping import Stop
from patchloom.tasks.task import Task
from patchloom.train.batches import evened
from patchloom.train.launch import gathered_weights
from patchloom.train.progress import Pace, Reporter, line, measured
from patchloom.train.resolve import share_of_batch
from patchloom.train.schedule import learning_rate, points
from patchloom.train.state import State
from patchloom.train.step import Forward, Moved, Stepper, seed_step
from patchloom.train.watch import Watch

_LOGGED = 200  # rows of metrics.csv in a run
_MEASURED = 0.25  # the held-out measures are taken at the start and after every such share
_SAVE_EVERY = 60.0  # seconds between checkpoints
_MOST_IN_A_ROW = 5  # updates that are no numbers before the run goes back to a checkpoint
_MOST_SETBACKS = 3  # how often it goes back
COLLAPSED = (
    "the teacher gives all images nearly the same output, so agreement with it means little: if this stays so, lower "
    "--blr, raise --warmup_epochs or the batch size, or choose another task"
)


class _Diverged(Exception):
    """Several updates in a row, or the weights, are no numbers."""


class Loop:
    """One training run.

    Time is an argument everywhere: what a step sees (batch, draws, learning rate) follows from its number and the
    seed, so that going on after a stop is the same as never having stopped; and neither batches nor draws depend on how
    many processes share them.

    Args:
        fabric: device and processes, launched.
        task: what is trained.
        source: the training images.
        settings: resolved.
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
        folder: RunFolder,
        reporter: Reporter,
        watch: Watch,
    ):
        self.fabric, self.task, self.source, self.settings = fabric, task, source, settings
        self.folder, self.reporter, self.watch = folder, reporter, watch
        self.each = share_of_batch(settings.batch_size, len(source), world())  # images a step of this process
        self.global_batch = self.each * world()
        self.per_epoch = steps_per_epoch(len(source), settings.batch_size)
        self.steps = settings.epochs * self.per_epoch
        self.warmup = round(settings.warmup_epochs * self.per_epoch)
        self.peak = settings.blr * self.global_batch * settings.accumulate / 256
        self.stepper = Stepper(fabric, task, settings, self._rate)
        self.state = State()
        self.measure: Measure | None = None
        self.told = ""  # of the measure, in the line of progress
        self.unreadable: set[str] = set()
        self.restored = self._restore()

    def _restore(self) -> bool:
        """Go to the newest sound checkpoint, if there is one."""
        checkpoints = self.folder.checkpoints
        if not checkpoints.there():
            return False
        tensors, about, problems = checkpoints.read()
        restore(tensors, self.task, self.stepper.optimizer.optimizer)
        self.stepper.keep()
        self.state = State.of(about)
        for problem in problems:
            self.reporter.say(f"  {problem}: the one before it is used")
        return True

    def run(self) -> bool:
        """Train to the end, or until somebody stops it (see `Stop`), which writes a checkpoint.

        Returns:
            Whether the end was reached.

        Raises:
            PatchloomError: training diverged again and again, or the data cannot be read.
        """
        if self.restored:
            self._write_metrics()  # the run may have been killed between its checkpoint and this
        else:
            self._look({"step": 0, "epoch": 0.0, "images": 0}, Pace(self.steps, 0, self.global_batch))
            self._save()
        with Stop() as stop:
            while True:
                try:
                    # asked while the end was being saved: the first process alone has more to do
                    return self._train(stop) and not (stop.asked and self.fabric.is_global_zero)
                except _Diverged:
                    self._go_back()

    def _train(self, stop: Stop) -> bool:
        """From the state's step to the end."""
        with closing(self._batches()) as batches:  # else the processes that read would live until memory is tidied
            return self._steps(batches, stop)

    def _steps(self, batches: Arriving, stop: Stop) -> bool:
        generator = Shared(self.fabric.device)
        self.task.train()
        pace = Pace(self.steps, self.state.step, self.global_batch, self.state.seconds)
        looked, logged = points(self.steps, _MEASURED), points(self.steps, 1 / _LOGGED)
        saved, waiting, smallest = time.perf_counter(), [], self.each
        for step in range(self.state.step, self.steps):
            with pace.waits():
                batch = next(batches)
            self.unreadable.update(batch.unreadable)
            if len(batch.indices) < smallest:
                smallest = len(batch.indices)
                self.reporter.say(f"  step {step + 1:,} has {smallest * world():,} images: no more can be read")
            seed_step(self.settings.seed, step, self.fabric.global_rank, generator)
            done, before, scale = step + 1, self.state.step, self._scale()
            last = done % self.settings.accumulate == 0 or done == self.steps
            waiting.append(self.stepper.forward(batch, step / self.steps, last, generator, scale))
            with pace.waits():  # while a GPU still works at the step
                batches.send()
            if not last:  # gradients that wait for their update are in no checkpoint
                continue
            due = self.fabric.is_global_zero and time.perf_counter() - saved > _SAVE_EVERY
            moved = self.stepper.update(done, done / self.steps, waiting, (stop.asked, due), scale)
            stopping, due = moved.answers
            self.state.step, self.state.seconds = done, pace.seconds()
            self._count(moved, waiting)
            waiting = []
            passed = range(before + 1, done + 1)
            look = not looked.isdisjoint(passed)
            if look or not logged.isdisjoint(passed):
                row = self._row(pace)
                self._look(row, pace) if look else self.state.rows.append(metrics_row(row))
            # amid updates that fail it is too late to save what to go back to
            if stopping or done == self.steps or (due and not self.state.in_a_row):
                self._save()
                saved = time.perf_counter()
                if stopping or done == self.steps:
                    self.fabric.barrier()  # whoever started these processes may end all of them when one has ended
                if stopping:
                    return False
        return True

    def _batches(self) -> Arriving:
        return training_batches(
            self.source,
            self.task.augment,
            self.each,
            self.settings.seed,
            self.state.step,
            self.steps,
            self.settings.workers,
            self.settings.channels,
            self.fabric.global_rank,
            world(),
            self.fabric.device,
            partial(evened, settings=self.settings, each=self.each),
        )

    def _scale(self) -> float:
        """By which losses are multiplied: small gradients would be 0 in float16."""
        return self.state.scale if self.settings.precision == "float16" else 1.0

    def _rate(self, done: int) -> float:
        return learning_rate(done - 1, self.steps, self.warmup, self.peak) * self.state.factor

    def _count(self, moved: Moved, waiting: list[Forward]) -> None:
        """Add an update to the sums, or note that it was not made, with the names of its images.

        Raises:
            _Diverged: too many in a row were not made.
        """
        state, scale = self.state, self._scale()
        if self.settings.precision == "float16" and (moved.good or moved.overflow):
            state.adapt(moved.overflow)
        if moved.good:
            state.count(moved.names, moved.values)
            state.in_a_row = 0
            return
        if moved.overflow and scale > 1:  # with a smaller one the next update may be made
            return
        state.skipped += 1
        state.in_a_row += 1
        names = collected([self.source.describe(index) for one in waiting for index in one.indices.tolist()])
        why = f"loss {', '.join(f'{row[0]:g}' for row in moved.values)}, norm of the gradient {moved.norm:g}"
        if self.fabric.is_global_zero:
            self.folder.note_skipped("\t".join([f"step {state.step}", why, *names]))
        self.reporter.say(
            f"  step {state.step:,} was skipped: {why}; {self.folder.skipped} names its {len(names)} images"
        )
        if state.in_a_row >= _MOST_IN_A_ROW:
            raise _Diverged

    def _go_back(self) -> None:
        """To the last checkpoint, with half the learning rate from there on.

        Raises:
            PatchloomError: it did so too often.
        """
        done, setbacks = self.state.step, self.state.setbacks + 1
        if setbacks > _MOST_SETBACKS:
            raise PatchloomError(
                f"loss or weights are no longer numbers after {done} steps, though the learning rate was halved "
                f"{_MOST_SETBACKS} times: begin again with another --out and a lower --blr (now "
                f"{self.settings.blr:g}), or with --precision float32; {self.folder.skipped} names the images"
            )
        self._restore()
        self.state.setbacks = setbacks
        self.reporter.say(
            f"  no numbers any more at step {done:,}: going back to step {self.state.step:,}, with ×"
            f"{self.state.factor:g} the learning rate from there on ({setbacks} of at most {_MOST_SETBACKS} times)"
        )
        self._save()  # else a run that is killed now would forget it

    def _row(self, pace: Pace) -> dict[str, Any]:
        """A row of ``metrics.csv``: means since the last one."""
        state = self.state
        means = state.means()
        if "loss" in means:
            self.reporter.flash(self._line(state.step, means["loss"], pace))
        row = {"step": state.step, "epoch": round(state.step / self.per_epoch, 4)}
        row |= {"images": state.step * self.global_batch} | means
        if self.settings.precision == "float16":
            row["loss_scale"] = state.scale
        return row | {"lr": self._rate(state.step), "seconds": state.seconds}

    def _line(self, done: int, loss: float | None, pace: Pace) -> str:
        return line(done / self.per_epoch, self.settings.epochs, loss, self.told, pace.describe(done))

    def _look(self, row: dict[str, Any], pace: Pace) -> None:
        """Take the held-out measures and print the line that stays."""
        start, done = time.perf_counter(), row["step"]
        with gathered_weights(self.task):
            self.measure, columns = self.watch.look(self.fabric.device, self.stepper.autocast)
        self.told = measured(self.measure)
        if done == 0:
            raw = self.watch.raw_pixel_knn()
            if raw is not None:
                untrained = self.watch.untrained_knn(self.fabric.device, columns["knn"])
                columns |= {"knn:untrained": untrained, "knn:raw pixels": raw}
        self.state.rows.append(metrics_row(row | columns))
        pace.aside += time.perf_counter() - start
        if done:
            self.reporter.say(self._line(done, row.get("loss"), pace))
            if self.measure.collapsed():
                self.reporter.say(f"  warning: {COLLAPSED}")

    def _save(self) -> None:
        """Write a checkpoint, and what is read beside it.

        Raises:
            _Diverged: the weights are no numbers, so what is on the disc stays.
        """
        spoilt = not finite(self.task.parameters())
        if total(torch.tensor([spoilt], dtype=torch.float32, device=self.fabric.device)).item():
            raise _Diverged
        tensors = tensors_of(self.task, self.stepper.optimizer.optimizer)
        about = self.state.plain()
        names = collected(sorted(self.unreadable))
        self.unreadable.clear()
        if not self.fabric.is_global_zero:
            return
        self.folder.note_unreadable(names)  # first: what the checkpoint has behind it is not met again
        self.folder.checkpoints.save(tensors, about)
        self._write_metrics()

    def _write_metrics(self) -> None:
        if self.fabric.is_global_zero:
            self.folder.check_lock()
            write_metrics(self.folder.metrics, self.state.rows)
