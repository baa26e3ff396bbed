"""``pretrain``: from a folder of images to an encoder, pictures, and a sentence on what was learnt.

A training run, from top to bottom: `pretrain` sets it up, `train` is its loop, and what follows is what both call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from torch.distributed.fsdp import FSDPModule

from patchloom.arguments import validate_arguments
from patchloom.data.augment import RandomCrop
from patchloom.data.cache import cache_images
from patchloom.data.loader import Batch, Prefetcher, steps_of, steps_per_epoch, training_batches
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike, is_object, is_object_name
from patchloom.data.sources.open import open_data
from patchloom.display import Displayable, StatusMessage, Verbatim
from patchloom.errors import AlreadyReported, PatchloomError, Stopped
from patchloom.loggers.queue import TrackerSet, send_pending
from patchloom.loggers.trackers import check_installed, parse_trackers
from patchloom.look.charts import read_metrics
from patchloom.nets.performance import compile_blocks, missing_kernels
from patchloom.questions.question import Measure
from patchloom.runs.checkpoint import SaveTimer, all_finite, as_best, restore, tensors_of
from patchloom.runs.folder import RunFolder, usual_folder
from patchloom.runs.settings import ResolvedSettings, TaskLike, request, why_task
from patchloom.runs.task import load_task, prepare_task, run_card
from patchloom.runs.verdict import read_health
from patchloom.schedules import cosine_rate, halving_rate, warmup_again
from patchloom.system.distributed import (
    Shared,
    collected,
    cores_here,
    first_decides,
    launch,
    rank,
    smallest,
    total,
    world,
)
from patchloom.system.hardware import Cores, cores, keep_freed_memory
from patchloom.system.signals import Stop
from patchloom.tasks import AUTO, check_step_size
from patchloom.tasks.task import Task
from patchloom.train.checkpointing import TrainState
from patchloom.train.estimate import explain_errors
from patchloom.train.final_evaluation import FinalEvaluation
from patchloom.train.init import Start
from patchloom.train.metrics import MetricsLog, Reporter, measure_forms
from patchloom.train.plan import Planner, announce, check_same
from patchloom.train.resolve import default_device as best_device
from patchloom.train.resolve import share_of_batch
from patchloom.train.step import Forward, Stepper, Update, autocast
from patchloom.train.validation import Validation

# The batches of a run: of as many images in every process, and of enough for the task.


def batches_of(
    source: Source,
    augment: RandomCrop,
    settings: ResolvedSettings,
    each: int,
    first: int,
    steps: int,
    device: torch.device,
) -> Prefetcher:
    """This process's batches from step ``first`` to the end, on their way to ``device``.

    What is in a batch follows from the seed and the number of its step alone, and does not depend on how many processes
    share it.
    """
    even = partial(equalize_batches, settings=settings, each=each)
    shape = settings.workers, settings.channels
    batches = training_batches(
        source, augment, each, settings.seed, first, steps, *shape, rank(), world(), device, even
    )
    assert isinstance(batches, Prefetcher)  # as they are for a device
    return batches


def equalize_batches(batches: Iterator[Batch], settings: ResolvedSettings, each: int) -> Iterator[Batch]:
    """``batches`` of a process, in every one cut to as many images as the one has that could read fewest.

    So gradients are averaged with equal weights, and what joins images (negatives, batch norm, shared draws) fits
    together.
    """
    while True:
        try:
            batch = next(batches, None)
        except PatchloomError:
            smallest(0)  # the others learn of it: they would wait for this process
            raise
        if batch is None:
            return
        fewest = smallest(len(batch.indices))
        if not fewest:
            raise AlreadyReported("another process cannot read its images")
        if fewest < each:
            check_step_size(settings.task, settings.batch_size, fewest * world())
        yield batch.first(fewest)


# A finished run, as `patchloom.pretrain` returns it.


@dataclass(frozen=True, repr=False)
class Run(Displayable):
    """A finished run.

    Attributes:
        folder: where everything is.
        summary: the closing sentence.
        planned: of a dry run its settings, the reasons of what was left open, and what it would take; else None.
    """

    folder: Path
    summary: str
    planned: Mapping[str, Any] | None = None

    def parts(self, width: int) -> list[str]:
        """See `Displayable`."""
        return [Verbatim(f"Run {self.folder}"), self.summary]

    def plain(self) -> dict[str, Any]:
        """See `Displayable`; ``metrics`` has the last value of each column of metrics.csv."""
        folder, dry = RunFolder(self.folder), self.planned is not None
        health = None if dry else read_health(folder.path)
        columns = {} if dry else read_metrics(folder.metrics)
        found = {name: values[np.isfinite(values)] for name, values in columns.items()}
        return {
            "folder": str(folder.path),
            "finished": not dry,
            "summary": self.summary,
            "planned": self.planned,
            "settings": None if dry else folder.read_config().plain(),
            "verdict": None if health is None else health.plain(),
            "metrics": {name: float(values[-1]) for name, values in found.items() if len(values)},
            "encoder": None if dry else str(folder.encoder),
        }

    def __fspath__(self) -> str:
        """So that every verb takes the run for its folder."""
        return str(self.folder)


# What a run goes on from: the checkpoints it writes, the newest sound one, and the one to which it goes back.


_MAX_SETBACKS = 3  # how often a run goes back


def save_checkpoint(folder: RunFolder, stepper: Stepper, state: TrainState, unreadable: set[str]) -> bool:
    """Write a checkpoint, and what is read beside it. Every process must call it, and the first one writes."""
    spoilt = not all_finite(stepper.task.parameters())
    if total(torch.tensor([spoilt], dtype=torch.float32, device=stepper.fabric.device)).item():
        return False
    tensors = tensors_of(stepper.task, stepper.optimizer.optimizer)
    names = collected(sorted(unreadable))
    unreadable.clear()
    if stepper.fabric.is_global_zero:
        folder.note_unreadable(names)  # first: what the checkpoint has behind it is not met again
        folder.checkpoints.save(tensors | as_best(state.best.weights), state.plain())
        folder.write_metrics(state.rows)
    return True


def restored_state(folder: RunFolder, stepper: Stepper, reporter: Reporter) -> TrainState | None:
    """Go to the newest sound checkpoint; None if there is no checkpoint."""
    if not folder.checkpoints.there():
        return None
    tensors, about, problems = folder.checkpoints.read()
    restore(tensors, stepper.task, stepper.optimizer.optimizer)
    stepper.remember_statistics()
    for problem in problems:
        reporter.say(f"  {problem}: the one before it is used")
    state = TrainState.of(about, tensors)
    state.train_on(stepper.steps, folder.last_end() is not None)
    stepper.began = state.began
    return state


def go_back(
    folder: RunFolder, stepper: Stepper, state: TrainState, unreadable: set[str], reporter: Reporter
) -> TrainState:
    """Go to the last checkpoint, with half the learning rate from there on."""
    done, setbacks, settings = state.step, state.setbacks + 1, stepper.settings
    if setbacks > _MAX_SETBACKS:
        raise PatchloomError(
            f"loss or weights are no longer finite after {done} steps, though the learning rate was halved "
            f"{_MAX_SETBACKS} times: begin again with another --out and a lower --blr (now "
            f"{settings.blr:g}), or with --precision float32; {folder.skipped} names the images"
        )
    earlier = restored_state(folder, stepper, reporter) or TrainState()  # there is one: a run begins with a checkpoint
    earlier.setbacks = setbacks
    reporter.say(
        f"  not finite any more at step {done:,}: going back to step {earlier.step:,}, with ×"
        f"{earlier.factor:g} the learning rate from there on ({setbacks} of at most {_MAX_SETBACKS} times)"
    )
    save_checkpoint(folder, stepper, earlier, unreadable)  # else a run that is killed now would forget it
    return earlier


def note_skipped(
    folder: RunFolder,
    state: TrainState,
    source: Source,
    forwards: Sequence[Forward],
    update: Update,
    reporter: Reporter,
) -> None:
    """Note that an update was not made, with the names of its images. Every process must call it."""
    names = collected([source.describe(index) for one in forwards for index in one.indices.tolist()])
    why = f"loss {', '.join(f'{row[0]:g}' for row in update.values)}, norm of the gradient {update.norm:g}"
    if not reporter.loud:
        return
    folder.note_skipped("\t".join([f"step {state.step}", why, *names]))
    reporter.say(f"  step {state.step:,} was skipped: {why}; {folder.skipped} names its {len(names)} images")


_SAVE_EVERY = 60.0  # seconds between checkpoints
_SAVE_FIRST = 5.0  # seconds of a start to its first one; each of the next comes after twice as many
_MAX_IN_A_ROW = 5  # updates that are not finite before the run goes back to a checkpoint
_STOPPING = "stopping after this update, with a checkpoint; Ctrl-C once more stops at once, without one"


@validate_arguments
def pretrain(
    data: DataLike,
    task: TaskLike = AUTO,
    *,
    out: str | Path | None = None,
    dry_run: bool = False,
    **settings: Any,
) -> Run:
    """Pre-train an encoder on images without labels.

    Args:
        data: a folder of images, a list or table of them, a pattern, shards, or the name of a data set, as
            `patchloom.data.sources.open.open_data` takes it; a list of several; or an object, such as a list of arrays
            or PIL images, an array, or a Dataset.
        task: name of a pretext task, ``FILE.py:CLASS``, or a class; or a dict of one of these as ``name``, and options.
        out: folder of the run; ``runs/DATA-TASK`` or ``runs/DATA-RECIPE`` if absent. A run that is there is resumed.
        dry_run: print the plan, what it takes of time, memory and disc among it, and end there: nothing is written but
            what is kept of this machine and of the images for the next time.
        settings: the fields of `patchloom.runs.settings.Settings`, such as ``epochs=100``; ``model`` may be a name,
            or a dict of ``name`` and sizes.

    Returns:
        The run; of a dry one the folder that it would have, and what it would take.

    Raises:
        PatchloomError: something cannot be used; the sentence says what to do.
    """
    # ---- what is asked for, and whether it is done already
    asked = request(data, task, settings)
    check_installed(trackers := parse_trackers(asked.log))
    folder = RunFolder(out or usual_folder(asked.data, asked.task["name"], asked.recipe))
    opened = open_data(data if is_object(data) else asked.data, group=asked.group)
    finished = Planner(asked, opened, folder, Cores(cores(), 1))
    if (summary := folder.read_summary()) is not None and not finished.longer():
        finished.resumes()
        if is_object_name(asked.data):  # others of the same number are called the same
            check_same(folder, opened.train)
        print(f"{folder.path} is finished. {summary}")
        if not dry_run:
            finished.note_place()
            send_pending(trackers, folder)
        return Run(folder.path, summary)

    # ---- the processes that train together, and the plan that the first of them makes for all: new, or resumed
    keep_freed_memory()
    kind = folder.read_config().device if folder.config.exists() else asked.device
    fabric = launch(best_device()[0] if kind == "auto" else kind, asked.devices, asked.strategy)
    planner = Planner(asked, opened, folder, cores_here(), why_task(data, task, asked.recipe, opened.train.noun))
    plan = first_decides(planner.plan)
    if not fabric.is_global_zero and opened.train.fingerprint() != plan.fingerprint:
        raise PatchloomError(
            f"process {rank()} finds other images in {opened.train.name} than the first: give all machines the same"
        )
    opened = opened.heard_as(plan.stats.sound)
    training, held_out = plan.held_out.parts(opened.train)
    with explain_errors(plan.settings), ExitStack() as ending:
        # ---- the task, with the weights with which it begins
        if plan.settings.device == "cpu":
            torch.set_num_threads(plan.settings.threads)
        forecast = first_decides(lambda: planner.forecast(plan))
        torch.manual_seed(plan.settings.seed)
        start = None if plan.resumed else Start(asked)
        begin = None if start is None else start.encoder
        with StatusMessage("making the first weights"):
            pretext = prepare_task(plan.settings, plan.stats, begin)
        if start is not None:
            start.rest(pretext)
            plan = plan.with_chosen(pretext)
            # the task alone knows how large its crops are
            first_decides(lambda: plan.settings.check_cache(pretext.augment.size))

        # ---- the plan is said
        reporter = Reporter(folder, fabric.is_global_zero)
        lines = announce(plan, asked, opened, pretext, start.sentences if start else [], folder, forecast)
        for line in lines:
            reporter.show(line)
        if dry_run:
            reporter.show("This was a dry run: nothing is trained, and there is no such folder yet.")
            planned: dict[str, Any] = {"settings": plan.settings.plain(), "reasons": dict(plan.reasons)}
            planned["forecast"] = None if forecast is None else forecast.plain()
            return Run(folder.path, "; ".join(forecast.sentences()) if forecast else "", planned)

        # ---- the images as the steps read them, then the folder: there may be no room for a cache
        source = training
        if plan.settings.cache != "none":  # held-out images are in it, too, so that other seeds find the same there
            say = partial(print, flush=True) if fabric.is_global_zero else lambda line: None
            cached = cache_images(opened.train, plan.settings.cache, plan.settings.workers, say)
            source = plan.held_out.parts(cached)[0]
        if not plan.resumed:
            first_decides(lambda: planner.store(plan))
        else:
            first_decides(lambda: planner.go_on(plan, pretext.views))
        for line in lines:
            reporter.note(line)

        # ---- the training
        card = run_card(plan.settings, plan.stats, folder.name)
        validation = Validation(pretext, card, held_out, training, plan.settings, plan.held_out.doubt)
        tracks = ending.enter_context(TrackerSet(trackers if fabric.is_global_zero else (), folder, reporter.say))
        ended, measure, state = train(fabric, pretext, source, plan.settings, folder, reporter, validation, tracks)

        # ---- what was learnt
        if not fabric.is_global_zero:
            if not ended:
                raise AlreadyReported("stopped")
            return Run(folder.path, "")
        compile_blocks(pretext, enabled=False)  # the final evaluation has other shapes, each of them once
        if not ended:
            raise Stopped("stopped, and a checkpoint was written: the same command goes on from there")
        if isinstance(pretext, FSDPModule):  # of which this process has a part; the last checkpoint has the whole
            validation.task = load_task(folder.path).task.to(fabric.device)
        elif state.best.chosen:
            restore(state.best.weights, pretext)
        about = validation, card, folder, reporter, opened, training, plan.held_out, plan.settings
        final = FinalEvaluation(*about, tracks)
        precision = partial(autocast, fabric.device.type, plan.settings.precision)
        return Run(folder.path, final.run(measure, state, fabric.device, precision))


def train(
    fabric: Fabric,
    task: Task,
    source: Source,
    settings: ResolvedSettings,
    folder: RunFolder,
    reporter: Reporter,
    validation: Validation,
    tracks: TrackerSet,
) -> tuple[bool, Measure | None, TrainState]:
    """Train to the end, or until somebody stops it (see `Stop`), which writes a checkpoint.

    With ``--patience``, the end comes when so many measures were not better than the best one.

    One loop for every task, device, precision, and number of processes. Time is an argument everywhere: what a step
    sees (batch, draws, learning rate) follows from its number and the seed, so that going on after a stop is the same
    as never having stopped; and neither batches nor draws depend on how many processes share them.
    """
    # ---- what follows from the settings
    each = share_of_batch(settings.batch_size, len(source), world())  # images a step of this process
    images_per_step = each * world()
    steps = steps_of(settings.epochs, len(source), settings.batch_size)
    first_warmup = round(settings.warmup_epochs * steps_per_epoch(len(source), settings.batch_size))
    peak = settings.blr * images_per_step * settings.accumulate / 256

    # ---- where the run is: at its newest sound checkpoint, or before its first step
    stepper = Stepper(fabric, task, settings, steps)
    state = restored_state(folder, stepper, reporter)
    about = validation, stepper, settings, len(source), images_per_step, tracks, stepper.began
    journal = MetricsLog(reporter, *about)
    unreadable: set[str] = set()
    if state is not None:
        known = f" The last measure: {measure_forms(state.measured)[0]}." if state.measured else ""
        verb = "Training on" if state.began == state.step > 0 else "Resuming"
        reporter.say(f"{verb} after step {state.step:,} of {steps:,}.{known}")
        if reason := missing_kernels(settings.kernels):
            reporter.say(f"  {reason}: torch's go on, and last digits differ")
        if fabric.is_global_zero:
            folder.write_metrics(state.rows)  # the run may have been killed between its checkpoint and this
        tracks.start(settings, state.rows)
    else:
        state = TrainState(steps=steps)
        tracks.start(settings, [])
        journal.before_the_first_step(state)
        if not save_checkpoint(folder, stepper, state, unreadable):
            reason = "the weights with which the run would begin are not finite: begin with others"
            raise PatchloomError(reason) if fabric.is_global_zero else AlreadyReported(reason)

    if state.began == state.step > 0:  # what goes back to a checkpoint goes back to this schedule
        save_checkpoint(folder, stepper, state, unreadable)
    began, warmup = state.began, warmup_again(state.began, steps, first_warmup)

    generator = Shared(fabric.device)
    smallest, timer = each, SaveTimer(_SAVE_FIRST, _SAVE_EVERY, _SAVE_EVERY)
    task.train()
    with Stop(_STOPPING if fabric.is_global_zero else "") as stop, ExitStack() as reading:
        journal.start(state)
        batches: Prefetcher | None = None
        while not state.ended(steps, settings):
            if (
                batches is None
            ):  # closed with `reading_rate`: else processes that read would live until memory is tidied
                batches = batches_of(source, task.augment, settings, each, state.step, steps, fabric.device)
                reading.enter_context(closing(batches))

            # ---- the steps of an update: their gradients are added up, and no checkpoint is written between them
            todo = range(state.step, min(state.step + settings.accumulate, steps))
            scale, forwards = state.loss_scale(settings.precision), []
            for step in todo:
                with journal.pace.waits():
                    batch = next(batches)
                unreadable.update(batch.unreadable)
                if len(batch.indices) < smallest:
                    smallest = len(batch.indices)
                    reporter.say(f"  step {step + 1:,} has {smallest * world():,} images: no more can be read")
                forwards.append(stepper.forward(batch, step, step == todo[-1], generator, scale))
                with journal.pace.waits():  # while a GPU still works at the step
                    batches.send()

            # ---- the update, unless it is not finite; the processes agree on whether to stop and to save
            due = fabric.is_global_zero and timer.due
            if settings.halve_every:
                rate = halving_rate(todo[-1], first_warmup, peak, settings.halve_every * settings.accumulate)
            else:
                rate = cosine_rate(todo[-1] - began, steps - began, warmup, peak)
            rate *= state.factor
            made = stepper.update(todo.stop, rate, forwards, (stop.asked, due), scale)
            stopping, due = made.answers
            state.step = todo.stop
            if not state.count(made, settings.precision):
                note_skipped(folder, state, source, forwards, made, reporter)
            diverged = state.in_a_row == _MAX_IN_A_ROW
            journal.after_update(state, todo.start + 1, rate, sound=not diverged)
            ended = state.ended(steps, settings)
            state.best.choose(ended)
            if ended and state.step < steps:
                reporter.say("  no measure was better for as long as --patience says, so that this is the end")

            # ---- a checkpoint; amid updates that fail it is too late to save what to go back to
            if not diverged and (stopping or ended or (due and not state.in_a_row)):
                before = time.perf_counter()
                diverged = not save_checkpoint(folder, stepper, state, unreadable)
                timer.saved(time.perf_counter() - before)
            if diverged:
                reading.close()
                batches = None
                state = go_back(folder, stepper, state, unreadable, reporter)
                tracks.rewind(state.step)
                journal.start(state)
                smallest = each
                timer.restart()
            elif stopping or ended:
                fabric.barrier()  # whoever started these processes may end all of them when one has ended
                if stopping:
                    return False, journal.measure, state
        # asked while the end was being saved: the first process alone has more to do
        return not (stop.asked and fabric.is_global_zero), journal.measure, state
