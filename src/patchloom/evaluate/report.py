"""What a protocol found, beside its controls: on the screen, and as rows of a results.csv."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from patchloom.errors import PatchloomError

COLUMNS = (
    *("date", "protocol", "encoder", "pooling", "settings", "data", "data_fingerprint", "seed"),
    *("value", "low", "high", "n_test", "quoted"),
)


def wilson(share: float, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's interval for a ``share`` in [0, 1] of ``n`` trials; 95 % by default (Wilson 1927).

    It tells how much the share would vary over test images, not over seeds.

    Raises:
        ValueError: no trials.
    """
    if n < 1:
        raise ValueError("a share of no trials has no interval")
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return max(0.0, middle - reach), min(1.0, middle + reach)


@dataclass(frozen=True)
class Row:
    """One number. ``value``, ``low`` and ``high``, its 95 % interval, are shares in [0, 1]."""

    encoder: str
    pooling: str
    protocol: str
    settings: dict[str, Any]
    value: float
    low: float
    high: float

    @staticmethod
    def of(encoder: str, pooling: str, protocol: str, settings: dict[str, Any], value: float, n: int) -> Row:
        """A row whose interval is Wilson's for ``n`` test images."""
        return Row(encoder, pooling, protocol, settings, value, *wilson(value, n))

    def text(self) -> str:
        """Such as "61.2 % [59.0, 63.3]"."""
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class Report:
    """All rows of one evaluation and what they have in common.

    Attributes:
        rows: the encoder's, then its controls'.
        protocol: sentences that say what was done.
        headline: one sentence with the numbers to quote.
        quoted: these numbers: the encoder's, the untrained one's, that of raw pixels.
        data, fingerprint: the name of the test images and 16 hex digits of their content.
        seed: of every split and of the untrained encoder.
        n_test: test images that could be read.
        date: ISO 8601, UTC.
        others: reports of the same with other seeds.
    """

    rows: list[Row]
    protocol: str
    headline: str
    quoted: tuple[Row, ...]
    data: str
    fingerprint: str
    seed: int
    n_test: int
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    others: tuple[Report, ...] = ()

    def print(self, console: Console) -> None:
        """Print the protocol, the table and the headline."""
        table = _by_k(self.rows) if any("k" in row.settings for row in self.rows) else _by_row(self.rows)
        # names and paths may hold brackets, which rich would take for markup
        console.print(self.protocol, markup=False, highlight=False)
        console.print(table, markup=False, highlight=False)
        console.print(self.headline, markup=False, highlight=False)
        if self.others:
            console.print(self.spread(), markup=False, highlight=False)

    def spread(self) -> str:
        """One sentence: mean and range over the seeds of the numbers to quote."""
        said = []
        for number, row in enumerate(self.quoted):
            values = [report.quoted[number].value for report in (*self.others, self)]
            mean = sum(values) / len(values)
            said.append(f"{row.encoder} {mean:.1%} ({min(values):.1%} to {max(values):.1%})")
        return f"Over {len(self.others) + 1} seeds, mean and range: {'; '.join(said)}."


def append_rows(path: Path, report: Report) -> None:
    """Append a report's rows to a CSV of `COLUMNS`; a new file begins with the header.

    The rows go out in one write to the end of the file, so that two evaluations at once do not mix.

    Raises:
        PatchloomError: the file has other columns, or cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_bytes() if path.exists() else b""
        if not before:
            writer.writerow(COLUMNS)
        elif before.splitlines()[0].decode(errors="replace") != ",".join(COLUMNS):
            raise PatchloomError(f"{path} has other columns than patchloom writes: move it out of the way")
        elif not before.endswith(b"\n"):
            text.write("\n")  # the write before this one was cut off
        for row in report.rows:
            about = (report.date, row.protocol, row.encoder, row.pooling, json.dumps(row.settings, sort_keys=True))
            source = (report.data, report.fingerprint, report.seed)
            writer.writerow((*about, *source, row.value, row.low, row.high, report.n_test, row in report.quoted))
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, text.getvalue().encode())
        finally:
            os.close(handle)
    except OSError as problem:
        raise PatchloomError(
            f"{path} could not be written ({problem.strerror}): free space or choose another run"
        ) from problem


def _by_k(rows: list[Row]) -> Table:
    """A line an encoder and pooling, a column a number of neighbours."""
    ks = sorted({row.settings["k"] for row in rows if "k" in row.settings})
    table = Table("encoder", "pooling", *(f"k = {k}, %" for k in ks))
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        found = {row.settings["k"]: row.text()} if "k" in row.settings else dict.fromkeys(ks, row.text())
        lines.setdefault((row.encoder, row.pooling), {}).update(found)
    for (encoder, pooling), cells in lines.items():
        last = [pooled for name, pooled in lines if name == encoder][-1] == pooling
        table.add_row(encoder, pooling, *(cells.get(k, "").replace(" % ", "\n") for k in ks), end_section=last)
    return table


def _by_row(rows: list[Row]) -> Table:
    """A line a row, with a column for every setting that is not the same everywhere."""
    values = {name: [row.settings.get(name) for row in rows if row.settings] for row in rows for name in row.settings}
    varying = [name for name, found in values.items() if any(value != found[0] for value in found)]
    table = Table("encoder", "pooling", *(name.replace("_", " ") for name in varying), "accuracy, 95 % interval")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        settings = [_short(row.settings[name]) if name in row.settings else "" for name in varying]
        table.add_row(
            row.encoder, row.pooling, *settings, row.text(), end_section=after is None or after.encoder != row.encoder
        )
    return table


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
