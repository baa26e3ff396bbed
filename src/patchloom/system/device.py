"""Capabilities of this machine, fixed rules for values of `auto` that follow from them, and its memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import joblib
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from patchloom.errors import PatchloomError

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def openmp_libraries() -> set[str]:
    """Return the paths of GNU's OpenMP libraries in this process, which torch brings on Linux."""
    return {line.split(maxsplit=5)[-1] for line in _lines(Path("/proc/self/maps")) if "libgomp" in line}


@cache
def processor(what: str) -> str:
    """Return a field of Linux's description of the processor, such as "flags"; "" on other systems."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(what):
                return line.partition(":")[2].strip()
    return ""


def synchronize(device: str) -> None:
    """Wait until the device has finished its work."""
    if device != "cpu":
        getattr(torch, device).synchronize()


# Rules for values of auto: what the hardware can do decides, never a timing.


_TRITON = (7, 0)  # least compute capability of CUDA GPUs for which Triton compiles
_COMPILED_FROM = 5_000  # steps; on an H100 compiling took 50 s, and a step of mae at ViT-S became 24 ms shorter


def choose_precision(device: str) -> tuple[str, str]:
    """Return the precision of training on a device, and the reason: bfloat16 where it has instructions for it."""
    if device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)  # compute capability 8.0 and later
        return ("bfloat16", "the GPU supports it") if native else ("float16", "the GPU has no bfloat16")
    if device != "cpu":
        return "float32", f"the safe choice on {device}"
    flags = processor("flags").split()
    for flag, name in (("amx_bf16", "AMX-BF16"), ("avx512_bf16", "AVX512-BF16")):
        if flag in flags:
            return "bfloat16", f"the processor has {name}"
    if "bf16" in processor("Features").split() and torch.backends.mkldnn.is_available():  # oneDNN has the products
        return "bfloat16", "the processor has ARM's BF16"
    return "float32", "the processor has no instructions for bfloat16"


def fetch_behind(values: Any) -> tuple[Any, torch.cuda.Event | None]:
    """Copy the tensors in ``values``, if they are on a CUDA GPU, into page-locked memory, behind what is queued there.

    Returns:
        The copies, and the event of their arrival, which the program awaits asleep: processes that read images have its
        core. Without a CUDA GPU the values themselves, and None; other devices do not order what follows such a copy.
    """
    device = next((one.device for one in tree_leaves(values) if isinstance(one, Tensor) and one.is_cuda), None)
    if device is None:
        return values, None
    copies = tree_map_only(Tensor, lambda one: one.to("cpu", non_blocking=True), values)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record(torch.cuda.current_stream(device))  # which may not be the first GPU
    return copies, arrived


_TF32 = (8, 0)  # least compute capability of CUDA GPUs with TF32


def check_precision(precision: str, device: str) -> None:
    """Refuse TF32 on a device without it."""
    if precision == "tf32" and (
        device != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability() < _TF32
    ):
        raise PatchloomError(
            "--precision tf32 needs an NVIDIA GPU of compute capability 8.0 or later: use --precision float32, or auto"
        )


@contextlib.contextmanager
def float32_products(tf32: bool = False) -> Iterator[None]:
    """Compute float32 products and convolutions of CUDA GPUs in float32 inside this block, or in TF32.

    TF32 has float32's range and 10 bits of mantissa. By torch's default, convolutions alone are computed in it.
    """
    places: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = tf32
    try:
        yield
    finally:
        for place, allowed in zip(places, before, strict=True):
            place.allow_tf32 = allowed


def choose_threads(device: str) -> tuple[int, str]:
    """Return the number of threads that compute, and the reason: torch's default, but no more than cores."""
    usual, there = torch.get_num_threads(), cores()
    if device != "cpu":
        return usual, "training runs on the GPU"
    if there == 1:
        return 1, "there is one core"
    return (usual, "torch's default") if usual <= there else (there, f"this process may use {there} cores")


def choose_compile(device: str, steps: int) -> tuple[bool, str]:
    """Return whether to compile a run of ``steps``, and the reason: only long runs on CUDA GPUs gain."""
    if device != "cuda":
        return False, f"compiling takes a minute and gains little on {device}"
    enough = f"{_COMPILED_FROM:,} steps make up for compiling"
    if steps < _COMPILED_FROM:
        return False, f"only {enough}"
    reason = cannot_compile(device)
    return (True, enough) if reason is None else (False, reason)


def cannot_compile(device: str) -> str | None:
    """Return the reason why torch.compile cannot work on a device; None if none is known.

    On a CPU it writes C++. On a CUDA GPU it uses Triton, which needs a C compiler: a first kernel is tried, which takes
    seconds.
    """
    if device == "cpu":
        compilers = os.environ.get("CXX") or "g++", "g++", "clang++"
        return None if any(map(shutil.which, compilers)) else "there is no C++ compiler, such as g++"
    if device != "cuda":
        return None
    if torch.cuda.get_device_capability() < _TRITON:
        return f"Triton needs a GPU of compute capability {'.'.join(map(str, _TRITON))}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not any(map(shutil.which, (os.environ.get("CC") or "gcc", "gcc", "clang"))):
        return "there is no C compiler, such as gcc"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return compiling_fault(device) if header.exists() else f"there is no {header}"


@cache
def compiling_fault(device: str) -> str | None:
    """Compile a first small kernel for a device, and return why that failed in one line; None: it works."""
    try:
        torch.compile(lambda values: values.sin() + 1, dynamic=False)(torch.ones(8, device=device))
    except Exception as problem:  # of torch, Triton, a compiler or the linker
        cause = getattr(problem, "inner_exception", problem)
        said = next((line for line in reversed(str(cause).splitlines()) if line.strip()), "no reason given")
        return f"a first kernel does not compile ({type(cause).__name__}: {shorten(said.strip(), 160)})"
    return None


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
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


_PART = 2**21  # bytes


def rows_at_once(tensor: Tensor) -> int:
    """Return how many rows [n ...] to compute with at once: all on a GPU; on a CPU some 2 MiB, and at least one.

    On a CPU small tensors, freed after each part, are as fast as large ones or faster, and need less memory.
    """
    if tensor.device.type != "cpu" or not len(tensor):
        return max(1, len(tensor))
    return max(1, _PART // max(1, tensor[0].numel() * tensor.element_size()))


def keep_freed_memory() -> bool:
    """Keep freed memory in this process (glibc on Linux): each step needs the same memory again.

    Otherwise the kernel takes large tensors' memory back, and clears it page by page when it is allocated again, which
    cost a tenth of a training step. The peak does not grow; after it, the memory is kept until the process ends.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1), mallopt(_TOP_PAD, 64 << 20)])


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
    for folder in control_groups("memory"):
        for limit, now in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # of the other version, or without a limit ("max")
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                files = [stat.get(f"total_{one}", stat.get(one, 0)) for one in ("active_file", "inactive_file")]
                used = int((folder / now).read_text()) - sum(map(int, files))  # without cached files, as of --cache
                found.append((int((folder / limit).read_text()), used))
    return found


def control_groups(controller: str) -> list[Path]:
    """Return the folders of this process's control groups, for both versions of Linux's groups."""
    found: list[Path] = []
    for line in _lines(PROC / "self/cgroup"):
        _, kinds, place = line.split(":", 2)
        if kinds and controller not in kinds.split(","):
            continue
        root = GROUPS / (controller if kinds else "")
        here = root / place.strip("/")  # seen from inside a container, its own group may be the root
        found += dict.fromkeys([root, here, *(one for one in here.parents if root in one.parents)])
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
