"""What a pretext task has to know of its encoder, in one small value."""

from __future__ import annotations

from dataclasses import dataclass

from patchloom.nets.encode import (
    entry_width,
    grid_size,
    has_class_token,
    input_channels,
    patch_size,
    prefix_count,
    width,
)
from patchloom.nets.swin import Encoder, is_hierarchical


@dataclass(frozen=True)
class Geometry:
    """The patches of an encoder's images, and its tokens; of a Swin, a patch is what a token of its last stage is of.

    Attributes:
        grid: rows and columns of patches.
        p: rows and columns of pixels of a patch.
        channels: of the images.
        prefix: class and register tokens in front of the patch tokens.
        width: of the tokens, d.
        has_class_token: whether the first of the tokens in front is one.
        entry: width of what stands for a patch's content or position, if it is another one than ``width``.
        hierarchical: whether the encoder is a Swin, of which only uniform masks may take patches away.
    """

    grid: tuple[int, int]
    p: tuple[int, int]
    channels: int
    prefix: int
    width: int
    has_class_token: bool
    entry: int | None = None
    hierarchical: bool = False

    @classmethod
    def of(cls, vit: Encoder) -> Geometry:
        """That of a timm encoder."""
        return cls(
            grid_size(vit),
            patch_size(vit),
            input_channels(vit),
            prefix_count(vit),
            width(vit),
            has_class_token(vit),
            entry_width(vit),
            is_hierarchical(vit),
        )

    @property
    def token_width(self) -> int:
        """Width of what stands for a patch's content or position."""
        return self.width if self.entry is None else self.entry

    @property
    def n(self) -> int:
        """Patches of the grid."""
        return self.grid[0] * self.grid[1]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        return self.grid[0] * self.p[0], self.grid[1] * self.p[1]

    @property
    def patch_dim(self) -> int:
        """Numbers of a flat patch: the channels of all of its pixels."""
        return self.channels * self.p[0] * self.p[1]
