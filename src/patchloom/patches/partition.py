"""Random partitions of the patches of a grid: visible and masked patches, dropped positions.

Letters: b batch, n patches of the grid, k selected patches.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.sizes import share_of
from patchloom.system.distributed import draw


def random_partition(
    b: int,
    n: int,
    sizes: Sequence[int],
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """Draw disjoint random parts of the ``n`` patches, independently for each of ``b`` images.

    MAE needs the visible and the masked, ``(49, 147)``; LUT two disjoint views, ``(49, 49)``; ExtreMA ``(39,) * 5``.
    Noise is drawn and sorted on the device of ``generator`` and the parts are moved to ``device``, so that a generator
    on the CPU gives the same parts on every machine.
    """
    if sum(sizes) > n:
        raise ValueError(f"{n} patches cannot be divided into {' + '.join(map(str, sizes))}")
    order = draw(torch.rand, (b, n), generator, device).argsort(dim=1)
    return order[:, : sum(sizes)].to(device, non_blocking=True).split(list(sizes), dim=1)


def random_unit_partition(
    b: int,
    grid: tuple[int, int],
    side: int,
    sizes: Sequence[int],
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """Draw a `random_partition` of units of ``side`` x ``side`` patches (SimMIM's coarse masks), as patches."""
    rows, columns = grid[0] // side, grid[1] // side
    inside = torch.arange(side, device=device)
    inside = (inside[:, None] * grid[1] + inside).flatten()  # patches of the first unit
    parts = random_partition(b, rows * columns, sizes, generator, device)
    corners = (part // columns * side * grid[1] + part % columns * side for part in parts)
    return tuple((corner[..., None] + inside).flatten(1) for corner in corners)


def uniform_partition(
    b: int, grid: tuple[int, int], generator: torch.Generator | None = None, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Draw one patch of each cell of 2x2, and return it and the other three (uniform masking; UM-MAE, Li et al. 2022).

    Returns:
        Patches [b n/4] in the order of the cells, a grid of half the side, and the other patches [b 3n/4].
    """
    if grid[0] % 2 or grid[1] % 2:
        raise ValueError(f"a grid of {grid[0]}x{grid[1]} cannot be divided into cells of 2x2")
    cells = grid[0] // 2 * (grid[1] // 2)
    order = draw(torch.rand, (b, cells, 4), generator, device).argsort(dim=2).to(device, non_blocking=True)
    cell = torch.arange(cells, device=device)
    corner = cell // (grid[1] // 2) * 2 * grid[1] + cell % (grid[1] // 2) * 2
    patches = corner[:, None] + order // 2 * grid[1] + order % 2
    return patches[..., 0], patches[..., 1:].flatten(1)


def random_block(
    b: int,
    grid: tuple[int, int],
    block: tuple[int, int],
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Draw one rectangle of patches at a random place of each image (block sampling).

    Returns:
        The patches inside [b r*c] and outside [b n-r*c], each in the order of the grid.
    """
    draws = draw(torch.rand, (b, 2), generator, device).to(device, non_blocking=True).unbind(1)
    room = (side - part + 1 for side, part in zip(grid, block, strict=True))
    top, left = ((one * places).long().clamp(max=places - 1) for one, places in zip(draws, room, strict=True))
    return _block_at(grid, block, top, left)


def central_block(
    b: int, grid: tuple[int, int], block: tuple[int, int], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return the rectangle of patches in the centre of ``b`` images (or half a patch up or left), and the rest."""
    corner = ((side - part) // 2 for side, part in zip(grid, block, strict=True))
    return _block_at(grid, block, *(torch.full((b,), start, device=device) for start in corner))


def _block_at(grid: tuple[int, int], block: tuple[int, int], top: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    row, column = (torch.arange(side, device=top.device) for side in grid)
    in_rows = (row >= top[:, None]) & (row < top[:, None] + block[0])
    in_columns = (column >= left[:, None]) & (column < left[:, None] + block[1])
    outside = ~(in_rows[:, :, None] & in_columns[:, None]).flatten(1)
    order = outside.byte().argsort(dim=1, stable=True)
    return order.split([block[0] * block[1], grid[0] * grid[1] - block[0] * block[1]], dim=1)


def random_rectangles(
    b: int,
    count: int,
    grid: tuple[int, int],
    size: int,
    aspect: tuple[float, float],
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw rectangles of ``size`` patches with random aspect ratios at random places: [b count size].

    I-JEPA's blocks, with equally many patches in each: the ones nearest to a random centre, where a unit is half a side
    of the rectangle. A rectangle that does not fit the grid is reshaped.

    Args:
        b: number of images.
        count: number of rectangles per image, drawn independently.
        grid: rows and columns of patches.
        size: number of patches of a rectangle.
        aspect: lowest and highest ratio of height to width.
        generator, device: as for `random_partition`.
    """
    rows, columns = grid
    draws = draw(torch.rand, (b, 3, count, 1), generator, device).to(device, non_blocking=True).unbind(1)
    ratio = aspect[0] + draws[0] * (aspect[1] - aspect[0])
    height = (size * ratio).sqrt().clamp(max(1.0, size / columns), min(rows, size))
    sides, apart = (height, size / height), []
    for along, side, place in zip(grid, sides, draws[1:], strict=True):
        centre = (side - 1) / 2 + place * (along - side)
        apart.append((torch.arange(along, device=device) - centre).abs() / side)
    order = torch.maximum(apart[0][..., None], apart[1][..., None, :]).flatten(2).argsort(dim=2, stable=True)
    return order[..., :size]


def inverse_blocks(
    b: int,
    count: int,
    grid: tuple[int, int],
    side: int,
    visible: int,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Draw ``count`` masks per image that leave blocks of ``side`` x ``side`` patches (odd) visible (data2vec 2.0).

    Returns:
        Visible [b count visible] and masked patches [b count n-visible]; the last block is cut to the number.
    """
    noise = draw(torch.rand, (b, count, *grid), generator, device).to(device, non_blocking=True)
    highest = F.max_pool2d(noise, side, stride=1, padding=side // 2)  # equal for the patches around a high one
    order = highest.flatten(2).argsort(dim=2, descending=True, stable=True)
    return order[..., :visible], order[..., visible:]


def random_dropped(
    b: int, k: int, ratio: float, generator: torch.Generator | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Draw which of ``k`` visible patches lose their position [b j]: a fraction ``ratio``, rounded up, at least one."""
    kept = min(share_of(k, 1 - ratio), k - 1)
    return random_partition(b, k, (kept, k - kept), generator, device)[1]


def complement(visible: Tensor, n: int) -> Tensor:
    """Return the patches [b n-k] of the grid that are not in ``visible`` [b k], in the order of the grid."""
    seen = torch.zeros(len(visible), n, dtype=torch.uint8, device=visible.device).scatter_(1, visible, 1)
    return seen.argsort(dim=1, stable=True)[:, : n - visible.shape[1]]
