"""What trackers are told at a run's end, kept in its folder until each of them has it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from patchloom.display import is_first
from patchloom.errors import PatchloomError
from patchloom.loggers.base import FinalResult, read_sent
from patchloom.loggers.queue import TrackerSet
from patchloom.runs.folder import FolderLocked, RunFolder
from patchloom.system.files import write_whole


class RunEnding(NamedTuple):
    """What a finished run tells beside its rows and settings, which its folder has anyhow.

    Attributes:
        step: after which it ended.
        went_back: steps to which it went back.
        pictures: names of the last ones, in the folder of its pictures; evaluations draw others there.
        result: what it says.
    """

    step: int
    went_back: Sequence[int]
    pictures: Sequence[str]
    result: FinalResult


def write_run_ending(ending: RunEnding, folder: RunFolder) -> None:
    """Keep how a run ended, in ``logs/ending.json``."""
    result = {**ending.result._asdict(), "rows": list(map(dict, ending.result.rows))}
    write_whole(_path(folder), json.dumps({**ending._asdict(), "result": result}, indent=1) + "\n")


def send_pending(names: Sequence[str], folder: RunFolder, say: Callable[[str], None] = print) -> None:
    """Send trackers what they lack of a finished run: one was killed while they took it, or could not be reached."""
    lacking = [name for name in names if not _has_result(folder, name)]
    if not lacking or not is_first():
        return
    if not _path(folder).exists():
        say(f"  its last start had no --log, so that nothing is kept for {', '.join(lacking)}, and nothing is sent")
        return
    ending = _read_ending(_path(folder))
    try:
        folder.lock()
    except FolderLocked:
        say(f"  another process is at work in {folder.path}, so that nothing is sent: run this again after its end")
        return
    try:
        with TrackerSet(lacking, folder, say) as tracks:
            tracks.start(folder.read_config(), _rows(folder.metrics), ending.went_back)
            files = [folder.pictures / name for name in ending.pictures]
            tracks.pictures([file for file in files if file.exists()], ending.step, ended=True)
            tracks.result(ending.result, ending.step)
    finally:
        folder.unlock()


def _path(folder: RunFolder) -> Path:
    return folder.path / "logs" / "ending.json"


def _has_result(folder: RunFolder, name: str) -> bool:
    try:
        return read_sent(folder.path / "logs" / f"{name}.json").ended
    except PatchloomError:  # said when it is begun
        return False


def _read_ending(path: Path) -> RunEnding:
    try:
        found = json.loads(path.read_text("utf-8"))
        return RunEnding(**found | {"result": FinalResult(**found["result"])})
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise PatchloomError(f"{path} is damaged: leave out --log, or restore it from a copy") from problem


def _rows(path: Path) -> list[Mapping[str, str]]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as problem:
        raise PatchloomError(f"{path} cannot be read ({problem.strerror}): leave out --log, or restore it") from problem
