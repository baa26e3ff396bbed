"""Random views of training images by a recipe."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from patchloom.data import RandomCrop
from patchloom.evaluate.recipes import Recipe

# timm's RandAugment of the papers (rand-m9-mstd0.5-inc1): two operations, each with probability 0.5, in 0 ... 10; and
# torchvision's bins, which span the same strengths
_OPERATIONS, _PROBABILITY, _MAX_MAGNITUDE, _BINS = 2, 0.5, 10, 31


class Views:
    """Random crops of an image with RandAugment, as many as the recipe repeats. Calls depend only on ``rng``."""

    def __init__(self, size: tuple[int, int], recipe: Recipe, mean: tuple[float, ...]) -> None:
        self.crop = RandomCrop(size, scale=(recipe.crop_scale, 1.0), flip=recipe.flip)
        self.recipe, self.mean = recipe, mean

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """Views of an image [c h w], of the same dtype and resized to ``size``."""
        return tuple(self._augmented(*self.crop(image, rng), rng) for _ in range(self.recipe.repeats))

    def _augmented(self, view: Tensor, rng: np.random.Generator) -> Tensor:
        recipe = self.recipe
        if not recipe.randaugment:
            return view
        colored = len(view) in (1, 3)  # to torchvision, any other number of channels is a batch of grey images
        unit = 255 if view.dtype == torch.uint8 else 1
        fill = [unit * value for value in (self.mean if colored else (float(np.mean(self.mean)),))]
        with torch.random.fork_rng(devices=[]):  # torchvision draws from torch's global stream
            torch.manual_seed(int(rng.integers(2**63)))
            for _ in range(_OPERATIONS):
                magnitude = np.clip(rng.normal(recipe.randaugment, recipe.randaugment_std), 0, _MAX_MAGNITUDE)
                if rng.random() < _PROBABILITY:
                    step = round(float(magnitude) / _MAX_MAGNITUDE * (_BINS - 1))
                    augment = v2.RandAugment(1, step, _BINS, v2.InterpolationMode.BILINEAR, fill)
                    view = augment(view) if colored else augment(view[:, None])[:, 0]
        return view
