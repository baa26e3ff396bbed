"""An evaluation: the results of a protocol and its controls, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.display import Displayable, Lines, TextTable, Verbatim
from patchloom.results.claims import (
    CONSTANT,
    RAW,
    START,
    Difference,
    constant_remark,
    difference,
    difference_over_splits,
    raw_remark,
    telling_remark,
)
from patchloom.results.intervals import is_wide
from patchloom.results.result import Result

# The table of an evaluation, in several forms to fit the terminal.


def choose_fitting_table(forms: Sequence[TextTable], width: int) -> TextTable:
    """Return the first form that fits into ``width`` characters; else the last one, with names above their rows."""
    return next((form for form in forms if form.least() <= width), _names_above(forms[-1]))


def _by_row(rows: Sequence[Result]) -> TextTable:
    """Return a table with a line per result, and a column for every setting that differs between results."""
    names, first = _varying(rows), _names(rows)
    lines = tuple((*_line(row, first, names), row.text()) for row in rows)
    heading = *first, *(name.replace("_", " ") for name in names), "value, 95 % interval"
    return TextTable(heading, lines, names=frozenset({0}), ends=_ends(lines))


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


def _across(of: Evaluation, gap: str) -> TextTable:
    """Return a table with a line per encoder, pooling and other settings, and a column per value of ``across``."""
    rows, across = of.results, of.across
    columns = list(dict.fromkeys(_settings(row)[across] for row in rows if across in _settings(row)))
    first, names = _names(rows), [name for name in _varying(rows) if name != across]
    called = {name: of.symbols.get(name, name.replace("_", " ")) for name in (across, *names)}
    headings = (value if isinstance(value, str) else f"{called[across]} = {_short(value)}" for value in columns)
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        # a value that does not depend on the setting is repeated in every column
        under = [_settings(row)[across]] if across in _settings(row) else columns
        shown = row.amount() if of.short else Lines(row.text(gap))
        lines.setdefault(_line(row, first, names), {}).update(dict.fromkeys(under, shown))
    cells = tuple((*line, *(found.get(value, "") for value in columns)) for line, found in lines.items())
    heading = *first, *(called[name] for name in names), *headings
    return TextTable(heading, cells, names=frozenset({0}), ends=_ends(cells))


def _down(of: Evaluation, gap: str) -> TextTable:
    """Return a table with a line per value of ``across``, a column per encoder, and a line per other result."""
    those = [row for row in of.results if of.across in _settings(row)]
    encoders = list(dict.fromkeys(row.encoder for row in those))
    cells: dict[str, dict[str, str]] = {}
    for row in those:
        cells.setdefault(_text(row, of.across), {})[row.encoder] = Lines(row.text(gap))
    lines = [(value, *(found.get(encoder, "") for encoder in encoders)) for value, found in cells.items()]
    others = [row for row in of.results if of.across not in _settings(row)]  # they appear in every column
    lines += [(row.encoder, *[Lines(row.text(gap))] * len(encoders)) for row in others]
    return TextTable((of.across, *encoders), tuple(lines), names=frozenset({0}), ends=frozenset({len(cells) - 1}))


def _line(row: Result, first: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    return (row.encoder, row.pooling)[: len(first)] + tuple(_text(row, name) for name in names)


def _ends(lines: Sequence[tuple[str, ...]]) -> frozenset[int]:
    """Return the numbers of the last lines of each name."""
    return frozenset(i for i, (one, after) in enumerate(pairwise(lines)) if one[0] != after[0])


def _varying(rows: Sequence[Result]) -> list[str]:
    """Return the names of settings that differ between the results that have them."""
    each = [_settings(row) for row in rows]
    values = {name: [one[name] for one in each if name in one] for settings in each for name in settings}
    return [name for name, found in values.items() if any(value != found[0] for value in found)]


def _settings(row: Result) -> dict[str, Any]:
    """Return what may be a column: the settings, and the measure, but not the pooling, which has its own column."""
    return {"measure": row.measure, **{name: value for name, value in row.settings.items() if name != "pooling"}}


def _names(rows: Sequence[Result]) -> tuple[str, ...]:
    return ("encoder", "pooling") if any(row.pooling != "-" for row in rows) else ("encoder",)


def _text(row: Result, name: str) -> str:
    return _short(_settings(row)[name]) if name in _settings(row) else ""


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def compare_results(ours: Sequence[Result], theirs: Sequence[Result], trained: bool) -> Difference:
    """Compare results of an encoder and of a control, one per seed, on the same images or on those of each seed."""
    noun, n = ours[-1].noun, min(one.n for one in (*ours, *theirs))
    about: dict[str, Any] = {"control": theirs[-1].encoder, "trained": trained, "noun": noun}
    splits = [[one.fingerprint for one in side] for side in (ours, theirs)]
    same = len({*splits[0], *splits[1]}) == 1
    values = [one.value for one in ours], [one.value for one in theirs]
    sides = [[one.outcomes for one in side if one.outcomes is not None] for side in (ours, theirs)]
    known = len(sides[0]) == len(ours) and len(sides[1]) == len(theirs)
    if not same and splits[0] == splits[1]:
        return difference_over_splits(*values, n if known else 0, **about)
    if not known or not same or len({len(one.values) for side in sides for one in side}) > 1:
        return Difference(value=_mean(ours) - _mean(theirs), low=-1.0, high=1.0, n=0, trainings=len(ours), **about)
    one, two = (np.stack([outcome.values for outcome in side]).astype(np.float64) for side in sides)
    if sides[0][0].pseudo:
        return difference(one, two, values, n=n, **about)
    return difference(one, two, groups=sides[0][0].groups, **about)


def as_control(one: Result) -> str:
    """Return text such as "61.2 % untrained" for a headline."""
    called = {START: "at its start", CONSTANT: f"by always answering {one.settings.get('answer', '')}"}
    return f"{one.number()} {called.get(one.encoder, one.encoder)}"


def few_remark(one: Result) -> str:
    """Return a sentence if the test images are too few for the number; else ""."""
    if one.unit != "%" or not is_wide(one.value, one.low, one.high):
        return ""
    few = f"{one.groups:,} test group{'s' * (one.groups != 1)}" if one.groups else f"{one.n:,} test {one.noun}"
    return f"Only {few}: others could have given anything from {one.number(one.low)} to {one.number(one.high)}."


def _mean(rows: Sequence[Result]) -> float:
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
class Evaluation(Displayable):
    """All results of one evaluation, and what was done.

    Attributes:
        results: results of the encoder, then of its controls.
        method: description of the method in sentences.
        headline: sentence with the numbers to quote; `conclusion` interprets them.
        quoted: those results: the encoder's, then its controls'. The encoder's has the differences from its controls;
            with ``others``, over all seeds.
        data, fingerprint: name of the test images, and 16 hex digits of their content.
        seed: random seed of splits and of the untrained encoder.
        n_test: number of readable test images.
        controls: indices in ``quoted`` of the controls from which there are differences.
        telling: another measure by which an encoder may be better than a constant answer; "": none.
        date: ISO 8601, UTC.
        others: evaluations of other seeds, each with its own differences.
        across: setting whose values are the columns of the table, or "measure"; "": each result has a line.
        down: use its values as lines and the encoders as columns.
        symbols: names of settings in the table, if they differ.
        short: omit intervals and units in a large table.
        drawings: pictures to draw.
        noun: "images" or "recordings".
    """

    results: list[Result]
    method: str
    headline: str
    quoted: tuple[Result, ...]
    data: str
    fingerprint: str
    seed: int
    n_test: int
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    others: tuple[Evaluation, ...] = ()
    across: str = ""
    down: bool = False
    symbols: Mapping[str, str] = field(default_factory=dict)
    short: bool = False
    drawings: tuple[Drawing, ...] = ()
    noun: str = "images"
    controls: tuple[int, ...] = ()
    telling: str = ""

    def __post_init__(self) -> None:
        """Complete each result by what all of them share."""
        among = set(map(id, self.quoted))
        shared: dict[str, Any] = {"data": self.data, "fingerprint": self.fingerprint, "n": self.n_test}
        shared |= {"noun": self.noun, "seed": self.seed, "date": self.date}
        changed = self._changed(lambda one: replace(one, **shared, quoted=id(one) in among))
        for name, value in changed.items():
            object.__setattr__(self, name, value)

    def _changed(self, change: Callable[[Result], Result]) -> dict[str, Any]:
        """Return all results and the quoted ones after a change; a quoted one stays the same object as a result."""
        made = {id(one): change(one) for one in (*self.results, *self.quoted)}
        return {
            "results": [made[id(one)] for one in self.results],
            "quoted": tuple(made[id(one)] for one in self.quoted),
        }

    @classmethod
    def of_test(cls, test: Any, seed: int, n: int, **others: Any) -> Evaluation:
        """Return an evaluation on the ``n`` readable images of a source; ``others`` are the other attributes."""
        about = {"data": test.name, "fingerprint": test.fingerprint(), "noun": test.noun}
        return cls(seed=seed, n_test=n, **about, **others)

    @property
    def against(self) -> tuple[Difference, ...]:
        """Differences between the encoder and its controls; with ``others``, over all seeds."""
        return self.quoted[0].against if self.quoted else ()

    def parts(self, width: int) -> list[str | TextTable]:
        """See `Displayable`."""
        said: list[str | TextTable] = [self.headline]
        said += [self.spread()] * bool(self.others)
        said += [one for one in (few_remark(self.quoted[0]) if self.quoted else "", self.conclusion()) if one]
        said += ["", self.table(width), "", self.method] if self.results else [self.method]
        return [*said, *(Verbatim(f"Picture: {drawing.out}") for drawing in self.drawings)]

    def plain(self) -> dict[str, Any]:
        """See `Displayable`."""
        return {
            "results": [one.plain() for one in self.results],
            "headline": self.headline,
            "conclusion": self.conclusion(),
            "method": self.method,
            "pictures": [str(drawing.out) for drawing in self.drawings],
            "other_seeds": [one.plain() for one in self.others],
        }

    def conclusion(self) -> str:
        """Return sentences on whether the encoder is better than its controls; "" without any."""
        return " ".join([*(one.sentence() for one in self.against), *self._remarks()])

    @property
    def constant(self) -> Result | None:
        """Row of the best constant answer by the quoted measure; None without one."""
        return self._by_measure(CONSTANT, self.quoted[0].measure) if self.quoted else None

    def _by_measure(self, encoder: str, measure: str) -> Result | None:
        """Return the first row of an encoder with a measure; None without one."""
        those = (row for row in self.results if row.encoder == encoder and row.measure == measure)
        return next(those, None)

    def _remarks(self) -> list[str]:
        """Return sentences on encoders no better than a constant answer, and on raw pixels that are far better."""
        said = []
        constant, level = self.constant, self._no_better_than_constant()
        if constant is not None and 0 in level:
            names = dict.fromkeys(f"{self.quoted[i].encoder} ({self.quoted[i].number(self._mean(i))})" for i in level)
            said.append(constant_remark([*names], constant.settings["answer"], constant.number()))
        if self.telling and (quoted := self._over_constant(0)) and not quoted.exceeds:
            name, measure = self.quoted[0].encoder, self.quoted[0].measure
            found = self._over_constant(0, self.telling)
            said.append(telling_remark(name, self.telling, measure, found) if found else "")
        for i, row in enumerate(self.quoted):
            if row.encoder in RAW:
                said.append(raw_remark(compare_results(self._of_seeds(0), self._of_seeds(i), False)))
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
        return compare_results(ours, theirs, False) if len(ours) == len(theirs) == len(reports) else None

    def _of_seeds(self, i: int) -> list[Result]:
        """Return a quoted row of every seed."""
        return [report.quoted[i] for report in (*self.others, self)]

    def _mean(self, i: int) -> float:
        return _mean(self._of_seeds(i))

    def with_differences(self, trained: bool, *controls: int) -> Evaluation:
        """Return the evaluation with the encoder's differences from quoted results (default: all), over all seeds."""
        controls = controls or tuple(range(1, len(self.quoted)))
        answer = self.constant.settings["answer"] if self.constant is not None else ""
        level = self._no_better_than_constant()
        found = [compare_results(self._of_seeds(0), self._of_seeds(i), trained) for i in controls]
        found = [replace(one, constant=answer) for one in found] if 0 in level else found
        changed = self._changed(lambda one: replace(one, against=tuple(found)) if one is self.quoted[0] else one)
        return replace(self, controls=controls, **changed)

    def with_setting(self, name: str, value: str) -> Evaluation:
        """Return the evaluation with a setting of all results, such as the groups of the split or the network."""
        return replace(self, **self._changed(lambda one: replace(one, settings={**one.settings, name: value})))

    def over_seeds(self, others: Sequence[Evaluation]) -> Evaluation:
        """Return the evaluation of the last of several seeds, with differences over all of them."""
        whole = replace(self, others=tuple(others))
        return whole.with_differences(self.against[0].trained, *self.controls) if self.controls else whole

    def table(self, width: int) -> TextTable:
        """Return all results as a table that fits into ``width`` characters."""
        forms = [_by_row(self.results)]
        if any(self.across in _settings(row) for row in self.results):
            forms = [*((_down if self.down else _across)(self, gap) for gap in (" ", "\n")), *forms]
        return choose_fitting_table(forms, width)

    def spread(self) -> str:
        """Return a sentence with mean and range of the quoted numbers over seeds."""
        reports = (*self.others, self)
        # an encoder may be quoted several times, and the quoted setting may differ between seeds
        where = [
            dict.fromkeys(_text(row, self.across) for row in same if self.across in _settings(row))
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


_PROBES = ("knn", "linear")  # protocols on frozen features that a fine-tuned classifier is meant to beat


def frozen_ahead(before: Sequence[Result], tuned: Evaluation) -> str:
    """Return a sentence if a probe on the frozen encoder was ahead on the same test images; "" if none was.

    Args:
        before: results of earlier evaluations.
        tuned: evaluation of a fine-tuning.
    """
    ours = tuned.quoted[0]
    found = {
        one.protocol: one.value
        for one in before
        if one.quoted and one.protocol in _PROBES and (one.encoder, one.about) == (ours.encoder, ours.about)
    }
    best = max(found, key=found.__getitem__, default="")
    if not best or not ours.value < found[best] <= 1:
        return ""
    return (
        f"On these test {ours.noun} the frozen encoder was ahead: {ours.number(found[best])} by {best}, "
        f"{ours.number()} fine-tuned. Take the probe, or fine-tune with more labels or a lower --blr."
    )
