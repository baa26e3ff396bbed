"""What a pretext task has to know of its encoder, in one small value."""

from __future__ import annotations

from dataclasses import dataclass

from timm.models.vision_transformer import VisionTransformer

from patchloom.nets.encode import grid_size, input_channels, patch_side


@dataclass(frozen=True)
class Geometry:
    """The patches of an encoder's images, and its tokens.

    Attributes:
        grid: rows and columns of patches.
        p: side of a patch in pixels.
        channels: of the images.
        prefix: class and register tokens in front of the patch tokens.
        width: of the tokens, d.
        has_class_token: whether the first of the tokens in front is one.
    """

    grid: tuple[int, int]
    p: int
    channels: int
    prefix: int
    width: int
    has_class_token: bool

    @classmethod
    def of(cls, vit: VisionTransformer) -> Geometry:
        """That of a timm encoder."""
        return cls(
            grid_size(vit),
            patch_side(vit),
            input_channels(vit),
            vit.num_prefix_tokens,
            vit.embed_dim,
            vit.has_class_token,
        )

    @property
    def n(self) -> int:
        """Patches of the grid."""
        return self.grid[0] * self.grid[1]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        return self.grid[0] * self.p, self.grid[1] * self.p

    @property
    def patch_dim(self) -> int:
        """Numbers of a flat patch, c·p·p."""
        return self.channels * self.p**2
