"""Latent: prediction of a moving-average teacher's hidden layers at masked patches.

Bootleg (arXiv 2603.15553) predicts several layers, I-JEPA (Assran et al., CVPR 2023) the last one, and data2vec 2.0
(Baevski et al., ICML 2023) the mean of most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from patchloom.errors import PatchloomError
from patchloom.nets.decoders import ConvDecoder, MAEDecoder
from patchloom.nets.encode import layer_names
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.tasks import LatentOptions, MaskSampling
from patchloom.patches.partition import inverse_blocks, random_rectangles, share_of
from patchloom.questions.hidden import HiddenLayers
from patchloom.system.distributed import draw
from patchloom.tasks.defaults import (
    AGREEMENT_UPDATES,
    check_decoder_depth,
    decoder_sizes,
    momentum_for,
    patch_decoder,
    refuse_unused,
    teacher_momentum,
)
from patchloom.tasks.masking import masked_units
from patchloom.tasks.task import PAPERS, Task
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
        super().__init__(encoder)
        g, depth = self.geometry, len(layer_names(encoder)) - 2
        quarters = sorted({max(1, round(depth * i / 4)) for i in range(1, 5)})
        numbers = self.resolve_auto("layers", options.layers, quarters, "at each quarter of the depth")
        if not numbers or sorted({*numbers}) != numbers or not 1 <= numbers[0] <= numbers[-1] <= depth:
            raise PatchloomError(
                f"--task.layers {numbers} are not blocks of this encoder: give increasing numbers from 1 to {depth}"
            )
        self.sampling: MaskSampling = options.sampling
        self.masks = options.masks
        if options.sampling == "blocks":
            self.target_sizes, self.visible = self._block_sizes(options)
        else:
            why = f"--task.sampling is {options.sampling}"
            refuse_unused(why, target_blocks=options.target_blocks, target_scale=options.target_scale)
            self.visible, _ = masked_units(g, 1, self.resolve_auto("mask_ratio", options.mask_ratio, 0.8, PAPERS))
        answers = g.width * (len(numbers) if options.combine == "each" else 1)
        predictor: MAEDecoder | ConvDecoder
        if options.decoder == "transformer":
            predictor = patch_decoder(
                self,
                options.decoder_width,
                options.decoder_depth,
                options.decoder_heads,
                usual=(384, 6, 12),
                answers=answers,
            )
        else:
            refuse_unused("--task.decoder conv has no attention", decoder_heads=options.decoder_heads)
            width, convs, _ = decoder_sizes(self, options.decoder_width, options.decoder_depth, 1, (768, 6, 1))
            check_decoder_depth(convs)
            predictor = ConvDecoder(g.width, answers, g.grid, width, convs, g.prefix)
        start = teacher_momentum(self, options.momentum)
        self.questions["features"] = HiddenLayers(
            encoder, predictor, numbers, start, options.combine, options.source, options.loss
        )

    def _block_sizes(self, options: LatentOptions) -> tuple[tuple[int, int], int]:
        """Return number and size of the target blocks, and the number of visible patches outside all of them."""
        n = self.geometry.n
        share = self.resolve_auto("target_scale", options.target_scale, 0.175, PAPERS)
        size = max(1, round(n * share))
        most = (n - 1) // size
        if not most:
            raise PatchloomError(
                f"a block of {size} of {n} patches leaves none visible: lower --task.target_scale, use smaller "
                "patches, or larger images"
            )
        usual = min(4, most)
        count = self.resolve_auto(
            "target_blocks", options.target_blocks, usual, f"{usual} of {size} patches fit into {n}"
        )
        if not 1 <= count <= most:
            raise PatchloomError(
                f"{count} blocks of {size} patches may cover all {n} patches: give --task.target_blocks 1 to {most}, "
                "or lower --task.target_scale"
            )
        room = n - count * size
        least = math.floor((1 - room / n) * 1e4) / 1e4  # rounded, but with as many patches
        why = f"{room} patches are outside of the blocks in any case"
        visible, _ = masked_units(self.geometry, 1, self.resolve_auto("mask_ratio", options.mask_ratio, least, why))
        if visible > room:
            raise PatchloomError(
                f"a mask ratio of {options.mask_ratio} leaves {visible} patches visible, and {count} blocks of {size} "
                f"patches only {room}: give --task.mask_ratio {least} or more, or fewer --task.target_blocks"
            )
        return (count, size), visible

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
