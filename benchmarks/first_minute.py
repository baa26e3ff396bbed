"""Seconds of processor time from the start of Python to a run's plan, its first measures and its first picture.

    OMP_NUM_THREADS=1 python benchmarks/first_minute.py shapes runs/first

Other work on the machine lengthens processor time less than wall-clock time.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from patchloom.train import metrics
from patchloom.train.loop import pretrain
from patchloom.train.metrics import Reporter


class Enough(BaseException):
    """End of the trial, after the first measure."""


def stamp(what: str) -> None:
    """Print the processor time of the process so far."""
    print(f"{time.process_time():6.1f} s: {what}", flush=True)


def main(data: str, out: str) -> None:
    """Train on ``data`` into ``out`` up to the first measure, and print the time of each event."""
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
