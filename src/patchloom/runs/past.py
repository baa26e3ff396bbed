"""Past runs, read from their folders, and the runs that the folder of a comparison stands for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from patchloom.audio.config import Sound, sound_from
from patchloom.audio.recordings import modality_of
from patchloom.data.modality import Modality
from patchloom.display import duration
from patchloom.errors import PatchloomError
from patchloom.results import store
from patchloom.results.result import Result
from patchloom.results.verdict import Health, read_health
from patchloom.runs.folder import RunFolder, curves_of, read_metrics
from patchloom.runs.settings import ResolvedSettings, settings_by_name
from patchloom.system.checksummed import read_checksummed
from patchloom.system.files import distinct_names

T = TypeVar("T")

_SILENT = 600.0  # seconds without a write after which an unfinished run is no longer reported as training


@dataclass(frozen=True)
class RunData:
    """Contents of a run's folder.

    Attributes:
        folder: the run's folder.
        settings: settings with every ``auto`` resolved.
        asked: settings as requested; empty if they cannot be read.
        reasons: reasons for the resolved ``auto`` settings, by dotted name.
        metrics: columns [n] of ``metrics.csv``; empty before the first row.
        about: metadata of the newest checkpoint; empty without one.
        measured: held-out measure in the newest checkpoint; without one, a result of nan.
        results: results of all evaluations.
        data: statistics of the data; empty if they cannot be read.
        summary: the closing sentence of a finished run.
        health: the verdict, if there is one.
        problems: by the name of an attribute, a sentence on its file that could not be read, or not completely.
        name: the run's name on the page: that of its folder, with parent folders prepended if names coincide.
    """

    folder: RunFolder
    settings: ResolvedSettings
    asked: dict[str, Any]
    reasons: dict[str, str]
    metrics: dict[str, np.ndarray]
    about: dict[str, Any]
    measured: Result
    results: list[Result]
    data: dict[str, Any]
    summary: str | None
    health: Health | None
    problems: dict[str, str]
    name: str

    @property
    def epoch(self) -> float:
        done = self.metrics.get("epoch", np.empty(0))
        by_rows = float(done[np.isfinite(done)].max()) if np.isfinite(done).any() else 0.0
        steps = self.about.get("steps") or 0
        return max(by_rows, self.settings.epochs * self.about.get("step", 0) / steps if steps else 0.0)

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @cached_property
    def became(self) -> dict[str, Any]:
        """Settings with every ``auto`` resolved, as `settings_by_name`."""
        return settings_by_name(self.settings.plain())

    @property
    def sound(self) -> Sound | None:
        """Spectrogram settings and statistics of a run on sound; None for a run on images."""
        return sound_from(self.data.get("sound"))

    @property
    def modality(self) -> Modality:
        return modality_of(self.sound)

    def curves(self, column: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return the curves of a logged measure and of its baselines, as `curves_of`."""
        return curves_of(self.metrics, column)

    def state(self, now: float | None = None) -> str:
        if self.finished:
            return "finished"
        silent = (time.time() if now is None else now) - self.last_written()
        how = "training" if silent < _SILENT else f"not finished; last written {duration(silent)} ago"
        # the last step may go slightly beyond the requested epochs
        ends = min(self.epoch, self.settings.epochs), self.settings.epochs
        done, end = (f"{round(one, 2 if one < 10 else 1):,.6g}" for one in ends)
        return f"epoch {done} of {end}, {how}"

    def last_written(self) -> float:
        """Return the modification time of the newest file, in seconds since 1970."""
        folder, times = self.folder, []
        for path in (folder.config, folder.metrics, folder.log, folder.summary, folder.checkpoints.last):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times, default=0.0)


def load_run(run: str | Path) -> RunData:
    """Read a run's folder without changing it; a missing or damaged file affects only its own attributes."""
    folder, problems = RunFolder(run), dict[str, str]()
    settings = folder.read_config()

    def read(name: str, what: Callable[[], T], otherwise: T) -> T:
        try:
            return what()
        except PatchloomError as problem:
            problems[name] = str(problem)
        except ValueError as problem:
            problems[name] = f"{folder.checkpoints.last} could not be read ({problem})"
        return otherwise

    metrics: dict[str, np.ndarray] = {}
    if folder.metrics.exists():
        metrics = read("metrics", lambda: read_metrics(folder.metrics), {})
    about: dict[str, Any] = read("about", folder.checkpoints.about, {})
    unknown = Result("held-out measure", math.nan, math.nan, math.nan, 0, unit="", digits=3)
    damaged = list[str]()
    results: list[Result] = read("results", lambda: store.load(folder.path, damaged), [])
    if damaged:
        problems["results"] = damaged[0]
    return RunData(
        folder=folder,
        settings=settings,
        asked=read("asked", folder.read_requested, {}),
        reasons=read("reasons", folder.read_reasons, {}),
        metrics=metrics if "epoch" in metrics else {},
        about=about,
        measured=read("measured", lambda: Result.of(about["measured"]) if about.get("measured") else unknown, unknown),
        results=results,
        data=read("data", folder.read_data, {}),
        summary=folder.read_summary(),
        health=read_health(folder.path),
        problems=problems,
        name=folder.name,
    )


def load_runs(places: Sequence[str | Path], needed: Sequence[str] = ()) -> list[RunData]:
    """Read different runs, with unique names: as many parent folders are prepended as needed.

    ``needed``: attributes without which a run is refused, if their file is damaged.
    """
    runs = [load_run(place) for place in places]
    real = [run.folder.path.resolve() for run in runs]
    for run, place in zip(runs, real, strict=True):
        if real.count(place) > 1:
            raise PatchloomError(f"{run.folder.path} is given twice: give each run once")
        for problem in (run.problems[name] for name in needed if name in run.problems):
            raise PatchloomError(problem)
    names = distinct_names([run.folder.path for run in runs])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


# The folder of a comparison stands for all runs in it.


COMPARISON = "compare.yaml"  # every comparison has it, and no run does
_PAGE = "report.html"  # written by a comparison when it ends


def is_comparison(folder: Path) -> bool:
    return (folder / COMPARISON).is_file()


def expand_runs(given: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Replace folders of comparisons by the runs in them; return all runs, and a sentence about each comparison."""
    runs, said = list[Path](), list[str]()
    for folder in given:
        its = [folder]
        if is_comparison(folder):
            its = [run for run in sorted(folder.iterdir()) if RunFolder(run).config.is_file()]
            if not its:
                raise PatchloomError(f"no run of the comparison {folder} has begun: wait until one trains")
            plan = read_checksummed(folder / COMPARISON)
            try:
                planned = len(plan["arms"]) * int(plan["asked"]["seeds"])
            except (KeyError, TypeError, ValueError) as problem:
                raise PatchloomError(
                    f"{folder / COMPARISON} is not the plan of a comparison: give the folders of its runs"
                ) from problem
            there, finished = len(its), sum(RunFolder(run).read_summary() is not None for run in its)
            ended = finished if finished < there else "all of them"
            where = f"; its results are in {_PAGE}" if (folder / _PAGE).is_file() else ""
            said.append(
                f"Comparison {folder.absolute().name}: {there} of {max(there, planned)} runs have begun, {ended} "
                f"finished{where}."
            )
        runs += its
    return runs, said
