"""Training and testing of detection. Letters: b batch, c channels, h w height and width, n images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchloom.data import Batch, normalize
from patchloom.data.annotated import BoxAugment
from patchloom.data.annotated.base import Annotated, Objects
from patchloom.evaluate.dense.average_precision import average_precision
from patchloom.evaluate.dense.found import Found
from patchloom.evaluate.dense.recipes import DetectRecipe
from patchloom.evaluate.dense.sliding import detect_image
from patchloom.evaluate.dense.testing import answers
from patchloom.evaluate.dense.training import DenseTraining, padded_out
from patchloom.evaluate.features import Precision
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.dense.detector import Detector
from patchloom.nets.weights import EncoderCard


class DetectTraining(DenseTraining[Objects]):
    """The training of a `Detector`: the sum of its losses.

    Arguments are those of `DenseTraining`.
    """

    measure = "AP"
    model: Detector
    recipe: DetectRecipe

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        recipe = self.recipe
        self.augment = BoxAugment(self.model.size, recipe.scale, recipe.flip, recipe.color, recipe.sides)

    def _loss(self, batch: Batch) -> Tensor:
        sizes = [target.size for target in batch.truths]
        targets = [_on(target.objects, self.device) for target in batch.truths]
        images = padded_out(normalize(batch.views[0], self.card.mean, self.card.std), sizes)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            losses = self.parallel(images, sizes, targets)
        return torch.stack([loss.float() for loss in losses.values()]).sum()

    def _outline(self, images: Tensor) -> Tensor:
        return self.model.outline(images)

    def score(self, images: Annotated[Objects]) -> float:
        """AP of the boxes."""
        found = found_in(self.tested, images, self.card, self.settings, self.recipe.score, half=self.half)
        kept = [i for i, one in enumerate(found) if one is not None]
        there = average_precision(images.subset(kept), [found[i] for i in kept], images.classes, "bbox").ap
        return 0.0 if there != there else there  # nan: no object is there to be found


def found_in(
    model: Detector,
    images: Annotated[Objects],
    card: EncoderCard,
    settings: EvalSettings,
    score: float,
    *,
    precision: Precision = "auto",
    half: bool | None = None,
    name: str = "",
) -> list[Found | None]:
    """What is found in each image, None for the unreadable ones; several processes take turns, and all must ask.

    Args:
        model, settings, precision, half: as in `patchloom.evaluate.dense.testing.answers`.
        images: annotated; the annotations are not read.
        card: its mean and std normalise the images.
        score: the lowest that counts.
        name: of the model, in a line of progress; there is none without it.
    """

    def found(_: int, image: Tensor, device: torch.device, half: bool) -> Found:
        return detect_image(model, image, card.mean, card.std, device, half, score)

    what = name and f"{name}: looking for objects in {images.images.name}"
    return answers(model, images, settings, found, precision=precision, half=half, what=what)


def _on(objects: Objects, device: torch.device) -> Objects:
    masks = None if objects.masks is None else objects.masks.to(device)
    return Objects(objects.boxes.to(device), objects.labels.to(device), masks, objects.crowd.to(device))
