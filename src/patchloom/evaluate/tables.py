"""The table of a report, in several forms, of which one fits the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from patchloom.shown import Grid

if TYPE_CHECKING:
    from patchloom.evaluate.report import Row


def fitting(forms: Sequence[Grid], width: int) -> Grid:
    """The first of some forms of a table that fits into ``width`` characters; else the last one, by names.

    Then each name stands on a line of its own, above its rows.
    """
    for form in forms:
        if form.least() <= width:
            return form
    return _names_above(forms[-1])


def across_settings(
    rows: Sequence[Row], across: str, *, down: bool, short: bool, symbols: Mapping[str, str]
) -> list[Grid]:
    """The table with a column per value of a setting, intervals beside the values, and below them.

    Args:
        rows: of the report.
        across: the setting.
        down: the values are the lines instead, and the encoders the columns.
        short: without intervals and units.
        symbols: names of settings in the table, where they differ.
    """
    if down:
        return [_down(rows, across, gap) for gap in (" ", "\n")]
    return [_across(rows, across, short, symbols, gap) for gap in (" ", "\n")]


def by_row(rows: Sequence[Row]) -> Grid:
    """A line per row, and a column for every setting that differs between rows."""
    names, first = _varying(rows), _names(rows)
    lines = [(row.encoder, row.pooling)[: len(first)] + tuple(_setting(row, name) for name in names) for row in rows]
    texts = tuple((*line, row.text()) for line, row in zip(lines, rows, strict=True))
    heading = *first, *(name.replace("_", " ") for name in names), "value, 95 % interval"
    return Grid(heading, texts, names=frozenset({0}), ends=_ends([row.encoder for row in rows]))


def _names_above(table: Grid) -> Grid:
    """The same with the first column on lines of its own."""
    rows: list[tuple[str, ...]] = []
    ends, before = set(), None
    for number, (name, *others) in enumerate(table.rows):
        if name != before:
            rows.append((name,))
            before = name
        rows.append((f"  {others[0]}", *others[1:]))
        if number in table.ends:
            ends.add(len(rows) - 1)
    return Grid(table.heading[1:], tuple(rows), ends=frozenset(ends))


def _across(rows: Sequence[Row], across: str, short: bool, symbols: Mapping[str, str], gap: str) -> Grid:
    """A line per encoder, pooling and other settings, and a column per value of ``across``."""
    columns = list(dict.fromkeys(row.settings[across] for row in rows if across in row.settings))
    names = [name for name in _varying(rows) if name != across]
    called = {name: symbols.get(name, name.replace("_", " ")) for name in (across, *names)}
    headings = (value if isinstance(value, str) else f"{called[across]} = {_short(value)}" for value in columns)
    first = _names(rows)
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        line = (row.encoder, row.pooling)[: len(first)] + tuple(_setting(row, name) for name in names)
        # a value that does not depend on the setting is in every column
        under = [row.settings[across]] if across in row.settings else columns
        shown = row.number().removesuffix(row.unit).strip() if short else row.text().replace(" [", f"{gap}[")
        lines.setdefault(line, {}).update(dict.fromkeys(under, shown))
    cells = tuple((*line, *(lines[line].get(value, "") for value in columns)) for line in lines)
    heading = *first, *(called[name] for name in names), *headings
    return Grid(heading, cells, names=frozenset({0}), ends=_ends([line[0] for line in lines]))


def _down(rows: Sequence[Row], across: str, gap: str) -> Grid:
    """A line per value of ``across`` and a column per encoder, then a line per row without ``across``."""
    encoders = list(dict.fromkeys(row.encoder for row in rows if across in row.settings))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        if across in row.settings:
            cells.setdefault(_setting(row, across), {})[row.encoder] = row.text().replace(" [", f"{gap}[")
    lines = [(value, *(found.get(encoder, "") for encoder in encoders)) for value, found in cells.items()]
    last = frozenset({len(lines) - 1})
    for row in rows:
        if across not in row.settings:  # it is in every column
            lines.append((row.encoder, *[row.text().replace(" [", f"{gap}[")] * len(encoders)))
    return Grid((across, *encoders), tuple(lines), names=frozenset({0}), ends=last)


def _ends(names: Sequence[str]) -> frozenset[int]:
    """Numbers of the lines after which another name begins."""
    return frozenset(i for i, pair in enumerate(zip(names, names[1:], strict=False)) if pair[0] != pair[1])


def _varying(rows: Sequence[Row]) -> list[str]:
    """Names of settings that differ between the rows that have them."""
    values = {
        name: [row.settings[name] for row in rows if name in row.settings] for row in rows for name in row.settings
    }
    return [name for name, found in values.items() if any(value != found[0] for value in found)]


def _names(rows: Sequence[Row]) -> tuple[str, ...]:
    return ("encoder", "pooling") if any(row.pooling != "-" for row in rows) else ("encoder",)


def _setting(row: Row, name: str) -> str:
    return _short(row.settings[name]) if name in row.settings else ""


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
