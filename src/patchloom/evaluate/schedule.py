"""The learning rate of a training, as a function of the update alone."""

from __future__ import annotations

import torch
from timm.scheduler import CosineLRScheduler
from timm.scheduler.scheduler import Scheduler

from patchloom.evaluate.recipes import Recipe


def schedule_of(optimizer: torch.optim.Optimizer, recipe: Recipe, steps: int, per_epoch: int) -> Scheduler:
    """The schedule of a recipe: a warm-up, then a cosine to 0, or halvings.

    Args:
        optimizer: has the highest rates.
        recipe: with every ``auto`` resolved.
        steps, per_epoch: updates of the training, and of an epoch.
    """
    own = recipe.warmup_updates if recipe.updates else round(recipe.warmup_epochs * per_epoch)
    warmup = min(own, steps - 1)
    # one more than there are steps, so that the learning rate of the last one is above 0
    cosine = CosineLRScheduler(optimizer, steps - warmup + 1, warmup_t=warmup, warmup_prefix=True, t_in_epochs=False)
    if not recipe.warmup_lr and not recipe.halve_every:
        return cosine
    return _InPieces(optimizer, cosine, warmup, recipe.warmup_lr, recipe.halve_every)


class _InPieces(Scheduler):
    """A constant rate in the warm-up, or halvings after it (MP3, section 4.3).

    Args:
        optimizer: has the highest rates.
        cosine: gives what is not otherwise.
        warmup: updates of the warm-up.
        warmup_lr: the rate in it; 0: as ``cosine``.
        halve_every: updates, the warm-up's among them, after which the rate is halved; 0: as ``cosine``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cosine: CosineLRScheduler,
        warmup: int,
        warmup_lr: float,
        halve_every: int,
    ) -> None:
        super().__init__(optimizer, "lr", t_in_epochs=False)
        self.cosine, self.warmup, self.warmup_lr, self.halve_every = cosine, warmup, warmup_lr, halve_every

    def _get_lr(self, t: int) -> list[float]:
        """The rate of each group in update ``t``, counted from 1, before its scale."""
        if t <= self.warmup and self.warmup_lr:
            return [self.warmup_lr] * len(self.base_values)
        if t > self.warmup and self.halve_every:
            return [value * 0.5 ** ((t - 1) // self.halve_every) for value in self.base_values]
        return self.cosine._get_lr(t)
