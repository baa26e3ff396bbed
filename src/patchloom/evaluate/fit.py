"""Training a classifier by a recipe, and its predictions. Letters: b batch, c classes."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, random_seed
from torch import Tensor
from torchvision.transforms import v2

from patchloom.data import Batch, RandomCrop, Source, normalize, plain_batches, training_batches
from patchloom.errors import PatchloomError
from patchloom.evaluate.classifier import Classifier
from patchloom.evaluate.features import Precision, labels_of, runs_in_bfloat16
from patchloom.evaluate.recipes import Recipe
from patchloom.evaluate.settings import EvalSettings
from patchloom.memory import keep_freed_memory
from patchloom.nets.performance import fuse_attention
from patchloom.nets.weights import EncoderCard

_LINES = 10  # of progress in a training
# timm's RandAugment of the papers (rand-m9-mstd0.5-inc1): two operations, each with probability 0.5, in 0 ... 10; and
# torchvision's bins, which span the same strengths
_OPERATIONS, _PROBABILITY, _MAX_MAGNITUDE, _BINS = 2, 0.5, 10, 31


@dataclass(frozen=True)
class FitPlan:
    """How the encoder and its controls are trained.

    Attributes:
        name: of the recipe.
        recipe: with every ``auto`` resolved.
        rates: base learning rates to choose from.
        card: its mean and std normalise the images.
        settings: seed, device and workers.
        precision: of matrix products; weights are float32.
    """

    name: str
    recipe: Recipe
    rates: tuple[float, ...]
    card: EncoderCard
    settings: EvalSettings
    precision: Precision

    def at(self, rate: float) -> FitPlan:
        """The same with another base learning rate."""
        return replace(self, recipe=replace(self.recipe, blr=rate))


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


def of_step(recipe: Recipe, n: int) -> tuple[int, int]:
    """(Distinct images, images with repeats) per step, with ``n`` training images.

    Raises:
        PatchloomError: mixup or cutmix with a single image.
    """
    images = min(max(1, recipe.batch // recipe.repeats), n)
    if recipe.mixes and images * recipe.repeats % 2:
        images -= 1
    if not images:
        raise PatchloomError("mixup and cutmix need 2 images in a batch: use --mixup 0 --cutmix 0")
    return images, images * recipe.repeats


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


def train(model: Classifier, source: Source, plan: FitPlan, name: str) -> Classifier:
    """Train on all images of ``source``, whose labels are 0 ... c-1.

    Args:
        model: is trained in place.
        source: labelled images.
        plan: how.
        name: begins the lines of progress.

    Returns:
        The model, or the moving average of its weights, if the recipe has one.

    Raises:
        PatchloomError: a non-finite loss, too little memory on the device, or unreadable images.
    """
    with seeded(plan.settings.seed):
        try:
            return _Training(model, source, plan).run(name)
        except torch.OutOfMemoryError as problem:
            images = of_step(plan.recipe, len(source))[1]
            raise PatchloomError(
                f"the device has too little memory for {images} images at once: lower --batch"
            ) from problem


class _Training:
    def __init__(self, model: Classifier, source: Source, plan: FitPlan) -> None:
        recipe, settings = plan.recipe, plan.settings
        self.recipe, self.card, self.device, self.seed = recipe, plan.card, settings.at, settings.seed
        self.model = model.to(self.device).train()
        self.half = runs_in_bfloat16(self.device, plan.precision)
        keep_freed_memory()
        fuse_attention(model, not (self.half and self.device.type == "cpu"))
        n, (images, self.batch) = len(source), of_step(recipe, len(source))
        self.per_epoch = max(1, n // self.batch)
        self.steps = recipe.epochs * self.per_epoch
        self.labels = labels_of(source)
        views = Views(model.size, recipe, plan.card.mean)
        reading = settings.seed, 0, self.steps, settings.workers_for(source, self.steps, trained=True), model.channels
        self.batches = training_batches(source, views, images, *reading, device=self.device)
        self.optimizer = torch.optim.AdamW(
            model.groups(recipe.weight_decay, recipe.layer_decay),
            lr=recipe.blr * self.batch / 256,
            betas=recipe.betas,
            fused=self.device.type in ("cpu", "cuda"),
        )
        warmup = min(round(recipe.warmup_epochs * self.per_epoch), self.steps - 1)
        # one more than there are steps, so that the learning rate of the last one is above 0
        self.schedule = CosineLRScheduler(
            self.optimizer, self.steps - warmup + 1, warmup_t=warmup, warmup_prefix=True, t_in_epochs=False
        )
        self.average = ModelEmaV3(model, recipe.ema, use_warmup=True) if recipe.ema else None
        self.mix = self._mixup(model.classes)
        self.loss = SoftTargetCrossEntropy() if self.mix else LabelSmoothingCrossEntropy(recipe.smoothing)
        self.erase = RandomErasing(recipe.erasing, mode="pixel", device=self.device)

    def _mixup(self, classes: int) -> Mixup | None:
        if not self.recipe.mixes:
            return None
        return Mixup(self.recipe.mixup, self.recipe.cutmix, label_smoothing=self.recipe.smoothing, num_classes=classes)

    def run(self, name: str) -> Classifier:
        start, recent = time.perf_counter(), []
        unreadable: set[str] = set()
        for step, batch in enumerate(self.batches):
            unreadable.update(batch.unreadable)
            random_seed((self.seed * 1_000_003 + step) % 2**32)
            recent.append(self._step(step, batch))
            done = step + 1
            if done * _LINES // self.steps > step * _LINES // self.steps:
                loss = torch.stack(recent).mean().item()
                if not math.isfinite(loss):
                    raise PatchloomError(
                        f"the loss is not finite after {done} steps: lower --blr (now {self.recipe.blr:g})"
                    )
                left = timedelta(seconds=round((time.perf_counter() - start) / done * (self.steps - done)))
                epoch = f"epoch {done / self.per_epoch:.1f}/{self.recipe.epochs}"
                print(f"  {name} · {epoch} · loss {loss:.4f} · {left} left", flush=True)
                recent = []
        if unreadable:
            count, first = len(unreadable), min(unreadable)
            print(f"  {name}: {count:,} training images could not be read and were left out, such as {first}")
        return (self.average.module if self.average else self.model).eval()

    def _step(self, step: int, batch: Batch) -> Tensor:
        self.schedule.step_update(step + 1)
        images = torch.cat(batch.views)
        labels = self.labels[batch.indices].repeat(len(batch.views)).to(self.device, non_blocking=True)
        if self.mix and len(images) % 2:  # unreadable images left an odd batch
            images, labels = images[:-1], labels[:-1]
        images = self.erase(normalize(images, self.card.mean, self.card.std))
        if self.mix:
            images, labels = self.mix(images, labels)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            logits = self.model(images)
        loss = self.loss(logits.float(), labels)
        loss.backward()
        if self.recipe.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average:
            self.average.update(self.model, step + 1)
        return loss.detach()


@dataclass(frozen=True)
class Answers:
    """Predictions of a classifier for labelled images.

    Attributes:
        logits: [n c] float32, on the CPU.
        labels: [n] int64.
        unreadable: names of the images that could not be read.
    """

    logits: Tensor
    labels: Tensor
    unreadable: list[str]

    def accuracy(self) -> float:
        """Top-1 accuracy in [0, 1]."""
        return (self.logits.argmax(1) == self.labels).double().mean().item()


@torch.inference_mode()
def answers(
    model: Classifier, source: Source, card: EncoderCard, settings: EvalSettings, precision: Precision = "auto"
) -> Answers:
    """Predictions for every image of ``source``, centre-cropped.

    Raises:
        PatchloomError: no image can be read, one has the wrong number of channels, or non-finite logits.
    """
    device = settings.at
    model.to(device).eval()
    logits, indices, unreadable = [], [], []
    with torch.autocast(device.type, torch.bfloat16, enabled=runs_in_bfloat16(device, precision)):
        for batch in plain_batches(
            source, model.size, **settings.reading(source), channels=model.channels, device=device
        ):
            images = normalize(batch.views[0], card.mean, card.std)
            logits.append(model(images).float().cpu())
            indices.append(batch.indices)
            unreadable += batch.unreadable
    found = Answers(torch.cat(logits), labels_of(source, torch.cat(indices)), unreadable)
    if not found.logits.isfinite().all():
        raise PatchloomError(f"a classifier on {card.name} gives non-finite logits: lower --blr")
    return found
