"""UPerNet (Xiao et al. 2018, arXiv 1807.10221) without its other tasks, and the head that helps it in training.

A convolution is followed by BatchNorm and ReLU, as in the papers' programs. Where a map is a single place, as after
pooling to 1x1, LayerNorm stands for BatchNorm: one value has no variance in a batch of one image, and hardly any in a
batch of two. Letters: b batch, d width of a map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F

POOLED = (1, 2, 3, 6)  # sides of what the coarsest map is pooled to
DROPOUT = 0.1
AUXILIARY_WIDTH = 256
AUXILIARY_WEIGHT = 0.4  # of the auxiliary head's loss

Grid = tuple[int, int]


def convolution(channels: int, width: int, side: int, grid: Grid) -> nn.Sequential:
    """Convolution of ``side``, norm and ReLU, from ``channels`` to ``width``, for maps of a ``grid``."""
    norm = LayerNorm2d(width) if math.prod(grid) == 1 else nn.BatchNorm2d(width)
    return nn.Sequential(nn.Conv2d(channels, width, side, padding=side // 2, bias=False), norm, nn.ReLU())


def _answer(width: int, classes: int) -> nn.Sequential:
    last = nn.Conv2d(width, classes, 1)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Dropout2d(DROPOUT), last)


def resized(maps: Tensor, grid: Sequence[int]) -> Tensor:
    """Maps [b d h w] at another grid, bilinear."""
    return F.interpolate(maps, size=tuple(grid), mode="bilinear", align_corners=False)


class UPerNet(nn.Module):
    """Pyramid pooling on the coarsest level, a path down to the finest, and all levels fused there.

    Args:
        widths: channels of each level, the finest first.
        grids: rows and columns of each level.
        classes: number of classes.
        width: of all convolutions.
    """

    def __init__(self, widths: Sequence[int], grids: Sequence[Grid], classes: int, width: int = 512) -> None:
        super().__init__()
        *finer, coarsest = widths
        *fine, coarse = grids
        self.pooled = nn.ModuleList(convolution(coarsest, width, 1, (side, side)) for side in POOLED)
        self.context = convolution(coarsest + len(POOLED) * width, width, 3, coarse)
        pairs = list(zip(finer, fine, strict=True))
        self.lateral = nn.ModuleList(convolution(channels, width, 1, grid) for channels, grid in pairs)
        self.smooth = nn.ModuleList(convolution(width, width, 3, grid) for _, grid in pairs)
        self.fuse = convolution(len(widths) * width, width, 3, grids[0])
        self.answer = _answer(width, classes)

    def forward(self, levels: list[Tensor]) -> Tensor:
        """Logits [b classes h w] at the finest of the levels [b d h w]."""
        *finer, coarsest = levels
        shape = coarsest.shape[-2:]
        pooled = [
            resized(one(F.adaptive_avg_pool2d(coarsest, side)), shape)
            for one, side in zip(self.pooled, POOLED, strict=True)
        ]
        sums = [self.context(torch.cat([coarsest, *pooled], dim=1))]
        for lateral, level in zip(reversed(self.lateral), reversed(finer), strict=True):
            sums.insert(0, lateral(level) + resized(sums[0], level.shape[-2:]))
        smooth = [one(level) for one, level in zip(self.smooth, sums[:-1], strict=True)]
        shape = levels[0].shape[-2:]
        return self.answer(self.fuse(torch.cat([resized(one, shape) for one in (*smooth, sums[-1])], dim=1)))


class AuxiliaryHead(nn.Sequential):
    """A fully convolutional head whose loss is added in training: one 3x3 convolution and the answer.

    Args:
        channels: of the map that it reads.
        grid: rows and columns of that.
        classes: number of classes.
    """

    def __init__(self, channels: int, grid: Grid, classes: int) -> None:
        super().__init__(convolution(channels, AUXILIARY_WIDTH, 3, grid), _answer(AUXILIARY_WIDTH, classes))
