"""Plan of a comparison: measured before it begins, and stored so that an interrupted comparison resumes unchanged."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from patchloom.compare.runner import Job, StopMessages, run_all
from patchloom.compare.timing import TimeAfterTraining, TrainingSpeed, estimated_paces, measure_training_speeds
from patchloom.data.source import Data, Source
from patchloom.data.stats import Stats
from patchloom.display import StatusMessage, duration
from patchloom.errors import PatchloomError, typed_fields
from patchloom.runs.held_out import choose_held_out
from patchloom.runs.settings import ResolvedSettings, request
from patchloom.runs.task import prepare_task
from patchloom.sizes import compact, in_pixels
from patchloom.system.checksummed import read_checksummed, write_checksummed
from patchloom.system.files import make_folder
from patchloom.system.hardware import cores
from patchloom.system.load import BackgroundLoad, Load
from patchloom.tasks.custom import label
from patchloom.train.resolve import measure_data, resolve

SPLIT_SEED = 0  # seed of the held-out split, the same for all runs of a comparison
USUAL = ("mae", "droppos", "mp3", "restore", "extrema", "lut")
_FILE = "compare.yaml"
_SIZES = ("img_size", "patch_size")
_AS_THEY_ARE = ("epochs", "top", "held_out", "threads")  # attributes of a plan that YAML stores without conversion
_STORED = {"asked", "paces", "after", "notes", "load", *_AS_THEY_ARE}
_UNPLANNED = StopMessages(
    "stopping", "stopped while measuring this machine: no plan is stored yet, and nothing was trained"
)
_PILOT = 8  # steps of the run that measures the overhead
USUAL_TOP = 60.0  # seconds of overhead that progress lines and dry runs assume


@dataclass(frozen=True)
class ComparisonRequest:
    """Request of a user to `compare`.

    Attributes:
        data: arguments of the command line.
        tasks: names of the tasks.
        seeds: runs of each task.
        minutes: training time of each run; None if samples are equal.
        samples: images seen by each run; None if minutes are equal.
        given: settings of `pretrain` for all runs.
        at_once: number of simultaneous runs.
    """

    data: tuple[str, ...]
    tasks: tuple[str, ...]
    seeds: int
    minutes: float | None
    samples: int | None
    given: dict[str, Any]
    at_once: int

    @property
    def source(self) -> str | list[str]:
        """Data as `pretrain` takes it."""
        return self.data[0] if len(self.data) == 1 else list(self.data)

    def plain(self) -> dict[str, Any]:
        """Return the settings that must not change on resuming; the number of simultaneous runs may."""
        sizes = {name: compact(self.given[name]) for name in _SIZES if name in self.given}
        lists = {name: size if isinstance(size, int) else list(size) for name, size in sizes.items()}
        return {
            **{"data": list(self.data), "tasks": list(self.tasks), "seeds": self.seeds},
            **{"minutes": self.minutes, "samples": self.samples, "settings": {**self.given, **lists}},
        }

    def with_threads(self, threads: int | None) -> ComparisonRequest:
        """Return the request with a number of CPU threads per run; None lets each run choose."""
        return self if threads is None else replace(self, given={**self.given, "threads": threads})

    def threads_each(self) -> int | None:
        """Return CPU threads per run if runs share the cores; None if the user set them or each run has all cores."""
        device = self.given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        shared = self.at_once > 1 and device != "cuda" and "threads" not in self.given
        return max(1, cores() // self.at_once) if shared else None


@dataclass(frozen=True)
class ComparisonPlan:
    """Plan of a comparison.

    Attributes:
        asked: request of the user.
        epochs: number of epochs of each task.
        paces: measured speed of each task.
        top: overhead of a run in seconds.
        after: time after training; None in a dry run.
        held_out: number of images that all runs hold out.
        threads: CPU threads of each run, which affect its results; None on a GPU.
        notes: remarks on tasks that are left out, and on options that ``auto`` fitted.
        load: load by other programs while the speeds were measured.
        resumed: whether the comparison was started before.
    """

    asked: ComparisonRequest
    epochs: dict[str, float]
    paces: dict[str, TrainingSpeed]
    top: float
    after: TimeAfterTraining | None
    held_out: int
    threads: int | None
    notes: tuple[str, ...]
    load: Load = Load()
    resumed: bool = False

    def training(self, task: str) -> float:
        """Return the training time of a task in seconds."""
        return self.paces[task].seconds_of(self.epochs[task])

    def jobs(self, out: Path) -> list[Job]:
        """Return the runs, first one of each task, so that an interrupted comparison has results of all."""
        found, asked, names = [], self.asked.with_threads(self.threads), name_tasks(self.epochs)
        for seed in range(asked.seeds):
            for task, name in names.items():
                folder = out / f"{name}-seed{seed}"
                words = pretrain_arguments(asked, task, folder, self.epochs[task], self.paces[task].images, seed)
                log = out / "logs" / f"{folder.name}.txt"
                seconds = self.training(task) + self.top
                found.append(Job(name, seed, folder, words, log, seconds, self.top, self.epochs[task]))
        return found

    def seconds_left(self, out: Path) -> float:
        """Return the seconds that the remaining runs take, including overhead."""
        return sum(job.seconds * (1 - job.done()) for job in self.jobs(out)) / self.asked.at_once

    def plain(self, out: Path) -> dict[str, Any]:
        """Return values for JSON; ``seconds`` is the time that the runs in ``out`` still need."""
        tasks = [{"task": name, "epochs": self.epochs[name], "seconds": self.training(name)} for name in self.epochs]
        seconds, load = self.seconds_left(out), self.load.plain()
        found = {"tasks": tasks, "seeds": self.asked.seeds, "held_out": self.held_out}
        return found | {"seconds": seconds, "load": load}

    def seconds_after(self, encoders: int) -> float:
        """Return the seconds for scoring ``encoders`` encoders and writing the page; not in a dry run."""
        assert self.after is not None
        return encoders * self.after.scoring + len(self.epochs) * self.after.page

    def lines(self, images: int, noun: str) -> list[str]:
        """Return a line for each task; ``images`` counts the held-out images too."""
        said = []
        names = name_tasks(self.epochs)
        wide = max(map(len, names.values()))
        for task, epochs in self.epochs.items():
            pace = self.paces[task]
            said.append(
                f"  {names[task]:<{wide}}  {duration(self.training(task))} of training: {epochs:,g} epochs of "
                f"{images - self.held_out:,} {noun} ({self.held_out:,} held out), {pace.step:.2g} s for a step of "
                f"{pace.images}"
            )
        return said


def name_tasks(tasks: Iterable[str]) -> dict[str, str]:
    """Return names of tasks for tables and folders: a user's task is named by its class, numbered if that is taken."""
    found: dict[str, str] = {}
    for task in tasks:
        name = label(task)
        same = sum(label(other) == name for other in found)
        found[task] = name if not same else f"{name}-{same + 1}"
    return found


def pretrain_arguments(
    asked: ComparisonRequest, task: str, folder: Path, epochs: float, batch: int, seed: int
) -> list[str]:
    """Return the arguments of ``patchloom pretrain``."""
    given = {**asked.given, "task": task, "out": folder, "epochs": epochs, "batch_size": batch, "seed": seed}
    given["split_seed"] = SPLIT_SEED
    return [*asked.data, *(f"--{name}={value}" for name, value in to_option_values(given).items())]


def to_option_values(given: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as the command line takes them."""
    return {name: in_pixels(value) if name in _SIZES else str(value) for name, value in given.items()}


def resolve_settings(
    asked: ComparisonRequest, training: Source, explicit: bool
) -> tuple[dict[str, ResolvedSettings], Stats, list[str]]:
    """Return the resolved settings of each task, and notes on tasks and options."""
    found: dict[str, ResolvedSettings] = {}
    notes: list[str] = []
    stats = None
    for task in asked.tasks:
        try:
            one = request(asked.source, task, dict(asked.given))
            if stats is None:
                channels, stats = measure_data(one, training)
            settings = resolve(one, len(training), channels, stats)[0]
            fitted = prepare_task(settings, stats).fitted()
        except PatchloomError as problem:
            if explicit:
                raise
            notes.append(f"{label(task)} is left out: {problem}")
            continue
        found[task] = settings
        if fitted:
            listed = ", ".join(f"{option} {value} ({why})" for option, (value, why) in fitted.items())
            notes.append(f"auto chose for {label(task)}: {listed}")
    if len(found) < 2:
        raise PatchloomError(
            f"a comparison needs two tasks or more, and only these are possible: {', '.join(found) or 'none'}. "
            f"{' '.join(notes)}".strip()
        )
    assert stats is not None
    return found, stats, notes


def stored_plan(asked: ComparisonRequest, out: Path) -> ComparisonPlan | None:
    """Return the plan of the comparison in this folder; None if there is none."""
    path = out / _FILE
    if not path.exists():
        if out.exists() and any(one.name[0] != "." for one in out.iterdir()):
            raise PatchloomError(f"{out} exists and holds no comparison: choose another folder with --out")
        return None
    found = read_checksummed(path)
    before, now = found["asked"], asked.plain()
    if different := [name for name in now if before.get(name) != now[name]]:
        name = different[0]
        raise PatchloomError(
            f"{out} holds a comparison with other settings ({name}: was {before.get(name)}, now {now[name]}): choose "
            "another folder with --out, or repeat its settings to resume it"
        )
    if not _STORED <= found.keys():
        raise PatchloomError(f"{path} was written by another version of patchloom: choose another folder with --out")
    try:
        paces = {task: TrainingSpeed(**typed_fields(TrainingSpeed, pace)) for task, pace in found["paces"].items()}
        after = TimeAfterTraining(**typed_fields(TimeAfterTraining, found["after"]))
        load = Load(**typed_fields(Load, found["load"], dict.fromkeys(get_type_hints(Load), (0.0, math.inf))))
        its = typed_fields(ComparisonPlan, {name: found[name] for name in _AS_THEY_ARE})
        # tasks become arguments of a command line: they must not come from a file that others may have written
        if not {*its["epochs"]} == {*paces} <= {*asked.tasks}:
            raise ValueError("its tasks differ from the requested ones")
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise PatchloomError(f"{path} is not the plan of a comparison ({problem}): choose another --out") from problem
    notes = tuple(map(str, found["notes"]))
    return ComparisonPlan(asked, paces=paces, after=after, notes=notes, load=load, resumed=True, **its)


def new_plan(
    asked: ComparisonRequest,
    opened: Data,
    explicit: bool,
    devices: Sequence[str],
    ending: Callable[[Path], TimeAfterTraining] | None,
) -> ComparisonPlan:
    """Measure the training speed of each task and the overhead of a run.

    A dry run estimates the speed from a few steps and assumes an overhead of `USUAL_TOP`.
    """
    threads = asked.threads_each()
    given = asked.with_threads(threads)
    first = request(asked.source, asked.tasks[0], {**asked.given, "split_seed": SPLIT_SEED})
    with StatusMessage("looking for copies among the images"):
        training, held_out = choose_held_out(first, opened.train)[0].parts(opened.train)
    with StatusMessage("inspecting the images"):
        settings, stats, notes = resolve_settings(given, training, explicit)
    training = training.heard_as(stats.sound)
    one = next(iter(settings.values()))
    if one.device == "cpu":  # fixed, so that a comparison resumed on another machine has the same number
        threads = one.threads
    others = BackgroundLoad()
    paces = (estimated_paces if ending is None else measure_training_speeds)(settings, training)
    load = others.load()
    if asked.samples is not None:
        epochs = {task: pace.epochs_of(asked.samples) for task, pace in paces.items()}
    else:
        assert asked.minutes is not None
        epochs = {task: pace.epochs_in(60 * asked.minutes) for task, pace in paces.items()}
    top, after = USUAL_TOP, None
    if ending is not None:
        top, after = _pilot(asked.with_threads(threads), [*paces][0], paces, devices, ending)
    return ComparisonPlan(asked, epochs, paces, top, after, len(held_out), threads, tuple(notes), load)


def _pilot(
    asked: ComparisonRequest,
    task: str,
    paces: dict[str, TrainingSpeed],
    devices: Sequence[str],
    ending: Callable[[Path], TimeAfterTraining],
) -> tuple[float, TimeAfterTraining]:
    """Measure the overhead of a run in seconds (start, measures, pictures, last evaluation), and the time after it."""
    pace = paces[task]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        epochs = _PILOT / pace.epoch
        words = pretrain_arguments(asked, task, folder, epochs, pace.images, 0)
        job = Job(task, 0, folder, words, Path(place) / "log.txt", USUAL_TOP, USUAL_TOP, epochs)
        taken = run_all([job], 1, devices, lambda one, seconds: None, _UNPLANNED)
        if job.failure:
            raise PatchloomError(job.failure)
        with StatusMessage("timing the evaluation"):
            after = ending(folder)
    return max(1.0, taken[job.name] - _PILOT * pace.step), after


def store(plan: ComparisonPlan, out: Path) -> None:
    """Store a plan in the folder of its comparison."""
    make_folder(out)
    found = {"asked": plan.asked.plain()} | {name: getattr(plan, name) for name in _AS_THEY_ARE}
    assert plan.after is not None  # a dry run stores nothing
    found["after"], found["notes"], found["load"] = plan.after._asdict(), list(plan.notes), asdict(plan.load)
    found["paces"] = {task: pace._asdict() for task, pace in plan.paces.items()}
    write_checksummed(out / _FILE, found)
