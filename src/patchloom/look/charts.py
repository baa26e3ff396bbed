"""Charts: panels with a line for each run or encoder, predicted numbers, and confusion matrices."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from patchloom.errors import PatchloomError
from patchloom.look.sheet import DPI, Caption, write_picture
from patchloom.runs.folder import curves_of, read_metrics
from patchloom.system.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_WIDTH, PANEL_HEIGHT = 4.0, 3.0  # inches
RUN, QUIET, INK = "#1f5a94", "#666666", "#141414"
# distinguishable with colour blindness (Okabe and Ito 2008)
_COLOURS = (RUN, "#d55e00", "#009e73", "#b0568f", "#8a6d00", "#3d9bd1", "#444444", "#a33b20")
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
SMOOTH = 0.02  # width of the smoothing window of losses as a fraction of a curve
MARKED = 40  # lines with at most this many points have markers
LABEL_GAP = 0.075  # smallest distance between labels as a fraction of the panel's height
_LONGEST = 34  # characters of a line's name
_ROOM, _CHARACTER = 8, 0.072  # characters that fit beside a panel, and inches per character
_LONGEST_NOTE = 47  # characters of a subtitle that fit above a panel
_TICK = 0.22  # inches of a named place
_DASHES = (0, (4, 3))
_NOTHING = np.array([])


class Line(NamedTuple):
    """Line of a panel.

    Attributes:
        name: its name; "" if its last value says enough.
        x, y: places and values [n].
        low, high: ends of an interval at each point [n]; empty: none.
        dashed: whether it is a control or a baseline.
        kind: name of a baseline without that of its run, if ``name`` has both.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray = _NOTHING
    high: np.ndarray = _NOTHING
    dashed: bool = False
    kind: str = ""


class Panel(NamedTuple):
    """Chart of one measure, for a picture or for a report page, which uses the title, note, lines, percent and axis.

    Attributes:
        title: the heading.
        note: a subtitle in small print.
        lines: the lines.
        percent: whether values are fractions, written as percentages.
        show: function that formats a value; None: three digits, or one decimal of a percentage.
        smooth: width of the smoothing window as a fraction of a line; 0: none.
        baselines: values of baselines by name.
        ticks: names of places; without any, the places are epochs.
        joined: whether points are joined.
        markers: whether few points are marked.
        chosen: number of the point of the first line that was chosen; None: none.
        from_zero: whether the vertical axis begins at 0.
        axis: name of the horizontal axis.
    """

    title: str
    note: str
    lines: Sequence[Line]
    percent: bool = False
    show: Callable[[float], str] | None = None
    smooth: float = 0
    baselines: Mapping[str, float] = {}
    ticks: Mapping[float, Any] = {}
    joined: bool = True
    markers: bool = True
    chosen: int | None = None
    from_zero: bool = False
    axis: str = "epochs"


# Curves of a run.


def draw_curves(
    metrics_csv: Path,
    out: Path,
    measure: str = "held-out measure",
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
    panels = []
    for name, title, note, share in (
        ("loss", "training loss", "as logged", False),
        ("held_out", measure, f"on {images}", percent),
        ("knn", "kNN accuracy", searched, True),
        ("instance_knn", "kNN, the task's representation", searched, True),
    ):
        curves = curves_of(columns, name)
        if "" in curves:
            line = Line("this run" if len(curves) > 1 else "", *curves.pop(""))
            baselines = {name: float(values[-1]) for name, (_, values) in curves.items()}
            panels.append(
                Panel(title, note, [line], share, smooth=SMOOTH if name == "loss" else 0, baselines=baselines)
            )
    if not panels:
        raise PatchloomError(f"{metrics_csv} has nothing to draw yet: wait until the run has logged a loss")
    return draw_lines(panels, out)


# Panels with lines.


@contextmanager
def styled_figure(
    size: tuple[float, float], layout: Mapping[str, Any], title: str = "", caption: str = ""
) -> Iterator[Figure]:
    """Open a figure of ``size`` (width, height) in inches, in our style while this block lasts.

    ``layout`` has pads of matplotlib's constrained layout, where others than its own are wanted. ``title`` is written
    above, ``caption`` below.
    """
    # Imported only by what draws: it takes 0.3 s, and the first step of a training need not wait for it.
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout=ConstrainedLayoutEngine(**layout))
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


def draw_lines(panels: Sequence[Panel], out: Path, caption: Caption | None = None) -> Path:
    """Draw panels side by side as a PNG file."""
    names = [short_name(line.name) for panel in panels for line in panel.lines]
    width = PANEL_WIDTH + _CHARACTER * max(0, max(map(len, names)) - _ROOM)
    longest_note = max(len(line) for panel in panels for line in panel.note.splitlines() or [""])
    places = max(len(panel.ticks) for panel in panels)
    width = max(width, 0.6 + _CHARACTER * longest_note, 0.85 * PANEL_WIDTH + _TICK * places)
    longest = max(float(line.x.max()) for panel in panels for line in panel.lines)
    size = width * len(panels), PANEL_HEIGHT
    with styled_figure(size, {"w_pad": 0.12, "h_pad": 0.08, "wspace": 0.02}) as figure:
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            draw_panel(axes, panel, longest)
        return write_figure(figure, out, caption)


def draw_panel(axes: Axes, panel: Panel, longest: float = 0.0) -> None:
    """Draw one panel, whose epochs go to ``longest``, with a label at the right end of every line."""
    show = panel.show or ("{:.1%}" if panel.percent else "{:#.3g}").format
    labels = [(value, f"{name} {show(value)}", QUIET, "normal") for name, value in panel.baselines.items()]
    note, colours = panel.note, iter(line_colours(len(panel.lines)))
    for line in panel.lines:
        smoothed = smoothed_values(line.y, panel.smooth)
        last = float(smoothed[-1])
        colour = QUIET if line.dashed else next(colours)
        if np.isfinite(last):
            text = f"{short_name(line.name)} {show(last)}".strip()
            labels.append((last, text, colour, "normal" if line.dashed else "bold"))
        if line.dashed:
            dashes: dict[str, Any] = {"linestyle": _DASHES if panel.joined else "", "marker": ".", "zorder": 1}
            axes.plot(line.x, line.y, color=QUIET, linewidth=1, markersize=4, **dashes)
            continue
        marker = "o" if panel.markers and len(line.y) <= MARKED else None
        if smoothed is not line.y:
            note, marker = f"{panel.note}, and smoothed", None
            axes.plot(line.x, line.y, color=colour, alpha=0.3, linewidth=0.7)
        style: dict[str, Any] = {"linestyle": "-" if panel.joined else "", "markersize": 4.5 if panel.ticks else 3.5}
        axes.plot(line.x, smoothed, color=colour, linewidth=1.8, marker=marker, clip_on=False, **style)
        if len(line.low) and panel.joined and sum(not one.dashed for one in panel.lines) == 1:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
        else:  # bands of several lines would overlap
            axes.vlines(line.x[: len(line.low)], line.low, line.high, color=colour, linewidth=1.3)
    if panel.chosen is not None:
        x, y = panel.lines[0].x[panel.chosen], panel.lines[0].y[panel.chosen]
        above = all(y >= other.y[panel.chosen] for other in panel.lines)  # keeps off the other lines
        axes.plot(x, y, "o", markersize=8, markerfacecolor="none", color=INK)
        axes.annotate(
            "chosen", (x, y), (0, 12 if above else -12), textcoords="offset points", ha="center", va="center",
            fontsize=8, color=INK,
        )  # fmt: skip
    for value in panel.baselines.values():
        axes.axhline(value, color=QUIET, linewidth=1, linestyle=_DASHES, zorder=1)
    axes.set_title(panel.title, loc="left", pad=19 + 10 * note.count("\n"), fontsize=10.5, color=INK)
    axes.annotate(note, (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points", fontsize=8, color=QUIET)
    axes.margins(y=0.08)
    axes.locator_params(axis="y", nbins=6, steps=[1, 2, 5, 10])
    if panel.percent:
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.6g}%")
    axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    if panel.from_zero:
        axes.set_ylim(0, None)
    if panel.ticks:
        axes.set_xticks([*panel.ticks], [short_name(str(name)) for name in panel.ticks.values()])
        axes.margins(x=0.06)
    else:
        axes.set_xlim(0, longest * 1.02 or 1)
        axes.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
    axes.set_xlabel(panel.axis)
    labels.sort(key=lambda label: label[0])
    low, high = axes.get_ylim()
    heights = spread_labels([(value - low) / (high - low) for value, *_ in labels], LABEL_GAP)
    for (_, text, colour, weight), height in zip(labels, heights, strict=True):
        axes.annotate(
            text, (1, height), (5, 0), xycoords="axes fraction", textcoords="offset points", va="center", fontsize=8,
            color=colour, fontweight=weight, annotation_clip=False,
        )  # fmt: skip


def line_colours(count: int) -> list[str]:
    """Return a colour for each of ``count`` lines."""
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def layer_ticks(first: int, count: int) -> dict[float, Any]:
    """Return the ticks of ``count`` layers, numbered from ``first``: at most 12."""
    return {i: i for i in range(first, first + count, -(-count // 12))}


def short_name(name: str) -> str:
    """Shorten a long name in the middle."""
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[: half - 1]}…{name[-half:]}"


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
