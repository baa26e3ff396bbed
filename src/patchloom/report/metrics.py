"""Key numbers of a run and their tables, from its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from patchloom.look.run_curves import PROTOCOL_TITLES
from patchloom.report.load_run import RunData
from patchloom.report.page import Number, Table
from patchloom.report.results import ResultsTable, Row
from patchloom.results import store
from patchloom.results.claims import Claim, Difference
from patchloom.results.newest import settings_of
from patchloom.results.result import ACCURACY, Result
from patchloom.results.table import describe_settings, varying


def key_numbers(run: RunData, groups: Sequence[Sequence[Row]]) -> list[Number]:
    """Return the run's held-out measure, then the result of each evaluation (`rows_of`) with its controls.

    An unfinished run without a quoted kNN accuracy has the last one measured during training instead.
    """
    noun, count = run.modality.noun, len(run.data.get("held_out", ()))
    many = f"{count:,} " if count else ""
    seen = f"{many}{noun} that pre-trained weights may have seen"
    images = seen if run.data.get("held_out_doubt") else f"{many}held-out {noun}"
    found = _logged(run, "held_out", run.measured, f"On {images}")
    if not run.finished and not any(rows[0].result.protocol == "knn" for rows in groups):
        for column, label in (("knn", "kNN accuracy"), ("instance_knn", "kNN accuracy, instance")):
            like = Result.exact(label, "", "", {}, 0.0)
            found += _logged(run, column, like, f"On held-out {noun}, measured during training")
    return [*found, *(_number(label, rows) for label, rows in zip(_labels(groups), groups, strict=True))]


def gains_of(groups: Sequence[Sequence[Row]]) -> Table | None:
    """Return the differences from all controls, with the claim about each; None without any.

    Scores are means over the seeds that a difference covers.
    """
    found = [
        (label, rows, row, difference)
        for label, rows in zip(_labels(groups), groups, strict=True)
        for row in rows
        for difference in row.result.against
    ]
    if not found:
        return None
    heading = ("measure", "this run", "control", "its score", "difference", "verdict")
    note = _count_claims([difference.claim for *_, difference in found])
    return Table("Difference from each control, with its 95 % interval", heading, [_gain(*one) for one in found], note)


def results_of(groups: Sequence[Sequence[Row]]) -> list[Table]:
    """Return the results behind `key_numbers` as a table, without the differences of `gains_of`; [] without any."""
    rows = [row._replace(result=replace(row.result, against=())) for rows in groups for row in rows]
    if not rows:
        return []
    found, dates = ResultsTable(rows), sorted(row.result.date[:10] for row in rows)
    table, measured = found.table(" ", once=False), " to ".join(dict.fromkeys((dates[0], dates[-1])))
    note = f"{found.remarks()} All results are in {store.FILE}."
    return [Table(f"Newest quoted results, of {measured}", table.heading, table.rows, note)]


def _title(row: Result) -> str:
    named = PROTOCOL_TITLES.get(row.protocol, row.protocol)
    return named if row.measure == ACCURACY else f"{named}, {row.measure}"


def _labels(groups: Sequence[Sequence[Row]]) -> list[str]:
    """Return the name of each measure, with settings and data if several evaluations have the same name."""
    firsts, labels = [rows[0].each[-1] for rows in groups], list[str]()
    for one in firsts:
        same = [other for other in firsts if _title(other) == _title(one)]
        said = [_title(one), *["from scratch"] * (one.encoder == "from scratch")]
        if len(same) > 1:
            said += [describe_settings(one, varying([settings_of(other) for other in same])), f"on {one.data}"]
        labels.append(", ".join(filter(None, said)))
    return labels


def _logged(run: RunData, column: str, like: Result, note: str) -> list[Number]:
    """Return the last value of a column of ``metrics.csv`` with its baselines; [] before the first."""
    curves = run.curves(column)
    if "" not in curves:
        return []
    ends = {name: float(values[-1]) for name, (_, values) in curves.items()}
    like = replace(like, noun=run.modality.noun, baselines=())
    own, *beside = (replace(like, encoder=name, value=end, low=end, high=end) for name, end in ends.items())
    epochs = float(curves[""][0][-1])
    return [Number(like.measure, own, beside, f"{note}, after {epochs:.3g} epoch{'s' * (epochs != 1)}.")]


def _number(label: str, rows: Sequence[Row]) -> Number:
    """Return the mean over seeds of a result with its controls; the note has the seeds and the claims."""
    first, *controls = those = [row.result for row in rows]
    differing = list[str]()
    if len({one.encoder for one in those}) < len(those):  # quoted with several settings
        differing = varying([settings_of(one) for one in those])
        names = [", ".join(filter(None, [one.encoder, describe_settings(one, differing)])) for one in controls]
        controls = [replace(one, encoder=name) for one, name in zip(controls, names, strict=True)]
    how = describe_settings(first, differing)
    said = [f"On {first.n:,} test {first.noun} of {first.data}{how and f', {how}'}."]
    if len(seeds := rows[0].each) > 1:
        each = ", ".join(one.number() for one in seeds)
        said.append(f"Mean of seeds {', '.join(str(one.seed) for one in seeds)}: {each}.")
    note = " ".join([*said, *(difference.sentence() for one in those for difference in one.against)])
    return Number(label, first, controls, note)


def _gain(label: str, rows: Sequence[Row], own: Row, found: Difference) -> tuple[str, ...]:
    """Return the line of a difference of one of the rows of an evaluation from a control."""
    # a control may be quoted with several settings
    controls = [_mean(row, found) for row in rows if row is not own and row.result.encoder == found.control]
    score = _mean(own, found)
    theirs = min(controls, key=lambda mean: abs(score - mean - found.value), default=None)
    unit = "" if found.unit == "%" else f" {found.unit}"
    apart = f"{found.amount(found.value)}{unit}" if found.n else ""
    apart += f" {found.interval()}" if found.claim not in (Claim.APART, Claim.FEW) else ""
    number = own.result.number
    return label, number(score), found.control, "" if theirs is None else number(theirs), apart, _verdict(found)


def _mean(row: Row, found: Difference) -> float:
    """Return the mean of a result over the seeds that a difference covers."""
    return fmean(one.value for one in row.each[-found.trainings :])


def _verdict(one: Difference) -> str:
    """Return the claim in few words; `Difference.sentence` has it in full."""
    said = {Claim.NONE: "indistinguishable", Claim.BETTER: "better", Claim.WORSE: "worse"}.get(one.claim)
    seeds = f" over {one.trainings} {'trainings' if one.trained else 'seeds'}" if one.trainings > 1 else ""
    constant = f"; no better than always answering {one.constant}" if one.constant else ""
    return (f"{said}{seeds}" if said else f"no claim: {one.claim.value}") + constant


def _count_claims(claims: Sequence[Claim]) -> str:
    """Return a sentence that counts the verdicts."""
    better, worse = (claims.count(one) for one in (Claim.BETTER, Claim.WORSE))
    count, rest = f"{len(claims):,} comparison{'s' * (len(claims) != 1)}", len(claims) - better - worse
    if rest == len(claims):
        return f"{count} and no claim: the encoder is shown to be neither better nor worse than a control."
    said = f"Of {count}, the encoder is better in {better or 'none'} and worse in {worse or 'none'}"
    return f"{said}; no claim is made in {rest}." if rest else f"{said}."
