"""What several runs hold that can be compared: their settings, their losses, and the results of their evaluations."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from patchloom.calls import PathLike
from patchloom.errors import PatchloomError
from patchloom.hints import listing, suggestion
from patchloom.look.curves import curve_of, read_metrics
from patchloom.runs.folder import RunFolder
from patchloom.runs.sealed import read_sealed
from patchloom.runs.settings import LAUNCH
from patchloom.sides import in_pixels

POSITIONS = "position-accuracy"
# in which runs may differ without being another experiment; the seed's are averaged
_MACHINE = {*LAUNCH, *"device workers threads cache attention kernels compile checkpointing".split()}
# what of a result's settings must be alike for two results to be compared; the others follow from the data
_ALIKE = ("recipe", "epochs", "k", "gallery", "labels", "per_class", "method", "head_on", "ratio", "probe")
_AVERAGE = "average"  # a row's setting where it is the mean over all values of it
_ALONE = "from scratch"  # the encoder's name in a report that has only the control


class Result(NamedTuple):
    """A number of an encoder.

    Attributes:
        value: a share in [0, 1].
        control: the name of what it stands beside, "" if nothing does.
        beside: the control's number.
        how: on what and by what it was measured; only numbers of the same may be compared.
        date: when; "" if that is not known.
    """

    value: float
    control: str
    beside: float
    how: str
    date: str


class PastRow(NamedTuple):
    """A row of ``results.csv``."""

    encoder: str
    pooling: str
    settings: dict[str, Any]
    value: float
    is_quoted: bool
    data: str


@dataclass(frozen=True)
class PastReport:
    """An evaluation: its rows, of which the first that is quoted is the encoder's, and the second its control's."""

    protocol: str
    date: str
    seed: str
    rows: tuple[PastRow, ...]

    @cached_property
    def quoted(self) -> list[PastRow]:
        """The rows that its sentence quotes."""
        return [row for row in self.rows if row.is_quoted]

    def how(self, without: str = "") -> str:
        """Return on what and by what it was measured, but for the setting ``without``."""
        first = self.quoted[0]
        said = [
            f"{name.replace('_', ' ')} {first.settings[name]}"
            for name in _ALIKE
            if name in first.settings and name != without
        ]
        # that of the logistic regression is chosen, by no test image
        if "l2" not in first.settings and first.pooling != "-":
            said.append(f"pooling {first.pooling}")
        return ", ".join([first.data, *said])

    def at(self, setting: str) -> dict[Any, Result]:
        """Return results by the value of a setting: of the row that is quoted, and of those that differ in it alone.

        Where the quoted row is an average over another setting, so is each result.
        """
        quoted, *others = self.quoted
        control = others[0] if others else None
        given = [row.settings[setting] for row in self.rows if row.settings.get(setting, _AVERAGE) != _AVERAGE]
        found = {}
        for value in dict.fromkeys(map(_word, given)):
            mine = _mean_at(self.rows, quoted, setting, value)
            if mine is None:
                continue
            beside = None if control is None else _mean_at(self.rows, control, setting, value)
            if control is not None and beside is None:
                beside = control.value
            name = "" if control is None else control.encoder
            found[value] = Result(mine, name, float("nan") if beside is None else beside, self.how(setting), self.date)
        return found


def _mean_at(rows: Sequence[PastRow], like: PastRow, setting: str, value: Any) -> float | None:
    """Return the mean of the rows that differ from ``like`` in the setting alone, at a value of it; None of none."""

    def is_alike(row: PastRow) -> bool:
        same_kind = (row.encoder, row.pooling) == (like.encoder, like.pooling)
        return (
            same_kind
            and row.settings.keys() == like.settings.keys()
            and all(
                name == setting or row.settings[name] == kept or kept == _AVERAGE
                for name, kept in like.settings.items()
            )
        )

    alike = [row.value for row in rows if is_alike(row) and _word(row.settings.get(setting)) == value]
    return float(np.mean(alike)) if alike else None


@dataclass(frozen=True)
class PastRun:
    """A run that others are compared with.

    Attributes:
        path: its folder, as it was given.
        asked, became: its settings by dotted name, as the user asked for them, and with every ``auto`` resolved.
    """

    path: Path
    asked: dict[str, Any]
    became: dict[str, Any]

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Columns of its ``metrics.csv``."""
        return read_metrics(self.path / "metrics.csv")

    def losses(self) -> tuple[np.ndarray, np.ndarray]:
        """Epochs [n] and training losses [n].

        Raises:
            PatchloomError: it has logged none yet.
        """
        epochs, losses = curve_of(self.metrics, "loss")
        if len(losses):
            return epochs, losses
        raise PatchloomError(f"{self.path} has logged no loss yet: let it train first, or leave it out")

    @cached_property
    def results(self) -> dict[str, list[Result]]:
        """Its results by protocol, the newest of each seed; position accuracy is that on its held-out images."""
        found = {POSITIONS: self._positions()}
        for name, newest in self._evaluated().items():
            found[name] = list(newest.values())
        return {name: results for name, results in found.items() if results}

    def _positions(self) -> list[Result]:
        if not {"held_out", "baseline:chance"} <= self.metrics.keys():  # only where positions are asked is there chance
            return []
        values, chance = self.metrics["held_out"], self.metrics["baseline:chance"]
        known = np.flatnonzero(np.isfinite(values) & np.isfinite(chance))
        return [Result(float(values[i]), "chance", float(chance[i]), "held-out images", "") for i in known[-1:]]

    def _evaluated(self) -> dict[str, dict[tuple[str, str], Result]]:
        found: dict[str, dict[tuple[str, str], Result]] = {}
        for report in self.reports:
            first, *others = report.quoted
            control = others[0].encoder if others else ""
            beside = others[0].value if others else float("nan")
            result = Result(first.value, control, beside, report.how(), report.date)
            found.setdefault(report.protocol, {})[result.how, report.seed] = result
        return found

    @cached_property
    def reports(self) -> list[PastReport]:
        """Evaluations of its encoder, in the order in which they were made."""
        path = self.path / "results.csv"
        if not path.is_file():
            return []
        rows: dict[tuple[str, str, str], list[PastRow]] = {}
        try:
            with open(path, newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    one = PastRow(
                        row["encoder"], row["pooling"], json.loads(row["settings"]), float(row["value"]),
                        row["quoted"] == "True", row["data"],
                    )  # fmt: skip
                    rows.setdefault((row["protocol"], row["date"], row["seed"]), []).append(one)
        except (OSError, UnicodeDecodeError, csv.Error, ValueError, KeyError, TypeError) as problem:
            raise PatchloomError(
                f"{path} could not be read ({problem}): remove the line, or leave the run out"
            ) from None
        found = [PastReport(*of, tuple(each)) for of, each in rows.items()]
        return [one for one in found if one.quoted and one.quoted[0].encoder != _ALONE]


def read_runs(places: Sequence[PathLike], least: int = 2) -> list[PastRun]:
    """Several runs, each of which stands once.

    Raises:
        PatchloomError: a place is no run's folder, or is given twice, or there are less than ``least``.
    """
    runs = []
    for place in places:
        folder = RunFolder(Path(place))
        became = folder.read_config().plain()
        runs.append(PastRun(folder.path, _flat(read_sealed(folder.requested)), _flat(became)))
    real = [run.path.resolve() for run in runs]
    for run, place in zip(runs, real, strict=True):
        if real.count(place) > 1:
            raise PatchloomError(f"{run.path} is given twice: give each run once")
    if len(runs) < least:
        raise PatchloomError(
            "look curves compares two runs or more: give others, too; the curves of one are in its pictures/curves.png"
        )
    return runs


def setting_of(runs: Sequence[PastRun], name: str) -> tuple[str, list[Any]]:
    """A setting's whole name, and its value in each run.

    Raises:
        PatchloomError: a run has no such setting, or all have the same value.
    """
    known = list(dict.fromkeys(one for run in runs for one in run.became))
    full = next((one for one in (name, f"{name}.name", f"task.{name}", f"model.{name}") if one in known), None)
    if full is None:
        near = suggestion(name, [*known, *map(_short, known)])
        raise PatchloomError(
            f"--against {name} is no setting of these runs{near} Their config.yaml lists them, those of the task as in "
            "task.mask_ratio."
        )
    for run in runs:
        if full not in run.became:
            raise PatchloomError(f"{run.path} has no setting {full}: leave that run out, or choose another --against")
    values = [run.became[full] for run in runs]
    if all(value == values[0] for value in values):
        raise PatchloomError(
            f"all of these runs have {full} {values[0]}: give runs that differ in it, or choose another --against"
        )
    return full, values


def lines_of(runs: Sequence[PastRun], against: str) -> list[str]:
    """The line in which each run is, named by the other settings that differ; seeds are of one line.

    Where a setting is ``auto`` in all runs, what it became follows from the others, and is none of its own.
    """
    names = [
        name
        for name in dict.fromkeys(one for run in runs for one in run.became)
        if name not in _MACHINE and name not in ("seed", against) and _differs(runs, name)
    ]
    return [", ".join(f"{_short(name)} {run.became[name]}" for name in names if name in run.became) for run in runs]


def _differs(runs: Sequence[PastRun], name: str) -> bool:
    of_task = name.startswith("task.") and name != "task.name"
    having = [run for run in runs if name in run.became]
    for task in {run.became.get("task.name") if of_task else None for run in having}:
        same = [run for run in having if not of_task or run.became.get("task.name") == task]
        if all(len({str(values.get(name)) for values in part}) > 1 for part in _both(same)):
            return True
    return False


def _both(runs: Sequence[PastRun]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return [run.asked for run in runs], [run.became for run in runs]


def measured(runs: Sequence[PastRun], of: str) -> list[Result]:
    """One result of a kind for each run, all measured alike; over the seeds of an evaluation the mean.

    Raises:
        PatchloomError: a run has none, or they have none in common.
    """
    for run in runs:
        if of not in run.results:
            why = f"{run.path} has no {of} result (patchloom evaluate {of} {run.path} DATA makes one)"
            if of == POSITIONS:
                why = f"{run.path} has no position accuracy, since its task asks for no positions"
            raise PatchloomError(f"{why}: leave that run out, or choose another --of")
    ways = [{result.how: result.date for result in run.results[of]} for run in runs]
    common = [how for how in ways[0] if all(how in others for others in ways)]
    if not common:
        other = next((one for one in ways if ways[0].keys().isdisjoint(one)), ways[-1])
        raise PatchloomError(
            f"the {of} results of these runs were not measured alike, as by {_last(ways[0])} and by {_last(other)}: "
            "evaluate all of them on the same data with the same options"
        )
    how = max(common, key=lambda one: ways[0][one])
    found = []
    for run in runs:
        same = [result for result in run.results[of] if result.how == how]
        value, beside = (float(np.mean([getattr(one, name) for one in same])) for name in ("value", "beside"))
        found.append(same[-1]._replace(value=value, beside=beside))
    return found


def _last(ways: Mapping[str, str]) -> str:
    return max(ways, key=lambda how: ways[how])


def at_settings(runs: Sequence[PastRun], protocol: str, setting: str) -> list[dict[Any, Result]]:
    """Return of each run the results of a protocol by a setting of the evaluation, all measured alike but for it.

    Of several evaluations with the same value those of other seeds are averaged, and the newest of a seed counts.

    Raises:
        PatchloomError: a run has no such result, none has the setting, or all have the same value.
    """
    known = {report.protocol for run in runs for report in run.reports}
    if protocol not in known:
        there = f"they have {listing(sorted(known), 'and')}" if known else "they have none"
        raise PatchloomError(f"--against {protocol}.{setting}: these runs have no {protocol} results; {there}")
    found: list[dict[str, dict[Any, dict[str, Result]]]] = []
    for run in runs:
        reports = [report for report in run.reports if report.protocol == protocol]
        if not reports:
            raise PatchloomError(
                f"{run.path} has no {protocol} result: patchloom evaluate {protocol} {run.path} DATA makes one"
            )
        ways: dict[str, dict[Any, dict[str, Result]]] = {}
        for report in reports:
            for value, result in report.at(setting).items():
                ways.setdefault(result.how, {}).setdefault(value, {})[report.seed] = result
        if not ways:
            known = sorted({name for report in reports for name in report.quoted[0].settings})
            there = f"{suggestion(setting, known)} They have {', '.join(known)}." if known else "."
            raise PatchloomError(f"--against {protocol}.{setting}: {protocol} results of {run.path} have none{there}")
        found.append(ways)
    common = [how for how in found[0] if all(how in ways for ways in found)]
    if not common:
        one, other = next(iter(found[0])), next(iter(next(ways for ways in found if found[0].keys().isdisjoint(ways))))
        raise PatchloomError(
            f"the {protocol} results of these runs were not measured alike, as by {one} and by {other}: evaluate all "
            "of them on the same data with the same options"
        )

    def told(how: str) -> tuple[int, str]:
        of_all = [result for ways in found for seeds in ways[how].values() for result in seeds.values()]
        return len({value for ways in found for value in ways[how]}), max(result.date for result in of_all)

    how = max(common, key=told)
    if told(how)[0] < 2:
        (value,) = found[0][how]
        raise PatchloomError(
            f"all {protocol} results of these runs have {setting} {value}: evaluate with another one, as by patchloom "
            f"evaluate {protocol} {runs[0].path} DATA --{setting} ..."
        )
    means = []
    for ways in found:
        of_run = {}
        for value, seeds in ways[how].items():
            results = [*seeds.values()]
            mean, beside = (float(np.mean([getattr(one, name) for one in results])) for name in ("value", "beside"))
            of_run[value] = results[-1]._replace(value=mean, beside=beside)
        means.append(of_run)
    return means


def _short(name: str) -> str:
    return name.removeprefix("task.").removeprefix("model.") if not name.endswith(".name") else name.partition(".")[0]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name; options that are not given are left out, and what has several parts is in words."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": _word(inner) for key, inner in value.items() if inner is not None}
        else:
            found[name] = in_pixels(value) if name.endswith("_size") and isinstance(value, list) else _word(value)
    return found


def _word(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else json.dumps(value)
