"""Masks of objects as annotation files have them: polygons, and run lengths (RLE), as COCO writes both.

Nothing but NumPy is needed, and the pixels are those of COCO's own tools (``pycocotools.mask``), to the last.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_FINE = 5  # steps a pixel in which COCO's tools follow an outline


def filled(outline: Any, height: int, width: int) -> np.ndarray:
    """The mask of one object, bool [h w].

    Args:
        outline: polygons, each a flat list x y x y ... in pixels; or RLE, a dict of ``size`` [h, w] and ``counts``, a
            list or COCO's compressed text. Run lengths go down the columns, and begin with zeros.
        height, width: of the image.

    Raises:
        ValueError: it is neither, or does not fit the image.
    """
    if isinstance(outline, dict):
        if list(outline.get("size", ())) != [height, width]:
            raise ValueError(f"a mask of size {outline.get('size')} [h, w] in an image of {[height, width]}")
        return _of_runs(_counts(outline.get("counts")), height, width)
    mask = np.zeros((height, width), bool)
    for polygon in outline:
        points = np.asarray(polygon, np.float64)
        if points.ndim != 1 or len(points) < 6 or len(points) % 2:
            raise ValueError("a polygon that is not a list x y x y ... of at least three points")
        mask |= _of_polygon(points.reshape(-1, 2), height, width)
    return mask


def _of_runs(counts: np.ndarray, height: int, width: int) -> np.ndarray:
    if counts.sum() != height * width or (counts < 0).any():
        raise ValueError(f"run lengths of {counts.sum():,} pixels in an image of {height * width:,}")
    return np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(width, height).T


def _counts(counts: Any) -> np.ndarray:
    if isinstance(counts, bytes):
        counts = counts.decode("ascii", "replace")
    if isinstance(counts, str):
        return np.array(_numbers(counts), np.int64)
    if isinstance(counts, list | tuple) and all(isinstance(count, int) for count in counts):
        return np.array(counts, np.int64)
    raise ValueError("run lengths that are neither a list of whole numbers nor text")


def _numbers(text: str) -> list[int]:
    """COCO's compressed run lengths: groups of 5 bits, the lowest first, from the fourth on as the change from the
    number two before."""
    found: list[int] = []
    number = shift = 0
    for letter in text:
        bits = ord(letter) - 48
        if not 0 <= bits < 64:
            raise ValueError("run lengths with letters that COCO's compression does not have")
        number |= (bits & 31) << shift
        shift += 5
        if bits & 32:  # another group follows
            continue
        if bits & 16:  # the highest bit is the sign
            number -= 1 << shift
        found.append(number + (found[-2] if len(found) > 2 else 0))
        number = shift = 0
    return found


def _of_polygon(points: np.ndarray, height: int, width: int) -> np.ndarray:
    """Fill a polygon [k 2] of x and y by COCO's rule.

    Its corners are rounded to fifths of a pixel, each side is followed a fifth at a time, and a column of pixels
    changes between out and in wherever the outline passes its middle.
    """
    corners = (points * _FINE + 0.5).astype(np.int64)
    start, end = corners, np.roll(corners, -1, axis=0)
    far = np.abs(end - start)
    steep = far[:, 1] > far[:, 0]
    along = np.where(steep, 1, 0)  # the axis that is followed in whole steps
    sides = np.arange(len(corners))
    turned = start[sides, along] > end[sides, along]  # a side is rounded alike in both directions
    low, high = np.where(turned[:, None], end, start), np.where(turned[:, None], start, end)
    length = far.max(1)
    slope = (high - low)[sides, 1 - along] / np.maximum(length, 1)
    side = np.repeat(sides, length + 1)
    step = np.arange(len(side)) - np.repeat(np.cumsum(length + 1) - (length + 1), length + 1)
    step = np.where(turned[side], length[side] - step, step)
    whole = low[side, along[side]] + step
    other = (low[side, 1 - along[side]] + slope[side] * step + 0.5).astype(np.int64)
    x, y = np.where(steep[side], other, whole), np.where(steep[side], whole, other)
    passed = np.flatnonzero(np.diff(x))
    column = (np.minimum(x[passed], x[passed + 1]) + 0.5) / _FINE - 0.5
    row = (np.minimum(y[passed], y[passed + 1]) + 0.5) / _FINE - 0.5
    kept = (column == np.floor(column)) & (column >= 0) & (column <= width - 1)
    row = np.ceil(np.clip(row[kept], 0, height)).astype(np.int64)
    changes = np.sort(column[kept].astype(np.int64) * height + row)
    return _of_runs(np.diff(np.concatenate([[0], changes, [height * width]])), height, width)
