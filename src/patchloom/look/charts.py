"""Charts: learning curves of a run, accuracy by layer, predicted numbers, and confusion matrices."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from patchloom.errors import PatchloomError
from patchloom.look.captions import Caption, write_picture
from patchloom.runs.folder import read_metrics
from patchloom.system.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
PANEL_WIDTH, PANEL_HEIGHT = 4.0, 3.0  # inches
RUN, _RUN_PALE, QUIET, INK = "#1f5a94", "#a9c6e3", "#666666", "#141414"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "axes.labelcolor": QUIET,
}
MARKED = 40  # curves with at most this many points have markers
_LONGEST_NOTE = 56  # letters of a subtitle that fit above a panel
LABEL_GAP = 0.075  # smallest distance between labels as a fraction of the panel's height


class Panel(NamedTuple):
    """Plot of one measure.

    Attributes:
        title: the heading.
        note: a subtitle in small print.
        epochs: positions [n] on the horizontal axis.
        values: finite values [n].
        baselines: values of baselines by name.
        percent: whether values are fractions, written as percentages.
        smooth: width of the smoothing window as a fraction of the curve; 0: none.
    """

    title: str
    note: str
    epochs: np.ndarray
    values: np.ndarray
    baselines: dict[str, float]
    percent: bool
    smooth: float


def draw_curves(
    metrics_csv: Path,
    out: Path,
    measure: str = "held-out measure",
    smooth: float = 0.02,
    images: str = "held-out images",
    percent: bool = False,
    gallery: str = "training images",
) -> Path:
    """Draw the loss, the held-out measure and the kNN accuracy in a ``metrics.csv`` over epochs as a PNG file.

    Panels without data are left out. Baselines are dashed lines at the last value of their columns. ``percent``: the
    measure is a fraction, written as a percentage. ``gallery``: images in which kNN searches for those of ``images``.
    """
    columns, searched = read_metrics(metrics_csv), f"on {images}; gallery: {gallery}"
    if len(searched) > _LONGEST_NOTE:
        searched = searched.replace("; ", "\n")
    panels = [
        panel_of(columns, "loss", None, "training loss", "as logged", False, smooth),
        panel_of(columns, "held_out", "baseline:", measure, f"on {images}", percent, 0),
        panel_of(columns, "knn", "knn:", "kNN accuracy", searched, True, 0),
        panel_of(columns, "instance_knn", "instance_knn:", "kNN, the task's representation", searched, True, 0),
    ]
    panels = [p for p in panels if len(p.values)]
    if not panels:
        raise PatchloomError(f"{metrics_csv} has nothing to draw yet: wait until the run has logged a loss")
    longest = max(p.epochs.max() for p in panels)
    size = PANEL_WIDTH * len(panels), PANEL_HEIGHT
    with styled_figure(size, {"w_pad": 0.12, "h_pad": 0.08, "wspace": 0.02}) as figure:
        for axes, content in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            draw_panel(axes, content, longest)
        return write_figure(figure, out)


@contextmanager
def styled_figure(
    size: tuple[float, float], layout: Mapping[str, Any] | None = None, title: str = "", caption: str = ""
) -> Iterator[Figure]:
    """Open a figure of ``size`` (width, height) in inches, in our style while this block lasts.

    ``layout`` has pads of matplotlib's constrained layout, where others than its own are wanted; None turns it off.
    ``title`` is written above, ``caption`` below.
    """
    # Imported only by what draws: it takes 0.3 s, and the first step of a training need not wait for it.
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout=None if layout is None else ConstrainedLayoutEngine(**layout))
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK, wrap=True)
        if caption:
            figure.supxlabel(caption, fontsize=8, color=QUIET, x=0.01, ha="left", wrap=True)
        yield figure


def write_figure(figure: Figure, out: Path, page_caption: Caption | None = None) -> Path:
    """Write a figure as a PNG file ``out``, as `write_picture` does; its folder is made if it is missing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    # without metadata, the bytes do not depend on the version of matplotlib
    FigureCanvasAgg(figure).print_figure(buffer, dpi=DPI, format="png", metadata={"Software": None})
    return write_picture(out, buffer.getvalue(), page_caption)


def write_table(heading: Sequence[str], rows: Iterable[Sequence[Any]], out: Path) -> Path:
    """Write a heading and rows as a CSV file ``out``."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    writer.writerows(rows)
    write_whole(out, text.getvalue())
    return out


def panel_of(
    columns: dict[str, np.ndarray], name: str, prefix: str | None, title: str, note: str, percent: bool, smooth: float
) -> Panel:
    """Return the panel of column ``name``, which may be empty; columns that start with ``prefix`` are baselines."""
    epochs, values = curve_of(columns, name)
    baselines = {}
    for other, column in columns.items():
        measured = column[np.isfinite(column)]
        if prefix is not None and other.startswith(prefix) and len(measured):
            baselines[other.removeprefix(prefix)] = float(measured[-1])
    return Panel(title, note, epochs, values, baselines, percent, smooth)


def curve_of(columns: dict[str, np.ndarray], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the epochs [n] and finite values [n] of a column; both are empty if there is no such column."""
    nothing = np.empty(0)
    epochs, values = (columns["epoch"], columns[name]) if name in columns else (nothing, nothing)
    known = np.isfinite(epochs) & np.isfinite(values)
    return epochs[known], values[known]


def draw_panel(axes: Axes, panel: Panel, longest: float) -> None:
    """Draw one panel from epoch 0 to ``longest``, with a label at the right end of every line."""
    smoothed = smoothed_values(panel.values, panel.smooth)
    note = panel.note
    marker = "o" if len(panel.values) <= MARKED else None
    if smoothed is not panel.values:
        note, marker = f"{panel.note}, and smoothed", None
        axes.plot(panel.epochs, panel.values, color=_RUN_PALE, linewidth=0.7)
    axes.plot(panel.epochs, smoothed, color=RUN, linewidth=1.9, marker=marker, markersize=3.5, clip_on=False)
    frame_panel(axes, panel._replace(note=note))
    axes.set_xlim(0, longest * 1.02 or 1)
    axes.set_xlabel("epochs")
    axes.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
    name_lines(axes, panel, float(smoothed[-1]))


def frame_panel(axes: Axes, panel: Panel) -> None:
    """Draw a panel's title, note, grid and dashed baselines."""
    axes.set_title(panel.title, loc="left", pad=19 + 10 * panel.note.count("\n"), fontsize=10.5, color=INK)
    small: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": 8, "color": QUIET}
    axes.annotate(panel.note, (0, 1), (0, 7), **small)
    for value in panel.baselines.values():
        axes.axhline(value, color=QUIET, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.margins(y=0.08)
    axes.locator_params(axis="y", nbins=6, steps=[1, 2, 5, 10])
    if panel.percent:
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.6g}%")
    axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)


def name_lines(axes: Axes, panel: Panel, last: float, curve: str = "this run") -> None:
    """Label the curve and each baseline beside the panel with name and value, without overlaps."""

    def number(value: float) -> str:
        return f"{value:.1%}" if panel.percent else f"{value:#.3g}"

    labels = [(value, f"{name} {number(value)}", QUIET, "normal") for name, value in panel.baselines.items()]
    labels.append((last, f"{curve} {number(last)}" if panel.baselines else number(last), RUN, "bold"))
    write_beside(axes, labels)


def write_beside(axes: Axes, labels: list[tuple[float, str, str, str]]) -> None:
    """Write labels (height, text, colour, weight) beside a panel, without overlaps."""
    labels = sorted(labels, key=lambda label: label[0])
    low, high = axes.get_ylim()
    heights = spread_labels([(value - low) / (high - low) for value, *_ in labels], LABEL_GAP)
    for (_, text, colour, weight), height in zip(labels, heights, strict=True):
        axes.annotate(
            text, (1, height), (5, 0), xycoords="axes fraction", textcoords="offset points", va="center", fontsize=8,
            color=colour, fontweight=weight, annotation_clip=False,
        )  # fmt: skip


def spread_labels(heights: list[float], gap: float) -> list[float]:
    """Spread ascending ``heights`` at least ``gap`` apart, each cluster around its own middle."""
    clusters: list[list[float]] = []
    for height in heights:
        clusters.append([height])
        # merge a cluster that overlaps the one below
        while len(clusters) > 1 and bounds(clusters[-1], gap)[0] - bounds(clusters[-2], gap)[1] < gap:
            top = clusters.pop()
            clusters[-1] += top
    return [bounds(cluster, gap)[0] + i * gap for cluster in clusters for i in range(len(cluster))]


def bounds(cluster: list[float], gap: float) -> tuple[float, float]:
    """Return the lowest and highest label of a cluster that is spread by ``gap`` around its mean."""
    middle, reach = sum(cluster) / len(cluster), gap * (len(cluster) - 1) / 2
    return middle - reach, middle + reach


def smoothed_values(values: np.ndarray, share: float) -> np.ndarray:
    """Smooth ``values`` [n] by a Gaussian whose deviation is ``share`` of their number; below 1 they are unchanged."""
    sigma = share * len(values)
    if sigma < 1:
        return values
    reach = int(3 * sigma)
    kernel = np.exp(-np.square(np.arange(-reach, reach + 1) / sigma) / 2)
    # renormalise at the ends, so that the curve is not pulled to 0
    padded = np.convolve(values, kernel)[reach : reach + len(values)]
    return padded / np.convolve(np.ones_like(values), kernel)[reach : reach + len(values)]


# Accuracy by layer of an encoder, or by blend with its start.


_HEIGHT, WIDTH, _WIDER = 3.4, 3.4, 0.22  # inches: size of the picture, and additional width per layer


def draw_layers(
    layers: Sequence[str],
    values: Sequence[tuple[float, float, float]],
    controls: dict[str, Sequence[float]],
    baselines: dict[str, float],
    best: int,
    name: str,
    note: str,
    out: Path,
) -> Path:
    """Draw the accuracy of each layer of an encoder, with that of each control, as a PNG file."""
    places = np.arange(len(layers))
    panel = Panel(f"Layers of {name}", note, places, np.array(values)[:, 0], baselines, True, 0)
    ticks = ["0", *(layer.removeprefix("block ") for layer in layers[1:])]
    page_caption = Caption(
        "kNN accuracy by layer",
        "kNN accuracy of the features of each layer, compared with the untrained encoder, and with the start of an "
        "adapted one. A drop in the last blocks means that these are specialised in the pretext task.",
        201,
    )
    return _draw_choice(panel, values, controls, best, ticks, "after block", out, page_caption)


def draw_blends(
    shares: Sequence[float],
    values: Sequence[tuple[float, float, float]],
    baselines: dict[str, float],
    best: int,
    name: str,
    note: str,
    out: Path,
) -> Path:
    """Draw the accuracy of blends of an encoder with its start, as a PNG file.

    Args:
        shares: ascending shares [n] of the adapted weights, from 0 (start) to 1.
        values: accuracy and its interval for each share.
        baselines: accuracies by name.
        best: index of the chosen blend.
        name: name of the encoder.
        note: subtitle.
        out: file to write.
    """
    panel = Panel(f"Blends of {name}", note, np.array(shares), np.array(values)[:, 0], baselines, True, 0)
    ticks, axis = [f"{share:g}" for share in shares], "share of the adapted weights; 0: the start"
    page_caption = Caption(
        "Accuracy of blends with the start",
        "Accuracy of weighted means of the adapted weights and those of the start. A maximum between both ends means "
        "that a blend is better than either.",
        202,
    )
    return _draw_choice(panel, values, {}, best, ticks, axis, out, page_caption)


def _draw_choice(
    panel: Panel,
    values: Sequence[tuple[float, float, float]],
    controls: dict[str, Sequence[float]],
    best: int,
    ticks: Sequence[str],
    axis: str,
    out: Path,
    page_caption: Caption,
) -> Path:
    """Draw a curve with intervals and controls, and mark the point that was chosen."""
    places, shares = panel.epochs, panel.values
    _, low, high = np.array(values).T
    with styled_figure((WIDTH + _WIDER * len(ticks), _HEIGHT), {"w_pad": 0.12, "h_pad": 0.08}) as figure:
        axes = figure.subplots()
        frame_panel(axes, panel)
        axes.fill_between(places, low, high, color=_RUN_PALE, alpha=0.4, linewidth=0)
        for control, marker in zip(controls.values(), "os", strict=False):
            axes.plot(places, control, color=QUIET, linewidth=1.4, marker=marker, markersize=2.5)
        axes.plot(places, shares, color=RUN, linewidth=1.9, marker="o", markersize=3.5)
        axes.plot(places[best], shares[best], "o", markersize=8, markerfacecolor="none", color=INK)
        chosen: dict[str, Any] = {
            "textcoords": "offset points",
            "ha": "center",
            "va": "center",
            "fontsize": 8,
            "color": INK,
        }
        # keeps off the other curves
        away = 12 if all(shares[best] >= control[best] for control in controls.values()) else -12
        axes.annotate("chosen", (places[best], shares[best]), (0, away), **chosen)
        axes.margins(x=0.02)
        axes.set_xticks(places, ticks)
        axes.set_xlabel(axis)
        # labelled like the baselines
        dashed = {**{control: accuracies[-1] for control, accuracies in controls.items()}, **panel.baselines}
        name_lines(axes, panel._replace(baselines=dashed), float(shares[-1]), "this encoder")
        return write_figure(figure, out, page_caption)


# Predicted against true numbers.


_SIDE, _DENSE = 3.1, 2000  # inches of a panel; points above which they are smaller and fainter


def draw_regression(
    column: str,
    truth: np.ndarray,
    predicted: Mapping[str, np.ndarray],
    notes: Mapping[str, str],
    noun: str,
    out: Path,
) -> Path:
    """Draw predicted against true numbers of test images as a PNG file, a panel for each encoder, on the same axes.

    Args:
        column: name of the numbers.
        truth: [n] true numbers.
        predicted: predictions [n] by the name of the encoder or control, the encoder first.
        notes: subtitles by the same names.
        noun: "images" or "recordings".
        out: file to write.
    """
    # a few predictions far outside must not shrink all others: they are drawn on the edge
    low, high = float(truth.min()), float(truth.max())
    pad = 0.25 * (high - low)
    ends = low - pad, high + pad
    many = len(truth) > _DENSE
    size = _SIDE * len(predicted) + 0.4, _SIDE + 0.75
    caption = (
        f"Each point: one of {len(truth):,} test {noun}. Solid line: perfect; dotted: the mean of all points. "
        "Points on the upper or lower edge lie beyond it."
    )
    with styled_figure(size, {"w_pad": 0.12, "h_pad": 0.08}, f"Predicted {column}", caption) as figure:
        panels = figure.subplots(1, len(predicted), squeeze=False, sharey=True)[0]
        for axes, (name, values) in zip(panels, predicted.items(), strict=True):
            first = axes is panels[0]
            axes.set_title(name, loc="left", pad=19, fontsize=10.5, color=INK)
            axes.annotate(
                notes[name], (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points", fontsize=8,
                color=QUIET,
            )  # fmt: skip
            axes.plot(ends, ends, color=INK, linewidth=0.9, zorder=1)
            axes.axhline(truth.mean(), color=QUIET, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
            axes.scatter(
                truth, np.clip(values, *ends), s=4 if many else 13, alpha=0.35 if many else 0.6, linewidths=0,
                color=RUN if first else QUIET, zorder=2,
            )  # fmt: skip
            axes.set_xlim(*ends)
            axes.set_ylim(*ends)
            axes.set_aspect("equal")
            axes.locator_params(nbins=5)
            axes.grid(color="#eeeeee", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.set_xlabel(f"true {column}")
        panels[0].set_ylabel(f"predicted {column}")
        text = (
            "Predictions from frozen features against the true numbers of the test images. A flat cloud means that the "
            "features hold little about them; a steep one along the line, that they hold much."
        )
        return write_figure(figure, out, Caption("Predicted against true numbers", text, 206))


# Confusion matrices.


_CELL, _SMALLEST, _ROOMY = 0.5, 0.37, 16  # inches: large and smallest cell; number of classes with large cells
LABEL = 0.075  # inches per letter of a class's name
_RIGHT, _WRONG = ("#ffffff", "#2a6f97"), ("#ffffff", "#c1440e")  # colours of the shares 0 and 1
_DARK = 0.7  # fraction above which letters are white


def draw_confusion(counts: np.ndarray, classes: Sequence[str], title: str, caption: str, out: Path) -> Path:
    """Draw a confusion matrix as a PNG file: rows are true classes, columns predictions.

    Cells on the diagonal and non-zero cells have the count and the percentage of the row. Correct predictions are
    blue, wrong ones red; darker means more.

    Args:
        counts: number [c c] of recordings or images by true class and prediction.
        classes: names [c] of the classes.
        title: text above.
        caption: text below.
        out: file to write; its folder is created.
    """
    c = len(classes)
    side = _CELL if c <= _ROOMY else max(_SMALLEST, _CELL * _ROOMY / c)
    sums = counts.sum(1)
    shares = counts / np.maximum(sums, 1)[:, None]
    size = max(6.2, 8.5 * side / _CELL)
    names = LABEL * max(len(name) for name in classes)
    with styled_figure((c * side + names + 1.6, c * side + names + 1.5), {}, title, caption) as figure:
        from matplotlib.colors import LinearSegmentedColormap

        right, wrong = (LinearSegmentedColormap.from_list("", colours) for colours in (_RIGHT, _WRONG))
        axes = figure.subplots()
        diagonal = np.eye(c, dtype=bool)
        colours = np.where(diagonal[..., None], right(shares), wrong(np.sqrt(shares)))  # makes rare mistakes visible
        axes.imshow(colours, interpolation="nearest")
        for i, j in zip(*np.nonzero(diagonal | (counts > 0)), strict=True):
            share = shares[i, j] if i == j else np.sqrt(shares[i, j])
            ink = "white" if share > _DARK else INK
            middle: dict[str, Any] = {
                "ha": "center",
                "color": ink,
                "in_layout": False,
            }  # otherwise the layout takes seconds
            axes.text(j, i + 0.02, f"{counts[i, j]:,}", fontsize=size, va="bottom", **middle)
            axes.text(j, i + 0.06, _percent(shares[i, j]), fontsize=0.8 * size, va="top", **middle)
        font: dict[str, Any] = {"fontsize": min(9.0, 1.15 * size), "color": INK}
        axes.set_xticks(range(c), classes, rotation=90, **font)
        axes.set_yticks(range(c), [f"{name}  ({n:,})" for name, n in zip(classes, sums, strict=True)], **font)
        axes.set_xlabel("prediction")
        axes.set_ylabel("true class (count)")
        axes.set_xticks(np.arange(c + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(c + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="#e4e4e4", linewidth=0.6)
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
        text = (
            "Rows are the true classes, columns the predictions. Red cells off the diagonal are classes that are "
            "confused."
        )
        return write_figure(figure, out, Caption("Confusion matrix", text, 205))


def _percent(share: float) -> str:
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"
