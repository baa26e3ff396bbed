"""What ends a run from outside, in one sentence: too little memory, a full disc, a process that died."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from patchloom.data.load import lost_worker
from patchloom.errors import PatchloomError
from patchloom.files import mendable, unwritable
from patchloom.machine import memory
from patchloom.train.launch import LOST, died
from patchloom.train.settings import Settings

# torch's and numpy's words on a CPU, and those of its own allocator
_NO_MEMORY = re.compile(r"allocate memory|enough memory|unable to allocate|bad_alloc|out of memory", re.IGNORECASE)
_WANTED = re.compile(r"allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@contextmanager
def explained(settings: Settings, device: torch.device) -> Iterator[None]:
    """While entered, what the user can mend is raised as a `PatchloomError` that says how."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as problem:
        raise PatchloomError(too_little_memory(str(problem), settings, device)) from problem
    except OSError as problem:
        if not mendable(problem):
            raise
        raise unwritable(problem.filename or "a file", problem) from problem
    except RuntimeError as problem:
        if lost := lost_worker(problem):
            raise lost from problem
        if died(problem):
            if threading.current_thread() is threading.main_thread():
                # torchrun sends it to all that are left, at once: the sentence comes first, and then the end
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise PatchloomError(LOST) from problem
        if not _NO_MEMORY.search(str(problem)):
            raise
        raise PatchloomError(too_little_memory(str(problem), settings, device)) from problem


def too_little_memory(said: str, settings: Settings, device: torch.device) -> str:
    """What was needed, what there is, and which setting to lower."""
    used, there = memory(device.type)
    need = f"{used:.1f} GiB of {there:.1f} were in use"
    if wanted := _WANTED.search(said):
        more = float(wanted[1]) * _UNITS[wanted[2].lower()] / 2**30
        need += f", and {more:.2g} GiB more were asked for" if more >= 0.01 else ", and a little more was asked for"
    less = "halve --batch_size and double --accumulate, which keeps the size of an update"
    if settings.batch_size == 1:
        less = "use smaller images or a smaller --model"
    if not settings.checkpointing:
        less += ", or try --checkpointing true"
    return f"steps of {settings.batch_size} images need more memory than there is ({need}): {less}, with another --out"
