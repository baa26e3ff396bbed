"""Results as rows of a results.csv."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from pathlib import Path
from typing import Any

from patchloom.errors import PatchloomError
from patchloom.evaluate.report import Report
from patchloom.files import write_whole
from patchloom.verdict import Difference

_FIRST = (
    *("date", "protocol", "encoder", "pooling", "settings", "data", "data_fingerprint", "seed"),
    *("value", "low", "high", "n_test", "quoted"),
)
_YEAR = 4  # digits: what is as long is the beginning of a date, and no number
COLUMNS = (*_FIRST, "against")  # files of before 0.1 end with quoted


def differences_of(cell: str | None) -> tuple[Difference, ...]:
    """The differences in a cell of the column ``against``; () for an empty one, or a file without that column.

    Raises:
        ValueError: the cell is damaged.
    """
    found = json.loads(cell) if cell else []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError("no list of differences")
    return tuple(map(Difference.of, found))


def check_rows(path: Path) -> bytes:
    """Content of a CSV of `COLUMNS`, empty if there is none; to be checked before a long evaluation.

    The rows of a file without the column ``against`` get an empty one.

    Raises:
        PatchloomError: the file has other columns, or cannot be read.
    """
    try:
        before = path.read_bytes() if path.exists() else b""
    except OSError as problem:
        raise PatchloomError(f"{path} could not be read ({problem.strerror}): move it out of the way") from problem
    heading = before.split(b"\n", 1)[0].rstrip(b"\r").decode(errors="replace")
    if heading == ",".join(_FIRST):
        return b"".join(map(_widened, before.splitlines(keepends=True)))
    if before and heading != ",".join(COLUMNS):
        raise PatchloomError(f"{path} has other columns than patchloom writes: move it out of the way")
    return before


def append_rows(path: Path, report: Report, once: bool = False) -> None:
    """Append a report's rows to a CSV of `COLUMNS`; a new file begins with the header.

    The rows are appended in a single write, so that those of two simultaneous evaluations do not mix.

    Args:
        path: of the CSV.
        report: its rows are appended.
        once: leave out rows that the file has already, of any date.

    Raises:
        PatchloomError: the file has other columns, or cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = check_rows(path)
        if before and before != path.read_bytes():
            write_whole(path, before)  # it had the columns of before
        there = set(map(_undated, before.decode("utf-8", "replace").splitlines())) if once else set()
        if not before:
            writer.writerow(COLUMNS)
        elif not before.endswith(b"\n"):
            text.write("\n")  # the previous write was cut off
        against = _against(report)
        for row in report.rows:
            about = (report.date, row.protocol, row.encoder, row.pooling, json.dumps(row.settings, sort_keys=True))
            source = (report.data, report.fingerprint, report.seed)
            cells = (*about, *source, row.value, row.low, row.high, report.n_test, row in report.quoted)
            if tuple(map(str, cells[1:])) not in there:
                writer.writerow((*cells, against.get(id(row), "")))
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, text.getvalue().encode())
        finally:
            os.close(handle)
    except OSError as problem:
        raise PatchloomError(
            f"{path} could not be written ({problem.strerror}): free space or choose another run"
        ) from problem


def forget_rows(path: Path, which: str) -> int:
    """Take the rows of evaluations out of a CSV of `COLUMNS`; all other rows stay as they are.

    Args:
        path: of the CSV.
        which: the date of evaluations as it stands there, or the first letters of one; or the number of an evaluation,
            1 for the first in the file.

    Returns:
        How many rows were taken out.

    Raises:
        PatchloomError: the file cannot be read or written, or no evaluation is that.
    """
    text = check_rows(path).decode("utf-8", "surrogateescape")
    heading, *rows = [*csv.reader(io.StringIO(text, newline=""))] or [[]]
    dates = list(dict.fromkeys(row[0] for row in rows if row))
    number = int(which) if which.isdecimal() and len(which) < _YEAR else 0
    if number:
        gone = dates[number - 1 : number]
    else:
        gone = [date for date in dates if date.startswith(which)] if which else []
    if not gone:
        there = f"it has {', '.join(f'{i} of {date}' for i, date in enumerate(dates, 1))}" if dates else "it has none"
        raise PatchloomError(f"{path} has no evaluation {which or 'without a date'}: {there}")
    content = io.StringIO()
    kept = [row for row in rows if row and row[0] not in gone]
    csv.writer(content, lineterminator="\n").writerows([heading, *kept])
    write_whole(path, content.getvalue())
    return sum(map(bool, rows)) - len(kept)


def _against(report: Report) -> dict[int, str]:
    """The cells of the column ``against``, by the id of their row."""
    cells: dict[int, list[dict[str, Any]]] = {}
    for (i, _), one in zip(report.pairs, report.against, strict=True):
        for row in report.rows:
            if row == report.quoted[i]:
                cells.setdefault(id(row), []).append(one.plain())
                break
    return {row: json.dumps(found) for row, found in cells.items()}


def _widened(line: bytes) -> bytes:
    """A line of a file without the column ``against`` with that column; a damaged one as it is."""
    text = line.rstrip(b"\r\n")
    cells = _cells(text.decode("utf-8", "replace"))
    if len(cells) != len(_FIRST):
        return line
    return text + (b",against" if tuple(cells) == _FIRST else b",") + line[len(text) :]


def _undated(line: str) -> tuple[str, ...]:
    """The cells of a line without the date and the differences; () for a damaged line, which is kept."""
    return tuple(_cells(line)[1 : len(_FIRST)])


def _cells(line: str) -> list[str]:
    with contextlib.suppress(csv.Error):
        return next(csv.reader([line]), [])
    return []
