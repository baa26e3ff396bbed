"""The papers' linear probe: a batch norm and a linear layer on a frozen encoder, trained by LARS on random crops.

MAE (He et al. 2022), appendix A.1 and Table 10; ExtreMA (Wu et al. 2023), Table 14, on the instance representation.
Letters: b batch, d width, c classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from timm.optim import Lars
from torch import Tensor, nn

from patchloom.data import Batch, normalize, training_batches
from patchloom.evaluate.classifier import Classifier, Pool
from patchloom.evaluate.recipes import ProbeRecipe
from patchloom.evaluate.training import Training
from patchloom.nets.encode import encode, patch_count, pooled_norm, prefix_count, width
from patchloom.nets.heads import InstanceHead, represent
from patchloom.nets.hierarchical import Encoder
from patchloom.withhold.encoder_input import all_patches


class Probe(Classifier):
    """A linear layer on the features of a frozen encoder, normed over the batch without learnt scale and shift.

    Args:
        encoder: is not copied, and its weights get no gradients.
        classes: number of classes.
        pooling: the class token or the mean of the patch tokens, after the encoder's last norm, or the instance
            representation.
        instance: gives that, and is not copied either; left out for the others.
    """

    def __init__(self, encoder: Encoder, classes: int, pooling: Pool, instance: InstanceHead | None = None) -> None:
        super().__init__(encoder, classes, pooling, instance=instance if pooling == "instance" else None)
        # the encoder is frozen, so that all batches count alike in the mean and variance by which is tested
        self.norm = nn.BatchNorm1d(width(encoder), eps=1e-6, momentum=None, affine=False)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        for net in self._frozen():
            net.requires_grad_(False)

    def _frozen(self) -> list[nn.Module]:
        return [net for net in (self.encoder, self.instance) if net is not None]

    def train(self, mode: bool = True) -> Probe:
        """Set the mode; what is frozen stays in eval mode."""
        super().train(mode)
        for net in self._frozen():
            net.eval()
        return self

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """[b d] float32 of normalised images [b channels h w], without gradients."""
        vit = self.encoder
        tokens = encode(vit, all_patches(images, patch_count(vit)), norm=self.pooling != "instance")
        if self.pooling == "instance":
            return represent(vit, self.instance, tokens).float()
        pooled = tokens[:, 0] if self.pooling == "class" else tokens[:, prefix_count(vit) :].float().mean(1)
        return pooled_norm(vit, pooled).float()

    def answered(self, features: Tensor) -> Tensor:
        """Logits [b c] of features [b d], in float32 also amid half precision: here alone are gradients."""
        with torch.autocast(features.device.type, enabled=False):
            return self.head(self.norm(features))

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b c] of normalised images [b channels h w]."""
        return self.answered(self.features(images))


class ProbeTraining(Training):
    """The training of a `Probe` by LARS. A step has the features of many parts, each taken as it arrives.

    Arguments are those of `Training`.
    """

    model: Probe
    recipe: ProbeRecipe

    def _optimizer(self) -> torch.optim.Optimizer:
        """LARS, whose rate follows the weights' norm, but not for the bias, as in MAE's program."""
        head = self.model.head
        adapted = {"params": [head.weight], "weight_decay": self.recipe.weight_decay, "always_adapt": True}
        plain = {"params": [head.bias], "weight_decay": 0.0, "always_adapt": False}
        return Lars([adapted, plain], lr=self.recipe.peak(self.batch), momentum=self.recipe.momentum)

    def _batches(self, steps: int, workers: int) -> Any:
        """Batches that have features [b d] for views."""
        parts = self.recipe.parts(self.images)
        reading = self.seed, self.step * parts, steps * parts, workers, self.model.channels
        size = self.images // parts
        read: Any = training_batches(self.source, self.views, size, *reading, device=self.device)
        with closing(read):
            for _ in range(self.step, steps):
                yield self._encoded(islice(read, parts))

    def _encoded(self, parts: Iterable[Batch]) -> Batch:
        features, indices, unreadable = [], [], []
        for part in parts:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                features.append(self.model.features(normalize(part.views[0], self.mean, self.std)))
            indices.append(part.indices)
            unreadable += part.unreadable
        return Batch((torch.cat(features),), torch.cat(indices), unreadable)

    def _answered(self, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = self.labels[batch.indices].to(self.device, non_blocking=True)
        return self.model.answered(batch.views[0]), labels

    def seconds_of_step(self) -> float:
        """See `Training`; from steps of one part each."""
        images, parts = self.images, self.recipe.parts(self.images)
        self.images //= parts
        try:
            return super().seconds_of_step() * parts
        finally:
            self.images = images
