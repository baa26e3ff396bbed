"""Folder of a run: its files, and reading and writing them."""

from __future__ import annotations

import csv
import errno
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

import numpy as np

from patchloom.audio.config import sound_from
from patchloom.data.sources.glob import is_pattern, is_single
from patchloom.data.sources.in_memory import DataLike, is_object
from patchloom.data.sources.open import absolute_name, split_names
from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError, TemporaryError, conforms, typed_fields
from patchloom.nets.build import check_model_options
from patchloom.nets.build import is_model_name as plain_model
from patchloom.runs.checkpoint import Checkpoints
from patchloom.runs.settings import ResolvedSettings, Settings, command, setting_differences
from patchloom.runs.training_set import Record, write_record
from patchloom.sizes import compact
from patchloom.system.checksummed import read_checksummed, write_checksummed
from patchloom.system.files import (
    UnsafeFile,
    append,
    copy_tree,
    find_linked_folder,
    make_folder,
    no_link,
    read_text,
    write_error,
    write_whole,
)
from patchloom.tasks import TASKS
from patchloom.tasks.custom import Code, is_code, label

# Suggestions for paths that are not the folder of a run.


_CONFIG = "config.yaml"  # every run has it


def run_around(path: str | Path) -> Path | None:
    """Return the folder of the run that contains a path, at most two levels up; None if there is none."""
    return next((folder for folder in list(Path(path).parents)[:2] if (folder / _CONFIG).is_file()), None)


def suggest_run(path: str | Path) -> str:
    """Suggest a run instead of ``path``, as the end of a sentence; "" without a suggestion.

    Candidates are the run that contains the path, runs inside it, and one with a similar name.
    """
    path = Path(path)
    with suppress(OSError, ValueError, RecursionError):  # invalid path
        if path.exists():
            if (around := run_around(path)) is not None:
                return f"it is part of the run {around}, so give {around}"
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


def check_links(run: Path) -> None:
    """Refuse a run with a link to a folder: patchloom writes into a run's folders, and tidies them."""
    if (link := find_linked_folder(run)) is not None:
        raise PatchloomError(
            f"{link} is a link to a folder, and links in a run are not followed: put the folder itself there, or "
            "remove the link"
        )


def _runs_in(folder: Path) -> list[Path]:
    return sorted(inside.parent for inside in folder.glob(f"*/{_CONFIG}")) if folder.is_dir() else []


try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]  # a module elsewhere


# types of the values in data.yaml
_MEASURED: dict[str, Any] = {
    **dict.fromkeys(("mean", "std"), list[float]),
    **dict.fromkeys(("height", "width", "sampled"), int),
    **dict.fromkeys(("held_out", "held_out_copies"), list[int]),
    **{"fingerprint": str, "held_out_doubt": Literal["", "trained", "unknown"], "held_out_looked": bool},
    "effective_epochs": float,
}
_NAMED_SOURCES = 3  # in the name of a folder
_NAMED = 6  # settings that differ, in the message about them
# files that longer training needs; all others in the folder are results of the present weights
_GOES_ON = (
    *("requested.yaml", "config.yaml", "reasons.yaml", "data.yaml", "trained_on.bin", "metrics.csv", "log.txt"),
    *("unreadable.txt", "skipped.txt", "checkpoints", "start.safetensors"),
)
_NOT_COPIED = ("logs", "earlier", "encoders", ".lock")


class FolderLocked(TemporaryError):
    """The folder is locked by another process."""


class RunFolder:
    """Files of one run.

    ``requested.yaml`` holds the settings that the user gave, which identify the run on resume. ``config.yaml`` holds
    the resolved settings, and can be given to ``--config``.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.requested = self.path / "requested.yaml"
        self.config = self.path / "config.yaml"
        self.reasons = self.path / "reasons.yaml"  # reasons for the values of auto, also as comments in config.yaml
        self.metrics = self.path / "metrics.csv"
        self.checkpoints = Checkpoints(self.path / "checkpoints", self.check_lock)
        self.encoder = self.path / "encoder.safetensors"
        self.teacher = self.path / "teacher" / "encoder.safetensors"  # moving average of the encoder, of some tasks
        self.start = self.path / "start.safetensors"  # the encoder as --init or --from loaded it
        self.trained_on = self.path / "trained_on.bin"
        self.pictures = self.path / "pictures"
        self.log = self.path / "log.txt"
        self.unreadable = self.path / "unreadable.txt"
        self.skipped = self.path / "skipped.txt"
        self.summary = self.path / "summary.txt"  # written last: the run is finished
        self._lock: IO[str] | None = None

    @property
    def name(self) -> str:
        """Name of the run: the present name of its folder."""
        return os.path.basename(os.path.abspath(self.path))

    def holds(self, settings: Settings) -> bool:
        """Return whether the folder holds a run with the same ``settings``, which may be resumed."""
        if self.requested.exists():
            became = self.read_config().plain() if self.config.exists() else {}
            different = setting_differences(self.read_requested(), settings, became, self.path)
            if different:
                more = f"; and {len(different) - _NAMED} more" if len(different) > _NAMED else ""
                finished = "holds a run" if self.read_summary() is None else "holds a finished run"
                raise PatchloomError(
                    f"{self.path} {finished} with other settings ({'; '.join(different[:_NAMED])}{more}): for a new "
                    f"run, give another folder with --out or delete this one (--from {self.path} begins with its "
                    "weights); to resume it, repeat its settings"
                )
            if not self.config.exists() and self.checkpoints.there():  # the values of auto are lost
                raise PatchloomError(
                    f"{self.config} is missing beside its checkpoints: restore it from a copy, or choose another --out"
                )
            return self.config.exists()  # else it was interrupted before it began
            # hidden files are leftovers of a process that was killed at its start
        if self.path.exists() and not (self.path.is_dir() and all(p.name[0] == "." for p in self.path.iterdir())):
            raise PatchloomError(f"{self.path} exists and holds no run of patchloom: choose another folder with --out")
        return False

    def lock(self) -> None:
        """Lock the folder against other training processes until this one ends."""
        check_links(self.path)
        with suppress(OSError):  # read-only, or a file system without locks: writing may fail later
            try:
                self._lock = open(self.path / ".lock", "w", opener=no_link)
            except UnsafeFile as problem:
                raise PatchloomError(str(problem)) from problem
            if fcntl is None:
                return
            try:
                # not inherited by worker processes, and released when this process ends
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise FolderLocked(
                    f"another process is training in {self.path}: wait for its end, or choose another folder with --out"
                ) from None
        self.check_lock()

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def check_lock(self) -> None:
        """Check before writing that the folder is still the one that was locked."""
        if self._lock is None:
            return
        try:
            # do not open the file: closing it would release the lock
            same = os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.path / ".lock"))
        except OSError as problem:
            same = problem.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
        if not same:
            raise PatchloomError(
                f"{self.path} was removed, moved or replaced during training (its .lock has changed), so the run has "
                "stopped: move the folder back and run the same command again, or begin again with another --out"
            )

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
        """Store settings, reasons, statistics, held-out split, and the record of training images."""
        notes = "".join(f"# {name}: {why}\n" for name, why in reasons.items())
        found = {"mean": list(stats.mean), "std": list(stats.std), "height": stats.height, "width": stats.width}
        found |= {"sampled": stats.sampled, "fingerprint": fingerprint, **held_out}
        if stats.sound is not None:
            found["sound"] = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(stats.sound).items()}
        make_folder(self.path)
        self.lock()
        if self.config.exists() or self.checkpoints.there():  # created since the check, by a process that has ended
            raise TemporaryError(
                f"another process has begun a run in {self.path} meanwhile: run the same command again, or choose "
                "another folder with --out"
            )
        write_checksummed(self.requested, asked.plain())  # first: it marks the folder as a run
        write_checksummed(self.path / "data.yaml", found)
        write_record(record, self.trained_on)
        write_checksummed(self.reasons, reasons)
        write_checksummed(self.config, settings.plain(), f"# Values of auto, with reasons:\n{notes}\n")

    def kept_encoder(self, epoch: int) -> Path:
        """Return the file of the encoder after an epoch, see ``--keep_every``."""
        return self.path / "encoders" / f"epoch-{epoch:04}.safetensors"

    def kept_end(self, epochs: float) -> Path:
        """Return the folder for a copy of the run of ``epochs`` epochs, once it is trained longer."""
        return self.path / "earlier" / f"epochs-{epochs:g}"

    def last_end(self) -> Path | None:
        """Return the newest folder of `kept_end`; None for a run that was never trained longer."""
        ends: dict[float, Path] = {}
        for end in self.path.glob("earlier/epochs-*"):
            with suppress(ValueError):  # of a copy, or an archive
                ends[float(end.name.removeprefix("epochs-"))] = end
        return ends[max(ends)] if ends else None

    def keep_end(self, epochs: float) -> None:
        """Copy a finished run to `kept_end`, and remove its results here.

        If the process is killed meanwhile, the run is still finished, or the same call completes the move.
        """
        kept = self.kept_end(epochs)
        part, old = kept.with_name(f".{kept.name}.part"), kept.with_name(f".{kept.name}.old")
        try:
            if self.read_summary() is not None:  # else it has been copied already
                make_folder(kept.parent)
                for leftover in (part, old):
                    shutil.rmtree(leftover, ignore_errors=True)

                copy_tree(self.path, part, lambda one: one.parent == self.path and one.name in _NOT_COPIED)
                if kept.exists():
                    os.replace(kept, old)
                os.replace(part, kept)
                shutil.rmtree(old, ignore_errors=True)
                self.check_lock()
                self.summary.unlink()  # first: without it the run is not finished
            for one in self.path.iterdir():
                if one.name not in (*_GOES_ON, *_NOT_COPIED) and not one.name.startswith("."):
                    shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()
        except (OSError, RecursionError) as problem:
            shutil.rmtree(part, ignore_errors=True)  # it could keep a full disc full
            raise write_error(kept, problem) from problem

    def rewrite(self, name: str, value: Any, effective_epochs: float | None = None, why: str = "") -> None:
        """Change a setting of the stored configuration; ``why`` replaces the reasons that it had."""
        self.check_lock()
        before = self.read_config().plain()
        lines = [line for line in read_text(self.config).splitlines()[1:] if line.startswith("# ")]
        if why:
            lines = [line for line in lines if not line.startswith(f"# {name}: ")]
        why = why or f"was {before[name]!r} until {date.today()}"
        lines.append(f"# {name}: {why}")
        write_checksummed(self.reasons, {**self.read_reasons(), name: why})
        if effective_epochs is not None:
            write_checksummed(self.path / "data.yaml", {**self.read_data(), "effective_epochs": effective_epochs})
        write_checksummed(self.config, before | {name: value}, "\n".join([*lines, "", ""]))  # last: it counts

    def read_config(self) -> ResolvedSettings:
        if not self.config.exists():
            why = suggest_run(self.path) or f"{self.config.name} is missing"
            raise PatchloomError(f"{self.path} is not the folder of a run: {why}")
        check_links(self.path)
        values = read_checksummed(self.config)
        try:  # the file may have been edited
            settings = ResolvedSettings(**typed_fields(ResolvedSettings, values))
            settings = replace(settings, patch_size=compact(settings.patch_size))
            settings.check()
            model, task = settings.model["name"], settings.task["name"]
            if not (isinstance(task, str) and plain_model(str(model).replace("-", "_"))):
                raise ValueError(f"the task {str(task)[:40]!r} or the model {str(model)[:40]!r} has no name")
            check_model_options({name: value for name, value in settings.model.items() if name != "name"})
            if is_code(task) and task not in TASKS and Code.of(task).somewhere and not Code.of(task).digest:
                raise ValueError(f"the task {task[:80]!r} has no digest")
            return settings
        except (AttributeError, TypeError, KeyError, IndexError, ValueError, PatchloomError) as problem:
            raise PatchloomError(f"{self.config} is not a configuration that patchloom wrote: {problem}") from problem

    def read_requested(self) -> dict[str, Any]:
        """Return the settings that the user gave, as plain values."""
        found = read_checksummed(self.requested)
        task, model = (found.get(name, {}) for name in ("task", "model"))
        if not (isinstance(task, dict) and isinstance(task.get("name", ""), str) and isinstance(model, dict)):
            raise PatchloomError(
                f"{self.requested} is not what patchloom wrote: restore it from a copy, or delete the run"
            )
        return found

    def read_reasons(self) -> dict[str, str]:
        """Return the reasons for the values of ``auto``, by setting; {} without the file."""
        if not self.reasons.exists():
            return {}
        found = read_checksummed(self.reasons)
        if not all(isinstance(one, str) for pair in found.items() for one in pair):
            raise PatchloomError(f"{self.reasons} is not what patchloom wrote: restore it from a copy, or delete it")
        return found

    def command(self) -> str:
        """Return the command that resumes the run, without ``--epochs``; "" if there is none."""
        asked, data = self.read_requested(), self.read_config().data
        usual = usual_folder(data, asked["task"]["name"], asked.get("recipe"))
        return command(asked, data, None if self.path == usual else self.path, ("epochs", "minutes"))

    def read_data(self) -> dict[str, Any]:
        """Return the statistics, the fingerprint and the held-out split of the data, as plain values."""
        path = self.path / "data.yaml"
        found = read_checksummed(path)
        if missing := _MEASURED.keys() - {"effective_epochs"} - found.keys():
            raise PatchloomError(f"{path} lacks {min(missing)}: restore it from a copy")
        try:
            for name, hint in _MEASURED.items():
                if name in found and not conforms(found[name], hint):
                    raise ValueError(f"{name} cannot be {str(found[name])[:40]!r}")
            sound_from(found.get("sound"))
        except (TypeError, ValueError) as problem:
            raise PatchloomError(f"{path} is not what patchloom wrote ({problem}): restore it from a copy") from problem
        return found

    def read_stats(self) -> Stats:
        found = self.read_data()
        numbers = tuple(found["mean"]), tuple(found["std"]), found["height"], found["width"], found["sampled"]
        return Stats(*numbers, [], sound=sound_from(found.get("sound")))

    def read_summary(self) -> str | None:
        """Return the closing sentence of a finished run; None for an unfinished one, or an incomplete file."""
        try:
            text = read_text(self.summary)
        except (OSError, UnicodeDecodeError):
            return None
        return text.strip() if text.strip() and text.endswith("\n") else None

    def unreadable_names(self) -> list[str]:
        if not self.unreadable.exists():
            return []
        names = list[str]()
        for line in read_text(self.unreadable, errors="surrogateescape").splitlines():  # names need not be UTF-8
            name = line
            with suppress(ValueError):
                name = json.loads(line) if line.startswith('"') else line
            names.append(name if isinstance(name, str) else line)
        return names

    def note_skipped(self, line: str) -> None:
        """Append to the list of skipped updates, unless a killed run has written the same line already."""
        self.check_lock()
        there = read_text(self.skipped, errors="surrogateescape").split("\n") if self.skipped.exists() else []
        if line not in there:
            append(self.skipped, line + "\n")

    def write_metrics(self, rows: list[dict[str, str]]) -> None:
        """Write ``metrics.csv`` with a `metrics_row` per logged step; later rows may have more columns."""
        self.check_lock()
        text = io.StringIO()
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.metrics, text.getvalue())

    def note_unreadable(self, names: list[str]) -> None:
        """Add names of unreadable files to the run's list, each once."""
        self.check_lock()
        there = {*self.unreadable_names()}
        if not there.issuperset(names):
            write_whole(self.unreadable, "".join(f"{line_of(name)}\n" for name in sorted({*there, *names})))


def line_of(name: str) -> str:
    """Return a file's name as one line of ``unreadable.txt``; as a JSON string if it contains line breaks."""
    return name if name.splitlines() == [name] and name[0] != '"' else json.dumps(name)


def metrics_row(values: dict[str, float | int]) -> dict[str, str]:
    return {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in values.items()}


def read_metrics(path: Path) -> dict[str, np.ndarray]:
    """Read a table of numbers as columns [n] by name; empty and missing cells are NaN."""
    try:
        reader = csv.DictReader(io.StringIO(read_text(path, newline="")))
        names = list(reader.fieldnames or [])
        rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise PatchloomError(f"{path} could not be read ({problem}): give the metrics.csv of a run") from problem
    if names and "epoch" not in names:
        raise PatchloomError(f"{path} has no column named epoch: give the metrics.csv of a run")
    try:
        return {name: np.array([float(row[name] or "nan") for row in rows]) for name in names}
    except ValueError as problem:
        raise PatchloomError(f"{path} has a cell that is not a number ({problem}): remove that line") from problem


def curves_of(columns: dict[str, np.ndarray], name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return epochs [n] and finite values [n] of a column of ``metrics.csv``, named "", and of its baselines by name.

    Those without a value are left out.
    """
    prefix = "baseline:" if name == "held_out" else f"{name}:"
    names = {"": name} if name in columns else {}
    names |= {one.removeprefix(prefix): one for one in columns if one.startswith(prefix)}
    found = {}
    for called, column in names.items():
        known = np.isfinite(columns["epoch"]) & np.isfinite(columns[column])
        if known.any():
            found[called] = columns["epoch"][known], columns[column][known]
    return found


def usual_folder(data: DataLike, task: str, recipe: str | None = None) -> Path:
    return Path("runs") / f"{data_slug(data)}-{recipe or label(task)}"


def data_slug(data: DataLike) -> str:
    """Return a short name of data for file names."""
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
