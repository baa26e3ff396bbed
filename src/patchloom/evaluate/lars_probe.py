"""The papers' linear probe: batch norm and a linear layer on a frozen encoder, trained by LARS on random crops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from timm.loss import LabelSmoothingCrossEntropy
from torch import Tensor, nn

from patchloom.data.loader import Batch
from patchloom.data.source import Source
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.evaluate.classification import labelled_training
from patchloom.evaluate.classifier import Classifier, Pool
from patchloom.evaluate.features import labels_of
from patchloom.evaluate.recipes import ResolvedProbeRecipe
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trainer import Forward, Trainer
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import encode, patch_count, pooled_norm, prefix_count, width
from patchloom.nets.heads import InstanceHead, represent
from patchloom.nets.swin import Encoder
from patchloom.system.distributed import gathered, smallest, world
from patchloom.withhold.encoder_input import all_patches


def refuse_accumulation(settings: EvalSettings) -> None:
    """Refuse accumulation for probes of frozen encoders, whose batch norm needs the features of the whole step."""
    if settings.accumulate != 1:
        raise PatchloomError(
            "--accumulate has no effect here, since steps are encoded 256 images at a time: leave it out"
        )


class LinearClassifier(Classifier):
    """Linear layer on the features of a frozen encoder, with a batch norm without scale and shift.

    Features are the class token or the mean of the patch tokens, after the encoder's last norm, or the instance
    representation. Encoder and instance head are not copied.
    """

    def __init__(self, encoder: Encoder, classes: int, pooling: Pool, instance: InstanceHead | None = None) -> None:
        super().__init__(encoder, classes, pooling, instance=instance if pooling == "instance" else None)
        # the encoder is frozen, so all batches have equal weight in the mean and variance for testing
        self.norm = nn.BatchNorm1d(width(encoder), eps=1e-6, momentum=None, affine=False)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        for net in self._frozen():
            net.requires_grad_(False)

    def _frozen(self) -> list[nn.Module]:
        return [net for net in (self.encoder, self.instance) if net is not None]

    def train(self, mode: bool = True) -> LinearClassifier:
        """Set the mode; frozen parts stay in eval mode."""
        super().train(mode)
        for net in self._frozen():
            net.eval()
        return self

    def groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Return parameter groups; LARS scales rates by the norm of the weight, not of the bias, as MAE's code."""
        adapted = {"params": [self.head.weight], "weight_decay": weight_decay, "always_adapt": True}
        return [adapted, {"params": [self.head.bias], "weight_decay": 0.0, "always_adapt": False}]

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return features [b d] float32 of normalised images [b channels h w], without gradients."""
        vit = self.encoder
        tokens = encode(vit, all_patches(images, patch_count(vit)), norm=self.pooling != "instance")
        if self.pooling == "instance":
            assert self.instance is not None  # required for this pooling
            return represent(vit, self.instance, tokens).float()
        pooled = tokens[:, 0] if self.pooling == "class" else tokens[:, prefix_count(vit) :].float().mean(1)
        return pooled_norm(vit, pooled).float()

    def classify(self, features: Tensor) -> Tensor:
        """Return logits [b c] of features [b d], in float32 even in mixed precision; only this part has gradients."""
        with torch.autocast(features.device.type, enabled=False):
            assert self.norm is not None  # set in every linear classifier
            return self.head(self.norm(features))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [b c] of normalised images [b channels h w]."""
        return self.classify(self.features(images))


def begin_probe(
    model: LinearClassifier,
    card: EncoderCard,
    recipe: ResolvedProbeRecipe,
    train: Source,
    held: Source | None,
    *,
    settings: EvalSettings,
    half: bool = False,
    kernels: str = "torch",
) -> Trainer:
    """Return the training of a linear classifier, as `patchloom.evaluate.classification.begin_classifier` does.

    A step has thousands of images: they arrive in parts, and only their features are held in memory. Each of several
    processes encodes its images of every part; then all have the features of the whole step, which the batch norm
    needs, and make the same update.
    """
    device, labels = settings.torch_device, labels_of(train)
    criterion = LabelSmoothingCrossEntropy(recipe.smoothing)

    def encode_steps(read: Any, parts: int) -> Iterator[Batch]:
        """Yield batches with features [b d] instead of views."""
        with closing(read):
            while step := [*islice(read, parts)]:
                with torch.autocast(device.type, torch.bfloat16, enabled=half):
                    features = [model.features(normalize(part.views[0], card.mean, card.std)) for part in step]
                unreadable = [name for part in step for name in part.unreadable]
                batch = Batch((torch.cat(features),), torch.cat([part.indices for part in step]), unreadable)
                batch = batch.first(smallest(len(batch.indices)))
                whole = gathered(batch.indices.to(device)).cpu() if world() > 1 else batch.indices
                yield batch._replace(views=(gathered(batch.views[0]),), indices=whole)

    def loss(forward: Forward, batch: Batch) -> Tensor:
        targets = labels[batch.indices].to(device, non_blocking=True)
        return criterion(model.classify(batch.views[0]).float(), targets)

    return labelled_training(
        model, card, recipe, train, held, loss, settings=settings, half=half, kernels=kernels, encode=encode_steps
    )
