"""Nets that give each place of an image a class.

Letters: b batch, c channels, h w height and width of images in pixels, h' w' those of the logits, p side of a patch.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.nets.dense.maps import FeatureMaps, four_levels
from patchloom.nets.dense.pyramid import MultiLevel
from patchloom.nets.dense.upernet import AuxiliaryHead, UPerNet
from patchloom.nets.hierarchical import Encoder
from patchloom.nets.on_encoder import OnEncoder

Head = Literal["upernet", "linear"]
_AUXILIARY_LEVEL = 2  # of stride 16


class SegmentLogits(NamedTuple):
    """What a segmenter answers, at the head's own stride.

    Attributes:
        main: [b classes h' w'].
        auxiliary: [b classes h'' w''], in training alone; None without such a head.
    """

    main: Tensor
    auxiliary: Tensor | None


class _LinearHead(nn.Sequential):
    """BatchNorm without parameters and a 1x1 convolution: linear probes of dense features (DINOv2, section 7.4)."""

    def __init__(self, width: int, classes: int) -> None:
        last = nn.Conv2d(width, classes, 1)
        nn.init.normal_(last.weight, std=0.01)
        nn.init.zeros_(last.bias)
        super().__init__(nn.BatchNorm2d(width, affine=False), last)


class Segmenter(OnEncoder):
    """An encoder with a head for segmentation.

    Args:
        encoder: at the crops' size, as `patchloom.nets.variants.at_size` gives it; it is not copied.
        classes: number of classes.
        head: UPerNet on four levels, all trained; or linear on the last tokens after the final norm, with the encoder
            frozen.
        head_width: of UPerNet.
        auxiliary: whether UPerNet has an auxiliary head on its third level, for training.
    """

    encoder_at = "maps.encoder"

    def __init__(
        self, encoder: Encoder, classes: int, *, head: Head, head_width: int = 512, auxiliary: bool = True
    ) -> None:
        super().__init__()
        self._classes, self.frozen = classes, head == "linear"
        self.maps = FeatureMaps(encoder, None if self.frozen else four_levels(encoder))
        self.pyramid, self.auxiliary = None, None
        if self.frozen:
            self.maps.requires_grad_(False)
            self.head = _LinearHead(self.maps.widths[0], classes)
            return
        self.pyramid = MultiLevel(self.maps)
        widths, grids = self.pyramid.widths, self.pyramid.grids
        self.head = UPerNet(widths, grids, classes, head_width)
        if auxiliary:
            self.auxiliary = AuxiliaryHead(widths[_AUXILIARY_LEVEL], grids[_AUXILIARY_LEVEL], classes)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self._classes

    def train(self, mode: bool = True) -> Segmenter:
        """Set the mode; a frozen encoder stays in eval mode."""
        super().train(mode)
        if self.frozen:
            self.maps.eval()
        return self

    def forward(self, images: Tensor) -> SegmentLogits:
        """Logits of normalised images [b c h w]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            maps = self.maps(images)
        if self.pyramid is None:
            return SegmentLogits(self.head(maps[0]).float(), None)
        levels = self.pyramid(maps)
        helping = self.auxiliary is not None and self.training
        auxiliary = self.auxiliary(levels[_AUXILIARY_LEVEL]).float() if helping else None
        return SegmentLogits(self.head(levels).float(), auxiliary)


class PixelSegmenter(nn.Module):
    """The linear head on the pixels of each patch: the baseline without an encoder.

    Args:
        classes: number of classes.
        size: height and width of the images in pixels, which patches divide.
        channels: of the images.
        patch: side of a patch in pixels.
    """

    def __init__(self, classes: int, size: tuple[int, int], channels: int, patch: int) -> None:
        super().__init__()
        self.classes, self.size, self.channels, self.patch = classes, size, channels, patch
        self.head = _LinearHead(channels * patch**2, classes)

    def forward(self, images: Tensor) -> SegmentLogits:
        """Logits, one for each patch, of normalised images [b c h w]."""
        return SegmentLogits(self.head(F.pixel_unshuffle(images, self.patch)).float(), None)

    def groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Parameter groups as `Segmenter` has them; there is one layer, so ``layer_decay`` changes nothing."""
        weight, bias = self.head[1].weight, self.head[1].bias
        return [
            {"params": [bias], "weight_decay": 0.0, "lr_scale": 1.0},
            {"params": [weight], "weight_decay": weight_decay, "lr_scale": 1.0},
        ]
