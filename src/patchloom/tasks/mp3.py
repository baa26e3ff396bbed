"""MP3: position prediction as an effective pretraining strategy (Zhai et al., ICML 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from patchloom.nets.decoders import PatchHead
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.tasks import MP3Options
from patchloom.patches.partition import random_partition
from patchloom.questions.positions import (
    MP3_RATIOS,
    PositionPrediction,
    Positions,
    mixed_sheet,
    ratios_sheet,
)
from patchloom.questions.question import Sheet
from patchloom.sizes import share_of
from patchloom.tasks.task import TaskWithoutPositions
from patchloom.withhold.encoder_input import EncoderInput, all_patches, drop_positions, limit_context

RATIOS_DRAWN = (0.0, 0.25, 0.5, 0.75)


class MP3(TaskWithoutPositions):
    """Prediction of the positions of all patches, with most patches barred from keys and values.

    Args:
        encoder: ViT to train; without position embeddings, unless some patches keep their position. Rotations (RoPE)
            are withheld like embeddings: queries and keys of these patches are not rotated.

    Raises:
        PatchloomError: ratios that leave nothing to predict or to see, or an encoder whose positions do not fit them.
    """

    @takes(MP3Options)
    def __init__(self, encoder: PlainViT, options: MP3Options) -> None:
        super().__init__(encoder, options)
        g = self.geometry
        # of section 4.2; CIFAR-100 and Tiny ImageNet both have 64 patches, and those of 8 pixels show more, so that
        # fewer suffice
        usual = 0.5, "the paper's for CIFAR-100, few or small patches"
        if g.n >= 100:
            usual = 0.75, "the paper's for ImageNet, many patches"
        elif g.n >= 64 and min(g.p) >= 8:
            usual = 0.8, "the paper's for Tiny ImageNet, 64 patches of 8 pixels"
        self.context_mask_ratio = self.resolve_auto("context_mask_ratio", options.context_mask_ratio, *usual)
        self.known = min(share_of(g.n, options.known_positions), g.n - 1)
        head = PatchHead(g.width, g.n, g.prefix)
        self.questions["positions"] = Positions(g, head, MP3_RATIOS, by_context=True)

    @classmethod
    def encoder_defaults(cls, options: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Return no positions unless some are known, and no class token, because only patches are predicted."""
        defaults: dict[str, tuple[Any, str]] = {"class_token": (False, "mp3 predicts from patch tokens only")}
        if not options["known_positions"]:
            defaults["positions"] = ("none", "mp3 withholds all of them")
        return defaults

    def given(
        self, images: Tensor, generator: torch.Generator | None = None, *, context_mask_ratio: float | None = None
    ) -> EncoderInput:
        """Return all patches with few or no positions; only the context serves as keys and values."""
        b, n, device = len(images), self.geometry.n, images.device
        ratio = self.context_mask_ratio if context_mask_ratio is None else context_mask_ratio
        m = max(1, share_of(n, 1 - ratio))
        context, _ = random_partition(b, n, (m, n - m), generator, device)
        _, dropped = random_partition(b, n, (self.known, n - self.known), generator, device)
        given = drop_positions(all_patches(images, n), dropped)
        return limit_context(given, context) if m < n else given

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Draw the answers at the trained η; of images also those at several η, and the paper's Figs. 14-15."""
        sheets = super().draw(images, generator)
        if self.modality.column_seconds:
            return sheets
        answers = {f"η = {ratio}": self._answer(images, generator, context_mask_ratio=ratio) for ratio in RATIOS_DRAWN}
        withheld = "A fraction η of the patches was barred from keys and values."
        sheets.append(ratios_sheet(self.geometry, images, answers, generator, withheld))
        if len(images) > 1 and not self.known:
            sheets.append(mixed_sheet(self.geometry, images, partial(self.place, generator=generator), generator))
        return sheets

    def place(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return a place of its own [b n] for each patch of ``images`` [b c h w]; keys and values: its context only."""
        return self._answer(images, generator).assigned()

    def _answer(self, images: Tensor, generator: torch.Generator, **ratios: float) -> PositionPrediction:
        encoded = self.encode(images, self.given(images, generator, **ratios))
        return cast(Positions, self.questions["positions"]).predict(encoded)
