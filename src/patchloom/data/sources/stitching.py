"""Maps of files from numbers of their windows, which keep their place on earth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tifffile

from patchloom.data.containers.tiff import PLACE_ON_EARTH, SCALE, TRANSFORM
from patchloom.data.sources.parts import Parts, opened, steps_of
from patchloom.system.files import write_whole

_DOUBLE, _SHORT, _ASCII = 12, 3, 2  # types of TIFF's tags
_KINDS = {34735: _SHORT, 34737: _ASCII}


class Stitched(NamedTuple):
    """Map of one plane of a file.

    Attributes:
        values: float32 [k rows columns]: of each cell, the mean over the windows that cover it; NaN where none does.
        step: height and width of a cell in pixels of the file's finest level.
        place_on_earth: tags of the file, see `Container`.
    """

    values: np.ndarray
    step: tuple[float, float]
    place_on_earth: Mapping[int, Any]


def stitch(source: Parts, number: int, plane: int, values: np.ndarray) -> Stitched:
    """Put numbers of windows together to a map of a plane, with a cell for each step of the windows.

    Args:
        source: windows of files.
        number: number of the file.
        plane: number of the plane.
        values: numbers of all windows of the source, float [n k]; those with NaN are left out.
    """
    unit = source.units[number]
    own = (source.parts["unit"] == number) & (source.parts["plane"] == plane) & ~np.isnan(values).any(axis=1)
    sides = steps_of(unit, source.division)
    rows, columns = (max(1, round(whole / side)) for whole, side in zip(unit.whole, sides, strict=True))
    total, count = np.zeros((values.shape[1], rows, columns)), np.zeros((rows, columns))
    for part, value in zip(source.parts[own], values[own], strict=True):
        top, left = round(part["top"] / sides[0]), round(part["left"] / sides[1])
        bottom = max(top + 1, round((part["top"] + unit.size[0]) / sides[0]))
        right = max(left + 1, round((part["left"] + unit.size[1]) / sides[1]))
        total[:, top:bottom, left:right] += value[:, None, None]
        count[top:bottom, left:right] += 1
    with np.errstate(invalid="ignore"):
        means = (total / count).astype(np.float32)
    with opened(unit, source.division) as container:
        reduced = container.reduction(unit.level)
        return Stitched(means, (sides[0] * reduced, sides[1] * reduced), dict(container.place_on_earth))


def write_map(path: Path, found: Stitched) -> None:
    """Write a map as a TIFF file of 32-bit floats, a page for each number; a GeoTIFF if its file was one."""
    down, across = found.step
    tags = []
    for code in PLACE_ON_EARTH:
        if (value := found.place_on_earth.get(code)) is None:
            continue
        if code == SCALE:
            value = value[0] * across, value[1] * down, value[2]
        if code == TRANSFORM:  # of columns, rows and heights, row by row
            value = tuple((np.reshape(value, (4, 4)) * [across, down, 1, 1]).ravel().tolist())
        kind = _KINDS.get(code, _DOUBLE)
        tags.append((code, kind, 0 if kind == _ASCII else len(value), value, True))
    how: dict[str, Any] = {"photometric": "minisblack", "planarconfig": "separate", "metadata": None, "extratags": tags}
    write_whole(path, lambda to: tifffile.imwrite(to, found.values, **how))
