"""How much memory there is, how much work needs, and what to say where it is too little."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import platform
import re
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from patchloom.errors import PatchloomError
from patchloom.stopping import end_with_parent, leave_signals, starting_workers

# glibc's numbers for mallopt: trim, top pad, and the number of allocations that may be mapped
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
# torch's and numpy's words on a CPU, and those of its own allocator
_NO_MEMORY = re.compile(r"allocate memory|enough memory|unable to allocate|bad_alloc|out of memory", re.IGNORECASE)
_WANTED = re.compile(r"allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def keep_freed_memory() -> bool:
    """Let freed memory stay with this process (glibc on Linux): each step asks for the same again.

    Otherwise the kernel takes large tensors' memory back, and clears it page by page when it is asked for anew, which
    cost a tenth of a training step. The peak does not grow; after it, the memory is kept until the process ends.

    Returns:
        Whether the system has this.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, -1), mallopt(_TOP_PAD, 64 << 20)])


def peak_memory(work: Callable[..., None], device: str, *arguments: Any) -> float | None:
    """GiB that ``work(*arguments)`` needs at its peak beyond what this process held; None where that is unknown."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        work(*arguments)
        return torch.cuda.max_memory_allocated() / 2**30
    if device != "cpu" or not Path("/proc/self/clear_refs").exists():
        return None
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # else the peak would be that of the imports
    work(*arguments)
    return (resident(peak=True) - before) / 2**30


def peak_apart(work: Callable[..., None], device: str, *arguments: Any) -> float | None:
    """`peak_memory` in a process of its own.

    Raises:
        PatchloomError: the process was killed, as the system does where memory runs out.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(sender, work, device, *arguments))
    with starting_workers():
        process.start()
    sender.close()  # else the end of the process would go unnoticed
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
            f"the process that measured how much memory is needed has died ({process.exitcode}), perhaps since there "
            "is too little: lower --batch_size"
        )
    if isinstance(found, Exception):
        raise found
    return found


def _send_peak(sender: Connection, work: Callable[..., None], device: str, *arguments: Any) -> None:
    leave_signals()
    end_with_parent()
    try:
        sender.send(peak_memory(work, device, *arguments))
    except Exception as problem:  # it is for the process that asked
        sender.send(problem)


def memory(device: str) -> tuple[float, float]:
    """GiB in use, and GiB that there are: of the GPU; or on a CPU of this process, and of what it may have."""
    if device == "cuda":
        free, there = torch.cuda.mem_get_info()
        return (there - free) / 2**30, there / 2**30
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *(limit for limit, _ in _groups())]
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        limits += [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
    return resident(peak=True) / 2**30, min(limits) / 2**30


def free_memory(device: str) -> float:
    """GiB that nothing uses now: of the GPU; or on a CPU of what this process may have."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] / 2**30
    used, there = memory("cpu")
    left = [(there - used) * 2**30, *(limit - taken for limit, taken in _groups())]
    with contextlib.suppress(OSError, TypeError):  # not on Linux
        available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        left.append(int(available[1]) * 1024)
    return max(0.0, min(left)) / 2**30


def _groups() -> list[tuple[int, int]]:
    """Bytes that each control group of this process may have, and those that it has; of Linux, both kinds of groups."""
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
                used = int((folder / now).read_text()) - (int(files[1]) if files else 0)  # which the system gives back
                found.append((int((folder / limit).read_text()), used))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


class Affordable(TorchFunctionMode):
    """While entered, building a net that cannot be trained in this machine's memory is refused.

    Linux gives out more memory than it has, and kills a process that then uses it: no exception would ever be seen.

    Args:
        copies: how many times a weight is in memory: 4 with its gradient and two moments.

    Raises:
        PatchloomError: the weights that were made so far, so often, are more than the memory that there is.
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
            f"a model of these sizes cannot be trained in the {self.there:.1f} GiB of memory that there are: choose a "
            "smaller --model, smaller patches, or smaller heads and decoders"
        )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made while entered, fake ones (`FakeTensorMode`) as if they were real.

    Workspaces that kernels allocate for themselves are not seen. Convolutions are given one: a copy of all that they
    read and write, as oneDNN makes for its own layouts.

    Attributes:
        now: bytes of those that are still alive.
        peak: the most that were alive together.
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
    """If ``problem`` says that there is too little memory: how much was in use, and how much more was asked for."""
    on_gpu = isinstance(problem, torch.OutOfMemoryError)
    if not (on_gpu or isinstance(problem, MemoryError) or _NO_MEMORY.search(str(problem))):
        return None
    used, there = memory("cuda" if on_gpu else "cpu")
    need = f"{used:.1f} GiB of {there:.1f} were in use"
    if wanted := _WANTED.search(str(problem)):
        more = float(wanted[1]) * _UNITS[wanted[2].lower()] / 2**30
        need += f", and {more:.2g} GiB more were asked for" if more >= 0.01 else ", and a little more was asked for"
    return need


def resident(peak: bool = False) -> float:
    """Bytes of this process in memory, now or at its peak; 0 where that is unknown (not on Linux)."""
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", "\n".join(_lines(Path("/proc/self/status"))))
    return 1024.0 * int(found[1]) if found else 0.0
