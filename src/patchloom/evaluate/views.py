"""Random views of training images, or excerpts of recordings, by a recipe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from patchloom.data import RandomCrop
from patchloom.data.batches import Augment
from patchloom.data.randaugment import RandAugment
from patchloom.data.sound.excerpts import RandomExcerpt
from patchloom.evaluate.recipes import Recipe
from patchloom.sound import Sound


class Views:
    """Random crops of an image with RandAugment, or excerpts of a recording that are shifted and mixed with noise.

    There are as many as the recipe repeats. Calls depend only on ``rng``.

    Args:
        size: (h, w) of the crops.
        recipe: how they are changed.
        mean: of the channels, with which RandAugment fills gaps.
        sound: of recordings; None: these are images.
        noise: of which excerpts are added to recordings, int16 [1 1 n] each.
    """

    def __init__(
        self,
        size: tuple[int, int],
        recipe: Recipe,
        mean: tuple[float, ...],
        sound: Sound | None = None,
        noise: Sequence[Tensor] = (),
    ) -> None:
        change = RandAugment(recipe.randaugment, recipe.randaugment_std, mean) if recipe.randaugment else None
        self.crop: Augment
        if sound is None:
            self.crop = RandomCrop(size, scale=(recipe.crop_scale, 1.0), flip=recipe.flip, randaugment=change)
        else:
            self.crop = RandomExcerpt(sound, recipe.shift, noise, recipe.noise_share, recipe.noise_volume)
        self.repeats = recipe.repeats

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """Views of an image [c h w], of the same dtype and resized to ``size``; excerpts of a recording [1 1 n]."""
        return tuple(view for _ in range(self.repeats) for view in self.crop(image, rng))
