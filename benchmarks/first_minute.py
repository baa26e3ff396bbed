"""When a run first says something: seconds of processor time to its plan, its first measures and its first picture.

A busy machine stretches them less than those of the clock. The start of Python is in them.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from patchloom.train import metrics
from patchloom.train.loop import pretrain
from patchloom.train.metrics import Reporter


class Enough(BaseException):
    """The first measure was taken: nothing more is asked."""


def stamp(what: str) -> None:
    """Print how much processor time the process has taken."""
    print(f"{time.process_time():6.1f} s: {what}", flush=True)


def main(data: str, out: str) -> None:
    """Train on ``data`` into ``out`` up to the first measure, and tell when what was there."""
    measured, draw, show = metrics.MetricsLog._measured, metrics.draw_run, Reporter.show

    def timed_measure(self: metrics.MetricsLog, state: Any, first: bool = False) -> dict[str, float]:
        found = measured(self, state, first)
        stamp(f"measured after step {state.step}")
        if state.step:
            raise Enough
        return found

    def timed_drawing(*given: Any) -> None:
        draw(*given)
        stamp("pictures")

    def timed_line(self: Reporter, text: Any) -> None:
        if "everything goes to" in str(text):
            stamp("the plan")
        show(self, text)

    metrics.MetricsLog._measured, metrics.draw_run, Reporter.show = timed_measure, timed_drawing, timed_line
    try:
        pretrain(data, threads=1, workers=0, out=out)
    except Enough:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
