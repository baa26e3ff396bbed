"""Patches as tokens: dealing them out, picking them, and going from pixels to patches and back.

Letters: b batch, c channels, h w height width, n patches of the grid, k patches picked, p patch side.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from patchloom.processes import draw


def share_of(n: int, share: float) -> int:
    """How many of ``n`` a ``share`` in [0, 1] is, rounded down.

    The small term repairs products such as ``20 * (1 - 0.9) = 1.9999...`` that would lose a patch.
    """
    return int(n * share + 1e-6)


def deal(
    b: int,
    n: int,
    sizes: Sequence[int],
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """Shuffle ``n`` patches for each of ``b`` images and deal disjoint hands of them.

    MAE deals the visible and the masked, ``(49, 147)``; LUT two views, ``(49, 49)``; ExtreMA ``(39,) * 5``.
    Noise is drawn and sorted where ``generator`` lives and the hands are moved to ``device``, so that a generator on
    the CPU gives the same hands on every machine.

    Args:
        b: images.
        n: patches of the grid.
        sizes: patches in each hand; together at most ``n``.
        generator: source of the noise; the global one of ``device`` if absent.
        device: where the hands shall be.

    Returns:
        One int64 tensor [b size] a hand: indices in [0, n), in random order.

    Raises:
        ValueError: the hands need more than ``n`` patches.
    """
    if sum(sizes) > n:
        raise ValueError(f"hands of {' + '.join(map(str, sizes))} patches cannot be dealt from {n}")
    order = draw(torch.rand, (b, n), generator, device).argsort(dim=1)
    return order[:, : sum(sizes)].to(device, non_blocking=True).split(list(sizes), dim=1)


def deal_units(
    b: int,
    grid: tuple[int, int],
    side: int,
    sizes: Sequence[int],
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """`deal` of square units of ``side`` x ``side`` patches (SimMIM's coarse masks), as the patches in them.

    Args:
        b: images.
        grid: rows and columns of patches, both multiples of ``side``.
        side: patches along a unit.
        sizes: units in each hand.
        generator, device: as for `deal`.

    Returns:
        One int64 tensor [b size*side*side] a hand: patch indices, unit after unit.
    """
    rows, columns = grid[0] // side, grid[1] // side
    inside = torch.arange(side, device=device)
    inside = (inside[:, None] * grid[1] + inside).flatten()  # of the first unit
    hands = deal(b, rows * columns, sizes, generator, device)
    corners = (hand // columns * side * grid[1] + hand % columns * side for hand in hands)
    return tuple((corner[..., None] + inside).flatten(1) for corner in corners)


def deal_block(
    b: int,
    grid: tuple[int, int],
    block: tuple[int, int],
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """One rectangle of patches at a random place of each image, and the rest (block sampling).

    Args:
        b: images.
        grid: rows and columns of patches.
        block: rows and columns of the rectangle.
        generator, device: as for `deal`.

    Returns:
        The patches inside [b r*c] and outside [b n-r*c], each in the order of the grid.
    """
    draws = draw(torch.rand, (b, 2), generator, device).to(device, non_blocking=True).unbind(1)
    room = (side - part + 1 for side, part in zip(grid, block, strict=True))
    top, left = ((one * places).long().clamp(max=places - 1) for one, places in zip(draws, room, strict=True))
    row, column = (torch.arange(side, device=device) for side in grid)
    in_rows = (row >= top[:, None]) & (row < top[:, None] + block[0])
    in_columns = (column >= left[:, None]) & (column < left[:, None] + block[1])
    outside = ~(in_rows[:, :, None] & in_columns[:, None]).flatten(1)
    order = outside.byte().argsort(dim=1, stable=True)
    return order.split([block[0] * block[1], grid[0] * grid[1] - block[0] * block[1]], dim=1)


def take(tokens: Tensor, indices: Tensor) -> Tensor:
    """The tokens [b k d] that ``indices`` [b k] name among ``tokens`` [b n d]; ``tokens`` may also be [b n]."""
    if tokens.ndim == 2:
        return tokens.gather(1, indices)
    rows = torch.arange(len(indices), device=indices.device)[:, None]
    return tokens[rows, indices]


def put(tokens: Tensor, indices: Tensor, into: Tensor) -> Tensor:
    """A copy of ``into`` [b n d] with ``tokens`` [b k d] at ``indices`` [b k]; undoes `take`."""
    rows = torch.arange(len(indices), device=indices.device)[:, None]
    return into.index_put((rows, indices), tokens.to(into.dtype))


def by_grid(tokens: Tensor, *hands: Tensor) -> Tensor:
    """Tokens [b n d] in the order of the grid, which came in that of ``hands`` [b k]: together all n patches."""
    return take(tokens, torch.cat(hands, dim=1).argsort(dim=1))


def grid_of(images: Tensor, p: int) -> tuple[int, int]:
    """Rows and columns of patches of side ``p`` in images [b c h w]."""
    return images.shape[2] // p, images.shape[3] // p


def _grid_of_patches(images: Tensor, p: int) -> Tensor:
    b, c, h, w = images.shape
    if h % p or w % p:
        raise ValueError(f"images of {h}x{w} pixels cannot be cut into patches of {p}x{p}")
    return images.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5)  # [b rows columns c p p], a view


def patchify(images: Tensor, p: int, indices: Tensor | None = None) -> Tensor:
    """Cut images [b c h w] into flat patches [b n c*p*p], row by row, or only into those of ``indices`` [b k].

    Inside a patch the order is that of a convolution's weight (channel, row, column), so that a patch projection is
    one matrix product with the flattened weight. Patches that are not asked for are never copied. Indices [v*b k] name
    those of v views of every image, all images' first ones first.

    Raises:
        ValueError: the patch does not divide the image, or there are not as many rows of indices for each image.
    """
    patches = _grid_of_patches(images, p)
    if indices is None:
        return patches.flatten(3).flatten(1, 2)
    if len(images) and len(indices) % len(images):
        raise ValueError(f"{len(indices)} rows of indices do not belong to {len(images)} images alike")
    columns = patches.shape[2]
    rows = torch.arange(len(images), device=indices.device).repeat(len(indices) // max(1, len(images)))[:, None]
    return patches[rows, indices // columns, indices % columns].flatten(2)


def unpatchify(patches: Tensor, p: int, grid: tuple[int, int]) -> Tensor:
    """Put flat patches [b n c*p*p] of a ``grid`` (rows, columns) back into images [b c h w]; undoes `patchify`."""
    b = len(patches)
    rows, columns = grid
    cut = patches.reshape(b, rows, columns, -1, p, p).permute(0, 3, 1, 4, 2, 5)
    return cut.reshape(b, -1, rows * p, columns * p)


def patch_statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation [b n 1] of each patch over all its numbers, as MAE normalises: unbiased, 1e-6 inside."""
    return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + 1e-6).sqrt()


def normalize_patches(patches: Tensor) -> Tensor:
    """Each patch [b n f] with zero mean and unit deviation: MAE's normalised pixels (section 3, "per-patch")."""
    mean, deviation = patch_statistics(patches)
    return (patches - mean) / deviation


def patch_channel_statistics(patches: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Mean and deviation [b n f] of each channel of each flat patch [b n f], as Beyond Masking normalises.

    The deviation is unbiased, and has 1e-6 added so that one can divide by it; images are meant to be in [0, 1].
    """
    each = patches.unflatten(-1, (channels, -1))
    statistics = each.mean(-1, keepdim=True), each.std(-1, keepdim=True) + 1e-6
    return tuple(statistic.expand_as(each).flatten(-2) for statistic in statistics)
