"""Identity of an image: which image of the training set a view shows (DIET)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.data.modality import IMAGES, Modality
from patchloom.nets.geometry import Geometry
from patchloom.questions.agreement import all_cosines, neighbours_sheet
from patchloom.questions.question import Encoded, Measure, Outcome, Question, Sheet


class ImageHead(nn.Linear):
    """Linear head with one output per image of one training set; a run on other images never takes it over."""


class Identity(Question):
    """Classification of a view: one class per training image (DIET, Balestriero 2023).

    Held-out images have no class, so the measure is whether two views of one find each other.

    Args:
        geometry: geometry of the encoder.
        images: number of training images n.
        smoothing: label smoothing ε: the target is 1 - ε + ε/n for the image and ε/n for each other one.
    """

    pictured = 200  # images that are searched for neighbours

    def __init__(self, geometry: Geometry, images: int, smoothing: float):
        super().__init__(geometry)
        self.images, self.smoothing = images, smoothing
        self.head = ImageHead(geometry.width, images, bias=False)
        targets = [1 - smoothing + smoothing / images, *[smoothing / images] * (images > 1)]
        counts = (1, images - 1)
        # the least possible cross-entropy, so that a perfect answer has loss 0
        self.least = -sum(count * p * math.log(p) for count, p in zip(counts, targets, strict=False) if p > 0)

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """Return the cross-entropy minus its least possible value; accuracy and chance are metrics.

        ``encoded.given.targets["identity"]``, int64 [b], has the places of the images in the training set.
        """
        answers = self.head(self.features(encoded)).float()
        own = encoded.given.targets["identity"]
        loss = F.cross_entropy(answers, own, label_smoothing=self.smoothing) - self.least
        found = (answers.detach().argmax(1) == own).float().mean()
        return Outcome(loss, {"identity_accuracy": found, "identity_chance": torch.full_like(found, 1 / self.images)})

    def features(self, encoded: Encoded) -> Tensor:
        """Return the mean patch token [b d] of each image."""
        return encoded.given.mean_patch_token(encoded.tokens)

    def measure(self, encoded: Encoded) -> Measure:
        """Measure how often two views find each other, beside chance and the nearest by raw pixels.

        ``encoded`` has two views of each image: first views [b], then second ones [b].
        """
        found = same_image_found(*self.features(encoded).chunk(2))
        by_pixels = same_image_found(*encoded.images.flatten(1).chunk(2))
        raw = encoded.modality.raw
        baselines = {"chance": torch.full_like(found, 1 / len(found)), raw: by_pixels}
        return Measure("same image found", found, baselines, ("chance", raw), True)

    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Draw nearest neighbours by the encoder."""
        return [self.neighbours(encoded.images, self.features(encoded), encoded.modality)]

    def neighbours(self, images: Tensor, features: Tensor, modality: Modality = IMAGES) -> Sheet:
        """Draw the nearest neighbours of the first ``images`` [b c h w] by their ``features`` [b d]."""
        caption = f"The nearest of {len(images) - 1} other {modality.noun} by the cosine of their mean patch tokens."
        return neighbours_sheet(images, {"encoder": (features, features)}, caption, modality.item)


def same_image_found(one: Tensor, two: Tensor) -> Tensor:
    """Return the share [b] of an image's two views, features [b d] each, that are nearest to each other.

    The nearest is searched among the other views of all images. Ties count as not found: equal features of all images
    give 0.
    """
    near = all_cosines(one, two)
    if len(near) == 1:
        return torch.ones_like(near[0])
    own = near.diagonal()
    others = near.masked_fill(torch.eye(len(near), dtype=torch.bool, device=near.device), -math.inf)
    return ((own > others.amax(1)).float() + (own > others.amax(0)).float()) / 2
