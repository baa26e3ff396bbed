"""Random views of training images, or excerpts of recordings, by a recipe."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from patchloom.data import RandomCrop
from patchloom.data.batches import Augment
from patchloom.data.randaugment import RandAugment
from patchloom.data.sound.excerpts import RandomExcerpt
from patchloom.evaluate.recipes import Recipe
from patchloom.sound import Sound


class Views:
    """Random crops of an image with RandAugment, as many as the recipe repeats. Calls depend only on ``rng``."""

    def __init__(
        self, size: tuple[int, int], recipe: Recipe, mean: tuple[float, ...], sound: Sound | None = None
    ) -> None:
        change = RandAugment(recipe.randaugment, recipe.randaugment_std, mean) if recipe.randaugment else None
        self.crop: Augment
        if sound is None:
            self.crop = RandomCrop(size, scale=(recipe.crop_scale, 1.0), flip=recipe.flip, randaugment=change)
        else:
            self.crop = RandomExcerpt(sound)
        self.repeats = recipe.repeats

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """Views of an image [c h w], of the same dtype and resized to ``size``."""
        return tuple(view for _ in range(self.repeats) for view in self.crop(image, rng))
