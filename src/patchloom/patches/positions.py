"""Positions on the patch grid: fixed embeddings, distances, and smoothed labels."""

from __future__ import annotations

import torch
from torch import Tensor

# labels of DropPos: Eq. 5 of the paper, or the map of the authors' program


def sincos_1d(width: int, places: Tensor) -> Tensor:
    """Return the sine-cosine embedding [n width] of ``places`` [n]: sines, cosines of place · 10000^(-2i/width)."""
    if width % 2:
        raise ValueError(f"a sine-cosine embedding needs an even width, not {width}")
    # float64 until the end: in float32 the angles of distant places would lose digits
    frequencies = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64, device=places.device) / (width / 2))
    angles = places.double()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def interleaved_sincos_1d(width: int, n: int) -> Tensor:
    """Return the sine-cosine embedding [n width] of the places 0 to n-1, sine and cosine of each angle interleaved.

    Vaswani et al. 2017, section 3.5; Beyond Masking's program embeds the patches of a grid this way, row by row.
    """
    return sincos_1d(width, torch.arange(n)).unflatten(1, (2, -1)).mT.flatten(1)


def coordinates(grid: tuple[int, int], device: torch.device | str | None = None) -> Tensor:
    """Return row and column [n 2] of every patch of a ``grid`` (rows, columns), row by row, in patch units."""
    rows, columns = (torch.arange(side, device=device, dtype=torch.float32) for side in grid)
    return torch.cartesian_prod(rows, columns)


def sincos_2d(width: int, grid: tuple[int, int], device: torch.device | str | None = None) -> Tensor:
    """Return the fixed 2-d sine-cosine embedding [n width]: half of the channels for the column, then half for the row.

    For a grid of one row, such as the frames of a sound, or of one column, all channels embed the other axis.
    """
    if width % 4:
        raise ValueError(f"a 2-d sine-cosine embedding needs a width divisible by 4, not {width}")
    row, column = coordinates(grid, device).unbind(1)
    if sum(side > 1 for side in grid) == 1:
        return sincos_1d(width, row + column)
    return torch.cat([sincos_1d(width // 2, column), sincos_1d(width // 2, row)], dim=1)


def distances(grid: tuple[int, int], device: torch.device | str | None = None) -> Tensor:
    """Return the Euclidean distance [n n] between any two patches of a ``grid``, in patch units."""
    places = coordinates(grid, device)
    return (places[:, None] - places[None]).norm(dim=-1)


def smoothed_positions(grid: tuple[int, int], sigma: float, device: torch.device | str | None = None) -> Tensor:
    """Return smoothed position labels: row i [n] is the target of a patch whose true position is i.

    DropPos Eq. 5: w(i, j) = exp(-dist(i, j) / σ²), each row normalised to sum 1. With ``sigma`` 0 the rows are
    one-hot.

    Returns:
        Float tensor [n n].
    """
    apart = distances(grid, device)
    if sigma <= 0:
        return torch.eye(len(apart), device=device)
    closeness = torch.exp(-apart / sigma**2)
    return closeness / closeness.sum(1, keepdim=True)


def program_smoothed_positions(n: int, side: int, sigma: float, device: torch.device | str | None = None) -> Tensor:
    """Return the position labels of the DropPos authors' program: row i [n] is the target of patch i.

    The program makes a map of ``side``² places, w(i, j) = exp(-dist(i, j)² / σ²) with each column divided by its sum,
    and takes its first n rows and columns. It computes ``side`` as the image's side // patches per side, which is the
    patch's side in pixels: 16 for its images of 224 pixels, whose patches form a grid of 14. So patch i + ``side``, not
    the patch below, has the label of a lower neighbour, and the rows do not sum to 1.

    Returns:
        Float tensor [n n].
    """
    if sigma <= 0:
        return torch.eye(n, device=device)
    places = coordinates((side, side), device).double()
    apart = (places[:, None] - places[None]).square().sum(-1)
    closeness = torch.exp(-apart / sigma**2).float()
    return (closeness / closeness.sum(-1))[:n, :n]
