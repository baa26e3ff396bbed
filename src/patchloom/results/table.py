"""Results as text: tables that fit the terminal, and settings in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from patchloom.display import Lines, TextTable
from patchloom.results.newest import settings_of
from patchloom.results.result import Result

_WORDS = {  # settings that are always described
    "recipe": "recipe {}",
    "k": "k = {}",
    "per_class": "{} labels per class",
    "labels": "labels: {}",
    "epochs": "{} epochs",
    "head": "head {}",
    "head_on": "head on {}",
    "count": "{} blocks",
    "layer": "layer {}",
    "network": "{}",
    "test_crop": "test crop {}",
    "group": "group {}",
    "pooling": "pooling {}",
}


def describe_settings(one: Result, also: Sequence[str] = ()) -> str:
    """Return settings such as "k = 20, pooling mean": the usual ones, and ``also`` others by their names."""
    its = {name: value for name, value in settings_of(one).items() if (name, value) != ("pooling", "pixels")}
    said = [words.format(_short(its[name])) for name, words in _WORDS.items() if its.get(name) is not None]
    said += [f"{name.replace('_', ' ')} {_short(its[name])}" for name in also if name in its and name not in _WORDS]
    return ", ".join(said)


def varying(each: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of settings that differ between those of ``each`` result that has them."""
    values = {name: [one[name] for one in each if name in one] for settings in each for name in settings}
    return [name for name, found in values.items() if any(value != found[0] for value in found)]


def choose_fitting_table(forms: Sequence[TextTable], width: int) -> TextTable:
    """Return the first form that fits into ``width`` characters; else the last one, with names above their rows."""
    return next((form for form in forms if form.least() <= width), _names_above(forms[-1]))


def _names_above(table: TextTable) -> TextTable:
    """Return the table with the first column on separate lines."""
    rows: list[tuple[str, ...]] = []
    ends, before = set(), None
    for number, (name, *others) in enumerate(table.rows):
        if name != before:
            rows.append((name,))
            before = name
        rows.append((f"  {others[0]}", *others[1:]))
        if number in table.ends:
            ends.add(len(rows) - 1)
    return TextTable(table.heading[1:], tuple(rows), ends=frozenset(ends))


def table_by_row(rows: Sequence[Result]) -> TextTable:
    """Return a table with a line per result, and a column for every setting that differs between results."""
    names = _names(rows)
    lines = tuple((*(cell(row, name) for name in names), row.text()) for row in rows)
    heading = *(name.replace("_", " ") for name in names), "value, 95 % interval"
    return TextTable(heading, lines, names=frozenset({0}), ends=_ends(lines))


def table_across(
    rows: Sequence[Result], across: str, gap: str, down: bool = False, symbols: Mapping[str, str] | None = None,
    short: bool = False,
) -> TextTable:  # fmt: skip
    """Return a table with a line per encoder, pooling and other settings, and a column per value of a setting.

    A result that does not depend on the setting is repeated in every column.

    Args:
        rows: results.
        across: name of the setting, or "measure".
        gap: between values and their intervals.
        down: whether its values have lines and the encoders columns; other results have their own line.
        symbols: names of settings in the table, if they differ.
        short: omit intervals and units.
    """
    dependent = [row for row in rows if across in _columns(row)]
    columns = list(dict.fromkeys(row.encoder if down else _columns(row)[across] for row in dependent))
    names = _names(rows, across)
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        its = _columns(row)
        line = (cell(row, across) or row.encoder,) if down else tuple(cell(row, name) for name in names)
        under = ([row.encoder] if down else [its[across]]) if across in its else columns
        shown = row.amount() if short else Lines(row.text(gap))
        lines.setdefault(line, {}).update(dict.fromkeys(under, shown))
    cells = tuple((*line, *(found.get(column, "") for column in columns)) for line, found in lines.items())
    if down:
        last = len({cell(row, across) for row in dependent}) - 1
        return TextTable((across, *columns), cells, names=frozenset({0}), ends=frozenset({last}))
    called = {name: (symbols or {}).get(name, name.replace("_", " ")) for name in (across, *names)}
    headings = (value if isinstance(value, str) else f"{called[across]} = {_short(value)}" for value in columns)
    return TextTable((*(called[name] for name in names), *headings), cells, names=frozenset({0}), ends=_ends(cells))


def _columns(row: Result) -> dict[str, Any]:
    """Return what may be a column."""
    return {"encoder": row.encoder, "pooling": "-", "measure": row.measure, **row.settings}


def _names(rows: Sequence[Result], across: str = "") -> list[str]:
    """Return the names of the columns before those of values: the encoder, and all that differs between results."""
    first = ["encoder", *["pooling"] * any(row.pooling != "-" for row in rows)]
    return first + [name for name in varying([*map(_columns, rows)]) if name not in (*first, across)]


def cell(row: Result, name: str) -> str:
    """Return the text of a column; "" if the result has no such setting."""
    return _short(_columns(row).get(name, ""))


def _ends(lines: Sequence[tuple[str, ...]]) -> frozenset[int]:
    """Return the numbers of the last lines of each name."""
    return frozenset(i for i, (one, after) in enumerate(pairwise(lines)) if one[0] != after[0])


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
