"""Results of a protocol and its controls, with confidence intervals, and their table on the screen."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchloom.results.claims import (
    CONSTANT,
    RAW,
    START,
    Difference,
    accuracy_interval,
    constant_remark,
    difference,
    difference_over_splits,
    is_wide,
    mean_interval,
    raw_remark,
    telling_remark,
    wilson,
)
from patchloom.display import Displayable, Lines, TextTable, Verbatim
from patchloom.errors import PatchloomError
from patchloom.system.files import no_link, read_bytes, write_error, write_whole

# The table of a report, in several forms to fit the terminal.


def choose_fitting_table(forms: Sequence[TextTable], width: int) -> TextTable:
    """Return the first form of a table that fits into ``width`` characters; else the last one, by names.

    The last form has each name on a separate line above its rows.
    """
    for form in forms:
        if form.least() <= width:
            return form
    return _names_above(forms[-1])


def across_settings(
    rows: Sequence[Row], across: str, *, down: bool, short: bool, symbols: Mapping[str, str]
) -> list[TextTable]:
    """Return the table with a column per value of a setting, with intervals beside and below the values."""
    if down:
        return [_down(rows, across, gap) for gap in (" ", "\n")]
    return [_across(rows, across, short, symbols, gap) for gap in (" ", "\n")]


def by_row(rows: Sequence[Row]) -> TextTable:
    """Return a table with a line per row, and a column for every setting that differs between rows."""
    names, first = _varying(rows), _names(rows)
    lines = [(row.encoder, row.pooling)[: len(first)] + tuple(_setting(row, name) for name in names) for row in rows]
    texts = tuple((*line, row.text()) for line, row in zip(lines, rows, strict=True))
    heading = *first, *(name.replace("_", " ") for name in names), "value, 95 % interval"
    return TextTable(heading, texts, names=frozenset({0}), ends=_ends([row.encoder for row in rows]))


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


def _across(rows: Sequence[Row], across: str, short: bool, symbols: Mapping[str, str], gap: str) -> TextTable:
    """Return a table with a line per encoder, pooling and other settings, and a column per value of ``across``."""
    columns = list(dict.fromkeys(row.settings[across] for row in rows if across in row.settings))
    names = [name for name in _varying(rows) if name != across]
    called = {name: symbols.get(name, name.replace("_", " ")) for name in (across, *names)}
    headings = (value if isinstance(value, str) else f"{called[across]} = {_short(value)}" for value in columns)
    first = _names(rows)
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        line = (row.encoder, row.pooling)[: len(first)] + tuple(_setting(row, name) for name in names)
        # a value that does not depend on the setting is repeated in every column
        under = [row.settings[across]] if across in row.settings else columns
        shown = row.amount(row.value) if short else Lines(row.text(gap))
        lines.setdefault(line, {}).update(dict.fromkeys(under, shown))
    cells = tuple((*line, *(lines[line].get(value, "") for value in columns)) for line in lines)
    heading = *first, *(called[name] for name in names), *headings
    return TextTable(heading, cells, names=frozenset({0}), ends=_ends([line[0] for line in lines]))


def _down(rows: Sequence[Row], across: str, gap: str) -> TextTable:
    """Return a table with a line per value of ``across``, a column per encoder, and a line per other row."""
    encoders = list(dict.fromkeys(row.encoder for row in rows if across in row.settings))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        if across in row.settings:
            cells.setdefault(_setting(row, across), {})[row.encoder] = Lines(row.text(gap))
    lines = [(value, *(found.get(encoder, "") for encoder in encoders)) for value, found in cells.items()]
    last = frozenset({len(lines) - 1})
    for row in rows:
        if across not in row.settings:  # it appears in every column
            lines.append((row.encoder, *[Lines(row.text(gap))] * len(encoders)))
    return TextTable((across, *encoders), tuple(lines), names=frozenset({0}), ends=last)


def _ends(names: Sequence[str]) -> frozenset[int]:
    """Return the numbers of the last lines of each name."""
    return frozenset(i for i, pair in enumerate(zip(names, names[1:], strict=False)) if pair[0] != pair[1])


def _varying(rows: Sequence[Row]) -> list[str]:
    """Return the names of settings that differ between the rows that have them."""
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


@dataclass(frozen=True)
class Row:
    """Result of one evaluation.

    Attributes:
        encoder: name of the encoder or control.
        pooling: pooling of the features, "-" if not applicable.
        protocol: name of the protocol.
        settings: settings of the protocol.
        value: result; a fraction in [0, 1] if the unit is %.
        low, high: 95 % interval of the value; equal to it if the value is exact or has no interval.
        unit: unit of the value, "" if it has none.
        right: [n] whether each test image was classified correctly, for comparisons of rows; None if unknown.
        pseudo: [n] jackknife pseudo-values of test images or groups of them, for a value that is not a mean over
            images; else None.
        groups: [n] groups of the test images that ``right`` has, such as patients; None: no groups.
    """

    encoder: str
    pooling: str
    protocol: str
    settings: dict[str, Any]
    value: float
    low: float
    high: float
    unit: str = "%"
    right: Tensor | None = field(default=None, compare=False, repr=False)
    pseudo: Tensor | None = field(default=None, compare=False, repr=False)
    groups: Tensor | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(encoder: str, pooling: str, protocol: str, settings: dict[str, Any], value: float, n: int) -> Row:
        """Create a row with Wilson's interval for ``n`` test images."""
        return Row(encoder, pooling, protocol, settings, value, *wilson(value, n))

    @staticmethod
    def of_images(
        encoder: str,
        pooling: str,
        protocol: str,
        settings: dict[str, Any],
        right: Tensor,
        groups: Tensor | None = None,
    ) -> Row:
        """Create a row of accuracy from the correctness ``right`` [n] of test images, perhaps in ``groups`` [n]."""
        right = right.cpu()
        value, ends = right.double().mean().item(), accuracy_interval(right.numpy(), groups)
        return Row(encoder, pooling, protocol, settings, value, *ends, right=right, groups=groups)

    @staticmethod
    def of_means(
        encoder: str, protocol: str, settings: dict[str, Any], values: Sequence[float], unit: str = "%"
    ) -> Row:
        """Create a row of a mean over images (``values`` [n]; patches are dependent) with Student's interval."""
        low, high = mean_interval(values)
        top = 1.0 if unit == "%" else math.inf
        return Row(encoder, "-", protocol, settings, sum(values) / len(values), max(0.0, low), min(top, high), unit)

    @staticmethod
    def exact(encoder: str, protocol: str, settings: dict[str, Any], value: float, unit: str = "%") -> Row:
        """Create a row of a computed value without an interval."""
        return Row(encoder, "-", protocol, settings, value, value, value, unit)

    def plain(self) -> dict[str, Any]:
        """Return values for JSON."""
        names = ("encoder", "pooling", "protocol", "settings", "value", "low", "high", "unit")
        return {name: getattr(self, name) for name in names}

    def number(self, value: float | None = None) -> str:
        """Return text such as "61.2 %"; for another value with the same unit, if given."""
        return f"{self.amount(self.value if value is None else value)} {self.unit}".rstrip()

    def as_control(self) -> str:
        """Return text such as "61.2 % untrained" for a headline."""
        called = {START: "at its start", CONSTANT: f"by always answering {self.settings.get('answer', '')}"}
        return f"{self.number()} {called.get(self.encoder, self.encoder)}"

    def amount(self, value: float) -> str:
        """Return a number in the unit of the row, without its name."""
        return f"{100 * value:.1f}" if self.unit == "%" else f"{value:.2f}"

    def interval(self) -> str:
        """Return text such as "[59.0, 63.3]"; "" for exact values."""
        return "" if self.low == self.high else f"[{self.amount(self.low)}, {self.amount(self.high)}]"

    def text(self, gap: str = " ") -> str:
        """Return text with the interval, such as "61.2 % [59.0, 63.3]", with ``gap`` between the two."""
        return gap.join(filter(None, (self.number(), self.interval())))


def compare_rows(
    ours: Sequence[Row], theirs: Sequence[Row], trained: bool, n: int | None = None, noun: str = "images"
) -> Difference:
    """Compare the results of an encoder and of a control on the same images, one row per seed."""
    control, value = theirs[-1].encoder, _mean(ours) - _mean(theirs)
    own = [row.right if row.pseudo is None else row.pseudo for row in ours]
    other = [row.right if row.pseudo is None else row.pseudo for row in theirs]
    if any(one is None for one in (*own, *other)) or len({len(one) for one in (*own, *other) if one is not None}) > 1:
        return Difference(control, value, -1.0, 1.0, 0, len(ours), trained, noun=noun)
    one, two = (torch.stack([one for one in side if one is not None]).double().numpy() for side in (own, other))
    about: dict[str, Any] = {"n": n, "control": control, "trained": trained, "noun": noun}
    if ours[0].pseudo is not None:
        return difference(one, two, ([row.value for row in ours], [row.value for row in theirs]), **about)
    return difference(one, two, groups=ours[0].groups, **about)


def _mean(rows: Sequence[Row]) -> float:
    return sum(row.value for row in rows) / len(rows)


@dataclass(frozen=True)
class Drawing:
    """Picture that `protocols.evaluate` draws.

    Attributes:
        function: import path of the drawing function, which this package does not import.
        out: output file.
        content: other arguments of the function.
    """

    function: str
    out: Path
    content: dict[str, Any]


def note_unreadable(unreadable: Sequence[str], what: str = "images") -> list[str]:
    """Return a list with a sentence on ``unreadable`` images; empty if there are none."""
    if not unreadable:
        return []
    return [f"{len(unreadable):,} {what} could not be read and were left out, such as {unreadable[0]}."]


@dataclass(frozen=True, repr=False)
class Report(Displayable):
    """All rows of one evaluation and their common properties.

    Attributes:
        rows: rows of the encoder, then of its controls.
        protocol: description of the method in sentences.
        headline: sentence with the numbers to quote; `conclusion` interprets them.
        quoted: their rows: the encoder's, then its controls'.
        against: differences between the encoder and its controls; with ``others``, over all seeds.
        pairs: indices in ``quoted`` of the two rows of each difference.
        telling: another measure by which an encoder may be better than a constant answer; "": none.
        data, fingerprint: name of the test images, and 16 hex digits of their content.
        seed: random seed of splits and of the untrained encoder.
        n_test: number of readable test images.
        date: ISO 8601, UTC.
        others: reports of other seeds, each with its own differences.
        across: setting whose values are the columns of the table; "": each row has a line.
        down: use its values as lines and the encoders as columns.
        symbols: names of settings in the table, if they differ.
        short: omit intervals and units in a large table.
        drawings: pictures to draw.
        noun: "images" or "recordings".
    """

    rows: list[Row]
    protocol: str
    headline: str
    quoted: tuple[Row, ...]
    data: str
    fingerprint: str
    seed: int
    n_test: int
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    others: tuple[Report, ...] = ()
    across: str = ""
    down: bool = False
    symbols: Mapping[str, str] = field(default_factory=dict)
    short: bool = False
    drawings: tuple[Drawing, ...] = ()
    noun: str = "images"
    against: tuple[Difference, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    telling: str = ""

    def parts(self, width: int) -> list[str | TextTable]:
        """See `Displayable`."""
        said: list[str | TextTable] = [self.headline]
        said += [self.spread()] * bool(self.others)
        said += [self.caution()] * bool(self.caution())
        said += [self.conclusion()] * bool(self.conclusion())
        said += ["", self.table(width), "", self.protocol] if self.rows else [self.protocol]
        return [*said, *(Verbatim(f"Picture: {drawing.out}") for drawing in self.drawings)]

    def plain(self) -> dict[str, Any]:
        """See `Displayable`."""
        names = ("data", "fingerprint", "seed", "n_test", "noun", "date", "headline")
        return {
            **{name: getattr(self, name) for name in names},
            "conclusion": self.conclusion(),
            "method": self.protocol,
            "rows": [row.plain() | {"quoted": row in self.quoted} for row in self.rows],
            "against": [one.plain() for one in self.against],
            "pictures": [str(drawing.out) for drawing in self.drawings],
            "other_seeds": [one.plain() for one in self.others],
        }

    def conclusion(self) -> str:
        """Return sentences on whether the encoder is better than its controls; "" without any."""
        return " ".join([*(one.sentence() for one in self.against), *self._remarks()])

    @property
    def constant(self) -> Row | None:
        """Row of the best constant answer by the quoted measure; None without one."""
        return self._by_measure(CONSTANT, self.quoted[0].settings.get("measure")) if self.quoted else None

    def _by_measure(self, encoder: str, measure: str | None) -> Row | None:
        """Return the first row of an encoder with a measure; None without one."""
        those = (row for row in self.rows if row.encoder == encoder and row.settings.get("measure") == measure)
        return next(those, None)

    def _remarks(self) -> list[str]:
        """Return sentences on encoders no better than a constant answer, and on raw pixels that are far better."""
        said = []
        constant, level = self.constant, self._no_better_than_constant()
        if constant is not None and 0 in level:
            names = dict.fromkeys(f"{self.quoted[i].encoder} ({self.quoted[i].number(self._mean(i))})" for i in level)
            said.append(constant_remark([*names], constant.settings["answer"], constant.number()))
        if self.telling and (quoted := self._over_constant(0)) and not quoted.exceeds:
            name, measure = self.quoted[0].encoder, self.quoted[0].settings["measure"]
            found = self._over_constant(0, self.telling)
            said.append(telling_remark(name, self.telling, measure, found) if found else "")
        for i, row in enumerate(self.quoted):
            if row.encoder in RAW:
                said.append(raw_remark(self._apart(self._of_seeds(0), self._of_seeds(i), False)))
        return [*filter(None, said)]

    def _no_better_than_constant(self) -> list[int]:
        """Return the indices in ``quoted`` of rows that are no better than the best constant answer by any measure."""
        if any(report.constant is None for report in (*self.others, self)):
            return []
        measures = {"", self.telling}
        found = [[self._over_constant(i, measure) for measure in measures] for i in range(len(self.quoted))]
        return [i for i, those in enumerate(found) if not any(one and one.exceeds for one in those)]

    def _over_constant(self, i: int, measure: str = "") -> Difference | None:
        """Compare a quoted row, or that of its encoder by another ``measure``, with the best constant answer by it.

        None if a seed has no such row.
        """
        reports = (*self.others, self)
        pairs = [
            (report._by_measure(report.quoted[i].encoder, measure), report._by_measure(CONSTANT, measure))
            if measure
            else (report.quoted[i], report.constant)
            for report in reports
        ]
        ours, theirs = ([row for row in side if row is not None] for side in zip(*pairs, strict=True))
        return self._apart(ours, theirs, False) if len(ours) == len(theirs) == len(reports) else None

    def _of_seeds(self, i: int) -> list[Row]:
        """Return a quoted row of every seed."""
        return [report.quoted[i] for report in (*self.others, self)]

    def _mean(self, i: int) -> float:
        return _mean(self._of_seeds(i))

    def _apart(self, ours: Sequence[Row], theirs: Sequence[Row], trained: bool) -> Difference:
        """Compare two rows of every seed, on the same test images or on those of each seed's split."""
        reports = (*self.others, self)
        if len({report.fingerprint for report in reports}) == 1:
            return compare_rows(ours, theirs, trained, self.n_test, self.noun)
        values = [row.value for row in ours], [row.value for row in theirs]
        known = all(row.right is not None or row.pseudo is not None for row in (*ours, *theirs))
        n = min(report.n_test for report in reports) if known else 0
        about: dict[str, Any] = {"control": theirs[-1].encoder, "trained": trained, "noun": self.noun}
        return difference_over_splits(*values, n, **about)

    def with_differences(self, trained: bool, *pairs: tuple[int, int]) -> Report:
        """Return the report with the differences between quoted rows, over all seeds."""
        pairs = pairs or tuple((0, i) for i in range(1, len(self.quoted)))
        level, constant = self._no_better_than_constant(), self.constant
        answer = constant.settings["answer"] if constant is not None else ""
        found = []
        for i, j in pairs:
            one = self._apart(self._of_seeds(i), self._of_seeds(j), trained)
            found.append(replace(one, constant=answer) if i in level else one)
        return replace(self, against=tuple(found), pairs=pairs)

    def with_setting(self, name: str, value: str) -> Report:
        """Return the report with a setting of all rows, such as the groups of the split or the network."""

        def named(row: Row) -> Row:
            return replace(row, settings=row.settings | {name: value})

        return replace(self, rows=list(map(named, self.rows)), quoted=tuple(map(named, self.quoted)))

    def over_seeds(self, others: Sequence[Report]) -> Report:
        """Return the report of the last of several seeds, with differences over all of them."""
        whole = replace(self, others=tuple(others))
        return whole.with_differences(self.against[0].trained, *self.pairs) if self.pairs else whole

    def table(self, width: int) -> TextTable:
        """Return all rows as a table that fits into ``width`` characters."""
        if not any(self.across in row.settings for row in self.rows):
            return choose_fitting_table([by_row(self.rows)], width)
        wide = across_settings(self.rows, self.across, down=self.down, short=self.short, symbols=self.symbols)
        return choose_fitting_table([*wide, by_row(self.rows)], width)

    def caution(self) -> str:
        """Return a sentence if the test images are too few for the first quoted number; else ""."""
        if not self.quoted or self.quoted[0].unit != "%":
            return ""
        first = self.quoted[0]
        if not is_wide(first.value, first.low, first.high):
            return ""
        groups = None if first.groups is None else len(first.groups.unique())
        few = f"{self.n_test:,} test {self.noun}" if groups is None else f"{groups:,} test group{'s' * (groups != 1)}"
        return (
            f"Only {few}: others could have given anything from {first.number(first.low)} to "
            f"{first.number(first.high)}."
        )

    def spread(self) -> str:
        """Return a sentence with mean and range of the quoted numbers over seeds."""
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


# Results as rows of results.csv.


_FIRST = (
    *("date", "protocol", "encoder", "pooling", "settings", "data", "data_fingerprint", "seed"),
    *("value", "low", "high", "n_test", "quoted"),
)
_YEAR = 4  # digits: a cell of this length begins a date and is not a number
COLUMNS = (*_FIRST, "against", "unit")  # files of older versions end with "quoted" or "against"
NO_UNIT = "-"  # column ``unit`` of a value without one; rows of older versions have an empty cell


def differences_of(cell: str | None) -> tuple[Difference, ...]:
    """Return the differences in a cell of the column ``against``; () if the cell is empty or missing."""
    found = json.loads(cell) if cell else []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError("not a list of differences")
    return tuple(map(Difference.of, found))


def check_rows(path: Path) -> bytes:
    """Return the content of a CSV of `COLUMNS`, empty if there is none; call it before a long evaluation.

    Missing last columns are filled with empty cells.
    """
    try:
        before = read_bytes(path) if os.path.lexists(path) else b""
    except OSError as problem:
        raise PatchloomError(f"{path} could not be read ({problem.strerror}): move it away") from problem
    heading = before.split(b"\n", 1)[0].rstrip(b"\r").decode(errors="replace")
    for count in range(len(_FIRST), len(COLUMNS)):
        if heading == ",".join(COLUMNS[:count]):
            return b"".join(_widened(line, count) for line in before.splitlines(keepends=True))
    if before and heading != ",".join(COLUMNS):
        raise PatchloomError(f"{path} has other columns than patchloom writes: move it away")
    return before


def append_rows(path: Path, report: Report, once: bool = False) -> None:
    """Append a report's rows to a CSV of `COLUMNS`; a new file begins with the header.

    A single write appends all rows, so that simultaneous evaluations do not mix theirs.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = check_rows(path)
        if before and before != read_bytes(path):
            write_whole(path, before)  # it had the columns of an older version
        there = set(map(_undated, before.decode("utf-8", "replace").splitlines())) if once else set()
        if not before:
            writer.writerow(COLUMNS)
        elif not before.endswith(b"\n"):
            text.write("\n")  # the previous write was incomplete
        against = _against(report)
        for row in report.rows:
            about = (report.date, row.protocol, row.encoder, row.pooling, json.dumps(row.settings, sort_keys=True))
            source = (report.data, report.fingerprint, report.seed)
            cells = (*about, *source, row.value, row.low, row.high, report.n_test, row in report.quoted)
            if tuple(map(str, cells[1:])) not in there:
                writer.writerow((*cells, against.get(id(row), ""), row.unit or NO_UNIT))
        handle = no_link(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(handle, text.getvalue().encode())
        finally:
            os.close(handle)
    except OSError as problem:
        raise write_error(path, problem) from problem


_PROBES = ("knn", "linear")  # protocols on frozen features that a fine-tuned classifier is meant to beat


def frozen_ahead(before: bytes, report: Report) -> str:
    """Return a sentence if a probe on the frozen encoder was ahead on the same test images; "" if none was.

    Args:
        before: rows of earlier evaluations, from `check_rows`.
        report: report of a fine-tuning.
    """
    ours, found = report.quoted[0], dict[str, float]()
    for row in csv.DictReader(io.StringIO(before.decode("utf-8", "replace"))):
        same = row["data_fingerprint"] == report.fingerprint and row["encoder"] == ours.encoder
        if same and row["quoted"] == "True" and row["protocol"] in _PROBES:
            with contextlib.suppress(TypeError, ValueError):  # a damaged row
                found[row["protocol"]] = float(row["value"])
    best = max(found, key=found.__getitem__, default="")
    if not best or not ours.value < found[best] <= 1:
        return ""
    return (
        f"On these test {report.noun} the frozen encoder was ahead: {ours.number(found[best])} by {best}, "
        f"{ours.number()} fine-tuned. Take the probe, or fine-tune with more labels or a lower --blr."
    )


def forget_rows(path: Path, which: str) -> int:
    """Remove the rows of evaluations from a CSV of `COLUMNS`; other rows stay unchanged."""
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
    """Return the cells of the column ``against`` by the id of their row."""
    cells: dict[int, list[dict[str, Any]]] = {}
    for (i, _), one in zip(report.pairs, report.against, strict=True):
        for row in report.rows:
            if row == report.quoted[i]:
                cells.setdefault(id(row), []).append(one.plain())
                break
    return {row: json.dumps(found) for row, found in cells.items()}


def _widened(line: bytes, count: int) -> bytes:
    """Return a line of a file with the first ``count`` columns extended to all; damaged lines are kept unchanged."""
    text = line.rstrip(b"\r\n")
    cells = _cells(text.decode("utf-8", "replace"))
    if len(cells) != count:
        return line
    more = COLUMNS[count:] if tuple(cells) == COLUMNS[:count] else [""] * (len(COLUMNS) - count)
    return b",".join([text, *(name.encode() for name in more)]) + line[len(text) :]


def _undated(line: str) -> tuple[str, ...]:
    """Return the cells of a line without the date and the last columns; () for a damaged line, which is kept."""
    return tuple(_cells(line)[1 : len(_FIRST)])


def _cells(line: str) -> list[str]:
    with contextlib.suppress(csv.Error):
        return next(csv.reader([line]), [])
    return []
