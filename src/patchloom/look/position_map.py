"""Maps of position accuracy, of the offsets of wrong predictions, and examples with predicted probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.gridspec import GridSpec
from matplotlib.patches import Rectangle

from patchloom.look.charts import INK, styled_figure, write_figure
from patchloom.look.sheet import Caption

_EMPTY_COLOUR = "#d9d9d9"
_TRUE, _GUESSED = "#00a0e0", "#d55e00"
_EXAMPLE_SIDE, _MAP_SIDE = 1.6, 2.2  # inches: side of an example and of a map
MIN_EXPECTED_GUESSES = 5.0  # offsets with a smaller count expected by chance are left blank
MAX_TIMES_CHANCE = 4.0  # end of the scale: ratio to chance, and its inverse
_PALE = 0.65  # lightening of an example's picture
_HEAT = LinearSegmentedColormap.from_list("heat", [(0.84, 0.37, 0.0, 0.0), (0.84, 0.37, 0.0, 0.75)])


class Example(NamedTuple):
    """Patch with the predicted probability of each position.

    Attributes:
        picture: the image, uint8 [h w 3].
        place: the true position of the patch in the grid.
        likely: predicted probabilities [rows columns].
    """

    picture: np.ndarray
    place: int
    likely: np.ndarray

    @property
    def guess(self) -> int:
        """Most probable position."""
        return int(self.likely.argmax())


def draw_position_map(
    shares: np.ndarray,
    offsets: np.ndarray,
    examples: Sequence[tuple[str, Sequence[Example]]],
    title: str,
    caption: str,
    out: Path,
) -> Path:
    """Draw maps of accuracy by position and of wrong offsets, with examples, as a PNG file."""
    examples = [(name, some) for name, some in examples if some]
    columns = max((len(some) for _, some in examples), default=0)
    grid = shares.shape
    tall = min(1.6, max(0.6, grid[0] / grid[1]))
    height = max(len(examples) * (_EXAMPLE_SIDE * tall + 0.45), 2 * (_MAP_SIDE * tall + 0.75))
    size = _MAP_SIDE + 1.3 + (_EXAMPLE_SIDE + 0.15) * columns, height + 1.3
    with styled_figure(size, {"w_pad": 0.08, "h_pad": 0.08}, title, caption) as figure:
        whole = GridSpec(
            1, 2 if columns else 1, figure, width_ratios=[_MAP_SIDE + 0.9, _EXAMPLE_SIDE * columns][: 1 + bool(columns)]
        )
        left = whole[0].subgridspec(2, 1)
        at = figure.add_subplot(left[0])
        largest = float(np.nanmax(shares)) if np.isfinite(shares).any() else 0.0
        colours = matplotlib.colormaps["viridis"].with_extremes(bad=_EMPTY_COLOUR)
        shown = at.imshow(
            shares, cmap=colours, vmin=0, vmax=largest or 1, interpolation="nearest", aspect=cell_height(grid)
        )
        _bare(at, "Correct, by true position")
        bar = figure.colorbar(shown, ax=at, aspect=15, shrink=0.75)
        bar.ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g} %")
        bar.outline.set_visible(False)
        at, reach, most = figure.add_subplot(left[1]), [side - 0.5 for side in grid], MAX_TIMES_CHANCE
        colours = matplotlib.colormaps["RdBu_r"].with_extremes(bad=_EMPTY_COLOUR)
        shown = at.imshow(
            np.clip(times_as_often(offsets, grid), 1 / most, most), cmap=colours, norm=LogNorm(1 / most, most),
            interpolation="nearest", extent=(-reach[1], reach[1], reach[0], -reach[0]),
            aspect=cell_height(offsets.shape),
        )  # fmt: skip
        at.plot(0, 0, "+", color=INK, markersize=7)
        _bare(at, "Wrong: offset in patches\nfrom the true position (+)")
        for side, put in zip(grid, (at.set_yticks, at.set_xticks), strict=True):
            ticks = [1 - side, 0, side - 1]
            put(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks], fontsize=7)
        bar = figure.colorbar(shown, ax=at, aspect=15, shrink=0.75, ticks=[1 / most, 1, most])
        bar.ax.set_yticklabels([f"{most:g}× less", "as by\nchance", f"{most:g}× more"], fontsize=7)
        bar.ax.minorticks_off()
        bar.outline.set_visible(False)
        if columns:
            right = whole[1].subgridspec(len(examples), columns)
            for i, (name, some) in enumerate(examples):
                for j, one in enumerate(some):
                    at = figure.add_subplot(right[i, j])
                    _draw_example(at, one)
                    if j == 0:
                        at.set_ylabel(name, fontsize=9, color=INK)
        page_caption = Caption(
            "Accuracy of predicted positions",
            "How often the position of a patch is predicted correctly at each place, and how far wrong predictions are "
            "off. If only the borders are bright, the model has learnt mainly what edges look like.",
            200,
        )
        return write_figure(figure, out, page_caption)


def times_as_often(offsets: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Return the frequency of each offset [2 rows - 1, 2 columns - 1] relative to random wrong predictions.

    NaN in the middle, which is the correct position, and where chance expects hardly any.
    """
    ways = np.multiply.outer(*(np.r_[1:side, side:0:-1] for side in grid)).astype(float)
    ways[grid[0] - 1, grid[1] - 1] = 0
    wrong = offsets.astype(float)
    wrong[grid[0] - 1, grid[1] - 1] = 0
    by_chance = ways / max(1.0, ways.sum()) * wrong.sum()
    return np.divide(wrong, by_chance, out=np.full_like(ways, np.nan), where=by_chance >= MIN_EXPECTED_GUESSES)


def cell_height(grid: tuple[int, ...]) -> float:
    """Return the height of a cell relative to its width: 1, unless the map would be a stripe."""
    shape = grid[0] / grid[1]
    return min(4.0, max(0.25, shape)) / shape


def _draw_example(at: Axes, one: Example) -> None:
    h, w = one.picture.shape[:2]
    rows, columns = one.likely.shape
    tall, wide = h / rows, w / columns
    row, column = divmod(one.place, columns)
    picture = 255 - (255 - one.picture.astype(float)) * (1 - _PALE)
    own = np.s_[round(row * tall) : round((row + 1) * tall), round(column * wide) : round((column + 1) * wide)]
    picture[own] = one.picture[own]
    at.imshow(picture.round().astype(np.uint8), interpolation="nearest", extent=(0, w, h, 0))
    heat = one.likely / max(float(one.likely.max()), 1e-9)
    heat = np.where(np.arange(heat.size).reshape(heat.shape) == one.place, 0, heat)  # keeps the patch itself visible
    at.imshow(heat, cmap=_HEAT, vmin=0, vmax=1, interpolation="nearest", extent=(0, w, h, 0))
    for place, colour in ((one.guess, _GUESSED), (one.place, _TRUE)):
        y, x = divmod(place, columns)
        at.add_patch(Rectangle((x * wide, y * tall), wide, tall, fill=False, edgecolor=colour, linewidth=2.2))
    _bare(at, "")
    at.set_xlim(0, w)
    at.set_ylim(h, 0)
    right, best = float(one.likely.flat[one.place]), float(one.likely.max())
    said = f"{right:.0%} here" if one.guess == one.place else f"{right:.0%} here, {best:.0%} there"
    at.set_title(said, fontsize=8, color=INK, pad=3)


def _bare(at: Axes, title: str) -> None:
    at.set(xticks=[], yticks=[])
    at.spines[:].set_visible(False)
    at.set_title(title, fontsize=9, color=INK)
