"""Training for rare classes: weights in the loss, the Dice loss, and crops that hold them.

Letters: b batch, h w height and width, k classes, n images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.dense.recipes import FOR_RARE, ResolvedSegmentRecipe, SegmentRecipe
from patchloom.errors import listing

RARE = 0.05  # fraction of the training pixels below which a class is rare


def rare_classes(pixels: np.ndarray) -> np.ndarray:
    """Return the classes that occur in less than `RARE` of the pixels; ``pixels`` are counts [n k] or [k]."""
    counts = pixels.reshape(-1, pixels.shape[-1]).sum(0)
    return np.flatnonzero((counts > 0) & (counts < RARE * counts.sum()))


def for_rare_classes(
    asked: SegmentRecipe, recipe: ResolvedSegmentRecipe, pixels: np.ndarray, classes: Sequence[str]
) -> tuple[ResolvedSegmentRecipe, str]:
    """Return the recipe with values for rare classes where ``asked`` has auto, and a sentence on them, or "".

    They act only if a constant answer is nearly right: all classes but one have under `RARE` of the pixels together.
    There they were measured to find what else is not found (benchmarks/rare.py).

    Args:
        pixels: number of training pixels of each class, [k].
    """
    rest = 1 - pixels.max() / pixels.sum()
    changed = {name: value for name, value in FOR_RARE.items() if getattr(asked, name) == "auto"}
    if not 0 < rest < RARE or not changed:
        return recipe, ""
    chosen = listing([f"--{name} {str(value).lower()}" for name, value in changed.items()], "and")
    said = f"Only {rest:.2%} of the training pixels are not {classes[int(pixels.argmax())]}, so auto chose {chosen}"
    return replace(recipe, **changed), said


def class_weights(pixels: np.ndarray) -> Tensor:
    """Return the weight of each class in the cross-entropy, 1 / ln(1.02 + p) for the fraction p of the pixels, [k].

    From ENet (Paszke et al. 2016, section 5.1). They go from 1.4 for a class of all pixels to 50 for one of none.

    Args:
        pixels: number of pixels of each class, [n k].
    """
    counts = pixels.sum(0)
    return torch.from_numpy(1 / np.log(1.02 + counts / counts.sum())).float()


def dice_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """Return 1 minus the mean soft Dice score of the classes in a batch; 0 if no pixel counts.

    Dice is 2 Σ p t / (Σ p + Σ t) over all pixels of the batch, for the chance p of a class and 1 or 0 for t, its truth
    (Milletari et al. 2016, with sums instead of squares in the denominator, as in nnU-Net). Classes that the batch does
    not show have no part in the mean: the cross-entropy beside it teaches not to predict them.

    Args:
        logits: [b k h w].
        truth: [b h w], with negative numbers for pixels that do not count.
    """
    counted, labels = (truth >= 0).flatten(), truth.clamp_min(0)
    chances = logits.float().softmax(1)
    own = chances.gather(1, labels[:, None])[:, 0].flatten() * counted
    zeros = own.new_zeros(logits.shape[1])
    common = zeros.index_add(0, labels.flatten(), own)
    there = zeros.index_add(0, labels.flatten(), counted.to(own.dtype))
    predicted = (chances * (truth >= 0)[:, None]).sum((0, 2, 3))
    shown = there > 0
    scores = 2 * common / (predicted + there).clamp_min(1e-6)
    return ((1 - scores) * shown).sum() / shown.sum().clamp_min(1)


class RareCrops(NamedTuple):
    """Images to train on, some of them several times, and how often their crops are aimed at a rare class.

    Attributes:
        images: [m] indices of the images, each once, and those with a rare class perhaps more often.
        classes: the rare classes.
        aimed: probability of an aimed crop in an image with a rare class.
    """

    images: np.ndarray
    classes: tuple[int, ...]
    aimed: float


def rare_crops(pixels: np.ndarray, fraction: float) -> RareCrops:
    """Choose images and aim so that ``fraction`` of the crops hold a rare class.

    Args:
        pixels: number of pixels of each class in each image, [n k].
        fraction: from 0 to below 1.
    """
    rare, n = rare_classes(pixels), len(pixels)
    holding = np.flatnonzero(pixels[:, rare].any(1))
    if not fraction or not len(holding):
        return RareCrops(np.arange(n), (), 0.0)
    others = n - len(holding)
    times = max(1, math.ceil(fraction * others / ((1 - fraction) * len(holding))))
    share = times * len(holding) / (times * len(holding) + others)
    images = np.concatenate([np.arange(n), np.tile(holding, times - 1)])
    return RareCrops(images, tuple(rare.tolist()), fraction / share)
