"""Which classes are taken for which: a matrix of numbers and shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from patchloom.look.curves import INK, QUIET, STYLE, write_figure

CELL, SMALLEST, ROOMY = 0.5, 0.37, 16  # inches: a cell of few classes, and of many; so many still have large ones
LABEL = 0.075  # inches that a letter of a class's name takes
_RIGHT = LinearSegmentedColormap.from_list("right", ["#ffffff", "#2a6f97"])
_WRONG = LinearSegmentedColormap.from_list("wrong", ["#ffffff", "#c1440e"])
_DARK = 0.7  # share from which on letters are white


def draw_confusion(counts: np.ndarray, classes: Sequence[str], title: str, caption: str, out: Path) -> Path:
    """Draw a confusion matrix as a PNG file: a row a true class, a column an answer.

    Each cell on the diagonal, or that is not empty, has the number, and under it the share of its row; right answers
    are blue, wrong ones red, the darker the more.

    Args:
        counts: [c c] recordings, or images, by true class and answer.
        classes: names [c].
        title: above.
        caption: beneath.
        out: the picture; its folder is made if it is missing.

    Returns:
        ``out``.

    Raises:
        PatchloomError: the file cannot be written.
    """
    c = len(classes)
    side = CELL if c <= ROOMY else max(SMALLEST, CELL * ROOMY / c)
    sums = counts.sum(1)
    shares = counts / np.maximum(sums, 1)[:, None]
    size = max(6.2, 8.5 * side / CELL)
    names = LABEL * max(len(name) for name in classes)
    with matplotlib.rc_context(STYLE):
        figure = Figure((c * side + names + 1.6, c * side + names + 1.5), layout="constrained")
        axes = figure.subplots()
        diagonal = np.eye(c, dtype=bool)
        colours = np.where(diagonal[..., None], _RIGHT(shares), _WRONG(np.sqrt(shares)))  # few mistakes are seen, too
        axes.imshow(colours, interpolation="nearest")
        for i, j in zip(*np.nonzero(diagonal | (counts > 0)), strict=True):
            share = shares[i, j] if i == j else np.sqrt(shares[i, j])
            ink = "white" if share > _DARK else INK
            middle = {"ha": "center", "color": ink, "in_layout": False}  # else the layout takes seconds
            axes.text(j, i + 0.02, f"{counts[i, j]:,}", fontsize=size, va="bottom", **middle)
            axes.text(j, i + 0.06, _percent(shares[i, j]), fontsize=0.8 * size, va="top", **middle)
        font = {"fontsize": min(9.0, 1.15 * size), "color": INK}
        axes.set_xticks(range(c), classes, rotation=90, **font)
        axes.set_yticks(range(c), [f"{name}  ({n:,})" for name, n in zip(classes, sums, strict=True)], **font)
        axes.set_xlabel("answer")
        axes.set_ylabel("truth (how many)")
        axes.set_xticks(np.arange(c + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(c + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="#e4e4e4", linewidth=0.6)
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK, wrap=True)
        figure.supxlabel(caption, fontsize=8, color=QUIET, x=0.01, ha="left", wrap=True)
        return write_figure(figure, out)


def _percent(share: float) -> str:
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"
