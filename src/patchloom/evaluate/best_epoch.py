"""Which epoch's weights are tested: the best one on validation images, which are training images held out from it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_TIMES = 30  # that a training is validated at most


class Score(NamedTuple):
    """How good an epoch is: by its accuracy and, of equal ones, by its loss, or what else decides between them."""

    accuracy: float
    negative_loss: float


class BestEpoch:
    """The weights that were best so far.

    Args:
        images: validation images; 0: there are none, and the last weights are the ones to test.
        steps, per_epoch: of the training, and of an epoch.
        patience: share of the training; so much without a higher accuracy ends it. 1: never.
        every: steps between two validations; where it is not said, whole epochs, at most 30 times.
    """

    def __init__(self, images: int, steps: int, per_epoch: int, patience: float, every: int | None = None):
        self.images, self.steps, self.per_epoch, self.patience = images, steps, per_epoch, patience
        self.every = every or math.ceil(steps / per_epoch / _TIMES) * per_epoch
        self.score: Score | None = None
        self.latest: Score | None = None
        self.step = self.risen = 0  # of the best weights, and where the accuracy was last raised
        self.weights: dict[str, Tensor] = {}

    def due(self, step: int) -> bool:
        """Whether the weights after ``step`` steps are to be validated."""
        return bool(self.images) and (step % self.every == 0 or step == self.steps)

    def compare(self, step: int, score: Score, model: nn.Module) -> None:
        """Keep a model's weights after ``step`` steps, if they are better than all before."""
        self.latest = score
        if self.score is None or score.accuracy > self.score.accuracy:
            self.risen = step
        if self.score is None or score > self.score:
            self.score, self.step = score, step
            self.weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}

    def hopeless(self, step: int) -> bool:
        """Whether the accuracy has not risen for so long that it will not: the loss alone may fall for ever."""
        return self.patience < 1 and self.score is not None and step - self.risen >= self.patience * self.steps

    def choose(self, model: nn.Module) -> dict[str, Any]:
        """Give a model the best weights; what to write beside its result."""
        if self.score is None:
            return {}
        model.load_state_dict(self.weights)
        epoch = round(self.step / self.per_epoch, 2)
        return {"best_epoch": epoch, "validation_accuracy": self.score.accuracy, "validation_images": self.images}

    def plain(self) -> dict[str, Any]:
        """All but the weights, for a checkpoint."""
        return {"step": self.step, "risen": self.risen, "score": self.score, "latest": self.latest}

    def restore(self, about: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """What `plain` gave, and the weights."""
        self.step, self.risen, self.weights = about["step"], about["risen"], weights
        self.score, self.latest = (None if one is None else Score(*one) for one in (about["score"], about["latest"]))


def score_of(logits: Tensor, labels: Tensor) -> Score:
    """Of logits [n c] for images with ``labels`` [n]."""
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return Score(accuracy, -torch.nn.functional.cross_entropy(logits.double(), labels).item())
