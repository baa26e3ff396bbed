"""Key numbers of a run with their intervals and controls."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.look.charts import curve_of
from patchloom.look.run_curves import PROTOCOL_TITLES
from patchloom.report.load_run import RunData
from patchloom.report.page import Number, Quantity, Table
from patchloom.results.claims import OF_TEACHER, Claim, Difference
from patchloom.system.files import read_text

# settings of a result that are always displayed, with their templates
_DISPLAYED = {
    "k": "{} neighbours",
    "per_class": "{} labels per class",
    "labels": "labels: {}",
    "epochs": "{} epochs",
    "recipe": "recipe {}",
    "head": "head {}",
    "head_on": "head on {}",
    "count": "{} blocks",
    "network": "{}",
    "test_crop": "test crop {}",
}
# results that an evaluation wrote among its settings; all others were set by the user
_FOUND = {
    *("l2", "held_out", "held_out_accuracy", "best_epoch", "best_step"),
    *("validation_accuracy", "validation_score", "validation_images", "agreement"),
}
_CHOSEN = "held_out_accuracy"  # rows with it were selected on held-out training images
_WITHOUT_LABELS = ("positions", "position-sensitivity", "label-free")  # protocols that need no labels
_OTHERS = ("from scratch", "ensemble")  # names in a first row that are not the run's
_LARGEST = 1.0  # value of a fraction
_MEASURED = {"knn": "kNN accuracy", "instance_knn": "kNN accuracy, instance"}  # columns of metrics.csv


def differences_of(cell: str | None) -> tuple[Difference, ...]:
    return ()


_NUMERIC = ("value", "low", "high", "n_test")
_WORDS = ("protocol", "encoder", "pooling", "settings", "data", "data_fingerprint", "date", "seed", "quoted")

QuotedRows = list[Mapping[str, str]]  # of one evaluation


def key_numbers(run: RunData) -> list[Number]:
    """Return the run's held-out measure, then the newest quoted result of each protocol and dataset, with controls.

    An unfinished run without a quoted kNN accuracy has the last one measured during training instead.
    """
    noun = run.modality.noun
    quoted = _reports(run)
    interim = [] if run.finished or any(one[-1][0]["protocol"] == "knn" for one in quoted) else _interim(run)
    found = [_quoted(reports, label, noun) for reports, label in zip(quoted, _labels(quoted), strict=True)]
    return [*_own(run), *interim, *found]


def gains_of(run: RunData) -> Table | None:
    """Return the stored differences from all controls, with the verdict on each; None without any.

    Scores are means over the seeds that a difference covers.
    """
    quoted = _reports(run)
    rows: list[tuple[str, ...]] = []
    claims: list[Claim] = []
    for reports, label in zip(quoted, _labels(quoted), strict=True):
        for place, row in enumerate(reports[-1]):
            for one in differences_of(row.get("against")):
                seeds = [report for report in reports[-max(1, one.trainings) :] if len(report) == len(reports[-1])]
                ours, theirs = _mean(seeds, place), _control(seeds, place, one)
                each = [Quantity(value, _is_share(row)).text() for value in (ours, theirs) if value is not None]
                rows.append((label, each[0], one.control, "".join(each[1:]), _apart_by(one), one.short()))
                claims.append(one.claim)
    if not rows:
        return None
    heading = ("measure", "this run", "control", "its score", "difference", "verdict")
    return Table("Difference from each control, with its 95 % interval", heading, rows, _counted(claims))


def _apart_by(one: Difference) -> str:
    """Format a difference, without an interval if there are too few images for one."""
    if one.claim is Claim.APART:
        return ""
    unit = "" if one.unit == "%" else f" {one.unit}"
    amount = f"{one.amount(one.value)}{unit}"
    return amount if one.claim is Claim.FEW else f"{amount} {one.interval()}"


def _counted(claims: Sequence[Claim]) -> str:
    """Return a sentence that counts the verdicts."""
    better, worse = (claims.count(one) for one in (Claim.BETTER, Claim.WORSE))
    rest = len(claims) - better - worse
    comparisons = f"{len(claims):,} comparison{'s' * (len(claims) != 1)}"
    if rest == len(claims):
        return f"{comparisons} and no claim: the encoder is shown to be neither better nor worse than a control."
    sentence = f"Of {comparisons}, the encoder is better in {better or 'none'} and worse in {worse or 'none'}"
    return f"{sentence}; no claim is made in {rest}." if rest else f"{sentence}."


def _mean(reports: Sequence[QuotedRows], place: int) -> float:
    return sum(float(report[place]["value"]) for report in reports) / len(reports)


def _control(reports: Sequence[QuotedRows], place: int, one: Difference) -> float | None:
    """Return the control's score, from the row that matches the difference; None if it is not quoted."""
    ours, newest = _mean(reports, place), reports[-1]
    found = [_mean(reports, i) for i, row in enumerate(newest) if i != place and row["encoder"] == one.control]
    return min(found, key=lambda value: abs(ours - value - one.value), default=None)


def _labels(quoted: Sequence[Sequence[QuotedRows]]) -> list[str]:
    """Return a label for each evaluation; settings are appended where titles coincide."""
    found = [_title(reports[-1][0]) for reports in quoted]
    alike: dict[str, list[int]] = {}
    for i, label in enumerate(found):
        alike.setdefault(label, []).append(i)
    for label, places in alike.items():
        if len(places) > 1:
            for i, how in zip(places, _distinguishing_settings([quoted[i][-1][0] for i in places]), strict=True):
                found[i] = f"{label}, {how}"
    return found


def results_of(run: RunData) -> list[Table]:
    """Return the rows behind `key_numbers` as a table; [] without any.

    Columns with the same value in all rows, such as the data, move to the title.
    """
    rows = [row for reports in _reports(run) for row in reports[-1]]
    if not rows:
        return []
    cells = [
        {
            "encoder": row["encoder"], "value": _quantity(row).text(), "95 % interval": _quantity(row).interval(),
            "measure": _title(row),
            "settings": _settings(row), "data": row["data"], "seed": row["seed"],
            "tested": f"{int(float(row['n_test'])):,}", "date": row["date"][:10],
        }
        for row in rows
    ]  # fmt: skip
    same = [name for name in ("data", "seed", "tested", "date") if len({row[name] for row in cells}) == 1]
    heading = [name for name in cells[0] if name not in same]
    title = ", ".join(f"{name} {cells[0][name]}" for name in same)
    note = "The newest quoted results of each evaluation; all rows are in results.csv."
    title = f"Results: {title}" if title else "Results"
    return [Table(title, heading, [[row[name] for name in heading] for row in cells], note)]


def has_labelled_results(run: RunData) -> bool:
    """Return whether a result that needs labels is quoted, such as kNN."""
    quoted = _reports(run)
    return any(reports[-1][0]["protocol"] not in _WITHOUT_LABELS for reports in quoted)


def _own(run: RunData) -> list[Number]:
    """Return the last held-out measure; [] before the first."""
    epochs, values = curve_of(run.metrics, "held_out")
    if not len(values):
        return []
    beside = []
    for name in run.metrics:
        _, found = curve_of(run.metrics, name) if name.startswith("baseline:") else (None, np.empty(0))
        if len(found):
            beside.append(Quantity(float(found[-1]), run.percent, name=name.removeprefix("baseline:")))
    count, doubt = len(run.data.get("held_out", ())), run.data.get("held_out_doubt", "")
    noun = run.modality.noun
    images = f"{count:,} held-out {noun}" if count else f"held-out {noun}"
    if doubt:
        seen = "that pre-trained weights may have seen"
        images = f"{count:,} {noun} {seen}" if count else f"{noun} {seen}"
    note = f"On {images}, after {_epochs(epochs[-1])}."
    return [Number(run.measure, Quantity(float(values[-1]), run.percent), beside, note)]


def _interim(run: RunData) -> list[Number]:
    """Return the last kNN accuracies measured during training, with their controls; [] without any."""
    found = []
    for column, label in _MEASURED.items():
        epochs, values = curve_of(run.metrics, column)
        if not len(values):
            continue
        beside = []
        for name in run.metrics:
            _, control = curve_of(run.metrics, name) if name.startswith(f"{column}:") else (None, np.empty(0))
            if len(control):
                beside.append(Quantity(float(control[-1]), name=name.removeprefix(f"{column}:")))
        note = f"On held-out {run.modality.noun}, measured during training, after {_epochs(epochs[-1])}."
        found.append(Number(label, Quantity(float(values[-1])), beside, note))
    return found


def _epochs(count: float) -> str:
    return f"{count:.3g} epoch{'' if count == 1 else 's'}"


def _rows(path: Path) -> list[Mapping[str, str]]:
    """Read the rows of a ``results.csv`` and validate the quoted ones; [] without a file."""
    try:
        table = csv.DictReader(io.StringIO(read_text(path, newline="")))
        absent = [name for name in (*_WORDS, *_NUMERIC) if name not in (table.fieldnames or ())]
        if absent:
            raise ValueError(f"no column {', '.join(absent)}")
        rows: list[Mapping[str, str]] = list(table)
        for row in rows:
            if row["quoted"] == "True":
                _check(row)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, csv.Error, ValueError, RecursionError) as problem:
        raise ValueError(f"{path} could not be read ({problem}): its results are left out") from problem
    return rows


def _check(row: Mapping[str, str | None]) -> None:
    """Validate the cells of a row."""
    short = [name for name in (*_WORDS, *_NUMERIC) if row[name] is None]
    if short:
        raise ValueError(f"a row without {', '.join(short)}")
    differences_of(row.get("against"))
    for name in _NUMERIC:
        number = float(row[name] or "")
        if name == "n_test" and not number.is_integer():
            raise ValueError(f"n_test {row[name]} is not an integer")
    if not isinstance(json.loads(row["settings"] or ""), dict):
        raise ValueError(f"settings {row['settings']} are not a JSON object")


def _reports(run: RunData) -> list[list[QuotedRows]]:
    """Group reports by protocol, data and settings; each group has the newest report of each seed, the newest last."""
    reports: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in _rows(run.folder.path / "results.csv"):
        reports.setdefault(tuple(row[name] for name in ("protocol", "data", "date", "seed")), []).append(row)
    alike: dict[tuple[Any, ...], dict[str, QuotedRows]] = {}
    for report in reports.values():
        quoted = [row for row in report if row["quoted"] == "True"]
        if not quoted:
            continue
        first = (quoted := _with_current_name(quoted, run.name))[0]
        seeds = alike.setdefault((first["protocol"], first["data"], first["data_fingerprint"], _set(report)), {})
        seeds.pop(first["seed"], None)
        seeds[first["seed"]] = quoted
        if (ungrouped := _set(report, "group")) != _set(report):
            # the same comparison, judged over images as if each told something of its own
            alike.pop((first["protocol"], first["data"], first["data_fingerprint"], ungrouped), None)
    _join_seeds(alike)
    return [list(seeds.values()) for seeds in alike.values() if seeds]


def _join_seeds(alike: Mapping[tuple[Any, ...], dict[str, QuotedRows]]) -> None:
    """Merge the seeds that a difference covers if each seed drew its own test split."""
    for (protocol, data, fingerprint, chosen), seeds in alike.items():
        if not seeds:
            continue
        seed, newest = [*seeds.items()][-1]
        trainings = max((one.trainings for row in newest for one in differences_of(row.get("against"))), default=1)
        if trainings < 2 or not seed.isdecimal():
            continue
        for key, others in alike.items():
            if key[:2] == (protocol, data) and key[2] != fingerprint and key[3] == chosen:
                # --seeds uses consecutive seeds
                before = [one for one in others if one.isdecimal() and 0 < int(seed) - int(one) < trainings]
                seeds |= {one: others.pop(one) for one in before if one not in seeds}
        seeds[seed] = seeds.pop(seed)  # the newest is the last


def _with_current_name(quoted: QuotedRows, name: str) -> QuotedRows:
    """Return the rows with the run's current name: its folder may have been renamed after the evaluation."""
    before = quoted[0]["encoder"]  # the encoder's row is the first one
    if before in _OTHERS:
        return quoted
    teacher = OF_TEACHER if before.endswith(OF_TEACHER) else ""
    _, step, reached = before.removesuffix(teacher).partition(" (step ")
    now = f"{name}{step}{reached}{teacher}"
    return [{**row, "encoder": now} if row["encoder"] == before else row for row in quoted]


def _set(report: Sequence[Mapping[str, str]], without: str = "") -> frozenset[tuple[str, str]]:
    """Return the settings of an evaluation in a form that can be compared, perhaps ``without`` one of them.

    The quoted rows suffice, unless they were selected: seeds may select different ones of the same candidates.
    """
    quoted = [row for row in report if row["quoted"] == "True"]
    chosen = any(_CHOSEN in json.loads(row["settings"]) for row in quoted)
    return frozenset(
        (
            row["pooling"] or "-",
            json.dumps({name: one for name, one in _were_set(row).items() if name != without}, sort_keys=True),
        )
        for row in (report if chosen else quoted)
    )


def _were_set(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a row without the results among them."""
    try:
        settings = json.loads(row["settings"] or "")
    except (TypeError, ValueError):  # an unquoted row may be damaged
        return {}
    if not isinstance(settings, dict):
        return {}
    chosen = {"blr", "lr"} if _CHOSEN in settings else set[str]()
    return {name: value for name, value in settings.items() if name not in _FOUND | chosen}


def _distinguishing_settings(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Describe the settings that distinguish results of the same title."""
    each = [_were_set(row) for row in rows]
    hidden = (name for settings in each for name in settings if name not in _DISPLAYED and name != "measure")
    every = dict.fromkeys(hidden)
    names = [name for name in every if len({json.dumps(settings.get(name)) for settings in each}) > 1]
    return [
        ", ".join(
            filter(
                None,
                [
                    _settings(row),
                    *(f"{name.replace('_', ' ')} {settings[name]}" for name in names if name in settings),
                    f"on {row['data']}",
                ],
            )
        )
        for row, settings in zip(rows, each, strict=True)
    ]


def _quoted(reports: Sequence[QuotedRows], label: str, noun: str) -> Number:
    """Return a key number from the quoted rows of the newest seed: the encoder's row first, then its controls."""
    first, *controls = reports[-1]
    settings, several = _settings(first), len({row["encoder"] for row in controls}) < len(controls)
    beside = []
    for row in controls:
        name = (
            f"{row['encoder']}, {_settings(row)}" if several or row["encoder"] == first["encoder"] else row["encoder"]
        )
        beside.append(_quantity(row, name))
    note = f"{settings}{'; ' if settings else ''}on {int(float(first['n_test'])):,} test {noun} of {first['data']}."
    if len(reports) > 1:
        each = ", ".join(_quantity(report[0]).text() for report in reports)
        note += f" Results of seeds {', '.join(report[0]['seed'] for report in reports)}: {each}."
    note = " ".join([note, *(one.sentence() for row in reports[-1] for one in differences_of(row.get("against")))])
    return Number(label, _quantity(first), beside, f"{note[0].upper()}{note[1:]}")


def _title(row: Mapping[str, str]) -> str:
    named = PROTOCOL_TITLES.get(row["protocol"], row["protocol"])
    measure = json.loads(row["settings"]).get("measure")
    return f"{named}, {measure}" if measure else named


def _settings(row: Mapping[str, str]) -> str:
    settings = json.loads(row["settings"])
    texts = [words.format(settings[name]) for name, words in _DISPLAYED.items() if settings.get(name) is not None]
    return ", ".join([*texts, f"{row['pooling']} tokens"] if row["pooling"] not in ("-", "") else texts)


def _is_share(row: Mapping[str, str]) -> bool:
    if row.get("unit"):
        return row["unit"] == "%"
    # rows of older versions have no units; distances and ranks are recognised by the name of the measure
    measure = str(json.loads(row["settings"]).get("measure", ""))
    return "distance" not in measure and "rank" not in measure and abs(float(row["value"])) <= _LARGEST


def _quantity(row: Mapping[str, str], name: str = "") -> Quantity:
    """Return the value of a row, without an interval if it is exact."""
    low, high = float(row["low"]), float(row["high"])
    exact = low == high or not (math.isfinite(low) and math.isfinite(high))
    return Quantity(float(row["value"]), _is_share(row), None if exact else low, None if exact else high, name)
