"""All trackers of a run: what it tells goes to each of them, and one that fails is switched off in a sentence."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL import Image

from patchloom.errors import PatchloomError, Stopped
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import Settings
from patchloom.track.base import Place, Result, Sent, Tracker, numbers_of, read_sent, write_sent
from patchloom.track.names import tracker_class
from patchloom.track.sender import Sender, wait_for
from patchloom.waiting import Waiting

_START = 60.0  # seconds that the run waits for its trackers at its start; one that takes longer gets all later
_END = 60.0  # seconds that each may take at the end for what it has not taken yet


class Tracks:
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

    def __enter__(self) -> Tracks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = kind is not None and issubclass(kind, Stopped | KeyboardInterrupt)
        self.close("success" if kind is None else "aborted" if stopped else "failed")

    def start(self, settings: Settings, rows: Sequence[Mapping[str, str]], went_back: Sequence[int] = ()) -> None:
        """Begin with the settings, and with the rows that a tracker has not taken yet.

        Args:
            settings: resolved.
            rows: of ``metrics.csv`` so far.
            went_back: steps to which the run went back so far, which it may have done in a start without a tracker.
        """
        self._senders = [one for name in self.names if (one := self._sender(name)) is not None]
        if not self._senders:
            return
        with Waiting(f"starting {', '.join(one.name for one in self._senders)}"):
            wait_for(self._senders, _START)
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
        """Send PNG files, as they are now.

        Args:
            files: of any kind; others than PNG stay here.
            step: after which they were drawn.
            ended: the run has. They may be of other weights than pictures of the same step: an early stop goes back to
                the best ones.
        """
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

    def result(self, result: Result, step: int) -> None:
        """Send what the run says at its end."""
        for one in self._senders:
            one.send(partial(_result, result=result, step=step))
        self._look()

    def close(self, status: str) -> None:
        """Let each tracker take what it was sent, for a minute at most, and end the run there."""
        for one in self._senders:
            with Waiting(f"waiting for {one.name}"):
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
        place = Place(folder, self.folder.path.name, sent, self._keep(name, sent))
        return Sender(name, lambda found: tracker_class(name)(found), place)

    def _keep(self, name: str, sent: Sent) -> Callable[[], None]:
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
        tracker.log_metrics(numbers_of(row), step)
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


def _result(tracker: Tracker, result: Result, step: int) -> None:
    sent = tracker.place.sent
    if not sent.ended:
        tracker.log_result(result, step)
        sent.ended = True
        tracker.place.keep()
