"""``bench``: training speed of each task on this machine, fraction of its peak, and the bottleneck of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor

from patchloom.data.loader import training_batches
from patchloom.data.source import Source
from patchloom.data.sources.open import open_data
from patchloom.data.stats import Stats
from patchloom.display import Displayable, StatusMessage, TextTable, print_line
from patchloom.errors import PatchloomError
from patchloom.estimate import seconds_of
from patchloom.options import verbs
from patchloom.options.declare import verb
from patchloom.options.pretrain import Compile
from patchloom.options.values import comma_words
from patchloom.runs.settings import ResolvedSettings, Settings, request
from patchloom.runs.task import augment_of_readers
from patchloom.sizes import in_pixels
from patchloom.system.device import float32_products, keep_freed_memory
from patchloom.system.load import BackgroundLoad, Load
from patchloom.tasks import ready_tasks
from patchloom.tasks.custom import label
from patchloom.tasks.task import Task
from patchloom.train.estimate import Step, halvable, refuse_too_large, sketch
from patchloom.train.resolve import measure_data, resolve

_READING = 3.0  # seconds for timing the reading
_WORTH = 1.05  # smaller gains of compiling are noise
_COUNTED = 2  # images for counting operations, which are the same for each image


@dataclass(frozen=True)
class StepSpeed:
    """Speed of a task's training step.

    Attributes:
        task: name of the task.
        compiled: whether its blocks were compiled.
        seconds: seconds of each timed step, with gradient clipping, optimiser and teacher.
        images: images per step.
        flops: operations per image in matrix products, forward and backward, as torch counts them; None if unknown.
        memory: memory of a step in GiB, counted as for a run's plan, without imported libraries; None if unknown.
        data: images per second that are read and augmented.
    """

    task: str
    compiled: Compile
    seconds: tuple[float, ...]
    images: int
    flops: float | None
    memory: float | None
    data: float

    @property
    def rate(self) -> float:
        """Images per second, if reading is not the bottleneck."""
        return self.images / statistics.median(self.seconds)


@dataclass(frozen=True, repr=False)
class Bench(Displayable):
    """Result of `bench`.

    Attributes:
        settings: settings of the first task; those of others hardly differ.
        peaks: operations per second of large matrix products, by dtype.
        paces: speeds of the tasks.
        load: load by other programs while the steps were timed.
    """

    settings: ResolvedSettings
    peaks: dict[str, float]
    paces: tuple[StepSpeed, ...]
    load: Load = Load()

    def parts(self, width: int) -> list[str | TextTable]:
        rows = self.table()
        return [*self.sentences(), "", TextTable.of(rows, texts=[len(rows[0]) - 1])]

    def plain(self) -> dict[str, Any]:
        return {
            "settings": self.settings.plain(),
            "torch": torch.__version__,
            "peak_flops_per_second": self.peaks,
            "load": self.load.plain(),
            "tasks": [
                {
                    "task": pace.task,
                    "compiled": pace.compiled,
                    "seconds": list(pace.seconds),
                    "images_per_step": pace.images,
                    "images_per_second": pace.rate,
                    "flops_per_image": pace.flops,
                    "fraction_of_peak": self.share(pace),
                    "memory_bytes": None if pace.memory is None else round(pace.memory * 2**30),
                    "data_images_per_second": pace.data,
                    "limit": self.limit(pace),
                }
                for pace in self.paces
            ],
        }

    def share(self, pace: StepSpeed) -> float | None:
        """Return the fraction of the peak of matrix products that a step reaches; None if unknown."""
        return None if pace.flops is None else pace.rate * pace.flops / self.peaks[self.settings.precision]

    def limit(self, pace: StepSpeed) -> str:
        """Return the bottleneck of a run of this task."""
        if not self.settings.workers:  # one process reads and computes in turn
            reading = pace.rate / (pace.data + pace.rate)
            return f"model (reading takes {reading:.0%} of the time)" if reading < 0.5 else "data: raise --workers"
        if pace.data < pace.rate:
            return f"data, by ×{pace.rate / pace.data:.1f}: raise --workers, or use --cache"
        return f"model (reading is ×{pace.data / pace.rate:.1f} as fast)"

    def sentences(self) -> list[str]:
        """Return sentences on the settings of the measurement."""
        s = self.settings
        peaks = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, rate in self.peaks.items())
        threads = f", {s.threads} threads" if s.device == "cpu" else ""
        sizes = f"images of {in_pixels(s.img_size)}, patches of {in_pixels(s.patch_size)}, batches of {s.batch_size}"
        busy = self.load.sentence()
        said = [
            f"Large matrix products: {peaks} (torch {torch.__version__}, {s.device}{threads}).",
            f"{s.model['name']}, {sizes}, {s.precision}, {s.attention} attention, {s.kernels} kernels, "
            f"{s.workers} workers. Steps of the tasks are timed in turn; times are medians.",
            *([f"{busy[0].upper()}{busy[1:]}."] if busy else []),
        ]
        if gains := [two.rate / one.rate for one, two in pairwise(self.paces) if two.compiled]:
            advice = "give pretrain --compile true" if min(gains) > _WORTH else "leave out --compile"
            said.append(f"Compiled steps are ×{min(gains):.2f} to ×{max(gains):.2f} as fast: {advice}.")
        return said

    def table(self) -> list[tuple[str, ...]]:
        heading = "task", "s/step", "range", "images/s", "GFLOP/image", "of peak", "GiB", "data images/s", "limit"
        rows: list[tuple[str, ...]] = [heading]
        for pace in self.paces:
            seconds = f"{statistics.median(pace.seconds):.3f}", f"{min(pace.seconds):.3f}-{max(pace.seconds):.3f}"
            share = self.share(pace)
            work = ("", "") if pace.flops is None or share is None else (f"{pace.flops / 1e9:.3g}", f"{share:.0%}")
            memory = "" if pace.memory is None else f"{pace.memory:.2f}"
            name = f"{pace.task}, compiled" if pace.compiled else pace.task
            rows.append((name, *seconds, f"{pace.rate:,.0f}", *work, memory, f"{pace.data:,.0f}", self.limit(pace)))
        return rows


@verb(verbs.Bench)
def bench(options: verbs.Bench) -> Bench:
    """Time a training step of each task on this machine, with its peak speed and the speed of reading.

    Raises:
        PatchloomError: unknown data or task, incompatible settings, or too little memory.
    """
    keep_freed_memory()
    tasks, rounds = options.tasks, options.rounds
    names = ready_tasks() if tasks is None else comma_words(tasks) if isinstance(tasks, str) else list(tasks)
    if not names:
        raise PatchloomError("--tasks names no task: give one or more, or leave it out for all")
    asked = [request(options.data, name, options.settings()) for name in names]
    source = open_data(options.data).train
    channels, stats = measure_data(asked[0], source, sample=100)
    source = source.heard_as(stats.sound)
    each = _resolved(asked, len(source), channels, stats, explicit=tasks is not None)
    if each[0].device == "cpu":
        torch.set_num_threads(each[0].threads)
    refuse_too_large(each[0], each[0].batch_size)  # encoder and images are the same for all tasks
    try:
        with StatusMessage("building the tasks"):
            forms = (False, True) if options.compile else (False,)
            built = [Step(settings, compiled, sound=source.sound) for settings in each for compiled in forms]
        others = BackgroundLoad()
        with StatusMessage("timing steps", (rounds + 1) * len(built)) as waiting:
            ways = {i: partial(_counted, step, waiting) for i, step in enumerate(built)}
            with float32_products(each[0].precision == "tf32"):
                seconds = seconds_of(ways, each[0].device, rounds)
        load = others.load()
        with StatusMessage("multiplying large matrices"):
            # right after the steps: the speed of a machine varies
            dtypes = dict.fromkeys(("float32", "bfloat16", each[0].precision))
            peaks: dict[str, float] = {dtype: product_rate(each[0].device, dtype) for dtype in dtypes}
    except torch.OutOfMemoryError as problem:
        less = "halve --batch_size" if all(map(halvable, each)) else "use smaller images or a smaller --model"
        raise PatchloomError(
            f"the device has too little memory for {each[0].batch_size} images at once: {less}, or name fewer --tasks, "
            "since all of them are in memory"
        ) from problem
    paces: list[StepSpeed] = []
    for i, step in enumerate(built):
        own, task = step.settings, label(step.settings.task["name"])
        if not step.compiled:  # compiling changes none of these
            said = f"{task}: counting operations and memory, and timing how fast images are read"
            with StatusMessage(f"{said}, task {i + 1} of {len(built)}"):
                counted = sketch(own, own.batch_size)
                memory = None if counted.activations is None else counted.likely / 2**30
                known = flops_per_image(own), memory, reading_rate(source, step.task, own)
        paces.append(StepSpeed(task, step.compiled, tuple(seconds[i]), own.batch_size, *known))
    return Bench(each[0], peaks, tuple(paces), load)


def _resolved(asked: Sequence[Settings], n: int, channels: int, stats: Stats, explicit: bool) -> list[ResolvedSettings]:
    """Return the resolved settings of each task.

    A task that does not suit the images is left out, with a line, unless the user named it or none is left.
    """
    found: list[ResolvedSettings] = []
    refused: list[tuple[str, PatchloomError]] = []
    for one in asked:
        try:
            found.append(resolve(one, n, channels, stats)[0])
        except PatchloomError as problem:
            if explicit:
                raise
            refused.append((label(one.task["name"]), problem))
    if not found:
        raise refused[0][1]
    for name, why in refused:
        print_line(f"{name} is left out: {why}")
    return found


def _counted(step: Step, waiting: StatusMessage) -> None:
    step()
    waiting.advance()


def flops_per_image(settings: ResolvedSettings) -> float | None:
    """Count the operations per image in the matrix products of a step; None if the task needs real tensors."""
    # a fused backward pass multiplies queries and keys once more
    plain = replace(settings, attention="explicit", checkpointing=False)
    counted = sketch(plain, _COUNTED).flops
    return None if counted is None else counted / _COUNTED


def reading_rate(source: Source, task: Task, settings: ResolvedSettings) -> float:
    """Return how many images per second are read and augmented as in training."""
    batch = min(settings.batch_size, len(source))
    steps = 10**6  # more than fit into the time
    shape = settings.workers, settings.channels
    batches: Any = training_batches(source, augment_of_readers(task, settings), batch, 0, 0, steps, *shape)
    next(batches)  # the workers start
    start, done = time.perf_counter(), 0
    for _ in islice(batches, 200):
        done += batch
        if time.perf_counter() - start > _READING:
            break
    return done / (time.perf_counter() - start)


# Speed of matrix products.


_SMALLEST, _AFFORDABLE = 128, 0.5  # rows of the first product that is tried; seconds that a product may take


def product(device: str, dtype: str, size: int) -> Callable[[], Tensor]:
    """Return a function that multiplies two size x size matrices: 2 size³ operations; ``dtype`` may be tf32."""
    tf32 = dtype == "tf32"
    kind = torch.float32 if tf32 else getattr(torch, dtype)
    one, two = (torch.randn(size, size, device=device).to(kind) for _ in range(2))

    def multiply() -> Tensor:
        with float32_products(tf32):
            return one @ two

    return multiply


def product_rate(device: str, dtype: str) -> float:
    """Return the floating-point operations per second of products of large matrices.

    They are smaller for a dtype for which the device has no instructions, which would take minutes.
    """
    size, most = _SMALLEST, 2048 if device == "cpu" else 8192
    while size < most and 8 * _seconds_of_product(device, dtype, size, 1) <= _AFFORDABLE:
        size *= 2
    return 2 * size**3 / _seconds_of_product(device, dtype, size, 5)


def _seconds_of_product(device: str, dtype: str, size: int, rounds: int) -> float:
    return statistics.median(seconds_of({"": product(device, dtype, size)}, device, rounds)[""])
