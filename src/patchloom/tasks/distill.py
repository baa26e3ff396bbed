"""Distill: prediction of a frozen model's features at patches that the encoder does not see (EVA, Fang et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from patchloom.nets.decoders import PatchHead
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.refusals import masked_units
from patchloom.options.tasks import DistillOptions
from patchloom.patches.partition import random_partition
from patchloom.questions.features import Features
from patchloom.tasks.defaults import frozen_teacher
from patchloom.tasks.task import Task
from patchloom.withhold.encoder_input import EncoderInput, all_patches, blank_patches


class Distill(Task):
    """Prediction of a frozen teacher's features at patches that were replaced by a mask token.

    Args:
        encoder: ViT to train.

    Raises:
        PatchloomError: no teacher, one that does not fit, or a mask ratio that leaves nothing visible or masked.
    """

    @takes(DistillOptions)
    def __init__(self, encoder: PlainViT, options: DistillOptions) -> None:
        super().__init__(encoder, options)
        self.sizes = masked_units(self.geometry, options.mask_ratio)
        g, (_, blank) = self.geometry, self.sizes
        teacher = frozen_teacher(g, options.features_of, options.features_model)
        self.mask_token = nn.Parameter(torch.empty(g.width).normal_(std=0.02))
        head = PatchHead(g.width, teacher.encoder.embed_dim, g.prefix, visible_asked=blank)
        self.questions["features"] = Features(g, head, teacher, options.loss, blank)

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return all patches, some of them blank."""
        _, blank = random_partition(len(images), self.geometry.n, self.sizes, generator, images.device)
        return blank_patches(all_patches(images, self.geometry.n), blank)

    def placeholders(self, given: EncoderInput, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the mask token."""
        return {"mask_token": self.mask_token}
