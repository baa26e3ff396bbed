"""Predictions of a classifier. Letters: n images, c classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from patchloom.data import Source, normalize, plain_batches
from patchloom.errors import PatchloomError
from patchloom.evaluate.classifier import Classifier
from patchloom.evaluate.features import Precision, labels_of, runs_in_bfloat16
from patchloom.evaluate.pace import watched
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.weights import EncoderCard


@dataclass(frozen=True)
class Answers:
    """Predictions of a classifier for labelled images.

    Attributes:
        logits: [n c] float32, on the CPU.
        labels: [n] int64.
        unreadable: names of the images that could not be read.
    """

    logits: Tensor
    labels: Tensor
    unreadable: list[str]

    @property
    def right(self) -> Tensor:
        """[n] whether the label is the class that is named."""
        return self.logits.argmax(1) == self.labels

    def accuracy(self) -> float:
        """Top-1 accuracy in [0, 1]."""
        return self.right.double().mean().item()


def answers(
    model: Classifier,
    source: Source,
    card: EncoderCard,
    settings: EvalSettings,
    precision: Precision = "auto",
    name: str = "",
) -> Answers:
    """Predictions for every image of ``source``, centre-cropped.

    Args:
        model: is moved to the device, and put into eval mode.
        source: labelled images.
        card: its mean and std normalise the images.
        settings: device and reading.
        precision: of matrix products; auto is bfloat16 where a CUDA device has it.
        name: of the model, in a line of progress; there is none without it.

    Raises:
        PatchloomError: no image can be read, one has the wrong number of channels, or non-finite logits.
    """
    what = name and f"  {name}: predictions for {source.name}"
    logits, indices, unreadable = predictions(model, source, card.mean, card.std, settings, precision, what)
    return Answers(logits, labels_of(source, indices), unreadable)


@torch.inference_mode()
def predictions(
    model: Classifier,
    source: Source,
    mean: Sequence[float],
    std: Sequence[float],
    settings: EvalSettings,
    precision: Precision,
    what: str = "",
) -> tuple[Tensor, Tensor, list[str]]:
    """Logits [n c] for the images of these indices [n], and names of the unreadable ones; as `answers`."""
    device = settings.at
    model.to(device).eval()
    logits, indices, unreadable = [], [], []
    reading = settings.reading(source)
    batches = plain_batches(source, model.size, **reading, channels=model.channels, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=runs_in_bfloat16(device, precision)):
        for batch in watched(batches, -(-len(source) // reading["batch_size"]), what):
            images = normalize(batch.views[0], mean, std)
            logits.append(model(images).float().cpu())
            indices.append(batch.indices)
            unreadable += batch.unreadable
    found = torch.cat(logits)
    if not found.isfinite().all():
        raise PatchloomError("the classifier gives non-finite logits: lower --blr")
    return found, torch.cat(indices), unreadable
