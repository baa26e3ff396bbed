"""Beyond Masking: demystifying token-based pre-training for vision transformers (Tian et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from patchloom.data.augment import RandomCrop
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.degradations import FORMS, DegradationOptions
from patchloom.options.refusals import PAPERS
from patchloom.options.tasks import BandTarget, RestoreOptions, TargetNorm
from patchloom.patches.partition import central_block, random_block, random_partition
from patchloom.questions.pixels import Restoration
from patchloom.tasks.defaults import patch_decoder
from patchloom.tasks.task import Task
from patchloom.withhold.degradation import Degradation
from patchloom.withhold.encoder_input import EncoderInput, all_patches, mask_patches


def build_degradation(task: Task, asked: DegradationOptions) -> Degradation:
    """Build a degradation for ``task``'s images."""
    size = task.geometry.size
    why = "the paper's 320 for 224 pixels" if asked.whole else "the images' own size"
    task.resolve_auto("canvas", asked.canvas, asked.side(size), why)
    chosen: dict[str, Any] = {}
    for name, value in asked.forms.items():
        form = FORMS[name]
        if asked.kind in form.kinds and (name != "canvas_fit" or asked.canvas_of(size) != size):
            chosen[name] = task.resolve_auto(name, value, form.usual, form.why)
    strength = asked.strength(size)
    if asked.option is not None and strength is not None:
        task.resolve_auto(asked.option, asked.strengths.get(asked.option, "auto"), *strength)
    return Degradation(asked.kind, size, asked.canvas_of(size), asked.drawn(size), task.geometry.p, **chosen)


def band_loss(
    task: Task,
    has_band: bool,
    weight: float | Literal["auto"],
    target: BandTarget | Literal["auto"],
    normalized_pixels: bool = True,
) -> tuple[float | None, BandTarget]:
    """Resolve weight and target of the loss on the band around zoom_in's part of a canvas; None without a band."""
    if not has_band:
        return None, "grown"
    usual: BandTarget = "grown" if normalized_pixels else "original"
    why = "as in the authors' program" if normalized_pixels else PAPERS
    chosen = task.resolve_auto("band_target", target, usual, why)
    share = task.resolve_auto("band_weight", weight, 0.2, "as in the authors' program")
    return share, chosen


def others_needed(options: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the number of images that a step needs to show patches of other images, with the reason, else None."""
    return (2, "the small picture is shown amid patches of other images") if options["fill"] == "images" else None


class Restore(Task):
    """Reconstruction of the original from a degraded image: a part, or changed geometry, sharpness or colour.

    Args:
        encoder: ViT to train.

    Raises:
        PatchloomError: options that exclude each other, or that leave nothing to predict or to see.
    """

    @takes(RestoreOptions)
    def __init__(self, encoder: PlainViT, options: RestoreOptions) -> None:
        super().__init__(encoder, options)
        self.degradation = build_degradation(self, options.degraded)
        usual = options.usual_mask
        self.resolve_auto("mask_ratio", options.mask_ratio, usual, PAPERS if usual else "the degradation is enough")
        g, self.sampling = self.geometry, options.sampling
        self.entering = replace(g, grid=self.degradation.grid)
        visible, self.block = options.masks(self.degradation.grid)
        self.sizes = (visible, g.n - visible)
        norm: TargetNorm = "channel"
        if options.normalized_pixels:
            norm = self.resolve_auto("target_norm", options.target_norm, norm, "as in the authors' program")
        self.augment = RandomCrop(self.degradation.canvas)
        masks = visible < g.n
        has_band = masks and options.degraded.has_band(g.size)
        weight, target = band_loss(self, has_band, options.band_weight, options.band_target, options.normalized_pixels)
        # if only patches are missing, the visible ones have nothing to predict
        asked = visible if self.degradation.changes_pixels or not masks else 0
        sizes = options.decoder_width, options.decoder_depth, options.decoder_heads
        usual_sizes = options.usual_decoder(g)
        decoder = patch_decoder(self, *sizes, usual=usual_sizes, has_masked=masks, visible_asked=asked)
        self.questions["pixels"] = Restoration(
            g, decoder, self.degradation, options.normalized_pixels, 0, weight, norm, target
        )

    @classmethod
    def images_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Return 2 if patches of other images are shown."""
        return others_needed(options) or super().images_needed(options)

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return the visible patches of the degraded image."""
        b, g, device = len(images), self.entering, images.device
        given = self.degradation(all_patches(images, self.geometry.n), self.mean, self.std, generator)
        if self.block is None:
            visible, masked = random_partition(b, g.n, (self.sizes[0], g.n - self.sizes[0]), generator, device)
            visible = visible.sort(dim=1).values
        elif self.sampling == "block":
            visible, masked = random_block(b, g.grid, self.block, generator, device)
        else:
            inside, outside = central_block(b, g.grid, self.block, device)
            visible, masked = (outside, inside) if self.sampling == "surroundings" else (inside, outside)
        return mask_patches(given, visible, masked)
