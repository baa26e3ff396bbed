"""Latent: prediction of a moving-average teacher's hidden layers at masked patches.

Bootleg (arXiv 2603.15553) predicts several layers, I-JEPA (Assran et al., CVPR 2023) the last one, and data2vec 2.0
(Baevski et al., ICML 2023) the mean of most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from patchloom.nets.decoders import ConvDecoder, MAEDecoder
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.refusals import PAPERS, masked_units
from patchloom.options.tasks import LATENT_DECODERS, LatentOptions, MaskSampling
from patchloom.patches.partition import inverse_blocks, random_rectangles
from patchloom.questions.hidden import HiddenLayers
from patchloom.sizes import share_of
from patchloom.system.distributed import draw
from patchloom.tasks.defaults import (
    AGREEMENT_UPDATES,
    decoder_sizes,
    momentum_for,
    patch_decoder,
    teacher_momentum,
)
from patchloom.tasks.task import Task
from patchloom.withhold.encoder_input import EncoderInput

# I-JEPA's program draws the share of a context in [0.85, 1]; here all have equally many patches
_CONTEXT = 0.925
_ASPECT = 0.75, 1.5
_INVERSE = 3  # patches along a visible block of data2vec 2.0


class Latent(Task):
    """Prediction of hidden layers of a moving-average teacher, which sees the whole image, at masked patches.

    Args:
        encoder: ViT to train.

    Raises:
        PatchloomError: masks that leave nothing visible or nothing to predict, or layers that the encoder lacks.
    """

    encoder: PlainViT

    @takes(LatentOptions)
    def __init__(self, encoder: PlainViT, options: LatentOptions) -> None:
        super().__init__(encoder, options)
        g = self.geometry
        quarters = sorted({max(1, round(g.depth * i / 4)) for i in range(1, 5)})
        numbers = self.resolve_auto("layers", options.layers, quarters, "at each quarter of the depth")
        self.sampling: MaskSampling = options.sampling
        self.masks, why = options.masks, PAPERS
        if options.sampling == "blocks":
            count, size = self.target_sizes = options.target_sizes(g.n)
            self.resolve_auto("target_scale", options.target_scale, 0.175, PAPERS)
            self.resolve_auto(
                "target_blocks", options.target_blocks, count, f"{count} of {size} patches fit into {g.n}"
            )
            why = f"{g.n - count * size} patches are outside of the blocks in any case"
        ratio = self.resolve_auto("mask_ratio", options.mask_ratio, options.usual_mask(g.n), why)
        self.visible, _ = masked_units(g, ratio)
        answers = g.width * (len(numbers) if options.combine == "each" else 1)
        predictor: MAEDecoder | ConvDecoder
        if options.decoder == "transformer":
            predictor = patch_decoder(
                self,
                options.decoder_width,
                options.decoder_depth,
                options.decoder_heads,
                usual=LATENT_DECODERS["transformer"],
                answers=answers,
            )
        else:
            width, convs, _ = decoder_sizes(
                self, options.decoder_width, options.decoder_depth, 1, LATENT_DECODERS["conv"]
            )
            predictor = ConvDecoder(g.width, answers, g.grid, width, convs, g.prefix)
        start = teacher_momentum(self, options.momentum)
        self.questions["features"] = HiddenLayers(
            encoder, predictor, numbers, start, options.combine, options.source, options.loss
        )

    @classmethod
    def training_defaults(cls, options: Mapping[str, Any], updates: int) -> dict[str, tuple[Any, str]]:
        """Return a momentum that lets the teacher of a short training leave its random start."""
        return {"task.momentum": momentum_for(updates)}

    @classmethod
    def updates_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Return enough updates for a teacher that starts as a random network."""
        return AGREEMENT_UPDATES

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return the visible patches [v*b k] of v masks per image, and the sets of patches to predict [v*b t m]."""
        b, v, grid, n = len(images), self.masks, self.geometry.grid, self.geometry.n
        shared = generator, images.device
        if self.sampling == "blocks":
            count, size = self.target_sizes
            asked = random_rectangles(b, v * count, grid, size, _ASPECT, *shared).unflatten(1, (v, count))
            context = random_rectangles(b, v, grid, share_of(n, _CONTEXT), (1, 1), *shared)
            # random patches of the context and outside of all blocks; if these are too few, also from its surroundings
            order = draw(torch.rand, (b, v, n), *shared).to(images.device, non_blocking=True)
            order = order + 1 - torch.zeros_like(order).scatter(2, context, 1.0)
            order = order + 2 * torch.zeros_like(order).scatter(2, asked.flatten(2), 1.0)
            visible = order.argsort(dim=2)[..., : self.visible]
        else:
            if self.sampling == "inverse":
                visible, masked = inverse_blocks(b, v, grid, _INVERSE, self.visible, *shared)
            else:
                order = draw(torch.rand, (b, v, n), *shared).to(images.device, non_blocking=True).argsort(dim=2)
                visible, masked = order.split([self.visible, n - self.visible], dim=2)
            asked = masked[:, :, None]
        visible, asked = (one.transpose(0, 1).flatten(0, 1) for one in (visible, asked))
        return EncoderInput(images, visible, targets={"asked": asked})
