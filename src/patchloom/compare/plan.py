"""Plan of a comparison, stored so that an interrupted comparison resumes unchanged."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from patchloom.compare.runner import Job, Length
from patchloom.data.loader import steps_per_epoch
from patchloom.data.source import Data, Source
from patchloom.data.sources.open import split_names
from patchloom.data.stats import Stats
from patchloom.display import StatusMessage, duration
from patchloom.errors import PatchloomError, listing, typed_fields
from patchloom.options.parse import parse_words, pretrain_spec
from patchloom.options.values import nested
from patchloom.options.verbs import Compare
from patchloom.runs.folder import RunFolder
from patchloom.runs.held_out import choose_held_out
from patchloom.runs.past import COMPARISON
from patchloom.runs.settings import ResolvedSettings, Settings, option_text, request
from patchloom.runs.task import prepare_task
from patchloom.sizes import in_pixels
from patchloom.system.checksummed import read_checksummed, write_checksummed
from patchloom.system.device import Cores, cores
from patchloom.system.files import make_folder
from patchloom.tasks.custom import label
from patchloom.train.estimate import forecast_run, rounded
from patchloom.train.init import Start
from patchloom.train.resolve import measure_data, resolve

SPLIT_SEED = 0  # seed of the held-out split, the same for all runs of a comparison
USUAL = ("mae", "droppos", "mp3", "restore", "extrema", "lut")
# options of compare that all runs take as they are
_OF_PRETRAIN = ("model", "img_size", "patch_size", "device", "threads", "batch_size", "workers", "group")
_LONG = {"model": "model.name", "from": "from_run"}  # names of options in full
_AS_THEY_ARE = ("held_out", "threads")  # attributes of a plan that YAML stores without conversion
# options of pretrain that compare sets itself, so that its arms differ in their training only
_SHARED = {"data", "task", "task.name", "out", "config", "config.file", "dry_run", "epochs", "minutes", "seed"}
_SHARED |= {"split_seed", "held_out", "group", "log", "device", "devices", "strategy"}
_LONGEST = 80  # characters of a run's folder

# Arms: a task and the options in which it differs from the others.


@dataclass(frozen=True)
class Arm:
    """Pretext task with its options.

    Attributes:
        text: as typed, such as ``mae:blr=1e-3:task.mask_ratio=0.5``.
        task: name of the task, or FILE.py:CLASS.
        typed: options of ``pretrain`` as typed, by name.
    """

    text: str
    task: str
    typed: dict[str, str]

    @classmethod
    def of(cls, text: str) -> Arm:
        """Read an arm; a colon separates options only in front of ``NAME=``, since it also stands in FILE.py:CLASS."""
        task, *options = re.split(r":(?=[A-Za-z_][\w.-]*=)", text)
        options = [option.replace("model.name=", "model=") for option in options]
        pairs = [(name.replace("-", "_"), value) for name, _, value in (option.partition("=") for option in options)]
        if shared := [name for name, _ in pairs if name in _SHARED]:
            raise PatchloomError(f"{text}: --{shared[0]} must be the same for all tasks: leave it out here")
        if len(dict(pairs)) < len(pairs):
            raise PatchloomError(f"{text} gives an option twice: leave one out")
        return cls(text, task, dict(pairs))

    @property
    def name(self) -> str:
        """Name in tables: the text, with the class alone of a custom task."""
        return ":".join([label(self.task), *(f"{name}={value}" for name, value in self.typed.items())])

    def error(self, problem: PatchloomError) -> PatchloomError:
        """Return an error about its settings, which names the arm if its own options may be the cause."""
        return PatchloomError(f"{self.text}: {problem}") if self.typed else problem

    def values(self, asked: Compare, **others: Any) -> dict[str, Any]:
        """Return the values of options of ``pretrain``: of the request, ``others``, and the arm's own over both."""
        shared = {**given_to_all(asked), "task.name": self.task, "split_seed": SPLIT_SEED, **others}
        shared = {_LONG.get(name, name): value for name, value in shared.items()}
        if not self.typed:
            return shared
        words = [f"--{_LONG.get(name, name)}={value}" for name, value in self.typed.items()]
        own = parse_words("patchloom pretrain", pretrain_spec(self.task), words, places={"data": asked.data})
        del own["data"]
        return shared | own

    def settings(self, asked: Compare, **others: Any) -> Settings:
        """Return the requested settings of its runs, checked as those of ``pretrain``."""
        try:
            given = nested(self.values(asked, **others))
            return request(asked.data, given.pop("task"), given)
        except PatchloomError as problem:
            raise self.error(problem) from problem


def tasks_of(asked: Compare) -> list[str]:
    """Return the texts of the arms."""
    given = USUAL if asked.tasks is None else asked.tasks
    return split_arms(given) if isinstance(given, str) else list(given)


def given_to_all(asked: Compare) -> dict[str, Any]:
    """Return the values of options of ``pretrain`` that the user gave to all runs."""
    return {name: value for name in _OF_PRETRAIN if (value := getattr(asked, name)) is not None}


def split_arms(text: str) -> list[str]:
    """Split the text of several arms at commas outside brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [arm.strip() for arm in found if arm.strip()]


def name_arms(texts: Iterable[str]) -> dict[str, str]:
    """Return names of arms for tables; a name that is taken, as by a class of the same name, is numbered."""
    return _numbered({text: Arm.of(text).name for text in texts})


def _numbered(names: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, name in names.items():
        same = sum(names[other] == name for other in found)
        found[key] = name if not same else f"{name}-{same + 1}"
    return found


def fixed_settings(asked: Compare) -> dict[str, Any]:
    """Return the settings that must not change on resuming; simultaneous runs and trackers may."""
    found: dict[str, Any] = {"data": [*map(str, split_names(asked.data))], "tasks": tasks_of(asked)}
    found |= {"seeds": asked.seeds, "minutes": asked.minutes, "samples": asked.samples}
    return found | {name: option_text(name, value) for name, value in given_to_all(asked).items()}


def threads_each(asked: Compare) -> dict[str, int]:
    """Return CPU threads per run if runs share the cores; {} if the user set them or each run has all cores."""
    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shared = asked.parallel > 1 and device != "cuda" and asked.threads is None
    return {"threads": max(1, cores() // asked.parallel)} if shared else {}


@dataclass(frozen=True)
class ComparisonPlan:
    """Plan of a comparison.

    Attributes:
        asked: request of the user, with either minutes or samples.
        arms: length of each arm by its text.
        held_out: number of images that all runs hold out.
        threads: CPU threads of each run, which affect its results; None on a GPU.
        notes: remarks on tasks that are left out, and on options that ``auto`` fitted.
        resumed: whether the comparison was started before.
    """

    asked: Compare
    arms: dict[str, Length]
    held_out: int
    threads: int | None
    notes: tuple[str, ...]
    resumed: bool = False

    def jobs(self, out: Path) -> list[Job]:
        """Return the runs, first one of each arm, so that an interrupted comparison has results of all."""
        asked, names, found = self.asked, name_arms(self.arms), list[Job]()
        # with letters that every system takes
        folders = _numbered({name: re.sub(r"[^\w.=+-]", "-", name)[:_LONGEST] for name in names.values()})
        data = [*map(str, split_names(asked.data))]
        shared: dict[str, Any] = {"threads": self.threads, "log": asked.log}
        shared = {name: value for name, value in shared.items() if value is not None}
        for seed in range(asked.seeds):
            for text, length in self.arms.items():
                folder = out / f"{folders[names[text]]}-seed{seed}"
                own: dict[str, Any] = {"out": folder, "batch_size": length.batch, "seed": seed, **shared}
                own |= {"minutes": asked.minutes} if length.epochs is None else {"epochs": length.epochs}
                found.append(Job(names[text], seed, folder, data, length, Arm.of(text).values(asked, **own)))
        return found

    def seconds_left(self, out: Path) -> float:
        """Return the seconds that the remaining runs take, including overhead."""
        return sum(job.seconds * (1 - job.done()) for job in self.jobs(out)) / self.asked.parallel

    def plain(self, out: Path) -> dict[str, Any]:
        """Return values for JSON; ``seconds`` is the time that the runs in ``out`` still need."""
        tasks = [{"task": text, **asdict(length)} for text, length in self.arms.items()]
        found = {"tasks": tasks, "seeds": self.asked.seeds, "held_out": self.held_out}
        return found | {"seconds": self.seconds_left(out)}

    @property
    def length(self) -> str:
        """Length of each run in words."""
        asked = self.asked
        return f"{asked.samples:,} samples" if asked.minutes is None else f"{asked.minutes:g} min of training"

    def about(self, out: Path, run: Path) -> tuple[tuple[str, str], ...]:
        """Return its settings and the command that repeats it in ``out``, as pairs of a name and a text.

        ``run`` is one of its runs.
        """
        asked, its = self.asked, RunFolder(run).read_config()
        budget = {"minutes": f"{asked.minutes:g}"} if asked.samples is None else {"samples": str(asked.samples)}
        given = {"tasks": ",".join(tasks_of(asked)), **budget, "seeds": str(asked.seeds)}
        given |= {"labels": str(asked.labels or ""), "few": ",".join(f"{one:g}" for one in asked.few)}
        given |= {"beside": ",".join(asked.beside), "finetune": str(asked.finetune or "")}
        given |= {name: option_text(name, value) for name, value in given_to_all(asked).items()}
        words = [f"--{name}={value}" for name, value in given.items() if value]
        data, name = map(str, split_names(asked.data)), its.model.get("name", "")
        sizes = f"images of {in_pixels(its.img_size)}, patches of {in_pixels(its.patch_size)}"
        return (
            ("command", shlex.join(["patchloom", "compare", *data, *words, f"--out={out}"])),
            ("runs", f"{len(self.arms)} tasks, {asked.seeds} of each, with {self.length} each"),
            ("encoder", f"{name}, {sizes}"),
        )

    def lines(self) -> list[str]:
        """Return a line on the length of each arm."""
        names, said = name_arms(self.arms), []
        wide = max(map(len, names.values()))
        for text, length in self.arms.items():
            epochs = "" if length.epochs is None else f"{length.epochs:,g} epochs, "
            time = f", about {duration(length.seconds)}" if epochs and length.seconds is not None else ""
            said.append(f"  {names[text]:<{wide}}  {epochs}{length.batch} images per step{time}")
        return said


def resolve_settings(
    asked: Mapping[str, Settings], training: Source, explicit: bool
) -> tuple[dict[str, ResolvedSettings], Stats, list[str]]:
    """Return the resolved settings of each arm by its text, statistics of the data, and notes on arms and options."""
    found: dict[str, ResolvedSettings] = {}
    notes: list[str] = []
    chosen: dict[str, list[str]] = {}  # arms by the options that auto chose for them
    stats = None
    for text, name in name_arms(asked).items():
        try:
            one = Start(asked[text]).shaped(training)[0]
            if stats is None:
                channels, stats = measure_data(one, training)
            settings = resolve(one, len(training), channels, stats)[0]
            fitted = prepare_task(settings, stats).fitted()
        except PatchloomError as problem:
            if explicit:
                raise Arm.of(text).error(problem) from problem
            notes.append(f"{name} is left out: {problem}")
            continue
        found[text] = settings
        if fitted:
            listed = ", ".join(f"{option} {value} ({why})" for option, (value, why) in fitted.items())
            chosen.setdefault(listed, []).append(name)
    notes += [f"auto chose for {listing(those, 'and')}: {listed}" for listed, those in chosen.items()]
    if stats is None or len(found) < 2:
        raise PatchloomError(
            f"a comparison needs two tasks or more, and only these are possible: {', '.join(found) or 'none'}. "
            f"{' '.join(notes)}".strip()
        )
    return found, stats, notes


def stored_plan(asked: Compare, out: Path) -> ComparisonPlan | None:
    """Return the plan of the comparison in this folder; None if there is none."""
    path = out / COMPARISON
    if not path.exists():
        if out.exists() and any(one.name[0] != "." for one in out.iterdir()):
            raise PatchloomError(f"{out} exists and holds no comparison: choose another folder with --out")
        return None
    found = read_checksummed(path)
    try:
        before, now = found["asked"], fixed_settings(asked)
        if name := next((name for name in {**now, **before} if before.get(name) != now.get(name)), ""):
            raise PatchloomError(
                f"{out} holds a comparison with other settings ({name}: was {before.get(name)}, now {now.get(name)}): "
                "choose another folder with --out, or repeat its settings to resume it"
            )
        ends = {"batch": (1, 2**31), "epochs": (0, 2**31), "seconds": (0, math.inf)}
        arms = {text: Length(**typed_fields(Length, arm, ends)) for text, arm in found["arms"].items()}
        its = typed_fields(ComparisonPlan, {name: found[name] for name in _AS_THEY_ARE})
        # arms become arguments of a command line: they must not come from a file that others may have written
        if not {*arms} <= {*now["tasks"]} or len(arms) < 2:
            raise ValueError("its tasks differ from the requested ones")
        if any((arm.epochs is None) != (asked.samples is None) for arm in arms.values()):
            raise ValueError("it has no epochs")
        notes = tuple(map(str, found["notes"]))
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise PatchloomError(f"{path} is not the plan of a comparison ({problem}): choose another --out") from problem
    return ComparisonPlan(asked, arms, notes=notes, resumed=True, **its)


def new_plan(asked: Compare, opened: Data, out: Path) -> ComparisonPlan:
    """Resolve the settings of each arm, refuse steps that do not fit, and forecast the time of equal samples."""
    requests = {text: Arm.of(text).settings(asked, **threads_each(asked)) for text in tasks_of(asked)}
    with StatusMessage("looking for copies among the images"):
        # the same for all arms; images that initial weights were trained on are not held out
        first, *others = requests.values()
        those = [first, *(one for one in others if one.weights_before)]
        split, *more = (choose_held_out(one, opened.train)[0] for one in those)
        if any(one.indices.tolist() != split.indices.tolist() for one in more):
            raise PatchloomError(
                "some tasks begin with weights that were trained on images which the first task holds out: begin all "
                "tasks with the same weights"
            )
        training, rest = split.parts(opened.train)
    with StatusMessage("inspecting the images"):
        settings, stats, notes = resolve_settings(requests, training, explicit=asked.tasks is not None)
    training = training.heard_as(stats.sound)
    threads, arms = torch.get_num_threads(), {}
    try:
        for text, one in settings.items():
            batch, epochs = min(one.batch_size, len(training)), None
            if asked.samples is not None:
                per_epoch = steps_per_epoch(len(training), one.batch_size)
                epochs = rounded(max(1 / per_epoch, asked.samples / (batch * per_epoch)))
                one = replace(one, epochs=epochs)
            forecast = forecast_run(one, training, batch, Cores(cores(), 1), RunFolder(out), timed=epochs is not None)
            arms[text] = Length(batch, epochs, forecast.total if asked.minutes is None else 60 * asked.minutes)
    finally:
        torch.set_num_threads(threads)
    one = next(iter(settings.values()))
    # fixed, so that a comparison resumed on another machine has the same number
    return ComparisonPlan(asked, arms, len(rest), one.threads if one.device == "cpu" else None, tuple(notes))


def store(plan: ComparisonPlan, out: Path) -> None:
    """Store a plan in the folder of its comparison."""
    make_folder(out)
    found = {"asked": fixed_settings(plan.asked)} | {name: getattr(plan, name) for name in _AS_THEY_ARE}
    found |= {"notes": list(plan.notes), "arms": {text: asdict(arm) for text, arm in plan.arms.items()}}
    write_checksummed(out / COMPARISON, found)
