"""Picture of the windows of slides: which are read, and which were left out as blank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from patchloom.data.source import Source
from patchloom.data.sources.parts import Parts, opened, overview
from patchloom.look.sheet import Caption, Page, Tile, Title, write_sheet

_FILES = 6  # shown
_VEILED = 0.35  # of the brightness of what no window covers
_ORDER = 90  # behind the pictures of a task
_SIDES = 560, 320, 200  # of a slide in pixels


def draw_windows(source: Source, out: Path) -> Path | None:
    """Draw the first slides of a source with their windows bright and the rest dark; None if it has no windows.

    Args:
        source: source of the images.
        out: PNG file to write.
    """
    if not isinstance(source, Parts) or source.division.tile is None:
        return None
    views = []  # the first plane with windows of each file, uint8 [h w 3]
    for number, unit in enumerate(source.units[:_FILES]):
        own = source.parts[source.parts["unit"] == number]
        plane = int(own["plane"][0]) if len(own) else 0
        with opened(unit, source.division) as container:
            grid = overview(container, unit, plane)
        colours = grid[:3] if len(grid) >= 3 else grid[:1].repeat(3, axis=0)
        low, high = colours.min(), colours.max()
        bright = np.full(grid.shape[1:], _VEILED, np.float32)
        rows, columns = (cells / whole for cells, whole in zip(grid.shape[1:], unit.whole, strict=True))
        for part in own[own["plane"] == plane]:
            top, left = round(part["top"] * rows), round(part["left"] * columns)
            bottom, right = round((part["top"] + unit.size[0]) * rows), round((part["left"] + unit.size[1]) * columns)
            bright[top:bottom, left:right] = 1
        shown = (colours - low) / max(high - low, 1e-6)
        views.append((255 * shown * bright).round().astype(np.uint8).transpose(1, 2, 0))

    def page(side: int) -> Page:
        tiles = []
        for number, view in enumerate(views):
            scale = side / max(view.shape[:2])
            size = max(1, round(view.shape[1] * scale)), max(1, round(view.shape[0] * scale))
            picture = np.asarray(Image.fromarray(view).resize(size, Image.Resampling.BILINEAR))
            kept = int((source.parts["unit"] == number).sum())
            tiles.append(Tile(picture, f"{source.units[number].paths[0].name}: {kept:,}"))
        rows = [tiles[i : i + 3] for i in range(0, len(tiles), 3)]
        filled = [[*row, *[None] * (min(3, len(tiles)) - len(row))] for row in rows]
        return Page(filled, [""] * min(3, len(tiles)), Title("Windows that are read", f"{len(source):,} in all"))

    text = "Bright: windows that are read. Dark: windows that are left out, since they are blank, and none at all."
    return write_sheet(out, page, Caption("Windows", text, _ORDER), _SIDES)
