"""SimMIM: a simple framework for masked image modeling (Xie et al., CVPR 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from patchloom.nets.decoders import PatchHead
from patchloom.nets.swin import Encoder
from patchloom.patches.partition import random_unit_partition
from patchloom.questions.pixels import Pixels
from patchloom.tasks.defaults import check_normalizable
from patchloom.tasks.masking import masked_units, patches_of_unit
from patchloom.tasks.task import Size, Task
from patchloom.withhold.encoder_input import EncoderInput, all_patches, blank_patches


class SimMIM(Task):
    """Reconstruction of the pixels of patches that were replaced by a mask token.

    Args:
        encoder: ViT or Swin to train.
        mask_ratio: fraction of the mask units that is replaced.
        mask_unit: side of a mask unit in pixels; auto: two patches (32 pixels for patches of 16), or one if the grid
            has odd sides; for a Swin the area of one token of its last stage, 32 pixels for Swin-T.
        normalized_pixels: target pixels normalised within each patch.

    Raises:
        PatchloomError: a mask ratio that leaves nothing visible or nothing masked, or a unit that does not fit.
    """

    serves_swin = True
    native_crops = True

    def __init__(
        self,
        encoder: Encoder,
        mask_ratio: float = 0.6,
        mask_unit: Size = "auto",
        normalized_pixels: bool = False,
    ):
        super().__init__(encoder)
        self.unit = patches_of_unit(self, mask_unit)
        self.sizes = masked_units(self.geometry, self.unit, mask_ratio)
        if normalized_pixels:
            check_normalizable(self.geometry)
        g, blank = self.geometry, self.sizes[1] * self.unit**2
        self.mask_token = nn.Parameter(torch.empty(g.token_width).normal_(std=0.02))
        head = PatchHead(g.width, g.patch_dim, g.prefix, visible_asked=blank)
        self.questions["pixels"] = Pixels(g, head, normalized_pixels, absolute=True, blank=blank)

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return all patches; those of the masked units are blank."""
        g = self.geometry
        _, blank = random_unit_partition(len(images), g.grid, self.unit, self.sizes, generator, images.device)
        return blank_patches(all_patches(images, g.n), blank)

    def placeholders(self, given: EncoderInput, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the mask token."""
        return {"mask_token": self.mask_token}
