"""MAE: masked autoencoders are scalable vision learners (He et al., CVPR 2022)."""

from __future__ import annotations

import torch
from torch import Tensor

from patchloom.nets.hierarchical import Encoder
from patchloom.questions.pixels import Pixels
from patchloom.tasks.sizes import check_normalizable, check_uniform, masked_units, partition, patch_decoder
from patchloom.tasks.task import Size, Task
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches


class MAE(Task):
    """Most patches are removed; their pixels are asked.

    A Swin is masked uniformly: one patch of each 2x2 stays, a patch being what a token of its last stage stands for.

    Args:
        encoder: the ViT or Swin to train.
        mask_ratio: share γ of the patches that is removed; of a Swin always 0.75.
        normalized_pixels: ask for pixels normalised within each patch instead of plain ones.
        decoder_width: width of the decoder; auto: 512, or the encoder's own below ViT-S.
        decoder_depth: transformer blocks of the decoder; auto: 8, or 2 below ViT-S.
        decoder_heads: attention heads of the decoder; auto: 16, or one for every 32 channels below ViT-S.

    Raises:
        PatchloomError: the mask ratio leaves nothing visible or nothing masked.
    """

    serves_swin = True

    def __init__(
        self,
        encoder: Encoder,
        mask_ratio: float = 0.75,
        normalized_pixels: bool = True,
        decoder_width: Size = "auto",
        decoder_depth: Size = "auto",
        decoder_heads: Size = "auto",
    ):
        super().__init__(encoder)
        self.sizes = masked_units(self.geometry, 1, mask_ratio)
        check_uniform(self.geometry, mask_ratio)
        if normalized_pixels:
            check_normalizable(self.geometry)
        decoder = patch_decoder(self, decoder_width, decoder_depth, decoder_heads)
        self.questions["pixels"] = Pixels(self.geometry, decoder, normalized_pixels)

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """The visible patches."""
        visible, masked = partition(self.geometry, len(images), self.sizes[0], generator, images.device)
        return mask_patches(all_patches(images, self.geometry.n), visible, masked)
