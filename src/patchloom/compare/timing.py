"""Time and updates that the runs of a comparison took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from patchloom.compare.runner import Job
from patchloom.display import TextTable, duration
from patchloom.errors import PatchloomError, listing
from patchloom.runs.folder import RunFolder, read_metrics

_TOLERANCE = 0.05  # deviation from the requested time, as a fraction, from which a run is named


class TrainedRun(NamedTuple):
    """Training of a finished run.

    Attributes:
        task: name of its arm.
        seed: random seed.
        seconds: time of its steps and held-out measures.
        updates: number of updates of the weights.
        images: images seen, counting repeats.
    """

    task: str
    seed: int
    seconds: float
    updates: int
    images: int

    @property
    def text(self) -> str:
        """Seconds and updates in words."""
        return f"{_seconds(self.seconds)} of training, {self.updates:,} updates"


def _seconds(seconds: float) -> str:
    """Format a time so that deviations of some per cent show."""
    return f"{seconds:.3g} s" if seconds < 100 else duration(seconds)


def read_trained(job: Job) -> TrainedRun:
    """Return the training that a finished run recorded."""
    folder = RunFolder(job.folder)
    columns = read_metrics(folder.metrics)
    ends = {name: float(columns[name][-1]) for name in ("seconds", "step", "images") if len(columns.get(name, ()))}
    if len(ends) < 3 or not all(0 <= end < math.inf for end in ends.values()):
        raise PatchloomError(f"{folder.metrics} does not end with seconds, step and images: restore it from a copy")
    updates = math.ceil(ends["step"] / folder.read_config().accumulate)
    return TrainedRun(job.task, job.seed, ends["seconds"], updates, round(ends["images"]))


def note_unequal(trained: Sequence[TrainedRun], minutes: float | None) -> list[str]:
    """Return a sentence on the runs whose time differs from the requested one; [] if there are none."""
    if minutes is None:
        return []
    off = [one for one in trained if abs(one.seconds - 60 * minutes) > _TOLERANCE * 60 * minutes]
    those = listing([f"{one.task}, seed {one.seed} ({one.text})" for one in off], "and")
    far = f"more than {_TOLERANCE:.0%} off the requested {_seconds(60 * minutes)}"
    return [f"The times of training are not equal, since these are {far}: {those}."] if off else []


def training_table(trained: Sequence[TrainedRun]) -> tuple[str, TextTable, str]:
    """Return a table of the training of each run, with its title and a note."""
    rows = [(one.task, str(one.seed), _seconds(one.seconds), f"{one.updates:,}", f"{one.images:,}") for one in trained]
    heading = ("task", "seed", "time", "updates", "images seen")
    note = "Time of the steps and the held-out measures during training."
    return "Training of each run", TextTable(heading, tuple(rows), names=frozenset({0})), note
