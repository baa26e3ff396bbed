"""Key numbers, tables and charts of runs, from their results and the columns of ``metrics.csv``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from patchloom.data.sources.in_memory import evenly_spaced
from patchloom.look.charts import Line, Panel
from patchloom.look.run_curves import PROTOCOL_TITLES
from patchloom.report.page import Number, Table
from patchloom.report.results import ResultsTable, Row
from patchloom.results import store
from patchloom.results.claims import Claim, Difference
from patchloom.results.newest import settings_of
from patchloom.results.result import ACCURACY, Result
from patchloom.results.table import describe_settings, varying
from patchloom.runs.past import RunData


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
    claims = [difference.claim for *_, difference in found]
    better, worse = (claims.count(one) for one in (Claim.BETTER, Claim.WORSE))
    count, rest = f"{len(claims):,} comparison{'s' * (len(claims) != 1)}", len(claims) - better - worse
    note = f"Of {count}, the encoder is better in {better or 'none'} and worse in {worse or 'none'}"
    note += f"; no claim is made in {rest}." if rest else "."
    if rest == len(claims):
        note = f"{count} and no claim: the encoder is shown to be neither better nor worse than a control."
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
    number, claim = own.result.number, {Claim.NONE: "indistinguishable", Claim.BETTER: "better", Claim.WORSE: "worse"}
    verdict = f"no claim: {found.claim.value}"  # in few words; `Difference.sentence` has it in full
    if found.claim in claim:
        trainings = f" over {found.trainings} {'trainings' if found.trained else 'seeds'}" * (found.trainings > 1)
        verdict = f"{claim[found.claim]}{trainings}"
    verdict += f"; no better than always answering {found.constant}" if found.constant else ""
    return label, number(score), found.control, "" if theirs is None else number(theirs), apart, verdict


def _mean(row: Row, found: Difference) -> float:
    """Return the mean of a result over the seeds that a difference covers."""
    return fmean(one.value for one in row.each[-found.trainings :])


# Charts of one or several runs on common axes.


_POINTS = 400  # per line
_KNN = {
    "knn": ("kNN accuracy", "Nearest-neighbour classification of the encoder's features."),
    "instance_knn": (
        "kNN accuracy, instance",
        "Nearest-neighbour classification of the representation that the task trains.",
    ),
}
_SAME = 5e-4  # baselines of several runs that differ by less are drawn once
# columns without a chart, or with one already
_OTHER = ("step", "epoch", "images", "seconds", "lr", "loss", "held_out", "share", "loss_scale", *_KNN)


def charts_of(runs: Sequence[RunData]) -> list[Panel]:
    """Return charts of the losses, held-out measures and accuracies over epochs that at least one run has logged.

    Held-out measures of different names have a chart each. Losses of different tasks have different units and are
    divided by the first value that each run logged, as in `patchloom.look.run_curves.draw_run_curves`.
    """
    modalities = {(run.modality.noun, run.modality.values) for run in runs}
    noun, pixels = modalities.pop() if len(modalities) == 1 else ("images", "pixels")
    lines, title = _lines(runs, len(runs) == 1, "loss", "loss"), "training loss"
    note = "A loss that falls further does not mean that a run is better."
    if len({run.settings.task["name"] for run in runs}) > 1:
        title += ", relative to its start"
        note = "Each loss is divided by its first logged value, because tasks have losses in different units."
        lines = [line._replace(y=line.y / line.y[0]) for line in lines]
    elif len(runs) == 1:
        note = "The loss on training batches."
    charts = [Panel(title, note, lines)]
    for measure, unit in dict.fromkeys((run.measured.measure, run.measured.unit) for run in runs):
        some = [run for run in runs if (run.measured.measure, run.measured.unit) == (measure, unit)]
        note = f"On {noun} that are not used for training. Dashed: baselines that need no learning."
        charts.append(Panel(measure, note, _lines(some, len(runs) == 1, "held_out", measure), unit == "%"))
    galleries = " or ".join(f"{n:,}" for n in sorted({run.settings.knn_gallery for run in runs}))
    searched = f"Gallery: up to {galleries} training {noun}; test: the held-out {noun}."
    for name, (title, note) in _KNN.items():
        charts.append(Panel(title, f"{note} {searched}", _lines(runs, len(runs) == 1, name, title), True))
    for column in dict.fromkeys(name for run in runs for name in run.metrics):
        if column not in _OTHER and ":" not in column:
            # columns are named after pixels for recordings, too
            name = " ".join(pixels if word == "pixels" else word for word in column.split("_"))
            lines = _lines(runs, len(runs) == 1, column, name)
            charts.append(Panel(f"{name}, in training", f"On training {noun}.", lines, "accuracy" in column))
    return [chart for chart in charts if chart.lines]


def _lines(runs: Sequence[RunData], single: bool, column: str, name: str) -> list[Line]:
    """Return the lines of a column: those of the runs, or ``name`` for a ``single`` one, then those of baselines."""
    lines, beside = list[Line](), dict[tuple[str, int], Line]()
    for run in runs:
        curves = run.curves(column)
        if "" not in curves:
            continue
        epochs, values = curves.pop("")
        lines.append(_line(name if single else run.name, epochs, values))
        for kind, (x, y) in curves.items():
            flat = np.ptp(y) == 0
            if flat:  # it was measured once or never changed
                x, y = np.array([0.0, max(epochs.max(), x.max())]), y[[0, 0]]
            called = kind if len(runs) == 1 else f"{kind}, {run.name}"
            line = _line(called, x, y)._replace(dashed=True, kind=kind)
            # baselines of several runs that have the same name and nearly the same value, such as chance, are one
            key = (kind, round(line.y[0] / _SAME)) if flat else (called, 0)
            same = beside.get(key)
            if same is not None:
                line = same._replace(name=kind, x=max(same.x, line.x, key=lambda x: x[-1]))
            beside[key] = line
    return [*lines, *beside.values()]


def _line(name: str, x: np.ndarray, y: np.ndarray) -> Line:
    """Return a line of at most `_POINTS` evenly spaced points that include the last one."""
    some = evenly_spaced(len(x), _POINTS)
    # six digits are more than a reader can see, and halve the size of the page
    x, y = (np.array([float(f"{v:.6g}") for v in values[some]]) for values in (x, y))
    return Line(name, x, y)
