"""MAE: masked autoencoders are scalable vision learners (He et al., CVPR 2022).

With mask units of several patches, a deep decoder and several class tokens it is Pixio, as in the authors' program
(Yang et al., In Pursuit of Pixel Supervision for Visual Pre-training, arXiv 2512.15715).
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchloom.nets.swin import Encoder
from patchloom.options.declare import takes
from patchloom.options.refusals import masked_units
from patchloom.options.tasks import MAEOptions
from patchloom.questions.pixels import Pixels
from patchloom.tasks.defaults import patch_decoder
from patchloom.tasks.masking import partition, patches_of_unit
from patchloom.tasks.task import Task
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches


class MAE(Task):
    """Reconstruction of the pixels of removed patches.

    A Swin is masked uniformly: one patch of each 2x2 stays, where a patch is the area of one token of its last stage.

    Args:
        encoder: ViT or Swin to train.

    Raises:
        PatchloomError: a mask ratio that leaves nothing visible or nothing masked, or a unit that does not fit.
    """

    serves_swin = True
    native_crops = True

    @takes(MAEOptions)
    def __init__(self, encoder: Encoder, options: MAEOptions) -> None:
        super().__init__(encoder, options)
        self.unit = patches_of_unit(self, options.mask_unit, usual=1)
        self.sizes = masked_units(self.geometry, options.mask_ratio, self.unit)
        decoder = patch_decoder(self, options.decoder_width, options.decoder_depth, options.decoder_heads)
        self.questions["pixels"] = Pixels(self.geometry, decoder, options.normalized_pixels)

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return the visible patches."""
        visible, masked = partition(self.geometry, len(images), self.sizes[0], generator, images.device, self.unit)
        return mask_patches(all_patches(images, self.geometry.n), visible, masked)
