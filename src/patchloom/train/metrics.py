"""Logging of a run: rows of ``metrics.csv``, progress lines, held-out measures and pictures."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from patchloom.data.loader import steps_per_epoch
from patchloom.display import TIE, duration, tied, time_left, visible
from patchloom.errors import AlreadyReported, PatchloomError
from patchloom.estimate import Estimate
from patchloom.loggers.queue import TrackerSet
from patchloom.look.charts import draw_curves
from patchloom.look.task_pictures import draw_task, title_of
from patchloom.nets.encode import patch_count
from patchloom.pace import Pace
from patchloom.questions.question import Measure
from patchloom.results.result import Result
from patchloom.results.verdict import Health, Verdict, judge, read_health, write_health
from patchloom.runs.checkpoint import restore, whole_weights
from patchloom.runs.folder import RunFolder, metrics_row
from patchloom.runs.settings import ResolvedSettings
from patchloom.system.distributed import gathered_weights, without_collectives
from patchloom.system.files import append
from patchloom.system.load import LoadWatch
from patchloom.system.signals import discard_output
from patchloom.tasks.custom import is_code, label
from patchloom.tasks.task import Task
from patchloom.train.checkpointing import TrainState
from patchloom.train.clock import Clock
from patchloom.train.step import Stepper
from patchloom.train.validation import Validation
from patchloom.train.verdict import VerdictInputs, logged_knn


class Line(NamedTuple):
    """A line of parts that are shortened to fit a width.

    Attributes:
        parts: for each part its forms, the longest first, of which an empty one omits the part; and the priority of
            each form after the first: the lowest number in a line is shortened first.
    """

    parts: tuple[tuple[Sequence[str], Sequence[int]], ...]

    def __str__(self) -> str:
        return self.fit(None)

    def fit(self, width: int | None) -> str:
        """Return the line in at most ``width`` columns: shorten the least important parts first, then cut the rest."""
        forms = [0] * len(self.parts)
        turns = sorted((when, number) for number, (_, gives_way) in enumerate(self.parts) for when in gives_way)
        text = self._with(forms)
        for _, number in turns:
            if width is None or len(text) <= width:
                break
            forms[number] += 1
            text = self._with(forms)
        return text[:width]

    def _with(self, forms: Sequence[int]) -> str:
        return " · ".join(filter(None, (texts[form] for (texts, _), form in zip(self.parts, forms, strict=True))))


def wrap_columns(text: str, width: int) -> str:
    """Wrap a text between words into lines of at most ``width`` columns.

    Continuation lines are indented by two columns, or to the last column of a table. A number and its unit stay
    together, and so does an interval; words longer than a line are not broken.
    """
    if len(text) <= width:
        return text
    columns = [gap.end() for gap in re.finditer(r"(?<=\S) {2,}", text) if gap.end() <= width // 2]
    inside = columns[-1] if columns else len(text) - len(text.lstrip()) + 2
    lines, here = [], ""
    for gap, word in re.findall(r"( *)(\S+)", tied(text)):
        if here.strip() and len(here) + len(gap) + len(word) > width:
            lines.append(here)
            here, gap = "", " " * inside
        here += gap + word
    return "\n".join([*lines, here]).replace(TIE, " ")


# Pictures of a run during training and at its end: task pictures of held-out images, and curves.


# Training operations between two drawings. A drawing takes 0.5 to 0.9 s of a CPU core, and this many operations take at
# least half a minute of one: pictures cost some 2 % of the time. Shorter runs draw them only at the end.
_BETWEEN = 5e12


def drawing_steps(steps: int, measured: Collection[int], images_per_step: int, task: Task) -> set[int]:
    """Return the steps after which pictures are drawn during training: 0, and some of the ``measured`` steps.

    0 stands for the first update, so that training begins before the libraries that draw are loaded. The steps are far
    enough apart to cost little, and none is near the end, when pictures are drawn anyway. They depend on the settings
    only, as the measured steps do.
    """
    each = images_per_step * estimate_flops(task)
    drawn: set[int] = set()
    last = -_BETWEEN  # so that step 0 is among them
    for step in sorted({0, *measured}):
        if (step * each - last) >= _BETWEEN and (steps - step) * each >= _BETWEEN:
            drawn.add(step)
            last = step * each
    return drawn


def estimate_flops(task: Task) -> float:
    """Estimate the operations of training on an image: 2 per weight and patch forward, and 4 backward.

    Frozen blocks of the encoder have no backward pass (``--train_blocks``). Masking and smaller decoder inputs are
    ignored: only the order of magnitude matters.
    """
    trained = sum(one.numel() for one in task.parameters() if one.requires_grad)
    kept = sum(one.numel() for one in task.encoder.parameters() if not one.requires_grad and one.ndim == 2)
    return (6.0 * trained + 2.0 * kept) * patch_count(task.encoder)


def draw_run(
    validation: Validation,
    folder: RunFolder,
    settings: ResolvedSettings,
    measure: Measure,
    place: tuple[int, int],
    device: torch.device,
    curves: bool = True,
) -> list[Path]:
    """Draw task pictures, and ``curves`` once there are some, into a run's folder of pictures; return the files."""
    card, doubt, (done, whole) = validation.card, validation.doubt, place
    folder.check_lock()
    files = []
    if curves:
        noun = card.modality.noun
        shown = f"{noun} that may have been trained on" if doubt else f"held-out {noun}"
        drawn, percent = folder.pictures / "curves.png", measure.result.unit == "%"
        gallery = noun if validation.gallery is None else f"{len(validation.gallery):,} training {noun}"
        files.append(draw_curves(folder.metrics, drawn, measure.name, images=shown, percent=percent, gallery=gallery))
    means = {f"baseline:{one.name}": one.value for one in measure.result.baselines}
    at = settings.epochs * done / whole if curves else 0  # the first pictures have the measure before the first step
    row = {"epoch": at, "held_out": measure.result.value} | means
    title = partial(title_of, folder.name, settings, place, [row], doubt, noun=card.modality.noun)
    return [*files, *draw_task(validation.task, validation.held_out, card, folder.pictures, device, title=title)]


# Printed progress, and the remaining time.


_REFRESHED = 0.2  # seconds between two updates of the line on a terminal
# seconds to the first progress line without a terminal, then bounds of the pause: a 20th of the elapsed time
_FIRST, _LEAST, _MOST = 10.0, 30.0, 300.0
_EARLY = 20_000  # images before the first measure, half a minute to a minute on a CPU


class Reporter:
    """Output to the terminal and to the run's ``log.txt``.

    Args:
        folder: folder of the run.
        loud: whether to print and log; false in all processes but the first.
        clock: function that returns seconds.

    Attributes:
        load: watch of other programs, which is reported with the progress.
    """

    def __init__(self, folder: RunFolder, loud: bool = True, clock: Callable[[], float] = time.monotonic):
        self.folder, self.loud, self.clock = folder, loud, clock
        self.load = LoadWatch(clock=clock)
        self._live = False
        self._began: float | None = None
        self._shown, self._first_is_out = 0.0, False

    @property
    def terminal(self) -> bool:
        """Whether output goes to a terminal on which a line can be replaced."""
        return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")

    def say(self, text: str | Line = "") -> None:
        """Print a line, wrapped to the width of a terminal, and log it."""
        self.note(text)
        self.show(text)

    def note(self, text: str | Line) -> None:
        """Write a line to the log only."""
        if self.loud:
            self.folder.check_lock()
            append(self.folder.log, f"{visible(str(text))}\n")

    def show(self, text: str | Line) -> None:
        """Print a line without writing it to the log."""
        if self.loud:
            self._shown = self.clock()
            shown, width = visible(str(text)), shutil.get_terminal_size().columns
            if self.terminal:
                shown = visible(text.fit(width)) if isinstance(text, Line) else wrap_columns(shown, width)
            self._print(shown, "\n")

    def flash(self, text: str | Line) -> None:
        """Show a line that the next one replaces, only on a terminal."""
        if self.loud and self.terminal:
            line = text if isinstance(text, Line) else Line((((text,), ()),))
            self._print(visible(line.fit(shutil.get_terminal_size().columns - 1)), "")
            self._live = True
            self._shown = self.clock()

    def progress(self, line: Callable[[], Line]) -> None:
        """Show the progress line: updated in place on a terminal, printed at intervals elsewhere."""
        if not self.loud:
            return
        if news := self.load.news():
            self.say(f"  {news}")
        now = self.clock()
        if self._began is None:
            self._began = self._shown = now
        if self.terminal:
            if now - self._shown >= _REFRESHED or not self._live:
                self.flash(line())
            return
        pause = min(_MOST, max(_LEAST, (now - self._began) / 20)) if self._first_is_out else _FIRST
        if now - self._shown >= pause:
            self._shown, self._first_is_out = now, True
            self._print(visible(str(line())), "\n")  # not logged: its timing is not reproducible

    def _print(self, text: str, end: str) -> None:
        """Print, or discard all output from now on: a closed terminal or pipe must not end training."""
        try:
            if self._live:
                sys.stdout.write("\r\x1b[2K")
                self._live = False
            # flushed, so that a pipe or a job's log file shows lines at once
            print(text, end=end, flush=True)
        except OSError:
            discard_output()


def round_duration(seconds: float) -> str:
    """Format a `duration` in its larger unit only: '42 s', '3 min' or '5 h'."""
    for unit, name in ((3600, "h"), (60, "min")):
        if round(seconds) >= unit:
            return f"{round(seconds / unit)} {name}"
    return duration(seconds)


def measure_forms(measure: Result) -> list[str]:
    """Return forms of a measure for the progress line: with all baselines, with the one to beat, and without any."""
    alone, to_beat = f"{measure.measure} {measure.compact()}", measure.to_beat
    baselines = ", ".join(f"{one.name} {measure.compact(one.value)}" for one in measure.baselines)
    spread = "".join(f", {name} {value:.2f}" for name, value in measure.also.items())
    return [f"{alone} ({baselines}){spread}", f"{alone} ({to_beat.name} {measure.compact(to_beat.value)})", alone]


def progress_line(
    epoch: float, epochs: float, losses: str, measured: Sequence[str], time_left: Sequence[str], pace: Sequence[str]
) -> Line:
    digits = 1 if epochs >= 1 else 3
    return Line((
        (time_left, (5,)),
        ((f"epoch {epoch:.{digits}f}/{epochs:g}", f"{epoch:.{digits}f}/{epochs:g}"), (7,)),
        ((*(measured or ("",) * 3), ""), (3, 6, 8)),
        ((losses, ""), (4,)),
        ((pace[0], ""), (2,)),
        ((pace[1], ""), (1,)),
    ))  # fmt: skip


def event_steps(steps: int, share: float) -> set[int]:
    """Return steps evenly spaced by a fraction ``share`` of the training, including the last one."""
    wanted = max(1, round(1 / share))
    return {round(steps * i / wanted) for i in range(1, wanted + 1)}


def measuring_steps(steps: int, logged: Collection[int], images_per_step: int) -> set[int]:
    """Return the steps of held-out measures: every quarter of the training, and a few early ones.

    The first comes after a 20th of the training or after 20,000 images, if that is sooner. Each of the next ones comes
    after four times as many steps, up to an eighth. All are among ``logged``, the steps with a row in ``metrics.csv``.
    They depend on the settings only, never on time, so that a resumed run ends like an uninterrupted one.
    """
    early: set[int] = set()
    step = min(steps / 20, _EARLY / images_per_step)
    while step < steps / 8:
        early.add(min(one for one in logged if one >= max(1, step)))
        step *= 4
    return early | event_steps(steps, 0.25) - {0}


_LOGGED = 200  # rows of metrics.csv per run


class MetricsLog:
    """Metrics, progress, verdicts and pictures of a run during training.

    Args:
        reporter: printer and log.
        validation: held-out measures.
        stepper: task and device.
        settings: resolved settings.
        images: number of training images.
        images_per_step: images per step over all processes.
        tracks: trackers that receive rows and pictures.
        began: first step of the present schedule; measures are spread over the steps after it.

    Attributes:
        steps: number of steps of the whole training.
        measure: last measure of this start; None before the first.
        pace: pace of the steps of this start, once `start` was called.
    """

    pace: Pace

    def __init__(
        self,
        reporter: Reporter,
        validation: Validation,
        stepper: Stepper,
        settings: ResolvedSettings,
        images: int,
        images_per_step: int,
        tracks: TrackerSet,
        began: int = 0,
    ):
        self.reporter, self.validation, self.stepper, self.settings = reporter, validation, stepper, settings
        self.tracks = tracks
        self.per_epoch, self.images_per_step = steps_per_epoch(images, settings.batch_size), images_per_step
        self.measure: Measure | None = None
        self._measured_at = 0  # step of the measure
        self._health: Health | None = None  # the verdict that is stored, once it was read or written here
        self.measures = len(validation.held_out) > 0
        self.plan(settings, stepper.steps, began)

    def plan(self, settings: ResolvedSettings, steps: int, began: int = 0) -> None:
        """Spread rows, measures and pictures over ``steps`` steps; called again where ``--minutes`` plans anew."""
        self.settings, self.steps = settings, steps
        logged = event_steps(self.steps - began, 1 / _LOGGED)
        validated = measuring_steps(self.steps - began, logged - {0}, self.images_per_step)
        drawn = drawing_steps(self.steps - began, validated, self.images_per_step, self.validation.task)
        self.logged, self.validated, drawn = ({began + one for one in some} for some in (logged, validated, drawn))
        self.drawn = drawn if self.measures else set[int]()

    def clock(self, state: TrainState, seconds: float) -> Clock:
        """Return how far a training of so many ``seconds`` is; its measures to come leave less for steps."""
        now = self.seconds()
        return Clock(now / seconds, seconds - now - self._measures_left(state), self.pace.each())

    def seconds(self) -> float:
        """Return the training time in seconds, including earlier starts."""
        return self._earlier + time.monotonic() - self._started

    def _measures_left(self, state: TrainState) -> float:
        return state.measuring * sum(step > state.step for step in self.validated)

    def before_the_first_step(self, state: TrainState) -> None:
        """Measure the task and write the first row, if there are held-out images.

        Raises:
            PatchloomError: the measure is not finite.
        """
        columns = {}
        if self.measures:
            columns = self._measured(state, first=True)
            assert self.measure is not None  # just taken
            if spoilt := int((~self.measure.values.isfinite()).sum()):  # no training can mend it
                task, noun = self.settings.task["name"], self.validation.task.modality.noun
                remedy = "try --precision float32, or other initial weights"
                if is_code(task):
                    remedy = f"look for empty selections and divisions by zero in {label(task)}"
                reason = (
                    f"{self.measure.name} is not finite for {spoilt:,} of {len(self.measure.values):,} held-out {noun} "
                    f"before the first step, because of the task or the data, not of the learning rate: {remedy}"
                )
                raise PatchloomError(reason) if self.reporter.loud else AlreadyReported(reason)
        state.rows.append(metrics_row({"step": 0, "epoch": 0.0, "images": 0} | columns))
        if not self.lacks_baselines(state):  # a tracker takes a row only once
            self.tracks.log_row(state.rows[-1])
        if state.measured is not None:
            self.reporter.say(f"before the first step: {measure_forms(state.measured)[0]}")

    def lacks_baselines(self, state: TrainState) -> bool:
        """Return whether the first row still lacks features and kNN of the untrained encoder, and of raw pixels.

        They take longer than the first update, which does not wait for them: `after_update` adds them after it, and
        before any checkpoint of it.
        """
        return not state.step and self.measures and any("images:apart" not in row for row in state.rows[:1])

    def start(self, state: TrainState) -> None:
        """Start the clock at the present step; call it again after going back."""
        self._initial = whole_weights(self.stepper.task) if self.lacks_baselines(state) else {}
        if self._initial and self._measured_at:  # gone back: the measure is of later weights
            self.measure = None
        self._earlier, self._started = state.seconds, time.monotonic()
        self.pace, self._tells_time = Pace(self.steps, state.step, state.pace), not state.step
        self.reporter.progress(lambda: self._line(state, ""))

    def needs_weights(self, steps: range) -> bool:
        """Return whether weights are measured or drawn after an update of these ``steps`` (from 0)."""
        first = not steps.start and (0 in self.drawn or bool(self._initial))
        return first or not self.validated.isdisjoint(range(steps.start + 1, steps.stop + 1))

    def after_update(self, state: TrainState, first: int, rate: float, sound: bool) -> None:
        """Report an update, with a row and held-out measures if they are due. Every process must call this."""
        self.pace.update(state.step)
        state.seconds, state.pace = self.seconds(), self.pace.each()
        if first == 1:
            began = time.monotonic()
            self._add_baselines(state)
            if 0 in self.drawn:
                self._draw(state)
            self._started += time.monotonic() - began  # as what is measured before the first step, it is no training
            self.pace.resume()
        if self._tells_time and self.pace.warm and self.pace.settled:
            self._tells_time = False
            for line in Estimate(steps=self.steps, step=self.pace.each()).time_sentences():
                self.reporter.say(f"  {line}")
        passed = {*range(first, state.step + 1)}
        if not sound or not passed & (self.logged | self.validated):
            self.reporter.progress(lambda: self._line(state, _losses(state.running_means())))
            return
        means = state.means()
        row = {"step": state.step, "epoch": round(state.step / self.per_epoch, 4)}
        row |= {"images": state.step * self.images_per_step} | means
        if self.settings.precision == "float16":
            row["loss_scale"] = state.scale
        row |= {"lr": rate, "seconds": state.seconds}
        if self.settings.final_weight_decay is not None:
            row["weight_decay"] = self.stepper.weight_decay(state.step - 1)
        losses = _losses(means)
        self.reporter.progress(lambda: self._line(state, losses))
        measured = bool(passed & self.validated)
        if measured:
            if self.measures:
                row |= self._measured(state)
            self.reporter.say(self._line(state, losses))
        state.rows.append(metrics_row(row))
        self.tracks.log_row(state.rows[-1])
        if measured:
            self._judged(state, state.step)
            if state.step in self.drawn:
                self._draw(state)
            self.pace.resume()

    def _add_baselines(self, state: TrainState) -> None:
        """Complete the first row with the weights from before the first update, and judge it."""
        if not self._initial:
            return
        task, rows = self.stepper.task, state.rows
        device, trained = self.stepper.fabric.device, whole_weights(task)
        restore(self._initial, task)
        try:
            if self.measure is None:
                self.measure, _ = self.validation.run(device, self.stepper.autocast, first=True)
            rows[0] |= metrics_row(self.validation.baselines(device))
        finally:
            restore(trained, task)
        self._initial = {}
        self.tracks.log_row(rows[0])
        self._judged(state, 0)

    def _judged(self, state: TrainState, done: int) -> None:
        """Store the verdict after ``done`` steps, and print it."""
        if self.measure is None or not self.reporter.loud:
            return
        modality = self.validation.task.modality
        knn = logged_knn(state.rows, self.validation.labelled, modality)
        so_far = self.measure, state.rows, state.results, self.settings, done, self.steps, state.setbacks, knn
        health = judge(VerdictInputs(*so_far, modality=modality).signs())
        folder = self.reporter.folder
        before, self._health = self._health or read_health(folder.path), health
        folder.write_metrics(state.rows)  # before the next checkpoint, since a report shows both
        write_health(folder.path, health)
        if done == self.steps or (not done and health.verdict != Verdict.UNKNOWN):
            return  # the final evaluation prints it, and before the first step it says nothing new
        if before is not None and before.verdict == health.verdict:
            self.reporter.say(f"  still {health.verdict}")
        else:
            self.reporter.say(f"  so far {health}")

    def _draw(self, state: TrainState) -> None:
        """Draw pictures. Every process must call this."""
        if self.measure is None:
            return
        began, reporter = time.perf_counter(), self.reporter
        with gathered_weights(self.validation.task):
            if reporter.loud:
                reporter.flash("drawing pictures")
                place = state.step, self.steps
                device = self.stepper.fabric.device
                with without_collectives():  # only this process draws
                    about = self.validation, reporter.folder, self.settings, self.measure, place, device
                    files = draw_run(*about, curves=len(state.rows) > 1)
                self.tracks.log_images(files, state.step)
        if len(state.rows) == 1:
            reporter.say(f"first pictures: {reporter.folder.pictures}; redrawn during training and at the end")
        state.measuring += time.perf_counter() - began

    def _measured(self, state: TrainState, first: bool = False) -> dict[str, float]:
        """Take a held-out measure, store its result in ``state``, and return its columns."""
        began = time.perf_counter()
        self.reporter.flash(f"measuring on {len(self.validation.held_out):,} images")
        self.measure, columns = self.validation.run(self.stepper.fabric.device, self.stepper.autocast, first=first)
        state.measured, self._measured_at = self.measure.result, state.step
        state.results[str(state.step)] = [float(f"{value:.6g}") for value in self.measure.values.tolist()]
        if self.settings.patience is not None:
            state.best.compare(state.step, self.measure, self.stepper.task)
        if not first:  # the first one takes longer
            state.measuring = time.perf_counter() - began
        return columns

    def _line(self, state: TrainState, losses: str) -> Line:
        each, left = self.pace.each(), self.pace.left()
        if state.step == self.steps:
            time_forms = [f"trained in {duration(state.seconds)}"] * 2
        elif left is None:
            time_forms = [time_left(None), "time left: ?"]
        else:
            left += self._measures_left(state)
            time_forms = [time_left(left), f"{round_duration(left)} left"]
        rate = f"{self.images_per_step / each:,.0f} {self.validation.task.modality.noun}/s" if each else ""
        waiting = f"{self.pace.waiting():.0%} waiting for data" if each else ""
        epoch, measured = state.step / self.per_epoch, () if state.measured is None else measure_forms(state.measured)
        return progress_line(epoch, self.settings.epochs, losses, measured, time_forms, (rate, waiting))


def _losses(means: Mapping[str, float]) -> str:
    if "loss" not in means:
        return "all updates skipped"
    anchored = f", cosine to the start {means['anchor_cosine']:.3f}" if "anchor_cosine" in means else ""
    return f"loss {means['loss']:.4f}{anchored}"
