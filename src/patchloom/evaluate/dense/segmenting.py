"""Training and testing of segmentation. Letters: b batch, c channels, h w height and width, k classes, n images."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data import Batch, normalize
from patchloom.data.annotated import PixelAugment
from patchloom.data.annotated.base import IGNORED, Annotated
from patchloom.evaluate.dense.confusion import confusion, mean_iou, overlaps
from patchloom.evaluate.dense.recipes import SegmentRecipe
from patchloom.evaluate.dense.setup import window_count
from patchloom.evaluate.dense.sliding import AT_ONCE, BAND, segment_image
from patchloom.evaluate.dense.testing import answers
from patchloom.evaluate.dense.training import DenseTraining
from patchloom.evaluate.features import Precision
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.dense.segmenter import Segmenter, SegmentLogits
from patchloom.nets.weights import EncoderCard


class SegmentTraining(DenseTraining[Tensor]):
    """The training of a `Segmenter`: cross-entropy of each pixel that counts, and of a second head's answer.

    Arguments are those of `DenseTraining`.
    """

    measure = "mIoU"
    model: Segmenter
    recipe: SegmentRecipe

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        recipe = self.recipe
        self.augment = PixelAugment(self.model.size, recipe.resized, recipe.scale, recipe.flip, recipe.color)

    def _loss(self, batch: Batch) -> Tensor:
        truth = torch.stack(batch.truths).to(self.device, non_blocking=True).long()
        images = normalize(batch.views[0], self.card.mean, self.card.std)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            answer = self.parallel(images)
        return self._loss_of(answer, truth)

    def _outline(self, images: Tensor) -> Tensor:
        return self._loss_of(self.model(images), images[:, 0].long())

    def _loss_of(self, answer: SegmentLogits, truth: Tensor) -> Tensor:
        loss = pixel_loss(answer.main, truth)
        if answer.auxiliary is not None:
            loss = loss + self.recipe.auxiliary * pixel_loss(answer.auxiliary, truth)
        return loss

    def bytes_of_test(self, image: tuple[int, int]) -> int:
        """Those of the windows at once, of all their logits, and of the image's, a band after the other."""
        count = window_count(image, self.recipe.resized, self.recipe.size)
        self.model.eval()
        with self._without_numbers(min(count, AT_ONCE)) as (live, views), torch.no_grad():
            logits = self.model(views).main
        self.model.train()
        return live.peak + 4 * (count * logits[0].numel() + 4 * min(BAND, self.model.classes * math.prod(image)))

    def score(self, images: Annotated[Tensor]) -> float:
        """mIoU."""
        found, _ = compared_with_truth(
            self.tested, images, self.card, self.settings, self.recipe.resized, half=self.half
        )
        return mean_iou(found.sum(0)).item()


def pixel_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """Mean cross-entropy of the pixels that count; 0 if none does.

    Args:
        logits: [b k h' w'], resized to the truth bilinearly.
        truth: [b h w], with `IGNORED`.
    """
    whole = F.interpolate(logits.float(), truth.shape[-2:], mode="bilinear", align_corners=False)
    each = F.cross_entropy(whole, truth, ignore_index=IGNORED, reduction="sum")
    return each / (truth != IGNORED).sum().clamp_min(1)


def compared_with_truth(
    model: Segmenter,
    images: Annotated[Tensor],
    card: EncoderCard,
    settings: EvalSettings,
    side: int | None,
    *,
    precision: Precision = "auto",
    half: bool | None = None,
    name: str = "",
) -> tuple[Tensor, list[str]]:
    """Compare answers and truth of every image; several processes take turns, and all must ask.

    Args:
        model, settings, precision, half: as in `patchloom.evaluate.dense.testing.answers`.
        images: annotated.
        card: its mean and std normalise the images.
        side: to which the shorter side of images is resized; None: they are left as they are.
        name: of the model, in a line of progress; there is none without it.

    Returns:
        [n 3 k], what `overlaps` gives of each image, in order, with zeros for the unreadable ones; their names.
    """

    def overlapping(i: int, image: Tensor, device: torch.device, half: bool) -> Tensor:
        answer = segment_image(model, image, card.mean, card.std, side, device, half)
        return overlaps(confusion(answer, images.truth(i), model.classes))

    what = name and f"{name}: segmenting {images.images.name}"
    found = answers(model, images, settings, overlapping, precision=precision, half=half, what=what)
    none = torch.zeros(3, model.classes, dtype=torch.int64)
    unreadable = [images.images.describe(i) for i, one in enumerate(found) if one is None]
    return torch.stack([none if one is None else one for one in found]), unreadable
