"""Plots of several runs: losses over epochs, or results against a setting in which the runs differ."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from patchloom.arguments import PathLike, validate_arguments
from patchloom.errors import PatchloomError, listing, suggestion
from patchloom.look.charts import (
    MARKED,
    PANEL_HEIGHT,
    PANEL_WIDTH,
    QUIET,
    STYLE,
    Panel,
    curve_of,
    frame_panel,
    smoothed_values,
    write_beside,
    write_figure,
    write_table,
)
from patchloom.runs.folder import RunFolder, read_metrics
from patchloom.runs.settings import LAUNCH
from patchloom.sizes import in_pixels
from patchloom.system.files import read_text

# Settings, losses and results of past runs.


POSITION_ACCURACY = "position-accuracy"
# settings that do not distinguish experiments; seeds are averaged
_MACHINE = {*LAUNCH, *"device workers threads cache crop_on attention kernels compile checkpointing".split()}
# settings of an evaluation that must be equal in compared results; the others follow from the data
_ALIKE = (
    *("recipe", "epochs", "k", "gallery", "labels", "per_class", "method", "head_on", "ratio", "probe"),
    *("test_crop", "last_norm", "network"),
)
_AVERAGE = "average"  # value of a setting in a row that is the mean over all its values
_ALONE = "from scratch"  # name of the encoder in a report with only the control


class EncoderResult(NamedTuple):
    """Result of an encoder.

    Attributes:
        value: a fraction in [0, 1].
        control: name of the control; "" without one.
        beside: value of the control.
        how: data and settings of the evaluation; only results with equal ones can be compared.
        date: date of the evaluation; "" if unknown.
    """

    value: float
    control: str
    beside: float
    how: str
    date: str


class PastRow(NamedTuple):
    """Row of ``results.csv``."""

    encoder: str
    pooling: str
    settings: dict[str, Any]
    value: float
    is_quoted: bool
    data: str


@dataclass(frozen=True)
class PastReport:
    """Evaluation: its rows. The first quoted row is the encoder's, the second its control's."""

    protocol: str
    date: str
    seed: str
    rows: tuple[PastRow, ...]

    @cached_property
    def quoted(self) -> list[PastRow]:
        """Quoted rows."""
        return [row for row in self.rows if row.is_quoted]

    def how(self, without: str = "") -> str:
        """Describe the data and settings of the evaluation except ``without``."""
        first = self.quoted[0]
        said = [
            f"{name.replace('_', ' ')} {first.settings[name]}"
            for name in _ALIKE
            if name in first.settings and name != without
        ]
        # the logistic regression selects its pooling without test images
        if "l2" not in first.settings and first.pooling != "-":
            said.append(f"pooling {first.pooling}")
        return ", ".join([first.data, *said])

    def at(self, setting: str) -> dict[Any, EncoderResult]:
        """Return results by the value of a setting, from the quoted row and the rows that differ only in it.

        If the quoted row is an average over another setting, so is each result.
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
            found[value] = EncoderResult(
                mine, name, float("nan") if beside is None else beside, self.how(setting), self.date
            )
        return found


def _mean_at(rows: Sequence[PastRow], like: PastRow, setting: str, value: Any) -> float | None:
    """Return the mean of the rows at a value of the setting that otherwise equal ``like``; None without any."""

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
    """Run to compare.

    Attributes:
        path: its folder, as given.
        asked, became: its settings by dotted name, as requested, and with every ``auto`` resolved.
    """

    path: Path
    asked: dict[str, Any]
    became: dict[str, Any]

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Columns of ``metrics.csv``."""
        return read_metrics(self.path / "metrics.csv")

    def losses(self) -> tuple[np.ndarray, np.ndarray]:
        """Return epochs [n] and training losses [n]."""
        epochs, losses = curve_of(self.metrics, "loss")
        if len(losses):
            return epochs, losses
        raise PatchloomError(f"{self.path} has logged no loss yet: let it train first, or leave it out")

    @cached_property
    def results(self) -> dict[str, list[EncoderResult]]:
        """Results by protocol, the newest of each seed; position accuracy is measured on the held-out images."""
        found = {POSITION_ACCURACY: self._positions()}
        for name, newest in self._evaluated().items():
            found[name] = list(newest.values())
        return {name: results for name, results in found.items() if results}

    def _positions(self) -> list[EncoderResult]:
        if not {"held_out", "baseline:chance"} <= self.metrics.keys():  # only tasks of positions have chance
            return []
        values, chance = self.metrics["held_out"], self.metrics["baseline:chance"]
        known = np.flatnonzero(np.isfinite(values) & np.isfinite(chance))
        return [EncoderResult(float(values[i]), "chance", float(chance[i]), "held-out images", "") for i in known[-1:]]

    def _evaluated(self) -> dict[str, dict[tuple[str, str], EncoderResult]]:
        found: dict[str, dict[tuple[str, str], EncoderResult]] = {}
        for report in self.reports:
            first, *others = report.quoted
            control = others[0].encoder if others else ""
            beside = others[0].value if others else float("nan")
            result = EncoderResult(first.value, control, beside, report.how(), report.date)
            found.setdefault(report.protocol, {})[result.how, report.seed] = result
        return found

    @cached_property
    def reports(self) -> list[PastReport]:
        """Evaluations of its encoder in chronological order."""
        path = self.path / "results.csv"
        if not os.path.lexists(path):
            return []
        rows: dict[tuple[str, str, str], list[PastRow]] = {}
        try:
            for row in csv.DictReader(io.StringIO(read_text(path, newline=""))):
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
    """Read several different runs."""
    runs = []
    for place in places:
        folder = RunFolder(Path(place))
        became = folder.read_config().plain()
        runs.append(PastRun(folder.path, _flat(folder.read_requested()), _flat(became)))
    real = [run.path.resolve() for run in runs]
    for run, place in zip(runs, real, strict=True):
        if real.count(place) > 1:
            raise PatchloomError(f"{run.path} is given twice: give each run once")
    if len(runs) < least:
        raise PatchloomError(
            "look curves compares two runs or more: give another; the curves of one run are in its pictures/curves.png"
        )
    return runs


def setting_of(runs: Sequence[PastRun], name: str) -> tuple[str, list[Any]]:
    """Return the full name of a setting and its value in each run."""
    known = list(dict.fromkeys(one for run in runs for one in run.became))
    full = next((one for one in (name, f"{name}.name", f"task.{name}", f"model.{name}") if one in known), None)
    if full is None:
        near = suggestion(name, [*known, *map(_short, known)])
        raise PatchloomError(
            f"--against {name} is not a setting of these runs{near} Their config.yaml lists all settings; those of the "
            "task are given as in task.mask_ratio."
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
    """Return the line of each run, named by the other settings that differ; seeds share a line.

    A setting that is ``auto`` in all runs follows from the others and is ignored.
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


def comparable_results(runs: Sequence[PastRun], of: str) -> list[EncoderResult]:
    """Return one result of a kind for each run, all measured in the same way and averaged over evaluation seeds."""
    for run in runs:
        if of not in run.results:
            why = f"{run.path} has no {of} result (patchloom evaluate {of} {run.path} DATA makes one)"
            if of == POSITION_ACCURACY:
                why = f"{run.path} has no position accuracy, because its task does not predict positions"
            raise PatchloomError(f"{why}: leave that run out, or choose another --of")
    ways = [{result.how: result.date for result in run.results[of]} for run in runs]
    common = [how for how in ways[0] if all(how in others for others in ways)]
    if not common:
        other = next((one for one in ways if ways[0].keys().isdisjoint(one)), ways[-1])
        raise PatchloomError(
            f"the {of} results of these runs were not measured in the same way ({_last(ways[0])}; {_last(other)}): "
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


def at_settings(runs: Sequence[PastRun], protocol: str, setting: str) -> list[dict[Any, EncoderResult]]:
    """Return each run's results of a protocol by a setting of the evaluation, otherwise measured in the same way.

    Seeds are averaged; the newest evaluation of each seed counts.
    """
    known = {report.protocol for run in runs for report in run.reports}
    if protocol not in known:
        there = f"they have {listing(sorted(known), 'and')}" if known else "they have none"
        raise PatchloomError(f"--against {protocol}.{setting}: these runs have no {protocol} results; {there}")
    found: list[dict[str, dict[Any, dict[str, EncoderResult]]]] = []
    for run in runs:
        reports = [report for report in run.reports if report.protocol == protocol]
        if not reports:
            raise PatchloomError(
                f"{run.path} has no {protocol} result: patchloom evaluate {protocol} {run.path} DATA makes one"
            )
        ways: dict[str, dict[Any, dict[str, EncoderResult]]] = {}
        for report in reports:
            for value, result in report.at(setting).items():
                ways.setdefault(result.how, {}).setdefault(value, {})[report.seed] = result
        if not ways:
            names = sorted({name for report in reports for name in report.quoted[0].settings})
            there = f"{suggestion(setting, names)} They have {', '.join(names)}." if names else "."
            raise PatchloomError(f"--against {protocol}.{setting}: {protocol} results of {run.path} have none{there}")
        found.append(ways)
    common = [how for how in found[0] if all(how in ways for ways in found)]
    if not common:
        one, other = next(iter(found[0])), next(iter(next(ways for ways in found if found[0].keys().isdisjoint(ways))))
        raise PatchloomError(
            f"the {protocol} results of these runs were not measured in the same way ({one}; {other}): evaluate all "
            "of them on the same data with the same options"
        )

    def values_and_date(how: str) -> tuple[int, str]:
        of_all = [result for ways in found for seeds in ways[how].values() for result in seeds.values()]
        return len({value for ways in found for value in ways[how]}), max(result.date for result in of_all)

    how = max(common, key=values_and_date)
    if values_and_date(how)[0] < 2:
        (value,) = found[0][how]
        raise PatchloomError(
            f"all {protocol} results of these runs have {setting} {value}: evaluate with another value, as in "
            f"patchloom evaluate {protocol} {runs[0].path} DATA --{setting} ..."
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
    """Flatten settings to dotted names; unset options are left out, and compound values become text."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": _word(inner) for key, inner in value.items() if inner is not None}
        else:
            found[name] = in_pixels(value) if name.endswith("_size") and isinstance(value, list) else _word(value)
    return found


def _word(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else json.dumps(value)


# distinguishable with colour blindness (Okabe and Ito 2008)
_COLOURS = ("#1f5a94", "#d55e00", "#009e73", "#b0568f", "#8a6d00", "#3d9bd1", "#444444", "#a33b20")
_FIRST = (POSITION_ACCURACY, "finetune", "linear", "knn")
_SMOOTH = 0.02  # width of the smoothing window as a fraction of a curve
_LONGEST = 34  # characters of a line's name
_ROOM, _CHARACTER = 8, 0.072  # characters that fit beside a panel, and inches per character
_NOTHING = np.array([])
_OVER_EPOCHS = {"knn": "mean patch tokens", "instance-knn": "the task's representation of an image"}
# display names of protocols in plots and in `report`
PROTOCOL_TITLES = {
    "knn": "kNN accuracy",
    "linear": "linear probe",
    "finetune": "fine-tuned accuracy",
    "few-shot": "accuracy with few labels",
    "blocks": "fine-tuned last blocks",
    "keywords": "keyword accuracy",
    "segment": "segmentation",
    "detect": "detection",
}
_TITLES = PROTOCOL_TITLES | dict.fromkeys((POSITION_ACCURACY, "positions"), "position accuracy")


class Point(NamedTuple):
    """Mean result of the runs of one line with one value of the setting.

    Attributes:
        place: value of the setting.
        value: mean result over the runs, which differ in their seeds.
        low, high: results of the worst and the best run.
        runs: names of the runs.
        beside: mean result of the control; NaN without one.
    """

    place: Any
    value: float
    low: float
    high: float
    runs: tuple[str, ...]
    beside: float


# kind of result, data and settings of the evaluation, name of the control, and points by line
ResultPanel = tuple[str, str, str, dict[str, list[Point]]]


@validate_arguments
def draw_run_curves(
    runs: PathLike | Sequence[PathLike],
    *,
    against: str | None = None,
    of: str | None = None,
    out: str | Path | None = None,
) -> list[Path]:
    """Draw several runs in one plot: their losses, or their results against a setting.

    Losses over epochs are drawn as in Beyond Masking, Fig. 2; results against a setting as in MP3, Figs. 3-7. The
    points are also written as a table.

    Args:
        runs: folders of two runs or more.
        against: setting in which they differ, such as task.context_mask_ratio, patch_size or epochs; default: losses
            are drawn. Or a setting of their evaluations, such as finetune.epochs or positions.context_mask_ratio, for
            which one run is enough. Other settings that differ give a line each; seeds are drawn as mean and range.
        of: result to draw: position-accuracy (held-out images), knn, linear, finetune, or another protocol in their
            results.csv; default: all that the runs have in common. Without ``against``: knn or instance-knn, the
            accuracy over the epochs of pre-training (ExtreMA, Figs. 4-5, which do not say of which representation).
        out: folder for picture and table; default: the current folder.

    Returns:
        Paths of the files written.

    Raises:
        PatchloomError: if there is no run, the runs do not differ in the setting, or they have no such result.
    """
    places = [runs] if isinstance(runs, str | os.PathLike) else runs
    protocol, dot, inner = (against or "").partition(".")
    of_evaluation = bool(dot) and protocol not in ("task", "model")
    found = read_runs(places, least=1 if of_evaluation else 2)
    folder = Path(out or ".")  # not beside the runs, where runs/* would match the picture
    if of_evaluation:
        if of is not None:
            raise PatchloomError(f"--against {against} determines which result is drawn: leave out --of {of}")
        return _draw_against_evaluation(found, protocol, inner, folder)
    if against is None:
        if of in _OVER_EPOCHS:
            return _draw_over_epochs(found, of, folder)
        if of is not None:
            raise PatchloomError(
                f"--of {of} is for --against SETTING, such as --against epochs: give both, or --of "
                f"{listing(_OVER_EPOCHS)} alone"
            )
        return _draw_losses(found, folder)
    name, values = setting_of(found, against)
    panels = []
    for kind in _kinds(found, of):
        lines, how, control = points_of(found, name, values, kind)
        panels.append((kind, how, control, lines))
    return _write_results(panels, name, folder / f"{f'{of}-' if of else ''}against-{name}")


def _write_results(panels: Sequence[ResultPanel], name: str, place: Path) -> list[Path]:
    """Draw the panels, and write a table of their points."""
    table = [
        (kind, how, line, p.place, p.value, p.low, p.high, control, "" if math.isnan(p.beside) else p.beside,
         " ".join(p.runs))
        for kind, how, control, lines in panels for line, points in lines.items() for p in points
    ]  # fmt: skip
    heading = ("result", "measured", "line", name, "value", "low", "high", "control", "control_value", "runs")
    return [_draw_results(panels, name, place), write_table(heading, table, place.with_name(f"{place.name}.csv"))]


def _draw_against_evaluation(runs: Sequence[PastRun], protocol: str, setting: str, folder: Path) -> list[Path]:
    """Draw results of a protocol against a setting of the evaluation, such as the epochs of fine-tuning."""
    results = at_settings(runs, protocol, setting)
    names = lines_of(runs, "")
    if len(set(names)) < len(names) and len({run.became.get("seed") for run in runs}) == 1:
        names = _names(runs)
    groups: dict[str, dict[Any, list[int]]] = {}
    for i, of_run in enumerate(results):
        for value in of_run:
            groups.setdefault(names[i], {}).setdefault(value, []).append(i)
    order = _order([value for of_run in results for value in of_run])
    lines: dict[str, list[Point]] = {}
    for line, values in groups.items():
        for value in sorted(values, key=order.index):
            some = [results[i][value] for i in values[value]]
            reached, of = [one.value for one in some], tuple(runs[i].path.name for i in values[value])
            mean, beside = float(np.mean(reached)), float(np.mean([one.beside for one in some]))
            lines.setdefault(line, []).append(Point(value, mean, min(reached), max(reached), of, beside))
    first = next(iter(results[0].values()))
    name = f"{protocol}.{setting}"
    return _write_results([(protocol, first.how, first.control, lines)], name, folder / f"against-{name}")


def _kinds(runs: Sequence[PastRun], of: str | None) -> list[str]:
    """Return the results to draw: the requested one, or all that every run has, measured in the same way."""
    known = list(dict.fromkeys(kind for run in runs for kind in run.results))
    if of is not None:
        if of not in known:
            there = f" These runs have {listing(known, 'and')}." if known else " These runs have no results yet."
            raise PatchloomError(f"--of {of} is not a result of these runs{suggestion(of, known)}{there}")
        return [of]
    common = []
    for kind in sorted(known, key=lambda kind: _FIRST.index(kind) if kind in _FIRST else len(_FIRST)):
        if kind not in _FIRST and not kind.startswith(("few-shot", "blocks")):
            continue
        try:
            comparable_results(runs, kind)
        except PatchloomError:
            continue
        common.append(kind)
    if not common:
        raise PatchloomError(
            "these runs have no result in common to draw: evaluate all of them in the same way, as in patchloom "
            f"evaluate finetune {runs[0].path} DATA"
        )
    return common


def points_of(
    runs: Sequence[PastRun], name: str, values: Sequence[Any], kind: str
) -> tuple[dict[str, list[Point]], str, str]:
    """Return the points of each line, ordered by the setting; how they were measured; and the control's name."""
    results = comparable_results(runs, kind)
    groups: dict[tuple[str, Any], list[int]] = {}
    for i, line in enumerate(lines_of(runs, name)):
        groups.setdefault((line, values[i]), []).append(i)
    lines: dict[str, list[Point]] = {}
    for (line, place), members in groups.items():
        reached = [results[i].value for i in members]
        beside = float(np.mean([results[i].beside for i in members]))
        names = tuple(runs[i].path.name for i in members)
        point = Point(place, float(np.mean(reached)), min(reached), max(reached), names, beside)
        lines.setdefault(line, []).append(point)
    order = _order(values)
    ordered = {line: sorted(points, key=lambda point: order.index(point.place)) for line, points in lines.items()}
    return ordered, results[0].how, results[0].control


def _order(values: Sequence[Any]) -> list[Any]:
    """Return the distinct values of a setting: numbers in ascending order, others in the order of the runs."""
    distinct = list(dict.fromkeys(values))
    return sorted(distinct) if _numbers(distinct) else distinct


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _draw_results(panels: Sequence[ResultPanel], name: str, place: Path) -> Path:
    with matplotlib.rc_context(STYLE):
        notes = [_note(how, lines) for _, how, _, lines in panels]
        named = [*(line for *_, lines in panels for line in lines), *(control for *_, control, _ in panels)]
        figure, places = _side_by_side(notes, named)
        for axes, note, (kind, _, control, lines) in zip(places, notes, panels, strict=True):
            order = _order([point.place for points in lines.values() for point in points])
            at = {place: place if _numbers(order) else number for number, place in enumerate(order)}
            labels = []
            for colour, (line, points) in zip(line_colours(len(lines)), lines.items(), strict=True):
                x, y = [at[point.place] for point in points], [point.value for point in points]
                joined = "-" if _numbers(order) else ""
                axes.plot(x, y, joined, marker="o", markersize=4.5, linewidth=1.7, color=colour)
                axes.vlines(x, [p.low for p in points], [p.high for p in points], color=colour, linewidth=1.3)
                labels.append((y[-1], f"{short_name(line)} {y[-1]:.1%}".strip(), colour, "bold"))
            _draw_control(axes, lines, at, control, labels)
            frame_panel(axes, Panel(_TITLES.get(kind, kind), note, _NOTHING, _NOTHING, {}, True, 0))
            axes.set_xticks([at[place] for place in order], [f"{place}" for place in order])
            axes.margins(x=0.06)
            axes.set_xlabel(name)
            write_beside(axes, labels)
        return write_figure(figure, place.with_name(f"{place.name}.png"))


def _note(how: str, lines: dict[str, list[Point]]) -> str:
    several = {len(point.runs) for points in lines.values() for point in points}
    counted = f"{'up to ' * (len(several) > 1)}{max(several)}"
    return how if several == {1} else f"{how}; mean and range of {counted} runs"


def _side_by_side(notes: Sequence[str], named: Sequence[str]) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with a panel for each note, with room for the names of lines."""
    beside = max(len(short_name(name)) for name in named) - _ROOM
    width = max(PANEL_WIDTH + _CHARACTER * max(0, beside), 0.6 + _CHARACTER * max(map(len, notes)))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, wspace=0.02)
    figure = Figure((width * len(notes), PANEL_HEIGHT), layout=layout)
    return figure, figure.subplots(1, len(notes), squeeze=False)[0]


def _draw_control(
    axes: Axes,
    lines: dict[str, list[Point]],
    at: dict[Any, Any],
    control: str,
    labels: list[tuple[float, str, str, str]],
) -> None:
    """Draw the control, averaged over all lines, as a dashed line."""
    beside: dict[Any, list[float]] = {}
    for points in lines.values():
        for point in points:
            if not math.isnan(point.beside):
                beside.setdefault(at[point.place], []).append(point.beside)
    if beside:
        x = sorted(beside)
        y = [float(np.mean(beside[one])) for one in x]
        axes.plot(x, y, color=QUIET, linewidth=1, linestyle=(0, (4, 3)), marker=".", markersize=4, zorder=1)
        labels.append((y[-1], f"{control} {y[-1]:.1%}", QUIET, "normal"))


def _draw_losses(runs: Sequence[PastRun], folder: Path) -> list[Path]:
    names = _names(runs)
    losses = [run.losses() for run in runs]
    tasks = {run.became.get("task.name") for run in runs}
    scales = [
        ("training loss", "as logged" if len(tasks) == 1 else "as logged, in each task's own unit", [1.0] * len(runs))
    ]
    first = [float(loss[0]) for _, loss in losses]
    if all(one > 0 for one in first):
        scales.append(("training loss, relative", "divided by the first value", first))
    with matplotlib.rc_context(STYLE):
        figure, places = _side_by_side([note for _, note, _ in scales], names)
        for axes, (title, note, units) in zip(places, scales, strict=True):
            labels = []
            for name, colour, (epochs, loss), unit in zip(names, line_colours(len(runs)), losses, units, strict=True):
                values = loss / unit
                smoothed = smoothed_values(values, _SMOOTH)
                if smoothed is not values:
                    axes.plot(epochs, values, color=colour, alpha=0.25, linewidth=0.7)
                marker = "o" if len(values) <= MARKED else None
                axes.plot(epochs, smoothed, color=colour, linewidth=1.7, marker=marker, markersize=3, clip_on=False)
                labels.append((float(smoothed[-1]), f"{short_name(name)} {smoothed[-1]:#.3g}", colour, "bold"))
            frame_panel(axes, Panel(title, note, _NOTHING, _NOTHING, {}, False, 0))
            axes.set_xlim(0, max(float(epochs.max()) for epochs, _ in losses) * 1.02 or 1)
            axes.set_xlabel("epochs")
            write_beside(axes, labels)
        picture = write_figure(figure, folder / "losses.png")
    table = [
        (name, run.became.get("task.name", ""), epoch, value, value / start if start > 0 else "")
        for name, run, (epochs, loss), start in zip(names, runs, losses, first, strict=True)
        for epoch, value in zip(epochs.tolist(), loss.tolist(), strict=True)
    ]
    return [picture, write_table(("run", "task", "epoch", "loss", "relative"), table, folder / "losses.csv")]


def _draw_over_epochs(runs: Sequence[PastRun], of: str, folder: Path) -> list[Path]:
    """Draw the kNN accuracy measured during training, with a line per run."""
    names, column = _names(runs), of.replace("-", "_")
    curves_of_runs = [curve_of(run.metrics, column) for run in runs]
    for run, (epochs, _) in zip(runs, curves_of_runs, strict=True):
        if not len(epochs):
            raise PatchloomError(
                f"{run.path} did not measure {of} during training, which needs labels"
                f"{' and a task with its own representation' if of != 'knn' else ''}: leave it out"
            )
    ways = {tuple(run.became.get(name) for name in ("knn_k", "knn_gallery")) for run in runs}
    if len(ways) > 1:
        raise PatchloomError(
            f"these runs measured {of} with different --knn_k or --knn_gallery: give runs with equal ones"
        )
    note, labels = f"on held-out images, {_OVER_EPOCHS[of]}", []
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = _side_by_side([note], names)
        for name, colour, (epochs, values) in zip(names, line_colours(len(runs)), curves_of_runs, strict=True):
            marker = "o" if len(values) <= MARKED else None
            axes.plot(epochs, values, color=colour, linewidth=1.7, marker=marker, markersize=3, clip_on=False)
            labels.append((float(values[-1]), f"{short_name(name)} {values[-1]:.1%}", colour, "bold"))
        frame_panel(axes, Panel("kNN accuracy", note, _NOTHING, _NOTHING, {}, True, 0))
        axes.set_xlim(0, max(float(epochs.max()) for epochs, _ in curves_of_runs) * 1.02 or 1)
        axes.set_xlabel("epochs")
        write_beside(axes, labels)
        picture = write_figure(figure, folder / f"{of}.png")
    table = [
        (name, run.became.get("task.name", ""), epoch, value)
        for name, run, (epochs, values) in zip(names, runs, curves_of_runs, strict=True)
        for epoch, value in zip(epochs.tolist(), values.tolist(), strict=True)
    ]
    return [picture, write_table(("run", "task", "epoch", of), table, folder / f"{of}.csv")]


def _names(runs: Sequence[PastRun]) -> list[str]:
    """Return names of runs, or their paths if names coincide."""
    names = [run.path.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def line_colours(count: int) -> list[str]:
    """Return a colour for each of ``count`` lines."""
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def short_name(name: str) -> str:
    """Shorten a long name in the middle."""
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[: half - 1]}…{name[-half:]}"
