"""How a classifier is to be trained, and its training from the first step or from where it was stopped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from timm.utils import random_seed
from torch import Tensor

from patchloom.data import Source
from patchloom.errors import PatchloomError
from patchloom.evaluate.classifier import Classifier
from patchloom.evaluate.features import Precision
from patchloom.evaluate.loop import Trained
from patchloom.evaluate.pace import TimeLeft
from patchloom.evaluate.probe import Probe, ProbeTraining
from patchloom.evaluate.recipes import Recipe, of_step, validation_images
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.training import Training
from patchloom.nets.weights import EncoderCard


@dataclass(frozen=True)
class FitPlan:
    """How the encoder and its controls are trained.

    Attributes:
        name: of the recipe.
        recipe: with every ``auto`` resolved.
        rates: base learning rates to choose from.
        card: its mean and std normalise the images.
        settings: seed, device and workers.
        precision: of matrix products, as it was asked for; weights are float32.
        half: matrix products of the training are in bfloat16.
        kernels: torch or native, of the training.
        validation: images that the data brings for it; None: a share of those to train on.
        noise: recordings of it, int16 [1 1 n] each, which training may add to others.
    """

    name: str
    recipe: Recipe
    rates: tuple[float, ...]
    card: EncoderCard
    settings: EvalSettings
    precision: Precision
    half: bool = False
    kernels: str = "torch"
    validation: Source | None = None
    noise: tuple[Tensor, ...] = field(default=(), compare=False)

    def at(self, rate: float) -> FitPlan:
        """The same with another base learning rate."""
        return replace(self, recipe=replace(self.recipe, blr=rate))

    def batch(self, n: int) -> int:
        """Images of a step, repeats included, of a training on ``n`` images."""
        return of_step(self.recipe, self._trained_on(n))[1]

    def peak(self, n: int) -> float:
        """The highest learning rate of a training on ``n`` images."""
        return self.recipe.peak(self.batch(n))

    def steps(self, n: int) -> int:
        """Updates of a training on ``n`` images, unless its patience ends it before."""
        return self.recipe.updates or self.recipe.epochs * self.per_epoch(n)

    def per_epoch(self, n: int) -> int:
        """Updates of an epoch of ``n`` images."""
        return max(1, self._trained_on(n) // self.batch(n))

    def values(self) -> dict[str, Any]:
        """Those of the recipe that act, as JSON has them."""
        own = self.recipe.plain()
        return own if self.validation is None else {name: own[name] for name in own if name != "validation"}

    def _trained_on(self, n: int) -> int:
        return n if self.validation is not None else n - validation_images(self.recipe.validation, n)

    def begin(self, model: Classifier, source: Source) -> Training:
        """A training of ``model`` on ``source``, before its first step."""
        settings = self.settings
        numbers = self.recipe, self.card.mean, self.card.std
        kind = ProbeTraining if isinstance(model, Probe) else Training
        how: Any = {"half": self.half, "native": self.kernels == "native"}
        return kind(model, source, *numbers, settings, **how, validation=self.validation, noise=self.noise)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all random generators inside the context, and restore their states after it."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random_seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def train(model: Classifier, source: Source, plan: FitPlan, name: str, left: TimeLeft | None = None) -> Trained:
    """Train on images whose labels are 0 ... c-1: all of ``source``, but for the recipe's share for validation.

    Ctrl-C and SIGTERM end it after a step; inside `until_done` the same training then goes on from there.

    Args:
        model: is trained in place.
        source: labelled images.
        plan: how.
        name: begins the lines of progress.
        left: counts the steps of this training and of others.

    Returns:
        The model, or the moving average of its weights, if the recipe has one; with validation, those of its best
        epoch.

    Raises:
        Stopped: somebody stopped it.
        PatchloomError: a non-finite loss, too little memory on the device, or unreadable images.
    """
    with seeded(plan.settings.seed), _enough_memory(plan, source):
        training = plan.begin(model, source)
        return training.run(name, left or TimeLeft(training.steps))


def seconds_of_step(model: Classifier, source: Source, plan: FitPlan) -> float:
    """Seconds of an update, the reading of its images included, from a few, by which ``model`` is changed."""
    with seeded(plan.settings.seed), _enough_memory(plan, source):
        return plan.begin(model, source).seconds_of_step()


@contextmanager
def _enough_memory(plan: FitPlan, source: Source) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as problem:
        images = of_step(plan.recipe, len(source))[1]
        raise PatchloomError(
            f"the device has too little memory for {images} {source.noun} at once: lower --batch_size"
        ) from problem
