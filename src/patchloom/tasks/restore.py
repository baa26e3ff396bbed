"""Beyond Masking: demystifying token-based pre-training for vision transformers (Tian et al. 2022)."""

from __future__ import annotations

from typing import Literal

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchloom.data import RandomCrop
from patchloom.errors import PatchloomError
from patchloom.hints import check
from patchloom.patches.partition import random_block, random_partition
from patchloom.questions.pixels import Restoration
from patchloom.tasks.degradations import Strength, build_degradation
from patchloom.tasks.sizes import check_normalizable, patch_decoder, refuse_unused, visible_of
from patchloom.tasks.task import Size, Task
from patchloom.withhold.degradation import Kind
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches

Sampling = Literal["random", "block"]


class Restore(Task):
    """Part of a picture, its geometry, sharpness or colour (and patches) are withheld; the original pixels are asked.

    Args:
        encoder: the ViT to train.
        degradation: zoom_in shows the centre of a larger picture; zoom_out a small copy amid its mirror images; fisheye
            bends it; blur convolves it with a random kernel; decolorize takes colour; masked and none leave it.
        mask_ratio: share γ of the patches that is removed besides; auto: 0.75 for zoom_in and masked, else 0.
        sampling: which patches stay visible: random ones, or one block.
        canvas: shorter side in pixels of the picture of which zoom_in or fisheye shows the centre; auto: 10/7 of the
            image for zoom_in (320 for 224), the image itself for fisheye.
        band_weight: with zoom_in and masks, share of the loss on what lies around the input; the rest is on the masks.
            auto: 0.2.
        scale: share of the side that zoom_in shows (on images of the usual size) or to which zoom_out shrinks; a number
            or a list to draw from; auto: 0.714.
        twist: of fisheye; a number, or the two bounds from between which it is drawn; auto: 0.2 to 0.25.
        kernel: side of blur's kernel in pixels, odd; a number or a list to draw from; auto: 9 for 224 pixels, and in
            proportion.
        saturation: share of the colour that decolorize leaves; a number or a list to draw from; auto: 0.3.
        normalized_pixels: ask for pixels normalised in each channel of each patch instead of plain ones.
        decoder_width: width of the decoder; auto: 384, or the encoder's own below ViT-S.
        decoder_depth: transformer blocks of the decoder; auto: 4, or 2 below ViT-S.
        decoder_heads: attention heads of the decoder; auto: 6, or one for every 32 channels below ViT-S.

    Raises:
        PatchloomError: options that do not go together, or that leave nothing to ask or to see.
    """

    def __init__(
        self,
        encoder: VisionTransformer,
        degradation: Kind = "zoom_in",
        mask_ratio: float | Literal["auto"] = "auto",
        sampling: Sampling = "random",
        canvas: Size = "auto",
        band_weight: float | Literal["auto"] = "auto",
        scale: Strength = "auto",
        twist: Strength = "auto",
        kernel: Strength = "auto",
        saturation: Strength = "auto",
        normalized_pixels: bool = True,
        decoder_width: Size = "auto",
        decoder_depth: Size = "auto",
        decoder_heads: Size = "auto",
    ):
        super().__init__(encoder)
        check("task.sampling", sampling, Sampling)
        strengths = {"scale": scale, "twist": twist, "kernel": kernel, "saturation": saturation}
        self.degradation = build_degradation(self, degradation, canvas, strengths)
        usual = 0.75 if degradation in ("masked", "zoom_in") else 0.0
        why = "the paper's" if usual else "the degradation is enough"
        mask_ratio = self.resolve_auto("mask_ratio", mask_ratio, usual, why)
        g = self.geometry
        visible = visible_of(g, mask_ratio)
        self.block = block_of(g.grid, 1 - mask_ratio) if sampling == "block" else None
        if self.block is not None:
            visible = self.block[0] * self.block[1]
        if degradation == "masked" and visible == g.n:
            raise PatchloomError(f"a mask ratio of {mask_ratio} masks nothing: raise --task.mask_ratio")
        if normalized_pixels:
            check_normalizable(g, each_channel=True)
        self.sizes = (visible, g.n - visible)
        self.augment = RandomCrop(self.degradation.canvas)
        masks = visible < g.n
        has_band = masks and degradation == "zoom_in" and self.degradation.canvas != self.degradation.size
        weight = None
        if has_band:
            weight = self.resolve_auto("band_weight", band_weight, 0.2, "the authors' program's")
            if not 0 <= weight <= 1:
                raise PatchloomError(f"--task.band_weight is a share from 0 to 1, not {weight}")
        else:
            refuse_unused("only zooming in with masks and a canvas has two losses", band_weight=band_weight)
        # where nothing but patches is missing, the visible ones have nothing to answer
        asked = visible if self.degradation.changes_pixels or not masks else 0
        sizes = decoder_width, decoder_depth, decoder_heads
        decoder = patch_decoder(self, *sizes, usual=(384, 4, 6), has_masked=masks, visible_asked=asked)
        self.questions["pixels"] = Restoration(g, decoder, self.degradation, normalized_pixels, band_weight=weight)

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """The visible patches of the degraded picture."""
        b, g = len(images), self.geometry
        given = self.degradation(all_patches(images, g.n), self.mean, self.std, generator)
        if self.block is not None:
            visible, masked = random_block(b, g.grid, self.block, generator, images.device)
        else:
            visible, masked = random_partition(b, g.n, self.sizes, generator, images.device)
            visible = visible.sort(dim=1).values
        return mask_patches(given, visible, masked)


def block_of(grid: tuple[int, int], share: float) -> tuple[int, int]:
    """Rows and columns of a rectangle like the ``grid``, of about ``share`` of its patches."""
    rows, columns = (max(1, round(side * share**0.5)) for side in grid)
    return rows, columns
