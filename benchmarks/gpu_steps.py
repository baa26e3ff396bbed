"""Phases of `gpu.py` on single steps: the machine, every task, a peer, a profile; and the file of their GFLOP."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu import ROOT, SIZES, Call
from peers import DEPTH, Peer, installed, operations_of
from step_time import settings_for
from torch import profiler
from torch._dynamo.utils import counters

from patchloom.data.augment import ColorPlan
from patchloom.data.loader import Batch
from patchloom.estimate import seconds_of
from patchloom.options.pretrain import Compile
from patchloom.runs.settings import ResolvedSettings
from patchloom.system.device import (
    choose_precision,
    cores,
    keep_freed_memory,
    memory,
    processor,
)
from patchloom.system.files import write_whole
from patchloom.tasks import ready_tasks
from patchloom.train import estimate

FIRST = ("mae", "droppos")
MODELS = {"S": "vit_small_patch16_224", "B": "vit_base_patch16_224", "L": "vit_large_patch16_224"}
TINY: dict[str, Any] = {"model": {"name": "nano", "embed_dim": 32, "depth": 1, "num_heads": 2}}
TINY |= {"img_size": 32, "patch_size": 8, "attention": "fused", "kernels": "torch", "threads": 1, "workers": 0}
PEER = "hf mae (sdpa)"
GFLOP = Path(__file__).with_name("gpu_gflop.json")
# TFLOP/s of dense products by the makers' data sheets, in bfloat16 with sums in float32 (float16 where there is no
# bfloat16); the first name that the GPU's contains
DATA_SHEETS = {
    "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200 NVL": 835, "H200": 989, "A100": 312, "L40S": 362, "L4": 121,
    "A10": 125, "RTX 4090": 165, "T4": 65, "V100": 125,
}  # fmt: skip
# Images per second on an H100 by a roofline, eager and with compiled blocks: matrix products at 400 and 450 TFLOP/s for
# the widths 384 and 512, 500 for 768 and 560 for 1024, all else at 2.6 TB/s, with 238 d bytes per token and block that
# an eager block moves beside its products, and 174 d that a compiled one moves; batch 256, bfloat16. Estimated.
ROOFLINE = {
    "S mae": (5_400, 6_400),
    "S droppos": (10_100, 12_000),
    "B mae": (4_100, 4_700),
    "B droppos": (4_300, 4_900),
    "L mae": (2_300, 2_600),
    "L droppos": (1_500, 1_700),
}
AHEAD = "1.05 to 1.10"  # our eager MAE over Hugging Face's, which computes all outputs of its last decoder block
PACKAGES = ("torch", "torchvision", "timm", "transformers", "triton", "numpy", "pillow", "lightning-fabric", "pytest")
_SECONDS = 1.3  # of timing a step
_FEWEST, _MOST = 5, 40  # timed steps
_QUEUED = 8  # steps without a wait between them
_ROUNDS = 12  # of peers, in turns
_COMPILING = 6  # processes that compile at once: each holds a step on the GPU, 4 to 13 GiB at 256 images


# The machine.


def data_sheet(name: str) -> float | None:
    """Return the TFLOP/s in a GPU's data sheet; None if we do not know it."""
    words = f" {name.replace('-', ' ')} "
    if "Laptop" in words:  # slower parts under the same numbers
        return None
    return next((rate for known, rate in DATA_SHEETS.items() if f" {known} " in words), None)


def share_of_peak(tflops: float, device: str) -> float | None:
    """Return the fraction of the data sheet's rate; None if it is unknown."""
    sheet = data_sheet(torch.cuda.get_device_name()) if device == "cuda" else None
    return sheet and tflops / sheet


def describe_machine(device: str) -> dict[str, Any]:
    """Return the machine, the versions of what runs on it, and the commit of the code if git knows it."""
    found: dict[str, Any] = {"device": processor("model name") or platform.machine(), "cores": cores()}
    if device == "cuda":
        found |= {"device": torch.cuda.get_device_name(), "CUDA": torch.version.cuda}
    found |= {"GiB": round(memory(device)[1], 1), "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    with suppress(OSError):
        words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        found["commit"] = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    return found


def machine(call: Call) -> None:
    """Measure the rates of large products and of those of a block, and of copies."""
    device = call.device
    with call.row("versions") as figures:
        trial = {"trial": "in miniature on a CPU: the figures have no meaning"} if call.tiny else {}
        figures["about"] = trial | describe_machine(device)
    # a large one, then encoder and decoder of MAE at S and B: tokens of 256 images, width, and width of the MLP
    blocks = (12800, 384, 1536), (50432, 512, 2048), (12800, 768, 3072), (50432, 768, 3072)
    for sides in ((8192, 8192, 8192), *blocks):
        with call.row(f"product {' x '.join(map(str, sides))}, bfloat16") as figures:
            m, k, n = (64, 64, 64) if call.tiny else sides
            one, two = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((m, k), (k, n)))
            times = seconds_of({"": lambda one=one, two=two: [one @ two for _ in range(20)]}, device)[""]
            tflops = 20 * 2e-12 * m * k * n / statistics.median(times)
            figures |= {"TFLOP/s": tflops, "of_peak": share_of_peak(tflops, device)}
    there = torch.empty(2**20 if call.tiny else 2**30, dtype=torch.uint8, device=device).random_()
    pinned = torch.empty(len(there) // 4, dtype=torch.uint8, pin_memory=not call.tiny)
    copies = {"copy within the memory, read and write": (there.clone, 2 * len(there))}
    copies["copy from pinned memory"] = lambda: there[: len(pinned)].copy_(pinned, non_blocking=True), len(pinned)
    for name, (copy, size) in copies.items():
        with call.row(name) as figures:
            figures["GB/s"] = size / statistics.median(seconds_of({"": copy}, device)[""]) / 1e9


# Steps of every task.


def settings_of(call: Call, task: str, size: str) -> ResolvedSettings:
    """Return the settings of a task at the sizes of this benchmark."""
    precision = choose_precision(call.device)[0]
    if call.tiny:
        return settings_for(task, call.device, 4, precision, **TINY)
    return settings_for(task, call.device, call.batch, precision, model=MODELS[size], workers=8, threads=8)


def build_step(settings: ResolvedSettings, compiled: Compile = False) -> estimate.Step:
    """Make a step whose images are on the device already: reading and copying are measured separately."""
    keep_freed_memory()  # as training does
    few = min(settings.batch_size, 32)  # drawing more takes seconds
    step = estimate.Step(settings, compiled, batch=few)
    step.batch = repeat_batch(step.batch, max(1, settings.batch_size // few), settings.device)
    return step


def repeat_batch(batch: Batch, times: int, device: str) -> Batch:
    """Return a batch, repeated, on the device."""
    views = tuple(torch.cat([view.to(device)] * times) for view in batch.views)
    colors = batch.colors and tuple(repeat_plan(plan, times, len(batch.indices)) for plan in batch.colors)
    return batch._replace(views=views, colors=colors, indices=torch.cat([batch.indices] * times))


def repeat_plan(plan: ColorPlan, times: int, images: int) -> ColorPlan:
    """Return the colour changes of a batch, repeated as its images are."""
    counts = [count for _, count in plan.changes]
    rows = [torch.cat([part + i * images for i in range(times)]) for part in plan.rows.split(counts)]
    factors = [part.repeat(times) for part in plan.factors.split(counts)]
    changes = tuple((name, times * count) for name, count in plan.changes)
    return ColorPlan(torch.cat([plan.rows[:0], *rows]), torch.cat([plan.factors[:0], *factors]), changes)


@contextmanager
def waits(device: str) -> Iterator[Counter[str]]:
    """Count the points at which the CPU waits for the GPU inside this block, by line of code."""
    places: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    for one in caught:
        if "called a synchronizing CUDA operation" in str(one.message):
            path = Path(one.filename)
            places[f"{path.parent.name}/{path.name}:{one.lineno}"] += 1


def seconds_for(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def compile_row(call: Call, compiled: Compile, row: tuple[str, str]) -> None:
    """Make a compiled step, whose kernels stay in the cache that all processes share."""
    size, task = row
    step = build_step(settings_of(call, task, size), compiled)
    step(), step()


def compile_beside(call: Call, compiled: Compile, rows: Iterable[tuple[str, str]]) -> None:
    """Compile the steps of rows in several processes at once, since torch.compile uses little more than a core."""
    with ProcessPoolExecutor(_COMPILING, get_context("spawn")) as pool:
        for future in [pool.submit(compile_row, call, compiled, row) for row in rows]:
            with suppress(Exception):  # the row itself will meet it again, and say so
                future.result()


def measure(call: Call, size: str, task: str, compiled: Compile) -> dict[str, Any]:
    """Time a step with its images on the device.

    Returns:
        Milliseconds of a step; those in which the CPU has asked for it; those of steps that are queued without waiting
        for each other, which are the least that a loop without waits could take; peak memory; waits by line.
    """
    device, settings = call.device, settings_of(call, task, size)
    counters.clear()
    begun = time.perf_counter()
    step = build_step(settings, compiled)
    building = time.perf_counter() - begun
    reset_peak(device)
    warming = seconds_for(step) + seconds_for(step)  # which compiles
    times: list[float] = []
    fewest = 2 if call.tiny else _FEWEST
    while len(times) < fewest or (sum(times) < _SECONDS and len(times) < _MOST and not call.tiny):
        times.append(seconds_for(step))
    with waits(device) as places:
        step()
    synchronize, queued = estimate.synchronize, 2 if call.tiny else _QUEUED
    with patch.object(estimate, "synchronize", lambda device: None):
        asked = seconds_for(step)
        synchronize(device)
        ahead = seconds_for(lambda: ([step() for _ in range(queued)], synchronize(device))) / queued
    name = f"{size} {task}"
    found = rates(call, name, times, len(step.batch.indices)) | {"GiB": peak(device)}
    found |= {"CPU_ms": 1e3 * asked, "queued_ms": 1e3 * ahead, "seconds before": building + warming}
    found |= {"waits": sum(places.values())} | ({"where": dict(places.most_common(4))} if places else {})
    if name in ROOFLINE:
        found["H100_roofline"] = ROOFLINE[name][bool(compiled)]
    if compiled:
        found["graphs"] = counters["stats"]["unique_graphs"]
        if eager := call.rows.of("eager").get(name, {}).get("images/s"):
            found["over_eager"] = found["images/s"] / eager
    return found


def reset_peak(device: str) -> None:
    """Forget the peak so far."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> float | None:
    """Return the most GiB that were in use since `reset_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


def rates(call: Call, name: str, times: list[float], batch: int) -> dict[str, Any]:
    """Return the figures that follow from the seconds of a step, and from the GFLOP of the file."""
    median = statistics.median(times)
    found = {"batch": batch, "images/s": batch / median, "ms": 1e3 * median}
    found |= {"least": 1e3 * min(times), "most": 1e3 * max(times)}
    if (gflop := read_gflop().get(name)) and not call.tiny:  # the file has no sizes of a trial
        tflops = batch * gflop / median / 1e3
        found |= {"GFLOP": gflop, "TFLOP/s": tflops, "of_peak": share_of_peak(tflops, call.device)}
    return found


def steps(call: Call) -> None:
    """Measure steps: eager ones, compiled ones of the first two tasks, as CUDA graphs too, or the rest of those.

    The first two tasks come first at all sizes. A compiled step takes up to a minute before it can be timed: those of
    the first two tasks are compiled beside each other.
    """
    compiled: Compile = "graphs" if call.phase == "graphs" else call.phase != "eager"
    before = call.rows.of("compiled")
    tasks = call.tasks or (*FIRST, *(name for name in ready_tasks() if name not in FIRST))
    todo = [(size, task) for task in tasks[:2] for size in call.sizes]
    if call.phase in ("eager", "rest"):
        todo += [(size, task) for size in call.sizes for task in tasks[2:]]
    rows = {f"{size} {task}": (size, task) for size, task in todo}
    if call.phase == "rest":
        rows = {name: row for name, row in rows.items() if before.get(name, {}).get("state") not in ("done", "failed")}
    if call.phase in ("compiled", "graphs") and not call.tiny:
        compile_beside(call, compiled, rows.values())
    for name in call.open_rows(rows, 25 if call.phase == "rest" else 6):
        with call.row(name) as figures:
            figures |= measure(call, *rows[name], compiled)
        gc.collect()  # modules are in reference cycles
        if call.device == "cuda":
            torch.cuda.empty_cache()
        if compiled:
            torch._dynamo.reset()


# A peer, and a profile.


def peers(call: Call) -> None:
    """Time Hugging Face's MAE and ours in turns, with the same images per step and the same decoder."""
    for size in call.open_rows(call.sizes, 15):
        ours = settings_of(call, "mae", size)
        device, batch = ours.device, ours.batch_size
        sizes = ("nano", 1) if call.tiny else (MODELS[size], DEPTH)
        makes = {"mae": partial(build_step, ours)}
        if installed(PEER):
            makes[PEER] = partial(Peer, PEER, ours.precision, device, batch, *sizes)
        ways: dict[str, Callable[[], None]] = {}
        times: dict[str, list[float]] = {}
        needed: dict[str, float | None] = {}
        with call.row(size):
            for name, make in makes.items():
                reset_peak(device)
                before = peak(device)
                ways[name] = make()
                seconds_of({"": ways[name]}, device, 1)  # two steps
                needed[name] = peak(device) and peak(device) - before
            times = seconds_of(ways, device, 1 if call.tiny else _ROUNDS)
        for name, values in times.items():
            found = rates(call, f"{size} {name}", values, batch) | {"GiB": needed[name]}
            found["ours_over_it"] = statistics.median(values) / statistics.median(times["mae"])
            call.rows.note(call.phase, f"{size} {name}", **found | ({"expected": AHEAD} if name == PEER else {}))
        ways.clear()
        gc.collect()


def profile(call: Call) -> None:
    """Write the kernels of three steps of the first two tasks, and note their time."""
    kinds = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if call.device == "cuda" else [])]
    size = call.sizes[0]
    rows = {f"{size} {task}": task for task in (call.tasks or FIRST)[: 1 if call.tiny else 2]}
    for name in call.open_rows(rows, 7):
        with call.row(name) as figures:
            step = build_step(settings_of(call, rows[name], size))
            step(), step()
            with profiler.profile(activities=kinds) as found:
                for _ in range(3):
                    step()
            kernels = found.key_averages()
            on_gpu = (one for one in kernels if one.device_type.name == "CUDA" and not one.is_user_annotation)
            figures["kernel_ms"] = sum(one.self_device_time_total for one in on_gpu) / 3e3
            by = "self_cuda_time_total" if call.device == "cuda" else "self_cpu_time_total"
            text = kernels.table(sort_by=by, row_limit=28, max_name_column_width=70)
            with open(call.out / "profile.txt", "a", encoding="utf-8") as file:
                file.write(f"{name}, batch {len(step.batch.indices)}, 3 steps\n{text}\n")


# Operations per image, which take minutes to count on a CPU and are the same for each GPU.


def read_gflop() -> dict[str, float]:
    """Return the GFLOP per image of matrix products, forward and backward, by size and task or peer."""
    return json.loads(GFLOP.read_text("utf-8"))


def gflop_of(size: str, task: str) -> float:
    """Count the GFLOP per image of a task's step, on fake tensors."""
    sizes = {"attention": "explicit", "kernels": "torch", "workers": 0, "threads": 1}
    sketch = estimate.sketch(settings_for(task, "cpu", 2, "float32", model=MODELS[size], **sizes), 2)
    assert sketch.flops is not None  # every task here runs on fake tensors
    return sketch.flops / 2e9


def count_gflop() -> None:
    """Write the file anew."""
    found = {f"{size} {task}": gflop_of(size, task) for size in SIZES for task in ready_tasks()}
    if installed(PEER):
        found |= {f"{size} {PEER}": operations_of(PEER, MODELS[size]) / 1e9 for size in SIZES}
    lines = ",\n".join(f" {json.dumps(name)}: {value:.3f}" for name, value in found.items())
    write_whole(GFLOP, f"{{\n{lines}\n}}\n")
    print(f"{len(found)} rows in {GFLOP}")
