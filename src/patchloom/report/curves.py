"""Charts of one or several runs on common axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    for measure, unit in dict.fromkeys((run.measured.measure, run.measured.unit) for run in runs):
        some = [run for run in runs if (run.measured.measure, run.measured.unit) == (measure, unit)]
        note = f"On {_noun_of(runs)} that are not used for training. Dashed: baselines that need no learning."
        charts.append(_measured(some, runs, "held_out", measure, note, unit))
    galleries = " or ".join(f"{n:,}" for n in sorted({run.settings.knn_gallery for run in runs}))
    searched = f"Gallery: up to {galleries} training {_noun_of(runs)}; test: the held-out {_noun_of(runs)}."
    charts += [_measured(runs, runs, name, title, f"{note} {searched}", "%") for name, (title, note) in _KNN.items()]
    charts += [_further(runs, name) for name in dict.fromkeys(name for run in runs for name in run.metrics)]
    return [chart for chart in charts if chart.lines]


def _losses(runs: Sequence[RunData]) -> Chart:
    lines = _lines(runs, runs, "loss", "loss")
    if len({run.settings.task["name"] for run in runs}) > 1:
        note = "Each loss is divided by its first logged value, because tasks have losses in different units."
        shares = [line._replace(y=np.divide(line.y, line.y[0]).tolist()) for line in lines]
        return Chart("training loss, relative to its start", note, shares)
    note = "A loss that falls further does not mean that a run is better."
    return Chart("training loss", note if len(runs) > 1 else "The loss on training batches.", lines)


def _measured(some: Sequence[RunData], runs: Sequence[RunData], column: str, title: str, note: str, unit: str) -> Chart:
    """Return the chart of a column of ``some`` of the ``runs``, with its baselines."""
    beside = list[Curve]()
    for run in some:
        curves = run.curves(column)
        epochs, _ = curves.pop("", (None, None))
        if epochs is not None:
            beside += [_baseline(name, *curve, float(epochs.max()), run.name) for name, curve in curves.items()]
    beside = _each_once(beside) if len(some) > 1 else [one._replace(name=one.kind) for one in beside]
    return Chart(title, note, [*_lines(some, runs, column, title), *beside], unit)


def _baseline(name: str, epochs: np.ndarray, values: np.ndarray, end: float, run: str) -> Curve:
    """Return a baseline of a run up to ``end``, which is flat if it was measured once or never changed."""
    if np.ptp(values) == 0:
        epochs, values = np.array([0.0, max(end, float(epochs.max()))]), values[[0, 0]]
    return _line(f"{name}, {run}", epochs, values)._replace(baseline=True, kind=name)


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
    # columns are named after pixels for recordings, too
    pixels = _shared({run.modality.values for run in runs}, "pixels")
    name = " ".join(pixels if word == "pixels" else word for word in column.split("_"))
    lines = _lines(runs, runs, column, name) if column not in _OTHER and ":" not in column else []
    return Chart(f"{name}, in training", f"On training {_noun_of(runs)}.", lines, "%" if "accuracy" in column else "")


def _lines(some: Sequence[RunData], runs: Sequence[RunData], column: str, alone: str) -> list[Curve]:
    """Return the curve of a column in each of ``some`` of the ``runs``, with its name; a single run's is ``alone``."""
    curves = [(alone if len(runs) == 1 else run.name, run.curves(column).get("")) for run in some]
    return [_line(name, *curve) for name, curve in curves if curve is not None]


def _line(name: str, x: np.ndarray, y: np.ndarray) -> Curve:
    """Return a line of at most `_POINTS` evenly spaced points that include the last one."""
    some = np.unique(np.linspace(0, len(x) - 1, min(len(x), _POINTS)).round().astype(int))
    # six digits are more than a reader can see, and halve the size of the page
    return Curve(name, [float(f"{v:.6g}") for v in x[some]], [float(f"{v:.6g}") for v in y[some]])


def _noun_of(runs: Sequence[RunData]) -> str:
    return _shared({run.modality.noun for run in runs}, "images")


def _shared(words: set[str], otherwise: str) -> str:
    """Return the word of all runs; another if they differ."""
    return words.pop() if len(words) == 1 else otherwise
