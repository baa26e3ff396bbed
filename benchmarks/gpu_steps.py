"""Measurements of `gpu.py` on single steps: peak rates of the machine, every task, and the peers."""

from __future__ import annotations

import gc
import platform
import shutil
import statistics
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peers import DEPTH, PEERS, Peer, installed, operations_of
from step_time import settings_for

from patchloom.bench import flops_per_image
from patchloom.data.augment import ColorPlan
from patchloom.data.loader import Batch
from patchloom.runs.settings import Settings
from patchloom.system.hardware import cores, memory, peak_memory, processor, product, seconds_of, synchronize
from patchloom.train import resolve
from patchloom.train.estimate import Step

# TFLOP/s of dense products by the makers' data sheets, in bfloat16 with sums in float32 (float16 where there is no
# bfloat16); the first name that the GPU's contains
DATA_SHEETS = {
    "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200 NVL": 835, "H200": 989, "A100": 312, "L40S": 362, "L4": 121,
    "A10": 125, "RTX 4090": 165, "T4": 65, "V100": 125,
}  # fmt: skip
_FULL = 0.92  # share of the memory that a batch may take
_TIMED = 4.0  # seconds of timing
_SYNC = "called a synchronizing CUDA operation"
TINY = {"model": {"name": "nano", "embed_dim": 32, "depth": 1, "num_heads": 2}, "img_size": 32, "patch_size": 8}
TINY |= {"attention": "fused", "kernels": "torch", "threads": 1, "workers": 0}  # so that kernels are not measured first

Result = dict[str, Any]


def identity(device: str, seconds: float) -> Result:
    """Return the machine; figures of two machines must not be in one file."""
    named = torch.cuda.get_device_name() if device == "cuda" else processor("model name") or platform.machine()
    found = {"name": named, "torch": torch.__version__, "cuda": torch.version.cuda if device == "cuda" else None}
    found |= {"python": platform.python_version(), "cores": cores(), "memory": round(memory(device)[1], 1)}
    if device == "cuda" and shutil.which("nvidia-smi"):
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(words, capture_output=True, text=True).stdout.split("\n")[0].strip()
    return found


def data_sheet(name: str) -> float | None:
    """Return the operations per second in a GPU's data sheet; None if we do not know it."""
    words = f" {name.replace('-', ' ')} "
    if "Laptop" in words:  # slower parts under the same numbers
        return None
    return next((1e12 * rate for known, rate in DATA_SHEETS.items() if f" {known} " in words), None)


def machine(device: str, tiny: bool, known: Result, seconds: float) -> Result:
    """Measure the rates of large products, and of a copy in the device's memory."""
    size = 256 if tiny else 8192
    dtypes = ("float32", "bfloat16", "float16")[: 2 if device == "cpu" else 3]
    times = seconds_of({dtype: product(device, dtype, size) for dtype in dtypes}, device, 10)
    block = torch.empty(2**20 if tiny else 2**30, dtype=torch.uint8, device=device).random_()
    copying = seconds_of({"": block.clone}, device, 10)[""]
    return {
        "products": {dtype: 2 * size**3 / statistics.median(values) for dtype, values in times.items()},
        "data sheet": data_sheet(torch.cuda.get_device_name()) if device == "cuda" else None,
        "copy": 2 * len(block) / statistics.median(copying),
        "precision": precision_of(device),
    }


@contextmanager
def waits(device: str) -> Iterator[Counter[str]]:
    """Count the points at which the CPU waits for the GPU inside this block, by line of code."""
    places: Counter[str] = Counter()
    if device != "cuda":
        yield places
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
            count_waits(caught, places)


def count_waits(caught: list[warnings.WarningMessage], places: Counter[str]) -> None:
    """Count torch's warnings of synchronisation in ``places``."""
    for one in caught:
        if _SYNC in str(one.message):
            path = Path(one.filename)
            places[f"{path.parent.name}/{path.name}:{one.lineno}"] += 1


def forget() -> None:
    """Free the memory that is left after a step ran out of memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def repeated(batch: Batch, times: int, device: str) -> Batch:
    """Return a batch, repeated, on the device: reading and copying are measured separately."""
    views = tuple(torch.cat([view.to(device)] * times) for view in batch.views)
    colors = batch.colors and tuple(again(plan, times, len(batch.indices)) for plan in batch.colors)
    return batch._replace(views=views, colors=colors, indices=torch.cat([batch.indices] * times))


def again(plan: ColorPlan, times: int, images: int) -> ColorPlan:
    """Return the colour changes of a batch, repeated as its images are."""
    counts = [count for _, count in plan.changes]
    rows = [torch.cat([part + i * images for i in range(times)]) for part in plan.rows.split(counts)]
    factors = [part.repeat(times) for part in plan.factors.split(counts)]
    changes = tuple((name, times * count) for name, count in plan.changes)
    return ColorPlan(torch.cat([plan.rows[:0], *rows]), torch.cat([plan.factors[:0], *factors]), changes)


def largest(step: Step, most: int, device: str) -> tuple[int, Result]:
    """Double the images of a step until the memory is full, or the next doubling would not fit.

    Returns:
        The largest batch that fits, which the step keeps; and seconds and GiB of each batch that was tried.
    """
    first, (_, there) = step.batch, memory(device)
    images, tried, fits = len(first.indices), {}, 0
    while images <= most:
        try:
            step.batch = repeated(first, images // len(first.indices), device)
            step.optimizer.zero_grad(set_to_none=True)
            step()
            needed = peak_memory(step, device) or 0.0
            start = time.perf_counter()
            step()
            synchronize(device)
        except torch.OutOfMemoryError:
            tried[images] = {"state": "out of memory"}
        if images in tried:  # here, since the exception held the step's tensors
            break
        tried[images] = {"seconds": time.perf_counter() - start, "memory": needed}
        fits, before = images, tried.get(images // 2, {"memory": needed})["memory"]
        if 2 * needed - (2 * before - needed if before < needed else 0) > _FULL * there:
            break
        images *= 2
    if not fits:
        raise torch.OutOfMemoryError(f"not even {images} images fit into the {there:.1f} GiB of the device")
    step.batch = None
    forget()
    step.batch = repeated(first, fits // len(first.indices), device)
    return fits, tried


def timed(ways: dict[str, Callable[[], Any]], device: str, tiny: bool, seconds: float = _TIMED) -> dict[str, list]:
    """Time several functions in turns, in as many rounds as fit into some seconds (3 to 20)."""
    if tiny:
        return seconds_of(ways, device, 1)
    start = time.perf_counter()
    for way in ways.values():
        way()
    synchronize(device)
    return seconds_of(ways, device, max(3, min(20, round(seconds / (time.perf_counter() - start)))))


def rates(seconds: list[float], batch: int, flops: float, precision: str, known: Result) -> Result:
    """Return the rates that follow from a step's times."""
    median, figures = statistics.median(seconds), known.get("machine", {}).get("figures", {})
    done = batch * flops / median
    peak, sheet = figures.get("products", {}).get(precision), figures.get("data sheet")
    return {
        "batch": batch,
        "seconds": median,
        "range": [min(seconds), max(seconds)],
        "images/s": batch / median,
        "operations an image": flops,
        "operations a second": done,
        "of products": peak and done / peak,
        "of data sheet": sheet and precision != "float32" and done / sheet,
        "precision": precision,
    }


def precision_of(device: str) -> str:
    """Return the precision of `auto` on a GPU, and bfloat16 on a CPU, where only the script is tested."""
    return resolve.default_precision(device)[0] if device == "cuda" else "bfloat16"


def sized(task: str, device: str, batch: int, precision: str, model: str, tiny: bool) -> Settings:
    """Return the settings of a task at the sizes of this benchmark."""
    return settings_for(task, device, batch, precision, **(TINY if tiny else {"model": model}))


def step(
    device: str, tiny: bool, known: Result, seconds: float, model: str, task: str, compiled: bool, eager: str = ""
) -> Result:
    """Measure one task's step, with the largest batch that fits.

    With compiled blocks it takes the batch of the row ``eager``: every other batch would have to be compiled, too.
    """
    precision, there = precision_of(device), known.get("steps", {}).get(eager)
    if compiled and not there:
        raise RuntimeError(f"the row {eager}, whose batch this row uses, has no result yet")
    settings = sized(task, device, 2 if tiny else 32, precision, model, tiny)
    one, tried = Step(settings, compiled), {}
    start = time.perf_counter()
    if there:
        batch = as_large(one, there["batch"], device)
    else:
        batch, tried = largest(one, 4 if tiny else 4096, device)
    before = time.perf_counter() - start
    needed = peak_memory(one, device)
    found = timed({"": one}, device, tiny)[""]
    with waits(device) as places:
        one()
    flops = there["operations an image"] if there else flops_per_image(settings)
    result = rates(found, batch, flops, precision, known) | {"memory": needed, "tried": tried, "where": places}
    result |= {"waits": sum(places.values()) if device == "cuda" else None, "attention": settings.attention}
    gain = {"over eager": result["images/s"] / there["images/s"]} if there else {}
    return result | gain | {"compiled": compiled, "seconds before": before}


def as_large(one: Step, batch: int, device: str) -> int:
    """Do a step, halving the images as long as they do not fit, and return their number."""
    first, done = one.batch, False
    while True:
        try:
            one.batch = repeated(first, max(1, batch // len(first.indices)), device)
            one()
            done = True
        except torch.OutOfMemoryError:
            if batch <= len(first.indices):
                raise
        if done:  # here, since the exception held the step's tensors
            return len(one.batch.indices)
        one.batch = None
        one.optimizer.zero_grad(set_to_none=True)
        forget()
        batch //= 2


def peers(device: str, tiny: bool, known: Result, seconds: float, model: str) -> Result:
    """Measure MAE of Hugging Face, of lightly, and ours, in turns, with a batch that fits all of them together."""
    batch = 1 if tiny else 256
    while True:
        found = None
        try:
            found = _side_by_side(device, tiny, known, model, batch)
        except torch.OutOfMemoryError:
            if batch <= 8:
                raise
        if found is not None:
            return found
        forget()
        batch //= 2


def _side_by_side(device: str, tiny: bool, known: Result, model: str, batch: int) -> Result:
    # on a CPU without bfloat16 instructions a step takes seconds
    precision, depth = ("float32", 1) if tiny else (precision_of(device), DEPTH)
    task, sizes = {"name": "mae", "decoder_depth": depth}, {"attention": "fused"} if tiny else {}
    ours = settings_for(task, device, batch, precision, model=model, **sizes)
    ways: dict[str, Any] = {}
    memories: dict[str, float | None] = {}

    def begin(name: str, make: Callable[[], Any]) -> None:
        """Make a step and do it twice, to measure its memory as the increase."""
        before = torch.cuda.memory_allocated() / 2**30 if device == "cuda" else 0.0

        def work() -> None:
            ways[name] = make()
            ways[name]()
            ways[name]()

        peak = peak_memory(work, device)
        memories[name] = peak and peak - before

    begin("patchloom mae", lambda: _ours(ours, batch, device))
    for kind in PEERS:
        if installed(kind):
            begin(kind, lambda kind=kind: Peer(kind, precision, device, batch, model, depth))
    times = timed(ways, device, tiny, 2 * _TIMED)
    rows = {}
    for name, values in times.items():
        flops = flops_per_image(ours) if name == "patchloom mae" else operations_of(name, model, depth)
        form = ours.attention if name == "patchloom mae" else PEERS[name][1]
        rows[name] = rates(values, batch, flops, precision, known) | {"memory": memories[name], "attention": form}
    return {"rows": rows, "absent": [f"{kind}: {PEERS[kind][0]}" for kind in PEERS if not installed(kind)]}


def _ours(settings: Settings, batch: int, device: str) -> Step:
    few = min(batch, 32)
    one = Step(settings, batch=few)
    one.batch = repeated(one.batch, batch // few, device)
    return one
