"""Nets that give each place of an image a class.

Letters: b batch, c channels, h w height and width of images in pixels, h' w' those of the logits, p side of a patch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.dense.backbone import FeatureMaps, MultiLevel, four_levels
from patchloom.nets.heads import OnEncoder
from patchloom.nets.swin import Encoder

# UPerNet (Xiao et al. 2018, arXiv 1807.10221) without its other tasks, and the head that helps it in training.


POOL_SIZES = (1, 2, 3, 6)  # sides of what the coarsest map is pooled to
_DROPOUT = 0.1
_AUXILIARY_WIDTH = 256

Grid = tuple[int, int]


def convolution(channels: int, width: int, side: int, grid: Grid) -> nn.Sequential:
    """Return a convolution of ``side``, norm and ReLU, from ``channels`` to ``width``, for maps of a ``grid``."""
    norm = LayerNorm2d(width) if math.prod(grid) == 1 else nn.BatchNorm2d(width)
    return nn.Sequential(nn.Conv2d(channels, width, side, padding=side // 2, bias=False), norm, nn.ReLU())


def _answer(width: int, classes: int) -> nn.Sequential:
    last = nn.Conv2d(width, classes, 1)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.get_parameter("bias"))
    return nn.Sequential(nn.Dropout2d(_DROPOUT), last)


def resize_maps(maps: Tensor, grid: Sequence[int]) -> Tensor:
    """Resize maps [b d h w] to another grid, bilinearly."""
    return F.interpolate(maps, size=tuple(grid), mode="bilinear", align_corners=False)


class UPerNet(nn.Module):
    """UPerNet: pyramid pooling on the coarsest level, a top-down path to the finest, where all levels are fused.

    Args:
        widths: number of channels of each level, the finest first.
        grids: rows and columns of each level.
        classes: number of classes.
        width: number of channels of all convolutions.
    """

    def __init__(self, widths: Sequence[int], grids: Sequence[Grid], classes: int, width: int = 512) -> None:
        super().__init__()
        *finer, coarsest = widths
        *fine, coarse = grids
        self.pooled = nn.ModuleList(convolution(coarsest, width, 1, (side, side)) for side in POOL_SIZES)
        self.context = convolution(coarsest + len(POOL_SIZES) * width, width, 3, coarse)
        pairs = list(zip(finer, fine, strict=True))
        self.lateral = nn.ModuleList(convolution(channels, width, 1, grid) for channels, grid in pairs)
        self.smooth = nn.ModuleList(convolution(width, width, 3, grid) for _, grid in pairs)
        self.fuse = convolution(len(widths) * width, width, 3, grids[0])
        self.answer = _answer(width, classes)

    def forward(self, levels: list[Tensor]) -> Tensor:
        """Return logits [b classes h w] at the finest of the levels [b d h w]."""
        *finer, coarsest = levels
        shape = coarsest.shape[-2:]
        pooled = [
            resize_maps(one(F.adaptive_avg_pool2d(coarsest, side)), shape)
            for one, side in zip(self.pooled, POOL_SIZES, strict=True)
        ]
        sums = [self.context(torch.cat([coarsest, *pooled], dim=1))]
        for lateral, level in zip(reversed(self.lateral), reversed(finer), strict=True):
            sums.insert(0, lateral(level) + resize_maps(sums[0], level.shape[-2:]))
        smooth = [one(level) for one, level in zip(self.smooth, sums[:-1], strict=True)]
        shape = levels[0].shape[-2:]
        return self.answer(self.fuse(torch.cat([resize_maps(one, shape) for one in (*smooth, sums[-1])], dim=1)))


class AuxiliaryHead(nn.Sequential):
    """Fully convolutional head with an extra loss in training: one 3x3 convolution and a 1x1 convolution.

    Args:
        channels: number of channels of the input map.
        grid: rows and columns of the input map.
        classes: number of classes.
    """

    def __init__(self, channels: int, grid: Grid, classes: int) -> None:
        super().__init__(convolution(channels, _AUXILIARY_WIDTH, 3, grid), _answer(_AUXILIARY_WIDTH, classes))


SegmentationHead = Literal["upernet", "linear"]
_AUXILIARY_LEVEL = 2  # of stride 16


class SegmentLogits(NamedTuple):
    """Logits of a segmenter, at the stride of the head.

    Attributes:
        main: [b classes h' w'].
        auxiliary: [b classes h'' w''], in training only; None without an auxiliary head.
    """

    main: Tensor
    auxiliary: Tensor | None


class _LinearHead(nn.Sequential):
    """BatchNorm without parameters and a 1x1 convolution: linear probes of dense features (DINOv2, section 7.4)."""

    def __init__(self, width: int, classes: int) -> None:
        last = nn.Conv2d(width, classes, 1)
        nn.init.normal_(last.weight, std=0.01)
        nn.init.zeros_(last.get_parameter("bias"))
        super().__init__(nn.BatchNorm2d(width, affine=False), last)


class Segmenter(OnEncoder):
    """Encoder with a segmentation head.

    Args:
        encoder: encoder at the size of the crops, from `patchloom.nets.finetune.at_size`; it is not copied.
        classes: number of classes.
        head: upernet on four levels, trained with the encoder; or linear on the tokens after the final norm, with the
            encoder frozen.
        head_width: width of UPerNet.
        auxiliary: whether UPerNet has an auxiliary head on its third level, for training.
    """

    encoder_at = "maps.encoder"

    def __init__(
        self, encoder: Encoder, classes: int, *, head: SegmentationHead, head_width: int = 512, auxiliary: bool = True
    ) -> None:
        super().__init__()
        self.classes, linear = classes, head == "linear"
        self.maps = FeatureMaps(encoder, None if linear else four_levels(encoder))
        self.pyramid: MultiLevel | None = None
        self.auxiliary: AuxiliaryHead | None = None
        self.head: _LinearHead | UPerNet
        if linear:
            self.frozen = (self.maps.requires_grad_(False),)
            self.head = _LinearHead(self.maps.widths[0], classes)
            return
        self.pyramid = MultiLevel(self.maps)
        widths, grids = self.pyramid.widths, self.pyramid.grids
        self.head = UPerNet(widths, grids, classes, head_width)
        if auxiliary:
            self.auxiliary = AuxiliaryHead(widths[_AUXILIARY_LEVEL], grids[_AUXILIARY_LEVEL], classes)

    def forward(self, images: Tensor) -> SegmentLogits:
        """Return logits of normalised images [b c h w]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            maps = self.maps(images)
        if self.pyramid is None:
            return SegmentLogits(self.head(maps[0]).float(), None)
        levels = self.pyramid(maps)
        auxiliary = None
        if self.auxiliary is not None and self.training:
            auxiliary = self.auxiliary(levels[_AUXILIARY_LEVEL]).float()
        return SegmentLogits(self.head(levels).float(), auxiliary)


class PixelSegmenter(nn.Module):
    """Linear head on the pixels of each patch: the baseline without an encoder.

    Args:
        classes: number of classes.
        size: height and width of the images in pixels, divisible by the patch.
        channels: number of channels of the images.
        patch: side of a patch in pixels.
    """

    def __init__(self, classes: int, size: tuple[int, int], channels: int, patch: int) -> None:
        super().__init__()
        self.classes, self.size, self.channels, self.patch = classes, size, channels, patch
        self.head = _LinearHead(channels * patch**2, classes)

    def forward(self, images: Tensor) -> SegmentLogits:
        """Return logits of normalised images [b c h w], one per patch."""
        return SegmentLogits(self.head(F.pixel_unshuffle(images, self.patch)).float(), None)

    def groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Return parameter groups as in `Segmenter`; with one layer, ``layer_decay`` has no effect."""
        weight, bias = self.head[1].weight, self.head[1].bias
        return [
            {"params": [bias], "weight_decay": 0.0, "lr_scale": 1.0},
            {"params": [weight], "weight_decay": weight_decay, "lr_scale": 1.0},
        ]
