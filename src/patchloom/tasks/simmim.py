"""SimMIM: a simple framework for masked image modeling (Xie et al., CVPR 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from patchloom.nets.decoders import PatchHead
from patchloom.nets.swin import Encoder
from patchloom.options.declare import takes
from patchloom.options.refusals import masked_units
from patchloom.options.tasks import SimMIMOptions
from patchloom.patches.partition import random_unit_partition
from patchloom.questions.pixels import Pixels
from patchloom.tasks.masking import patches_of_unit
from patchloom.tasks.task import Task
from patchloom.withhold.encoder_input import EncoderInput, all_patches, blank_patches


class SimMIM(Task):
    """Reconstruction of the pixels of patches that were replaced by a mask token.

    Args:
        encoder: ViT or Swin to train.

    Raises:
        PatchloomError: a mask ratio that leaves nothing visible or nothing masked, or a unit that does not fit.
    """

    serves_swin = True
    native_crops = True

    @takes(SimMIMOptions)
    def __init__(self, encoder: Encoder, options: SimMIMOptions) -> None:
        super().__init__(encoder, options)
        self.unit = patches_of_unit(self, options.mask_unit)
        self.sizes = masked_units(self.geometry, options.mask_ratio, self.unit)
        g, blank = self.geometry, self.sizes[1] * self.unit**2
        self.mask_token = nn.Parameter(torch.empty(g.token_width).normal_(std=0.02))
        head = PatchHead(g.width, g.patch_dim, g.prefix, visible_asked=blank)
        self.questions["pixels"] = Pixels(g, head, options.normalized_pixels, absolute=True, blank=blank)

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return all patches; those of the masked units are blank."""
        g = self.geometry
        _, blank = random_unit_partition(len(images), g.grid, self.unit, self.sizes, generator, images.device)
        return blank_patches(all_patches(images, g.n), blank)

    def placeholders(self, given: EncoderInput, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the mask token."""
        return {"mask_token": self.mask_token}
