"""Measurements of this machine, cached in a file, and choices that depend on them.

Every figure is the ratio of two implementations of the same work, timed alternately, so that other programs slow both.
They may not slow both equally, so a figure has the date and the load with which it was measured: one of a busy machine
is measured again soon, and never replaces one of an idle machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import platform
import re
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.system.files import cache_root, write_whole
from patchloom.system.signals import end_with_parent, leave_signals, starting_workers

_ROUNDS = 5
_BUSY = 0.15  # share of our cores used by others above which a machine is busy
_BUSY_LOAD = 0.5  # the same for the load average of the last minute, if nothing better is known
_LASTS, _LASTS_BUSY = 14 * 86400.0, 600.0  # seconds after which a figure is measured again
_SMALLEST, _LONG = 128, 0.5  # rows of the first product that is tried; seconds that a product may take


class Figure(float):
    """Measured figure of this machine.

    Attributes:
        at: time of measurement in seconds since 1970; 0 if it is not known.
        load: share of our cores that others used meanwhile.
        tried: time of the last measurement that was discarded because the machine was busy; 0 if there was none.
    """

    at: float = 0.0
    load: float = 0.0
    tried: float = 0.0

    @classmethod
    def of(cls, found: Any) -> Figure | None:
        """Return the figure that the file has; None for anything else. An older version wrote only the number."""
        values = found if isinstance(found, dict) else {"value": found}
        if "value" not in values or not all(isinstance(one, int | float) for one in values.values()):
            return None
        figure = cls(values["value"])
        figure.at, figure.load, figure.tried = (float(values.get(name, 0.0)) for name in ("at", "load", "tried"))
        return figure

    def plain(self) -> dict[str, float]:
        """Return the figure in the form of the file."""
        return {"value": float(self), "at": round(self.at), "load": round(self.load, 2), "tried": round(self.tried)}

    @property
    def busy(self) -> bool:
        """Whether the machine had other work."""
        return self.load > _BUSY

    def lasts(self) -> bool:
        """Return whether the figure need not be measured again yet."""
        now = time.time()
        return abs(now - self.at) < (_LASTS_BUSY if self.busy else _LASTS) or abs(now - self.tried) < _LASTS_BUSY


def when(figure: float) -> str:
    """Return the date of a figure, as the end of a reason; "" if it is not known."""
    if not isinstance(figure, Figure) or not figure.at:
        return ""
    return f", measured on {date.fromtimestamp(figure.at)}" + " while the machine was busy" * figure.busy


def cached_figure(
    name: str, measure: Callable[[], float], device: str = "cpu", again: bool = False, threads: int | None = None
) -> Figure:
    """Return a figure of this machine: an earlier one, or the result of ``measure()``, which is then cached."""
    key, known = _key(name, device, threads), _read()
    before = Figure.of(known.get(key))
    if before is not None and before.lasts() and not again:
        return before
    with StatusMessage(f"measuring this machine ({name})"):
        others = BackgroundLoad()
        figure = Figure(f"{measure():.4g}")
        figure.at, figure.load = time.time(), others.share()
    if figure.busy and before is not None and before.at and not again:  # the earlier one is at least as good
        figure, before.tried = before, figure.at
    with contextlib.suppress(PatchloomError):  # a read-only disc costs another measurement, and nothing else
        write_whole(_file(), json.dumps(known | {key: figure.plain()}, indent=1, sort_keys=True) + "\n")
    return figure


class BackgroundLoad:
    """Load by other programs on our cores, from now on."""

    def __init__(self) -> None:
        self.begun = time.perf_counter(), _worked(), time.process_time()

    def share(self) -> float:
        """Return the share of the time of our cores that others used."""
        (begun, before, own), now = self.begun, _worked()
        if before is None or now is None:
            with contextlib.suppress(OSError, AttributeError):
                return float(os.getloadavg()[0] > _BUSY_LOAD * cores() + 1)  # this process is one of them
            return 0.0
        passed = (time.perf_counter() - begun) * len(own_cores())
        return min(1.0, max(0.0, now - before - (time.process_time() - own)) / passed)


def _worked() -> float | None:
    """Return the seconds that our cores have worked since the system started; None if that is unknown."""
    names = {f"cpu{number}" for number in own_cores()}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text("ascii").splitlines()]
        times = [list(map(int, words[1:])) for words in lines if words[0] in names]
        # all but idle and waiting for the disc, and without guests, which are in the first two
        worked = sum(sum(one[:3]) + sum(one[5:8]) for one in times)
        return worked / os.sysconf("SC_CLK_TCK") if worked else None
    except (OSError, ValueError, IndexError):
        return None


def _key(name: str, device: str, threads: int | None = None) -> str:
    where = f"{name} on {_called(device)}, torch {torch.__version__}"
    return f"{where}, {threads or torch.get_num_threads()} threads" if device == "cpu" else where


def _file() -> Path:
    return cache_root() / "machine.json"


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_file().read_text("utf-8"))
    except (OSError, ValueError):  # none yet, or damaged
        return {}
    return found if isinstance(found, dict) else {}


@cache
def _called(device: str) -> str:
    """Return the processor's name."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    name = processor("model name") if device == "cpu" else ""
    return name or f"{platform.processor() or platform.machine()} {device}"


@cache
def processor(what: str) -> str:
    """Return a field of Linux's description of the processor, such as "flags"; "" on other systems."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(what):
                return line.partition(":")[2].strip()
    return ""


def seconds_of(ways: Mapping[Any, Callable[[], Any]], device: str = "cpu", rounds: int = _ROUNDS) -> dict[Any, Any]:
    """Time several implementations, interleaved, after a warm-up round; return the seconds of each round by name."""
    seconds: dict[Any, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, way in ways.items():
            synchronize(device)
            start = time.perf_counter()
            way()
            synchronize(device)
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median_seconds(ways: Mapping[Any, Callable[[], Any]], device: str = "cpu", rounds: int = _ROUNDS) -> dict[Any, Any]:
    """Return the medians of `seconds_of`."""
    return {name: statistics.median(values) for name, values in seconds_of(ways, device, rounds).items()}


def synchronize(device: str) -> None:
    """Wait until the device has finished its work."""
    if device != "cpu":
        getattr(torch, device).synchronize()


def product(device: str, dtype: str, size: int) -> Callable[[], Tensor]:
    """Return a function that multiplies two size x size matrices: 2 size³ operations."""
    one, two = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return lambda: one @ two


def product_rates(
    device: str = "cpu",
    size: int | None = None,
    rounds: int = _ROUNDS,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
) -> dict[str, float]:
    """Return the floating-point operations per second of products of matrices of ``size`` rows, by dtype.

    Fewer rows are used for a dtype for which the device has no instructions, which would take minutes.
    """
    most = size or (2048 if device == "cpu" else 8192)
    sizes = {dtype: _affordable(device, dtype, most) for dtype in dtypes}
    ways = {dtype: product(device, dtype, size) for dtype, size in sizes.items()}
    return {name: 2 * sizes[name] ** 3 / seconds for name, seconds in median_seconds(ways, device, rounds).items()}


def _affordable(device: str, dtype: str, most: int) -> int:
    """Return the rows, up to ``most``, of matrices whose product takes no more than about half a second."""

    size = min(_SMALLEST, most)
    while size < most and 8 * median_seconds({"": product(device, dtype, size)}, device, rounds=1)[""] <= _LONG:
        size = min(2 * size, most)
    return size


def bfloat16_gain() -> Figure:
    """Measure the speed-up of products of bfloat16 matrices over float32 ones on this CPU."""

    def gain() -> float:
        rates = product_rates("cpu", 1024)
        return rates["bfloat16"] / rates["float32"]

    return cached_figure("bfloat16 over float32, products", gain)


def bfloat16_pays() -> tuple[bool, str]:
    """Return whether training on this CPU is clearly faster in bfloat16 than in float32, and the reason."""
    gain = bfloat16_gain()
    return gain > 1.2, f"bfloat16 products are ×{gain:.2g} as fast here{when(gain)}"


def fused_gain(device: str, dtype: str, heads: int, tokens: int, side: int) -> Figure:
    """Measure the speed-up of fused attention over an explicit softmax, forward and backward."""

    def fused(packed: Tensor) -> Tensor:
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return mixed.transpose(1, 2)

    return attention_gain("fused", fused, device, dtype, heads, tokens, side)


def attention_gain(
    name: str, attend: Callable[[Tensor], Tensor], device: str, dtype: str, heads: int, tokens: int, side: int
) -> Figure:
    """Measure the speed-up of a form of attention over an explicit softmax, forward and backward.

    Args:
        name: name of the form.
        attend: function from queries, keys and values [b n 3 h d] to [b n h d].
        device, dtype, heads, tokens, side: as in `fused_gain`.
    """
    images = max(1, min(64, 2_000_000 // (heads * tokens * max(side, tokens))))
    shape = (images, tokens, 3, heads, side)

    def there_and_back(attend: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        packed = torch.randn(shape, device=device).to(getattr(torch, dtype)).requires_grad_()

        def step() -> None:
            attend(packed).flatten(2).sum().backward()
            packed.grad = None

        return step

    def explicit(packed: Tensor) -> Tensor:
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        return ((q * side**-0.5 @ k.mT).softmax(-1) @ v).transpose(1, 2)

    def gain() -> float:
        seconds = median_seconds({name: there_and_back(attend), "explicit": there_and_back(explicit)}, device)
        return seconds["explicit"] / seconds[name]

    return cached_figure(
        f"{name} over explicit attention, {dtype}, {heads} heads, {tokens} tokens of {side}", gain, device
    )


def best_threads() -> Figure:
    """Return the number of threads with which this CPU multiplies fastest: torch's default, or fewer.

    A container may be allowed fewer cores than it sees: no more threads are tried than it may use.
    """
    usual, all_threads = torch.get_num_threads(), min(torch.get_num_threads(), cores())
    counts = [all_threads]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)

    def best() -> float:
        matrix = torch.randn(1024, 1024)

        def with_threads(count: int) -> Callable[[], None]:
            def multiply() -> None:
                torch.set_num_threads(count)
                matrix @ matrix

            return multiply

        try:
            seconds = median_seconds({str(count): with_threads(count) for count in counts})
        finally:
            torch.set_num_threads(usual)
        least = min(seconds.values())
        # fewer must be clearly faster: other programs that run now may end later
        return next(count for count in counts if seconds[str(count)] <= 1.1 * least)

    return cached_figure("best number of threads", best) if all_threads > 1 else Figure(1)


def compile_gain(
    device: str, dtype: str, model: str, kernels: str, threads: int, measure: Callable[[], float] | None = None
) -> Figure | None:
    """Measure the speed-up of a step by compiled blocks; without ``measure``, return the cached figure, or None."""
    name = f"compiled over eager, {dtype}, {model}, {kernels} kernels"
    if measure is None:
        return Figure.of(_read().get(_key(name, device, threads)))
    return cached_figure(name, measure, device, again=True, threads=threads)


def own_cores() -> set[int]:
    """Return the numbers of the cores on which this process may run; a control group may limit it to fewer."""
    affinity = getattr(os, "sched_getaffinity", None)
    return affinity(0) if affinity else set(range(cores()))


def cores() -> int:
    """Return the number of cores that this process may use, by its affinity and the quota of its control group."""
    return joblib.cpu_count()


class Cores(NamedTuple):
    """Cores of this machine that processes with the same work share, and the number of these processes."""

    there: int
    processes: int = 1

    @property
    def each(self) -> int:
        """Cores that each process can count on."""
        return max(1, self.there // self.processes)


def choose_workers(device: str, here: Cores, least: int = 0) -> tuple[int, str]:
    """Return the number of worker processes for one that computes, and the reason."""
    shared = f", since {here.processes} processes share {here.there}" if here.processes > 1 else ""
    if here.each == 1:
        return max(least, 0 if device == "cpu" else 1), f"there is one core{' each' if shared else ''}{shared}"
    if device == "cpu":
        return max(least, here.each // 4), f"most of {here.each} cores are for computing{shared}"
    return min(16, here.each - 1), f"one for each of {here.each} cores but one{shared}"


def is_available(device: str) -> bool:
    """Return whether a device is available."""
    return device in ("auto", "cpu") or bool(getattr(torch, device).is_available())


def check_device(device: str) -> None:
    """Refuse a device that is not available."""
    if not is_available(device):
        raise PatchloomError(f"there is no {device} device here: use --device cpu, or auto")


def usable_device(name: str) -> torch.device:
    """Return the device of that name; auto is a CUDA GPU if there is one, and never MPS."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as problem:  # torch built without CUDA asserts
        raise PatchloomError(f"the device {name} cannot be used here: choose auto or cpu") from problem


# Available memory, the memory that work needs, and errors if it is too little.


# glibc's numbers for mallopt: trim, top pad, and the number of allocations that may be mapped
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
# messages of torch and numpy on a CPU, of the allocator, and of CUDA's libraries
_NO_MEMORY = re.compile(
    r"allocate memory|enough memory|unable to allocate|bad_alloc|out of memory|STATUS_ALLOC_FAILED", re.IGNORECASE
)
_OF_CUDA = re.compile(r"cuda|cublas|cudnn|nccl", re.IGNORECASE)
_WANTED = re.compile(r"allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def keep_freed_memory() -> bool:
    """Keep freed memory in this process (glibc on Linux): each step needs the same memory again.

    Otherwise the kernel takes large tensors' memory back, and clears it page by page when it is allocated again, which
    cost a tenth of a training step. The peak does not grow; after it, the memory is kept until the process ends.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1), mallopt(_TOP_PAD, 64 << 20)])


def peak_memory(work: Callable[..., None], device: str, *arguments: Any) -> float | None:
    """Return the GiB that ``work(*arguments)`` needs at its peak beyond those in use before; None if unknown."""
    before = 0.0 if device == "cuda" else resident()
    if not reset_peak(device):  # otherwise the peak would be that of the imports
        return None
    work(*arguments)
    used = float(torch.cuda.max_memory_allocated()) if device == "cuda" else resident(peak=True)
    return (used - before) / 2**30


def reset_peak(device: str) -> bool:
    """Forget the peak of memory so far; return whether this is possible."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return True
    if device != "cpu":
        return False
    try:
        return Path("/proc/self/clear_refs").write_text("5") > 0
    except OSError:  # not on Linux
        return False


def peak_in_subprocess(work: Callable[..., None], device: str, *arguments: Any) -> float | None:
    """Measure `peak_memory` in a separate process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(sender, work, device, *arguments))
    with starting_workers():
        process.start()
    sender.close()  # otherwise the end of the process would go unnoticed
    try:
        found = receiver.recv()
    except EOFError:
        found = None
    except BaseException:  # Ctrl-C, which that process leaves to this one
        process.kill()
        raise
    process.join()
    if process.exitcode:
        raise PatchloomError(
            f"the process that measured how much memory is needed has died ({process.exitcode}), perhaps because "
            "there is too little: lower --batch_size"
        )
    if isinstance(found, Exception):
        raise found
    return found


def _send_peak(sender: Connection, work: Callable[..., None], device: str, *arguments: Any) -> None:
    leave_signals()
    end_with_parent()
    try:
        sender.send(peak_memory(work, device, *arguments))
    except Exception as problem:  # raised by the process that asked
        sender.send(problem)


def memory(device: str) -> tuple[float, float]:
    """Return GiB in use and in all: of the GPU, or on a CPU by this process, and those that it may use."""
    if device == "cuda":
        free, there = torch.cuda.mem_get_info()
        return (there - free) / 2**30, there / 2**30
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *(limit for limit, _ in _groups())]
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        limits += [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    return resident(peak=True) / 2**30, min(limits) / 2**30


def free_memory(device: str) -> float:
    """Return the GiB that are unused now: of the GPU, or on a CPU of those that this process may use."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] / 2**30
    used, there = memory("cpu")
    left = [(there - used) * 2**30, *(limit - taken for limit, taken in _groups())]
    with contextlib.suppress(OSError):  # not on Linux
        if available := re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text()):
            left.append(int(available[1]) * 1024)
    return max(0.0, min(left)) / 2**30


def _groups() -> list[tuple[int, int]]:
    """Return (limit, use) in bytes of each control group of this process, for both versions of Linux's groups."""
    found = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, kinds, place = line.split(":", 2)
        if kinds == "":
            root, limit, now = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in kinds.split(","):
            root, limit, now = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        here = root / place.strip("/")  # seen from inside a container, its own group may be the root
        for folder in (root, here, *(one for one in here.parents if root in one.parents)):
            with contextlib.suppress(OSError, ValueError):  # no such group, or one without a limit ("max")
                files = re.search(
                    r"^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE
                )
                used = int((folder / now).read_text()) - (int(files[1]) if files else 0)  # without the file cache
                found.append((int((folder / limit).read_text()), used))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


class MemoryGuard(TorchFunctionMode):
    """Context that refuses to build a net that this machine's memory cannot hold.

    Linux gives out more memory than it has, and kills a process that then uses it: no exception would be raised.

    Args:
        copies: number of copies of a weight in memory: 4 with its gradient and two moments.
    """

    def __init__(self, copies: int):
        super().__init__()
        self.copies, self.made, self.there = copies, 0, memory("cpu")[1]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            made = func(*args, **(kwargs or {}))
        except RuntimeError as problem:
            if memory_shortage(problem):
                raise self._refusal() from problem
            raise
        if func in (torch.empty, torch.zeros, torch.ones) and made.device.type != "meta":  # not touched yet
            self.made += made.nbytes
            if self.copies * self.made > self.there * 2**30:
                raise self._refusal()
        return made

    def _refusal(self) -> PatchloomError:
        return PatchloomError(
            f"a model of these sizes does not fit in the {self.there:.1f} GiB of memory here: choose a smaller "
            "--model, smaller patches, or smaller heads and decoders"
        )


class LiveBytes(TorchDispatchMode):
    """Context that counts the bytes of tensors made in it, fake ones (`FakeTensorMode`) as if they were real.

    Workspaces that kernels allocate themselves are not seen. For convolutions, one is assumed: a copy of all inputs and
    outputs, as oneDNN makes for its own layouts.

    Attributes:
        now: bytes of tensors that are alive.
        peak: largest number of bytes that were alive together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self._add(one.untyped_storage())
        if func in _CONVOLUTIONS:
            copied = sum(one.nbytes for one in tree_leaves((args, made)) if isinstance(one, Tensor))
            self.peak = max(self.peak, self.now + copied)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()

        def gone(_: weakref.ref[torch.UntypedStorage]) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def memory_shortage(problem: BaseException) -> str | None:
    """Return how much memory was in use and requested if ``problem`` says that there was too little; otherwise None."""
    on_gpu = isinstance(problem, torch.OutOfMemoryError)
    if not (on_gpu or isinstance(problem, MemoryError) or _NO_MEMORY.search(str(problem))):
        return None
    on_gpu = on_gpu or (torch.cuda.is_available() and _OF_CUDA.search(str(problem)) is not None)
    used, there = memory("cuda" if on_gpu else "cpu")
    need = f"{used:.1f} GiB of {there:.1f} were in use"
    if wanted := _WANTED.search(str(problem)):
        more = float(wanted[1]) * _UNITS[wanted[2].lower()] / 2**30
        need += f", and {more:.2g} GiB more were requested" if more >= 0.01 else ", and a little more was requested"
    return need


def resident(peak: bool = False) -> float:
    """Return the bytes of this process in memory, now or at its peak; 0 if that is unknown (not on Linux)."""
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", "\n".join(_lines(Path("/proc/self/status"))))
    return 1024.0 * int(found[1]) if found else 0.0
