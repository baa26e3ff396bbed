"""MAE: masked autoencoders are scalable vision learners (He et al., CVPR 2022).

With mask units of several patches, a deep decoder and several class tokens it is Pixio, as in the authors' program
(Yang et al., In Pursuit of Pixel Supervision for Visual Pre-training, arXiv 2512.15715).
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchloom.nets.swin import Encoder
from patchloom.questions.pixels import Pixels
from patchloom.tasks.defaults import check_normalizable, patch_decoder
from patchloom.tasks.masking import check_uniform, masked_units, partition, patches_of_unit
from patchloom.tasks.task import Size, Task
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches


class MAE(Task):
    """Reconstruction of the pixels of removed patches.

    A Swin is masked uniformly: one patch of each 2x2 stays, where a patch is the area of one token of its last stage.

    Args:
        encoder: ViT or Swin to train.
        mask_ratio: fraction γ of the mask units that is removed; for a Swin always 0.75.
        normalized_pixels: target pixels normalised within each patch.
        decoder_width: width of the decoder; auto: 512, or the encoder's below ViT-S.
        decoder_depth: number of transformer blocks of the decoder; auto: 8, or 2 below ViT-S.
        decoder_heads: number of attention heads of the decoder; auto: 16, or one per 32 channels below ViT-S.
        mask_unit: side of a mask unit in pixels; auto: one patch. Pixio's is 4x4 patches, 64 pixels for patches of 16.

    Raises:
        PatchloomError: a mask ratio that leaves nothing visible or nothing masked, or a unit that does not fit.
    """

    serves_swin = True
    native_crops = True

    def __init__(
        self,
        encoder: Encoder,
        mask_ratio: float = 0.75,
        normalized_pixels: bool = True,
        decoder_width: Size = "auto",
        decoder_depth: Size = "auto",
        decoder_heads: Size = "auto",
        mask_unit: Size = "auto",
    ):
        super().__init__(encoder)
        self.unit = patches_of_unit(self, mask_unit, usual=1)
        self.sizes = masked_units(self.geometry, self.unit, mask_ratio)
        check_uniform(self.geometry, mask_ratio, self.unit)
        if normalized_pixels:
            check_normalizable(self.geometry)
        decoder = patch_decoder(self, decoder_width, decoder_depth, decoder_heads)
        self.questions["pixels"] = Pixels(self.geometry, decoder, normalized_pixels)

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return the visible patches."""
        visible, masked = partition(self.geometry, len(images), self.sizes[0], generator, images.device, self.unit)
        return mask_patches(all_patches(images, self.geometry.n), visible, masked)
