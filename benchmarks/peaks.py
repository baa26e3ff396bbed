"""Peak memory of work, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from patchloom.errors import PatchloomError
from patchloom.system.device import resident
from patchloom.system.signals import leave_signals, starting_workers


def end_with_parent() -> None:
    """End this process when its parent ends, for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def peak_memory(work: Callable[..., None], device: str, *arguments: Any) -> float | None:
    """Return the GiB that ``work(*arguments)`` needs at its peak beyond those in use before; None if unknown."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        work(*arguments)
        return torch.cuda.max_memory_allocated() / 2**30
    before = resident()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # otherwise the peak would be that of the imports
    except OSError:  # not on Linux
        return None
    work(*arguments)
    return (resident(peak=True) - before) / 2**30


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
