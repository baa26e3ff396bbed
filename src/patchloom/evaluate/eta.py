"""How long it will still take: of passes over images, and of the steps of trainings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from patchloom.display import StatusMessage, duration

T = TypeVar("T")


class TimeLeft:
    """The time left in all steps of something.

    Args:
        steps: how many there are.
        seconds: of a step, as far as it was measured before.
    """

    def __init__(self, steps: int, seconds: float = 0.0):
        self.steps, self.seconds, self.done = steps, seconds, 0
        self.begin()

    def begin(self) -> None:
        """From now on time is taken, until the next beginning."""
        self._timed, self._begun = 0, time.perf_counter()

    def step(self) -> None:
        """One more was made."""
        self.done, self._timed = self.done + 1, self._timed + 1
        self.seconds = (time.perf_counter() - self._begun) / self._timed

    def skip(self, steps: int) -> None:
        """So many need not be made."""
        self.done += steps

    def __str__(self) -> str:
        return f"{duration(self.seconds * max(0, self.steps - self.done))} left"


class Counted(StatusMessage):
    """What is being done, with the time left."""

    def line(self) -> str:
        """The time left first, since a narrow terminal cuts the end."""
        if not self.done:
            return f"{self.what} ..."
        left = (time.monotonic() - self.begun) / self.done * max(0, self.total - self.done)
        return f"{duration(left)} left · {self.what}: {self.done / self.total:.0%}"


def track_progress(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The same items; with a line, if they take a while and ``what`` is not empty."""
    if not what:
        yield from items
        return
    with Counted(what, total) as waiting:
        for item in items:
            yield item
            waiting.advance()


def progress_message(what: str) -> AbstractContextManager[object]:
    """While entered, what is being done is said if it takes a while; nothing is said without ``what``."""
    return StatusMessage(what) if what else nullcontext()
