"""Nets that find objects: Faster or Mask R-CNN on a simple feature pyramid (ViTDet, arXiv 2203.16527).

Letters: b batch, c channels, H W height and width of the canvas in pixels, m objects of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, paste_masks_in_image
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import initLevelMapper

from patchloom.dense.annotations.base import Objects
from patchloom.dense.backbone import FeatureMaps, SimpleFeaturePyramid, four_levels
from patchloom.nets.heads import OnEncoder
from patchloom.nets.swin import Encoder, is_hierarchical

# torchvision's parts of Faster and Mask R-CNN, for a pyramid of any strides and for bfloat16.


_LEAST_SCORE = 0.05  # of what is found, as in detectron2 and mmdetection
_ANCHOR_RATIOS = (0.5, 1.0, 2.0)  # height over width of anchors
_TIMES = 8  # an anchor's side over its level's stride, in FPN and ViTDet
_LEVELS = 2, 5  # logarithms of the strides 4 and 32


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of the heads, and numbers of their candidates.

    Attributes:
        rpn_convolutions: number of convolutions of the region proposal network.
        before, after: number of proposals per level before non-maximum suppression, and per image after it.
        rois: number of proposals per image that the heads are trained on.
        box_convolutions, box_layers: number of convolutions, and widths of the linear layers, of the box head.
        mask_convolutions: number of convolutions of the mask head.
        samples: number of points along a cell of RoIAlign; 0: one per pixel of the map.
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
FULL_HEADS = HeadSizes(
    2, {"training": 2000, "testing": 1000}, {"training": 1000, "testing": 1000}, 512, 4, (1024,), 4, 0
)
LIGHT_HEADS = HeadSizes(
    1, {"training": 300, "testing": 200}, {"training": 200, "testing": 200}, 64, 0, (256, 256), 2, 2
)


def anchor_times(strides: Sequence[float], canvas: tuple[int, int]) -> float:
    """Return an anchor's side over its level's stride: 8, or less if the largest would exceed the canvas."""
    return min(_TIMES, min(canvas) / strides[-1])


class Anchors(AnchorGenerator):
    """Anchors of one scale per level and three aspect ratios, at given strides.

    Args:
        strides: strides of the levels in pixels.
        canvas: height and width of the images in pixels.
    """

    def __init__(self, strides: Sequence[float], canvas: tuple[int, int]) -> None:
        times = anchor_times(strides, canvas)
        super().__init__(tuple((times * stride,) for stride in strides), (_ANCHOR_RATIOS,) * len(strides))
        self.strides = strides

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """Return anchors [a 4] of each image, the same for all."""
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


def _roi_align(side: int, strides: Sequence[float], times: float, heads: HeadSizes) -> MultiScaleRoIAlign:
    pool = MultiScaleRoIAlign([str(i) for i in range(len(strides))], side, heads.samples)
    pool.scales = [1 / stride for stride in strides]
    # a box goes to the level whose anchors are like it: 224 pixels to stride 16, where anchors are 8 strides (FPN)
    pool.map_levels = initLevelMapper(*_LEVELS, canonical_scale=224 * times / _TIMES, canonical_level=4)
    return pool


class Detections(NamedTuple):
    """Detections of an image, the highest score first.

    Attributes:
        boxes: float32 [m 4], x0 y0 x1 y1 in pixels of the canvas.
        labels: int64 [m], from 0.
        scores: float32 [m].
        masks: float32 [m 28 28], probabilities inside the boxes; None without masks. `paste_masks` places
            them.
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    masks: Tensor | None


class Detector(OnEncoder):
    """Faster R-CNN, or Mask R-CNN, on an encoder.

    The heads are ViTDet's, or light ones for small images and slow machines: one convolution in the region proposal
    network, a box head of two linear layers of 256, two convolutions in the mask head, 200 proposals, 64 RoIs per
    image. Levels have strides 4 to 32, and the proposal network a fifth one. Anchors have one scale per level, 8
    strides (32 to 512 pixels), and three aspect ratios. On canvases below 512 pixels they are smaller, so that the
    largest equals the canvas, and boxes are assigned to levels accordingly. Unlike in detectron2, boxes are learnt with
    a smooth L1 loss, and RoIs are sampled half a cell to the right and below (``aligned`` is off), in training and in
    testing.

    Args:
        encoder: encoder at the size of the canvas, from `patchloom.nets.finetune.at_size`; it is not copied.
        classes: number of classes, without the background.
        masks: whether masks are learnt as well.
        width: number of channels of pyramid and heads.
        window: side in patches of the attention windows of most blocks; None: global attention.
        light: whether to use light heads.
        sides: largest shorter and longer side in pixels of a test image; None: it fills the canvas.

    Attributes:
        least_score: detections with a lower score are left out.
    """

    encoder_at = "maps.encoder"

    def __init__(
        self,
        encoder: Encoder,
        classes: int,
        *,
        masks: bool,
        width: int = 256,
        window: int | None = None,
        light: bool = False,
        sides: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.classes, self.masks = classes, masks
        self.sides = None if sides is None else (sides[0], sides[1])
        self.least_score = _LEAST_SCORE
        heads = LIGHT_HEADS if light else FULL_HEADS
        self.maps = FeatureMaps(encoder, four_levels(encoder) if is_hierarchical(encoder) else None, window)
        self.pyramid = SimpleFeaturePyramid(self.maps, width)
        strides = *self.pyramid.strides, 2 * self.pyramid.strides[-1]
        proposals = heads.before, heads.after
        proposing = _ProposalHead(width, len(_ANCHOR_RATIOS), heads.rpn_convolutions)
        anchors = Anchors(strides, self.size)
        self.rpn = RegionProposalNetwork(anchors, proposing, 0.7, 0.3, 256, 0.5, *proposals, 0.7)
        aligned = strides[:-1], anchor_times(strides, self.size), heads
        layers = [width] * heads.box_convolutions, [*heads.box_layers]
        parts: list[nn.Module] = [
            _roi_align(7, *aligned),
            FastRCNNConvFCHead((width, 7, 7), *layers, norm_layer=LayerNorm2d),
            _BoxPredictor(heads.box_layers[-1], classes + 1),
        ]
        of_masks: list[nn.Module] = []
        if masks:
            of_masks = [
                _roi_align(14, *aligned),
                MaskRCNNHeads(width, [width] * heads.mask_convolutions, 1, norm_layer=LayerNorm2d),
                _MaskPredictor(width, width, classes + 1),
            ]
        self.roi_heads = RoIHeads(*parts, *(0.5, 0.5, heads.rois, 0.25, None, _LEAST_SCORE, 0.5, 100), *of_masks)

    def forward(
        self, images: Tensor, sizes: list[tuple[int, int]], targets: list[Objects] | None = None
    ) -> dict[str, Tensor] | list[Detections]:
        """Return losses in training, and detections otherwise."""
        if self.training != (targets is not None):
            raise ValueError("a detector is given targets in training, and only there")
        levels, all_levels = self._levels(images)
        known = None if targets is None else [self._known(one, images.device) for one in targets]
        proposals, losses = self.rpn(ImageList(images, sizes), all_levels, known)
        self.roi_heads.score_thresh = self.least_score
        found, more = self.roi_heads(levels, proposals, sizes, known)
        if self.training:
            return losses | more
        return [
            Detections(one["boxes"], one["labels"] - 1, one["scores"], one["masks"][:, 0] if self.masks else None)
            for one in found
        ]

    def outline(self, images: Tensor) -> Tensor:
        """Return a scalar of everything that a training step computes, with the largest number of boxes and masks.

        The boxes of a real step depend on values, which fake tensors lack, so the pooled regions are placeholders.
        """
        levels, all_levels = self._levels(images)
        scores, boxes = self.rpn.head([*all_levels.values()])
        found = [one.sum() for one in (*scores, *boxes)]
        sampler, width = self.roi_heads.fg_bg_sampler, levels["0"].shape[1]
        rois = len(images) * sampler.batch_size_per_image

        def pooled(count: int, side: int) -> Tensor:
            each = levels["0"].new_zeros(count, width, side, side)  # of the levels, and joined
            return each + sum(one.mean() for one in levels.values())

        found += [one.sum() for one in self.roi_heads.box_predictor(self.roi_heads.box_head(pooled(rois, 7)))]
        if self.masks:
            some = pooled(int(rois * sampler.positive_fraction), 14)
            found.append(self.roi_heads.mask_predictor(self.roi_heads.mask_head(some)).sum())
        return torch.stack(found).sum()

    def _levels(self, images: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the pyramid's levels, and these with the extra level of proposals."""
        levels = {str(i): one.float() for i, one in enumerate(self.pyramid(self.maps(images)))}
        return levels, levels | {"pool": F.max_pool2d(levels[str(len(levels) - 1)], 1, 2)}

    def _known(self, objects: Objects, device: torch.device) -> dict[str, Tensor]:
        """Return an image's targets in torchvision's form, where class 0 is the background."""
        keep = ~objects.crowd
        known = {"boxes": objects.boxes[keep], "labels": objects.labels[keep] + 1}
        if self.masks:
            if objects.masks is None:
                raise ValueError("this detector learns masks, and there are none among the targets")
            known["masks"] = objects.masks[keep]
        return {name: one.to(device, non_blocking=True) for name, one in known.items()}


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Return masks bool [m h w] in an image of ``size``: probabilities of `Detections` of at least 0.5.

    Args:
        masks: float32 [m 28 28].
        boxes: [m 4] in pixels of that image.
        size: height and width of the image in pixels.
    """
    return paste_masks_in_image(masks[:, None], boxes, size)[:, 0] >= 0.5
