"""Contents of a run's folder; a missing or damaged file affects only its own part of the report."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from patchloom.audio.config import Sound, sound_from
from patchloom.audio.recordings import modality_of
from patchloom.data.modality import Modality
from patchloom.data.sources.in_memory import is_object_name
from patchloom.display import duration
from patchloom.errors import PatchloomError
from patchloom.look.charts import curve_of
from patchloom.report.page import Setting
from patchloom.results import store
from patchloom.results.result import Result
from patchloom.results.verdict import Health, read_health
from patchloom.runs.folder import RunFolder, read_metrics
from patchloom.runs.settings import ResolvedSettings, Settings, request
from patchloom.sizes import in_pixels
from patchloom.system.checksummed import read_checksummed
from patchloom.system.files import distinct_names
from patchloom.tasks.custom import Code, is_code, is_loaded

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
        problems: a sentence for each file, or line of results, that could not be read.
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
    problems: tuple[str, ...]
    name: str

    @property
    def epoch(self) -> float:
        """Progress in epochs."""
        done = self.metrics.get("epoch", np.empty(0))
        by_rows = float(done[np.isfinite(done)].max()) if np.isfinite(done).any() else 0.0
        steps = self.about.get("steps") or 0
        return max(by_rows, self.settings.epochs * self.about.get("step", 0) / steps if steps else 0.0)

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.summary is not None

    @property
    def sound(self) -> Sound | None:
        """Spectrogram settings and statistics of a run on sound; None for a run on images."""
        return sound_from(self.data.get("sound"))

    @property
    def modality(self) -> Modality:
        """Kind of data that the run was trained on."""
        return modality_of(self.sound)

    def curves(self, column: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return epochs [n] and finite values [n] of a logged measure, named "", and of its baselines by name."""
        prefix = "baseline:" if column == "held_out" else f"{column}:"
        names = {"": column} | {name.removeprefix(prefix): name for name in self.metrics if name.startswith(prefix)}
        found = {name: curve_of(self.metrics, its) for name, its in names.items()}
        return {name: (epochs, values) for name, (epochs, values) in found.items() if len(values)}

    def state(self, now: float | None = None) -> str:
        """Describe the progress of the run."""
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
    """Read a run's folder without changing it."""
    folder, problems = RunFolder(run), list[str]()
    settings = folder.read_config()

    def read(what: Callable[[], T], otherwise: T) -> T:
        try:
            return what()
        except PatchloomError as problem:
            problems.append(str(problem))
        except ValueError as problem:
            problems.append(f"{folder.checkpoints.last} could not be read ({problem})")
        return otherwise

    metrics: dict[str, np.ndarray] = read(lambda: read_metrics(folder.metrics), {}) if folder.metrics.exists() else {}
    about: dict[str, Any] = read(folder.checkpoints.about, {})
    unknown = Result("held-out measure", math.nan, math.nan, math.nan, 0, unit="", digits=3)
    return RunData(
        folder=folder,
        settings=settings,
        asked=read(folder.read_requested, {}),
        reasons=read(folder.read_reasons, {}),
        metrics=metrics if "epoch" in metrics else {},
        about=about,
        measured=read(lambda: Result.of(about["measured"]) if about.get("measured") else unknown, unknown),
        results=read(lambda: store.load(folder.path, problems), []),
        data=read(folder.read_data, {}),
        summary=folder.read_summary(),
        health=read_health(folder.path),
        problems=tuple(problems),
        name=folder.name,
    )


def disambiguate_runs(runs: Sequence[RunData]) -> list[RunData]:
    """Return the runs with unique names: as many parent folders are prepended as needed."""
    names = distinct_names([run.folder.path for run in runs])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


# The runs of the given folders: the folder of a comparison stands for all runs in it.


COMPARISON = "compare.yaml"  # every comparison has it, and no run does
_PAGE = "report.html"  # written by a comparison when it ends


def is_comparison(folder: Path) -> bool:
    """Return whether a folder holds a comparison."""
    return (folder / COMPARISON).is_file()


def expand_runs(given: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Replace folders of comparisons by the runs in them; return all runs, and a sentence about each comparison."""
    runs, said = list[Path](), list[str]()
    for folder in given:
        its = [folder]
        if is_comparison(folder):
            its = [run for run in sorted(folder.iterdir()) if RunFolder(run).config.is_file()]
            said.append(_describe_comparison(folder, its))
        runs += its
    return runs, said


def _describe_comparison(folder: Path, its: Sequence[Path]) -> str:
    """Return a sentence about the number of a comparison's runs and the file with its results."""
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
    return (
        f"Comparison {folder.absolute().name}: {there} of {max(there, planned)} runs have begun, {ended} "
        f"finished{where}."
    )


# Settings of a run with the reason for each, and the command that repeats the run.


DEFAULT, CHOSEN = "the default", "chosen for you"
# settings that have no effect on the other kind of data
_OF_SOUND = ("seconds", "rate", "features", "bins")
_OF_IMAGES = ("crop_scale", "flip", "randaugment", "randaugment_std", "normalization")


def settings_of(run: RunData) -> list[Setting]:
    """Return the settings of a run: those that were ``auto`` with the reason, those given, then the defaults.

    Settings that are still ``auto``, such as the depth of an unused decoder, and settings for the other kind of data
    are left out.
    """
    asked, recipe, others = _flat(run.asked), run.asked.get("recipe"), _OF_IMAGES if run.sound else _OF_SOUND
    usual, of_recipe = (_flat(_usual(run.asked, one)) for one in (None, recipe))
    found: tuple[list[Setting], ...] = ([], [], [])
    for name, value in _flat(run.settings.plain()).items():
        if value in ("auto", None) or name in others:
            continue
        place, why = 1, ""
        if asked.get(name) == "auto":
            place, why = 0, run.reasons.get(name) or run.reasons.get(name.removesuffix(".name")) or CHOSEN
        elif of_recipe.get(name) == value != usual.get(name):
            why = f"from the recipe {recipe}"
        elif usual.get(name) == value and name not in ("data", "task.name"):
            place, why = 2, DEFAULT
        found[place].append(Setting(name, f"{value:g}" if isinstance(value, float) else _typed(name, value), why))
    return [*found[0], *found[1], *found[2]]


def command_of(run: RunData) -> str:
    """Return the command that repeats a finished run in another folder, or resumes an unfinished one.

    Options at their defaults are left out. "" if the requested settings cannot be read, or the data were given as a
    Python object.
    """
    asked, recipe = run.asked, run.asked.get("recipe")
    data = asked.get("data", "")
    names = data if isinstance(data, list) else [data]
    if not names or not all(isinstance(name, str) and name and not is_object_name(name) for name in names):
        return ""
    task = ["--recipe", recipe] if recipe else ["--task", _typed("task.name", asked.get("task", {}).get("name", ""))]
    words = ["patchloom", "pretrain", *names, *task]
    usual = _flat(_usual(asked, recipe))
    for name, value in _flat(asked).items():
        if name not in ("data", "task.name", "recipe") and usual.get(name, "auto") != value:
            option, word = {"from_run": "from", "model.name": "model"}.get(name, name), _typed(name, value)
            words += [f"--{option}={word}"] if word.startswith("--") else [f"--{option}", word]
    place = run.folder.path
    again = place.with_name(f"{place.absolute().name}-again") if run.finished else place
    return shlex.join([*map(str, words), "--out", str(again)])


def _usual(asked: Mapping[str, Any], recipe: str | None = None) -> dict[str, Any]:
    """Return the settings of a command with only data, task and recipe, or general defaults if these are unusable."""
    task = str(asked.get("task", {}).get("name", ""))
    if is_code(task) and not is_loaded(task):  # a report must not execute the code that a run names
        return Settings("").plain()
    try:
        return request(asked["data"], {} if recipe else {"name": task}, {"recipe": recipe} if recipe else {}).plain()
    except (PatchloomError, KeyError):  # such as a user's task whose file no longer exists
        return Settings("").plain()


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten settings to dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return found


def _typed(name: str, value: Any) -> str:
    """Format a value for the command line."""
    if name == "task.name" and is_code(str(value)):
        return Code.of(str(value)).typed
    if name.endswith("_size") and isinstance(value, list):
        return in_pixels(value)
    return value if isinstance(value, str) else repr(value) if isinstance(value, float) else json.dumps(value)
