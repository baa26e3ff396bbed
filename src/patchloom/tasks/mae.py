"""MAE: masked autoencoders are scalable vision learners (He et al., CVPR 2022)."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchloom.patches.partition import random_partition
from patchloom.questions.pixels import Pixels
from patchloom.tasks.sizes import check_normalizable, masked_units, patch_decoder
from patchloom.tasks.task import Size, Task
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches


class MAE(Task):
    """Most patches are removed; their pixels are asked.

    Args:
        encoder: the ViT to train.
        mask_ratio: share γ of the patches that is removed.
        normalized_pixels: ask for pixels normalised within each patch instead of plain ones.
        decoder_width: width of the decoder; auto: 512, or the encoder's own below ViT-S.
        decoder_depth: transformer blocks of the decoder; auto: 8, or 2 below ViT-S.
        decoder_heads: attention heads of the decoder; auto: 16, or one for every 32 channels below ViT-S.

    Raises:
        PatchloomError: the mask ratio leaves nothing visible or nothing masked.
    """

    def __init__(
        self,
        encoder: VisionTransformer,
        mask_ratio: float = 0.75,
        normalized_pixels: bool = True,
        decoder_width: Size = "auto",
        decoder_depth: Size = "auto",
        decoder_heads: Size = "auto",
    ):
        super().__init__(encoder)
        self.sizes = masked_units(self.geometry, 1, mask_ratio)
        if normalized_pixels:
            check_normalizable(self.geometry)
        decoder = patch_decoder(self, decoder_width, decoder_depth, decoder_heads)
        self.questions["pixels"] = Pixels(self.geometry, decoder, normalized_pixels)

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """The visible patches."""
        n = self.geometry.n
        visible, masked = random_partition(len(images), n, self.sizes, generator, images.device)
        return mask_patches(all_patches(images, n), visible, masked)
