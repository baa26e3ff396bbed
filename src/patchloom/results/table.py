"""Results as text: tables that fit the terminal, and settings in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from patchloom.display import Lines, TextTable
from patchloom.results.classes import IN_GROUP, RECALL, cell_name
from patchloom.results.newest import settings_of
from patchloom.results.result import Result

_WORDS = {  # settings that are always described
    "column": "column {}",
    "regressor": "{}",
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


_MANY, _LOWEST = 10, 5  # recalls or groups that are all shown, and those that are shown of more
_WIDEST = 10  # classes of a confusion matrix that is shown as text


def class_table(rows: Sequence[Result], noun: str, width: int) -> list[str | TextTable]:
    """Return a title and a table of measures by class, with a line per measure and a column per encoder.

    Of many recalls, or groups, the lowest ones of the first encoder are shown.

    Args:
        rows: results of `patchloom.results.classes.class_results`, of one setting per encoder.
        noun: "images" or "recordings".
        width: characters of a line.
    """
    found: dict[str, dict[str, Result]] = {}
    for row in rows:
        found.setdefault(row.measure, {})[row.encoder] = row
    encoders, title = list(dict.fromkeys(row.encoder for row in rows)), "By class, in the quoted setting"
    for start, what in ((RECALL, "recalls"), (IN_GROUP, "groups")):
        its = [measure for measure in found if measure.startswith(start)]
        if len(its) > _MANY:
            lowest = sorted(its, key=lambda measure: found[measure][encoders[0]].value)[:_LOWEST]
            found = {measure: each for measure, each in found.items() if measure in lowest or measure not in its}
            title += f"; the {_LOWEST} lowest of {len(its)} {what}"

    def line(measure: str, each: Mapping[str, Result], gap: str) -> tuple[str, ...]:
        some = next(iter(each.values()))
        counted = f"{some.also.get('images', some.n):,.0f}"
        return measure, counted, *(Lines(each[name].text(gap)) if name in each else "" for name in encoders)

    forms = []
    for gap in (" ", "\n"):
        lines = tuple(line(measure, each, gap) for measure, each in found.items())
        forms.append(TextTable(("measure", noun, *encoders), lines, names=frozenset({0})))
    fitting = next((form for form in forms if form.least() <= width), None)
    if fitting is None:  # a table for each encoder
        lines = tuple((name, *line(measure, each, " ")[:2], each[name].text()) for name in encoders
                      for measure, each in found.items() if name in each)  # fmt: skip
        fitting = _names_above(TextTable(("encoder", "measure", noun, "value"), lines, names=frozenset({0, 1})))
    return [f"{title}:", "", fitting]


def confusion_table(row: Result, classes: Sequence[str]) -> list[str | TextTable]:
    """Return a title and the confusion matrix of a macro F1; a sentence if it has too many classes."""
    if len(classes) > _WIDEST:
        return [f"The confusion matrix of {len(classes)} classes is in the results and the picture."]
    lines = tuple((of, *(f"{row.also.get(cell_name(of, to), 0):,.0f}" for to in classes)) for of in classes)
    table = TextTable(("true class", *classes), lines, names=frozenset(range(len(classes) + 1)))
    return [f"Confusion matrix of {row.encoder}, answers in columns:", "", table]


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
