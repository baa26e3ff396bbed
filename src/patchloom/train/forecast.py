"""What a run will take of time, memory and disc, found out before it begins."""

from __future__ import annotations

import csv
import gc
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from patchloom.data import Source, steps_of, steps_per_epoch
from patchloom.data.read import Unreadable, to_channels
from patchloom.data.stats import drawn
from patchloom.errors import PatchloomError
from patchloom.files import size_in_words
from patchloom.machine import Cores, compile_gain, product_rates
from patchloom.memory import free_memory, memory, memory_shortage, resident
from patchloom.processes import alone
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import Settings
from patchloom.tasks.task import Task
from patchloom.train.failures import smaller_steps
from patchloom.train.limits import refuse_full_disc, refuse_too_large
from patchloom.train.sketch import Sizes, Sketch
from patchloom.train.trial import Step
from patchloom.waiting import Waiting, duration

_GIB = 2**30
_SECONDS = 1.0  # that a step which is tried may take, and how long steps are tried
_STEPS = 3  # timed at least, after one that is not
_PERIODS = 0.5  # seconds of steps at least: a CPU quota lets go and holds back within periods of 0.1 s
_LARGE = 2 * _GIB  # bytes of weights, gradients and moments that are not made twice only to see how fast they are
_REACHED = 0.4  # of the peak of products, by the steps of most models (docs/bench.md)
_READING = 0.3  # seconds of reading
_LONG = 24 * 3600.0  # seconds of a run that are worth a remark
_FILES = 4 << 20  # bytes of pictures and tables


@dataclass(frozen=True)
class Forecast:
    """What a run will take.

    Attributes:
        steps: that are to be done.
        step: seconds of each, its images being there; None where nobody can tell.
        reading: seconds in which one process reads the images of a step; 0 where that is in ``step``.
        how: where the seconds come from, such as "measured".
        total: seconds in all.
        memory: bytes that one of the processes will probably have in use; None where that is unknown.
        there: bytes that the processes of this machine, or a device, may use.
        free: bytes that nothing uses now.
        disc: bytes of two checkpoints, a third one while it takes the place of one, and the encoder.
        room: bytes that are free on the disc.
        advice: what to lower where memory may not suffice.
    """

    steps: int
    step: float | None
    reading: float
    how: str
    total: float | None
    memory: float | None
    there: float
    free: float
    disc: float
    room: float
    advice: str

    def sentences(self) -> list[str]:
        """A line each on time, memory and disc, with remarks where they are called for."""
        said = []
        if self.total is not None:
            each = f"{self.step:.2g} s" if self.step < 60 else duration(self.step)
            said.append(f"takes about {duration(max(1, self.total))}: {self.steps:,} steps of {each}, {self.how}")
            if self.total > _LONG:
                said.append("  a GPU, a smaller --model, smaller --img_size or fewer --epochs make it shorter")
        if self.memory is not None:
            said.append(f"needs about {self.memory / _GIB:.1f} of {self.there / _GIB:.1f} GiB of memory")
            if self.memory > self.free:
                said.append(f"  which may not suffice, since {self.free / _GIB:.1f} are free now: {self.advice}")
        said.append(f"needs {size_in_words(self.disc)} of the {size_in_words(self.room)} that are free on the disc")
        return said


def foresee(settings: Settings, training: Source, share: int, here: Cores, folder: RunFolder) -> Forecast:
    """Measure a few steps of a run, or count what it would take where that is much.

    Nothing of it reaches the training: the weights are made for this alone, and torch's random state is put back.

    Args:
        settings: resolved.
        training: images to train on.
        share: images of a step in each process.
        here: the cores of this machine, and how many processes share them and, on a CPU, the memory.
        folder: of the run.

    Raises:
        PatchloomError: the memory cannot suffice, the disc has too little room, or the settings do not fit each other.
    """
    if settings.threads == "auto":  # as an older version's run says
        settings = replace(settings, threads=torch.get_num_threads())
    if settings.device == "cpu":
        torch.set_num_threads(settings.threads)
    free, there = free_memory(settings.device) * _GIB, memory(settings.device)[1] * _GIB
    if settings.device == "cpu":
        free, there = free / here.processes, there / here.processes
    counted = refuse_too_large(settings, share, here.processes)
    # of the own GPU alone: others would be set up for it, and torch would warn
    used = [torch.cuda.current_device()] if settings.device == "cuda" else []
    with Waiting("trying a few steps"), torch.random.fork_rng(devices=used), alone():
        tried = try_steps(settings, share, counted, training)
    sizes = tried.sizes if counted is None else counted.sizes
    best = 0 if settings.patience is None else sizes.weights  # which a checkpoint has besides
    disc = 3 * (sizes.checkpoint + best) + sizes.encoder + _FILES
    room = refuse_full_disc(folder, disc)
    base = resident() if settings.device == "cpu" else 0.0
    needed = tried.memory if counted is None else base + counted.likely
    steps = steps_of(settings.epochs, len(training), settings.batch_size)
    total = None if tried.step is None else steps * seconds_with_reading(settings, tried, here)
    advice = smaller_steps(settings)
    return Forecast(steps, tried.step, tried.reading, tried.how, total, needed, there, free + base, disc, room, advice)


def epochs_in(minutes: float, forecast: Forecast, settings: Settings, images: int) -> tuple[float, str]:
    """Return the epochs that fit into ``minutes`` of training, and why; at least one step.

    Args:
        minutes: of training.
        forecast: of a run with these settings, of any number of epochs.
        settings: resolved.
        images: to train on.

    Raises:
        PatchloomError: the pace cannot be told.
    """
    if forecast.total is None:
        raise PatchloomError("--minutes needs the pace of this machine, and it is not known: give --epochs")
    each, steps = forecast.total / forecast.steps, steps_per_epoch(images, settings.batch_size)
    why = f"{minutes:g} minutes of training, at {each:.2g} s for a step of {settings.batch_size}, {forecast.how}"
    return rounded(max(1 / steps, 60 * minutes / (each * steps))), why


def rounded(epochs: float) -> float:
    """Return epochs with four digits, and as a whole number where it is one: they are read, typed and compared."""
    short = float(f"{epochs:.4g}")
    return int(short) if short == int(short) else short


def resumed(settings: Settings, training: Source, folder: RunFolder, kept: bool = False) -> Forecast | None:
    """What is left of a run that goes on, by the pace that it had; None where it made no step yet.

    Args:
        settings: resolved.
        training: images to train on.
        folder: of the run.
        kept: the checkpoints that are there are kept for good.

    Raises:
        PatchloomError: the disc has too little room.
    """
    files = (folder.checkpoints.last, folder.checkpoints.before)
    written = [path.stat().st_size for path in files if path.exists()]
    if not written:
        return None
    try:
        with open(folder.metrics, newline="", encoding="utf-8") as file:
            *_, row = csv.DictReader(file)
        step, seconds = int(row["step"]), float(row["seconds"])
    except (OSError, ValueError, KeyError, TypeError, csv.Error):  # none yet, or damaged; the checkpoint has all of it
        step, seconds = 0, 0.0
    checkpoint = max(written) * (1 if step else 3)  # before the first step there are no moments
    disc = 3 * checkpoint + checkpoint // 3 + _FILES - (0 if kept else sum(written))
    room = refuse_full_disc(folder, disc)
    steps = steps_of(settings.epochs, len(training), settings.batch_size) - step
    each = seconds / step if step else None
    total = None if each is None else each * steps
    return Forecast(steps, each, 0.0, "as before, with measures", total, None, 0.0, 0.0, disc, room, "")


@dataclass(frozen=True)
class Tried:
    """Seconds of a step and of reading its images, where they come from, and the bytes that were in use."""

    step: float | None
    reading: float
    how: str
    sizes: Sizes
    memory: float | None


def try_steps(settings: Settings, share: int, counted: Sketch | None, training: Source) -> Tried:
    """Take a few steps, of fewer images where all would take long, or calculate where one would be too much."""
    guess = None if counted is None else _calculated(counted, settings)
    n = share
    if counted is not None:
        if counted.sizes.state > _LARGE or guess is None or guess / share > _SECONDS / 4:
            return Tried(guess, 0.0, "calculated", counted.sizes, None)
        n = min(share, max(2, int(share * _SECONDS / guess)))
    try:
        step = Step(settings, batch=n, sound=training.sound)
        step()  # finds its memory, which takes a while
        count, begun, passed = 0, time.perf_counter(), 0.0
        while count == 0 or (passed < _PERIODS or count < _STEPS) and passed < _SECONDS:
            step()
            count, passed = count + 1, time.perf_counter() - begun
    except (MemoryError, RuntimeError) as problem:  # the training will say what it lacks
        if memory_shortage(problem) is None or counted is None:
            raise
        return Tried(guess, 0.0, "calculated", counted.sizes, None)
    each, sizes = passed / count * share / n, Sizes.of(step.task)
    if settings.compile:
        model, kernels = settings.model["name"], settings.kernels
        each /= compile_gain(settings.device, settings.precision, model, kernels, settings.threads) or 1.0
    reading = _reading(training, step.task, settings.channels) * share
    used = resident(peak=True) if settings.device == "cpu" else None
    if settings.device == "cuda":
        used = float(torch.cuda.max_memory_allocated())
    del step
    gc.collect()  # modules and what they belong to know each other
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    return Tried(each, reading, "measured", sizes, used)


def _calculated(counted: Sketch, settings: Settings) -> float | None:
    """Seconds of a step by its operations, and by the peak of this machine."""
    if counted.flops is None:
        return None
    size = 1024 if settings.device == "cpu" else 4096
    rate = product_rates(settings.device, size, 2, (settings.precision,))[settings.precision]
    return counted.flops / (_REACHED * rate)


def _reading(source: Source, task: Task, channels: int) -> float:
    """Seconds in which one process reads an image and makes its views; as a worker does, with one thread."""
    rng, threads, done = np.random.default_rng(0), torch.get_num_threads(), 0
    torch.set_num_threads(1)
    start = time.perf_counter()
    try:
        for i in drawn(len(source), 64, seed=0):
            try:
                task.augment(to_channels(source.read(i), channels), rng)
            except Unreadable:
                continue
            done += 1
            if time.perf_counter() - start > _READING:
                break
    finally:
        torch.set_num_threads(threads)
    return (time.perf_counter() - start) / max(1, done)


def seconds_with_reading(settings: Settings, tried: Tried, here: Cores) -> float:
    """Seconds of a step with its reading, which other processes do on the same cores."""
    if not settings.workers:
        return tried.step + tried.reading
    reading = tried.reading / settings.workers
    if settings.device != "cpu":
        return max(tried.step, reading)
    work = tried.step * settings.threads + tried.reading
    return max(tried.step, reading, work / max(1, min(here.each, settings.threads + settings.workers)))
