"""Key numbers of a run with their intervals, beside their controls."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.claims import Claim, Difference
from patchloom.evaluate.results import differences_of
from patchloom.look.charts import curve_of
from patchloom.look.run_curves import PROTOCOL_TITLES
from patchloom.report.load_run import RunData
from patchloom.report.page import Number, Quantity, Table

# of a result's settings, what a reader has to know of it, and how that is said
_TOLD = {
    "k": "{} neighbours",
    "per_class": "{} labels a class",
    "labels": "labels: {}",
    "epochs": "{} epochs",
    "recipe": "recipe {}",
    "head": "head {}",
    "head_on": "head on {}",
    "count": "{} blocks",
}
# what an evaluation found and wrote among its settings; the rest was set
_FOUND = {
    *("l2", "held_out", "held_out_accuracy", "best_epoch", "best_step"),
    *("validation_accuracy", "validation_score", "validation_images", "agreement"),
}
_CHOSEN = "held_out_accuracy"  # where a row has it, what is quoted was chosen on held-out training images
_WITHOUT_LABELS = ("positions", "position-sensitivity", "label-free")  # protocols that need none
_OTHERS = ("from scratch", "ensemble")  # names in a first row that are not the run's
_LARGEST = 1.0  # share
_MEASURED = {"knn": "kNN accuracy", "instance_knn": "kNN accuracy, instance"}  # columns of metrics.csv

_NUMERIC = ("value", "low", "high", "n_test")
_WORDS = ("protocol", "encoder", "pooling", "settings", "data", "data_fingerprint", "date", "seed", "quoted")

QuotedRows = list[Mapping[str, str]]  # of one evaluation


def key_numbers(run: RunData) -> list[Number]:
    """The run's own measure beside its baselines, then the newest quoted result of each protocol on each data.

    A run that is not finished has no quoted kNN accuracy yet, and the last one that was measured on the way instead.
    """
    noun = run.modality.noun
    quoted = _reports(run)
    on_the_way = [] if run.finished or any(one[-1][0]["protocol"] == "knn" for one in quoted) else _on_the_way(run)
    found = [_quoted(reports, label, noun) for reports, label in zip(quoted, _labels(quoted), strict=True)]
    return [*_own(run), *on_the_way, *found]


def gains_of(run: RunData) -> Table | None:
    """Return the differences from all controls that evaluations stored, with what each allows to say; None without any.

    Of several seeds, scores are means over those that the difference is of.
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
    """The difference; without an interval if there are too few images for one."""
    if one.claim is Claim.APART:
        return ""
    unit = "" if one.unit == "%" else f" {one.unit}"
    amount = f"{one.amount(one.value)}{unit}"
    return amount if one.claim is Claim.FEW else f"{amount} {one.interval()}"


def _counted(claims: Sequence[Claim]) -> str:
    """A sentence on all comparisons together."""
    better, worse = (claims.count(one) for one in (Claim.BETTER, Claim.WORSE))
    rest = len(claims) - better - worse
    comparisons = f"{len(claims):,} comparison{'s' * (len(claims) != 1)}"
    if rest == len(claims):
        return f"{comparisons} and no claim: the encoder is shown to be neither better nor worse than a control."
    said = f"Of {comparisons}, the encoder is better in {better or 'none'} and worse in {worse or 'none'}"
    return f"{said}; no claim is made in {rest}." if rest else f"{said}."


def _mean(reports: Sequence[QuotedRows], place: int) -> float:
    return sum(float(report[place]["value"]) for report in reports) / len(reports)


def _control(reports: Sequence[QuotedRows], place: int, one: Difference) -> float | None:
    """The control's score: of several rows of its name, the one at that difference; None if it is not quoted."""
    ours, newest = _mean(reports, place), reports[-1]
    found = [_mean(reports, i) for i, row in enumerate(newest) if i != place and row["encoder"] == one.control]
    return min(found, key=lambda value: abs(ours - value - one.value), default=None)


def _labels(quoted: Sequence[Sequence[QuotedRows]]) -> list[str]:
    """What was measured by each evaluation; those of one title are told apart by their settings."""
    found = [_title(reports[-1][0]) for reports in quoted]
    alike: dict[str, list[int]] = {}
    for i, label in enumerate(found):
        alike.setdefault(label, []).append(i)
    for label, places in alike.items():
        if len(places) > 1:
            for i, how in zip(places, _apart([quoted[i][-1][0] for i in places]), strict=True):
                found[i] = f"{label}, {how}"
    return found


def results_of(run: RunData) -> list[Table]:
    """The rows of which `key_numbers` tells, one by one; [] without any.

    What is the same in all rows, such as the data, is in the title instead of a column.
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
    note = "What evaluations quote, the newest of each; results.csv has all rows."
    title = f"Results: {title}" if title else "Results"
    return [Table(title, heading, [[row[name] for name in heading] for row in cells], note)]


def has_labelled_results(run: RunData) -> bool:
    """Whether a result of images with labels is quoted, such as kNN."""
    quoted = _reports(run)
    return any(reports[-1][0]["protocol"] not in _WITHOUT_LABELS for reports in quoted)


def _own(run: RunData) -> list[Number]:
    """The last held-out measure; [] before the first."""
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
        images = f"{count:,} {noun} that the weights may know" if count else f"{noun} that the weights may know"
    note = f"On {images}, after {_epochs(epochs[-1])}."
    return [Number(run.measure, Quantity(float(values[-1]), run.percent), beside, note)]


def _on_the_way(run: RunData) -> list[Number]:
    """The accuracies of nearest neighbours as they were measured last, beside their controls; [] without any."""
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
        note = f"On held-out {run.modality.noun}, measured on the way, after {_epochs(epochs[-1])}."
        found.append(Number(label, Quantity(float(values[-1])), beside, note))
    return found


def _epochs(count: float) -> str:
    return f"{count:.3g} epoch{'' if count == 1 else 's'}"


def _rows(path: Path) -> list[Mapping[str, str]]:
    """The rows of a ``results.csv``, as they stand, of which the quoted ones are whole; [] without one."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            absent = [name for name in (*_WORDS, *_NUMERIC) if name not in (table.fieldnames or ())]
            if absent:
                raise ValueError(f"no column {', '.join(absent)}")
            rows: list[Mapping[str, str]] = list(table)
        for row in rows:
            if row["quoted"] == "True":
                _check(row)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as problem:
        raise ValueError(f"{path} could not be read ({problem}): its results are left out") from problem
    return rows


def _check(row: Mapping[str, str | None]) -> None:
    """That a row has all of what is read of it."""
    short = [name for name in (*_WORDS, *_NUMERIC) if row[name] is None]
    if short:
        raise ValueError(f"a row without {', '.join(short)}")
    differences_of(row.get("against"))
    for name in _NUMERIC:
        number = float(row[name] or "")
        if name == "n_test" and not number.is_integer():
            raise ValueError(f"n_test {row[name]} is no number of images")
    if not isinstance(json.loads(row["settings"] or ""), dict):
        raise ValueError(f"settings {row['settings']} are no names with values")


def _reports(run: RunData) -> list[list[QuotedRows]]:
    """Reports of which one number is told: of one protocol, data and all settings, one of each seed, the newest
    last.
    """
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
    _join_seeds(alike)
    return [list(seeds.values()) for seeds in alike.values() if seeds]


def _join_seeds(alike: Mapping[tuple[Any, ...], dict[str, QuotedRows]]) -> None:
    """Move the seeds of a difference over several to its newest, where each seed drew a test split of its own."""
    for (protocol, data, fingerprint, chosen), seeds in alike.items():
        if not seeds:
            continue
        seed, newest = [*seeds.items()][-1]
        trainings = max((one.trainings for row in newest for one in differences_of(row.get("against"))), default=1)
        if trainings < 2 or not seed.isdecimal():
            continue
        for key, others in alike.items():
            if key[:2] == (protocol, data) and key[2] != fingerprint and key[3] == chosen:
                # --seeds takes consecutive ones
                before = [one for one in others if one.isdecimal() and 0 < int(seed) - int(one) < trainings]
                seeds |= {one: others.pop(one) for one in before if one not in seeds}
        seeds[seed] = seeds.pop(seed)  # the newest is the last


def _with_current_name(quoted: QuotedRows, name: str) -> QuotedRows:
    """The rows with the run's current name: its folder may have been renamed after the evaluation."""
    before = quoted[0]["encoder"]  # the encoder's row is the first one
    if before in _OTHERS:
        return quoted
    _, step, reached = before.partition(" (step ")
    return [{**row, "encoder": f"{name}{step}{reached}"} if row["encoder"] == before else row for row in quoted]


def _set(report: Sequence[Mapping[str, str]]) -> frozenset[tuple[str, str]]:
    """All that was set for an evaluation, to compare it with another one.

    What it quotes is enough, unless that was chosen: seeds may choose differently among the same candidates.
    """
    quoted = [row for row in report if row["quoted"] == "True"]
    chosen = any(_CHOSEN in json.loads(row["settings"]) for row in quoted)
    return frozenset(
        (row["pooling"] or "-", json.dumps(_were_set(row), sort_keys=True)) for row in (report if chosen else quoted)
    )


def _were_set(row: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a row without what the evaluation found."""
    try:
        settings = json.loads(row["settings"] or "")
    except (TypeError, ValueError):  # a row that is not quoted may be damaged
        return {}
    if not isinstance(settings, dict):
        return {}
    chosen = {"blr", "lr"} if _CHOSEN in settings else set[str]()
    return {name: value for name, value in settings.items() if name not in _FOUND | chosen}


def _apart(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """What tells results of one title apart: what every card tells, and whatever else was set differently."""
    each = [_were_set(row) for row in rows]
    every = dict.fromkeys(name for settings in each for name in settings if name not in _TOLD and name != "measure")
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
    """A number of the quoted rows of reports: the encoder's first, then what it stands beside; the newest seed's."""
    first, *controls = reports[-1]
    told, several = _settings(first), len({row["encoder"] for row in controls}) < len(controls)
    beside = []
    for row in controls:
        name = (
            f"{row['encoder']}, {_settings(row)}" if several or row["encoder"] == first["encoder"] else row["encoder"]
        )
        beside.append(_quantity(row, name))
    note = f"{told}{'; ' if told else ''}on {int(float(first['n_test'])):,} test {noun} of {first['data']}."
    if len(reports) > 1:
        each = ", ".join(_quantity(report[0]).text() for report in reports)
        note += f" Seeds {', '.join(report[0]['seed'] for report in reports)} gave {each}."
    note = " ".join([note, *(one.sentence() for row in reports[-1] for one in differences_of(row.get("against")))])
    return Number(label, _quantity(first), beside, f"{note[0].upper()}{note[1:]}")


def _title(row: Mapping[str, str]) -> str:
    named = PROTOCOL_TITLES.get(row["protocol"], row["protocol"])
    measure = json.loads(row["settings"]).get("measure")
    return f"{named}, {measure}" if measure else named


def _settings(row: Mapping[str, str]) -> str:
    settings = json.loads(row["settings"])
    said = [words.format(settings[name]) for name, words in _TOLD.items() if settings.get(name) is not None]
    return ", ".join([*said, f"{row['pooling']} tokens"] if row["pooling"] not in ("-", "") else said)


def _is_share(row: Mapping[str, str]) -> bool:
    if row.get("unit"):
        return row["unit"] == "%"
    # an older version's rows have no units: of distances, in which positions are measured, the measure says so
    measure = str(json.loads(row["settings"]).get("measure", ""))
    return "distance" not in measure and "rank" not in measure and abs(float(row["value"])) <= _LARGEST


def _quantity(row: Mapping[str, str], name: str = "") -> Quantity:
    """The value of a row; without an interval if it is exact."""
    low, high = float(row["low"]), float(row["high"])
    exact = low == high or not (math.isfinite(low) and math.isfinite(high))
    return Quantity(float(row["value"]), _is_share(row), None if exact else low, None if exact else high, name)
