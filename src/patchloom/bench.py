"""``bench``: how fast this machine trains each task, how near that is to what it can do, and what limits a run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from patchloom.arguments import validate_arguments
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.sources.open import open_data
from patchloom.display import Displayable, StatusMessage, TextTable
from patchloom.errors import PatchloomError
from patchloom.nets.performance import fuse_attention
from patchloom.runs.settings import ResolvedSettings, request
from patchloom.sizes import PatchSize, in_pixels
from patchloom.system.hardware import compile_gain, keep_freed_memory, product_rates, seconds_of
from patchloom.tasks import ready_tasks
from patchloom.tasks.custom import label
from patchloom.train.estimate import Step, halvable, memory_of, reading_rate, refuse_too_large
from patchloom.train.resolve import measure_data, resolve

_COUNTED = 2  # images whose operations are counted; they are the same for each


@dataclass(frozen=True)
class StepSpeed:
    """How fast one task's step is.

    Attributes:
        task: its name.
        compiled: whether its blocks were compiled.
        seconds: of every step that was timed, gradient clipping, the optimiser and the teacher included.
        images: of a step.
        flops: floating-point operations an image in matrix products, there and back, as torch counts them.
        memory: GiB that two steps need at their peak beyond what the imports hold; None where that is unknown.
        data: images a second that are read and augmented for it.
    """

    task: str
    compiled: bool
    seconds: tuple[float, ...]
    images: int
    flops: float
    memory: float | None
    data: float

    @property
    def rate(self) -> float:
        """Images a second, if data were no limit."""
        return self.images / statistics.median(self.seconds)


@dataclass(frozen=True, repr=False)
class Bench(Displayable):
    """What `bench` measured.

    Attributes:
        settings: with which; of one task, since they hardly differ between tasks.
        peaks: floating-point operations a second of large matrix products, by dtype.
        paces: of the tasks.
    """

    settings: ResolvedSettings
    peaks: dict[str, float]
    paces: tuple[StepSpeed, ...]

    def parts(self, width: int) -> list[str | TextTable]:
        """See `Displayable`."""
        rows = self.table()
        return [*self.sentences(), "", TextTable.of(rows, texts=[len(rows[0]) - 1])]

    def plain(self) -> dict[str, Any]:
        """See `Displayable`."""
        return {
            "settings": self.settings.plain(),
            "torch": torch.__version__,
            "peak_flops_per_second": self.peaks,
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

    def share(self, pace: StepSpeed) -> float:
        """Of the product peak that a step reaches."""
        return pace.rate * pace.flops / self.peaks[self.settings.precision]

    def limit(self, pace: StepSpeed) -> str:
        """What a run of this task waits for."""
        if not self.settings.workers:  # one process does both, in turns
            reading = pace.rate / (pace.data + pace.rate)
            return f"model ({reading:.0%} of the time for reading)" if reading < 0.5 else "data: raise --workers"
        if pace.data < pace.rate:
            return f"data, by ×{pace.rate / pace.data:.1f}: raise --workers, or use --cache"
        return f"model (data could give ×{pace.data / pace.rate:.1f})"

    def sentences(self) -> list[str]:
        """What was measured, and how."""
        s = self.settings
        peaks = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, rate in self.peaks.items())
        threads = f", {s.threads} threads" if s.device == "cpu" else ""
        sizes = f"images of {in_pixels(s.img_size)}, patches of {in_pixels(s.patch_size)}, batches of {s.batch_size}"
        return [
            f"Large matrix products: {peaks} (torch {torch.__version__}, {s.device}{threads}).",
            f"{s.model['name']}, {sizes}, {s.precision}, {s.attention} attention, {s.kernels} kernels, "
            f"{s.workers} workers. Steps are timed in turns; the median counts.",
        ]

    def table(self) -> list[tuple[str, ...]]:
        """A heading, and a row for each of the paces."""
        heading = "task", "s a step", "range", "images/s", "GFLOP/image", "of peak", "GiB", "data images/s", "limit"
        rows: list[tuple[str, ...]] = [heading]
        for pace in self.paces:
            seconds = f"{statistics.median(pace.seconds):.3f}", f"{min(pace.seconds):.3f}-{max(pace.seconds):.3f}"
            memory = "" if pace.memory is None else f"{pace.memory:.2f}"
            work = f"{pace.rate:,.0f}", f"{pace.flops / 1e9:.3g}", f"{self.share(pace):.0%}", memory
            name = f"{pace.task}, compiled" if pace.compiled else pace.task
            rows.append((name, *seconds, *work, f"{pace.data:,.0f}", self.limit(pace)))
        return rows


@validate_arguments
def bench(
    data: DataLike = "shapes",
    *,
    tasks: str | list[str] | None = None,
    model: str = "auto",
    img_size: int | tuple[int, int] | Literal["auto"] = "auto",
    patch_size: PatchSize | Literal["auto"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
    device: Literal["cpu", "cuda", "mps", "auto"] = "auto",
    precision: Literal["float32", "bfloat16", "float16", "auto"] = "auto",
    attention: Literal["fused", "explicit", "auto"] = "auto",
    kernels: Literal["torch", "native", "auto"] = "auto",
    workers: int | Literal["auto"] = "auto",
    threads: int | Literal["auto"] = "auto",
    checkpointing: bool = False,
    compile: bool = False,
    rounds: int = 5,
) -> Bench:
    """Time a training step of each task on this machine, beside its products' peak and the pace of the data.

    Args:
        data: images, as pretrain takes them.
        tasks: names with commas between; all that need no option, if absent.
        model: nano, micro, mini, or a timm ViT. What is left open, of this and the rest, is as pretrain would choose.
        img_size: pixels of a side; 64x128 is height x width.
        patch_size: side of a patch in pixels; 40x1 is rows x columns.
        batch_size: images a step.
        device: what computes; auto takes a GPU where there is one.
        precision: of matrix products: float32, bfloat16, or float16.
        attention: by torch's fused kernel, or an explicit softmax.
        kernels: torch's, or native ones for bfloat16 on a CPU.
        workers: processes that read images.
        threads: CPU threads of the training process.
        checkpointing: compute activations again instead of keeping them.
        compile: time each task with compiled blocks, too; what that brings is remembered, and decides pretrain's auto.
        rounds: steps that are timed of each.

    Raises:
        PatchloomError: no such data or task, settings that do not go together, or too little memory.
    """
    keep_freed_memory()
    names = ready_tasks() if tasks is None else tasks.split(",") if isinstance(tasks, str) else list(tasks)
    given: dict[str, Any] = {"img_size": img_size, "patch_size": patch_size, "batch_size": batch_size, "device": device}
    given |= {"precision": precision, "attention": attention, "kernels": kernels, "workers": workers}
    given |= {"threads": threads, "checkpointing": checkpointing, "compile": compile, "model": model}
    if rounds < 1 or not names:
        raise PatchloomError("--rounds and the number of --tasks must be 1 or more")
    asked = [request(data, name, given) for name in names]
    source = open_data(data).train
    channels, stats = measure_data(asked[0], source, sample=100)
    source = source.heard_as(stats.sound)
    each = [resolve(one, len(source), channels, stats)[0] for one in asked]
    if each[0].device == "cpu":
        torch.set_num_threads(each[0].threads)
    refuse_too_large(each[0], each[0].batch_size)  # the encoder and the images, which all of them have
    forms = [(settings, compiled) for settings in each for compiled in (False, True)[: 1 + compile]]
    try:
        with StatusMessage("building the tasks"):
            built = [Step(settings, compiled, sound=source.sound) for settings, compiled in forms]
        with StatusMessage("timing steps", (rounds + 1) * len(forms)) as waiting:
            ways = {i: partial(_counted, step, waiting) for i, step in enumerate(built)}
            seconds = seconds_of(ways, each[0].device, rounds)
        with StatusMessage("multiplying large matrices"):
            dtypes = dict.fromkeys(("float32", "bfloat16", each[0].precision))
            peaks = product_rates(each[0].device, dtypes=[*dtypes])  # at once: a machine is not always equally fast
    except torch.OutOfMemoryError as problem:
        less = "halve --batch_size" if all(map(halvable, each)) else "use smaller images or a smaller --model"
        raise PatchloomError(
            f"the device has too little memory for {each[0].batch_size} images at once: {less}, or name fewer --tasks, "
            "since all of them are in memory"
        ) from problem
    paces: list[StepSpeed] = []
    for i, (settings, compiled) in enumerate(forms):
        task, nth = label(settings.task["name"]), f"task {i + 1} of {len(forms)}"
        if not compiled:  # neither depends on whether the blocks are compiled
            with StatusMessage(f"{task}: counting operations, and timing how fast images are read, {nth}"):
                flops, data_rate = flops_per_image(settings), reading_rate(source, built[i].task, settings)
        try:
            with StatusMessage(f"{task}: measuring its memory in a process of its own, {nth}"):
                memory = memory_of(settings, compiled, source.sound)
        except PatchloomError:  # the times were measured, and shall not be lost
            memory = None
        step = task, compiled, tuple(seconds[i]), settings.batch_size
        paces.append(StepSpeed(*step, flops, memory, data_rate))
    done = Bench(each[0], peaks, tuple(paces))
    if compile:
        gains = [two.rate / one.rate for one, two in zip(paces[::2], paces[1::2], strict=True)]
        s = done.settings
        compile_gain(s.device, s.precision, s.model["name"], s.kernels, s.threads, lambda: min(gains))
    return done


def _counted(step: Step, waiting: StatusMessage) -> None:
    step()
    waiting.advance()


def flops_per_image(settings: ResolvedSettings) -> float:
    """Floating-point operations an image of a step's matrix products, there and back."""
    step = Step(replace(settings, device="cpu", checkpointing=False, kernels="torch"), batch=_COUNTED)
    fuse_attention(step.task, False)  # torch counts no fused attention on CPUs
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops() / _COUNTED
