"""Windows of an image's patches, for attention that would cost too much over all of them (ViTDet, section 3).

Letters: b batch, n patches of the grid, g windows of one size, t patches of a window, d width.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

_LARGER = 1.5  # so much longer a grid's side may be than in pre-training, before windows are worth it


def window_for(grid: tuple[int, int], pretrained_grid: tuple[int, int]) -> int | None:
    """Side of windows, in patches, for an encoder that was pre-trained on another grid.

    Args:
        grid: rows and columns of patches.
        pretrained_grid: those of pre-training.

    Returns:
        A divisor of both sides that is near to the side in pre-training (16 for a grid of 64x64 and 14x14); that side
        itself if none is; None, for no windows, if the grid's sides are at most 1.5 times as long as those.
    """
    side = math.sqrt(math.prod(pretrained_grid))
    if math.sqrt(math.prod(grid)) <= _LARGER * side:
        return None
    both = math.gcd(*grid)

    def factor(one: int) -> float:
        return max(one / side, side / one)

    near = min((one for one in range(1, both + 1) if both % one == 0), key=factor)
    return near if factor(near) <= _LARGER else round(side)


class Windows(nn.Module):
    """Runs a block in windows of patches, none of which is padded: where ``side`` does not divide, sizes differ by one.

    So a side of 37 patches in windows of 16 is cut in 19 and 18, and windows of one size run as one batch. Each window
    gets a copy of the prefix tokens, which then are the mean over the windows. Stochastic depth is drawn for each
    window by itself.

    Args:
        grid: rows and columns of patches.
        side: of a window, in patches.
        prefix: class and register tokens in front.
    """

    order: Tensor
    back: Tensor

    def __init__(self, grid: tuple[int, int], side: int, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix
        by_shape = defaultdict(list)
        whole = torch.arange(math.prod(grid)).view(grid)
        for rows in whole.split(_parts(grid[0], side)):
            for one in rows.split(_parts(grid[1], side), dim=1):
                by_shape[tuple(one.shape)].append(one.flatten())
        members = [torch.stack(windows) for windows in by_shape.values()]
        self.sizes = [(len(one), one.shape[1]) for one in members]
        order = torch.cat([one.flatten() for one in members])
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("back", order.argsort(), persistent=False)

    def forward(self, run: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        """What ``run``, a block over tokens [b t d], makes of tokens [b prefix+n d], window by window."""
        b, p = len(tokens), self.prefix
        front, patches = tokens[:, :p], tokens[:, p:][:, self.order]
        fronts, made = [], []
        for some, (g, t) in zip(patches.split([g * t for g, t in self.sizes], dim=1), self.sizes, strict=True):
            windows = some.unflatten(1, (g, t))
            given = torch.cat([front[:, None].expand(b, g, -1, -1), windows], dim=2)
            out = run(given.flatten(0, 1)).unflatten(0, (b, g))
            fronts.append(out[:, :, :p])
            made.append(out[:, :, p:].flatten(1, 2))
        return torch.cat([torch.cat(fronts, dim=1).mean(1), torch.cat(made, dim=1)[:, self.back]], dim=1)


def _parts(length: int, side: int) -> list[int]:
    """Lengths, nearly equal, into which a side of the grid is cut."""
    count = max(1, round(length / side))
    return [length // count + (i < length % count) for i in range(count)]
