"""What lies in a run's folder, read for a page: whatever is missing or damaged costs its own part of it alone."""

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
from patchloom.claims import MeasureResult, result_or_none
from patchloom.data.modality import Modality
from patchloom.data.sources.in_memory import is_object_name
from patchloom.display import duration
from patchloom.errors import PatchloomError
from patchloom.look.charts import read_metrics
from patchloom.report.page import Setting
from patchloom.runs.checksummed import read_checksummed
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import ResolvedSettings, Settings, request
from patchloom.runs.verdict import Health, read_health
from patchloom.sizes import in_pixels
from patchloom.tasks.custom import Code, is_code, is_loaded

T = TypeVar("T")

_SILENT = 600.0  # seconds after which a run that is not finished is no longer said to be on the way


@dataclass(frozen=True)
class RunData:
    """A run as its folder tells of it.

    Attributes:
        folder: where it is.
        settings: with every ``auto`` resolved.
        asked: what was asked for; empty if that cannot be read.
        reasons: of what was ``auto``, by dotted name.
        metrics: columns [n] of ``metrics.csv``; empty before the first row.
        about: what the newest checkpoint keeps beside its tensors; empty without one.
        measured: its last held-out measure; None without one, or in words alone as an older version kept it.
        data: what was measured of the data; empty if that cannot be read.
        summary: the closing sentence of a finished run.
        health: the verdict, if there is one.
        problems: a sentence for each file that could not be read.
        name: what the page calls it; that of its folder, lengthened by those above where others are called the same.
    """

    folder: RunFolder
    settings: ResolvedSettings
    asked: dict[str, Any]
    reasons: dict[str, str]
    metrics: dict[str, np.ndarray]
    about: dict[str, Any]
    measured: MeasureResult | None
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
    def modality(self) -> Modality:
        """What it was trained on."""
        return modality_of(self.sound)

    @property
    def measure(self) -> str:
        """What its held-out measure is called."""
        return "held-out measure" if self.measured is None else self.measured.name

    @property
    def percent(self) -> bool:
        """Whether that is a share, which is written as a percentage."""
        return self.measured is not None and self.measured.unit == "%"

    def state(self, now: float | None = None) -> str:
        """Where it is, in words."""
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


def load_run(run: str | Path) -> RunData:
    """Read a run's folder, and change nothing in it."""
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
        measured=result_or_none(about.get("measured")),
        data=read(folder.read_data, {}),
        summary=folder.read_summary(),
        health=read_health(folder.path),
        problems=tuple(problems),
        name=folder.name,
    )


def disambiguate_runs(runs: Sequence[RunData]) -> list[RunData]:
    """The same runs, each by a name of its own: those of one name have as many folders above them in it as that
    takes.
    """
    places = [run.folder.path.absolute().parts for run in runs]
    named = []
    for run, place in zip(runs, places, strict=True):
        others = [other for other in places if other != place]
        count = next(n for n in range(1, len(place) + 1) if place[-n:] not in [other[-n:] for other in others])
        named.append(replace(run, name=str(Path(*place[-count:]))))
    return named


# Which runs are meant by the folders that somebody gives: that of a comparison stands for all runs that are in it.


_COMPARISON = "compare.yaml"  # which every comparison has, and no run
_PAGE = "report.html"  # which a comparison writes when it ends


class ReportTarget(NamedTuple):
    """What is on a page.

    Attributes:
        runs: folders of runs, in the order of what was given.
        said: a sentence on each comparison.
    """

    runs: list[Path]
    said: list[str]


def is_comparison(folder: Path) -> bool:
    """Whether a comparison was begun in a folder."""
    return (folder / _COMPARISON).is_file()


def expand_runs(given: Sequence[Path]) -> ReportTarget:
    """The runs of folders of runs and of comparisons."""
    runs, said = list[Path](), list[str]()
    for folder in given:
        if not is_comparison(folder):
            runs.append(folder)
            continue
        its = [run for run in sorted(folder.iterdir()) if RunFolder(run).config.is_file()]
        if not its:
            raise PatchloomError(f"{folder} is a comparison in which no run has begun: wait until one trains")
        runs += its
        said.append(_said(folder, its))
    return ReportTarget(runs, said)


def _said(folder: Path, its: Sequence[Path]) -> str:
    """How many of a comparison's runs there are, and where it tells what it found."""
    there, finished = len(its), sum(RunFolder(run).read_summary() is not None for run in its)
    ended = finished if finished < there else "all of them"
    told = f"{there} of {max(there, _planned(folder))} runs are there, {ended} finished"
    where = f"; what it found is in {_PAGE}" if (folder / _PAGE).is_file() else ""
    return f"Comparison {folder.absolute().name}: {told}{where}."


def _planned(folder: Path) -> int:
    """How many runs a comparison has when it ends."""
    path = folder / _COMPARISON
    plan = read_checksummed(path)
    try:
        return len(plan["epochs"]) * int(plan["asked"]["seeds"])
    except (KeyError, TypeError, ValueError) as problem:
        raise PatchloomError(f"{path} is not the plan of a comparison: give the folders of its runs") from problem


# Settings of a run with the reason of each, and the command that asks for the same again.


DEFAULT, CHOSEN = "the default", "chosen for you"
# what changes nothing of the other kind of data
_OF_SOUND = ("seconds", "rate", "features", "bins")
_OF_IMAGES = ("crop_scale", "flip", "randaugment", "randaugment_std", "normalization")


def settings_of(run: RunData) -> list[Setting]:
    """What was ``auto`` first, with the reason; then what somebody gave; then what is at its default.

    What is still ``auto``, such as the depth of a decoder that there is not, is left out; so is what is for recordings
    where there are images, and the other way round.
    """
    asked, usual = _flat(run.asked), _flat(_usual(run.asked))
    of_recipe = _flat(_usual(run.asked, run.asked.get("recipe"))) if run.asked.get("recipe") else {}
    found: tuple[list[Setting], ...] = ([], [], [])
    for name, value in _flat(run.settings.plain()).items():
        if value in ("auto", None) or name in (_OF_IMAGES if run.sound else _OF_SOUND):
            continue
        setting = Setting(name, _shown(name, value))
        if asked.get(name) == "auto":
            why = run.reasons.get(name) or run.reasons.get(_short(name)) or CHOSEN
            found[0].append(setting._replace(reason=why))
        elif name in of_recipe and of_recipe[name] == value != usual.get(name):
            found[1].append(setting._replace(reason=f"of the recipe {run.asked['recipe']}"))
        elif name in usual and usual[name] == value and name not in ("data", "task.name"):
            found[2].append(setting._replace(reason=DEFAULT))
        else:
            found[1].append(setting)
    return [*found[0], *found[1], *found[2]]


def command_of(run: RunData) -> str:
    """The line that begins the same run anew, in another folder; or, of one that is not finished, goes on with it.

    Only what differs from the defaults is said. "" where what was asked for is not known, or cannot be typed, since it
    was given as an object in Python.
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
    """What would have been asked for if nothing but data, task and recipe had been given; {} where nobody knows."""
    task = str(asked.get("task", {}).get("name", ""))
    if is_code(task) and not is_loaded(task):  # nobody has asked to run the code of another's run
        return Settings("").plain()
    try:
        return request(asked["data"], {} if recipe else {"name": task}, {"recipe": recipe} if recipe else {}).plain()
    except (PatchloomError, KeyError):  # such as a task of one's own whose file is gone
        return Settings("").plain()


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return found


def _shown(name: str, value: Any) -> str:
    """A value as people read it."""
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
    """A value as it is typed."""
    if name.endswith("_size") and isinstance(value, list):
        return in_pixels(value)
    return value if isinstance(value, str) else repr(value) if isinstance(value, float) else json.dumps(value)


def _short(name: str) -> str:
    return name.partition(".")[0] if name.endswith(".name") else name
