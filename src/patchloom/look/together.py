"""Several runs in one plot: their losses over epochs, or what came of them against a setting in which they differ."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from patchloom.calls import PathLike, checked
from patchloom.errors import PatchloomError
from patchloom.hints import listing, suggestion
from patchloom.look.curves import (
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
from patchloom.look.results import POSITIONS, PastRun, at_settings, lines_of, measured, read_runs, setting_of

# told apart by colour-blind eyes, too (Okabe and Ito 2008)
COLOURS = ("#1f5a94", "#d55e00", "#009e73", "#b0568f", "#8a6d00", "#3d9bd1", "#444444", "#a33b20")
_FIRST = (POSITIONS, "finetune", "linear", "knn")
_SMOOTH = 0.02  # share of a curve
_LONGEST = 34  # characters of a line's name
_ROOM, _CHARACTER = 8, 0.072  # characters for which there is room beside a panel, and inches of each
_NOTHING = np.array([])
_OVER_EPOCHS = {"knn": "by mean patch tokens", "instance-knn": "by what represents an image in the task"}
_TITLES = {
    POSITIONS: "position accuracy",
    "positions": "position accuracy",
    "finetune": "fine-tuned accuracy",
    "linear": "linear probe",
    "knn": "kNN accuracy",
    "few-shot": "accuracy with few labels",
}


class Point(NamedTuple):
    """What the runs of one line and one value of the setting reached.

    Attributes:
        place: the value.
        value: the mean over the runs, whose seeds differ.
        low, high: the worst and the best run.
        runs: their names.
        beside: the control's mean, nan if there is none.
    """

    place: Any
    value: float
    low: float
    high: float
    runs: tuple[str, ...]
    beside: float


# a kind of result, how it was measured, the control, and points by line
Drawn = tuple[str, str, str, dict[str, list[Point]]]


@checked
def curves(
    runs: PathLike | Sequence[PathLike],
    *,
    against: str | None = None,
    of: str | None = None,
    out: str | Path | None = None,
) -> list[Path]:
    """Draw several runs in one plot: their losses, or their results against a setting.

    Losses over epochs are as in Beyond Masking, Fig. 2; results against a setting as in MP3, Figs. 3-7. A table of the
    points that are drawn is written beside the picture.

    Args:
        runs: folders of two runs or more.
        against: a setting in which they differ, such as task.context_mask_ratio, patch_size or epochs; or one of their
            evaluations, such as finetune.epochs or positions.context_mask_ratio, also of one run; without it losses are
            drawn. Other settings that differ give a line each, runs of other seeds their mean and range.
        of: which result is drawn: position-accuracy (on the run's held-out images), knn, linear, finetune, or another
            protocol whose rows are in their results.csv; all that the runs have in common, if left out. Without
            ``against``: knn or instance-knn, the accuracy over the epochs of pre-training (ExtreMA, Figs. 4-5).
        out: folder for picture and table; the current one, if left out.

    Returns:
        The files.

    Raises:
        PatchloomError: no run there, runs that do not differ in the setting, or have no such result.
    """
    places = [runs] if isinstance(runs, str | os.PathLike) else runs
    protocol, dot, inner = (against or "").partition(".")
    of_evaluation = bool(dot) and protocol not in ("task", "model")
    found = read_runs(places, least=1 if of_evaluation else 2)
    folder = Path(out or ".")  # not where the runs lie, or runs/* would name the picture, too, the next time
    if of_evaluation:
        if of is not None:
            raise PatchloomError(f"--against {against} says which result is drawn: leave --of {of} out")
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


def _write_results(panels: Sequence[Drawn], name: str, place: Path) -> list[Path]:
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
    """The results to draw: the one that is asked for, or all that every run has, measured alike."""
    known = list(dict.fromkeys(kind for run in runs for kind in run.results))
    if of is not None:
        if of not in known:
            there = f" These runs have {listing(known, 'and')}." if known else " These runs have no results yet."
            raise PatchloomError(f"--of {of} is no result of these runs{suggestion(of, known)}{there}")
        return [of]
    common = []
    for kind in sorted(known, key=lambda kind: _FIRST.index(kind) if kind in _FIRST else len(_FIRST)):
        if kind not in _FIRST and not kind.startswith(("few-shot", "blocks")):
            continue
        try:
            measured(runs, kind)
        except PatchloomError:
            continue
        common.append(kind)
    if not common:
        raise PatchloomError(
            "these runs have no result in common that could be drawn: evaluate all of them alike, as by patchloom "
            f"evaluate finetune {runs[0].path} DATA"
        )
    return common


def points_of(
    runs: Sequence[PastRun], name: str, values: Sequence[Any], kind: str
) -> tuple[dict[str, list[Point]], str, str]:
    """The points of each line of a kind of result, in the order of the setting; how it was measured; and the control.

    Args:
        runs: that are compared.
        name: of the setting.
        values: of the setting, one of each run.
        kind: of the result.

    Raises:
        PatchloomError: as `measured`.
    """
    results = measured(runs, kind)
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
    """The values of a setting, each once: numbers in ascending order, others as the runs have them."""
    distinct = list(dict.fromkeys(values))
    return sorted(distinct) if _numbers(distinct) else distinct


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _draw_results(panels: Sequence[Drawn], name: str, place: Path) -> Path:
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
    """A figure with a panel for each note, as wide as that needs, and with room for the names of lines beside it."""
    beside = max(len(short_name(name)) for name in named) - _ROOM
    width = max(PANEL_WIDTH + _CHARACTER * max(0, beside), 0.6 + _CHARACTER * max(map(len, notes)))
    figure = Figure((width * len(notes), PANEL_HEIGHT), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08, wspace=0.02)
    return figure, figure.subplots(1, len(notes), squeeze=False)[0]


def _draw_control(
    axes: Axes,
    lines: dict[str, list[Point]],
    at: dict[Any, Any],
    control: str,
    labels: list[tuple[float, str, str, str]],
) -> None:
    """What the encoders stand beside, as a dashed line: the mean over all lines."""
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
        scales.append(("training loss, relative", "as a share of the first that was logged", first))
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
    """Draw the kNN accuracy that each run measured in its training, as a line a run."""
    names, column = _names(runs), of.replace("-", "_")
    curves_of_runs = [curve_of(run.metrics, column) for run in runs]
    for run, (epochs, _) in zip(runs, curves_of_runs, strict=True):
        if not len(epochs):
            raise PatchloomError(
                f"{run.path} measured no {of} in its training, which takes labels"
                f"{' and a task with a representation of its own' if of != 'knn' else ''}: leave it out"
            )
    ways = {tuple(run.became.get(name) for name in ("knn_k", "knn_gallery")) for run in runs}
    if len(ways) > 1:
        raise PatchloomError(
            f"these runs measured {of} with another --knn_k or --knn_gallery: give runs that measured it alike"
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
    """Return names of runs; their paths where two have one name."""
    names = [run.path.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def line_colours(count: int) -> list[str]:
    """A colour for each of so many lines."""
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def short_name(name: str) -> str:
    """A line's name, shortened in the middle if it is long."""
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[: half - 1]}…{name[-half:]}"
