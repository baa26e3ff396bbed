"""Separate process for one row of `gpu.py`, so that its faults and its time do not affect other rows."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import threading
import traceback
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from patchloom.system.files import write_whole

GRACE = 20.0  # seconds in which a row may write a checkpoint after SIGTERM
_LINES = 12  # lines of a traceback, or of the last output, that are stored


def context(method: str = "forkserver") -> BaseContext:
    """Return a context that forks processes from a server that has imported patchloom and never used a GPU.

    Args:
        method: forkserver, or spawn if the driver does not survive a fork.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # otherwise an import that queries the GPUs would initialise them
    made = multiprocessing.get_context(method)
    if method == "forkserver":
        made.set_forkserver_preload(["patchloom.bench", "patchloom.train.loop"])
    return made


def attempt(made: BaseContext, call: str, arguments: dict[str, Any], seconds: float, log: Path) -> dict[str, Any]:
    """Call a function of a module ("module.function") with ``arguments`` and ``seconds``, in a separate process.

    Args:
        made: context, made by `context`.
        call: name of the function, which must return what JSON can hold.
        arguments: its arguments, plain values.
        seconds: time limit: SIGTERM after it, SIGKILL a little later.
        log: file of its output.

    Returns:
        ``state`` done with its ``result``; or failed or late, with the last lines of its ``error``.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    answer = log.with_suffix(".json")
    answer.unlink(missing_ok=True)
    process = made.Process(target=_work, args=(call, arguments, seconds, str(log), str(answer)))
    process.start()
    late = False
    try:
        process.join(seconds)
        if process.is_alive():
            late = True
            process.terminate()
            process.join(GRACE)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has started
        process.kill()
        process.join()
    if answer.exists():
        told = json.loads(answer.read_text("utf-8"))
        return told if told["state"] == "done" or not late else told | {"state": "late"}
    if late:
        return {"state": "late", "error": [f"stopped after {seconds:.0f} s", *_last(log)]}
    return {"state": "failed", "error": [f"the process ended with {process.exitcode}", *_last(log)]}


def _work(call: str, arguments: dict[str, Any], seconds: float, log: str, answer: str) -> None:
    os.setpgid(0, 0)  # so that it can be ended together with the processes that it starts
    threading.Thread(target=_end_with_parent, daemon=True).start()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    multiprocessing.set_start_method(None, force=True)  # processes that start from here start as they do for users
    module, _, name = call.rpartition(".")
    try:
        result = getattr(importlib.import_module(module), name)(seconds=seconds, **arguments)
        told = {"state": "done", "result": result}
    except BaseException as problem:  # after any error, the other rows continue
        lines = "".join(traceback.format_exception(problem)).splitlines()
        print(*lines, sep="\n", flush=True)
        told = {"state": "failed", "error": [line[:300] for line in lines[-_LINES:]]}
    write_whole(Path(answer), json.dumps(told))


def _end_with_parent() -> None:
    """End the row if its parent is killed, so that it does not keep the GPU."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


def _last(log: Path) -> list[str]:
    """Return the last lines of the output."""
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    return [line[:300] for line in lines[-_LINES:]]
