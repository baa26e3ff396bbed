"""Anchor of an encoder to its start: the cosine of their features of whole images, as a second loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.nets.encode import encode, input_size, patch_count, prefix_count
from patchloom.nets.swin import Encoder
from patchloom.nets.teacher import Teacher, no_grad_autocast
from patchloom.questions.question import Outcome
from patchloom.withhold.encoder_input import all_patches


class Anchor(nn.Module):
    """Loss that keeps an encoder's features of whole images near those of its start.

    Both see the same normalised image, with nothing withheld, so that the loss is 0 at the start, unless the encoder
    drops paths or values at random. The weights of the start are stored in checkpoints: a resumed run does not need
    their source.

    Args:
        start: encoder at the start; it is copied and frozen.
        weight: weight of the loss.
    """

    def __init__(self, start: Encoder, weight: float):
        super().__init__()
        self.weight = weight
        self.start = Teacher(encoder=start)

    def attach(self, task: nn.Module) -> None:
        """Add the loss to every forward pass of a task, inside it, where weights are gathered under FSDP."""
        task.add_module("anchor", self)

        def add(task: Any, views: tuple[Tensor, ...], outcome: Outcome) -> Outcome:
            found = task.anchor(task.encoder, views[0])
            return Outcome(outcome.loss + task.anchor.weight * found.loss, outcome.metrics | found.metrics)

        task.register_forward_hook(add)

    def cosines(self, encoder: Encoder, images: Tensor) -> tuple[Tensor, ...]:
        """Return the mean cosines with the start on images [b c h w]: class and register tokens if any, and patches."""
        if images.shape[2:] != input_size(encoder):
            images = F.interpolate(images, input_size(encoder), mode="bilinear", antialias=True, align_corners=False)
        given, prefix = all_patches(images, patch_count(encoder)), prefix_count(encoder)
        with no_grad_autocast(self.start, images):
            target = encode(self.start.encoder, given)
        found = F.cosine_similarity(encode(encoder, given).float(), target.float(), dim=-1)
        return tuple(one.mean() for one in (found[:, :prefix], found[:, prefix:]) if one.shape[1])

    def forward(self, encoder: Encoder, images: Tensor) -> Outcome:
        """Return 1 - the mean cosine, to which class and register tokens contribute as much as the patches."""
        cosine = torch.stack(self.cosines(encoder, images)).mean()
        return Outcome(1 - cosine, {"anchor_cosine": cosine.detach(), "anchor_loss": 1 - cosine.detach()})
