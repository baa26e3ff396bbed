"""Contents of a run's folder, read so that a missing or damaged file affects only its own part of the report."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from patchloom.audio.config import Sound, sound_from
from patchloom.audio.recordings import modality_of
from patchloom.data.modality import Modality
from patchloom.data.sources.in_memory import is_object_name
from patchloom.display import duration
from patchloom.errors import PatchloomError
from patchloom.report.page import Setting
from patchloom.results.result import Result
from patchloom.runs.checksummed import read_checksummed
from patchloom.runs.folder import RunFolder, read_metrics
from patchloom.runs.settings import ResolvedSettings, Settings, request
from patchloom.runs.verdict import Health, read_health
from patchloom.sizes import in_pixels
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
        measured: the last held-out measure; None without one, or if an older version kept it only as text.
        data: statistics of the data; empty if they cannot be read.
        summary: the closing sentence of a finished run.
        health: the verdict, if there is one.
        problems: a sentence for each file that could not be read.
        name: the run's name on the page: that of its folder, with parent folders prepended if names coincide.
    """

    folder: RunFolder
    settings: ResolvedSettings
    asked: dict[str, Any]
    reasons: dict[str, str]
    metrics: dict[str, np.ndarray]
    about: dict[str, Any]
    measured: Result | None
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

    @property
    def measure(self) -> str:
        """Name of the held-out measure."""
        return "held-out measure" if self.measured is None else self.measured.measure

    @property
    def percent(self) -> bool:
        """Whether the held-out measure is a fraction, written as a percentage."""
        return self.measured is not None and self.measured.unit == "%"

    def state(self, now: float | None = None) -> str:
        """Describe the progress of the run."""
        if self.finished:
            return "finished"
        silent = (time.time() if now is None else now) - self.last_written()
        how = "training" if silent < _SILENT else f"not finished; last written {duration(silent)} ago"
        # the last step may go slightly beyond the requested epochs
        done, end = (_rounded(one) for one in (min(self.epoch, self.settings.epochs), self.settings.epochs))
        return f"epoch {done} of {end}, {how}"

    def last_written(self) -> float:
        """Return the modification time of the newest file, in seconds since 1970."""
        folder, times = self.folder, []
        for path in (folder.config, folder.metrics, folder.log, folder.summary, folder.checkpoints.last):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times, default=0.0)


def _rounded(epochs: float) -> str:
    """Round to the digits that matter: "0.25", "2.5", "1,200"."""
    return f"{round(epochs, 2 if epochs < 10 else 1):,.6g}"


def load_run(run: str | Path) -> RunData:
    """Read a run's folder without changing it."""
    folder, problems = RunFolder(run), list[str]()
    settings = folder.read_config()

    def read(what: Callable[[], T], otherwise: T) -> T:
        try:
            return what()
        except PatchloomError as problem:
            problems.append(str(problem))
            return otherwise

    metrics: dict[str, np.ndarray] = {}
    if folder.metrics.exists():
        metrics = read(lambda: read_metrics(folder.metrics), metrics)
    about: dict[str, Any] = read(folder.checkpoints.about, {})
    return RunData(
        folder=folder,
        settings=settings,
        asked=read(folder.read_requested, {}),
        reasons=read(folder.read_reasons, {}),
        metrics=metrics if "epoch" in metrics else {},
        about=about,
        measured=Result.of(about["measured"]) if about.get("measured") else None,
        data=read(folder.read_data, {}),
        summary=folder.read_summary(),
        health=read_health(folder.path),
        problems=tuple(problems),
        name=folder.name,
    )


def disambiguate_runs(runs: Sequence[RunData]) -> list[RunData]:
    """Return the runs with unique names: as many parent folders are prepended as needed."""
    places = [run.folder.path.absolute().parts for run in runs]
    named = []
    for run, place in zip(runs, places, strict=True):
        others = [other for other in places if other != place]
        count = next(n for n in range(1, len(place) + 1) if place[-n:] not in [other[-n:] for other in others])
        named.append(replace(run, name=str(Path(*place[-count:]))))
    return named


# The runs of the given folders: the folder of a comparison stands for all runs in it.


_COMPARISON = "compare.yaml"  # every comparison has it, and no run does
_PAGE = "report.html"  # written by a comparison when it ends


class ReportTarget(NamedTuple):
    """Runs of a page.

    Attributes:
        runs: folders of runs, in the order given.
        said: a sentence about each comparison.
    """

    runs: list[Path]
    said: list[str]


def is_comparison(folder: Path) -> bool:
    """Return whether a folder holds a comparison."""
    return (folder / _COMPARISON).is_file()


def expand_runs(given: Sequence[Path]) -> ReportTarget:
    """Replace folders of comparisons by the runs in them."""
    runs, said = list[Path](), list[str]()
    for folder in given:
        if not is_comparison(folder):
            runs.append(folder)
            continue
        its = [run for run in sorted(folder.iterdir()) if RunFolder(run).config.is_file()]
        if not its:
            raise PatchloomError(f"no run of the comparison {folder} has begun: wait until one trains")
        runs += its
        said.append(_describe_comparison(folder, its))
    return ReportTarget(runs, said)


def _describe_comparison(folder: Path, its: Sequence[Path]) -> str:
    """Return a sentence about the number of a comparison's runs and the file with its results."""
    there, finished = len(its), sum(RunFolder(run).read_summary() is not None for run in its)
    ended = finished if finished < there else "all of them"
    progress = f"{there} of {max(there, _planned(folder))} runs have begun, {ended} finished"
    where = f"; its results are in {_PAGE}" if (folder / _PAGE).is_file() else ""
    return f"Comparison {folder.absolute().name}: {progress}{where}."


def _planned(folder: Path) -> int:
    """Return the number of runs that a comparison has when it ends."""
    path = folder / _COMPARISON
    plan = read_checksummed(path)
    try:
        return len(plan["arms"]) * int(plan["asked"]["seeds"])
    except (KeyError, TypeError, ValueError) as problem:
        raise PatchloomError(f"{path} is not the plan of a comparison: give the folders of its runs") from problem


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
    asked, usual = _flat(run.asked), _flat(_usual(run.asked))
    of_recipe = _flat(_usual(run.asked, run.asked.get("recipe"))) if run.asked.get("recipe") else {}
    found: tuple[list[Setting], ...] = ([], [], [])
    for name, value in _flat(run.settings.plain()).items():
        if value in ("auto", None) or name in (_OF_IMAGES if run.sound else _OF_SOUND):
            continue
        setting = Setting(name, _format_value(name, value))
        if asked.get(name) == "auto":
            why = run.reasons.get(name) or run.reasons.get(_short(name)) or CHOSEN
            found[0].append(setting._replace(reason=why))
        elif name in of_recipe and of_recipe[name] == value != usual.get(name):
            found[1].append(setting._replace(reason=f"from the recipe {run.asked['recipe']}"))
        elif name in usual and usual[name] == value and name not in ("data", "task.name"):
            found[2].append(setting._replace(reason=DEFAULT))
        else:
            found[1].append(setting)
    return [*found[0], *found[1], *found[2]]


def command_of(run: RunData) -> str:
    """Return the command that repeats a finished run in another folder, or resumes an unfinished one.

    Options at their defaults are left out. "" if the requested settings cannot be read, or the data were given as a
    Python object.
    """
    asked = run.asked
    data = asked.get("data", "")
    names = list(map(str, data if isinstance(data, list) else [data]))
    if not asked or any(is_object_name(name) for name in names) or not all(names):
        return ""
    recipe = asked.get("recipe")
    usual = _flat(_usual(asked, recipe))
    task = str(asked.get("task", {}).get("name", ""))
    words = ["patchloom", "pretrain", *names]
    words += ["--recipe", str(recipe)] if recipe else ["--task", Code.of(task).typed if is_code(task) else task]
    for name, value in _flat(asked).items():
        if name in ("data", "task.name", "recipe") or usual.get(name, "auto") == value:
            continue
        option, word = {"from_run": "--from", "model.name": "--model"}.get(name, f"--{name}"), _typed(name, value)
        words += [f"{option}={word}"] if word.startswith("--") else [option, word]
    place = run.folder.path
    again = place if not run.finished else place.with_name(f"{place.absolute().name}-again")
    return shlex.join([*words, "--out", str(again)])


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


def _format_value(name: str, value: Any) -> str:
    """Format a value for reading."""
    if name == "task.name" and is_code(str(value)):
        return Code.of(str(value)).typed
    if name.endswith("_size") and isinstance(value, list | int):
        return in_pixels(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _typed(name: str, value: Any) -> str:
    """Format a value for the command line."""
    if name.endswith("_size") and isinstance(value, list):
        return in_pixels(value)
    return value if isinstance(value, str) else repr(value) if isinstance(value, float) else json.dumps(value)


def _short(name: str) -> str:
    return name.partition(".")[0] if name.endswith(".name") else name
