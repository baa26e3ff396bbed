"""Interface of an experiment tracker, and the record of data that was sent to it."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_fabric.loggers import Logger
from PIL.Image import Image

from patchloom.errors import PatchloomError, typed_fields
from patchloom.results.result import Result
from patchloom.results.verdict import Health
from patchloom.runs.folder import RunFolder
from patchloom.system.files import read_text, write_whole


class FinalResult(NamedTuple):
    """Result of a finished run.

    Attributes:
        step: last training step.
        verdict: verdict on the run, a sentence.
        summary: closing sentence of the run.
        results: quoted results, the run's encoder first in each protocol.
        images: file names of the last pictures, in the run's folder of pictures.
        health: the verdict; None if nothing was measured.
    """

    step: int
    verdict: str
    summary: str
    results: Sequence[Result] = ()
    images: Sequence[str] = ()
    health: Health | None = None

    @classmethod
    def read(cls, path: Path) -> FinalResult:
        """Read a result from its JSON, which may be untrusted, and refuse file names outside the folder of pictures.

        Raises:
            ValueError, TypeError, KeyError: if it is damaged.
        """
        values = json.loads(read_text(path))
        health = None if values["health"] is None else Health.of(values["health"])
        read = {"results": tuple(map(Result.of, values["results"])), "health": health}
        result = cls(**typed_fields(cls, values | read))
        if any(name == ".." or name != Path(name).name for name in result.images):
            raise ValueError("images have to be names of files")
        return result

    def plain(self) -> dict[str, Any]:
        health = None if self.health is None else self.health.plain()
        return self._asdict() | {"results": [one.plain() for one in self.results], "health": health}

    def table(self) -> list[dict[str, Any]]:
        """Return the quoted results as rows with the same columns; None for numbers that are not finite."""
        columns = ("protocol", "encoder", "measure", "value", "low", "high")
        return [{name: one.plain()[name] for name in columns} for one in self.results]

    def scores(self) -> dict[str, float]:
        """Return the held-out measure and the quoted results as metrics, such as ``results/knn/untrained``.

        The first result of a protocol is that of the run's encoder. It is called ``trained``, so that runs share a
        column.
        """
        found: dict[str, float] = {}
        for one in self.results:
            of_run = f"results/{one.protocol}/trained"
            found[f"results/{one.protocol}/{one.encoder}" if of_run in found else of_run] = one.value
        if self.health is None or self.health.measure is None:
            return found
        measure = self.health.measure
        way = measure.to_beat.share
        own = {"held_out": measure.value, "share": way.value, "share/low": way.low, "share/high": way.high}
        return {f"results/{name}": value for name, value in own.items() if math.isfinite(value)} | found

    def tags(self) -> dict[str, str]:
        """Return the verdict in a few words and its rule, for filtering runs."""
        if self.health is None:
            return {}
        return {"verdict_value": self.health.verdict.value, "verdict_rule": self.health.rule}


@dataclass
class SentRecord:
    """Record of the data sent to a tracker; it lies in the run's folder, so that a resumed run continues there.

    Attributes:
        id: identifier of the run in the tracker; "" before it has one.
        step: step of the last row of ``metrics.csv``; -1 before the first.
        images_step: step of the last pictures; -1 before the first.
        result_step: last step of the training whose result was sent; -1 before that.
    """

    id: str = ""
    step: int = -1
    images_step: int = -1
    result_step: int = -1

    @classmethod
    def read(cls, path: Path) -> SentRecord:
        """Read a record; return an empty one if there is no such file."""
        try:
            return cls(**typed_fields(cls, json.loads(read_text(path))))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as problem:
            raise PatchloomError(f"{path} is damaged: delete it, and a new run begins in the tracker") from problem


class Tracker(Logger):
    """Experiment tracker: lightning-fabric's ``Logger`` with pictures, a final result, and a record of sent data.

    A subclass opens the tracker's run in ``__init__``: a new one, whose identifier it puts into ``sent.id``, or the
    one that is named there. Any method may raise: the tracker is switched off then.

    Args:
        folder: folder of the run.
        kind: name of the tracker, as in ``--log``.

    Attributes:
        logs: folder for the tracker's own files; it may not exist yet.
        sent: record of the data sent to the tracker.
        location: where users find the run, in a few words.
    """

    location = ""

    def __init__(self, folder: RunFolder, kind: str):
        self.folder, self.logs = folder, folder.path / "logs"
        self._record = record_path(folder, kind)
        self.sent = SentRecord.read(self._record)

    @classmethod
    def server(cls) -> str:
        """Return the URL of the tracker's server; "" if it needs none, or it is not known."""
        return ""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def version(self) -> str:
        return self.sent.id

    @abstractmethod
    def log_images(self, images: Mapping[str, Image], step: int) -> None:
        """Log RGB pictures by name."""

    @abstractmethod
    def log_result(self, result: FinalResult) -> None:
        """Log verdict, summary and quoted results of a finished run."""

    def rewind(self, step: int) -> None:
        """Discard what was logged after ``step``, if the tracker can: training repeats those steps."""

    def save(self) -> None:
        """Write the record of sent data."""
        self.folder.check_lock()
        write_whole(self._record, json.dumps(asdict(self.sent)) + "\n")

    def send_row(self, row: Mapping[str, str]) -> None:
        """Log a row of ``metrics.csv``, once: a resumed run repeats rows, with the same numbers."""
        step = int(row["step"])
        if step > self.sent.step:
            # trackers group by slashes: baseline/chance
            values = {name.replace(":", "/"): float(value) for name, value in row.items() if value and name != "step"}
            self.log_metrics(values, step)
            self.sent.step = step
            self.save()

    def send_images(self, images: Mapping[str, Image], step: int) -> None:
        """Log pictures, once."""
        if step > self.sent.images_step:
            self.log_images(images, step)
            self.sent.images_step = step
            self.save()

    def send_rewind(self, step: int) -> None:
        """Accept later rows and pictures again: training repeats them with another learning rate."""
        self.sent.step, self.sent.images_step = min(self.sent.step, step), min(self.sent.images_step, step)
        self.rewind(step)
        self.save()

    def send_result(self, result: FinalResult, images: Mapping[str, Image]) -> None:
        """Log the last pictures and the result, once."""
        if result.step != self.sent.result_step:
            self.log_images(images, result.step)
            self.log_result(result)
            self.sent.images_step = self.sent.result_step = result.step
            self.save()


def record_path(folder: RunFolder, kind: str) -> Path:
    """Return the file that holds the `SentRecord` of a tracker."""
    return folder.path / "logs" / f"{kind}.json"
