"""Pace of work over its last minute, and the time that is left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

_FEWEST = 4  # updates that a pace is measured over, if they take longer than the window
_WARM_UP = 4  # first updates, which are slower: threads, memory and kernels are set up
_ENOUGH = 10  # updates after which an earlier pace does not count any more
_EARLY = 1 / 6  # the same as a fraction of the window
_KEPT = 240  # updates that are stored in a window, about
_RARE, _GAP = 20, 1 / 4  # a gap is so many times as long as other updates, and longer than this fraction of the window


class _Mark(NamedTuple):
    time: float
    waited: float
    updates: int
    done: float


class Pace:
    """Pace of the last minute, and the time left, from the times of updates.

    The slow first updates do not count. Neither does a single gap that is much longer than other updates: the program
    was suspended. Time spent on other things, such as validations, is left out by `resume`.

    Args:
        total: amount of work, such as a number of steps.
        done: amount that is done before.
        before: seconds per unit by an earlier start or a forecast, used for the first updates; 0 if unknown.
        window: seconds over which the pace is measured.
        clock: function that returns seconds.
    """

    def __init__(
        self,
        total: float,
        done: float = 0,
        before: float = 0.0,
        window: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total, self.before, self.window, self.clock = total, before, window, clock
        self._begun = self._last = clock()
        self._excluded = self._waited = 0.0
        self._marks = deque([_Mark(0.0, 0.0, 0, done)])
        self._left_out = 0
        self._after_gap = False

    @property
    def done(self) -> float:
        """Amount of work that is done."""
        return self._marks[-1].done

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Count the time in this block as waiting for data."""
        start = self.clock()
        try:
            yield
        finally:
            self._waited += self.clock() - start

    def resume(self) -> None:
        """Leave out the time since the last update."""
        now = self.clock()
        self._excluded, self._last = self._excluded + now - self._last, now

    def advance(self, by: float = 1) -> None:
        """Record an update after which ``by`` more units are done."""
        self.update(self.done + by)

    def update(self, done: float) -> None:
        """Record an update after which ``done`` units are done."""
        now, marks = self.clock(), self._marks
        first, last = marks[0], marks[-1]
        updates = last.updates - first.updates
        usual = (last.time - first.time) / updates if updates else 0.0
        took = now - self._last
        gap = updates >= _FEWEST and took > max(_RARE * usual, _GAP * self.window)
        if gap and not self._after_gap:
            self._excluded += took - usual
        self._after_gap, self._last = gap, now
        new = _Mark(now - self._begun - self._excluded, self._waited, last.updates + 1, done)
        if new.updates > _ENOUGH and len(marks) > _FEWEST and last.time - marks[-2].time < self.window / _KEPT:
            marks[-1] = new  # replaces the last one, so that there are not too many
        else:
            marks.append(new)
        while self._left_out < min(_WARM_UP, new.updates // 2):
            marks.popleft()
            self._left_out += 1
        while len(marks) > 1 + _FEWEST and new.time - marks[1].time > self.window:
            marks.popleft()

    @property
    def settled(self) -> bool:
        """Whether there were enough updates for a pace that stands for the rest."""
        last = self._marks[-1]
        return last.updates >= _ENOUGH or last.time >= _EARLY * self.window

    @property
    def warm(self) -> bool:
        """Whether the first updates are left out, which may take much longer than the others."""
        return self._left_out >= _WARM_UP

    def each(self) -> float:
        """Return the seconds per unit; 0 if unknown."""
        first, last = self._marks[0], self._marks[-1]
        if self.before and not self.settled:
            return self.before
        return (last.time - first.time) / (last.done - first.done) if last.done > first.done else self.before

    def left(self) -> float | None:
        """Return the seconds for the rest; None if unknown."""
        each = self.each()
        return each * max(0.0, self.total - self.done) if each else None

    def waiting(self) -> float:
        """Return the fraction of the time that was spent waiting for data."""
        first, last = self._marks[0], self._marks[-1]
        return (last.waited - first.waited) / max(1e-9, last.time - first.time)
