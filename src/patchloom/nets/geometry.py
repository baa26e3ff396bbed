"""Facts about an encoder that pretext tasks need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from patchloom.nets.encode import (
    entry_width,
    grid_size,
    has_class_token,
    has_rotations,
    input_channels,
    patch_size,
    position_kind,
    prefix_count,
    width,
)
from patchloom.nets.swin import Encoder, is_hierarchical, level_count


@dataclass(frozen=True)
class Geometry:
    """Sizes and parts of an encoder; a Swin's patch is the area of one token of its last stage.

    Attributes:
        grid: rows and columns of patches.
        p: rows and columns of pixels of a patch.
        channels: number of channels of the images.
        prefix: number of class and register tokens in front of the patch tokens.
        width: width d of the tokens.
        has_class_token: whether the first token is a class token.
        entry: width of the stand-ins for a patch's content or position, if it differs from ``width``.
        hierarchical: whether the encoder is a Swin, whose patches only uniform masks may remove.
        positions: position embeddings of the patches; a Swin's are fixed, and are no part of the model.
        rotations: whether queries and keys are rotated by the places of patches (RoPE).
        depth: number of blocks; of a Swin, of stages.
    """

    grid: tuple[int, int]
    p: tuple[int, int]
    channels: int
    prefix: int
    width: int
    has_class_token: bool
    entry: int | None = None
    hierarchical: bool = False
    positions: Literal["none", "fixed", "trained"] = "none"
    rotations: bool = False
    depth: int = 0

    @classmethod
    def of(cls, vit: Encoder) -> Geometry:
        """Return the sizes of a timm encoder."""
        return cls(
            grid_size(vit),
            patch_size(vit),
            input_channels(vit),
            prefix_count(vit),
            width(vit),
            has_class_token(vit),
            entry_width(vit),
            is_hierarchical(vit),
            position_kind(vit),
            has_rotations(vit),
            level_count(vit),
        )

    @property
    def has_places(self) -> bool:
        """Whether features depend on the places of patches, by embeddings or rotations."""
        return self.positions != "none" or self.rotations

    @property
    def token_width(self) -> int:
        """Width of the stand-ins for a patch's content or position."""
        return self.width if self.entry is None else self.entry

    @property
    def n(self) -> int:
        """Number of patches of the grid."""
        return self.grid[0] * self.grid[1]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        return self.grid[0] * self.p[0], self.grid[1] * self.p[1]

    @property
    def patch_dim(self) -> int:
        """Numbers per flat patch: channels times pixels."""
        return self.channels * self.p[0] * self.p[1]
