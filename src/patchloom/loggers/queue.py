"""All trackers of a run: what it tells goes to each of them, and one that fails is switched off in a sentence."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

from PIL import Image

from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError, Stopped
from patchloom.loggers.base import FinalResult, RunLocation, SentRecord, Tracker, read_sent, scalar_metrics, write_sent
from patchloom.loggers.registry import tracker_class
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import Settings

# One tracker in a thread of its own, so that training never waits for it, and nothing that it does ends the run.


TrackerCall = Callable[[Tracker], None]


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

    def __init__(self, name: str, make: Callable[[RunLocation], Tracker], place: RunLocation):
        self.name, self.sent, self.where, self.problem = name, place.sent, "", ""
        self._make, self._place = make, place
        self._jobs: SimpleQueue[TrackerCall | _Last] = SimpleQueue()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def ready(self, seconds: float) -> bool:
        """Whether the tracker can be used within so many seconds, or never will."""
        return self._ready.wait(seconds)

    def send(self, job: TrackerCall) -> None:
        """Have something done with the tracker, some time."""
        if not self.problem:
            self._jobs.put(job)

    def finish(self, status: str, seconds: float) -> bool:
        """Tell the tracker that the run ends, and wait for all that it was sent."""
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


def wait_until_ready(senders: list[Sender], seconds: float) -> None:
    """Wait until all can be used, or for so many seconds in all."""
    end = time.monotonic() + seconds
    for one in senders:
        one.ready(max(0.0, end - time.monotonic()))


_START = 60.0  # seconds that the run waits for its trackers at its start; one that takes longer gets all later
_END = 60.0  # seconds that each may take at the end for what it has not taken yet


class TrackerSet:
    """The trackers of a run; to be entered, and left at its end, which ends them there, too.

    Each has a thread of its own (see `Sender`), and remembers in ``logs/NAME.json`` what it took, so that a run that
    goes on sends what it lacks and nothing twice. A tracker that was not asked for before gets all rows.

    Args:
        names: of the trackers; in processes other than the first, none.
        folder: of the run.
        say: prints a line.
    """

    def __init__(self, names: Sequence[str] = (), folder: RunFolder | None = None, say: Callable[[str], None] = print):
        self.names, self.folder, self.say = names, folder, say
        self._senders: list[Sender] = []
        self._said: set[str] = set()

    def __enter__(self) -> TrackerSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = kind is not None and issubclass(kind, Stopped | KeyboardInterrupt)
        self.close("success" if kind is None else "aborted" if stopped else "failed")

    def start(self, settings: Settings, rows: Sequence[Mapping[str, str]], went_back: Sequence[int] = ()) -> None:
        """Begin with the settings, and with the rows that a tracker has not taken yet."""
        self._senders = [one for name in self.names if (one := self._sender(name)) is not None]
        if not self._senders:
            return
        with StatusMessage(f"starting {', '.join(one.name for one in self._senders)}"):
            wait_until_ready(self._senders, _START)
        for one in self._senders:
            if one.where:
                self.say(f"  {one.name}: {one.where}")
            one.send(partial(_back, went_back=tuple(went_back)))
            one.send(partial(_settings, values=dict(_by_name(settings.plain()))))
            for row in rows:
                one.send(partial(_row, row=dict(row)))
        self._look()

    def row(self, row: Mapping[str, str]) -> None:
        """Send a row of ``metrics.csv``."""
        for one in self._senders:
            one.send(partial(_row, row=dict(row)))
        self._look()

    def pictures(self, files: Sequence[Path], step: int, ended: bool = False) -> None:
        """Send PNG files, as they are now."""
        if not self._senders:
            return
        found = {path.stem: path.read_bytes() for path in files if path.suffix == ".png"}
        for one in self._senders:
            one.send(partial(_pictures, pictures=found, step=step, ended=ended))
        self._look()

    def back(self, went_back: Sequence[int]) -> None:
        """Tell to after which steps the run went back so far, the last time just now; it does the rest again."""
        for one in self._senders:
            one.send(partial(_back, went_back=tuple(went_back)))

    def result(self, result: FinalResult, step: int) -> None:
        """Send what the run says at its end."""
        for one in self._senders:
            one.send(partial(_result, result=result, step=step))
        self._look()

    def close(self, status: str) -> None:
        """Let each tracker take what it was sent, for a minute at most, and end the run there."""
        for one in self._senders:
            with StatusMessage(f"waiting for {one.name}"):
                if not one.finish(status, _END):
                    self.say(
                        f"  {one.name} did not take all that it was sent within {_END:g} s; the rest is in the run"
                    )
        self._look()
        self._senders = []

    def _sender(self, name: str) -> Sender | None:
        folder = self.folder.path / "logs"
        try:
            sent = read_sent(folder / f"{name}.json")
        except PatchloomError as problem:
            self._off(name, str(problem))
            return None
        place = RunLocation(folder, self.folder.path.name, sent, self._keep(name, sent))
        return Sender(name, lambda found: tracker_class(name)(found), place)

    def _keep(self, name: str, sent: SentRecord) -> Callable[[], None]:
        """What writes down how much a tracker has; it refuses where the run's folder is another one by now."""
        path, folder = self.folder.path / "logs" / f"{name}.json", self.folder

        def keep() -> None:
            folder.check_lock()
            write_sent(replace(sent), path)

        return keep

    def _look(self) -> None:
        """Say of each tracker that has failed since that it is switched off."""
        for one in self._senders:
            if one.problem:
                self._off(one.name, one.problem)

    def _off(self, name: str, why: str) -> None:
        if name not in self._said:
            self._said.add(name)
            self.say(f"  {name} is switched off, and the run goes on without it: {why}")


def _by_name(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted name; those that are None are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _by_name(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def _settings(tracker: Tracker, values: dict[str, Any]) -> None:
    tracker.log_hyperparams(values)


def _row(tracker: Tracker, row: Mapping[str, str]) -> None:
    """Give a tracker a row, unless it has it: one that a run makes again after a kill is the same."""
    step, sent = int(row["step"]), tracker.place.sent
    if step > sent.step:
        tracker.log_metrics(scalar_metrics(row), step)
        sent.step = step
        tracker.place.keep()


def _pictures(tracker: Tracker, pictures: Mapping[str, bytes], step: int, ended: bool) -> None:
    sent = tracker.place.sent
    if not sent.shown if ended else step > sent.pictured:
        images = {name: Image.open(io.BytesIO(png)).convert("RGB") for name, png in pictures.items()}
        tracker.log_pictures(images, step)
        sent.pictured, sent.shown = step, ended
        tracker.place.keep()


def _back(tracker: Tracker, went_back: tuple[int, ...]) -> None:
    """Have what came after setbacks that the tracker does not know of taken again: the learning rate is another."""
    sent = tracker.place.sent
    if len(went_back) <= sent.setbacks:
        return
    step, sent.setbacks = min(went_back[sent.setbacks :]), len(went_back)
    if max(sent.step, sent.pictured) > step:
        sent.step, sent.pictured = min(sent.step, step), min(sent.pictured, step)
        tracker.rewind(step)
    tracker.place.keep()


def _result(tracker: Tracker, result: FinalResult, step: int) -> None:
    sent = tracker.place.sent
    if not sent.ended:
        tracker.log_result(result, step)
        sent.ended = True
        tracker.place.keep()
