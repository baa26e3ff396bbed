"""What a run prints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from patchloom.files import append
from patchloom.questions.measure import Measure
from patchloom.runs.folder import RunFolder
from patchloom.stopping import nobody_reads


class Reporter:
    """Prints to the terminal and to the run's ``log.txt``. Silent where ``loud`` is false (other processes)."""

    def __init__(self, folder: RunFolder, loud: bool = True):
        self.folder, self.loud = folder, loud
        self.console = Console(highlight=False, soft_wrap=True)
        self._live = False

    def say(self, text: str = "") -> None:
        """Print a line that stays."""
        self.note(text)
        self.show(text)

    def note(self, text: str) -> None:
        """Write a line to the log alone."""
        if self.loud:
            self.folder.check_lock()
            append(self.folder.log, text + "\n")

    def show(self, text: str) -> None:
        """Print a line without writing it to the log."""
        if self.loud:
            self._print(text, "\n")

    def flash(self, text: str) -> None:
        """Show a line that the next one replaces; only on a terminal."""
        if self.loud and self.console.is_terminal:
            self._print(text[: self.console.width - 1], "")
            self._live = True

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


class Pace:
    """Images a second, the share of time spent waiting for data, and the time left."""

    def __init__(self, steps: int, step: int, images_per_step: int, seconds: float = 0.0):
        self.steps, self.first, self.images_per_step, self.earlier = steps, step, images_per_step, seconds
        self.start, self.excluded, self.waiting = time.perf_counter(), 0.0, 0.0

    @contextmanager
    def waits(self) -> Iterator[None]:
        """While entered, the program waits for data."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waiting += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While entered, the time does not count: it is for measures."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.excluded += time.perf_counter() - start

    def describe(self, step: int) -> str:
        """The pace after ``step`` steps; time that was excluded (measures) does not count."""
        busy = max(1e-9, time.perf_counter() - self.start - self.excluded)
        done = max(1, step - self.first)
        left = busy / done * (self.steps - step)
        rate = done * self.images_per_step / busy
        return f"{rate:,.0f} images/s, {self.waiting / busy:.0%} waiting for data, {duration(left)} left"

    def seconds(self) -> float:
        """Seconds since the start, those of earlier starts included."""
        return self.earlier + time.perf_counter() - self.start


def duration(seconds: float) -> str:
    """'42 s', '3 min 20 s', '5 h 10 min' or '40 days'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole / 86400:,.0f} days"


def in_words(measure: Measure) -> str:
    """A measure's part of the line of progress: made once, since every number in it is read from the device."""
    baselines = ", ".join(f"{name} {measure.show(value)}" for name, value in measure.means().items())
    spread = "".join(f", {name} {value:.2f}" for name, value in measure.diversity.items())
    return f" · {measure.name} {measure.show(measure.value)} ({baselines}){spread}"


def line(epoch: float, epochs: int, loss: float | None, measured: str, pace: str) -> str:
    """The line of progress; ``loss`` is None where no update was made, ``measured`` is `in_words`, or nothing."""
    losses = "no update was made" if loss is None else f"loss {loss:.4f}"
    return f"epoch {epoch:.1f}/{epochs} · {losses}{measured} · {pace}"


def points(steps: int, share: float) -> set[int]:
    """Steps after which something happens that is to happen every ``share`` of the training; the last always is one."""
    wanted = max(1, round(1 / share))
    return {round(steps * i / wanted) for i in range(1, wanted + 1)}
