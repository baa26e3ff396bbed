"""Length of a training of so many minutes (``--minutes``), planned anew at fixed points of its time.

The number of steps that fit is guessed from a few steps before the run. On a machine with other work that guess may be
far off: 3 steps of 83 s were planned where a step takes 1 s. So the plan is mended from the pace of the training. The
progress, which drives every schedule, is set to the fraction of the time that is over, and runs to 1 in the steps that
still fit. Only a run that asks for minutes depends on a timing, and each new plan is logged and stored.
"""

from __future__ import annotations

from typing import NamedTuple

from patchloom.schedules import cosine_rate

_POINTS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 15 / 16, 31 / 32)  # fractions of the time or the progress
_NEAR = 0.03  # relative change of the number of steps below which the plan stays


class Piece(NamedTuple):
    """Part of a schedule: after ``step`` steps it has reached ``progress`` in [0, 1], and it ends after ``steps``."""

    step: int
    progress: float
    steps: int

    def at(self, step: int) -> float:
        """Return the progress after ``step`` steps, in [0, 1]."""
        return self.progress + (1 - self.progress) * (step - self.step) / max(1, self.steps - self.step)

    def rate(self, step: int, warmup: int, peak: float, least: float = 0.0) -> float:
        """Return the learning rate of ``step``: after ``warmup`` steps, a cosine of the progress to ``least``."""
        done: float = step if not self.step else self.at(step) * self.steps
        return cosine_rate(done, self.steps, warmup, peak, least)


class Clock(NamedTuple):
    """Time of a training: fraction that is over, seconds left for steps, and recent seconds per step (0: unknown)."""

    over: float
    left: float
    pace: float


def is_due(passed: int, time: float, progress: float) -> bool:
    """Return whether to plan anew: the next of the points is reached, by the ``time`` or by the ``progress``.

    Both are fractions in [0, 1]; the time goes above 1 if the training takes longer.
    """
    if progress >= 1:  # the last step of the plan
        return time < 1 - _NEAR
    return time >= 1 or (passed < len(_POINTS) and max(time, progress) >= _POINTS[passed])


def points_passed(time: float, progress: float) -> int:
    return sum(max(time, progress) >= point for point in _POINTS)


def plan_anew(now: Piece, step: int, time: float, left: float, pace: float, least: int) -> Piece:
    """Return the rest of the schedule after ``step`` steps, or ``now`` if that fits as it is.

    Args:
        now: present piece.
        step: number of steps done.
        time: fraction of the time that is over.
        left: seconds that are left for steps.
        pace: seconds of a step; 0 if unknown.
        least: steps of an update, which are made in any case so that the training ends with a measure.
    """
    if pace <= 0 or (step >= now.steps and (left <= 0 or time >= 1 - _NEAR)):
        return now
    steps = step + max(least, round(left / pace))
    if step < now.steps and abs(steps - now.steps) <= _NEAR * now.steps:
        return now
    return Piece(step, min(time, 1.0), steps)
