"""What a run tells while it trains: rows of ``metrics.csv``, lines of progress, and the measures in both."""

from __future__ import annotations

import time

from patchloom.data import steps_of, steps_per_epoch
from patchloom.launch import gathered_weights
from patchloom.questions.measure import Measure
from patchloom.runs.folder import metrics_row
from patchloom.runs.health import UNKNOWN, read_health, write_health
from patchloom.runs.settings import Settings
from patchloom.sound import noun_of
from patchloom.track.tracks import Tracks
from patchloom.train.drawing import draw_run, drawn_after
from patchloom.train.health import health_of
from patchloom.train.lines import Line
from patchloom.train.progress import Pace, Reporter, about, in_words, line, measured_after, points
from patchloom.train.signs import Signs, classes_in
from patchloom.train.state import TrainState
from patchloom.train.step import Stepper
from patchloom.train.validation import Validation
from patchloom.waiting import duration

_LOGGED = 200  # rows of metrics.csv in a run


class Journal:
    """Keeps the rows of a run, and tells where it is.

    Args:
        reporter: prints.
        validation: the held-out measures.
        stepper: has the task, and the device on which it is.
        settings: resolved.
        images: that are trained on.
        images_per_step: of all processes.
        tracks: the trackers to which rows and pictures are sent.
        began: step at which the present schedule began; measures are spread over what comes after it.

    Attributes:
        steps: of the whole training.
        measure: the last one of this start; None before the first.
        pace: of this start, once `start` was called.
    """

    pace: Pace

    def __init__(
        self,
        reporter: Reporter,
        validation: Validation,
        stepper: Stepper,
        settings: Settings,
        images: int,
        images_per_step: int,
        tracks: Tracks,
        began: int = 0,
    ):
        self.reporter, self.validation, self.stepper, self.settings = reporter, validation, stepper, settings
        self.tracks = tracks
        self.per_epoch, self.images_per_step = steps_per_epoch(images, settings.batch_size), images_per_step
        self.steps = steps_of(settings.epochs, images, settings.batch_size)
        logged = points(self.steps - began, 1 / _LOGGED)
        validated = measured_after(self.steps - began, logged - {0}, images_per_step)
        # compiled blocks would be compiled again for the batches of pictures
        drawn = drawn_after(self.steps - began, validated, images_per_step, validation.task)
        self.logged, self.validated, drawn = ({began + one for one in some} for some in (logged, validated, drawn))
        self.drawn = set[int]() if settings.compile else drawn
        self.measure: Measure | None = None

    def before_the_first_step(self, state: TrainState) -> None:
        """Measure what needs no training, begin the rows with it, and draw what the task is."""
        columns = self._measured(state, first=True)
        state.rows.append(metrics_row({"step": 0, "epoch": 0.0, "images": 0} | columns))
        self.tracks.row(state.rows[-1])
        self.reporter.say(f"before the first step: {state.measured[0]}")
        self._judged(state)
        self._drawn(state)

    def start(self, state: TrainState) -> None:
        """Begin to count time, where training is now; again after it went back."""
        self.pace = Pace(
            self.steps, state.step, self.images_per_step, state.seconds, state.pace, noun_of(self.validation.task.sound)
        )
        self.reporter.progress(lambda: self._line(state, ""))

    def after_update(self, state: TrainState, first: int, rate: float, sound: bool) -> None:
        """Tell of an update; at times also a row, and the held-out measures. Every process must call it.

        Args:
            state: after the update, which is counted in it.
            first: the step (from 1) with which it began.
            rate: its learning rate.
            sound: whether training goes on from there; else no row is kept.
        """
        self.pace.update(state.step)
        state.seconds, state.pace = self.pace.seconds(), self.pace.seconds_a_step()
        passed = {*range(first, state.step + 1)}
        if not sound or not passed & (self.logged | self.validated):
            self.reporter.progress(lambda: self._line(state, _losses(state.mean_loss())))
            return
        means = state.means()
        row = {"step": state.step, "epoch": round(state.step / self.per_epoch, 4)}
        row |= {"images": state.step * self.images_per_step} | means
        if self.settings.precision == "float16":
            row["loss_scale"] = state.scale
        row |= {"lr": rate, "seconds": state.seconds}
        losses = _losses(means.get("loss"))
        self.reporter.progress(lambda: self._line(state, losses))
        measured = bool(passed & self.validated)
        if measured:
            with self.pace.paused():
                row |= self._measured(state)
            self.reporter.say(self._line(state, losses))
        state.rows.append(metrics_row(row))
        self.tracks.row(state.rows[-1])
        if measured:
            with self.pace.paused():
                self._judged(state)
                self._drawn(state)

    def _judged(self, state: TrainState) -> None:
        """Keep a verdict on the run so far, and say it, once there is something to say."""
        if self.measure is None or not self.reporter.loud:
            return
        classes = classes_in(state.rows, self.validation.labelled)
        done, measure, rows = state.step, self.measure, state.rows
        signs = Signs(measure, rows, self.settings, done, self.steps, state.setbacks, classes, results=state.results)
        health = health_of(signs).heard(self.validation.task.sound)
        folder = self.reporter.folder
        before = read_health(folder.path)
        folder.write_metrics(state.rows)  # not only with the next checkpoint: a report shows both
        write_health(folder.path, health)
        if state.step == self.steps or (not state.step and health.verdict != UNKNOWN):
            return  # the final evaluation says it; and before the first step there is nothing to say
        if before is not None and before.verdict == health.verdict:
            self.reporter.say(f"  still {health.verdict}")
        else:
            self.reporter.say(f"  so far {health}")

    def _drawn(self, state: TrainState) -> None:
        """Draw pictures, if they are due after this step. Every process must call it."""
        if state.step not in self.drawn or self.measure is None:
            return
        began, reporter = time.perf_counter(), self.reporter
        with gathered_weights(self.validation.task):
            if reporter.loud:
                reporter.flash("drawing pictures")
                place = state.step, self.steps
                device = self.stepper.fabric.device
                files = draw_run(self.validation, reporter.folder, self.settings, self.measure, place, device)
                self.tracks.pictures(files, state.step)
        if state.step == min(self.drawn):
            reporter.say(f"first pictures: {reporter.folder.pictures}; they are drawn again on the way, and at the end")
        state.measuring += time.perf_counter() - began

    def _measured(self, state: TrainState, first: bool = False) -> dict[str, float]:
        """Columns of a measure that is taken now; what it says is kept for the line of progress, after a stop, too."""
        began = time.perf_counter()
        self.reporter.flash(f"measuring on {len(self.validation.held_out):,} images")
        self.measure, columns = self.validation.run(self.stepper.fabric.device, self.stepper.autocast, first=first)
        state.measured = in_words(self.measure)
        state.results[str(state.step)] = each_result(self.measure)
        if self.settings.patience is not None:
            state.best.compare(state.step, self.measure, self.stepper.task)
        if not first:  # that one has more to do than the others
            state.measuring = time.perf_counter() - began
        return columns

    def _line(self, state: TrainState, losses: str) -> Line:
        left = self.pace.left()
        if state.step == self.steps:
            time_left = [f"trained in {duration(state.seconds)}"] * 2
        elif left is None:
            time_left = ["time left not known yet", "time left: ?"]
        else:
            measures = len([one for one in self.validated if one > state.step])
            left += measures * state.measuring
            time_left = [f"{duration(left)} left", f"{about(left)} left"]
        epoch, measured = state.step / self.per_epoch, state.measured
        return line(epoch, self.settings.epochs, losses, measured, time_left, self.pace.describe())


def _losses(mean: float | None) -> str:
    return "no update was made" if mean is None else f"loss {mean:.4f}"


def each_result(measure: Measure) -> list[float]:
    """Return the result of a measure on each held-out image, rounded to six digits, as a checkpoint keeps it."""
    return [float(f"{value:.6g}") for value in measure.values.tolist()]
