"""What a tracker is given, and what it keeps of what it was given."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning_fabric.loggers import Logger
from PIL.Image import Image

from patchloom.errors import PatchloomError
from patchloom.system.files import write_whole

PROJECT = "patchloom"  # under which runs stand in a tracker, where its own variable of the environment names no other


@dataclass
class SentRecord:
    """What a tracker was given already, kept in the run's folder, so that a run that goes on does so there, too.

    Attributes:
        id: by which the tracker knows the run; "" before it has one.
        step: of the last row of ``metrics.csv`` that it took; -1 before the first.
        pictured: step of the last pictures; -1 before the first.
        shown: whether it has the pictures of the run's end.
        ended: whether it has the result.
        setbacks: of the run that it knows of.
    """

    id: str = ""
    step: int = -1
    pictured: int = -1
    shown: bool = False
    ended: bool = False
    setbacks: int = 0


class RunLocation(NamedTuple):
    """Where a tracker finds the run.

    Attributes:
        folder: for the tracker's own files, in that of the run; it may not be there yet.
        name: of the run.
        sent: what was sent before.
        keep: writes ``sent`` into the folder.
    """

    folder: Path
    name: str
    sent: SentRecord
    keep: Callable[[], None]


class FinalResult(NamedTuple):
    """What a run says at its end.

    Attributes:
        verdict: in words.
        summary: the closing sentence.
        rows: the results that it quotes, a row an encoder or control, all with the same columns.
    """

    verdict: str
    summary: str
    rows: Sequence[Mapping[str, str]]


class Tracker(Logger):
    """A tracker of experiments. Whatever its methods raise switches it off; the run goes on.

    Args:
        place: of the run.
    """

    def __init__(self, place: RunLocation):
        self.place = place

    @property
    def name(self) -> str:
        """Of the run."""
        return self.place.name

    @property
    def version(self) -> str:
        """By which the tracker knows the run."""
        return self.place.sent.id

    @property
    @abstractmethod
    def where(self) -> str:
        """Where people see it, in a few words."""

    @abstractmethod
    def log_pictures(self, pictures: Mapping[str, Image], step: int) -> None:
        """Take pictures in RGB by name, as they are after so many steps."""

    @abstractmethod
    def log_result(self, result: FinalResult, step: int) -> None:
        """Take what the run says at its end, after so many steps."""

    def rewind(self, step: int) -> None:
        """Forget what came after ``step``, if that can be: the run went back there and does the rest again."""


def read_sent(path: Path) -> SentRecord:
    """What `write_sent` wrote; nothing was sent if there is no such file."""
    try:
        found = json.loads(path.read_text("utf-8"))
        shown, setbacks = bool(found.get("shown", False)), int(found.get("setbacks", 0))
        steps = int(found["step"]), int(found["pictured"])
        return SentRecord(str(found["id"]), *steps, shown, bool(found["ended"]), setbacks)
    except FileNotFoundError:
        return SentRecord()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
        raise PatchloomError(f"{path} is damaged: delete it, and a new run begins there") from problem


def write_sent(sent: SentRecord, path: Path) -> None:
    """Keep what was sent."""
    write_whole(path, json.dumps(asdict(sent)) + "\n")


def mark_unfinished(folder: Path) -> None:
    """Have every tracker take another end of the run: it is trained on."""
    ending = folder / "ending.json"
    for path in folder.glob("*.json"):
        if path != ending:
            with suppress(PatchloomError):  # damaged: said when the tracker begins
                write_sent(replace(read_sent(path), ended=False, shown=False), path)
    ending.unlink(missing_ok=True)


def scalar_metrics(row: Mapping[str, str]) -> dict[str, float]:
    """The columns of a row of ``metrics.csv`` but its step, grouped as trackers group: ``baseline/chance``."""
    return {name.replace(":", "/"): float(value) for name, value in row.items() if value and name != "step"}


def scores_of(result: FinalResult) -> dict[str, float]:
    """The quoted results as numbers: ``results/knn/untrained``."""
    return {f"results/{row['protocol']}/{row['encoder']}": float(row["value"]) for row in result.rows}


def markdown_table(values: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same columns as a table of Markdown; "" of none."""
    if not values:
        return ""
    names = list(values[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in values)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
