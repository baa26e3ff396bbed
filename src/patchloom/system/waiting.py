"""Waiting of OpenMP's threads: they spin while the machine is idle, and sleep while others need its cores.

torch's threads wait for each other thousands of times a second. libgomp, which comes with torch on Linux, lets a thread
spin for milliseconds before it sleeps: waking it takes longer than most waits. Beside other work the spinning takes the
cores from the threads that are waited for, and a training becomes many times slower (benchmarks/README.md).
No fixed number of spins suits both. But libgomp spins only briefly while a program has more OpenMP threads than there
are cores (``GOMP_SPINCOUNT`` in its manual). So a thread here watches the load, and opens a second team of threads,
which sleep, while the machine is busy. Results are the same to the bit: as many threads as before compute them.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from functools import cache

import torch

from patchloom.system import load
from patchloom.system.device import openmp_libraries, own_cores

_EVERY = 0.5  # seconds between two looks at the load
_BUSY = 0.25  # share of the cores that others use above which threads sleep
_CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # variables by which a user chooses


class SleepingTeam:
    """Team of OpenMP threads that sleep: with torch's threads, more than there are cores, so that all sleep soon.

    Args:
        library: libgomp.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._closing, ready = library, threading.Event(), threading.Event()
        # a team belongs to the thread that opened it, and ends with it
        self._owner = threading.Thread(target=self._hold, args=(ready,), name="patchloom team", daemon=True)
        self._owner.start()
        ready.wait()

    def _hold(self, ready: threading.Event) -> None:
        nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)  # each thread has to call some C function
        # this thread is one of the team that libgomp does not count
        threads = max(2, len(own_cores()) - torch.get_num_threads() + 2)
        self._library.GOMP_parallel(nothing, None, ctypes.c_uint(threads), ctypes.c_uint(0))
        ready.set()
        self._closing.wait()

    def close(self) -> None:
        """End the team."""
        self._closing.set()
        self._owner.join()


@cache
def sleep_when_busy() -> bool:
    """Let the threads of this process sleep instead of spin while other programs work, from now to its end.

    Returns:
        Whether this is possible: with libgomp, on Linux, if neither ``OMP_WAIT_POLICY`` nor ``GOMP_SPINCOUNT`` is set.
    """
    library = _libgomp()
    if library is None or any(name in os.environ for name in _CHOSEN):
        return False
    threading.Thread(target=_watch, args=(library,), name="patchloom load", daemon=True).start()
    return True


def _watch(library: ctypes.CDLL) -> None:
    team, before = None, _others()
    while before is not None:
        time.sleep(_EVERY)
        if (now := _others()) is None:
            return
        share = (now[1] - before[1]) / max(1e-9, (now[0] - before[0]) * len(own_cores()))
        before = now
        if share > _BUSY and team is None:
            team = SleepingTeam(library)
        elif share <= _BUSY and team is not None:
            team.close()
            team = None


def _others() -> tuple[float, float] | None:
    """Return the time, and the seconds that our cores have worked for other processes; None if unknown.

    Others are also this program's own workers: they need cores, too.
    """
    ticks = load.worked()
    return None if ticks is None else (time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK") - time.process_time())


def _libgomp() -> ctypes.CDLL | None:
    """Return the OpenMP library that torch has loaded, if it is GNU's."""
    loaded = openmp_libraries()
    return ctypes.CDLL(loaded.pop()) if len(loaded) == 1 else None
