"""What a run prints, and how long it will take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console

from patchloom.files import append
from patchloom.questions.measure import Measure
from patchloom.runs.folder import RunFolder
from patchloom.stopping import nobody_reads
from patchloom.train.lines import Line, Part, wrapped
from patchloom.waiting import duration

_REFRESHED = 0.2  # seconds between two states of the line on a terminal
# seconds to the first line of progress where there is no terminal, then between two: a 20th of what has passed
_FIRST, _LEAST, _MOST = 10.0, 30.0, 300.0
_WARM_UP = 4  # updates of a start that may be slower: threads, memory and kernels are got ready in them
_ENOUGH = 10  # updates of a start that give a pace
_WINDOW = 60.0  # seconds over which the pace is taken
_SPACING = 0.25  # seconds between two notes of it
_EARLY = 20_000  # images before the first measure, half a minute to a minute on a CPU


class Reporter:
    """Prints to the terminal and to the run's ``log.txt``. Silent where ``loud`` is false (other processes).

    Args:
        folder: of the run.
        loud: whether it prints.
        clock: seconds.
    """

    def __init__(self, folder: RunFolder, loud: bool = True, clock: Callable[[], float] = time.monotonic):
        self.folder, self.loud, self.clock = folder, loud, clock
        # a notebook is no terminal: rich would make an HTML table of each line there
        self.console = Console(highlight=False, soft_wrap=True, force_jupyter=False)
        self._live = False
        self._began: float | None = None
        self._shown, self._first_is_out = 0.0, False

    @property
    def terminal(self) -> bool:
        """Whether a line can be replaced by the next one. (rich says so of a pipe, too, if FORCE_COLOR is set.)"""
        return self.console.file.isatty() and not self.console.is_dumb_terminal

    def say(self, text: str | Line = "") -> None:
        """Print a line that stays, in columns that fit a terminal; the log has the whole of it."""
        self.note(text)
        self.show(text)

    def note(self, text: str | Line) -> None:
        """Write a line to the log alone."""
        if self.loud:
            self.folder.check_lock()
            append(self.folder.log, f"{text}\n")

    def show(self, text: str | Line) -> None:
        """Print a line without writing it to the log."""
        if self.loud:
            self._shown = self.clock()
            self._print(self._fitted(text) if self.terminal else str(text), "\n")

    def flash(self, text: str | Line) -> None:
        """Show a line that the next one replaces; only on a terminal."""
        if self.loud and self.terminal:
            line = text if isinstance(text, Line) else Line((Part((text,)),))
            self._print(line.fit(self.console.width - 1), "")
            self._live = True
            self._shown = self.clock()

    def progress(self, line: Callable[[], Line]) -> None:
        """Where training stands: on a terminal the line is kept up to date, elsewhere it is printed now and then.

        Args:
            line: makes the line, when it is to be shown.
        """
        if not self.loud:
            return
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
            self._print(str(line()), "\n")  # not into the log: when these lines come is no part of what a run is

    def _fitted(self, text: str | Line) -> str:
        return text.fit(self.console.width) if isinstance(text, Line) else wrapped(text, self.console.width)

    def _print(self, text: str, end: str) -> None:
        """Print, or be silent from now on: a terminal that was closed, or a reader that went away, ends no training."""
        try:
            if self._live:
                self.console.file.write("\r\x1b[2K")
                self._live = False
            self.console.print(text, markup=False, end=end)
            self.console.file.flush()  # a pipe or a job's log file shall show lines as they come
        except (OSError, SystemExit):  # the latter is rich's word for the former
            nobody_reads()


class _Mark(NamedTuple):
    busy: float
    waiting: float
    step: int


class Pace:
    """Images a second, the share of time spent waiting for data, and the time left.

    The first updates of a start are slower, and a machine is not always as busy. So the pace is that of the last
    minute, without the first updates; and that of the start before, until there are enough.

    Args:
        steps: of the whole training.
        step: those that are done.
        images_per_step: of all processes.
        seconds: of earlier starts.
        before: seconds a step took there; 0 if that is not known.
        noun: what a step has.
        clock: seconds.
    """

    def __init__(
        self,
        steps: int,
        step: int,
        images_per_step: int,
        seconds: float = 0.0,
        before: float = 0.0,
        noun: str = "images",
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.steps, self.images_per_step, self.noun, self.clock = steps, images_per_step, noun, clock
        self.earlier, self.before = seconds, before
        self.start, self.excluded, self.waiting = clock(), 0.0, 0.0
        self._marks = deque([_Mark(0.0, 0.0, step)])
        self._updates = self._left_out = 0

    @contextmanager
    def waits(self) -> Iterator[None]:
        """While entered, the program waits for data."""
        start = self.clock()
        try:
            yield
        finally:
            self.waiting += self.clock() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While entered, the time does not count: it is for measures."""
        start = self.clock()
        try:
            yield
        finally:
            self.excluded += self.clock() - start

    def update(self, step: int) -> None:
        """Note that an update was made, and that ``step`` steps are done."""
        busy, marks = self.clock() - self.start - self.excluded, self._marks
        self._updates += 1
        if self._updates > _ENOUGH and len(marks) > 2 and marks[-1].busy - marks[-2].busy < _SPACING:
            marks.pop()  # the last note moves on, so that there are not too many
        marks.append(_Mark(busy, self.waiting, step))
        while self._left_out < min(_WARM_UP, self._updates // 2):
            marks.popleft()
            self._left_out += 1
        while len(marks) > 2 and busy - marks[1].busy > _WINDOW:
            marks.popleft()

    def seconds_a_step(self) -> float:
        """Seconds that a step takes, without measures; 0 if that is not known yet."""
        if self._updates < _ENOUGH and self.before:
            return self.before
        first, last = self._marks[0], self._marks[-1]
        return (last.busy - first.busy) / (last.step - first.step) if last.step > first.step else self.before

    def left(self) -> float | None:
        """Seconds that the steps still take; None if that is not known yet."""
        each = self.seconds_a_step()
        return each * (self.steps - self._marks[-1].step) if each else None

    def describe(self) -> tuple[str, str]:
        """Images a second, and the share of the time in which training waited for data."""
        each = self.seconds_a_step()
        if not each:
            return "", ""
        first, last = self._marks[0], self._marks[-1]
        waited = (last.waiting - first.waiting) / max(1e-9, last.busy - first.busy)
        return f"{self.images_per_step / each:,.0f} {self.noun}/s", f"{waited:.0%} waiting for data"

    def seconds(self) -> float:
        """Seconds since the start, those of earlier starts included."""
        return self.earlier + self.clock() - self.start


def about(seconds: float) -> str:
    """A `duration` in its larger unit alone: '42 s', '3 min' or '5 h'."""
    for unit, name in ((3600, "h"), (60, "min")):
        if round(seconds) >= unit:
            return f"{round(seconds / unit)} {name}"
    return duration(seconds)


def in_words(measure: Measure) -> list[str]:
    """A measure's part of the line of progress, the longest form first: with all baselines, with the one, alone.

    Made once, since every number in it is read from the device.
    """
    means, alone = measure.means(), f"{measure.name} {measure.show(measure.value)}"
    baselines = ", ".join(f"{name} {measure.show(value)}" for name, value in means.items())
    spread = "".join(f", {name} {value:.2f}" for name, value in measure.diversity.items())
    to_beat = measure.baseline_to_beat()
    return [f"{alone} ({baselines}){spread}", f"{alone} ({to_beat} {measure.show(means[to_beat])})", alone]


def line(
    epoch: float, epochs: float, losses: str, measured: Sequence[str], time_left: Sequence[str], pace: Sequence[str]
) -> Line:
    """The line of progress.

    Args:
        epoch: that are done.
        epochs: of the training.
        losses: in words; nothing before the first update.
        measured: what `in_words` gave, or nothing.
        time_left: in words, and shorter.
        pace: what `Pace.describe` gave.
    """
    digits = 1 if epochs >= 1 else 3
    return Line((
        Part(time_left, (5,)),
        Part((f"epoch {epoch:.{digits}f}/{epochs:g}", f"{epoch:.{digits}f}/{epochs:g}"), (7,)),
        Part((*(measured or ("",) * 3), ""), (3, 6, 8)),
        Part((losses, ""), (4,)),
        Part((pace[0], ""), (2,)),
        Part((pace[1], ""), (1,)),
    ))  # fmt: skip


def points(steps: int, share: float) -> set[int]:
    """Steps after which something happens that is to happen every ``share`` of the training; the last always is one."""
    wanted = max(1, round(1 / share))
    return {round(steps * i / wanted) for i in range(1, wanted + 1)}


def measured_after(steps: int, logged: Collection[int], images_per_step: int) -> set[int]:
    """Steps after which held-out measures are taken: at every quarter, and before the first one at a few more.

    The first of them comes after a 20th of the training, or after 20,000 images where that is sooner, and the next ones
    after four times as many each, up to an eighth. All are among ``logged``, the steps that have a row in
    ``metrics.csv``. Which they are follows from the settings alone, never from the time: else a run that was stopped
    would not end as one that was not.
    """
    early: set[int] = set()
    step = min(steps / 20, _EARLY / images_per_step)
    while step < steps / 8:
        early.add(min(one for one in logged if one >= max(1, step)))
        step *= 4
    return early | points(steps, 0.25) - {0}
