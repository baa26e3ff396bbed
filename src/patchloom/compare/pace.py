"""How fast each task trains here, so that all of them can be given the same time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from patchloom.data import Source, steps_per_epoch
from patchloom.errors import PatchloomError
from patchloom.machine import Cores, cores
from patchloom.memory import keep_freed_memory
from patchloom.runs.settings import Settings
from patchloom.train.forecast import rounded, seconds_with_reading, try_steps
from patchloom.train.limits import refuse_too_large
from patchloom.train.trial import Step, reading
from patchloom.waiting import Waiting

_SECONDS = 3.0  # of steps that are timed, in each of the rounds
_ROUNDS = 2  # the tasks in turns, since no machine is equally fast for long
_LEAST = 3  # steps in each round, after one that finds its memory


class Pace(NamedTuple):
    """How fast one task trains.

    Attributes:
        step: seconds of a step, with the time for which it waits for its images.
        images: of a step.
        epoch: steps of an epoch.
    """

    step: float
    images: int
    epoch: int

    def epochs_in(self, seconds: float) -> float:
        """Epochs that fit into so many seconds, which need not be whole; at least one step."""
        return rounded(max(1 / self.epoch, seconds / (self.step * self.epoch)))

    def epochs_of(self, samples: int) -> float:
        """Epochs in which so many images are seen, one as often as it is seen; at least one step."""
        return rounded(max(1 / self.epoch, samples / (self.images * self.epoch)))

    def seconds_of(self, epochs: float) -> float:
        """Seconds of a training of so many epochs."""
        return self.step * max(1, round(epochs * self.epoch))


def paces_of(settings: Mapping[str, Settings], training: Source) -> dict[str, Pace]:
    """The pace of each task, measured.

    One task is in memory at a time. What is measured has each step's images ready; where processes read them beside
    it, a step takes as long as the slower of both.

    Args:
        settings: resolved, by the task's name.
        training: images to train on.

    Raises:
        PatchloomError: a step needs more memory than there is.
    """
    keep_freed_memory()  # as the runs do
    steps: dict[str, list[float]] = {name: [] for name in settings}
    waits: dict[str, float] = {}
    threads = torch.get_num_threads()
    try:
        with Waiting("timing the tasks' steps", _ROUNDS * len(settings)) as waiting:
            for turn in range(_ROUNDS):
                for name, one in settings.items():
                    batch = min(one.batch_size, len(training))
                    if one.device == "cpu":
                        torch.set_num_threads(one.threads)
                    if not turn:
                        refuse_too_large(one, batch)
                    step = Step(one, one.compile, batch, training.sound)
                    steps[name] += timed(step)
                    if not turn:
                        waits[name] = batch / reading(training, step.task, one)
                    del step
                    gc.collect()
                    if one.device == "cuda":  # the runs are other processes, and need it
                        torch.cuda.empty_cache()
                    waiting.advance()
    finally:
        torch.set_num_threads(threads)
    found = {}
    for name, one in settings.items():
        seconds = statistics.median(steps[name])
        each = max(seconds, waits[name]) if one.workers else seconds + waits[name]
        batch = min(one.batch_size, len(training))
        found[name] = Pace(each, batch, steps_per_epoch(len(training), one.batch_size))
    return found


def estimated_paces(settings: Mapping[str, Settings], training: Source) -> dict[str, Pace]:
    """The pace of each task from a few steps, as ``pretrain`` estimates it: a second or two for each.

    Args:
        settings, training: as in `paces_of`.

    Raises:
        PatchloomError: a step needs more memory than there is, or its pace cannot be estimated.
    """
    found: dict[str, Pace] = {}
    threads = torch.get_num_threads()
    try:
        with Waiting("trying a few steps of each task", len(settings)) as waiting:
            for name, one in settings.items():
                batch = min(one.batch_size, len(training))
                if one.device == "cpu":
                    torch.set_num_threads(one.threads)
                tried = try_steps(one, batch, refuse_too_large(one, batch), training)
                if tried.step is None:
                    raise PatchloomError(f"the pace of {name} cannot be estimated here: compare without --dry_run")
                seconds = seconds_with_reading(one, tried, Cores(cores()))
                found[name] = Pace(seconds, batch, steps_per_epoch(len(training), one.batch_size))
                waiting.advance()
    finally:
        torch.set_num_threads(threads)
    return found


def timed(step: Step) -> list[float]:
    """Seconds of each of some steps, after one that is not counted."""
    step()
    taken: list[float] = []
    while len(taken) < _LEAST or sum(taken) < _SECONDS:
        begun = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begun)
    return taken
