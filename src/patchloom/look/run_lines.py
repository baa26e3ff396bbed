"""Panels with a line for each run or encoder, each with its name and last value beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from patchloom.look.charts import (
    MARKED,
    PANEL_HEIGHT,
    PANEL_WIDTH,
    QUIET,
    Panel,
    frame_panel,
    smoothed_values,
    styled_figure,
    write_beside,
    write_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# distinguishable with colour blindness (Okabe and Ito 2008)
_COLOURS = ("#1f5a94", "#d55e00", "#009e73", "#b0568f", "#8a6d00", "#3d9bd1", "#444444", "#a33b20")
_LONGEST = 34  # characters of a line's name
_ROOM, _CHARACTER = 8, 0.072  # characters that fit beside a panel, and inches per character
_NOTHING = np.array([])


class Line(NamedTuple):
    """Line of a panel.

    Attributes:
        name: its name.
        x, y: places and finite values [n].
        low, high: ends of a bar through each point [n]; empty: no bars.
        dashed: whether it is a control.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray = _NOTHING
    high: np.ndarray = _NOTHING
    dashed: bool = False


class LinePanel(NamedTuple):
    """Panel with several lines.

    Attributes:
        title: the heading.
        note: a subtitle in small print.
        lines: the lines.
        show: function that formats a value.
        percent: whether values are fractions, written as percentages.
        smooth: width of the smoothing window as a fraction of a line; 0: none.
        ticks: values of a setting, by place; without any, the places are epochs.
        joined: whether points are joined.
    """

    title: str
    note: str
    lines: Sequence[Line]
    show: Callable[[float], str]
    percent: bool = True
    smooth: float = 0
    ticks: Mapping[float, Any] = {}
    joined: bool = True


def draw_lines(panels: Sequence[LinePanel], axis: str, out: Path) -> Path:
    """Draw panels side by side as a PNG file, over what ``axis`` names."""
    beside = max(len(short_name(line.name)) for panel in panels for line in panel.lines) - _ROOM
    longest = max(len(panel.note) for panel in panels)
    width = max(PANEL_WIDTH + _CHARACTER * max(0, beside), 0.6 + _CHARACTER * longest)
    size = width * len(panels), PANEL_HEIGHT
    with styled_figure(size, {"w_pad": 0.12, "h_pad": 0.08, "wspace": 0.02}) as figure:
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw_panel(axes, panel)
            axes.set_xlabel(axis)
        return write_figure(figure, out)


def _draw_panel(axes: Axes, panel: LinePanel) -> None:
    labels, colours = [], iter(line_colours(len(panel.lines)))
    for line in panel.lines:
        smoothed = smoothed_values(line.y, panel.smooth)
        last = float(smoothed[-1])
        text = f"{short_name(line.name)} {panel.show(last)}".strip()
        if line.dashed:
            dashes: dict[str, Any] = {"linestyle": (0, (4, 3)) if panel.joined else "", "marker": ".", "zorder": 1}
            axes.plot(line.x, line.y, color=QUIET, linewidth=1, markersize=4, **dashes)
            labels.append((last, text, QUIET, "normal"))
            continue
        colour = next(colours)
        if smoothed is not line.y:
            axes.plot(line.x, line.y, color=colour, alpha=0.25, linewidth=0.7)
        style: dict[str, Any] = {"marker": "o" if len(line.y) <= MARKED else None, "clip_on": False}
        style |= {"linestyle": "-" if panel.joined else "", "markersize": 4.5 if panel.ticks else 3}
        axes.plot(line.x, smoothed, color=colour, linewidth=1.7, **style)
        axes.vlines(line.x[: len(line.low)], line.low, line.high, color=colour, linewidth=1.3)
        labels.append((last, text, colour, "bold"))
    frame_panel(axes, Panel(panel.title, panel.note, _NOTHING, _NOTHING, {}, panel.percent, 0))
    if panel.ticks:
        axes.set_xticks([*panel.ticks], [short_name(str(place)) for place in panel.ticks.values()])
        axes.margins(x=0.06)
    else:
        axes.set_xlim(0, max(float(line.x.max()) for line in panel.lines) * 1.02 or 1)
    write_beside(axes, labels)


def line_colours(count: int) -> list[str]:
    """Return a colour for each of ``count`` lines."""
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def short_name(name: str) -> str:
    """Shorten a long name in the middle."""
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[: half - 1]}…{name[-half:]}"
