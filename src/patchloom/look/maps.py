"""Maps of shares over the patch grid, side by side and in one colour scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from patchloom.look.curves import INK, QUIET, STYLE, write_figure

SIDE, LEFT, EDGE = 1.75, 0.9, 0.95  # inches: of a map, for the names of rows, and for heading or caption
NOTHING = "#d9d9d9"


class Map(NamedTuple):
    """One map.

    Attributes:
        shares: [rows columns] in [0, 1]; nan where there is nothing to tell.
        note: a line above it.
    """

    shares: np.ndarray
    note: str


def draw_maps(
    maps: Sequence[Sequence[Map]],
    row_names: Sequence[str],
    column_names: Sequence[str],
    caption: str,
    out: Path,
) -> Path:
    """Draw maps as a PNG file: colours from 0 to the largest share of all of them, grey where there is nothing.

    Args:
        maps: rows of maps.
        row_names: beside each row; may be empty.
        column_names: above each column.
        caption: beneath.
        out: the picture; its folder is made if it is missing.

    Returns:
        ``out``.

    Raises:
        PatchloomError: the file cannot be written.
    """
    largest = max((np.nanmax(one.shares) for row in maps for one in row if np.isfinite(one.shares).any()), default=0.0)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad=NOTHING)
    rows, columns = maps[0][0].shares.shape
    height = SIDE * min(2.0, max(0.5, rows / columns)) + 0.3
    with matplotlib.rc_context(STYLE):
        size = LEFT + (SIDE + 0.15) * len(column_names) + 0.6, height * len(maps) + EDGE
        figure = Figure(size, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
        axes = figure.subplots(len(maps), len(column_names), squeeze=False)
        for i, row in enumerate(maps):
            for j, one in enumerate(row):
                at = axes[i, j]
                shown = at.imshow(one.shares, cmap=colours, vmin=0, vmax=largest or 1, interpolation="nearest")
                at.set(xticks=[], yticks=[])
                at.spines[:].set_visible(False)
                # the name of the column stands above the note of its first map
                name = f"{column_names[j]}\n" if i == 0 else ""
                at.set_title(f"{name}{one.note}", fontsize=8, color=INK)
            axes[i, 0].set_ylabel(row_names[i], rotation=0, ha="right", va="center", fontsize=8, color=INK)
        bar = figure.colorbar(shown, ax=axes, shrink=0.6, aspect=25, pad=0.02)
        bar.ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g} %")
        bar.outline.set_visible(False)
        figure.supxlabel(caption, fontsize=8, color=QUIET, x=0.5, wrap=True)
        return write_figure(figure, out)
