"""torchvision's parts of Faster and Mask R-CNN, for a pyramid of any strides and for bfloat16.

torchvision reads strides off the sizes of maps, as whole numbers or powers of two, which is wrong where a patch has 14
pixels, where a grid is odd, or where an image fills but a part of its canvas: here they are told. Numbers from which
boxes are made are float32, autocast or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import initLevelMapper

LEAST_SCORE = 0.05  # of what is found, as in detectron2 and mmdetection
RATIOS = (0.5, 1.0, 2.0)  # height over width of anchors
_TIMES = 8  # an anchor's side over its level's stride, in FPN and ViTDet
_LEVELS = 2, 5  # logarithms of the strides 4 and 32


@dataclass(frozen=True)
class Heads:
    """Sizes of the heads, and how many candidates they work on.

    Attributes:
        rpn_convolutions: of the region proposal network.
        before, after: proposals of a level before non-maximum suppression, and of an image after it.
        rois: proposals of an image that the heads are trained on.
        box_convolutions, box_layers: of the box head; widths of its linear layers.
        mask_convolutions: of the mask head.
        samples: points along a cell of RoIAlign; 0: as many as it has pixels of the map.
    """

    rpn_convolutions: int
    before: dict[str, int]
    after: dict[str, int]
    rois: int
    box_convolutions: int
    box_layers: tuple[int, ...]
    mask_convolutions: int
    samples: int


# ViTDet's (arXiv 2203.16527, appendix A.2, and its program in detectron2)
FULL = Heads(2, {"training": 2000, "testing": 1000}, {"training": 1000, "testing": 1000}, 512, 4, (1024,), 4, 0)
LIGHT = Heads(1, {"training": 300, "testing": 200}, {"training": 200, "testing": 200}, 64, 0, (256, 256), 2, 2)


def anchor_times(strides: Sequence[float], canvas: tuple[int, int]) -> float:
    """An anchor's side over its level's stride: 8, or less where the largest one would not fit the canvas."""
    return min(_TIMES, min(canvas) / strides[-1])


class Anchors(AnchorGenerator):
    """One scale a level, three ratios, at strides that are told.

    Args:
        strides: of the levels in pixels.
        canvas: height and width of the images in pixels.
    """

    def __init__(self, strides: Sequence[float], canvas: tuple[int, int]) -> None:
        times = anchor_times(strides, canvas)
        super().__init__(tuple((times * stride,) for stride in strides), (RATIOS,) * len(strides))
        self.strides = strides

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """Anchors [a 4] of each image: the same for all."""
        self.set_cell_anchors(torch.float32, feature_maps[0].device)
        grids = [list(one.shape[-2:]) for one in feature_maps]
        made = torch.cat(self.grid_anchors(grids, [[stride, stride] for stride in self.strides]))
        return [made] * len(image_list.image_sizes)


class _ProposalHead(RPNHead):
    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scores, boxes = super().forward(x)
        return [one.float() for one in scores], [one.float() for one in boxes]


class _BoxPredictor(FastRCNNPredictor):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, boxes = super().forward(x)
        return scores.float(), boxes.float()


class _MaskPredictor(MaskRCNNPredictor):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


def proposal_network(
    width: int, strides: Sequence[float], canvas: tuple[int, int], heads: Heads
) -> RegionProposalNetwork:
    """The region proposal network on levels of ``width`` channels."""
    head = _ProposalHead(width, len(RATIOS), heads.rpn_convolutions)
    return RegionProposalNetwork(Anchors(strides, canvas), head, 0.7, 0.3, 256, 0.5, heads.before, heads.after, 0.7)


def _roi_align(side: int, strides: Sequence[float], times: float, heads: Heads) -> MultiScaleRoIAlign:
    pool = MultiScaleRoIAlign([str(i) for i in range(len(strides))], side, heads.samples)
    pool.scales = [1 / stride for stride in strides]
    # a box goes to the level whose anchors are like it: 224 pixels to stride 16, where anchors are 8 strides (FPN)
    pool.map_levels = initLevelMapper(*_LEVELS, canonical_scale=224 * times / _TIMES, canonical_level=4)
    return pool


def roi_heads(width: int, strides: Sequence[float], times: float, classes: int, masks: bool, heads: Heads) -> RoIHeads:
    """Box head and, if wanted, mask head, for levels of ``width`` channels; ``classes`` without the background."""
    convolutions = [width] * heads.box_convolutions
    box = FastRCNNConvFCHead((width, 7, 7), convolutions, list(heads.box_layers), norm_layer=LayerNorm2d)
    parts: list[nn.Module] = []
    if masks:
        parts = [
            _roi_align(14, strides, times, heads),
            MaskRCNNHeads(width, [width] * heads.mask_convolutions, 1, norm_layer=LayerNorm2d),
            _MaskPredictor(width, width, classes + 1),
        ]
    return RoIHeads(
        _roi_align(7, strides, times, heads),
        box,
        _BoxPredictor(heads.box_layers[-1], classes + 1),
        *(0.5, 0.5, heads.rois, 0.25, None, LEAST_SCORE, 0.5, 100),
        *parts,
    )
