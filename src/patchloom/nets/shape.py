"""Of which model weights are. Width, depth and patches can be read off them; heads follow the habit of the field."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import timm

from patchloom.nets.fitting import POSITIONS, PROJECTION, State
from patchloom.nets.foreign import BEYOND_MASKING, Program
from patchloom.nets.recognise import depth_of, halves, whole_root

# of a width: timm's name, the depth, and attention heads (Touvron et al. 2021; Dosovitskiy et al. 2021, Table 1)
_USUAL = {
    192: ("vit_tiny_patch16_224", 12, 3),
    384: ("vit_small_patch16_224", 12, 6),
    768: ("vit_base_patch16_224", 12, 12),
    1024: ("vit_large_patch16_224", 24, 16),
    1280: ("vit_huge_patch14_224", 32, 16),
}


class Shape(NamedTuple):
    """The model that weights seem to be of.

    Attributes:
        model: timm's name of one of the same width, depth and patches, or else of the nearest.
        options: what differs from it, as `patchloom.nets.build.EncoderSpec` takes it.
        patch_size: side of a patch in pixels.
        side: height and width of the images in pixels.
        channels: of the images.
        positions: sincos for fixed embeddings of whatever kind, learned, or none.
        width, depth, heads: of the blocks; heads leave no trace in weights, so they are assumed.
    """

    model: str
    options: dict[str, Any]
    patch_size: int
    side: int
    channels: int
    positions: str
    width: int
    depth: int
    heads: int

    def __str__(self) -> str:
        return f"{self.width} wide, {self.depth} deep, patches of {self.patch_size} pixels"


def shape_of(weights: State, program: Program | None = None) -> Shape | None:
    """What weights tell of their model; None for a width or depth at which the number of heads cannot be assumed.

    Args:
        weights: of an encoder, by timm's names.
        program: that wrote them, if it is known: then any depth will do.
    """
    projection, first = weights.get(PROJECTION), weights.get("blocks.0.mlp.fc1.weight")
    if projection is None or projection.ndim != 4 or first is None or first.ndim != 2:
        return None
    width, channels, p, across = projection.shape
    if any(weights[name].ndim != 3 for name in ("cls_token", "reg_token") if name in weights):
        return None
    depth = depth_of(weights)
    if width not in _USUAL or p != across or first.shape[1] != width:
        return None
    model, usual_depth, usual_heads = _USUAL[width]
    if depth != usual_depth and program is None:
        return None
    side = _grid_side(weights, p)
    if not side:
        return None
    heads = usual_heads if program is None else program.heads.get(width, usual_heads)
    options: dict[str, Any] = {}
    if depth != usual_depth:
        options["depth"] = depth
    if heads != usual_heads:
        options["num_heads"] = heads
    if len(first) != 4 * width:
        options["mlp_ratio"] = len(first) / width
    if "cls_token" not in weights:
        options["class_token"] = False
    if "reg_token" in weights:
        options["reg_tokens"] = weights["reg_token"].shape[1]
    if "blocks.0.ls1.gamma" in weights:
        options["init_values"] = 1e-5 if program is None else program.layer_scale
    positions = positions_of(weights, program)
    named = re.sub(r"patch\d+", f"patch{p}", model)
    return Shape(
        named if timm.is_model(named) else model, options, p, p * side, channels, positions, width, depth, heads
    )


def positions_of(weights: State, program: Program | None) -> str:
    """Whether weights have positions, and whether these are fixed: as `Shape` says it."""
    if POSITIONS not in weights:
        return "none"
    return "sincos" if program is BEYOND_MASKING or halves(weights[POSITIONS]) else "learned"


def _grid_side(weights: State, p: int) -> int:
    """Patches along an image, as the position embeddings tell; those of 224 pixels where there are none."""
    table = weights.get(POSITIONS)
    if table is None:
        return 224 // p
    if table.ndim != 3:
        return 0
    tokens = [weights[name].shape[1] for name in ("cls_token", "reg_token") if name in weights]
    without = (sum(tokens), sum(tokens[:1]), 0)  # entries that are not of patches
    return next((side for count in without if (side := whole_root(table.shape[1] - count))), 0)
