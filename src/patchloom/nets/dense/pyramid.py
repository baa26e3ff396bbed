"""Pyramids: maps of strides 4, 8, 16 and 32 made of those that an encoder gives.

A stride is reached by doubling or halving: for patches of 8 pixels x2, x1, /2 and /4. Patches of other sizes count as
the nearest power of two, so that of 14 pixels the strides are 3.5, 7, 14 and 28. Halving rounds up: a cell at the
border that is half empty is kept. Letters: b batch, d width of a map.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from timm.layers import LayerNorm2d
from torch import Tensor, nn

from patchloom.nets.dense.maps import TARGETS, FeatureMaps


class _Pyramid(nn.Module):
    """Levels of the strides wanted, each of its own map, or all of the only one.

    Attributes:
        strides: of each level in pixels.
        grids: rows and columns of each level.
        widths: channels of each level.
    """

    widths: tuple[int, ...]

    def __init__(self, maps: FeatureMaps) -> None:
        super().__init__()
        if len(maps.strides) not in (1, len(TARGETS)):
            raise ValueError(f"a pyramid is made of one map or of {len(TARGETS)}, not of {len(maps.strides)}")
        self.sources = tuple(min(i, len(maps.strides) - 1) for i in range(len(TARGETS)))
        strides = [maps.strides[source] for source in self.sources]
        self.doublings = tuple(
            round(math.log2(stride / wanted)) for stride, wanted in zip(strides, TARGETS, strict=True)
        )
        self.strides = tuple(stride / 2**by for stride, by in zip(strides, self.doublings, strict=True))
        self.grids = tuple(
            (_scaled(maps.grids[source][0], by), _scaled(maps.grids[source][1], by))
            for source, by in zip(self.sources, self.doublings, strict=True)
        )
        self.levels = nn.ModuleList()

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Levels [b width rows columns], the finest first, of the maps [b d rows columns]."""
        return [level(maps[source]) for level, source in zip(self.levels, self.sources, strict=True)]


def _scaled(side: int, doublings: int) -> int:
    return side << doublings if doublings >= 0 else -(-side >> -doublings)


def _scaling(widths: list[int], norm: Callable[[int], nn.Module]) -> list[nn.Module]:
    """Transposed convolutions from each width to the next, each of which doubles; between them norm and GELU."""
    layers: list[nn.Module] = []
    for narrow, wide in zip(widths[1:], widths, strict=False):
        if layers:
            layers += [norm(wide), nn.GELU()]
        layers.append(nn.ConvTranspose2d(wide, narrow, 2, 2))
    return layers


def _pooling(doublings: int) -> list[nn.Module]:
    return [nn.MaxPool2d(2**-doublings, ceil_mode=True)] if doublings < 0 else []


class SimpleFeaturePyramid(_Pyramid):
    """ViTDet's pyramid (arXiv 2203.16527, section 3 and appendix A.2): every level is made of the last map.

    Transposed convolutions, which halve the width, with LayerNorm and GELU between them, or max pooling; then 1x1 and
    3x3 convolution, a LayerNorm after each. Of a Swin, each stage gives the level of its stride.

    Args:
        maps: one map, or one for each level.
        width: channels of every level.
    """

    def __init__(self, maps: FeatureMaps, width: int = 256) -> None:
        super().__init__(maps)
        for source, by in zip(self.sources, self.doublings, strict=True):
            widths = [max(1, maps.widths[source] >> i) for i in range(max(0, by) + 1)]
            convolutions = [
                *(nn.Conv2d(widths[-1], width, 1, bias=False), LayerNorm2d(width)),
                *(nn.Conv2d(width, width, 3, padding=1, bias=False), LayerNorm2d(width)),
            ]
            self.levels.append(nn.Sequential(*_scaling(widths, LayerNorm2d), *_pooling(by), *convolutions))
        self.widths = (width,) * len(TARGETS)


class MultiLevel(_Pyramid):
    """Levels for UPerNet, the k-th of the k-th map, as BEiT's and MAE's segmentation has it: widths stay.

    Transposed convolutions with BatchNorm and GELU between them, the map as it is, or max pooling.

    Args:
        maps: one for each level.
    """

    def __init__(self, maps: FeatureMaps) -> None:
        super().__init__(maps)
        self.widths = tuple(maps.widths[source] for source in self.sources)
        for d, by in zip(self.widths, self.doublings, strict=True):
            self.levels.append(nn.Sequential(*_scaling([d] * (max(0, by) + 1), nn.BatchNorm2d), *_pooling(by)))
