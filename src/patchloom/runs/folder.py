"""The folder of a run: what is in it, and how it is read back."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import date
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, Literal

import torch

from patchloom.arguments import without_removed
from patchloom.audio.config import sound_from
from patchloom.data.sources.glob import is_pattern, is_single
from patchloom.data.sources.in_memory import DataLike, is_object
from patchloom.data.sources.open import absolute_name, split_names
from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError, conforms, typed_fields
from patchloom.nets.build import check_model_options
from patchloom.nets.build import is_model_name as plain_model
from patchloom.runs.checkpoint import Checkpoints
from patchloom.runs.checksummed import read_checksummed, write_checksummed
from patchloom.runs.settings import ResolvedSettings, Settings, command, setting_differences
from patchloom.runs.training_set import Record, write_record
from patchloom.sizes import compact
from patchloom.system.files import append, make_folder, no_link, remove_leftovers, write_error, write_whole
from patchloom.tasks import TASKS
from patchloom.tasks.custom import Code, is_code, label

# What somebody may have meant who named a path that is not a run's folder.


_CONFIG = "config.yaml"  # which every run has


def run_around(path: str | Path) -> Path | None:
    """The folder of the run in which a path lies, at most two folders further up; None if it lies in none."""
    return next((folder for folder in list(Path(path).parents)[:2] if (folder / _CONFIG).is_file()), None)


def suggest_run(path: str | Path) -> str:
    """What may have been meant instead of ``path``, as the end of a sentence; "" if nothing is near.

    That is the run in which it lies, a run that lies in it, or one of nearly the same name.
    """
    path = Path(path)
    with suppress(OSError, ValueError, RecursionError):  # such a path names nothing
        if path.exists():
            if (around := run_around(path)) is not None:
                return f"it is a part of the run {around}, so give {around}"
            if runs := _runs_in(path):
                if len(runs) == 1:
                    return f"the run {runs[0].name} is in it, so give {runs[0]}"
                listed = ", ".join(run.name for run in runs[:3]) + ", ..." * (len(runs) > 3)
                return f"{len(runs)} runs are in it ({listed}), so give one of them, such as {runs[0]}"
            return ""
        if runs := _runs_in(Path("runs") / path.parent if path.parent == Path() else path.parent):
            near = get_close_matches(path.name, [run.name for run in runs], n=1)
            return f"did you mean {next(run for run in runs if run.name == near[0])}?" if near else ""
    return ""


def _runs_in(folder: Path) -> list[Path]:
    return sorted(inside.parent for inside in folder.glob(f"*/{_CONFIG}")) if folder.is_dir() else []


try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]  # a module elsewhere


# what is measured of the data, by its type
_MEASURED: dict[str, Any] = {
    **dict.fromkeys(("mean", "std"), list[float]),
    **dict.fromkeys(("height", "width", "sampled"), int),
    **dict.fromkeys(("held_out", "held_out_copies"), list[int]),
    **{"fingerprint": str, "held_out_doubt": Literal["", "trained", "unknown"], "held_out_looked": bool},
    "effective_epochs": float,
}
_NAMED_SOURCES = 3  # in the name of a folder
_NAMED = 6  # settings that differ, in the sentence about them
# what a run needs to be trained on; all else in its folder is a result of the weights that it has now
_GOES_ON = (
    *("requested.yaml", "config.yaml", "reasons.yaml", "data.yaml", "trained_on.bin", "metrics.csv", "log.txt"),
    *("unreadable.txt", "skipped.txt", "checkpoints"),
)
_NOT_COPIED = ("logs", "earlier", ".lock")


class FolderLocked(PatchloomError):
    """Another process is at work in a folder."""


class RunFolder:
    """The files of one run.

    ``requested.yaml`` holds what the user asked for, by which the same command is recognised; ``config.yaml`` what
    every ``auto`` became, and can be given to ``--config``.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.requested = self.path / "requested.yaml"
        self.config = self.path / "config.yaml"
        self.reasons = self.path / "reasons.yaml"  # of what auto became; the comments of config.yaml are for people
        self.metrics = self.path / "metrics.csv"
        self.checkpoints = Checkpoints(self.path / "checkpoints", self.check_lock)
        self.encoder = self.path / "encoder.safetensors"
        self.trained_on = self.path / "trained_on.bin"
        self.pictures = self.path / "pictures"
        self.log = self.path / "log.txt"
        self.unreadable = self.path / "unreadable.txt"
        self.skipped = self.path / "skipped.txt"
        self.summary = self.path / "summary.txt"  # written last: the run is finished
        self._lock: IO[str] | None = None

    @property
    def name(self) -> str:
        """Name of the run: that of its folder as it is now."""
        return os.path.basename(os.path.abspath(self.path))

    def holds(self, settings: Settings) -> bool:
        """Whether a run with the same ``settings`` is there already and may be resumed."""
        if self.requested.exists():
            became = self.read_config().plain() if self.config.exists() else {}
            different = setting_differences(self.read_requested(), settings, became, self.path)
            if different:
                more = f"; and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
                finished = "holds a run" if self.read_summary() is None else "holds a finished run"
                raise PatchloomError(
                    f"{self.path} {finished} with other settings ({'; '.join(different[:_NAMED])}{more}): for a new "
                    f"run, give another folder with --out or delete this one (--from {self.path} begins with its "
                    "weights); to go on with this one, repeat its settings"
                )
            if not self.config.exists() and self.checkpoints.there():  # what auto became is known no more
                raise PatchloomError(
                    f"{self.config} is missing beside its checkpoints: restore it from a copy, or choose another --out"
                )
            return self.config.exists()  # else it was stopped before it had begun
        # hidden files are what a process left that was killed as it began
        if self.path.exists() and not (self.path.is_dir() and all(p.name[0] == "." for p in self.path.iterdir())):
            raise PatchloomError(f"{self.path} exists and holds no run of patchloom: choose another folder with --out")
        return False

    def lock(self) -> None:
        """Keep other processes from training in this folder, until this one ends."""
        with suppress(OSError):  # read-only, or a file system without locks: what is written next will tell
            self._lock = open(self.path / ".lock", "w", opener=no_link)
            if fcntl is None:
                return
            try:
                # such a lock is not inherited by processes that read images, and ends with this process
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise FolderLocked(
                    f"another process is training in {self.path}: wait for its end, or choose another folder with --out"
                ) from None
        self.check_lock()

    def unlock(self) -> None:
        """Let other processes work in this folder again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def check_lock(self) -> None:
        """Before something is written: make sure that this is still the folder that was locked, if one was."""
        if self._lock is None:
            return
        try:
            # not by opening it: the system would release the lock when it is closed
            same = os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.path / ".lock"))
        except OSError as problem:
            same = problem.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
        if not same:
            raise PatchloomError(
                f"{self.path} was removed, moved or replaced while a run trained in it (its .lock is another one): "
                "the run has stopped and writes nothing more, so move the folder back and run the same command again, "
                "or begin again with another --out"
            )

    def tidy(self) -> None:
        """Remove what a killed process left half-written. The folder must be locked."""
        remove_leftovers(self.path)
        self.checkpoints.clean()

    def begin(
        self,
        asked: Settings,
        settings: ResolvedSettings,
        reasons: dict[str, str],
        stats: Stats,
        fingerprint: str,
        held_out: dict[str, Any],
        record: Record,
    ) -> None:
        """Store what was asked for, what it was resolved to and why, and what was measured of the data.

        Also which images are held out, and the record of those that are not.
        """
        notes = "".join(f"# {name}: {why}\n" for name, why in reasons.items())
        found = {"mean": list(stats.mean), "std": list(stats.std), "height": stats.height, "width": stats.width}
        found |= {"sampled": stats.sampled, "fingerprint": fingerprint, **held_out}
        if stats.sound is not None:
            found["sound"] = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(stats.sound).items()}
        make_folder(self.path)
        self.lock()
        if self.config.exists() or self.checkpoints.there():  # since we looked, and its process has ended already
            raise PatchloomError(
                f"another process has begun a run in {self.path} meanwhile: run the same command again, or choose "
                "another folder with --out"
            )
        write_checksummed(self.requested, asked.plain())  # first: it marks the folder as ours
        write_checksummed(self.path / "data.yaml", found)
        write_record(record, self.trained_on)
        write_checksummed(self.reasons, reasons)
        write_checksummed(self.config, settings.plain(), f"# What auto became, and why:\n{notes}\n")

    def kept_end(self, epochs: float) -> Path:
        """Return the folder that keeps the finished run of ``epochs`` once it is trained on."""
        return self.path / "earlier" / f"epochs-{epochs:g}"

    def last_end(self) -> Path | None:
        """Return the newest of these folders; None of a run that was never trained on."""
        ends = sorted(self.path.glob("earlier/epochs-*"), key=lambda end: float(end.name.removeprefix("epochs-")))
        return ends[-1] if ends else None

    def keep_end(self, epochs: float) -> None:
        """Move the results of a finished run to `kept_end`, a whole run, and leave what training on needs.

        A process that is killed on the way leaves the finished run, or what the same call completes.
        """
        kept = self.kept_end(epochs)
        part, old = kept.with_name(f".{kept.name}.part"), kept.with_name(f".{kept.name}.old")
        try:
            if self.read_summary() is not None:  # else they are there already
                make_folder(kept.parent)
                for leftover in (part, old):
                    shutil.rmtree(leftover, ignore_errors=True)

                def left_out(folder: str, names: list[str]) -> set[str]:
                    return {*_NOT_COPIED} if Path(folder) == self.path else set()

                shutil.copytree(self.path, part, ignore=left_out, copy_function=_linked)
                if kept.exists():
                    os.replace(kept, old)
                os.replace(part, kept)
                shutil.rmtree(old, ignore_errors=True)
                self.check_lock()
                self.summary.unlink()  # before all else: without it the run is not finished
            for one in self.path.iterdir():
                if one.name not in (*_GOES_ON, *_NOT_COPIED) and not one.name.startswith("."):
                    shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()
        except (OSError, shutil.Error) as problem:
            raise write_error(kept, problem) from problem

    def rewrite(self, name: str, value: Any, effective_epochs: float | None = None) -> None:
        """Change a setting of the stored configuration: the run goes on with it from now on."""
        self.check_lock()
        before = self.read_config().plain()
        lines = [line for line in self.config.read_text("utf-8").splitlines()[1:] if line.startswith("# ")]
        why = f"was {before[name]!r} until {date.today()}"
        lines.append(f"# {name}: {why}")
        write_checksummed(self.reasons, {**self.read_reasons(), name: why})
        if effective_epochs is not None:
            write_checksummed(self.path / "data.yaml", {**self.read_data(), "effective_epochs": effective_epochs})
        write_checksummed(self.config, before | {name: value}, "\n".join([*lines, "", ""]))  # last: it decides

    def read_config(self) -> ResolvedSettings:
        """The resolved settings."""
        if not self.config.exists():
            why = suggest_run(self.path) or f"{self.config.name} is missing"
            raise PatchloomError(f"{self.path} is not the folder of a run: {why}")
        values = without_removed(read_checksummed(self.config))
        try:
            return _settings_from(values)
        except (AttributeError, TypeError, KeyError, IndexError, ValueError, PatchloomError) as problem:
            raise PatchloomError(f"{self.config} is not a configuration that patchloom wrote: {problem}") from problem

    def read_requested(self) -> dict[str, Any]:
        """Return the settings that the user asked for, as plain values."""
        return without_removed(read_checksummed(self.requested))

    def read_reasons(self) -> dict[str, str]:
        """Why ``auto`` became what it is, by setting; {} of an older run, which has no such file."""
        if not self.reasons.exists():
            return {}
        found = read_checksummed(self.reasons)
        if not all(isinstance(one, str) for pair in found.items() for one in pair):
            raise PatchloomError(f"{self.reasons} is not what patchloom wrote: restore it from a copy, or delete it")
        return found

    def command(self) -> str:
        """Return the command by which the run goes on, without ``--epochs``; "" where there is none."""
        asked, data = self.read_requested(), self.read_config().data
        usual = usual_folder(data, asked["task"]["name"], asked.get("recipe"))
        return command(asked, data, None if self.path == usual else self.path)

    def read_data(self) -> dict[str, Any]:
        """What was measured of the data when the run began."""
        path = self.path / "data.yaml"
        found = read_checksummed(path)
        if missing := {"mean", "std", "height", "width", "sampled", "fingerprint"} - found.keys():
            raise PatchloomError(f"{path} lacks {min(missing)}: is it whole?")
        try:
            for name, hint in _MEASURED.items():
                if name in found and not conforms(found[name], hint):
                    raise ValueError(f"{name} cannot be {str(found[name])[:40]!r}")
            sound_from(found.get("sound"))
        except (TypeError, ValueError) as problem:
            raise PatchloomError(f"{path} is not what patchloom wrote ({problem}): restore it from a copy") from problem
        return found

    def read_stats(self) -> Stats:
        """The statistics of the training data, as far as they are stored."""
        found = self.read_data()
        numbers = tuple(found["mean"]), tuple(found["std"]), found["height"], found["width"], found["sampled"]
        return Stats(*numbers, [], sound=sound_from(found.get("sound")))

    def read_summary(self) -> str | None:
        """The closing sentence of a finished run; None of one that is to go on, to write a whole one at its end."""
        try:
            text = self.summary.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        return text.strip() if text.strip() and text.endswith("\n") else None

    def unreadable_names(self) -> list[str]:
        """Files that could not be read so far."""
        if not self.unreadable.exists():
            return []
        # file names need not be UTF-8
        return [name_in(line) for line in self.unreadable.read_text("utf-8", "surrogateescape").splitlines()]

    def note_skipped(self, line: str) -> None:
        """Add to the list of updates that were skipped, unless it is there: the run was killed, and does them again."""
        self.check_lock()
        there = self.skipped.read_text("utf-8", "surrogateescape").split("\n") if self.skipped.exists() else []
        if line not in there:
            append(self.skipped, line + "\n")

    def write_metrics(self, rows: list[dict[str, str]]) -> None:
        """Write ``metrics.csv``: a row a logged step, as `metrics_row` makes them."""
        self.check_lock()
        write_metrics(self.metrics, rows)

    def note_unreadable(self, names: list[str]) -> None:
        """Add files that could not be read to the run's list, each once."""
        self.check_lock()
        there = {*self.unreadable_names()}
        if not there.issuperset(names):
            write_whole(self.unreadable, "".join(f"{line_of(name)}\n" for name in sorted({*there, *names})))


# what runs of versions without these settings did
_BEFORE: dict[str, Any] = {"attention": "fused", "kernels": "torch", "compile": False, "crop_scale": 0.2, "devices": 1}


def _settings_from(values: dict[str, Any]) -> ResolvedSettings:
    """Resolved settings, checked: whoever wrote the file may have put anything there."""
    before = _BEFORE | {"threads": torch.get_num_threads()}
    settings = ResolvedSettings(**before | typed_fields(ResolvedSettings, values))
    settings = replace(settings, patch_size=compact(settings.patch_size))
    settings.check()
    model, task = settings.model["name"], settings.task["name"]
    if not (isinstance(task, str) and plain_model(str(model).replace("-", "_"))):
        raise ValueError(f"the task {str(task)[:40]!r} or the model {str(model)[:40]!r} has no name")
    check_model_options({name: value for name, value in settings.model.items() if name != "name"})
    if is_code(task) and task not in TASKS and Code.of(task).somewhere and not Code.of(task).digest:
        raise ValueError(f"the task {task[:80]!r} has no digest")
    return settings


def _linked(file: str, to: str) -> str:
    """Copy a file; one of weights, which is never written in place, only gets another name."""
    if file.endswith(".safetensors"):
        with suppress(OSError):  # a file system without such links
            os.link(file, to)
            return to
    return shutil.copy2(file, to)


def line_of(name: str) -> str:
    """A file's name as one line of ``unreadable.txt``: itself, or a JSON string where it would be several lines."""
    return name if name.splitlines() == [name] and name[0] != '"' else json.dumps(name)


def name_in(line: str) -> str:
    """The name of which `line_of` made a line; a line of an older version, which had names as they are, is the name."""
    try:
        found = json.loads(line) if line.startswith('"') else line
    except ValueError:
        return line
    return found if isinstance(found, str) else line


def metrics_row(values: dict[str, float | int]) -> dict[str, str]:
    """A row of ``metrics.csv`` as it is written."""
    return {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in values.items()}


def write_metrics(path: Path, rows: list[dict[str, str]]) -> None:
    """Write ``metrics.csv``: a row a logged step. Columns may appear on the way."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def usual_folder(data: DataLike, task: str, recipe: str | None = None) -> Path:
    """Return the folder of a run that is given no other."""
    return Path("runs") / f"{data_slug(data)}-{recipe or label(task)}"


def data_slug(data: DataLike) -> str:
    """What data is called in file names."""
    if len(names := split_names(absolute_name(data) if is_object(data) else data)) > 1:
        if all(map(is_single, map(str, names))):
            return data_slug(os.path.commonpath([os.path.dirname(os.path.abspath(one)) for one in names]))
        more = len(names) - _NAMED_SOURCES
        return "-".join([*map(data_slug, names[:_NAMED_SOURCES]), *[f"and-{more}-more"] * (more > 0)])
    path = Path(str(names[0]).partition("@")[0].removesuffix(".tar"))  # cifar10@ROOT is cifar10
    if is_pattern(str(path)):  # photos/**/*.png is photos, frames_*.jpg is frames_
        path = Path(re.split(r"[*?[{]", str(path))[0])
    words = (re.sub(r"[^A-Za-z0-9._-]+", "-", word).strip("-") for word in (path.name, path.parent.name))
    return next(filter(None, words), "images")
