"""The file of a run's results: one JSON document a line, of values only; its only writer and reader.

The outcomes of test images are kept beside it, in a file for each evaluation whose name is a digest of its content, so
that any two encoders that were tested on the same images can be compared later.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.errors import PatchloomError
from patchloom.results.result import Outcomes, Result
from patchloom.system.documents import parse_json
from patchloom.system.files import append as append_text
from patchloom.system.files import open_regular, read_bytes, write_whole

FILE, FOLDER = "results.jsonl", "outcomes"
_MOST = 2**28  # bytes of the file, and of all outcomes
_LINES, _LONGEST = 2**16, 2**20  # lines of the file, and bytes of a line
_NAME = re.compile(rb"\b[0-9a-f]{16}\.npz\b")
_YEAR = 4  # digits: a text of this length begins a date, and is not the number of an evaluation


def check(folder: Path, outcomes: bool = False) -> list[Result]:
    """Return the results so far, as `load` does, and refuse a file that cannot be read or written.

    Called before a long evaluation.
    """
    path = folder / FILE
    found = load(folder, outcomes=outcomes)
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PatchloomError(
            f"{path} cannot be written, and results are stored there: copy the run to a folder of your own"
        )
    return found


def append(folder: Path, results: Sequence[Result], once: bool = False) -> None:
    """Append the results of an evaluation.

    A single write appends all of them, so that simultaneous evaluations do not mix theirs.

    Args:
        folder: folder of the run.
        results: all results of an evaluation.
        once: leave out those that are there already, but for their date: a run that is killed at its end repeats it.
    """
    there = [replace(one, date="") for one in load(folder, [])] if once else []
    new = [one for one in results if _read(_line(one).encode())[0] not in there]
    if not new:
        return
    arrays: dict[str, np.ndarray] = {}
    for place, one in enumerate(new):
        if one.outcomes is not None:
            arrays[f"{place}"] = one.outcomes.values
            if one.outcomes.groups is not None:
                arrays[f"{place} groups"] = one.outcomes.groups
            if one.outcomes.classes is not None:
                arrays[f"{place} classes"] = one.outcomes.classes
    name = ""
    if arrays:
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)  # type: ignore[arg-type]  # no array is named allow_pickle
        name = f"{hashlib.sha256(content.getvalue()).hexdigest()[:16]}.npz"
        write_whole(folder / FOLDER / name, content.getvalue())
    lines = [_line(one, one.date, name, place) for place, one in enumerate(new)]
    before = b"".join(_lines(folder / FILE)[-1:])
    cut = "\n" if before and not before.endswith(b"\n") else ""  # the previous write was incomplete
    append_text(folder / FILE, cut + "".join(f"{line}\n" for line in lines))


def load(folder: Path, notes: list[str] | None = None, outcomes: bool = False) -> list[Result]:
    """Return all results of a run in the order of their evaluations; [] without any.

    Args:
        folder: folder of the run.
        notes: list to which a sentence on damaged lines is appended, which are left out; None: they are refused.
        outcomes: also read the outcomes of test images; those that are missing or damaged are None.

    Raises:
        PatchloomError: the file cannot be read, or a line is damaged.
    """
    found, damaged, opened = list[Result](), list[str](), dict[str, dict[str, np.ndarray]]()
    for number, line in enumerate(_lines(folder / FILE), 1):
        if not line.strip():
            continue
        try:
            result, values = _read(line)
        except ValueError as problem:
            damaged.append(f"line {number} of {folder / FILE} could not be read ({problem})")
            if notes is None:
                raise PatchloomError(f"{damaged[0]}: remove the line") from problem
            continue
        if outcomes:
            result = replace(result, outcomes=_outcomes(folder, values.get("outcomes"), opened, result.n))
        found.append(result)
    if damaged and notes is not None:
        more = f"; neither could {len(damaged) - 1:,} more" if len(damaged) > 1 else ""
        notes.append(f"{damaged[0]}{more}: left out")
    return found


def _lines(path: Path) -> list[bytes]:
    """Return the lines of a file with their ends; [] without one."""
    try:
        found = [*io.BytesIO(read_bytes(path, _MOST))] if os.path.lexists(path) else []
    except OSError as problem:
        raise PatchloomError(f"{path} could not be read ({problem.strerror}): move it away") from problem
    if len(found) > _LINES:
        raise PatchloomError(f"{path} has more than {_LINES:,} lines: move it away")
    return found


def _read(line: bytes) -> tuple[Result, dict[str, Any]]:
    """Return the result of a line, and its document; raise ValueError if it is damaged."""
    if len(line) > _LONGEST:
        raise ValueError("it is too long")
    try:
        values = parse_json(line)
    except RecursionError as problem:
        raise ValueError("it is too deep") from problem
    except json.JSONDecodeError as problem:
        raise ValueError("it is no JSON") from problem
    if not isinstance(values, dict):
        raise ValueError("it is no result")
    return Result.of(values), values


def evaluations(results: Iterable[Result]) -> list[list[Result]]:
    """Return results by evaluation: those of a protocol, a seed and a date, on the same data."""
    found: dict[tuple[str, ...], list[Result]] = {}
    for one in results:
        found.setdefault((one.protocol, one.data, one.date, str(one.seed)), []).append(one)
    return list(found.values())


def forget(folder: Path, which: str) -> int:
    """Remove evaluations by their date, or one by its number (1: the oldest); return the number of removed results.

    All other lines stay unchanged, damaged ones too. Outcomes of removed results alone are removed.
    """
    path, known = folder / FILE, load(folder, [])
    dates = list(dict.fromkeys(one.date for one in known))
    number = int(which) if which.isdecimal() and len(which) < _YEAR else 0
    if number:
        gone = dates[number - 1 : number]
    else:
        gone = [date for date in dates if date.startswith(which)] if which else []
    if not gone:
        there = f"it has {', '.join(f'{i} of {date}' for i, date in enumerate(dates, 1))}" if dates else "it has none"
        raise PatchloomError(f"{path} has no evaluation {which or 'without a date'}: {there}")
    lines = _lines(path)
    kept = b"".join(line for line in lines if _date(line) not in gone)
    write_whole(path, kept)
    for name in {name for line in lines if _date(line) in gone for name in _NAME.findall(line) if name not in kept}:
        with suppress(OSError):
            (folder / FOLDER / name.decode()).unlink()
    return sum(one.date in gone for one in known)


def _date(line: bytes) -> str | None:
    try:
        return _read(line)[0].date
    except ValueError:
        return None


def _line(result: Result, date: str = "", name: str = "", place: int = 0) -> str:
    """Return the document of a result, which names the file of its outcomes and its place there."""
    kept = result.outcomes
    where = {"file": name, "place": place, "pseudo": kept.pseudo} if name and kept is not None else None
    document = result.plain() | {"date": date, "outcomes": where}
    text = json.dumps(document, allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # names of files may have bytes that are no letters


def _outcomes(folder: Path, where: Any, opened: dict[str, dict[str, np.ndarray]], n: int) -> Outcomes | None:
    """Return the outcomes that a line names; None if their file is missing, damaged, or of another kind."""
    if not isinstance(where, dict) or not _NAME.fullmatch(str(where.get("file")).encode()):
        return None
    name, place, pseudo = where["file"], str(where.get("place")), where.get("pseudo") is True
    if name not in opened:
        opened[name] = {}
        size = sum(array.nbytes for arrays in opened.values() for array in arrays.values())
        with suppress(Exception):  # such as of no archive, pickles, passwords or absurd sizes: errors of a dozen kinds
            with open_regular(folder / FOLDER / name) as file, zipfile.ZipFile(file) as members:
                if sum(one.file_size for one in members.infolist()) <= _MOST - size:
                    opened[name] = {
                        member.removesuffix(".npy"): np.load(io.BytesIO(members.read(member)), allow_pickle=False)
                        for member in members.namelist()
                    }
    values, groups, classes = (opened[name].get(f"{place}{what}") for what in ("", " groups", " classes"))
    if values is None or values.ndim != 1 or values.dtype.kind not in "bfiu" or (len(values) != n and not pseudo):
        return None
    if not np.isfinite(values).all():
        return None
    for beside in (groups, classes):
        if beside is not None and (beside.shape != values.shape or beside.dtype.kind not in "iu"):
            return None
    return Outcomes(values, pseudo, groups, classes)
