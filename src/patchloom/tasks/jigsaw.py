"""Jigsaw-ViT: solving jigsaw puzzles of patches (Chen et al. 2022, arXiv 2207.11971); its self-supervised part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from patchloom.nets.build import initialize
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.tasks import JigsawOptions
from patchloom.patches.partition import random_partition
from patchloom.questions.positions import DROPPOS_RATIOS, PositionPrediction, Positions, figure_3
from patchloom.questions.question import Sheet
from patchloom.sizes import share_of
from patchloom.tasks.task import TaskWithoutPositions
from patchloom.withhold.encoder_input import EncoderInput, all_patches, drop_positions, mask_patches


class JigsawHead(nn.Sequential):
    """MLP of three layers with ReLU, each as wide as the encoder, from a patch's token to logits over n places.

    Args:
        width: width d of the tokens.
        n: number of places.
        prefix: number of class and register tokens in front, which get no logits.
    """

    def __init__(self, width: int, n: int, prefix: int):
        super().__init__(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, n))
        self.prefix = prefix
        initialize(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [b k n] for the k patch tokens of ``tokens`` [b prefix+k d]."""
        return super().forward(tokens[:, self.prefix :])


class Jigsaw(TaskWithoutPositions):
    """Prediction of the positions of patches that are seen without any position, after others were removed.

    Unlike `patchloom.tasks.mp3.MP3`, every patch that enters is a key and value, and the head is an MLP.

    Args:
        encoder: ViT to train; without position embeddings. Rotations (RoPE) are withheld.

    Raises:
        PatchloomError: fewer than two visible patches, or an encoder with position embeddings.
    """

    encoder: PlainViT

    @takes(JigsawOptions)
    def __init__(self, encoder: PlainViT, options: JigsawOptions) -> None:
        super().__init__(encoder, options)
        self.mask_ratio, g = options.mask_ratio, self.geometry
        ratios = {"mask_ratio": DROPPOS_RATIOS["mask_ratio"]}
        self.questions["positions"] = Positions(g, JigsawHead(g.width, g.n, g.prefix), ratios)

    @classmethod
    def encoder_defaults(cls, options: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Return no positions, because none enter."""
        return {"positions": ("none", "jigsaw withholds all of them")}

    def given(
        self, images: Tensor, generator: torch.Generator | None = None, *, mask_ratio: float | None = None
    ) -> EncoderInput:
        """Return the visible patches without their positions; without positions their order has no effect."""
        n = self.geometry.n
        k = max(1, share_of(n, 1 - (self.mask_ratio if mask_ratio is None else mask_ratio)))
        visible, masked = random_partition(len(images), n, (k, n - k), generator, images.device)
        given = mask_patches(all_patches(images, n), visible, masked)
        return drop_positions(given, torch.arange(k, device=images.device).expand_as(visible))

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Draw the answers at the mask ratio of the training, then as in DropPos' Fig. 3 of images."""
        question = cast(Positions, self.questions["positions"])

        def predict(mask_ratio: float) -> PositionPrediction:
            given = self.given(images, generator, mask_ratio=mask_ratio)
            return question.predict(self.encode(images, given, generator))

        sheets = super().draw(images, generator)
        if not self.modality.column_seconds:
            sheets += figure_3(self.geometry, images, predict, generator)
        return sheets
