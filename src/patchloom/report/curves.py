"""Charts of one or several runs on common axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from patchloom.look.charts import curve_of
from patchloom.report.load_run import RunData
from patchloom.report.page import Chart, Curve

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


def charts_of(runs: Sequence[RunData]) -> list[Chart]:
    """Return charts of the losses, held-out measures and accuracies over epochs that at least one run has logged.

    Held-out measures of different names have a chart each. Losses of different tasks have different units and are
    divided by the first value that each run logged, as in `patchloom.look.run_curves.draw_run_curves`.
    """
    charts = [_losses(runs)]
    for measure in dict.fromkeys(run.measure for run in runs):
        some = [run for run in runs if run.measure == measure]
        percent = any(run.percent for run in some)
        note = f"On {_noun_of(runs)} that are not used for training. Dashed: baselines that need no learning."
        charts.append(_measured(some, runs, "held_out", "baseline:", measure, note, percent))
    galleries = " or ".join(f"{n:,}" for n in sorted({run.settings.knn_gallery for run in runs}))
    searched = f"Gallery: up to {galleries} training {_noun_of(runs)}; test: the held-out {_noun_of(runs)}."
    charts += [
        _measured(runs, runs, name, f"{name}:", title, f"{note} {searched}", True)
        for name, (title, note) in _KNN.items()
    ]
    charts += [_further(runs, name) for name in dict.fromkeys(name for run in runs for name in run.metrics)]
    return [chart for chart in charts if chart.lines]


def _losses(runs: Sequence[RunData]) -> Chart:
    several = len({run.settings.task["name"] for run in runs}) > 1
    note = "A loss that falls further does not mean that a run is better."
    lines = []
    for run in runs:
        epochs, values = curve_of(run.metrics, "loss")
        if len(values):
            lines.append(_line(_named(run, runs, "loss"), epochs, values / values[0] if several else values))
    if several:
        note = "Each loss is divided by its first logged value, because tasks have losses in different units."
        return Chart("training loss, relative to its start", note, lines)
    return Chart("training loss", note if len(runs) > 1 else "The loss on training batches.", lines)


def _measured(
    some: Sequence[RunData],
    runs: Sequence[RunData],
    column: str,
    prefix: str,
    title: str,
    note: str,
    percent: bool,
) -> Chart:
    """Return the chart of a column of ``some`` of the ``runs``, with the columns after ``prefix`` as baselines."""
    lines, beside = list[Curve](), list[Curve]()
    for run in some:
        epochs, values = curve_of(run.metrics, column)
        if not len(values):
            continue
        lines.append(_line(_named(run, runs, title), epochs, values))
        for name in run.metrics:
            if name.startswith(prefix):
                found = _baseline(name.removeprefix(prefix), *curve_of(run.metrics, name), float(epochs.max()))
                if found is not None:
                    beside.append(
                        found if len(some) == 1 else found._replace(name=f"{found.name}, {run.name}", kind=found.name)
                    )
    return Chart(title, note, [*lines, *(_each_once(beside) if len(some) > 1 else beside)], percent)


def _baseline(name: str, epochs: np.ndarray, values: np.ndarray, end: float) -> Curve | None:
    """Return a baseline up to ``end``, which is flat if it was measured once or never changed."""
    if not len(values):
        return None
    if np.ptp(values) == 0:
        return Curve(name, [0.0, max(end, float(epochs.max()))], [float(values[0])] * 2, baseline=True)
    return _line(name, epochs, values, baseline=True)


def _each_once(lines: Sequence[Curve]) -> list[Curve]:
    """Merge baselines of several runs that have the same name and nearly the same value, such as chance."""
    kept: dict[tuple[str, int], Curve] = {}
    for line in lines:
        flat = len(set(line.y)) == 1
        key = (line.kind, round(line.y[0] / _SAME)) if flat else (line.name, 0)
        before = kept.get(key)
        if before is None:
            kept[key] = line
        else:
            kept[key] = Curve(line.kind, max(before.x, line.x, key=lambda x: x[-1]), before.y, baseline=True)
    return list(kept.values())


def _further(runs: Sequence[RunData], column: str) -> Chart:
    """Return the chart of a metric that a task logs in addition to its loss, such as the position accuracy."""
    lines = []
    # columns are named after pixels for recordings, too
    name = " ".join(_values_of(runs) if word == "pixels" else word for word in column.split("_"))
    if column not in _OTHER and ":" not in column:
        for run in runs:
            epochs, values = curve_of(run.metrics, column)
            if len(values):
                lines.append(_line(_named(run, runs, name), epochs, values))
    title = f"{name}, in training"
    return Chart(title, f"On training {_noun_of(runs)}.", lines, percent="accuracy" in column)


def _named(run: RunData, runs: Sequence[RunData], alone: str) -> str:
    return alone if len(runs) == 1 else run.name


def _line(name: str, x: np.ndarray, y: np.ndarray, baseline: bool = False) -> Curve:
    """Return a line of at most `_POINTS` evenly spaced points that include the last one."""
    some = np.unique(np.linspace(0, len(x) - 1, min(len(x), _POINTS)).round().astype(int))
    # six digits are more than a reader can see, and halve the size of the page
    return Curve(name, [float(f"{v:.6g}") for v in x[some]], [float(f"{v:.6g}") for v in y[some]], baseline)


def _values_of(runs: Sequence[RunData]) -> str:
    found = {run.modality.values for run in runs}
    return found.pop() if len(found) == 1 else "pixels"


def _noun_of(runs: Sequence[RunData]) -> str:
    """Return the noun for the data of the runs: "images" if they differ."""
    nouns = {run.modality.noun for run in runs}
    return nouns.pop() if len(nouns) == 1 else "images"
