"""``pretrain``: from a folder of images to an encoder, pictures and a verdict.

`pretrain` sets a run up, and `train` is its loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from torch.distributed.fsdp import FSDPModule

from patchloom.data.augment import RandomCrop
from patchloom.data.cache import cache_images
from patchloom.data.loader import Batch, Prefetcher, steps_of, steps_per_epoch, training_batches
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import is_object, is_object_name
from patchloom.data.sources.open import open_data
from patchloom.data.workers import living_workers
from patchloom.display import Displayable, StatusMessage, Verbatim, duration, is_first, print_line
from patchloom.errors import AlreadyReported, PatchloomError, check_type, conforms
from patchloom.loggers.queue import TrackerSet, send_pending
from patchloom.loggers.trackers import check_installed, parse_trackers
from patchloom.look.windows import draw_windows
from patchloom.nets.build import outline
from patchloom.nets.checkpoints.format import EncoderCard, save_encoder
from patchloom.nets.performance import missing_kernels
from patchloom.options.declare import named_arguments
from patchloom.options.verbs import Pretrain
from patchloom.questions.question import Measure
from patchloom.results.verdict import read_health
from patchloom.runs.checkpoint import SaveTimer, all_finite, as_best, restore, tensors_of, whole_weights
from patchloom.runs.encoder import encoder_weights, load_start
from patchloom.runs.folder import RunFolder, read_metrics, usual_folder
from patchloom.runs.settings import ResolvedSettings, request, why_task
from patchloom.runs.task import augment_of_readers, load_task, prepare_task, run_card
from patchloom.runs.training_set import digest_of_record
from patchloom.schedules import cosine_rate, halving_rate, warmup_again
from patchloom.system.device import Cores, cores, float32_products, is_available, keep_freed_memory
from patchloom.system.distributed import (
    Shared,
    any_process,
    collected,
    cores_here,
    first_decides,
    launch,
    missing_devices,
    raise_together,
    rank,
    refused_by_all,
    smallest,
    stopped_by_all,
    total,
    without_collectives,
    world,
)
from patchloom.system.signals import Stop
from patchloom.tasks import AUTO, check_step_size
from patchloom.tasks.task import Task
from patchloom.train.checkpointing import TrainState
from patchloom.train.clock import is_due, plan_anew, points_passed
from patchloom.train.estimate import Forecast, explain_errors, meta_task, rounded
from patchloom.train.init import Start
from patchloom.train.metrics import MetricsLog, Reporter, measure_forms
from patchloom.train.plan import Plan, Planner, announce, check_same
from patchloom.train.resolve import default_device as best_device
from patchloom.train.resolve import share_of_batch
from patchloom.train.step import Forward, Pending, Stepper, Update, autocast
from patchloom.train.validation import Validation

# Batches of a run, with the same number of images in every process.


def batches_of(
    source: Source,
    augment: RandomCrop,
    settings: ResolvedSettings,
    each: int,
    first: int,
    steps: int,
    device: torch.device,
) -> Prefetcher:
    """Return the prefetched batches of this process on ``device``, from step ``first`` to the end.

    The images of a batch depend on the seed and the step only, not on the number of processes, unless some cannot be
    read: each process replaces its own.
    """
    even = partial(equalize_batches, settings=settings, each=each)
    shape = settings.workers, settings.channels
    batches = training_batches(
        source, augment, each, settings.seed, first, steps, *shape, rank(), world(), device, even
    )
    assert isinstance(batches, Prefetcher)  # because a device is given
    return batches


def equalize_batches(batches: Iterator[Batch], settings: ResolvedSettings, each: int) -> Iterator[Batch]:
    """Cut each batch to the smallest number of images that any process could read.

    Gradients are then averaged with equal weights, and operations across images (negatives, batch norm, shared draws)
    have equal shapes.
    """
    while True:
        try:
            batch = next(batches, None)
        except PatchloomError as problem:
            smallest(-problem.exit_code)  # tells the other processes, which would wait otherwise
            raise
        if batch is None:
            return
        fewest = smallest(len(batch.indices))
        if fewest <= 0:
            raise AlreadyReported("another process cannot read its images", -fewest or PatchloomError.exit_code)
        if fewest < each:
            check_step_size(settings.task, settings.batch_size, fewest * world())
        yield batch.first(fewest)


# The result of `patchloom.pretrain`.


@dataclass(frozen=True, repr=False)
class Run(Displayable):
    """A finished run.

    Attributes:
        folder: folder of the run.
        summary: closing sentence.
        planned: settings, reasons and forecast of a dry run; else None.
    """

    folder: Path
    summary: str
    planned: Mapping[str, Any] | None = None

    def parts(self, width: int) -> list[str]:
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
            "step": folder.checkpoints.progress()[0],
            "summary": self.summary,
            "planned": self.planned,
            "settings": None if dry else folder.read_config().plain(),
            "verdict": None if health is None else health.plain(),
            "metrics": {name: float(values[-1]) for name, values in found.items() if len(values)},
            "encoder": None if dry else str(folder.encoder),
        }

    def __fspath__(self) -> str:
        """Return the folder: every verb accepts a run in its place."""
        return str(self.folder)


# Checkpoints: writing, resuming, and going back to the last one.


_MAX_SETBACKS = 3  # number of times a run goes back


def finite_weights(stepper: Stepper) -> bool:
    """Return whether all weights are finite, in all processes. Every process must call this."""
    spoilt = not all_finite(stepper.task.parameters())
    return not total(torch.tensor([spoilt], dtype=torch.float32, device=stepper.fabric.device)).item()


def save_checkpoint(folder: RunFolder, stepper: Stepper, state: TrainState, unreadable: set[str]) -> bool:
    """Write a checkpoint and the files beside it, unless weights are not finite; return whether they are finite.

    Every process must call this; the first one writes, of a GPU while training goes on, see `Checkpoints.save`.
    """
    if not finite_weights(stepper):
        return False
    folder.checkpoints.wait()  # there is room for one copy
    tensors = tensors_of(stepper.task, stepper.optimizer.optimizer, wanted=stepper.fabric.is_global_zero)
    names = collected(sorted(unreadable))
    unreadable.clear()
    if stepper.fabric.is_global_zero:
        folder.note_unreadable(names)  # first: a resumed run does not read these images again
        folder.checkpoints.save(tensors | as_best(state.best.weights), state.plain())
        folder.write_metrics(state.rows)
    return True


def kept_epoch(todo: range, per_epoch: int, every: int | None) -> int:
    """Return the epoch that an update of the steps ``todo`` (from 0) completes if its encoder is kept; 0 if not."""
    if every is None:
        return 0
    each = every * per_epoch
    return todo.stop // each * every if todo.stop // each > todo.start // each else 0


def keep_encoder(folder: RunFolder, stepper: Stepper, card: EncoderCard, epoch: int) -> bool:
    """Write the encoder after an ``epoch`` unless weights are not finite; return whether they are finite.

    The file has the format of the final encoder. Every process must call this; the first one writes.
    """
    if not finite_weights(stepper):
        return False
    weights = whole_weights(stepper.task)  # gathered from all processes
    if stepper.fabric.is_global_zero:
        folder.check_lock()
        vit = outline(card.own_spec)  # without random draws
        vit.load_state_dict(encoder_weights(weights), assign=True)
        name = f"{card.name} (epoch {epoch:,} of {stepper.settings.epochs:g})"
        note = f"This is the encoder after epoch {epoch:,} of the run {card.name} (--keep_every)."
        about = replace(card, name=name, note=note, trained_on=digest_of_record(folder.trained_on))
        save_encoder(vit, about, folder.kept_encoder(epoch))
    return True


def restored_state(folder: RunFolder, stepper: Stepper, reporter: Reporter) -> TrainState | None:
    """Restore the newest intact checkpoint; return None if there is none. Every process must call this."""
    found, problem = None, None
    try:
        folder.checkpoints.wait()
    except PatchloomError as error:  # the other processes must not wait for this one
        problem = error
    raise_together(problem)  # also so that none reads what the first one is still writing
    try:
        found = folder.checkpoints.read() if folder.checkpoints.there() else None
    except PatchloomError as error:
        problem = error
    raise_together(problem)
    step = -1 if found is None else found[1].get("step", 0)
    if any_process(step != smallest(step)):
        raise refused_by_all(
            f"not all processes read the same checkpoint in {folder.path}: give all machines the same folder, and wait "
            "until they see its files"
        )
    if found is None:
        return None
    tensors, about, problems = found
    restore(tensors, stepper.task, stepper.optimizer.optimizer)
    for damage in problems:
        reporter.say(f"  {damage}: using the one before it")
    state = TrainState.of(about, tensors)
    stepper.begin(state.scale, state.steady)
    if state.pieces and folder.last_end() is None:  # planned by the clock; the configuration has rounded epochs
        stepper.steps = state.steps
    state.train_on(stepper.steps)
    stepper.began, stepper.piece = state.began, state.piece
    return state


def go_back(
    folder: RunFolder, stepper: Stepper, state: TrainState, unreadable: set[str], reporter: Reporter
) -> TrainState:
    """Go back to the last checkpoint and halve the learning rate from there on."""
    done, setbacks, settings = state.step, state.setbacks + 1, stepper.settings
    if setbacks > _MAX_SETBACKS:
        raise PatchloomError(
            f"loss or weights are no longer finite after {done} steps, although the learning rate was halved "
            f"{_MAX_SETBACKS} times: begin again with another --out and a lower --blr (now "
            f"{settings.blr:g}), or with --precision float32; {folder.skipped} lists the images"
        )
    earlier = restored_state(folder, stepper, reporter) or TrainState()  # never None: a run begins with a checkpoint
    earlier.setbacks = setbacks
    reporter.say(
        f"  loss or weights are not finite at step {done:,}: going back to step {earlier.step:,}, with ×"
        f"{earlier.factor:g} the learning rate from there on ({setbacks} of at most {_MAX_SETBACKS} times)"
    )
    save_checkpoint(folder, stepper, earlier, unreadable)  # stores the halved rate, in case the run is killed now
    return earlier


def note_skipped(
    folder: RunFolder,
    state: TrainState,
    source: Source,
    forwards: Sequence[Forward],
    update: Update,
    reporter: Reporter,
) -> None:
    """Log a skipped update with the names of its images. Every process must call this."""
    names = collected([source.describe(index) for one in forwards for index in one.indices.tolist()])
    why = f"loss {', '.join(f'{row[0]:g}' for row in update.values)}, gradient norm {update.norm:g}"
    if not reporter.loud:
        return
    folder.note_skipped("\t".join([f"step {state.step}", why, *names]))
    reporter.say(f"  skipped step {state.step:,}: {why}; {folder.skipped} lists its {len(names)} images")


_SAVE_EVERY = 60.0  # seconds between checkpoints, and up to ten times as long if they are slow to write
_SAVE_FIRST = 5.0  # seconds to the first one of a start; each of the next ones takes twice as long
_MAX_IN_A_ROW = 5  # consecutive skipped updates before the run goes back to a checkpoint
_STOPPING = "stopping after this update, with a checkpoint; Ctrl-C once more stops at once, without one"


@named_arguments(Pretrain)
def pretrain(given: dict[str, Any]) -> Run:
    """Pre-train an encoder on unlabelled images.

    An existing run in ``out`` is resumed. Every setting of a run is an argument; ``model`` and ``task`` may be dicts of
    a ``name`` and options.

    Returns:
        The run; for a dry run, its future folder and its forecast.

    Raises:
        PatchloomError: the input cannot be used; the message says what to do.
    """
    # ---- the request, and whether such a run is finished already
    data, task = given.pop("data"), given.pop("task", AUTO)
    out, dry_run = given.pop("out", None), given.pop("dry_run", False)
    check_type("out", out, str | Path | None)
    check_type("dry_run", dry_run, bool)
    asked = request(data, task, given)
    check_installed(trackers := parse_trackers(asked.log))
    folder = RunFolder(out or usual_folder(asked.data, asked.task["name"], asked.recipe))
    opened = open_data(data if is_object(data) else asked.data, group=asked.group)
    planner = Planner(asked, opened, folder, why_task(data, task, asked.recipe, opened.train.noun))
    if (summary := folder.read_summary()) is not None and not planner.longer():
        planner.resumes()
        if is_object_name(asked.data):  # other objects of the same length have the same name
            check_same(folder, opened.train)
        if is_first():
            print_line(f"{folder.path} is finished. {summary}")
        if not dry_run:
            planner.note_place()
            send_pending(trackers, folder)
        return Run(folder.path, summary)

    # ---- the processes, and the plan, new or resumed, which the first process makes for all
    keep_freed_memory()
    kind = asked.device
    if folder.config.exists():
        kind = folder.read_config().device
        if not is_available(kind) and not dry_run:
            raise PatchloomError(
                f"{folder.path} was begun on {kind}, and there is no such device here: resume it where there is one, "
                "or begin another run from its weights with --from and another --out"
            )
    if dry_run and (missing := missing_devices(kind, asked.devices)):
        return plan_elsewhere(planner, missing)
    fabric = launch(best_device()[0] if kind == "auto" else kind, asked.devices, asked.strategy)
    planner.here = cores_here()
    plan = first_decides(planner.plan)
    if not fabric.is_global_zero and opened.train.fingerprint() != plan.fingerprint:
        raise PatchloomError(
            f"process {rank()} finds other images in {opened.train.name} than the first process: give all machines the "
            "same images"
        )
    opened = opened.heard_as(plan.stats.sound)
    training, held_out = plan.held_out.parts(opened.train)
    tf32 = plan.settings.precision == "tf32"
    with explain_errors(plan.settings), float32_products(tf32), ExitStack() as ending:
        # ---- the task with its initial weights
        if plan.settings.device == "cpu":
            torch.set_num_threads(plan.settings.threads)
        forecast = first_decides(lambda: planner.forecast(plan, timed=dry_run))
        torch.manual_seed(plan.settings.seed)
        names = ("adapt", "train_blocks", "normalization")
        resolved = {name: getattr(plan.settings, name) for name in names}
        start = None if plan.resumed else Start(replace(asked, **resolved))
        begin = None if start is None else start.encoder
        with StatusMessage("initialising the weights"):
            pretext = prepare_task(plan.settings, plan.stats, begin)
        if start is not None:
            start.load_task_weights(pretext)
            plan = plan.with_chosen(pretext)
            # only the task knows the size of its crops
            first_decides(lambda: plan.settings.check_cache(pretext.augment.size))

        # ---- print the plan
        reporter = Reporter(folder, fabric.is_global_zero)
        lines = announce(plan, asked, opened, pretext, start.sentences if start else [], folder, forecast)
        for line in lines:
            reporter.show(line)
        if dry_run:
            return planned_run(plan, forecast, folder, reporter)

        # ---- the cache of images, then the folder: there may be no room for a cache
        source = training
        if plan.settings.cache != "none":  # one for all images, so that runs with another split can use it
            cached = cache_images(opened.train, plan.settings.cache, auto=asked.cache == "auto")
            ending.callback(cached.close)
            source = plan.held_out.parts(cached)[0]
        if not plan.resumed:
            first_decides(lambda: planner.store(plan))
            if start is not None:
                first_decides(partial(start.write, folder, run_card(plan.settings, plan.stats, folder)))
        else:
            first_decides(lambda: planner.go_on(plan, pretext.views))
        card = run_card(plan.settings, plan.stats, folder)  # with the licence of the start
        for line in lines:
            reporter.note(line)
        if fabric.is_global_zero and not plan.resumed:
            draw_windows(opened.train, folder.pictures / "windows.png")

        # ---- the training
        begun = partial(load_start, folder.path)
        validation = Validation(pretext, card, held_out, training, plan.settings, plan.held_out.doubt, begun)
        tracks = ending.enter_context(TrackerSet(trackers if fabric.is_global_zero else (), folder, reporter.say))
        minutes = folder.read_requested().get("minutes")
        seconds = 60 * float(minutes) if minutes is not None and conforms(minutes, float) else None
        with living_workers():
            ended, measure, state = train(
                fabric, pretext, source, plan.settings, folder, reporter, validation, tracks, seconds
            )

        # ---- the final evaluation
        if not ended:
            tracks.close("aborted")
            run = {"folder": str(folder.path), "finished": False, "step": state.step, "steps": state.steps}
            raise stopped_by_all("stopped, and a checkpoint was written: run the same command to resume", run)
        if not fabric.is_global_zero:
            return Run(folder.path, "")
        if state.pieces:  # the length that the clock gave
            plan = plan._replace(settings=replace(plan.settings, epochs=folder.read_config().epochs))
        if isinstance(pretext, FSDPModule):  # this process has only its shard; the last checkpoint has all weights
            validation.task = load_task(folder.path).task.to(fabric.device)
        elif state.best.chosen:
            restore(state.best.weights, pretext)
        from patchloom.train.final_evaluation import FinalEvaluation  # with its protocols: training begins without

        about = validation, card, folder, reporter, opened, training, plan.held_out, plan.settings
        final = FinalEvaluation(*about, tracks)
        precision = partial(autocast, fabric.device.type, plan.settings.precision)
        with without_collectives(), float32_products():  # only this process has more to do
            return Run(folder.path, final.run(measure, state, fabric.device, precision))


def planned_run(plan: Plan, forecast: Forecast, folder: RunFolder, reporter: Reporter) -> Run:
    """Return the result of a dry run, whose plan is printed."""
    reporter.show("This was a dry run: nothing was trained, and the folder was not created.")
    planned: dict[str, Any] = {"settings": plan.settings.plain(), "reasons": dict(plan.reasons)}
    return Run(folder.path, "; ".join(forecast.sentences()), planned | {"forecast": forecast.plain()})


def plan_elsewhere(planner: Planner, missing: str) -> Run:
    """Plan a run on devices that this machine lacks, as on the login node of a cluster: nothing is timed.

    ``missing`` names them, as the start of a sentence.
    """
    asked, data, folder = planner.asked, planner.data, planner.folder
    planner.here, planner.elsewhere = Cores(cores(), 1 if asked.devices == "auto" else asked.devices), True
    plan = planner.plan()
    forecast = planner.forecast(plan, timed=False)
    task = meta_task(plan.settings)
    plan = plan.with_chosen(task)
    plan.settings.check_cache(task.augment.size)
    unknown = [f"{missing}, so this plan is for another machine:", "  its time is unknown, and its memory not checked"]
    if not plan.resumed:
        unknown.append("  precision, compile, workers and threads may resolve to others there")
    reporter = Reporter(folder)
    for line in announce(plan, asked, data, task, unknown, folder, forecast):
        reporter.show(line)
    return planned_run(plan, forecast, folder, reporter)


def train(
    fabric: Fabric,
    task: Task,
    source: Source,
    settings: ResolvedSettings,
    folder: RunFolder,
    reporter: Reporter,
    validation: Validation,
    tracks: TrackerSet,
    seconds: float | None = None,
) -> tuple[bool, Measure | None, TrainState]:
    """Train to the last step, to early stopping (``--patience``), or to an interrupt, which saves a checkpoint.

    One loop for every task, device, precision and number of processes. Batch, random draws and learning rate of a step
    are functions of the seed and the step. So a resumed run equals one that was never interrupted, and batches of
    readable images and draws do not depend on the number of processes. A training of so many ``seconds``
    (``--minutes``) is planned anew on its way, see `patchloom.train.clock`.

    Returns:
        Whether training ended (not interrupted), the last measure of this start, and the training state.
    """
    # ---- derived from the settings
    each = share_of_batch(settings.batch_size, len(source), world())  # images per step in this process
    images_per_step = each * world()
    steps = steps_of(settings.epochs, len(source), settings.batch_size)
    first_warmup = round(settings.warmup_epochs * steps_per_epoch(len(source), settings.batch_size))
    peak = settings.blr * images_per_step * settings.accumulate / 256

    # ---- the state: that of the newest intact checkpoint, or a new one
    stepper = Stepper(fabric, task, settings, steps)
    state = restored_state(folder, stepper, reporter)
    per_epoch = steps_per_epoch(len(source), settings.batch_size)
    first_steps = state.pieces[0][2] if state is not None and state.pieces else steps
    rises = min(1.0, first_warmup / first_steps)  # fraction of the training that is warm-up

    def follow(planned: int) -> ResolvedSettings:
        """Return the settings of another number of steps, and store its epochs; the clock of ``--minutes`` plans it."""
        epochs = rounded(planned / per_epoch)
        followed = replace(settings, epochs=epochs, warmup_epochs=min(settings.warmup_epochs, epochs))
        stepper.settings = followed
        if fabric.is_global_zero:
            why = f"{duration(seconds or 0)} of training by the clock (--minutes)"
            if followed.warmup_epochs < settings.warmup_epochs:  # else the configuration could not be read
                folder.rewrite("warmup_epochs", followed.warmup_epochs, why=why)
            folder.rewrite("epochs", followed.epochs, followed.epochs * task.views, why)
        return followed

    if stepper.steps != steps:
        steps, settings = stepper.steps, follow(stepper.steps)
    about = validation, stepper, settings, len(source), images_per_step, tracks, stepper.began
    journal = MetricsLog(reporter, *about)
    unreadable: set[str] = set()
    if state is not None:
        known = f" The last measure: {measure_forms(state.measured)[0]}." if state.measured else ""
        verb = "Training longer" if state.began == state.step > 0 else "Resuming"
        reporter.say(f"{verb} after step {state.step:,} of {steps:,}.{known}")
        if reason := missing_kernels(settings.kernels):
            reporter.say(f"  {reason}: using torch's kernels, so the last digits differ")
        if fabric.is_global_zero:
            folder.write_metrics(state.rows)  # the run may have been killed before it wrote them
        tracks.start(settings, [] if journal.lacks_baselines(state) else state.rows)
    else:
        if not finite_weights(stepper):  # first: their features cannot be measured
            reason = "the initial weights are not finite: choose others"
            raise PatchloomError(reason) if fabric.is_global_zero else AlreadyReported(reason)
        state = TrainState(steps=steps)
        stepper.begin(state.scale, state.steady)
        if seconds is not None:
            state.pieces = [[0, 0.0, steps]]
            stepper.piece = state.piece
        tracks.start(settings, [])
        journal.before_the_first_step(state)
        save_checkpoint(folder, stepper, state, unreadable)

    if state.began == state.step > 0:  # so that going back returns to the new schedule
        save_checkpoint(folder, stepper, state, unreadable)
    folder.checkpoints.wait()  # copies on a GPU, whose steps have not shown yet what memory they need
    began, warmup = state.began, warmup_again(state.began, steps, first_warmup)

    generator = Shared(fabric.device)
    smallest, timer = each, SaveTimer(_SAVE_FIRST, _SAVE_EVERY, 10 * _SAVE_EVERY)
    task.train()
    signals = Stop(_STOPPING if fabric.is_global_zero else "")
    with signals as stop, folder.checkpoints.finished(), ExitStack() as reading:
        journal.start(state)
        batches: Prefetcher | None = None
        # updates on the device that are not in ``state`` yet: with their steps, forward passes and learning rate
        queue = deque[tuple[Pending, range, list[Forward], float]]()
        begun = state.step  # the steps with theirs
        while not state.is_finished(steps, settings):
            if batches is None:  # closed by `reading`: workers would live until garbage collection otherwise
                augment = augment_of_readers(task, settings)
                batches = batches_of(source, augment, settings, each, begun, steps, fabric.device)
                reading.enter_context(closing(batches))

            # ---- the steps of an update: gradients are accumulated, without checkpoints in between
            todo = range(begun, min(begun + settings.accumulate, steps))
            forwards = []
            for step in todo:
                with journal.pace.waits():
                    batch = next(batches)
                unreadable.update(batch.unreadable)
                if slow := source.problem():
                    reporter.say(f"  {slow}")
                if len(batch.indices) < smallest:
                    smallest = len(batch.indices)
                    reporter.say(f"  step {step + 1:,} has {smallest * world():,} images: the others cannot be read")
                forwards.append(stepper.forward(batch, step, todo, generator))
                with journal.pace.waits():  # while a GPU is still busy with the step
                    batches.send()

            # ---- the update, if it is finite; the processes agree on whether to stop and to save
            due = fabric.is_global_zero and timer.due
            if settings.halve_every:
                rate = halving_rate(todo[-1], first_warmup, peak, settings.halve_every * settings.accumulate)
            else:
                rate = cosine_rate(todo[-1] - began, steps - began, warmup, peak, settings.least_rate)
            if (piece := state.piece) is not None and not settings.halve_every:
                rises_for = first_warmup if not piece.step else round(rises * steps)
                rate = piece.rate(todo[-1], rises_for, peak, settings.least_rate)
            rate *= state.factor
            late = False
            if fabric.is_global_zero and seconds and piece is not None:
                late = is_due(state.passed, journal.seconds() / seconds, piece.at(todo.stop))
            made = stepper.update(todo.stop, rate, forwards, (stop.asked, due, late))
            queue.append((made, todo, forwards, rate))
            begun = todo.stop

            # ---- the results: on a GPU of the update before, while this one keeps it busy; of all updates, before
            # anything else is done with the weights
            asked, diverged = [False] * 3, False
            kept = kept_epoch(todo, per_epoch, settings.keep_every)
            settled = begun == steps or bool(kept) or journal.needs_weights(todo)
            while queue and not diverged and (settled or len(queue) > stepper.ahead):
                made, steps_of_it, forwards, rate = queue.popleft()
                update = made.read()
                asked = [now or before for now, before in zip(update.answers, asked, strict=True)]
                settled = settled or any(asked)
                state.step = steps_of_it.stop
                if not state.count(update):
                    note_skipped(folder, state, source, forwards, update, reporter)
                diverged = state.in_a_row == _MAX_IN_A_ROW
                journal.after_update(state, steps_of_it.start + 1, rate, sound=not diverged)
            if kept and not diverged:  # before any checkpoint of these weights: a resumed run does not come back here
                diverged = not keep_encoder(folder, stepper, validation.card, kept)
            stopping, due, late = asked
            late = late and not state.in_a_row  # a plan is saved, and skipped updates are not
            if late and piece is not None and seconds:
                clock = journal.clock(state, seconds)
                anew = first_decides(partial(plan_anew, piece, state.step, *clock, settings.accumulate))
                late = anew != piece
                state.passed = points_passed(clock.over, anew.at(state.step))
                if late:
                    tell = reporter.say if abs(anew.steps - steps) > steps / 10 else reporter.note  # small changes: log
                    tell(
                        f"  planned anew by the clock, {clock.over:.0%} of {duration(seconds)} being over: "
                        f"{anew.steps:,} steps instead of {steps:,}, at {clock.pace:.2g} s per step"
                    )
                    steps, settings = anew.steps, follow(anew.steps)
                    state.pieces.append([*anew])
                    state.steps = stepper.steps = steps
                    stepper.piece = anew
                    journal.plan(settings, steps)
                    journal.pace.total = steps
                    reading.close()  # its batches end with the former plan
                    batches = None
            ended = state.is_finished(steps, settings)
            state.best.choose(ended)
            if ended and state.step < steps:
                count = f"{state.best.failed} evaluation{'s' * (state.best.failed != 1)}"
                reporter.say(f"  stopped early: no improvement in {count} (--patience)")

            # ---- a checkpoint; not between skipped updates, since it could not be gone back to
            if not diverged and (stopping or ended or late or (due and not state.in_a_row)):
                before = time.perf_counter()
                diverged = not save_checkpoint(folder, stepper, state, unreadable)
                timer.saved(time.perf_counter() - before)
            folder.checkpoints.wait(only_if_done=not (stopping or ended))
            if diverged:
                reading.close()
                batches = None
                queue.clear()
                state = go_back(folder, stepper, state, unreadable, reporter)
                begun = state.step
                if stepper.steps != steps:
                    steps, settings = stepper.steps, follow(stepper.steps)
                    journal.plan(settings, steps)
                tracks.rewind(state.step)
                journal.start(state)
                smallest = each
                timer.restart()
            elif stopping or ended:
                fabric.barrier()  # a launcher may end all processes once one has ended
                if stopping:
                    return False, journal.measure, state
        # interrupted while the end was being saved: only the first process has more to do
        return not (stop.asked and fabric.is_global_zero), journal.measure, state
