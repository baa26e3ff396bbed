"""Results of a protocol beside its controls, their confidence intervals, and their table on the screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_Z = 1.959963984540054  # standard normal quantile of a 95 % interval


def wilson(share: float, n: int, z: float = _Z) -> tuple[float, float]:
    """Wilson's score interval for a ``share`` in [0, 1] of ``n`` trials (Wilson 1927); ``z`` = 1.96 gives 95 %.

    It covers the variation over test images, not over seeds.

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
    """One result.

    Attributes:
        encoder: its name, or that of a control.
        pooling: of the features, "-" if that has no meaning.
        protocol: its name.
        settings: of the protocol.
        value: a share in [0, 1] if the unit is %.
        low, high: the 95 % interval of the value; equal to it if the value is exact.
        unit: of the value.
    """

    encoder: str
    pooling: str
    protocol: str
    settings: dict[str, Any]
    value: float
    low: float
    high: float
    unit: str = "%"

    @staticmethod
    def of(encoder: str, pooling: str, protocol: str, settings: dict[str, Any], value: float, n: int) -> Row:
        """A row whose interval is Wilson's for ``n`` test images."""
        return Row(encoder, pooling, protocol, settings, value, *wilson(value, n))

    @staticmethod
    def of_means(
        encoder: str, protocol: str, settings: dict[str, Any], values: Sequence[float], unit: str = "%"
    ) -> Row:
        """A mean over images with its normal interval; ``values`` [n], one per image, since patches are dependent."""
        n = len(values)
        mean = sum(values) / n
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1)) if n > 1 else math.inf
        reach, top = _Z * spread / math.sqrt(n), 1.0 if unit == "%" else math.inf
        return Row(encoder, "-", protocol, settings, mean, max(0.0, mean - reach), min(top, mean + reach), unit)

    @staticmethod
    def exact(encoder: str, protocol: str, settings: dict[str, Any], value: float, unit: str = "%") -> Row:
        """A computed value, without an interval."""
        return Row(encoder, "-", protocol, settings, value, value, value, unit)

    def number(self, value: float | None = None) -> str:
        """Formatted as "61.2 %"; of another value with the same unit, if one is given."""
        value = self.value if value is None else value
        return f"{100 * value:.1f} %" if self.unit == "%" else f"{value:.2f} {self.unit}"

    def text(self) -> str:
        """Formatted with its interval, as "61.2 % [59.0, 63.3]"."""
        if self.low == self.high:
            return self.number()
        low, high = (self.number(bound).partition(" ")[0] for bound in (self.low, self.high))
        return f"{self.number()} [{low}, {high}]"


@dataclass(frozen=True)
class Drawing:
    """A picture that `protocols.evaluate` is to draw.

    Attributes:
        function: path of the function that draws it: this package imports none.
        out: the file.
        content: its other arguments.
    """

    function: str
    out: Path
    content: dict[str, Any]


def lost_images(unreadable: Sequence[str], what: str = "images") -> list[str]:
    """A list with the sentence on ``unreadable`` images; empty if there are none."""
    if not unreadable:
        return []
    return [f"{len(unreadable):,} {what} could not be read and were left out, such as {unreadable[0]}."]


@dataclass(frozen=True)
class Report:
    """All rows of one evaluation and what they have in common.

    Attributes:
        rows: the encoder's, then its controls'.
        protocol: sentences on what was done.
        headline: one sentence with the numbers to quote.
        quoted: their rows: the encoder's, then its controls'.
        data, fingerprint: name of the test images, and 16 hex digits of their content.
        seed: of every split and of the untrained encoder.
        n_test: test images that could be read.
        date: ISO 8601, UTC.
        others: reports with other seeds.
        across: the setting whose values are the columns of the table.
        down: its values are the lines instead, and the encoders the columns.
        symbols: names of settings in the table, where they differ.
        short: leave intervals and units out of a large table.
        drawings: pictures to be drawn.
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
    across: str = "k"
    down: bool = False
    symbols: Mapping[str, str] = field(default_factory=dict)
    short: bool = False
    drawings: tuple[Drawing, ...] = ()

    def print(self, console: Console) -> None:
        """Print the protocol, the table and the headline."""
        wide = any(self.across in row.settings for row in self.rows)
        across = _down if self.down else partial(_across, short=self.short, symbols=self.symbols)
        table = across(self.rows, self.across) if wide else _by_row(self.rows)
        # names and paths may contain brackets, which rich would parse as markup
        console.print(self.protocol, markup=False, highlight=False)
        console.print(table, markup=False, highlight=False)
        console.print(self.headline, markup=False, highlight=False)
        if self.others:
            console.print(self.spread(), markup=False, highlight=False)
        for drawing in self.drawings:
            console.print(f"Picture: {drawing.out}", markup=False, highlight=False, soft_wrap=True)

    def spread(self) -> str:
        """A sentence with mean and range over the seeds of the quoted numbers."""
        reports = (*self.others, self)
        # an encoder may be quoted several times, and the quoted setting may differ between seeds
        where = [
            dict.fromkeys(str(row.settings[self.across]) for row in same if self.across in row.settings)
            for same in zip(*(report.quoted for report in reports), strict=True)
        ]
        several = len({name for names in where for name in names}) > 1
        said = []
        for number, row in enumerate(self.quoted):
            values = [report.quoted[number].value for report in reports]
            mean, low, high = map(row.number, (sum(values) / len(values), min(values), max(values)))
            name = f"{row.encoder}, {' or '.join(where[number])}" if several and where[number] else row.encoder
            said.append(f"{name} {mean} ({low} to {high})")
        return f"Over {len(reports)} seeds, mean and range: {'; '.join(said)}."


def _across(rows: list[Row], across: str, short: bool, symbols: Mapping[str, str]) -> Table:
    """A table with a line per encoder, pooling and other settings, and a column per value of ``across``."""
    columns = list(dict.fromkeys(row.settings[across] for row in rows if across in row.settings))
    names = [name for name in _varying(rows) if name != across]
    called = {name: symbols.get(name, name.replace("_", " ")) for name in (across, *names)}
    headings = (value if isinstance(value, str) else f"{called[across]} = {_short(value)}" for value in columns)
    first = _names(rows)
    table = Table(*first, *(called[name] for name in names), *headings)
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        line = (row.encoder, row.pooling)[: len(first)] + tuple(_setting(row, name) for name in names)
        # a value that does not depend on the setting is in every column
        under = [row.settings[across]] if across in row.settings else columns
        shown = row.number().removesuffix(row.unit).strip() if short else row.text().replace(" [", "\n[")
        lines.setdefault(line, {}).update(dict.fromkeys(under, shown))
    for line, after in zip(lines, [*list(lines)[1:], None], strict=True):
        last = after is None or after[0] != line[0]
        table.add_row(*line, *(lines[line].get(value, "") for value in columns), end_section=last)
    return table


def _down(rows: list[Row], across: str) -> Table:
    """A table with a line per value of ``across`` and a column per encoder, then a line per row without ``across``."""
    encoders = list(dict.fromkeys(row.encoder for row in rows if across in row.settings))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        if across in row.settings:
            cells.setdefault(_setting(row, across), {})[row.encoder] = row.text()
    table = Table(across, *encoders)
    for value, found in cells.items():
        table.add_row(value, *(found.get(encoder, "") for encoder in encoders))
    table.add_section()
    for row in rows:
        if across not in row.settings:  # it is in every column
            table.add_row(row.encoder, *[row.text()] * len(encoders))
    return table


def _by_row(rows: list[Row]) -> Table:
    """A table with a line per row, and a column for every setting that differs between rows."""
    names, first = _varying(rows), _names(rows)
    table = Table(*first, *(name.replace("_", " ") for name in names), "value, 95 % interval")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        line = (row.encoder, row.pooling)[: len(first)] + tuple(_setting(row, name) for name in names)
        table.add_row(*line, row.text(), end_section=after is None or after.encoder != row.encoder)
    return table


def _varying(rows: list[Row]) -> list[str]:
    """Names of settings that differ between the rows that have settings."""
    values = {name: [row.settings.get(name) for row in rows if row.settings] for row in rows for name in row.settings}
    return [name for name, found in values.items() if any(value != found[0] for value in found)]


def _names(rows: list[Row]) -> tuple[str, ...]:
    return ("encoder", "pooling") if any(row.pooling != "-" for row in rows) else ("encoder",)


def _setting(row: Row, name: str) -> str:
    return _short(row.settings[name]) if name in row.settings else ""


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
