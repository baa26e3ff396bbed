"""Load of the machine by other programs, and what a CPU quota withholds: facts for forecasts and for a run's lines."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from patchloom.system import device
from patchloom.system.device import control_groups, cores, own_cores

_BUSY = 0.15  # share of our cores used by others above which a machine is busy, or of our work that a quota stopped
_IDLE = 0.25  # share of our cores that are idle above which it is not
# seconds over which a run's load is measured, and between two reports: at first, and at most
_WATCHED, _QUIET_FOR, _QUIET_MOST = 30.0, 300.0, 3600.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """Cores that this program had to do without for a while.

    Attributes:
        cores: number of cores on which it may run.
        wanted: number of cores that it computes with.
        own: mean number of cores that this program used, with its processes.
        others: mean number of cores that other programs used; None if unknown (not on Linux).
        withheld: mean number of cores on which a CPU quota stopped it.
    """

    cores: int = 1
    wanted: int = 1
    own: float = 0.0
    others: float | None = None
    withheld: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether that makes it clearly slower."""
        return bool(self._facts())

    def _facts(self) -> list[str]:
        others = self.others or 0.0
        full = self.cores - self.own - others < _IDLE * self.cores  # otherwise this program waited for something else
        facts = []
        if full and others - (self.cores - self.wanted) > _BUSY * self.wanted:
            facts.append(f"other programs use {others:.1f} of {self.cores} cores")
        if self.withheld > _BUSY * self.own > 0:  # own is 0 if it is unknown
            facts.append(f"a CPU quota leaves {self.own:.1f} of {self.cores} cores")
        return facts

    def sentence(self, meaning: str = "times are those of a busy machine") -> str:
        """Return a line on a busy machine and what that means; "" for a quiet one."""
        facts = self._facts()
        return f"{' and '.join(facts)}: {meaning}" if facts else ""

    def plain(self) -> dict[str, Any]:
        """Return values for JSON."""
        return {
            "busy": self.busy,
            "cores": self.cores,
            "wanted_cores": self.wanted,
            "own_cores": self.own,
            "other_cores": self.others,
            "withheld_cores": self.withheld,
        }


class BackgroundLoad:
    """Measurement of the load by other programs, from now on."""

    def __init__(self) -> None:
        self._begun = time.perf_counter(), _ticks(), _seconds_withheld()

    def load(self) -> Load:
        """Return the load since the beginning."""
        begun, ticks, withheld = self._begun
        now, passed = _ticks(), max(1e-9, time.perf_counter() - begun)
        there, own, others = len(own_cores()), 0.0, None
        if ticks is not None and now is not None:
            rate = 1 / os.sysconf("SC_CLK_TCK") / passed
            worked, own = ((after - before) * rate for after, before in zip(now, ticks, strict=True))
            others = min(float(there), max(0.0, worked - own))
        return Load(
            cores=there,
            wanted=min(there, cores(), torch.get_num_threads()),
            own=own,
            others=others,
            withheld=max(0.0, _seconds_withheld() - withheld) / passed,
        )


class LoadWatch:
    """Report of a run on a machine that becomes busy or quiet, now and then.

    Args:
        clock: function that returns seconds.

    Attributes:
        told: whether the last report was that the machine is busy.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.told, self.clock = False, clock
        self._due, self._pause = clock() + _WATCHED, _QUIET_FOR
        self._quiet_until = clock()
        self._seen = BackgroundLoad()

    def news(self) -> str:
        """Return a line if the machine has become busy or quiet; "" otherwise."""
        now = self.clock()
        if now < self._due:
            return ""
        load = self._seen.load()
        self._seen, self._due = BackgroundLoad(), now + _WATCHED
        if load.busy == self.told or now < self._quiet_until:
            return ""
        self.told = load.busy
        self._quiet_until, self._pause = now + self._pause, min(2 * self._pause, _QUIET_MOST)
        busy = load.sentence("the time left is that of a busy machine")
        return busy or "the machine is no longer busy: the time left follows"


# fields of /proc/PID/stat after the name: parent; ticks of the process, and of ended processes that it waited for
_PARENT, _TICKS = 1, slice(11, 15)


def worked() -> int | None:
    """Return the clock ticks that our cores have worked since the system started; None if that is unknown."""
    names = {f"cpu{number}" for number in own_cores()}
    try:
        lines = [line.split() for line in (device.PROC / "stat").read_text("ascii").splitlines()]
        times = [list(map(int, words[1:])) for words in lines if words[0] in names]
    except (OSError, ValueError, IndexError):
        return None
    # all but idle and waiting for the disc, and without guests, which are in the first two
    return sum(sum(one[:3]) + sum(one[5:8]) for one in times) or None


def _ticks() -> tuple[int, int] | None:
    """Return the clock ticks that our cores have worked, and this program with its processes; None if unknown."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    try:
        for path in device.PROC.glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                fields = path.read_text("utf-8", "replace").rpartition(")")[2].split()  # a name may hold anything
                ticks[number := int(path.parent.name)] = sum(map(int, fields[_TICKS]))
                children.setdefault(int(fields[_PARENT]), []).append(number)
    except (OSError, ValueError, IndexError):
        return None
    launched = any(os.environ.get(name, "1") != "1" for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS"))
    # processes that train together have their launcher as parent
    own, todo = 0, [os.getppid() if launched else os.getpid()]
    while todo:
        number = todo.pop()
        own += ticks.get(number, 0)
        todo += children.get(number, [])
    return None if (all_ := worked()) is None else (all_, own)


def _seconds_withheld() -> float:
    """Return the seconds for which a CPU quota stopped cores of this process's control group; 0 without a quota."""
    found = [0.0]
    for folder in control_groups("cpu"):
        with contextlib.suppress(OSError):
            stat = (folder / "cpu.stat").read_text()
            for name, unit in (("throttled_usec", 1e6), ("throttled_time", 1e9)):  # of version 2, and of 1
                if value := re.search(rf"^{name} (\d+)$", stat, re.MULTILINE):
                    found.append(int(value[1]) / unit)
    return max(found)
