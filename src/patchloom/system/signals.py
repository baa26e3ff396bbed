"""Signals that ask for an end: the main process acts upon them, and the processes that it starts leave them to it.

``timeout``, systemd, SLURM and a terminal that is closed send theirs to all processes of a run at once. If those that
read images ended by it, training could not go on to its checkpoint.
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

# Ctrl-C; what `timeout`, systemd, SLURM and `docker stop` send; and what a terminal that is closed sends (no Windows)
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
ENDS_WITH_STDIN = "PATCHLOOM_ENDS_WITH_STDIN"  # in the environment of a process that another one started
_SAME = 1.0  # seconds: `timeout` sends its signal to a process, and once more to its group; keys begin to repeat
_HELD = 5.0  # seconds for which a key may be held before it means that there is no time
_LATER = 0.05  # seconds


class Stop:
    """While entered, Ctrl-C, SIGTERM and SIGHUP only set ``asked``; Ctrl-C a second time acts at once.

    The others do not: programs send them, more than once where one program forwards what another one has sent to all,
    and have SIGKILL if they must. One that the process was begun to ignore, as by nohup, stays ignored. What comes
    within a second of the last one is the same one: a key that is held, or a launcher that repeats it.

    Args:
        words: are shown on a terminal when the first one comes.
    """

    def __init__(self, words: str = "") -> None:
        self.asked, self.words = False, words
        self._first = self._last = -math.inf
        self._before: dict[int, Any] = {}
        self._outer: Stop | None = None
        self._arrivals = _Arrivals()

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            for number in SIGNALS:
                # a shell begins whatever it runs in the background with Ctrl-C ignored
                if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._ask)
            outer = getattr(self._before[signal.SIGINT], "__self__", None)
            self._outer = outer if isinstance(outer, Stop) else None
            self._arrivals.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._arrivals.end()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._outer is not None:  # the key may still be held
            self._outer._first = max(self._outer._first, self._first)
            self._outer._last = max(self._outer._last, self._last)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number != signal.SIGINT:
            return
        same = self._is_the_same()
        if not self.asked:
            self.asked = True
            if self.words and os.isatty(2):
                os.write(2, f"\n{self.words}\n".encode())  # print is not to be interrupted by itself
        elif not same:
            raise KeyboardInterrupt

    def _is_the_same(self) -> bool:
        """Whether the signal that has come only repeats the last one."""
        came = self._arrivals.last()
        same = came - self._last < _SAME and came - self._first < _HELD
        self._first, self._last = self._first if same else came, came
        return same


class StopAtOnce(Stop):
    """While entered, each of these signals raises KeyboardInterrupt, and sets ``asked``."""

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
        """Where it came amid a fork or a finaliser, from which nothing is raised, it comes again a little later."""
        if not (self._before and issubclass(lost.exc_type, KeyboardInterrupt)):
            self._hook(lost)
            return
        self._last = -math.inf
        main = threading.main_thread().ident
        assert main is not None  # it has been started

        def again() -> None:
            if self._before:
                signal.pthread_kill(main, signal.SIGINT)

        threading.Timer(_LATER, again).start()


class _Arrivals:
    """When the last signal came.

    Python calls its handlers between two of its own instructions, and one of them can be a whole backward pass: a
    second signal right after the first may be handled seconds later. But the system's handler writes into a file at
    once, and the file knows when it was written to. (It is one in memory, as Linux has them; elsewhere the time of
    handling has to do. A pipe would not do: Linux does not keep its times.)
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._known, self._size = -math.inf, 0

    def begin(self) -> None:
        """From now on, keep the times; in the main thread alone."""
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("signals")
            os.set_blocking(self._file, False)
            self._before = signal.set_wakeup_fd(self._file, warn_on_full_buffer=False)

    def end(self) -> None:
        """Leave things as they were."""
        if self._file is not None:
            signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
            file, self._file = self._file, None
            os.close(file)

    def last(self) -> float:
        """The time of the last one, on the clock of `time.monotonic`; now, where it is not known."""
        now, wall = time.monotonic(), time.time()
        if self._file is None:
            return now
        found = os.fstat(self._file)
        if found.st_size != self._size:  # else it was written to before the handler of another one looked
            self._size, self._known = found.st_size, now - max(0.0, wall - found.st_mtime)
        return self._known


class _Worker(multiprocessing.Process):
    """A process that leaves signals to the main one, so that what shall end it is SIGKILL."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        begun: Any = multiprocessing.Process._Popen(process_obj)
        begun.terminate = begun.kill
        return begun


def worker_context() -> BaseContext:
    """For multiprocessing: its processes can be ended although they ignore signals."""
    context: Any = copy.copy(multiprocessing.get_context())
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
    parent = multiprocessing.parent_process()
    assert parent is not None  # of a worker

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def stop_with_parent() -> None:
    """Ask this process to stop, as SIGTERM does, when the one that started it ends, whatever ended that one.

    Only where that one asks for it by `ENDS_WITH_STDIN`: standard input is a pipe from it then, and ends with it.
    """
    if not os.environ.pop(ENDS_WITH_STDIN, ""):
        return

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def discard_output() -> None:
    """Let what is printed go nowhere: the terminal was closed, or the reader of a pipe went away."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
