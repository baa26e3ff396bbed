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
from dataclasses import replace
from pathlib import Path

import numpy as np

from patchloom.errors import PatchloomError
from patchloom.results.result import Outcomes, Result
from patchloom.system.documents import parse_json
from patchloom.system.files import append as append_text
from patchloom.system.files import open_regular, read_bytes, write_error, write_whole

FILE, FOLDER = "results.jsonl", "outcomes"
_MOST = 2**28  # bytes of either file
_NAME = re.compile(r"[0-9a-f]{16}\.npz")
_YEAR = 4  # digits: a text of this length begins a date, and is not the number of an evaluation


def check(folder: Path) -> list[Result]:
    """Return the results so far, and refuse a file that cannot be read or written; call it before a long evaluation."""
    path = folder / FILE
    found = load(folder)
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
    path = folder / FILE
    there = {_line(replace(one, date="")) for one in load(folder, [])} if once else set[str]()
    new = [one for one in results if _line(replace(one, date="")) not in there]
    if not new:
        return
    name = _write_outcomes(folder, new)
    lines = [_line(one, name, place) for place, one in enumerate(new)]
    try:
        before = read_bytes(path, _MOST) if os.path.lexists(path) else b""
    except OSError as problem:
        raise write_error(path, problem) from problem
    cut = "\n" if before and not before.endswith(b"\n") else ""  # the previous write was incomplete
    append_text(path, cut + "".join(f"{line}\n" for line in lines))


def load(folder: Path, notes: list[str] | None = None, outcomes: bool = False) -> list[Result]:
    """Return all results of a run in the order of their evaluations; [] without any.

    Args:
        folder: folder of the run.
        notes: list to which a sentence on every damaged line is appended, which is left out; None: it is refused.
        outcomes: also read the outcomes of test images, as far as they are there.

    Raises:
        PatchloomError: the file cannot be read.
    """
    path, found = folder / FILE, list[Result]()
    if not os.path.lexists(path):
        return []
    try:
        lines = read_bytes(path, _MOST).splitlines()
    except OSError as problem:
        raise PatchloomError(f"{path} could not be read ({problem.strerror}): move it away") from problem
    opened: dict[str, dict[str, np.ndarray]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = parse_json(line)
            result = Result.of(values)
            if outcomes and values.get("outcomes") is not None:
                result = replace(result, outcomes=_outcomes(folder, values["outcomes"], opened, result.n))
        except (ValueError, RecursionError) as problem:
            said = f"line {number} of {path} could not be read ({problem})"
            if notes is None:
                raise PatchloomError(f"{said}: remove the line") from problem
            notes.append(f"{said}: its result is left out")
            continue
        found.append(result)
    return found


def evaluations(results: Iterable[Result]) -> list[list[Result]]:
    """Return results by evaluation: those of a protocol, a seed and a date, on the same data."""
    found: dict[tuple[str, ...], list[Result]] = {}
    for one in results:
        found.setdefault((one.protocol, one.data, one.date, str(one.seed)), []).append(one)
    return list(found.values())


def forget(folder: Path, which: str) -> int:
    """Remove evaluations by their date, or one by its number (1: the oldest); return the number of removed results.

    All other lines stay as they are, damaged ones too.
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
    kept = [line for line in read_bytes(path, _MOST).splitlines(keepends=True) if _date(line) not in gone]
    write_whole(path, b"".join(kept))
    return sum(one.date in gone for one in known)


def _date(line: bytes) -> str:
    try:
        return Result.of(parse_json(line)).date
    except (ValueError, RecursionError):
        return ""


def _line(result: Result, name: str = "", place: int = 0) -> str:
    """Return the document of a result, which names the file of its outcomes and its place there."""
    kept = result.outcomes
    where = {"file": name, "place": place, "pseudo": kept.pseudo} if name and kept is not None else None
    return json.dumps(result.plain() | {"outcomes": where}, sort_keys=True, allow_nan=False)


# Outcomes: arrays by the place of their result, with those of equal groups once.


def _write_outcomes(folder: Path, results: Sequence[Result]) -> str:
    """Write the outcomes of results, and return the name of the file; "" without any."""
    arrays: dict[str, np.ndarray] = {}
    for place, one in enumerate(results):
        if one.outcomes is not None:
            arrays[f"{place}"] = one.outcomes.values
            if one.outcomes.groups is not None:
                arrays[f"{place} groups"] = one.outcomes.groups
    if not arrays:
        return ""
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    name = f"{hashlib.sha256(content.getvalue()).hexdigest()[:16]}.npz"
    write_whole(folder / FOLDER / name, content.getvalue())
    return name


def _outcomes(folder: Path, where: object, opened: dict[str, dict[str, np.ndarray]], n: int) -> Outcomes | None:
    """Return the outcomes that a line names; None if their file is missing or damaged."""
    if not isinstance(where, dict) or not _NAME.fullmatch(str(where.get("file"))):
        raise ValueError("its outcomes are not a file of patchloom's")
    name, place, pseudo = where["file"], str(where.get("place")), where.get("pseudo") is True
    if name not in opened:
        try:
            with open_regular(folder / FOLDER / name) as file, np.load(file, allow_pickle=False) as arrays:
                if sum(one.file_size for one in arrays.zip.infolist()) > _MOST:
                    raise ValueError("its outcomes are too large")
                opened[name] = {key: arrays[key] for key in arrays.files}
        except (OSError, ValueError, zipfile.BadZipFile, KeyError, EOFError):
            opened[name] = {}
    values, groups = opened[name].get(place), opened[name].get(f"{place} groups")
    if values is None or values.ndim != 1 or values.dtype.kind not in "bfiu" or (len(values) != n and not pseudo):
        return None
    if groups is not None and groups.shape != values.shape:
        return None
    return Outcomes(values, pseudo, groups)
