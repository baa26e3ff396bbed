"""The learning rate of a training, as a function of the update alone."""

from __future__ import annotations

import torch
from timm.scheduler import CosineLRScheduler
from timm.scheduler.scheduler import Scheduler

from patchloom.evaluate.recipes import Recipe
from patchloom.rates import halving_rate


def schedule_of(optimizer: torch.optim.Optimizer, recipe: Recipe, steps: int, per_epoch: int) -> Scheduler:
    """The schedule of a recipe.

    Args:
        optimizer: has the highest rates.
        recipe: with every ``auto`` resolved.
        steps, per_epoch: updates of the training, and of an epoch.
    """
    own = recipe.warmup_updates if recipe.updates else round(recipe.warmup_epochs * per_epoch)
    warmup = min(own, steps - 1)
    if recipe.halve_every:
        return Halving(optimizer, warmup, recipe.halve_every)
    # one more than there are steps, so that the learning rate of the last one is above 0
    return CosineLRScheduler(optimizer, steps - warmup + 1, warmup_t=warmup, warmup_prefix=True, t_in_epochs=False)


class Halving(Scheduler):
    """The schedule of MP3 on speech, as `patchloom.rates.halving_rate` has it.

    Args:
        optimizer: has the highest rates.
        warmup: updates of the warm-up.
        every: updates between two halvings.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, warmup: int, every: int) -> None:
        super().__init__(optimizer, "lr", t_in_epochs=False)
        self.warmup, self.every = warmup, every

    def _get_lr(self, t: int) -> list[float]:
        """The rate of each group in update ``t``, counted from 1, before its scale."""
        return [halving_rate(t - 1, self.warmup, peak, self.every) for peak in self.base_values]
