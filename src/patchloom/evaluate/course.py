"""Course of a training with labels: its length, optimiser and learning rate, resolved for its data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from patchloom.schedules import halving_rate


@dataclass(frozen=True, kw_only=True)
class Course:
    """Length, optimiser and learning rate of a training.

    Attributes:
        steps: number of updates.
        per_epoch: updates of an epoch.
        unit: unit in which the length is counted.
        batch: images per update, counting repeats, over all processes.
        peak: peak learning rate.
        rate_option: the option that sets it, with its value, for messages.
        warmup: updates of warm-up, over which the rate rises linearly; early stopping begins after it.
        decay: decay of the learning rate after the warm-up: cosine or linear, to 0 one update after the last; steps, to
            a tenth at each of the ``drops``; or halving, as in `patchloom.schedules.halving_rate`.
        drops: fractions of the training at which the learning rate drops, with decay steps.
        halve_every: updates between halvings, with decay halving.
        optimizer, betas, momentum, weight_decay, layer_decay: as in `patchloom.nets.optimizer`.
        clip: maximal norm of the gradient; 0 disables clipping.
        ema: decay of a moving average of the weights, which is then tested; 0 disables it.
        every: updates between two validations.
        patience: fraction of the training without a higher score after which it ends; 1 disables early stopping.
    """

    steps: int
    per_epoch: int
    unit: Literal["epoch", "update", "step"]
    batch: int
    peak: float
    rate_option: str
    warmup: int = 0
    decay: Literal["cosine", "linear", "steps", "halving"] = "cosine"
    drops: tuple[float, ...] = ()
    halve_every: int = 0
    optimizer: Literal["adamw", "sgd", "lars"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9
    weight_decay: float = 0.0
    layer_decay: float = 1.0
    clip: float = 0.0
    ema: float = 0.0
    every: int = 1
    patience: float = 1.0

    def rate(self, step: int) -> float:
        """Return the learning rate of update ``step``, counted from 0."""
        if self.decay == "halving":
            return halving_rate(step, self.warmup, self.peak, self.halve_every)
        done, rest = step + 1, self.steps - self.warmup + 1
        if done < self.warmup:
            return done * (self.peak / self.warmup)
        if self.decay == "steps":
            return self.peak * 0.1 ** sum(step >= round(share * self.steps) for share in self.drops)
        passed = done - self.warmup
        if self.decay == "linear":
            return self.peak * (1 - passed / rest)
        return 0.5 * self.peak * (1 + math.cos(math.pi * passed / rest))  # in timm's order, for equal bits

    def count(self, step: int) -> float:
        """Return ``step`` updates in the unit of the course."""
        return step / self.per_epoch if self.unit == "epoch" else step

    @property
    def total(self) -> str:
        """Number of units of the whole course, such as "10", or "0.67" of a fraction of an epoch."""
        return f"{round(self.count(self.steps), 2):,.10g}"

    @property
    def length(self) -> str:
        """The whole course in its unit, such as "10 epochs"."""
        return f"{self.total} {self.unit}{'s' * (self.total != '1')}"

    def position(self, step: int) -> str:
        """Return the progress after ``step`` updates, such as "epoch 2.0 of 10"."""
        done = f"{self.count(step):,.1f}" if self.unit == "epoch" else f"{step:,}"
        return f"{self.unit} {done} of {self.total}"
