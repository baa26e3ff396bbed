"""What lies in a run's folder, read for a page: whatever is missing or damaged costs its own part of it alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from patchloom.errors import PatchloomError
from patchloom.look.curves import read_metrics
from patchloom.runs.folder import RunFolder
from patchloom.runs.health import Health, read_health
from patchloom.runs.sealed import read_sealed
from patchloom.runs.settings import Settings
from patchloom.sound import Sound, sound_from
from patchloom.waiting import duration

T = TypeVar("T")

_SILENT = 600.0  # seconds after which a run that is not finished is no longer said to be on the way
_WHY = "# What auto became, and why:"


@dataclass(frozen=True)
class Gathered:
    """A run as its folder tells of it.

    Attributes:
        folder: where it is.
        settings: with every ``auto`` resolved.
        asked: what was asked for; empty if that cannot be read.
        reasons: of what was ``auto``, by dotted name.
        metrics: columns [n] of ``metrics.csv``; empty before the first row.
        about: what the newest checkpoint keeps beside its tensors; empty without one.
        data: what was measured of the data; empty if that cannot be read.
        summary: the closing sentence of a finished run.
        health: the verdict, if there is one.
        problems: a sentence for each file that could not be read.
        name: what the page calls it; that of its folder, lengthened by those above where others are called the same.
    """

    folder: RunFolder
    settings: Settings
    asked: dict[str, Any]
    reasons: dict[str, str]
    metrics: dict[str, np.ndarray]
    about: dict[str, Any]
    data: dict[str, Any]
    summary: str | None
    health: Health | None
    problems: tuple[str, ...]
    name: str

    @property
    def epoch(self) -> float:
        """How far it is, in epochs."""
        done = self.metrics.get("epoch", np.empty(0))
        by_rows = float(done[np.isfinite(done)].max()) if np.isfinite(done).any() else 0.0
        steps = self.about.get("steps") or 0
        return max(by_rows, self.settings.epochs * self.about.get("step", 0) / steps if steps else 0.0)

    @property
    def finished(self) -> bool:
        """Whether it has come to its end."""
        return self.summary is not None

    @property
    def sound(self) -> Sound | None:
        """How its recordings become pictures, with the statistics of their rows; None of a run of images."""
        return sound_from(self.data.get("sound"))

    @property
    def measure(self) -> str:
        """What its held-out measure is called."""
        return self._measured()[0] or "held-out measure"

    @property
    def percent(self) -> bool:
        """Whether that is a share, which is written as a percentage."""
        return self._measured()[1].endswith("%")

    def _measured(self) -> tuple[str, str]:
        """Name and value in the shortest form that a checkpoint keeps, such as "position accuracy 7.2%"."""
        words = self.about.get("measured") or [""]
        name, _, value = str(words[-1]).rpartition(" ")
        return name, value

    def state(self, now: float | None = None) -> str:
        """Where it is, in words.

        Args:
            now: seconds since 1970; the clock's, if absent.
        """
        if self.finished:
            return "finished"
        silent = (time.time() if now is None else now) - self.last_written()
        how = "on the way" if silent < _SILENT else f"not finished; nothing was written for {duration(silent)}"
        # whole steps may go a little beyond the end
        done, end = (_rounded(one) for one in (min(self.epoch, self.settings.epochs), self.settings.epochs))
        return f"epoch {done} of {end}, {how}"

    def last_written(self) -> float:
        """When its newest file was written, in seconds since 1970."""
        folder, times = self.folder, []
        for path in (folder.config, folder.metrics, folder.log, folder.summary, folder.checkpoints.last):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times, default=0.0)


def _rounded(epochs: float) -> str:
    """With as many digits as tell: "0.25", "2.5", "1,200"."""
    return f"{round(epochs, 2 if epochs < 10 else 1):,.6g}"


def gather(run: str | Path) -> Gathered:
    """Read a run's folder, and change nothing in it.

    Raises:
        PatchloomError: it is none, or what its settings are cannot be read.
    """
    folder, problems = RunFolder(run), list[str]()
    settings = folder.read_config()

    def read(what: Callable[[], T], otherwise: T) -> T:
        try:
            return what()
        except PatchloomError as problem:
            problems.append(str(problem))
            return otherwise

    metrics = read(lambda: read_metrics(folder.metrics), {}) if folder.metrics.exists() else {}
    return Gathered(
        folder=folder,
        settings=settings,
        asked=read(lambda: read_sealed(folder.requested), {}),
        reasons=_reasons(folder.config.read_text("utf-8", "replace")),
        metrics=metrics if "epoch" in metrics else {},
        about=read(folder.checkpoints.about, {}),
        data=read(folder.read_data, {}),
        summary=folder.read_summary(),
        health=read_health(folder.path),
        problems=tuple(problems),
        name=folder.name,
    )


def told_apart(runs: Sequence[Gathered]) -> list[Gathered]:
    """The same runs, each by a name of its own: those of one name have as many folders above them in it as that takes.

    Args:
        runs: of different folders.
    """
    places = [run.folder.path.absolute().parts for run in runs]
    named = []
    for run, place in zip(runs, places, strict=True):
        others = [other for other in places if other != place]
        count = next(n for n in range(1, len(place) + 1) if place[-n:] not in [other[-n:] for other in others])
        named.append(replace(run, name=str(Path(*place[-count:]))))
    return named


def _reasons(config: str) -> dict[str, str]:
    """The comments of ``config.yaml`` by the settings of which they are."""
    found, reading = {}, False
    for line in config.split("\n"):
        if reading and not line.startswith("# "):
            break
        if reading:
            name, _, why = line.removeprefix("# ").partition(": ")
            found[name] = why
        reading = reading or line == _WHY
    return found
