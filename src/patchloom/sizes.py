"""Image and patch sizes as (height, width), and shares of them."""

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


def share_of(n: int, share: float) -> int:
    """Return ``n`` times a ``share`` in [0, 1], rounded down.

    The small term corrects products such as ``20 * (1 - 0.9) = 1.9999...`` that would lose a patch.
    """
    return int(n * share + 1e-6)


def scaled(sides: Sides, share: float) -> Sides:
    """Return a ``share`` of both sides, each 1 or more."""
    h, w = (max(1, round(side * share)) for side in sides)
    return h, w
