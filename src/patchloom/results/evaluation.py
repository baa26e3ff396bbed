"""An evaluation: the results of a protocol and its controls, and how they are shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.display import Displayable, TextTable, Verbatim
from patchloom.results.claims import (
    CONSTANT,
    RAW,
    START,
    Claim,
    Difference,
    constant_remark,
    difference,
    difference_over_splits,
    raw_remark,
)
from patchloom.results.classes import MACRO_F1
from patchloom.results.result import ACCURACY, Result
from patchloom.results.table import (
    cell,
    choose_fitting_table,
    class_table,
    confusion_table,
    table_across,
    table_by_row,
)

_WIDE = 0.07  # half-width of an interval from which a sentence says that the images are few


def compare_results(ours: Sequence[Result], theirs: Sequence[Result], trained: bool) -> Difference:
    """Compare results of an encoder and of a control, one per seed, on the same images or on those of each seed."""
    noun, n = ours[-1].noun, min(one.n for one in (*ours, *theirs))
    about: dict[str, Any] = {"control": theirs[-1].encoder, "trained": trained, "noun": noun}
    if ours[-1].unit != "%":
        about |= {name: getattr(ours[-1], name) for name in ("unit", "digits", "higher_is_better")}
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
    return difference(one, two, groups=sides[0][0].groups, classes=sides[0][0].classes, **about)


def as_control(one: Result) -> str:
    """Return text such as "61.2 % untrained" for a headline."""
    called = {START: "at its start", CONSTANT: f"by always answering {one.settings.get('answer', '')}"}
    return f"{one.number()} {called.get(one.encoder, one.encoder)}"


def few_remark(one: Result) -> str:
    """Return a sentence if the test images are too few for the number; else ""."""
    if one.groups == 1 and math.isinf(one.low):
        return f"All test {one.noun} are in one group: others could have given anything."
    if one.unit != "%" or not max(one.high - one.value, one.value - one.low) > _WIDE:
        return ""
    few = f"{one.groups:,} test group{'s' * (one.groups != 1)}" if one.groups else f"{one.n:,} test {one.noun}"
    return f"Only {few}: others could have given anything from {one.number(one.low)} to {one.number(one.high)}."


def _mean(rows: Sequence[Result]) -> float:
    return sum(row.value for row in rows) / len(rows)


@dataclass(frozen=True)
class Drawing:
    """Picture that `protocols.evaluate` draws.

    Attributes:
        function: drawing function.
        out: output file.
        content: other arguments of the function.
    """

    function: Callable[..., Any]
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
        classes: names of the classes, if the results are those of `patchloom.results.classes.class_results`: then the
            table has the quoted measure and accuracy, and a second one the other measures of the quoted settings.
        beside: measures of the quoted settings whose differences from the controls stand beside those of the quoted
            one, in the conclusion and in the encoder's result.
        telling: measure that may show an encoder to be better than a constant answer; "": none but the quoted one.
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
    beside: tuple[str, ...] = ()
    telling: str = ""
    classes: tuple[str, ...] = ()

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
        said: list[str | TextTable] = [self.headline]
        if self.others:
            said.append(self.spread())
        said += [one for one in (few_remark(self.quoted[0]) if self.quoted else "", self.conclusion()) if one]
        if self.results:
            said += ["", self.table(width), ""]
        if self.results and self.classes:  # the measures of the quoted settings
            settings = [(one.encoder, one.settings) for one in self.quoted]
            rows = [one for one in self.results if (one.encoder, one.settings) in settings]
            said += [*class_table(rows, self.noun, width), ""]
            if matrix := next((one for one in rows if one.measure == MACRO_F1), None):
                said += [*confusion_table(matrix, self.classes), ""]
        said.append(self.method)
        return [*said, *(Verbatim(f"Picture: {drawing.out}") for drawing in self.drawings)]

    def plain(self) -> dict[str, Any]:
        return {
            "results": [one.plain() for one in self.results],
            "headline": self.headline,
            "conclusion": self.conclusion(),
            "method": self.method,
            "pictures": [str(drawing.out) for drawing in self.drawings],
            "other_seeds": [one.plain() for one in self.others],
        }

    def conclusion(self) -> str:
        """Return sentences on whether the encoder is better than its controls; "" without any.

        Then on encoders no better than a constant answer, and on raw pixels that are far better.
        """
        said, level = [one.sentence() for one in self.against], self._level_with_constant()
        for row in filter(None, (self._beside(self.quoted[0], measure) for measure in self.beside)):
            said += [one.sentence(error=row.measure) for one in row.against]
        if 0 in level:
            constant = self._by_seed(CONSTANT, self.quoted[0].measure)[-1]
            means = {i: self.quoted[i].number(_mean(self._quoted_by_seed(i))) for i in level}
            names = dict.fromkeys(f"{self.quoted[i].encoder} ({mean})" for i, mean in means.items())
            said.append(constant_remark([*names], constant.settings["answer"], constant.number()))
        elif self.quoted and self.telling:
            own, over = self.quoted[0], self._over_constant(0)
            first, found = over.get(own.measure), over.get(self.telling)
            if first and found and not first.exceeds and found.claim is Claim.BETTER:
                said.append(
                    f"By {self.telling}, {own.encoder} is {found.amount(found.value, '')} points better than a "
                    f"constant answer {found.interval()}, so something was learnt, though by {own.measure} that is "
                    f"not clear on {found.n:,} test {found.noun}."
                )
        one = self._beside(self.quoted[0], ACCURACY) if self.classes and self.quoted else None
        best = self._by_seed(CONSTANT, ACCURACY)[-1:]
        if one is not None and self.quoted[0].measure != ACCURACY and 0 not in level and best:
            if not compare_results([one], best, False).exceeds:
                said.append(
                    f"By accuracy alone, {one.encoder} ({one.number()}) would be no better than always answering "
                    f"{best[0].settings['answer']} ({best[0].number()})."
                )
        for i, one in enumerate(self.quoted):
            if one.encoder in RAW:
                said.append(raw_remark(compare_results(self._quoted_by_seed(0), self._quoted_by_seed(i), False)))
        return " ".join(filter(None, said))

    def _beside(self, quoted: Result, measure: str) -> Result | None:
        """Return the result of a quoted one's encoder and settings by another measure."""
        alike = (quoted.encoder, quoted.settings, measure)
        return next((one for one in self.results if (one.encoder, one.settings, one.measure) == alike), None)

    def _level_with_constant(self) -> list[int]:
        """Return the indices in ``quoted`` of results no better than the best constant answer by any measure."""
        found = enumerate(map(self._over_constant, range(len(self.quoted))))
        known = {i: over for i, over in found if self.quoted[i].measure in over}
        return [i for i, over in known.items() if not any(one.exceeds for one in over.values())]

    def _over_constant(self, i: int) -> dict[str, Difference]:
        """Return differences of a quoted result from the best constant answer, by its measure and the telling one.

        Those that are missing for a seed are left out.
        """
        own, found = self.quoted[i], dict[str, Difference]()
        for measure in filter(None, (own.measure, self.telling)):
            ours = self._quoted_by_seed(i) if measure == own.measure else self._by_seed(own.encoder, measure)
            constant = self._by_seed(CONSTANT, measure)
            if len(ours) == len(constant) == 1 + len(self.others):
                found[measure] = compare_results(ours, constant, False)
        return found

    def _by_seed(self, encoder: str, measure: str) -> list[Result]:
        """Return the first result of an encoder with a measure, of each seed that has one."""
        those = [
            [one for one in report.results if (one.encoder, one.measure) == (encoder, measure)]
            for report in (*self.others, self)
        ]
        return [found[0] for found in those if found]

    def _quoted_by_seed(self, i: int) -> list[Result]:
        return [report.quoted[i] for report in (*self.others, self)]

    def with_differences(self, trained: bool, *controls: int) -> Evaluation:
        """Return the evaluation with the encoder's differences from quoted results (default: all), over all seeds."""
        controls, own = controls or tuple(range(1, len(self.quoted))), self.quoted[0]
        level = 0 in self._level_with_constant()
        answer = self._by_seed(CONSTANT, own.measure)[-1].settings["answer"] if level else ""
        ours = self._quoted_by_seed(0)
        found = [compare_results(ours, self._quoted_by_seed(i), trained) for i in controls]
        against = {id(own): tuple(replace(one, constant=answer) for one in found)}
        for measure in self.beside:
            sides = [[one._beside(one.quoted[i], measure) for one in (*self.others, self)] for i in (0, *controls)]
            mine, *theirs = [[one for one in side if one is not None] for side in sides]
            against[id(mine[-1])] = tuple(compare_results(mine, side, trained) for side in theirs if side)
        changed = self._changed(lambda one: replace(one, against=against.get(id(one), one.against)))
        return replace(self, controls=controls, **changed)

    def with_setting(self, name: str, value: str) -> Evaluation:
        """Return the evaluation with a setting of all results, such as the groups of the split or the network."""
        return replace(self, **self._changed(lambda one: replace(one, settings={**one.settings, name: value})))

    def over_seeds(self, others: Sequence[Evaluation]) -> Evaluation:
        """Return the evaluation of the last of several seeds, with differences over all of them."""
        alike = list[Evaluation]()
        for one in others:  # their test images differ a little, and so may the measure that is quoted
            measure = self.quoted[0].measure
            if one.classes and one.quoted and one.quoted[0].measure != measure:
                quoted = tuple(one._beside(row, measure) or row for row in one.quoted)
                one = replace(one, quoted=quoted).with_differences(one.against[0].trained, *one.controls)
            alike.append(one)
        whole = replace(self, others=tuple(alike))
        return whole.with_differences(self.against[0].trained, *self.controls) if self.controls else whole

    def table(self, width: int) -> TextTable:
        """Return all results as a table that fits into ``width`` characters; of classifiers, see ``classes``."""
        how, forms, rows = (self.down, self.symbols, self.short), list[TextTable](), self.results
        if self.classes:
            shown = {ACCURACY, *(one.measure for one in self.quoted)}
            rows = [one for one in rows if one.measure in shown]
        if self.across == "measure" or any(self.across in row.settings for row in rows):
            forms = [table_across(rows, self.across, gap, *how) for gap in (" ", "\n")]
        return choose_fitting_table([*forms, table_by_row(rows)], width)

    def spread(self) -> str:
        """Return a sentence with mean and range of the quoted numbers over seeds."""
        by_seed = [self._quoted_by_seed(i) for i in range(len(self.quoted))]
        # an encoder may be quoted several times, and the quoted setting may differ between seeds
        where = [dict.fromkeys(filter(None, (cell(one, self.across) for one in rows))) for rows in by_seed]
        several, said = len({name for names in where for name in names}) > 1, list[str]()
        for rows, names in zip(by_seed, where, strict=True):
            values = [one.value for one in rows]
            mean, low, high = map(rows[-1].number, (_mean(rows), min(values), max(values)))
            name = f"{rows[-1].encoder}, {' or '.join(names)}" if several and names else rows[-1].encoder
            said.append(f"{name} {mean} ({low} to {high})")
        return f"Over {1 + len(self.others)} seeds, mean and range: {'; '.join(said)}."


_PROBES = ("knn", "linear")  # protocols on frozen features that a fine-tuned classifier is meant to beat


def frozen_ahead(before: Sequence[Result], tuned: Evaluation) -> str:
    """Return a sentence if a probe on the frozen encoder was ahead on the same test images; "" if none was.

    Args:
        before: results of earlier evaluations, with outcomes.
        tuned: evaluation of a fine-tuning.
    """
    ours = tuned.quoted[0]
    found = {
        one.protocol: one
        for one in before
        if one.quoted and one.protocol in _PROBES and (one.encoder, one.about) == (ours.encoder, ours.about)
    }
    best = max(found.values(), key=lambda one: one.value, default=ours)
    if not compare_results([best], [ours], trained=False).low > 0:
        return ""
    return (
        f"On these test {ours.noun} the frozen encoder was ahead: {best.number()} by {best.protocol}, {ours.number()} "
        "fine-tuned. Take the probe, or fine-tune with more labels or a lower --blr."
    )
