"""Signals that ask for an end: the main process acts upon them, and the processes that it starts leave them to it.

``timeout``, systemd, SLURM and a terminal that is closed send theirs to all processes of a run at once. If those that
read images ended by it, training could not go on to its checkpoint.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from types import FrameType
from typing import Any

# Ctrl-C; what `timeout`, systemd, SLURM and `docker stop` send; and what a terminal that is closed sends (no Windows)
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_SAME = 1.0  # seconds: `timeout` sends its signal to a process, and once more to its group
_LATER = 0.05  # seconds


class Stop:
    """While entered, Ctrl-C, SIGTERM and SIGHUP only set ``asked``; Ctrl-C a second time acts at once.

    The others do not: programs send them, more than once where one program forwards what another one has sent to all,
    and have SIGKILL if they must. One that the process was begun to ignore, as by nohup, stays ignored.
    """

    def __init__(self) -> None:
        self.asked = False
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            for number in SIGNALS:
                # a shell begins whatever it runs in the background with Ctrl-C ignored
                if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT and time.monotonic() - self._first > _SAME:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked, self._first = True, time.monotonic()


class StopAtOnce(Stop):
    """While entered, each of these signals raises KeyboardInterrupt, and sets ``asked``."""

    def __enter__(self) -> StopAtOnce:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        sys.unraisablehook = self._hook

    def _ask(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if again and time.monotonic() - self._first < _SAME:
            return
        self._first = time.monotonic()
        raise KeyboardInterrupt

    def _unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        """Where it came amid a fork or a finaliser, from which nothing is raised, it comes again a little later."""
        if not (self._before and issubclass(lost.exc_type, KeyboardInterrupt)):
            self._hook(lost)
            return
        self._first -= _SAME
        main = threading.main_thread().ident
        threading.Timer(_LATER, lambda: self._before and signal.pthread_kill(main, signal.SIGINT)).start()


class _Worker(multiprocessing.Process):
    """A process that leaves signals to the main one, so that what shall end it is SIGKILL."""

    @staticmethod
    def _Popen(process_obj: multiprocessing.Process) -> object:
        begun: Any = multiprocessing.Process._Popen(process_obj)
        begun.terminate = begun.kill
        return begun


def worker_context() -> BaseContext:
    """For multiprocessing: its processes can be ended although they ignore signals."""
    context = copy.copy(multiprocessing.get_context())
    context.Process = _Worker
    return context


@contextmanager
def starting_workers() -> Iterator[None]:
    """While entered, processes are started to which no signal comes before `leave_signals`."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals() -> None:
    """In a process that the main one has started: leave it to that one what to do about signals."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def end_with_parent() -> None:
    """End this process when the one that started it ends, whatever ended that one."""
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def nobody_reads() -> None:
    """Let what is printed go nowhere: the terminal was closed, or the reader of a pipe went away."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
