"""What a protocol found, beside its controls, and how it is shown on the screen."""

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

_Z = 1.959963984540054  # of a 95 % interval


def wilson(share: float, n: int, z: float = _Z) -> tuple[float, float]:
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
    """One number. ``value``, ``low`` and ``high``, its 95 % interval, are shares in [0, 1] if the ``unit`` is %.

    An exact number is its own interval.
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
        """The mean of one value an image, with the normal interval: what each was averaged from is not independent."""
        n = len(values)
        mean = sum(values) / n
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1)) if n > 1 else math.inf
        reach, top = _Z * spread / math.sqrt(n), 1.0 if unit == "%" else math.inf
        return Row(encoder, "-", protocol, settings, mean, max(0.0, mean - reach), min(top, mean + reach), unit)

    @staticmethod
    def exact(encoder: str, protocol: str, settings: dict[str, Any], value: float, unit: str = "%") -> Row:
        """A row that was computed, not measured."""
        return Row(encoder, "-", protocol, settings, value, value, value, unit)

    def number(self, value: float | None = None) -> str:
        """Such as "61.2 %"; of another value of its kind, if one is given."""
        value = self.value if value is None else value
        return f"{100 * value:.1f} %" if self.unit == "%" else f"{value:.2f} {self.unit}"

    def text(self) -> str:
        """Such as "61.2 % [59.0, 63.3]"."""
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
    """The sentence on images that could not be read, whose names are ``unreadable``; none if there are none."""
    if not unreadable:
        return []
    return [f"{len(unreadable):,} {what} could not be read and were left out, such as {unreadable[0]}."]


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
        across: the setting whose values are columns of the table; by default k, if there is one.
        down: its values are lines instead, and the encoders columns.
        symbols: what settings are called in the table, if not by their names.
        short: the table has neither intervals nor units, for one that would be too large with them.
        drawings: pictures of what was found.
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
        # names and paths may hold brackets, which rich would take for markup
        console.print(self.protocol, markup=False, highlight=False)
        console.print(table, markup=False, highlight=False)
        console.print(self.headline, markup=False, highlight=False)
        if self.others:
            console.print(self.spread(), markup=False, highlight=False)
        for drawing in self.drawings:
            console.print(f"Picture: {drawing.out}", markup=False, highlight=False, soft_wrap=True)

    def spread(self) -> str:
        """One sentence: mean and range over the seeds of the numbers to quote."""
        reports = (*self.others, self)
        # the same encoder may be quoted several times, and what is quoted of it may be another with every seed
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
    """A line an encoder, pooling and choice of the other settings, a column a value of the setting ``across``."""
    columns = list(dict.fromkeys(row.settings[across] for row in rows if across in row.settings))
    names = [name for name in _varying(rows) if name != across]
    called = {name: symbols.get(name, name.replace("_", " ")) for name in (across, *names)}
    headings = (value if isinstance(value, str) else f"{called[across]} = {_short(value)}" for value in columns)
    first = _names(rows)
    table = Table(*first, *(called[name] for name in names), *headings)
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        line = (row.encoder, row.pooling)[: len(first)] + tuple(_setting(row, name) for name in names)
        # what does not depend on the setting stands in every column
        under = [row.settings[across]] if across in row.settings else columns
        shown = row.number().removesuffix(row.unit).strip() if short else row.text().replace(" [", "\n[")
        lines.setdefault(line, {}).update(dict.fromkeys(under, shown))
    for line, after in zip(lines, [*list(lines)[1:], None], strict=True):
        last = after is None or after[0] != line[0]
        table.add_row(*line, *(lines[line].get(value, "") for value in columns), end_section=last)
    return table


def _down(rows: list[Row], across: str) -> Table:
    """A line a value of the setting ``across``, a column an encoder; then a line for each that lacks the setting."""
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
        if across not in row.settings:  # it stands in every column
            table.add_row(row.encoder, *[row.text()] * len(encoders))
    return table


def _by_row(rows: list[Row]) -> Table:
    """A line a row, with a column for every setting that is not the same everywhere."""
    names, first = _varying(rows), _names(rows)
    table = Table(*first, *(name.replace("_", " ") for name in names), "value, 95 % interval")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        line = (row.encoder, row.pooling)[: len(first)] + tuple(_setting(row, name) for name in names)
        table.add_row(*line, row.text(), end_section=after is None or after.encoder != row.encoder)
    return table


def _varying(rows: list[Row]) -> list[str]:
    """Settings that are not the same in all rows that have any."""
    values = {name: [row.settings.get(name) for row in rows if row.settings] for row in rows for name in row.settings}
    return [name for name, found in values.items() if any(value != found[0] for value in found)]


def _names(rows: list[Row]) -> tuple[str, ...]:
    return ("encoder", "pooling") if any(row.pooling != "-" for row in rows) else ("encoder",)


def _setting(row: Row, name: str) -> str:
    return _short(row.settings[name]) if name in row.settings else ""


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
