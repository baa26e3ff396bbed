"""Sides in pixels, of images and of patches: as they are given, kept, reckoned with and shown."""

from __future__ import annotations

from collections.abc import Sequence

Sides = tuple[int, int]  # rows and columns
PatchSize = int | Sides  # a side; or both, where they differ


def to_pair(size: int | Sequence[int]) -> Sides:
    """Rows and columns of pixels, of a side or of both."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def compact(size: int | Sequence[int]) -> PatchSize:
    """A size as it is kept: a square as its side, whichever way it was given."""
    rows, columns = to_pair(size)
    return rows if rows == columns else (rows, columns)


def in_pixels(size: str | int | Sequence[int]) -> str:
    """A size in words: 8, 40x1 or auto."""
    return str(size) if isinstance(size, str | int) else "x".join(map(str, size))
