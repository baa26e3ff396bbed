"""A page of tiles: rows of small pictures with words above each, marked patches, frames, and scales beneath."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from patchloom.look.curves import DPI, INK, QUIET, STYLE, write_figure
from patchloom.look.hatching import EMPTY, hatch
from patchloom.look.sheets import font, tile_size, widest_word, wrap

MARK = "#ffd400"
SIDE, GAP, GROUP_GAP, MARGIN = 1.2, 0.08, 0.2, 0.15  # inches: a square tile, between tiles, between groups, around all
LINE = 0.155  # inches of a line of small letters
SMALL, TITLE = 8, 11  # points
NARROWEST = 4.6  # inches
_BAR, _BAR_HEIGHT = 2.2, 0.1  # inches of a scale
_THIN = 0.03  # share of a tile's side that would be hidden by its mark
NOTHING = (0.85, 0.85, 0.85)


class Scale(NamedTuple):
    """Which numbers are of which colour.

    Attributes:
        name: what the numbers are.
        low, high: its ends; what lies beyond has their colour.
        colours: name of a colour map of matplotlib.
        ends: words at its ends, in the place of the numbers.
    """

    name: str
    low: float
    high: float
    colours: str = "viridis"
    ends: tuple[str, str] | None = None

    def shade(self, values: np.ndarray) -> np.ndarray:
        """Colours uint8 [h w 3] of numbers [h w]; nan is grey."""
        table = matplotlib.colormaps[self.colours].with_extremes(bad=NOTHING)
        shown = table(Normalize(self.low, self.high)(np.ma.masked_invalid(values)))
        return (255 * np.asarray(shown)[..., :3]).round().astype(np.uint8)


class Tile(NamedTuple):
    """One small picture.

    Attributes:
        picture: colours uint8 [h w 3]; it fills the tile, however large it is.
        words: above it.
        mark: a rectangle (top, left, height, width) in shares of the tile's sides.
        frame: its colour.
        coloured: further rectangles, each with its colour.
    """

    picture: np.ndarray
    words: str = ""
    mark: tuple[float, float, float, float] | None = None
    frame: str | None = None
    coloured: tuple[tuple[tuple[float, float, float, float], str], ...] = ()


def draw_tiles(
    rows: Sequence[Sequence[Tile]],
    headings: Sequence[str],
    size: tuple[int, int],
    title: str,
    caption: str,
    out: Path,
    scales: Sequence[Scale] = (),
    groups: Sequence[tuple[str, int]] = (),
    side: float = SIDE,
) -> Path:
    """Draw rows of tiles as a PNG file.

    Args:
        rows: each with a tile a heading.
        headings: above the columns.
        size: height and width of the images, whose shape all tiles have.
        title: above all.
        caption: beneath all.
        out: the picture; its folder is made if it is missing.
        scales: drawn beneath the tiles.
        groups: names above so many columns each, which stand a little apart; () for none.
        side: inches of a square tile; others have its area.

    Returns:
        ``out``.

    Raises:
        PatchloomError: the file cannot be written.
    """
    small, bold = (font(round(SMALL * DPI / 72), heavy) for heavy in (False, True))
    large = font(round(TITLE * DPI / 72), bold=True)
    tall, wide = (side * pixels / 1000 for pixels in tile_size(1000 * size[0], 1000 * size[1], 1000))
    heads = [wrap(heading, small, round((wide + GAP / 2) * DPI)) for heading in headings]
    wide = max(wide, *(widest_word(heading, small) / DPI for heading in headings))
    lefts, names, x = [], [], MARGIN
    for name, count in groups or [("", len(headings))]:
        span = count * (wide + GAP) - GAP
        names.append((wrap(name, bold, round(span * DPI)), x + span / 2))
        lefts += [x + i * (wide + GAP) for i in range(count)]
        x += count * (wide + GAP) + GROUP_GAP
    width = max(NARROWEST, x - GROUP_GAP - GAP + MARGIN, 2 * MARGIN + widest_word(title, large) / DPI)
    above, beneath = wrap(title, large, _pixels(width)), wrap(caption, small, _pixels(width))
    spoken = LINE if any(tile.words for row in rows for tile in row) else 0.0
    per_line = max(1, int((width - 2 * MARGIN) // (_BAR + 4 * MARGIN)))
    bars = -(-len(scales) // per_line)
    header = LINE * (max(len(lines) for lines, _ in names) + 0.2 * bool(groups) + max(map(len, heads)))
    top = MARGIN + 1.4 * LINE * len(above) + header + GAP
    bottom = top + len(rows) * (tall + spoken + GAP)
    height = bottom + bars * (3 * LINE + _BAR_HEIGHT) + GAP + LINE * len(beneath) + MARGIN
    with matplotlib.rc_context(STYLE):
        figure = Figure((width, height))

        def write(x: float, y: float, text: str, **style: object) -> None:
            figure.text(x / width, 1 - y / height, text, **({"fontsize": SMALL, "color": INK, "va": "top"} | style))

        def place(x: float, y: float, wide: float, tall: float) -> Axes:
            return figure.add_axes((x / width, 1 - (y + tall) / height, wide / width, tall / height))

        for i, line in enumerate(above):
            write(MARGIN, MARGIN + 1.4 * LINE * i, line, fontsize=TITLE, fontweight="bold")
        y = MARGIN + 1.4 * LINE * len(above)
        for lines, middle in names:
            for i, line in enumerate(lines):
                write(middle, y + LINE * i, line, ha="center", fontweight="bold")
        for left, lines in zip(lefts, heads, strict=True):
            for i, line in enumerate(reversed(lines)):
                write(left + wide / 2, top - GAP - LINE * (i + 1), line, ha="center")
        for i, row in enumerate(rows):
            for left, tile in zip(lefts, row, strict=True):
                y = top + i * (tall + spoken + GAP)
                write(left + wide / 2, y, tile.words, ha="center")
                _draw_tile(place(left, y + spoken, wide, tall), tile, tall)
        for i, scale in enumerate(scales):
            x = MARGIN + i % per_line * (_BAR + 4 * MARGIN)
            y = bottom + i // per_line * (3 * LINE + _BAR_HEIGHT)
            write(x, y, scale.name, color=QUIET)
            _draw_scale(place(x, y + LINE, _BAR, _BAR_HEIGHT), scale)
        for i, line in enumerate(beneath):
            write(MARGIN, height - MARGIN - LINE * (len(beneath) - i), line, color=QUIET)
        return write_figure(figure, out)


def empty_tile(h: int, w: int) -> np.ndarray:
    """What stands for no picture: hatched, colours uint8 [h w 3]."""
    return hatch(EMPTY, h, w)


def wrapped(text: str, width: float) -> str:
    """A text in small letters, broken into lines of a page of ``width`` inches."""
    return "\n".join(wrap(text, font(round(SMALL * DPI / 72)), _pixels(width)))


def _pixels(width: float) -> int:
    return round((width - 2 * MARGIN) * DPI)


def _draw_tile(at: Axes, tile: Tile, height: float) -> None:
    """A tile of so many inches."""
    enlarged = tile.picture.shape[0] <= height * DPI
    at.imshow(tile.picture, extent=(0, 1, 1, 0), aspect="auto", interpolation="nearest" if enlarged else "hamming")
    at.set(xticks=[], yticks=[])
    at.spines[:].set(visible=True, edgecolor=tile.frame or "#999999", linewidth=2.5 if tile.frame else 0.6)
    marks = [((tile.mark, MARK),) if tile.mark is not None else (), tile.coloured]
    for (top, left, tall, wide), own in (one for each in marks for one in each):
        thin = min(tall, wide) < _THIN
        for colour, line in ((INK, 1.4 if thin else 2.6), (own, 0.8 if thin else 1.4)):  # seen on light and on dark
            at.add_patch(Rectangle((left, top), wide, tall, fill=False, edgecolor=colour, linewidth=line))


def _draw_scale(at: Axes, scale: Scale) -> None:
    at.imshow(
        scale.shade(np.linspace(scale.low, scale.high, 256)[None]), aspect="auto",
        extent=(scale.low, scale.high, 0, 1),
    )  # fmt: skip
    at.spines[:].set_visible(False)
    ends = scale.ends or (f"{scale.low:.2g}", f"{scale.high:.2g}")
    at.set(yticks=[])
    at.set_xticks([scale.low, scale.high], ends, fontsize=SMALL)
    at.tick_params(length=2)
    for label, side in zip(at.get_xticklabels(), ("left", "right"), strict=True):
        label.set_horizontalalignment(side)
