"""Training speed of each task on this machine, from which all tasks get the same training time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from patchloom.compare.scores import LabelledData, Way, score_encoder
from patchloom.data.loader import steps_per_epoch
from patchloom.data.source import Source
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.estimate import scaled_seconds, time_steps, typical_seconds, with_reading
from patchloom.evaluate.frozen import extractors
from patchloom.evaluate.label_free import DEFAULT_IMAGES, MIN_LABEL_FREE_IMAGES, label_free_rows
from patchloom.evaluate.settings import EvalSettings, Parts, stratified_subset
from patchloom.report.page import render
from patchloom.report.report import page_of
from patchloom.runs.encoder import load_encoder, load_extra_module
from patchloom.runs.settings import ResolvedSettings
from patchloom.system.hardware import Cores, cores, keep_freed_memory
from patchloom.train.estimate import Step, estimated, reading_rate, refuse_too_large, rounded, try_steps

_SECONDS = 3.0  # of timed steps in each round
_ROUNDS = 2  # the tasks take turns, since the speed of a machine varies over time
_LEAST = 3  # steps in each round, after one that allocates memory


class TrainingSpeed(NamedTuple):
    """Training speed of one task.

    Attributes:
        step: seconds per step, including the wait for its images.
        images: images per step.
        epoch: steps per epoch.
    """

    step: float
    images: int
    epoch: int

    def epochs_in(self, seconds: float) -> float:
        """Return the number of epochs, possibly fractional, that fit into ``seconds``; at least one step."""
        return rounded(max(1 / self.epoch, seconds / (self.step * self.epoch)))

    def epochs_of(self, samples: int) -> float:
        """Return the number of epochs in which ``samples`` images are seen, counting repeats; at least one step."""
        return rounded(max(1 / self.epoch, samples / (self.images * self.epoch)))

    def seconds_of(self, epochs: float) -> float:
        """Return the duration of ``epochs`` epochs in seconds."""
        return self.step * max(1, round(epochs * self.epoch))


def measure_training_speeds(settings: Mapping[str, ResolvedSettings], training: Source) -> dict[str, TrainingSpeed]:
    """Measure the training speed of each task.

    One task is in memory at a time. Steps are timed with their images ready; if other processes read the images, a step
    takes as long as the slower of the two.
    """
    keep_freed_memory()  # as the runs do
    steps: dict[str, list[float]] = {name: [] for name in settings}
    waits: dict[str, float] = {}
    threads = torch.get_num_threads()
    try:
        with StatusMessage("timing the tasks' steps", _ROUNDS * len(settings)) as waiting:
            for turn in range(_ROUNDS):
                for name, one in settings.items():
                    batch = min(one.batch_size, len(training))
                    if one.device == "cpu":
                        torch.set_num_threads(one.threads)
                    if not turn:
                        refuse_too_large(one, batch)
                    step = Step(one, one.compile, batch, training.sound)
                    steps[name] += time_steps(step, least=_LEAST, seconds=_SECONDS)
                    if not turn:
                        waits[name] = batch / reading_rate(training, step.task, one)
                    del step
                    gc.collect()
                    if one.device == "cuda":  # the memory is needed by the runs, which are other processes
                        torch.cuda.empty_cache()
                    waiting.advance()
    finally:
        torch.set_num_threads(threads)
    found = {}
    for name, one in settings.items():
        each = with_reading(typical_seconds(steps[name]), waits[name], one.workers > 0)
        batch = min(one.batch_size, len(training))
        found[name] = TrainingSpeed(each, batch, steps_per_epoch(len(training), one.batch_size))
    return found


def estimated_paces(settings: Mapping[str, ResolvedSettings], training: Source) -> dict[str, TrainingSpeed]:
    """Estimate the training speed of each task from a few steps, as ``pretrain`` does: a second or two each."""
    found: dict[str, TrainingSpeed] = {}
    threads = torch.get_num_threads()
    try:
        with StatusMessage("trying a few steps of each task", len(settings)) as waiting:
            for name, one in settings.items():
                batch = min(one.batch_size, len(training))
                if one.device == "cpu":
                    torch.set_num_threads(one.threads)
                tried = try_steps(one, batch, refuse_too_large(one, batch), training)
                if tried.step is None:
                    raise PatchloomError(f"the speed of {name} cannot be estimated here: compare without --dry_run")
                seconds = estimated(one, tried, Cores(cores()), 1).total
                assert seconds is not None
                found[name] = TrainingSpeed(seconds, batch, steps_per_epoch(len(training), one.batch_size))
                waiting.advance()
    finally:
        torch.set_num_threads(threads)
    return found


# Time after training: the scoring of an encoder, and a run's part of the page.


_FEW, _SOME = (
    MIN_LABEL_FREE_IMAGES,
    320,
)  # numbers of images for timing: the difference excludes constant costs
_LONG = 6.0  # seconds: if the smaller number takes longer, the larger one is skipped


class TimeAfterTraining(NamedTuple):
    """Time after training in seconds.

    Attributes:
        scoring: scoring of an encoder.
        page: a run's part of the page.
    """

    scoring: float
    page: float


def time_after_training(
    run: Path, on: LabelledData | None, held_out: Source, settings: EvalSettings
) -> TimeAfterTraining:
    """Time the evaluation on a fraction of the images, and extrapolate to all of them."""
    if on is not None:
        scoring = _scaled(partial(_by_labels, run, on, settings), len(on.parts.train) + len(on.parts.test))
    else:
        n = min(len(held_out), DEFAULT_IMAGES)
        scoring = _scaled(partial(_without_labels, run, held_out, settings), n) if n >= MIN_LABEL_FREE_IMAGES else 0.0
    begun = time.perf_counter()
    render(page_of([run]))
    return TimeAfterTraining(scoring, time.perf_counter() - begun)


def _scaled(work: Callable[[int], object], n: int) -> float:
    return scaled_seconds(work, n, few=_FEW, some=_SOME, slow=_LONG)


def _by_labels(run: Path, on: LabelledData, settings: EvalSettings, count: int) -> None:
    vit, card = load_encoder(run)
    its = replace(settings, cache=False)
    share = count / (len(on.parts.train) + len(on.parts.test))
    train, test = (_some(one, share) for one in (on.parts.train, on.parts.test))
    # probes with few labels take time in proportion; here they could have too few images to draw from
    ways: Sequence[Way] = [way for way in on.ways if way.few is None]
    score_encoder(
        extractors(vit, card, its, load_extra_module(run, "pooling"))[0], ways, Parts(train, test, ""), its, 0
    )


def _some(source: Source, share: float) -> Source:
    count = max(2, round(share * len(source)))
    return source if count >= len(source) else stratified_subset(source, count, 0)


def _without_labels(run: Path, held_out: Source, settings: EvalSettings, count: int) -> None:
    vit, card = load_encoder(run)
    with suppress(PatchloomError):  # unreadable images or a diverged run: reported by the evaluation
        label_free_rows("pilot", vit, card, held_out, replace(settings, seed=0), images=count)
