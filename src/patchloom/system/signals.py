"""Signals that request a stop: the main process handles them, and the processes that it starts ignore them.

``timeout``, systemd, SLURM and a closed terminal send theirs to all processes of a run at once. If these ended the
worker processes, training could not continue to its checkpoint.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

# Ctrl-C; the signal of `timeout`, systemd, SLURM and `docker stop`; and that of a closed terminal (not on Windows)
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
ENDS_WITH_STDIN = "PATCHLOOM_ENDS_WITH_STDIN"  # environment variable: the process stops when its standard input closes
# seconds for which a signal counts as repeated: `timeout` signals a process, then its group; keys repeat; and Python
# handles a signal after the operation that is under way, such as the backward pass of a large model
_SAME = 3.0
_HELD = 5.0  # seconds for which a key may be held before it counts as a second Ctrl-C
_LATER = 0.05  # seconds before a lost signal is sent again


class Stop:
    """Context in which Ctrl-C, SIGTERM and SIGHUP only set ``asked``; a second Ctrl-C acts at once.

    A second SIGTERM or SIGHUP does not: programs send these more than once, for example when one forwards a signal that
    another has sent to all, and they can send SIGKILL. A signal that was ignored at the start of the process, as by
    nohup, stays ignored. A signal within three seconds of the last one counts as the same: a held key, or a launcher
    that repeats it.

    Args:
        words: message that is shown on a terminal at the first signal.
    """

    def __init__(self, words: str = "") -> None:
        self.asked, self.words = False, words
        self._times = [-math.inf, -math.inf]  # of the first and the last signal of those that count as one
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            for number in SIGNALS:
                # a shell starts background jobs with Ctrl-C ignored
                if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._ask)
            outer = getattr(self._before[signal.SIGINT], "__self__", None)
            if isinstance(outer, Stop):  # after this context the key may still be held
                self._times = outer._times
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number != signal.SIGINT:
            return
        same = self._is_the_same()
        if not self.asked:
            self.asked = True
            if self.words and os.isatty(2):
                os.write(2, f"\n{self.words}\n".encode())  # print cannot be called again while it is interrupted
        elif not same:
            raise KeyboardInterrupt

    def _is_the_same(self) -> bool:
        """Return whether the signal only repeats the last one."""
        came, (first, last) = time.monotonic(), self._times
        same = came - last < _SAME and came - first < _HELD
        self._times[:] = first if same else came, came
        return same


class StopAtOnce(Stop):
    """Context in which each of these signals raises KeyboardInterrupt, and sets ``asked``."""

    def __enter__(self) -> StopAtOnce:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        sys.unraisablehook = self._hook

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self._is_the_same():
            raise KeyboardInterrupt

    def _unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        """Send the signal again a little later if it came during a fork or in a finaliser, which cannot raise."""
        if not (self._before and issubclass(lost.exc_type, KeyboardInterrupt)):
            self._hook(lost)
            return
        self._times[:] = -math.inf, -math.inf

        def again() -> None:
            if self._before:
                os.kill(os.getpid(), signal.SIGINT)  # handled by the main thread

        threading.Timer(_LATER, again).start()


class _Worker(multiprocessing.Process):
    """Process that leaves signals to the main one, so that it is ended by SIGKILL."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        begun: Any = multiprocessing.Process._Popen(process_obj)
        begun.terminate = begun.kill
        return begun


def worker_context() -> BaseContext:
    """Return a context for multiprocessing whose processes can be ended although they ignore signals."""
    context: Any = copy.copy(multiprocessing.get_context())
    context.Process = _Worker
    return context


@contextmanager
def starting_workers() -> Iterator[None]:
    """Block signals in processes that are started inside this block, until `leave_signals`."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals() -> None:
    """Ignore signals in a process that the main one has started, and leave them to that one."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def stop_with_parent() -> None:
    """Ask this process to stop, as SIGTERM does, when its parent ends, for any reason.

    The parent requests this by `ENDS_WITH_STDIN`: standard input is then a pipe from it, which closes with it.
    """
    if not os.environ.pop(ENDS_WITH_STDIN, ""):
        return

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def discard_output() -> None:
    """Discard printed output: the terminal was closed, or the reader of a pipe has ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
