"""Image and patch sizes as (height, width) in pixels."""

from __future__ import annotations

from collections.abc import Sequence

Sides = tuple[int, int]  # rows and columns
PatchSize = int | Sides  # the side of a square, or both sides


def to_pair(size: int | Sequence[int]) -> Sides:
    """Return a size as (rows, columns)."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def compact(size: int | Sequence[int]) -> PatchSize:
    """Return a size in its shortest form: a square as its side."""
    rows, columns = to_pair(size)
    return rows if rows == columns else (rows, columns)


def in_pixels(size: str | int | Sequence[int]) -> str:
    """Format a size: 8, 40x1 or auto."""
    return str(size) if isinstance(size, str | int) else "x".join(map(str, size))
