"""Background sending to trackers: training never waits for a tracker, and no tracker can end a run."""

from __future__ import annotations

import csv
import io
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

from PIL import Image

from patchloom.display import StatusMessage, is_first, print_line
from patchloom.errors import PatchloomError, Stopped
from patchloom.loggers.base import FinalResult, SentRecord, Tracker, record_path
from patchloom.loggers.trackers import tracker_class
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import ResolvedSettings, settings_by_name
from patchloom.system.files import read_bytes, read_text, write_whole
from patchloom.system.network import why_unreachable

_START = 5.0  # seconds that training waits for a server at its start; a slower one is sent everything later
_END = 60.0  # seconds that each tracker has at the end to take the rest, and one without a server to start
_ABSENT = 10.0  # the same for a tracker whose server cannot be reached
_SOON = 5.0  # seconds after which the end says that it waits, and checks whether the server is there
_RESULT = "ending.json"  # holds the `FinalResult` of a run with trackers, until training continues


class Sender(threading.Thread):
    """Thread that makes a tracker and runs its jobs in order, until one fails.

    Args:
        name: name of the tracker.
        folder: folder of the run.

    Attributes:
        kind: class of the tracker.
        ready: set once the tracker is made, or has failed.
        location: where users find the run; "" until then.
        problem: reason why the tracker was switched off; "" while it works.
    """

    def __init__(self, name: str, folder: RunFolder):
        super().__init__(name=name, daemon=True)
        self.folder, self.location, self.problem = folder, "", ""
        self.kind, self.announced = tracker_class(name), False
        self.ready = threading.Event()
        self.jobs: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        """Make the tracker, and run jobs until there is a None."""
        try:
            tracker = self.kind(self.folder, self.name)
            self.location = tracker.location
            self.ready.set()
            while (job := self.jobs.get()) is not None:
                job(tracker)
        except PatchloomError as problem:
            self.problem = str(problem)
        except BaseException as problem:  # also SystemExit: nothing that a tracker raises may end the run
            self.problem = f"{type(problem).__name__}: {' '.join(str(problem).split())}".removesuffix(": ")
        finally:
            self.ready.set()

    def why_silent(self) -> str:
        """Return the reason why the tracker's server cannot be reached; "" if it can, or is not known."""
        server = self.kind.server()
        return why_unreachable(server) if server else ""


class TrackerSet(AbstractContextManager["TrackerSet"]):
    """Trackers of a run, as a context manager that ends the run there on exit.

    ``logs/NAME.json`` records the data sent to each, so that a resumed run sends only missing data. A tracker that is
    new to the run receives all rows.

    Args:
        names: names of the trackers; empty in all processes but the first.
        folder: folder of the run.
        say: function that prints a line.
    """

    def __init__(self, names: Sequence[str], folder: RunFolder, say: Callable[[str], None] = print_line):
        self.names, self.folder, self.say = names, folder, say
        self._senders: list[Sender] = []

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = kind is not None and issubclass(kind, Stopped | KeyboardInterrupt)
        self.close("success" if kind is None else "aborted" if stopped else "failed")

    def start(self, settings: ResolvedSettings, rows: Sequence[Mapping[str, str]]) -> None:
        """Start the trackers, and send the settings and all rows so far."""
        if not self.names:
            return
        self._senders = [Sender(name, self.folder) for name in self.names]
        with StatusMessage(f"starting {', '.join(self.names)}"):
            begun = time.monotonic()
            for one in self._senders:
                most = _START if one.kind.server() else _END
                one.ready.wait(max(0.0, begun + most - time.monotonic()))
            late = [(one, one.why_silent()) for one in self._senders if not one.ready.is_set()]
        for one, why in late:
            self.say(
                f"  {one.name} is not ready{why and f' ({why})'}: training begins, and it is sent everything once it is"
            )
        params = {name: one for name, one in settings_by_name(settings.plain()).items() if one is not None}
        self._send(lambda tracker: tracker.log_hyperparams(params))
        for row in rows:
            self.log_row(row)

    def log_row(self, row: Mapping[str, str]) -> None:
        """Send a row of ``metrics.csv``."""
        self._send(partial(Tracker.send_row, row=dict(row)))

    def log_images(self, files: Sequence[Path], step: int) -> None:
        """Send the current contents of PNG files."""
        if self._senders:
            self._send(partial(Tracker.send_images, images=_read_images(files), step=step))

    def rewind(self, step: int) -> None:
        """Tell the trackers that training went back to ``step``."""
        self._send(partial(Tracker.send_rewind, step=step))

    def log_result(self, result: FinalResult) -> None:
        """Send the last pictures and the result, and keep the result for `send_pending`."""
        if self.names:
            write_whole(self.folder.path / _RESULT, json.dumps(result.plain(), indent=1) + "\n")
            self._send_result(result)

    def _send_result(self, result: FinalResult) -> None:
        files = [file for name in result.images if (file := self.folder.pictures / name).exists()]
        self._send(partial(Tracker.send_result, result=result, images=_read_images(files)))

    def close(self, status: str) -> None:
        """Wait until the trackers have received everything, for up to a minute each, and end the run there.

        A tracker whose server cannot be reached has less time: the run's folder has all that it lacks.
        """
        self._send(lambda tracker: tracker.finalize(status))
        for one in self._senders:
            one.jobs.put(None)
            with StatusMessage(f"waiting for {one.name}"):
                one.join(min(_SOON, _END))
                if not one.is_alive():
                    continue
                why = one.why_silent()
                most = _ABSENT if why else _END
                note = f" ({why})" if why else ""
                self.say(f"  waiting up to {most:g} s for {one.name} to receive the rest{note}")
                one.join(max(0.0, most - _SOON))
                if one.is_alive():
                    self.say(
                        f"  {one.name} did not receive everything within {most:g} s{note}: the rest is in the run, and "
                        "the same command sends it"
                    )
        self._report()
        self._senders = []

    def _send(self, job: Callable[[Tracker], None]) -> None:
        self._report()
        for one in self._senders:
            one.jobs.put(job)

    def _report(self) -> None:
        for one in self._senders:
            if one.location and not one.announced:
                one.announced = True
                self.say(f"  {one.name}: {one.location}")
        for one in [one for one in self._senders if one.problem]:
            self._senders.remove(one)
            self.say(f"  {one.name} is switched off, and the run goes on without it: {one.problem}")


def send_pending(names: Sequence[str], folder: RunFolder, say: Callable[[str], None] = print_line) -> None:
    """Send trackers the missing data of a finished run, as after a kill at its end or a failure of the network.

    Args:
        names: names of the trackers.
        folder: folder of the run.
        say: function that prints a line.

    Raises:
        PatchloomError: if a file that this needs is damaged, or another process is training in the folder.
    """
    if not names or not is_first():
        return
    path = folder.path / _RESULT
    try:
        result = FinalResult.read(path)
        rows = list(csv.DictReader(io.StringIO(read_text(folder.metrics, newline=""))))
    except FileNotFoundError as problem:
        say(f"  nothing is sent to {', '.join(names)}: {problem.filename} is missing, as after a start without --log")
        return
    except (OSError, ValueError, TypeError, LookupError) as problem:
        raise PatchloomError(f"{path} or {folder.metrics} is damaged: restore it, or leave out --log") from problem
    names = [name for name in names if SentRecord.read(record_path(folder, name)).result_step != result.step]
    if not names:
        return
    folder.lock()
    try:
        with TrackerSet(names, folder, say) as trackers:
            trackers.start(folder.read_config(), rows)
            trackers._send_result(result)
    finally:
        folder.unlock()


def _read_images(files: Sequence[Path]) -> dict[str, Image.Image]:
    return {
        path.stem: Image.open(io.BytesIO(read_bytes(path))).convert("RGB") for path in files if path.suffix == ".png"
    }
