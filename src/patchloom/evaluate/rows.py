"""Results as rows of a results.csv."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from pathlib import Path

from patchloom.errors import PatchloomError
from patchloom.evaluate.report import Report

COLUMNS = (
    *("date", "protocol", "encoder", "pooling", "settings", "data", "data_fingerprint", "seed"),
    *("value", "low", "high", "n_test", "quoted"),
)


def check_rows(path: Path) -> bytes:
    """Content of a CSV of `COLUMNS`, empty if there is none; to be checked before a long evaluation.

    Raises:
        PatchloomError: the file has other columns, or cannot be read.
    """
    try:
        before = path.read_bytes() if path.exists() else b""
    except OSError as problem:
        raise PatchloomError(f"{path} could not be read ({problem.strerror}): move it out of the way") from problem
    if before and before.splitlines()[0].decode(errors="replace") != ",".join(COLUMNS):
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
        there = set(map(_undated, before.decode("utf-8", "replace").splitlines())) if once else set()
        if not before:
            writer.writerow(COLUMNS)
        elif not before.endswith(b"\n"):
            text.write("\n")  # the previous write was cut off
        for row in report.rows:
            about = (report.date, row.protocol, row.encoder, row.pooling, json.dumps(row.settings, sort_keys=True))
            source = (report.data, report.fingerprint, report.seed)
            cells = (*about, *source, row.value, row.low, row.high, report.n_test, row in report.quoted)
            if tuple(map(str, cells[1:])) not in there:
                writer.writerow(cells)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, text.getvalue().encode())
        finally:
            os.close(handle)
    except OSError as problem:
        raise PatchloomError(
            f"{path} could not be written ({problem.strerror}): free space or choose another run"
        ) from problem


def _undated(line: str) -> tuple[str, ...]:
    """The cells of a line without the date; () for a damaged line, which is kept."""
    with contextlib.suppress(csv.Error):
        return tuple(next(csv.reader([line]), [])[1:])
    return ()
