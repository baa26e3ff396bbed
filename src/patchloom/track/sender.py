"""One tracker in a thread of its own, so that training never waits for it, and nothing that it does ends the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from patchloom.track.base import Place, Tracker

Job = Callable[[Tracker], None]


class _Last(NamedTuple):
    """The job after which there are no more."""

    status: str


class Sender:
    """Gives a tracker what it is sent, in that order, until something fails.

    Args:
        name: of the tracker.
        make: makes it, in the thread: its package may take seconds to be imported, and a server may not answer.
        place: of the run.

    Attributes:
        sent: what the tracker has by now.
        where: people see it; "" until it is ready.
        problem: what switched it off, in words; "" while all is well.
    """

    def __init__(self, name: str, make: Callable[[Place], Tracker], place: Place):
        self.name, self.sent, self.where, self.problem = name, place.sent, "", ""
        self._make, self._place = make, place
        self._jobs: SimpleQueue[Job | _Last] = SimpleQueue()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def ready(self, seconds: float) -> bool:
        """Whether the tracker can be used within so many seconds, or never will."""
        return self._ready.wait(seconds)

    def send(self, job: Job) -> None:
        """Have something done with the tracker, some time."""
        if not self.problem:
            self._jobs.put(job)

    def finish(self, status: str, seconds: float) -> bool:
        """Tell the tracker that the run ends, and wait for all that it was sent.

        Args:
            status: success, aborted or failed, as lightning-fabric's loggers take it.
            seconds: to wait at most.

        Returns:
            Whether it took all in that time, or was switched off before.
        """
        self._jobs.put(_Last(status))
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            tracker = self._make(self._place)
            self.where = tracker.where
            self._ready.set()
            while not isinstance(job := self._jobs.get(), _Last):
                job(tracker)
            tracker.finalize(job.status)
        except BaseException as problem:  # whatever ends a tracker, SystemExit among it, is no reason to end the run
            said = " ".join(str(problem).split())
            self.problem = f"{type(problem).__name__}: {said}" if said else type(problem).__name__
        finally:
            self._ready.set()


def wait_for(senders: list[Sender], seconds: float) -> None:
    """Wait until all can be used, or for so many seconds in all."""
    end = time.monotonic() + seconds
    for one in senders:
        one.ready(max(0.0, end - time.monotonic()))
