"""What a run will take of time, memory and disc, found out before it begins."""

from __future__ import annotations

import copy
import csv
import gc
import math
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.config import Sound
from patchloom.data.decode import Unreadable, to_channels
from patchloom.data.loader import Batch, steps_of, steps_per_epoch, training_batches
from patchloom.data.source import Source
from patchloom.data.stats import normalize, sample_indices, unknown_stats
from patchloom.data.workers import lost_worker
from patchloom.display import StatusMessage, duration
from patchloom.errors import PatchloomError
from patchloom.estimate import Estimate, count_step, time_steps, typical_seconds
from patchloom.nets.build import outline
from patchloom.nets.performance import compile_blocks, kept_bytes, patches_of
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import ResolvedSettings
from patchloom.runs.task import prepare_task
from patchloom.system.distributed import LOST, is_peer_death, without_collectives, world
from patchloom.system.files import disk_error, size_in_words
from patchloom.system.hardware import (
    Cores,
    compile_gain,
    free_memory,
    keep_freed_memory,
    memory,
    memory_shortage,
    peak_in_subprocess,
    product_rates,
    resident,
    synchronize,
)
from patchloom.tasks import images_needed
from patchloom.tasks.custom import allow_code, only_here
from patchloom.tasks.task import Task
from patchloom.train.step import autocast, build_optimizer

# What a step would take of memory and work, counted without numbers, so that nothing of it is taken yet.


_SMALL = 64  # pixels of the images that tell how many views there are


class TaskBytes(NamedTuple):
    """Of a task, in bytes.

    Attributes:
        weights: all of them, and the tables that belong to the task.
        trained: of the weights that have a gradient and two moments.
        checkpoint: of its file, once there are moments.
        encoder: of the encoder's file.
    """

    weights: int
    trained: int
    checkpoint: int
    encoder: int

    @classmethod
    def of(cls, task: Task) -> TaskBytes:
        """Those of a task, with numbers or without."""
        trained = _bytes(weight for weight in task.parameters() if weight.requires_grad)
        stored = _bytes(task.state_dict().values()) + 2 * trained
        encoder = _bytes(task.encoder.state_dict().values())
        return cls(_bytes([*task.parameters(), *task.buffers()]), trained, stored, encoder)

    @property
    def state(self) -> int:
        """Bytes in memory that do not depend on the number of images: weights, gradients and moments."""
        return self.weights + 3 * self.trained


class Sketch(NamedTuple):
    """What a step takes.

    Attributes:
        images: of the step, in one process.
        sizes: of the task.
        pixels: bytes of the images, 8 bits each.
        activations: bytes that are kept for the way back; None where they could not be counted.
        flops: operations of the step's matrix products, there and back; None likewise.
    """

    images: int
    sizes: TaskBytes
    pixels: int
    activations: int | None
    flops: float | None

    def least(self, images: int | None = None) -> float:
        """Bytes that are in memory together when the way back begins, with so many images or with all."""
        share = 1.0 if images is None else images / self.images
        return self.sizes.state + share * (self.pixels + (self.activations or 0))

    @property
    def likely(self) -> float:
        """Bytes with what is in use for a moment: pixels as numbers, and a quarter more than is kept."""
        return self.sizes.state + 5 * self.pixels + 1.25 * (self.activations or 0)


def upper_bound_bytes(settings: ResolvedSettings, images: int) -> float:
    """Bytes that a step of ``images`` hardly exceeds, from the encoder's outline alone, which takes no time."""
    vit = outline(settings.encoder_spec())
    h, w = settings.img_size
    tokens = patches_of(vit)
    weights = sum(weight.numel() for weight in vit.parameters())
    tables = 2 * tokens**2  # of distances between any two places
    pixels = 4 * images * settings.channels * h * w
    return 4.0 * (16 * weights + tables + pixels) + 2 * kept_bytes(vit, images, settings.attention == "fused")


def sketch(settings: ResolvedSettings, images: int) -> Sketch:
    """Count what a step of resolved ``settings`` takes in a process that has ``images`` of it.

    Tensors have shapes here and no numbers, so that it takes seconds for any size.
    """
    c = settings.channels
    plain = replace(settings, kernels="torch")  # native ones need numbers, and keep no less
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # that tensors without numbers were not given any
        with torch.device("meta"):
            task = prepare_task(plain, unknown_stats(c)).train()
        sizes, views = TaskBytes.of(task), _views(task, c)
        activations, flops = _counted(task, plain, images, views)
    h, w = task.augment.size
    return Sketch(images, sizes, images * views * c * h * w, activations, flops)


def _views(task: Task, channels: int) -> int:
    """How many views the task's augmentation makes of an image."""
    augment = copy.copy(task.augment)
    augment.size = (_SMALL, _SMALL)
    return len(augment(torch.zeros(channels, _SMALL, _SMALL, dtype=torch.uint8), np.random.default_rng(0)))


def _counted(task: Task, settings: ResolvedSettings, images: int, views: int) -> tuple[int | None, float | None]:
    """Bytes of activations and operations of a step; None where the task does what cannot be done without numbers."""
    shape = images, settings.channels, *task.augment.size

    def loss() -> Tensor:
        with autocast("cpu", settings.precision):
            return task(*(torch.zeros(shape) for _ in range(views)), progress=0.5).loss

    found = count_step(task, "cpu", loss)
    return (None, None) if found is None else (found.kept, found.flops)


def _bytes(tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


# Steps of a run before it begins: for what they cost, and to see whether there is the memory for them.


_READING_SECONDS = 3.0  # seconds of reading


class RandomImages(Source):
    """Images [n c h w] in memory."""

    name = "noise"

    def __init__(self, images: Tensor):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def read(self, i: int) -> Tensor:
        return self.images[i]

    def fingerprint(self) -> str:
        return self.name


class Step:
    """One step of training: normalising, forward, backward, clipping, optimiser, teacher; on random images.

    Args:
        settings: resolved.
        compiled: compile the blocks.
        batch: images, instead of the settings'.
        sound: of recordings, which are noise then.
    """

    def __init__(
        self, settings: ResolvedSettings, compiled: bool = False, batch: int | None = None, sound: Sound | None = None
    ):
        torch.manual_seed(0)
        c = settings.channels
        self.settings, stats = settings, unknown_stats(c, sound)
        self.task: Task = prepare_task(settings, stats).to(settings.device).train()
        if compiled:
            compile_blocks(self.task)
        self.optimizer = build_optimizer(self.task, settings.weight_decay, settings.device, settings.betas)
        b = batch or settings.batch_size
        drawn = RandomImages(stats.modality.random(b, c, self.task.augment.size))
        drawn.sound = stats.sound
        batches = training_batches(drawn, self.task.augment, b, 0, 0, 1, 0, c)
        self.batch: Batch = next(batches)

    def __call__(self) -> None:
        kind = self.settings.device
        views = [normalize(view, self.task.mean, self.task.std) for view in self.batch.on(kind).views]
        with autocast(kind, self.settings.precision):
            loss = self.task(*views, progress=0.5).loss
        loss.backward()
        if self.settings.clip:
            torch.nn.utils.clip_grad_norm_(self.task.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.task.after_step(0.5)
        synchronize(kind)


def memory_of(settings: ResolvedSettings, compiled: bool = False, sound: Sound | None = None) -> float | None:
    """GiB that two steps need at their peak, in a process of its own: other steps have left their memory in this.

    ``sound`` is that of recordings.
    """
    if only_here(settings.task["name"]):  # no other process could build it
        return None
    return peak_in_subprocess(_two_steps, settings.device, settings, compiled, sound)


def _two_steps(settings: ResolvedSettings, compiled: bool, sound: Sound | None) -> None:
    keep_freed_memory()
    allow_code(settings.task["name"])  # the process that started this one has met it
    if settings.device == "cpu":
        torch.set_num_threads(settings.threads)
    step = Step(settings, compiled, sound=sound)
    step()
    step()


def reading_rate(source: Source, task: Task, settings: ResolvedSettings) -> float:
    """Images a second that are read and augmented as training would have them."""
    batch = min(settings.batch_size, len(source))
    steps = 10**6  # more than are made in the time
    batches: Any = training_batches(source, task.augment, batch, 0, 0, steps, settings.workers, settings.channels)
    next(batches)  # the workers start
    start, done = time.perf_counter(), 0
    for _ in islice(batches, 200):
        done += batch
        if time.perf_counter() - start > _READING_SECONDS:
            break
    return done / (time.perf_counter() - start)


# What ends a run from outside, in one sentence: too little memory, a full disc, a process that died.


@contextmanager
def explain_errors(settings: ResolvedSettings) -> Iterator[None]:
    """While entered, what the user can mend is raised as a `PatchloomError` that says how."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as problem:
        sentence = lost_worker(problem) or disk_error(problem)
        if sentence is None and is_peer_death(problem):
            sentence = PatchloomError(LOST)
        if sentence is None and (need := memory_shortage(problem)):
            sentence = PatchloomError(too_little_memory(need, settings))
        if sentence is None:
            raise
        raise sentence from problem


def too_little_memory(need: str, settings: ResolvedSettings) -> str:
    """Which setting to lower; ``need`` says what was needed, and what there is."""
    less = smaller_steps(settings)
    if not settings.checkpointing:
        less += ", or try --checkpointing true"
    return f"steps of {settings.batch_size} images need more memory than there is ({need}): {less}, with another --out"


def smaller_steps(settings: ResolvedSettings) -> str:
    """What to do where steps of resolved ``settings`` need too much memory; nothing that would be refused."""
    if halvable(settings):
        return "halve --batch_size and double --accumulate, which keeps the size of an update"
    return "use smaller images or a smaller --model"


def halvable(settings: ResolvedSettings) -> bool:
    """Whether half as many images a step, of resolved ``settings``, are enough for the task and for all processes."""
    return settings.batch_size // 2 >= max(images_needed(settings.task)[0], world())


# What no run can have is refused before it begins: more memory for a step than there is, or more of the disc.

_SURE = 1 / 8  # a step that takes no more of the memory than this by a rough rule needs no counting
_MANY = 10_000  # patches of an image: the largest that people train on have 4,096


def refuse_too_large(settings: ResolvedSettings, images: int, processes: int = 1) -> Sketch | None:
    """Refuse a run of which one step takes more than all of the memory, before any of it is taken."""
    there = memory(settings.device)[1] * _GIB / (processes if settings.device == "cpu" else 1)
    with StatusMessage("counting what a step takes"), without_collectives():
        if upper_bound_bytes(settings, images) <= _SURE * there:
            return None
        counted = sketch(settings, images)
    base = resident() if settings.device == "cpu" else 0.0
    parts = world() if settings.strategy == "fsdp" else 1
    held = counted.least() - counted.sizes.state * (1 - 1 / parts) + base
    if held <= there:
        return counted
    least = max(1, images_needed(settings.task)[0])
    fitting = next((n for n in _halves(counted.images) if counted.least(n) + base < 0.8 * there), 0)
    patches = math.prod(settings.encoder_spec().grid)
    if patches > _MANY:
        sides = "x".join(map(str, settings.img_size))
        remedy = f"lower --img_size, which makes {patches:,} patches of an image at {sides}, or give larger patches"
    elif fitting >= least and settings.batch_size % counted.images == 0:
        times = counted.images // fitting
        batch = settings.batch_size // counted.images * fitting
        remedy = f"give --batch_size {batch} and --accumulate {times * settings.accumulate}, or take smaller images"
    elif counted.sizes.state + base > there:
        remedy = "choose a smaller --model, larger patches, or smaller images, heads and decoders"
    else:
        remedy = "choose smaller images, larger patches, or a smaller --model"
    state = f"{counted.sizes.state / _GIB:,.1f} of them for weights, gradients and moments"
    raise PatchloomError(
        f"this cannot be trained in the {there / _GIB:,.1f} GiB of memory that there are: a step of {counted.images} "
        f"images needs {held / _GIB:,.0f} GiB or more, {state}: {remedy}"
    )


def refuse_full_disc(folder: RunFolder, need: float) -> float:
    """Bytes that are free on the disc of a run's folder."""
    place = folder.path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        room = float(shutil.disk_usage(place).free)
    except OSError:  # what is written there will tell
        return float("inf")
    if need > room:
        raise PatchloomError(
            f"the run needs {size_in_words(need)} for its checkpoints and the encoder, and the disc of {folder.path} "
            f"has {size_in_words(room)} free: make room, choose another folder with --out, or a smaller --model"
        )
    return room


def _halves(images: int) -> list[int]:
    return [images // 2**k for k in range(1, images.bit_length()) if images % 2**k == 0]


_GIB = 2**30
_SECONDS = 1.0  # that a step which is tried may take, and how long steps are tried
_STEPS = 3  # timed at least, after one that is not
_TRIED = 0.1  # of a run's steps at most, beyond those: a trial is not to take longer than the run
_PERIODS = 0.5  # seconds of steps at least: a CPU quota lets go and holds back within periods of 0.1 s
_LARGE = 2 * _GIB  # bytes of weights, gradients and moments that are not made twice only to see how fast they are
_REACHED = 0.4  # of the peak of products, by the steps of most models (docs/bench.md)
_READING = 0.3  # seconds of reading
_LONG = 24 * 3600.0  # seconds of a run that are worth a remark
_FILES = 4 << 20  # bytes of pictures and tables


@dataclass(frozen=True, kw_only=True)
class Forecast(Estimate):
    """Estimate of a run, with what there is for it.

    Attributes:
        how: where the seconds come from, such as "measured".
        steps_alone: measures on held-out images and the evaluation at the end are not in the seconds.
        there: bytes that the processes of this machine, or a device, may use.
        free: bytes that nothing uses now.
        disc: bytes of two checkpoints, a third one while it takes the place of one, and the encoder.
        room: bytes that are free on the disc.
        advice: what to lower where memory may not suffice.
    """

    disc: float
    how: str
    steps_alone: bool = True
    there: float = 0.0
    free: float = 0.0
    room: float
    advice: str = ""

    def plain(self) -> dict[str, Any]:
        """As values for JSON."""
        return {
            "steps": self.steps,
            "seconds": self.total,
            "step_seconds": self.step,
            "how": self.how,
            "steps_alone": self.steps_alone,
            "memory_bytes": self.memory,
            "available_bytes": self.there,
            "disc_bytes": self.disc,
            "free_disc_bytes": self.room,
        }

    def sentences(self) -> list[str]:
        """A line each on time, memory and disc, with remarks where they are called for."""
        said = []
        if self.total is not None and self.step is not None:
            each = f"{self.step:.2g} s" if self.step < 60 else duration(self.step)
            rest = "; held-out measures and the final evaluation come on top" if self.steps_alone else ""
            said.append(f"takes about {duration(max(1, self.total))}: {self.steps:,} steps of {each}, {self.how}{rest}")
            if self.total > _LONG:
                said.append("  a GPU, a smaller --model, smaller --img_size or fewer --epochs make it shorter")
        if self.memory is not None:
            said.append(f"needs about {self.memory / _GIB:.1f} of {self.there / _GIB:.1f} GiB of memory")
            if self.memory > self.free:
                said.append(f"  which may not suffice, since {self.free / _GIB:.1f} are free now: {self.advice}")
        said.append(f"needs {size_in_words(self.disc)} of the {size_in_words(self.room)} that are free on the disc")
        return said


def forecast_run(
    settings: ResolvedSettings, training: Source, share: int, here: Cores, folder: RunFolder, endless: bool = False
) -> Forecast:
    """Measure a few steps of a run, or count what it would take where that is much.

    ``endless`` is a run whose epochs follow from the forecast.

    Nothing of it reaches the training: the weights are made for this alone, and torch's random state is put back.
    """
    if settings.device == "cpu":
        torch.set_num_threads(settings.threads)
    free, there = free_memory(settings.device) * _GIB, memory(settings.device)[1] * _GIB
    if settings.device == "cpu":
        free, there = free / here.processes, there / here.processes
    counted = refuse_too_large(settings, share, here.processes)
    # of the own GPU alone: others would be set up for it, and torch would warn
    used = [torch.cuda.current_device()] if settings.device == "cuda" else []
    steps = steps_of(settings.epochs, len(training), settings.batch_size)
    most = math.inf if endless else _TRIED * steps
    with StatusMessage("trying a few steps"), torch.random.fork_rng(devices=used), without_collectives():
        tried = try_steps(settings, share, counted, training, most)
    sizes = tried.sizes if counted is None else counted.sizes
    best = 0 if settings.patience is None else sizes.weights  # which a checkpoint has besides
    disc = 3 * (sizes.checkpoint + best) + sizes.encoder + _FILES
    room = refuse_full_disc(folder, disc)
    base = resident() if settings.device == "cpu" else 0.0
    needed = tried.memory if counted is None else base + counted.likely
    return Forecast(
        **asdict(estimated(settings, tried, here, steps)) | {"memory": needed, "disc": disc},
        how=tried.how,
        there=there,
        free=free + base,
        room=room,
        advice=smaller_steps(settings),
    )


def epochs_in(minutes: float, forecast: Forecast, settings: ResolvedSettings, images: int) -> tuple[float, str]:
    """Return the epochs that fit into ``minutes`` of training, and why; at least one step."""
    if forecast.total is None:
        raise PatchloomError("--minutes needs the pace of this machine, and it is not known: give --epochs")
    each, steps = forecast.total / forecast.steps, steps_per_epoch(images, settings.batch_size)
    why = f"{minutes:g} minutes of training, at {each:.2g} s for a step of {settings.batch_size}, {forecast.how}"
    return rounded(max(1 / steps, 60 * minutes / (each * steps))), why


def rounded(epochs: float) -> float:
    """Return epochs with four digits, and as a whole number where it is one: they are read, typed and compared."""
    short = float(f"{epochs:.4g}")
    return int(short) if short == int(short) else short


def forecast_rest(
    settings: ResolvedSettings, training: Source, folder: RunFolder, kept: bool = False
) -> Forecast | None:
    """What is left of a run that goes on, by the pace that it had; None where it made no step yet."""
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
    return Forecast(steps=steps, step=each, how="as before, with measures", steps_alone=False, disc=disc, room=room)


@dataclass(frozen=True)
class Tried:
    """Seconds of a step and of reading its images, where they come from, and the bytes that were in use."""

    step: float | None
    reading: float
    how: str
    sizes: TaskBytes
    memory: float | None


def try_steps(
    settings: ResolvedSettings, share: int, counted: Sketch | None, training: Source, most: float = math.inf
) -> Tried:
    """Take a few steps, of fewer images where all would take long, or calculate where one would be too much.

    It takes up to ``most`` steps, and never fewer than are needed.
    """
    guess = None if counted is None else _calculated(counted, settings)
    n = share
    if counted is not None:
        if counted.sizes.state > _LARGE or guess is None or guess / share > _SECONDS / 4:
            return Tried(guess, 0.0, "calculated", counted.sizes, None)
        n = min(share, max(2, int(share * _SECONDS / guess)))
    try:
        step = Step(settings, batch=n, sound=training.sound)
        seconds = typical_seconds(time_steps(step, least=_STEPS, seconds=_PERIODS, most=most, slow=_SECONDS))
    except (MemoryError, RuntimeError) as problem:  # the training will say what it lacks
        if memory_shortage(problem) is None or counted is None:
            raise
        return Tried(guess, 0.0, "calculated", counted.sizes, None)
    each, sizes = seconds * share / n, TaskBytes.of(step.task)
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


def _calculated(counted: Sketch, settings: ResolvedSettings) -> float | None:
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
        for i in sample_indices(len(source), 64, seed=0):
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


def estimated(settings: ResolvedSettings, tried: Tried, here: Cores, steps: int) -> Estimate:
    """Estimate ``steps`` whose images other processes may read on the same cores."""
    if not settings.workers or tried.step is None:
        return Estimate(steps=steps, step=tried.step, reading=tried.reading)
    shared = 0.0
    if settings.device == "cpu":
        work = tried.step * settings.threads + tried.reading
        shared = work / max(1, min(here.each, settings.threads + settings.workers))
    reading = tried.reading / settings.workers
    return Estimate(steps=steps, step=tried.step, reading=reading, apart=True, shared=shared)
