"""Forecast of the time, memory and disc space of a run, before it begins."""

from __future__ import annotations

import copy
import gc
import math
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.config import Sound
from patchloom.data.decode import Unreadable
from patchloom.data.loader import Augment, Batch, draw_views, stack, steps_of, steps_per_epoch, training_batches
from patchloom.data.reading import sample_indices
from patchloom.data.source import Source
from patchloom.data.stats import normalize, unknown_stats
from patchloom.data.workers import lost_worker
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError, TemporaryError
from patchloom.estimate import Estimate, count_step, scaled_seconds, time_steps, typical_seconds
from patchloom.nets.build import on_meta, outline
from patchloom.nets.compiling import compiling
from patchloom.nets.lora import merged
from patchloom.nets.performance import kept_bytes
from patchloom.nets.swin import patch_embedding
from patchloom.options.pretrain import Compile
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import ResolvedSettings
from patchloom.runs.task import augment_of_readers, prepare_task
from patchloom.system.device import (
    Cores,
    free_memory,
    memory,
    memory_shortage,
    resident,
    synchronize,
)
from patchloom.system.distributed import LOST, is_peer_death, without_collectives, world
from patchloom.system.files import disk_error, size_in_words
from patchloom.system.load import BackgroundLoad
from patchloom.tasks import images_needed
from patchloom.tasks.task import Task
from patchloom.train.step import autocast, pretraining_optimizer

# Memory and work of a step, estimated on the meta device and with fake tensors.


_SMALL = 64  # image side in pixels for counting the views


class TaskBytes(NamedTuple):
    """Sizes of a task in bytes.

    Attributes:
        weights: all weights and buffers.
        trained: weights with a gradient and two moments.
        checkpoint: checkpoint file, with moments.
        encoder: encoder file.
    """

    weights: int
    trained: int
    checkpoint: int
    encoder: int

    @classmethod
    def of(cls, task: Task) -> TaskBytes:
        """Measure a task, which may be on the meta device."""
        trained = _bytes(weight for weight in task.parameters() if weight.requires_grad)
        stored = _bytes(task.state_dict().values()) + 2 * trained
        encoder = _bytes(merged(task.encoder.state_dict()).values())
        return cls(_bytes([*task.parameters(), *task.buffers()]), trained, stored, encoder)

    @property
    def state(self) -> int:
        """Bytes in memory that do not depend on the number of images: weights, gradients and moments."""
        return self.weights + 3 * self.trained


class Sketch(NamedTuple):
    """Memory and work of a step.

    Attributes:
        images: number of images of the step in one process.
        sizes: sizes of the task.
        size: height and width of the task's crops.
        pixels: bytes of the images as uint8; 0 if they were not counted.
        activations: bytes saved for the backward pass; None if unknown.
        flops: operations of the matrix products, forward and backward; None if unknown.
    """

    images: int
    sizes: TaskBytes
    size: tuple[int, int]
    pixels: int = 0
    activations: int | None = None
    flops: float | None = None

    def least(self, images: int | None = None) -> float:
        """Return the bytes in memory at the start of the backward pass, for ``images`` or all images of the step."""
        share = 1.0 if images is None else images / self.images
        return self.sizes.state + share * (self.pixels + (self.activations or 0))

    @property
    def likely(self) -> float:
        """Bytes with temporary tensors: pixels as float32, and a quarter more than the saved activations."""
        return self.sizes.state + 5 * self.pixels + 1.25 * (self.activations or 0)


def upper_bound_bytes(settings: ResolvedSettings, images: int) -> float:
    """Return a quick upper bound of the bytes of a step of ``images``, from the shapes of the encoder alone."""
    vit = outline(settings.encoder_spec())
    h, w = settings.img_size
    tokens = patch_embedding(vit).num_patches
    weights = sum(weight.numel() for weight in vit.parameters())
    tables = 2 * tokens**2  # of distances between any two patches
    pixels = 4 * images * settings.channels * h * w
    return 4.0 * (16 * weights + tables + pixels) + 2 * kept_bytes(vit, images, settings.attention == "fused")


def sketch(settings: ResolvedSettings, images: int, counted: bool = True) -> Sketch:
    """Estimate memory and work of a step of ``images`` in one process, or only its sizes unless it is ``counted``.

    Uses the meta device and fake tensors, so it takes seconds for any size.
    """
    c = settings.channels
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # about fake tensors
        task = meta_task(settings)
        sizes, size = TaskBytes.of(task), task.augment.size
        if not counted:
            return Sketch(images, sizes, size)
        augment = copy.copy(task.augment)
        augment.size = (_SMALL, _SMALL)
        views = len(augment(torch.zeros(c, _SMALL, _SMALL, dtype=torch.uint8), np.random.default_rng(0)))

        def loss() -> Tensor:
            with autocast("cpu", settings.precision):
                return task(*(torch.zeros(images, c, *size) for _ in range(views)), progress=0.5).loss

        found = count_step(task, "cpu", loss)
    kept, flops = (None, None) if found is None else (found.kept, found.flops)
    return Sketch(images, sizes, size, images * views * c * math.prod(size), kept, flops)


def meta_task(settings: ResolvedSettings) -> Task:
    """Build the task of a run on the meta device, without allocating its weights."""
    plain = replace(settings, kernels="torch")  # native kernels need real tensors, and save no less
    with warnings.catch_warnings(), on_meta():
        warnings.simplefilter("ignore")  # about meta tensors that are not initialised
        return prepare_task(plain, unknown_stats(plain.channels)).train()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)


# Trial steps before a run begins: for their cost, and to see whether they fit into memory.


class RandomImages(Source):
    """Random images [n c h w] in memory."""

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
    """One training step on random images: normalising, forward, backward, clipping, optimiser, teacher.

    Args:
        settings: resolved settings.
        compiled: compile stacks of blocks and losses.
        batch: batch size instead of that of the settings.
        sound: configuration of recordings; the step is then made on noise.
    """

    def __init__(
        self,
        settings: ResolvedSettings,
        compiled: Compile = False,
        batch: int | None = None,
        sound: Sound | None = None,
    ):
        torch.manual_seed(0)
        c = settings.channels
        self.settings, self.compiled, stats = settings, compiled, unknown_stats(c, sound)
        self.task: Task = prepare_task(settings, stats).to(settings.device).train()
        self.optimizer = pretraining_optimizer(self.task, settings.weight_decay, settings.device, settings.betas)
        self._images = RandomImages(stats.modality.random(batch or settings.batch_size, c, self.task.augment.size))
        self._images.sound = stats.sound
        self.batch = self.draw(len(self._images))

    def draw(self, images: int) -> Batch:
        """Draw the views of a batch."""
        augment, c = self.task.augment, self.settings.channels
        return next(training_batches(self._images, augment, images, 0, 0, 1, 0, c))

    def __call__(self) -> None:
        kind = self.settings.device
        views = [normalize(view, self.task.mean, self.task.std) for view in self.batch.on(kind).views]
        with autocast(kind, self.settings.precision), compiling(self.compiled):
            loss = self.task(*views, progress=0.5).loss
        loss.backward()
        if self.settings.clip:
            torch.nn.utils.clip_grad_norm_(self.task.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.task.after_step(0.5)
        synchronize(kind)


# Errors from outside as one sentence: out of memory, full disc, a lost process.


@contextmanager
def explain_errors(settings: ResolvedSettings) -> Iterator[None]:
    """Raise errors that the user can fix as a `PatchloomError` that says how."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as problem:
        sentence = lost_worker(problem) or disk_error(problem)
        if sentence is None and (need := memory_shortage(problem)):  # first: NCCL may report it, too
            less = smaller_steps(settings) + ("" if settings.checkpointing else ", or try --checkpointing true")
            sentence = PatchloomError(
                f"out of memory at {settings.batch_size} images per step ({need}): {less}, with another --out"
            )
        if sentence is None and is_peer_death(problem):
            sentence = TemporaryError(LOST)
        if sentence is None:
            raise
        raise sentence from problem


def smaller_steps(settings: ResolvedSettings) -> str:
    """Return a remedy for steps that need too much memory, which the task and the processes allow."""
    if halvable(settings):
        return "halve --batch_size and double --accumulate, which keeps the number of images per update"
    return "use smaller images or a smaller --model"


def halvable(settings: ResolvedSettings) -> bool:
    """Return whether half the batch size is enough for the task and for all processes."""
    return settings.batch_size // 2 >= max(images_needed(settings.task)[0], world())


# Runs that cannot fit into memory or onto the disc are refused before they begin.

_SURE = 1 / 8  # fraction of the memory; below it the quick upper bound is enough
_MANY = 10_000  # patches per image; 4,096 is the largest number in common use


def refuse_too_large(settings: ResolvedSettings, images: int, processes: int = 1) -> Sketch | None:
    """Refuse a run with a step that does not fit into memory, before allocating any of it."""
    there = memory(settings.device)[1] * _GIB / (processes if settings.device == "cpu" else 1)
    with StatusMessage("estimating the memory of a step"), without_collectives():
        if upper_bound_bytes(settings, images) <= _SURE * there:
            return None
        counted = sketch(settings, images)
    base = resident() if settings.device == "cpu" else 0.0
    parts = world() if settings.strategy == "fsdp" else 1
    held = counted.least() - counted.sizes.state * (1 - 1 / parts) + base
    if held <= there:
        return counted
    least = max(1, images_needed(settings.task)[0])
    halves = [counted.images // 2**k for k in range(1, counted.images.bit_length()) if not counted.images % 2**k]
    fitting = next((n for n in halves if counted.least(n) + base < 0.8 * there), 0)
    patches = math.prod(settings.encoder_spec().grid)
    if patches > _MANY:
        sides = "x".join(map(str, settings.img_size))
        remedy = f"lower --img_size, since images of {sides} have {patches:,} patches, or use larger patches"
    elif fitting >= least and settings.batch_size % counted.images == 0:
        times = counted.images // fitting
        batch = settings.batch_size // counted.images * fitting
        remedy = f"use --batch_size {batch} and --accumulate {times * settings.accumulate}, or smaller images"
    elif counted.sizes.state + base > there:
        remedy = "choose a smaller --model, larger patches, or smaller images, heads and decoders"
    else:
        remedy = "choose smaller images, larger patches, or a smaller --model"
    state = f"{counted.sizes.state / _GIB:,.1f} GiB for weights, gradients and moments"
    raise PatchloomError(
        f"a step of {counted.images} images needs at least {held / _GIB:,.0f} GiB of memory ({state}), and there are "
        f"{there / _GIB:,.1f} GiB: {remedy}"
    )


def refuse_full_disc(folder: RunFolder, need: float) -> float:
    """Return the free bytes on the disc of a run's folder; refuse a run that needs more."""
    place = folder.path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        room = float(shutil.disk_usage(place).free)
    except OSError:  # writing there will fail with a message of its own
        return float("inf")
    if need > room:
        raise TemporaryError(
            f"the run needs {size_in_words(need)} for its checkpoints and the encoder, and the disc of {folder.path} "
            f"has {size_in_words(room)} free: free some space, choose another folder with --out, or a smaller --model"
        )
    return room


_GIB = 2**30
_SECONDS = 1.0  # longest trial step, and longest trial
_STEPS = 3  # fewest timed steps, after one warm-up step
_TRIED = 0.1  # largest fraction of a run's steps to try beyond those
_PERIODS = 0.5  # shortest trial in seconds: a CPU quota works in periods of 0.1 s
_FEWEST = 2  # images of the first trial step on a CPU, if the task takes so few
_READING = 0.3  # seconds for timing the reading
_FILES = 4 << 20  # bytes of pictures and tables


@dataclass(frozen=True, kw_only=True)
class Forecast(Estimate):
    """Estimate of a run, with the memory and disc space that it needs and that there are.

    Attributes:
        memory: peak bytes of memory; None if unknown.
        bounded: whether the memory is an upper bound.
        processes: number of processes on this machine.
        there: bytes of memory that one process may use; 0 if unknown.
        free: bytes of memory that are free now for one process.
        disc: bytes of two checkpoints, a third one while it is written, and the encoder.
        room: free bytes on the disc.
        advice: what to lower if memory may not suffice.
        crop: longer side of the task's crops in pixels; 0 if unknown.
    """

    memory: float | None = None
    bounded: bool = False
    processes: int = 1
    there: float = 0.0
    free: float = 0.0
    disc: float
    room: float
    advice: str = ""
    crop: int = 0

    def plain(self) -> dict[str, Any]:
        """Return values for JSON."""
        return {
            "steps": self.steps,
            "seconds": self.total,
            "step_seconds": self.step,
            "how": self.how,
            "steps_alone": self.steps_alone,
            "load": self.load.plain(),
            "memory_bytes": self.memory,
            "available_bytes": self.there,
            "disc_bytes": self.disc,
            "free_disc_bytes": self.room,
        }

    def sentences(self) -> list[str]:
        """Return a line each on time, memory and disc space, with hints where they are tight."""
        said = self.time_sentences()
        if self.memory is not None and not self.there:
            said.append(f"needs about {self.memory / _GIB:.1f} GiB of memory on each device")
        elif self.memory is not None:
            each = f" in each of {self.processes} processes" if self.processes > 1 else ""
            about = "at most" if self.bounded else "about"
            said.append(f"needs {about} {self.memory / _GIB:.1f} of {self.there / _GIB:.1f} GiB of memory{each}")
            if self.memory > self.free:
                said.append(f"  which may not suffice, since {self.free / _GIB:.1f} GiB are free now: {self.advice}")
        said.append(f"needs {size_in_words(self.disc)} of the {size_in_words(self.room)} that are free on the disc")
        return said


def forecast_run(
    settings: ResolvedSettings,
    training: Source,
    share: int,
    here: Cores,
    folder: RunFolder,
    timed: bool = True,
    endless: bool = False,
) -> Forecast:
    """Forecast a run: count its memory, and time a few steps.

    Training is not affected: the trial has its own weights, and torch's random state is restored.

    Args:
        settings: resolved settings.
        training: training images.
        share: images of a step in one process.
        here: cores of this machine.
        folder: folder of the run.
        timed: whether steps are tried; a run that is about to train has its first steps for that.
        endless: whether the epochs follow from the forecast.
    """
    free, there = free_memory(settings.device) * _GIB, memory(settings.device)[1] * _GIB
    if settings.device == "cpu":
        torch.set_num_threads(settings.threads)
        free, there = free / here.processes, there / here.processes
    counted = refuse_too_large(settings, share, here.processes) or sketch(settings, share, counted=timed)
    base = resident() if settings.device == "cpu" else 0.0
    disc = bytes_of_run(settings, counted.sizes)
    room = refuse_full_disc(folder, disc)
    bounded = counted.activations is None
    steps = steps_of(settings.epochs, len(training), settings.batch_size)
    estimate = Estimate(steps=steps, step=None)
    if timed:
        # only the GPU of this process: torch would initialise the others, and warn
        used = [torch.cuda.current_device()] if settings.device == "cuda" else []
        most = math.inf if endless else _TRIED * steps
        with torch.random.fork_rng(devices=used), without_collectives(), StatusMessage("trying a few steps"):
            estimate = try_steps(settings, share, training, here, steps, most)
    return Forecast(
        **vars(estimate),
        memory=base + (upper_bound_bytes(settings, share) if bounded else counted.likely),
        bounded=bounded,
        processes=here.processes,
        there=there,
        free=free + base,
        disc=disc,
        room=room,
        advice=smaller_steps(settings),
        crop=max(counted.size),
    )


def kept_encoders(settings: ResolvedSettings) -> int:
    """Return the number of encoder files that a run keeps beside the final one (``--keep_every``)."""
    return 0 if settings.keep_every is None else int(settings.epochs // settings.keep_every)


def bytes_of_run(settings: ResolvedSettings, sizes: TaskBytes) -> int:
    """Return the bytes of all files of a run."""
    best = 0 if settings.patience is None else sizes.weights  # the checkpoint also holds the best weights
    return 3 * (sizes.checkpoint + best) + (1 + kept_encoders(settings)) * sizes.encoder + _FILES


def forecast_elsewhere(
    settings: ResolvedSettings, training: Source, share: int, processes: int, folder: RunFolder
) -> Forecast:
    """Forecast a run on devices that this machine lacks: steps, memory of ``share`` images, and disc space."""
    with StatusMessage("estimating the memory of a step"):
        counted = sketch(settings, share)
    sizes = counted.sizes
    disc = bytes_of_run(settings, sizes)
    shards = processes if settings.strategy == "fsdp" else 1
    return Forecast(
        steps=steps_of(settings.epochs, len(training), settings.batch_size),
        step=None,
        how="",
        memory=counted.likely - sizes.state * (1 - 1 / shards),
        disc=disc,
        room=refuse_full_disc(folder, disc),
        processes=processes,
    )


def epochs_in(minutes: float, forecast: Forecast, settings: ResolvedSettings, images: int) -> tuple[float, str]:
    """Return the number of epochs that fit into ``minutes`` of training, at least one step, and the reason."""
    if forecast.total is None:
        raise PatchloomError("--minutes needs the time per step, which is unknown for this run: give --epochs")
    each, steps = forecast.total / forecast.steps, steps_per_epoch(images, settings.batch_size)
    why = f"{minutes:g} minutes of training, at {each:.2g} s per step of {settings.batch_size}, {forecast.how}"
    return rounded(max(1 / steps, 60 * minutes / (each * steps))), why


def rounded(epochs: float) -> float:
    """Round epochs to four digits, and to an int where possible: they are read, typed and compared."""
    short = float(f"{epochs:.4g}")
    return int(short) if short == int(short) else short


def forecast_rest(settings: ResolvedSettings, training: Source, folder: RunFolder, kept: bool) -> Forecast | None:
    """Forecast the rest of a resumed run from its pace so far; None if it has no checkpoint yet."""
    files = (folder.checkpoints.last, folder.checkpoints.before)
    written = [path.stat().st_size for path in files if path.exists()]
    if not written:
        return None
    # where training goes on: rows of metrics.csv may be older, and missing after a kill
    step, seconds = folder.checkpoints.progress()
    checkpoint = max(written) * (1 if step else 3)  # before the first step there are no moments
    encoder = checkpoint // 3
    there = sum(path.stat().st_size for path in folder.path.glob("encoders/*.safetensors"))
    more = max(0, kept_encoders(settings) * encoder - there)
    disc = 3 * checkpoint + encoder + more + _FILES - (0 if kept else sum(written))
    room = refuse_full_disc(folder, disc)
    steps = steps_of(settings.epochs, len(training), settings.batch_size) - step
    each = seconds / step if step else None
    return Forecast(steps=steps, step=each, how="as before, with measures", steps_alone=False, disc=disc, room=room)


def try_steps(
    settings: ResolvedSettings, share: int, training: Source, here: Cores, steps: int, most: float = math.inf
) -> Estimate:
    """Time a few steps, and reading on one core. On a CPU, a long step is extrapolated from fewer images.

    It takes at most ``most`` steps, but never fewer than the timing needs. Other processes may read the images of
    the estimated ``steps`` on the same cores.
    """
    others, step = BackgroundLoad(), Step(settings, batch=share, sound=training.sound)
    n, few = share, (0, 0.0)
    if settings.device == "cpu":
        least = min(share, max(_FEWEST, images_needed(settings.task)[0]))
        step.batch = step.draw(least)
        few = least, time_steps(step, least=1)[0]
        n = min(share, max(2 * least, int(least * _SECONDS / few[1])))
        step.batch = step.draw(n)
    taken = typical_seconds(time_steps(step, least=_STEPS, seconds=_PERIODS, most=most, slow=_SECONDS))
    seconds, load = scaled_seconds(share, few, (n, taken)), others.load()
    decoding, views = seconds_of_reading(training, augment_of_readers(step.task, settings), settings.channels)
    if settings.cache != "none":  # images are decoded in one epoch only
        decoding /= max(1, settings.epochs)
    reading = share * (decoding + views)
    del step
    gc.collect()  # modules are in reference cycles
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    shared = 0.0
    if settings.workers and settings.device == "cpu":
        work = seconds * settings.threads + reading
        shared = work / max(1, min(here.each, settings.threads + settings.workers))
    return Estimate(
        steps=steps,
        step=seconds,
        reading=reading / max(1, settings.workers),
        apart=settings.workers > 0,
        shared=shared,
        how="measured without compiling" if settings.compile else "measured",
        load=load,
    )


def seconds_of_reading(source: Source, augment: Augment, channels: int) -> tuple[float, float]:
    """Return the seconds in which one worker process, with one thread, decodes an image, and makes its views."""
    rng, threads, done, decoding, views = np.random.default_rng(0), torch.get_num_threads(), 0, 0.0, 0.0
    last: Unreadable | None = None
    torch.set_num_threads(1)
    start = time.perf_counter()
    try:
        for i in sample_indices(len(source), 64, seed=0):
            begun = time.perf_counter()
            try:
                image = source.read_as(i, channels)
            except Unreadable as error:
                last = error
                continue
            read = time.perf_counter()
            stack([draw_views(augment, image, rng)[0]])
            decoding, views = decoding + read - begun, views + time.perf_counter() - read
            done += 1
            if time.perf_counter() - start > _READING:
                break
    finally:
        torch.set_num_threads(threads)
    if not done and last is not None:  # training would end as well
        raise PatchloomError(f"none of the sampled {source.noun} of {source.name} can be read; the last one: {last}")
    return decoding / max(1, done), views / max(1, done)
