"""CrossMAE: rethinking patch dependence for masked autoencoders (Fu et al. 2024, arXiv 2401.14391)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from patchloom.nets.decoders import CrossDecoder
from patchloom.nets.encode import encode_layers
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.refusals import PAPERS, masked_units
from patchloom.options.tasks import CROSS_DECODER, CrossMAEOptions
from patchloom.patches.positions import sincos_2d
from patchloom.questions.pixels import Pixels
from patchloom.questions.question import Outcome
from patchloom.sizes import share_of
from patchloom.tasks.defaults import decoder_sizes
from patchloom.tasks.masking import partition
from patchloom.tasks.task import Task
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches


class CrossMAE(Task):
    """Independent reconstruction of the pixels of some removed patches, by cross-attention alone.

    Args:
        encoder: ViT to train.

    Raises:
        PatchloomError: ratios that leave nothing visible or nothing to predict, or maps that the encoder lacks.
    """

    native_crops = True
    encoder: PlainViT

    @takes(CrossMAEOptions)
    def __init__(self, encoder: PlainViT, options: CrossMAEOptions) -> None:
        super().__init__(encoder, options)
        g = self.geometry
        self.visible, masked = masked_units(g, options.mask_ratio)
        self.predicted = min(masked, max(1, share_of(g.n, options.prediction_ratio)))
        maps = self.resolve_auto("encoder_maps", options.encoder_maps, g.depth + 1, PAPERS)
        # evenly spaced from the embedding to the last block, whose map has the final norm, which evaluations use
        self.stages = [*(round(i * g.depth / (maps - 1)) for i in range(maps - 1)), g.depth + 1] if maps > 1 else []
        sizes = options.decoder_width, options.decoder_depth, options.decoder_heads
        width, depth, heads = decoder_sizes(self, *sizes, CROSS_DECODER)
        decoder = CrossDecoder(g.width, g.patch_dim, sincos_2d(width, g.grid), depth, heads, maps)
        self.questions["pixels"] = Pixels(g, decoder, options.normalized_pixels)

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return the visible patches."""
        visible, masked = partition(self.geometry, len(images), self.visible, generator, images.device)
        return mask_patches(all_patches(images, self.geometry.n), visible, masked)

    def encode_tokens(
        self, given: EncoderInput, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens; with several feature maps they are [maps b prefix+k d]."""
        if not self.stages:
            return super().encode_tokens(given, generator)
        return torch.stack(encode_layers(self.encoder, given, self.stages)), None

    def forward(
        self,
        *views: Tensor,
        progress: float = 0.0,
        generator: torch.Generator | None = None,
        given: EncoderInput | None = None,
    ) -> Outcome:
        """Return the loss on the first of the masked patches, which are in random order; the others are not decoded."""
        given = given or self.given(views[0], generator)
        assert given.masked is not None
        few = replace(given, masked=given.masked[:, : self.predicted])
        return super().forward(*views, progress=progress, generator=generator, given=few)
