"""Latent: prediction of a moving-average teacher's hidden layers at masked patches.

Bootleg (arXiv 2603.15553) predicts several layers, I-JEPA (Assran et al., CVPR 2023) the last one, and data2vec 2.0
(Baevski et al., ICML 2023) the mean of most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from patchloom.errors import PatchloomError, check_type
from patchloom.nets.decoders import ConvDecoder, MAEDecoder
from patchloom.nets.encode import layer_names
from patchloom.nets.swin import PlainViT
from patchloom.patches.partition import inverse_blocks, random_rectangles, share_of
from patchloom.questions.hidden import Combine, HiddenLayers, HiddenLoss, LayerOutput
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
from patchloom.tasks.task import PAPERS, Size, Task
from patchloom.withhold.encoder_input import EncoderInput

MaskSampling = Literal["blocks", "inverse", "random"]
Predictor = Literal["transformer", "conv"]

# I-JEPA's program draws the share of a context in [0.85, 1]; here all have equally many patches
_CONTEXT = 0.925
_ASPECT = 0.75, 1.5
_INVERSE = 3  # patches along a visible block of data2vec 2.0


class Latent(Task):
    """Prediction of hidden layers of a moving-average teacher, which sees the whole image, at masked patches.

    Args:
        encoder: ViT to train.
        layers: numbers of the predicted blocks, counted from 1; auto: those at each quarter of the depth.
        combine: each of the layers (each), or their mean (mean).
        source: tokens after a block (block), or the output of its MLP (mlp).
        sampling: masks: blocks to predict, and a context without them (blocks); 3x3 visible blocks (inverse); or
            random patches (random).
        mask_ratio: fraction of the patches that is removed; auto: what the blocks require, otherwise 0.8.
        masks: number of masks per image, compared with one output of the teacher.
        target_blocks: number of blocks to predict per mask, each separately; auto: 4, or fewer on small grids.
        target_scale: fraction of the patches in each of these blocks; auto: 0.175.
        loss: loss on the features: smooth_l1, or mean squared error (mse).
        momentum: momentum of the teacher at the start; rises to 1 along a half cosine. auto: 0.996, less in short
            trainings.
        decoder: predictor: a transformer with mask tokens (transformer), or convolutions over the grid (conv).
        decoder_width: width of the predictor; auto: 384, conv: 768; the encoder's below ViT-S.
        decoder_depth: number of blocks of the predictor; auto: 6, or 2 below ViT-S.
        decoder_heads: number of attention heads of a transformer; auto: 12, or one per 32 channels below ViT-S.

    Raises:
        PatchloomError: masks that leave nothing visible or nothing to predict, or layers that the encoder lacks.
    """

    encoder: PlainViT

    def __init__(
        self,
        encoder: PlainViT,
        layers: list[int] | Literal["auto"] = "auto",
        combine: Combine = "each",
        source: LayerOutput = "block",
        sampling: MaskSampling = "blocks",
        mask_ratio: float | Literal["auto"] = "auto",
        masks: int = 1,
        target_blocks: Size = "auto",
        target_scale: float | Literal["auto"] = "auto",
        loss: HiddenLoss = "smooth_l1",
        momentum: float | Literal["auto"] = "auto",
        decoder: Predictor = "transformer",
        decoder_width: Size = "auto",
        decoder_depth: Size = "auto",
        decoder_heads: Size = "auto",
    ):
        super().__init__(encoder)
        chosen = {
            "combine": Combine,
            "source": LayerOutput,
            "sampling": MaskSampling,
            "loss": HiddenLoss,
            "decoder": Predictor,
        }
        for (option, kinds), value in zip(chosen.items(), (combine, source, sampling, loss, decoder), strict=True):
            check_type(f"task.{option}", value, kinds)
        if not 1 <= masks <= 1000:
            raise PatchloomError(f"--task.masks must lie between 1 and 1000, not {masks}")
        g, depth = self.geometry, len(layer_names(encoder)) - 2
        quarters = sorted({max(1, round(depth * i / 4)) for i in range(1, 5)})
        numbers = self.resolve_auto("layers", layers, quarters, "at each quarter of the depth")
        if not numbers or sorted({*numbers}) != numbers or not 1 <= numbers[0] <= numbers[-1] <= depth:
            raise PatchloomError(
                f"--task.layers {numbers} are not blocks of this encoder: give increasing numbers from 1 to {depth}"
            )
        self.sampling: MaskSampling = sampling
        self.masks = masks
        if sampling == "blocks":
            self.target_sizes, self.visible = self._block_sizes(target_blocks, target_scale, mask_ratio)
        else:
            why = f"--task.sampling is {sampling}"
            refuse_unused(why, target_blocks=target_blocks, target_scale=target_scale)
            self.visible, _ = masked_units(g, 1, self.resolve_auto("mask_ratio", mask_ratio, 0.8, PAPERS))
        answers = g.width * (len(numbers) if combine == "each" else 1)
        predictor: MAEDecoder | ConvDecoder
        if decoder == "transformer":
            predictor = patch_decoder(
                self, decoder_width, decoder_depth, decoder_heads, usual=(384, 6, 12), answers=answers
            )
        else:
            refuse_unused("--task.decoder conv has no attention", decoder_heads=decoder_heads)
            width, convs, _ = decoder_sizes(self, decoder_width, decoder_depth, 1, (768, 6, 1))
            check_decoder_depth(convs)
            predictor = ConvDecoder(g.width, answers, g.grid, width, convs, g.prefix)
        start = teacher_momentum(self, momentum)
        self.questions["features"] = HiddenLayers(encoder, predictor, numbers, start, combine, source, loss)

    def _block_sizes(
        self, blocks: Size, scale: float | Literal["auto"], mask_ratio: float | Literal["auto"]
    ) -> tuple[tuple[int, int], int]:
        """Return number and size of the target blocks, and the number of visible patches outside all of them."""
        n = self.geometry.n
        share = self.resolve_auto("target_scale", scale, 0.175, PAPERS)
        if not 0 < share < 1:
            raise PatchloomError(f"--task.target_scale must be above 0 and below 1, not {share}")
        size = max(1, round(n * share))
        most = (n - 1) // size
        if not most:
            raise PatchloomError(
                f"a block of {size} of {n} patches leaves none visible: lower --task.target_scale, use smaller "
                "patches, or larger images"
            )
        usual = min(4, most)
        count = self.resolve_auto("target_blocks", blocks, usual, f"{usual} of {size} patches fit into {n}")
        if not 1 <= count <= most:
            raise PatchloomError(
                f"{count} blocks of {size} patches may cover all {n} patches: give --task.target_blocks 1 to {most}, "
                "or lower --task.target_scale"
            )
        room = n - count * size
        least = math.floor((1 - room / n) * 1e4) / 1e4  # rounded, but with as many patches
        why = f"{room} patches are outside of the blocks in any case"
        visible, _ = masked_units(self.geometry, 1, self.resolve_auto("mask_ratio", mask_ratio, least, why))
        if visible > room:
            raise PatchloomError(
                f"a mask ratio of {mask_ratio} leaves {visible} patches visible, and {count} blocks of {size} patches "
                f"only {room}: give --task.mask_ratio {least} or more, or fewer --task.target_blocks"
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
