"""The training of a classifier by a recipe."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import Lars
from timm.scheduler import CosineLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, random_seed
from torch import Tensor, nn

from patchloom.audio.compatibility import wrong_kind_error
from patchloom.data.augment import RandAugment, RandomCrop
from patchloom.data.loader import Augment, Batch, plain_batches, training_batches
from patchloom.data.source import Source
from patchloom.data.splits import hold_out, splittable
from patchloom.data.stats import normalize
from patchloom.display import TimeLeft, duration, is_first, progress_message, track_progress
from patchloom.errors import PatchloomError
from patchloom.evaluate.classifier import Classifier, Pool, class_names
from patchloom.evaluate.features import (
    Precision,
    count_classes,
    digest_tensors,
    labels_of,
    runs_in_bfloat16,
    trains_in_bfloat16,
)
from patchloom.evaluate.frozen import majority
from patchloom.evaluate.recipes import (
    ONLY_FOR,
    RECIPES,
    Recipe,
    ResolvedProbeRecipe,
    ResolvedRecipe,
    Sized,
    check_shares,
    images_per_step,
    recipe_for,
    validation_images,
)
from patchloom.evaluate.results import Report, Row, note_unreadable
from patchloom.evaluate.settings import EvalSettings, Parts
from patchloom.evaluate.trainer import BestEpoch, EpochScore, Loop, Trained, score_of, training_identity
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import attention_heads, encode, patch_count, pooled_norm, prefix_count, width
from patchloom.nets.heads import InstanceHead, represent
from patchloom.nets.performance import choose_kernels, fuse_attention, use_kernels
from patchloom.nets.swin import Encoder
from patchloom.schedules import halving_rate
from patchloom.system.distributed import collected, gathered, rank, refused_by_all, smallest, world
from patchloom.system.hardware import keep_freed_memory
from patchloom.withhold.encoder_input import all_patches

# The learning rate of a training, as a function of the update alone.


def schedule_of(optimizer: torch.optim.Optimizer, recipe: ResolvedRecipe, steps: int, per_epoch: int) -> Scheduler:
    """The schedule of a recipe."""
    own = recipe.warmup_updates if recipe.updates else round(recipe.warmup_epochs * per_epoch)
    warmup = min(own, steps - 1)
    if recipe.halve_every:
        return Halving(optimizer, warmup, recipe.halve_every)
    # one more than there are steps, so that the learning rate of the last one is above 0
    return CosineLRScheduler(optimizer, steps - warmup + 1, warmup_t=warmup, warmup_prefix=True, t_in_epochs=False)


class Halving(Scheduler):
    """The schedule of MP3 on speech, as `patchloom.schedules.halving_rate` has it.

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


# Random views of training images by a recipe.


class Views:
    """Random crops of an image with RandAugment, or what a source cuts in their place.

    There are as many as the recipe repeats. Calls depend only on ``rng``.

    Args:
        size: (h, w) of the crops.
        recipe: how they are changed.
        mean: of the channels, with which RandAugment fills gaps.
        source: what is cut.
    """

    def __init__(self, size: tuple[int, int], recipe: Recipe, mean: tuple[float, ...], source: Source) -> None:
        change = RandAugment(recipe.randaugment, recipe.randaugment_std, mean) if recipe.randaugment else None
        crop = RandomCrop(size, scale=(recipe.crop_scale, 1.0), flip=recipe.flip, randaugment=change)
        self.crop: Augment = source.cut(
            crop, shift=recipe.shift, noise_share=recipe.noise_share, noise_volume=recipe.noise_volume
        )
        self.repeats = recipe.repeats

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """Views of an image [c h w], of the same dtype and resized to ``size``."""
        return tuple(view for _ in range(self.repeats) for view in self.crop(image, rng))


# Predictions of a classifier. Letters: n images, c classes.


@dataclass(frozen=True)
class ClassPredictions:
    """Predictions of a classifier for labelled images.

    Attributes:
        logits: [n c] float32, on the CPU.
        labels: [n] int64.
        unreadable: names of the images that could not be read.
    """

    logits: Tensor
    labels: Tensor
    unreadable: list[str]

    @property
    def right(self) -> Tensor:
        """[n] whether the label is the class that is named."""
        return self.logits.argmax(1) == self.labels

    def accuracy(self) -> float:
        """Top-1 accuracy in [0, 1]."""
        return self.right.double().mean().item()


def predict_classes(
    model: Classifier,
    source: Source,
    card: EncoderCard,
    settings: EvalSettings,
    precision: Precision = "auto",
    name: str = "",
) -> ClassPredictions:
    """Predictions for every image of ``source``, centre-cropped."""
    what = name and f"  {name}: predictions for {source.name}"
    logits, indices, unreadable = predictions(model, source, card.mean, card.std, settings, precision, what)
    return ClassPredictions(logits, labels_of(source, indices), unreadable)


@torch.inference_mode()
def predictions(
    model: Classifier,
    source: Source,
    mean: Sequence[float],
    std: Sequence[float],
    settings: EvalSettings,
    precision: Precision,
    what: str = "",
) -> tuple[Tensor, Tensor, list[str]]:
    """Logits [n c] for the images of these indices [n], and names of the unreadable ones; as `predict_classes`.

    Several processes share the batches, and all must ask.
    """
    device = settings.torch_device
    model.to(device).eval()
    mine: list[tuple[Tensor, Batch]] = []
    reading, count = settings.reading(source), settings.batches(source)
    first, stop = count * rank() // world(), count * (rank() + 1) // world()
    batches = plain_batches(
        source, model.size, **reading, first=first, stop=stop, channels=model.channels, device=device
    )
    with torch.autocast(device.type, torch.bfloat16, enabled=runs_in_bfloat16(device, precision)):
        for batch in track_progress(batches, stop - first, what):
            images = normalize(batch.views[0], mean, std)
            mine.append((model(images).float().cpu(), batch._replace(views=())))
    each = collected(mine)
    if not each:
        raise refused_by_all(f"nothing in {source.name} could be read")
    found = torch.cat([logits for logits, _ in each])
    if not found.isfinite().all():
        raise refused_by_all("the classifier gives non-finite logits: lower --blr")
    indices = torch.cat([batch.indices for _, batch in each])
    return found, indices, [name for _, batch in each for name in batch.unreadable]


class Training(Loop):
    """The training of a classifier.

    Several processes compute what one does, within rounding, but for what is drawn in each: mixup and cutmix pair the
    images of a process with one another, and have factors of its own, as erasing has places.

    Args:
        model: is trained in place.
        source: labelled images.
        recipe: its values.
        mean, std: normalise the images.
        settings: seed, device and workers.
        half: take matrix products in bfloat16.
        kernels: torch or native.
        validation: images that the data brings for it; None: the recipe's share of ``source``.
    """

    def __init__(
        self,
        model: Classifier,
        source: Source,
        recipe: ResolvedRecipe,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        settings: EvalSettings,
        *,
        half: bool = False,
        kernels: str = "torch",
        validation: Source | None = None,
    ) -> None:
        self.recipe, self.mean, self.std, self.settings, self.half = recipe, mean, std, settings, half
        self.device, self.seed, self.clip = settings.torch_device, settings.seed, recipe.clip
        self.held = validation if recipe.validation else None
        self.about = self._all_that_decides(model, source, kernels) if settings.cache else None
        if recipe.validation and validation is None:
            source, self.held = hold_out(splittable(source), recipe.validation, seed=settings.seed)
        self.source, self.labels = source, labels_of(source)
        self.model: Classifier = model.to(self.device).train()
        keep_freed_memory()
        fuse_attention(model, not (half and self.device.type == "cpu"))
        use_kernels(model, kernels)
        self._share()
        n, (self.images, self.batch) = len(source), images_per_step(recipe, len(source), settings.accumulate)
        self.per_epoch = max(1, n // self.batch)
        self.steps = recipe.updates or recipe.epochs * self.per_epoch
        held = 0 if self.held is None else len(self.held)
        self.best = BestEpoch(held, self.steps, self.per_epoch, recipe.patience)
        self.views = Views(model.size, recipe, mean, source)
        self.optimizer = self._optimizer()
        self.schedule = schedule_of(self.optimizer, recipe, self.steps, self.per_epoch)
        self.average = ModelEmaV3(model, recipe.ema, use_warmup=True) if recipe.ema else None
        self.mix = self._mixup(model.classes)
        self.loss = SoftTargetCrossEntropy() if self.mix else LabelSmoothingCrossEntropy(recipe.smoothing)
        self.erase = RandomErasing(recipe.erasing, mode="pixel", device=self.device)
        self.unreadable: set[str] = set()

    def _optimizer(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        groups = self.model.groups(recipe.weight_decay, recipe.layer_decay)
        fused = self.device.type in ("cpu", "cuda")
        return torch.optim.AdamW(groups, lr=recipe.peak(self.batch), betas=recipe.betas, fused=fused)

    def _mixup(self, classes: int) -> Mixup | None:
        if not self.recipe.mixes:
            return None
        return Mixup(self.recipe.mixup, self.recipe.cutmix, label_smoothing=self.recipe.smoothing, num_classes=classes)

    def _batches(self, steps: int, workers: int) -> Any:
        reading = self.seed, self.step, steps, workers, self.model.channels, rank(), world()
        return training_batches(self.source, self.views, self.images // world(), *reading, device=self.device)

    def _rate_option(self) -> str:
        return self.recipe.rate_option()

    def _position(self) -> str:
        if self.recipe.updates:
            return f"update {self.step:,} of {self.steps:,}"
        return f"epoch {self.epoch:.1f} of {self.recipe.epochs}"

    def _loss(self, batch: Batch) -> Tensor:
        logits, labels = self._answered(batch)
        return self.loss(logits.float(), labels)

    def _answered(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits, and the labels, or shares of all classes, that they are compared with."""
        images = torch.cat(batch.views)
        labels = self.labels[batch.indices].repeat(len(batch.views)).to(self.device, non_blocking=True)
        if self.mix and len(images) % 2:  # unreadable images left an odd batch
            images, labels = images[:-1], labels[:-1]
        images = self.erase(normalize(images, self.mean, self.std))
        if self.mix:
            images, labels = self.mix(images, labels)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            return self.parallel(images), labels

    def _validated(self) -> EpochScore:
        assert self.held is not None  # called where there are validation images
        precision: Precision = "bfloat16" if self.half else "float32"
        logits, indices, _ = predictions(self.tested, self.held, self.mean, self.std, self.settings, precision)
        self.model.train()
        return score_of(logits, labels_of(self.held, indices))

    def _told(self, loss: float) -> str:
        found = self.best.latest
        validated = "" if found is None else f" · validation {found.accuracy:.1%}"
        done = f"epoch {self.epoch:.1f}/{self.recipe.epochs}"
        if self.recipe.updates:
            done = f"update {self.step:,}/{self.steps:,}"
        return f"{done} · loss {loss:.3f}{validated}"

    def _outcome(self, chosen: dict[str, Any]) -> str:
        counted = bool(self.recipe.updates)
        unit, count = ("update", self.steps) if counted else ("epoch", self.recipe.epochs)
        if not chosen:
            return f"trained for {count:,} {unit}{'s'[: count != 1]}"
        best, done = (self.best.step, self.step) if counted else (chosen["best_epoch"], round(self.epoch))
        early = f", ended after {done:,}" if self.step < self.steps else ""
        return (
            f"{unit} {f'{best:,}' if counted else f'{best:g}'} of {count:,} was best{early} "
            f"({chosen['validation_accuracy']:.1%} of {chosen['validation_images']:,} validation {self.source.noun})"
        )

    def _all_that_decides(self, model: Classifier, source: Source, kernels: str) -> dict[str, Any]:
        numbers, device = [self.mean, self.std, self.seed], [self.device.type, self.half, kernels != "torch"]
        return {
            **training_identity(model, self.recipe.plain(), numbers, device, self.settings.accumulate),
            # neither heads nor pixels are seen in the weights, nor in the layers
            "sizes": [attention_heads(model.encoder), model.size],
            "images": source.fingerprint(),
            "labels": digest_tensors({"labels": labels_of(source)}),
            # by which the images for validation are drawn
            "groups": None if source.groups is None else digest_tensors({"groups": torch.from_numpy(source.groups)}),
            "sound": source.modality.plain(),
            "noise": digest_tensors({str(number): wave for number, wave in enumerate(source.noise)}),
            "validation": None if self.held is None else [self.held.fingerprint(), labels_of(self.held).tolist()],
        }


# The papers' linear probe: a batch norm and a linear layer on a frozen encoder, trained by LARS on random crops.


class LinearClassifier(Classifier):
    """A linear layer on the features of a frozen encoder, normed over the batch without learnt scale and shift.

    Args:
        encoder: is not copied, and its weights get no gradients.
        classes: number of classes.
        pooling: the class token or the mean of the patch tokens, after the encoder's last norm, or the instance
            representation.
        instance: gives that, and is not copied either; left out for the others.
    """

    def __init__(self, encoder: Encoder, classes: int, pooling: Pool, instance: InstanceHead | None = None) -> None:
        super().__init__(encoder, classes, pooling, instance=instance if pooling == "instance" else None)
        # the encoder is frozen, so that all batches count alike in the mean and variance by which is tested
        self.norm = nn.BatchNorm1d(width(encoder), eps=1e-6, momentum=None, affine=False)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        for net in self._frozen():
            net.requires_grad_(False)

    def _frozen(self) -> list[nn.Module]:
        return [net for net in (self.encoder, self.instance) if net is not None]

    def train(self, mode: bool = True) -> LinearClassifier:
        """Set the mode; what is frozen stays in eval mode."""
        super().train(mode)
        for net in self._frozen():
            net.eval()
        return self

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """[b d] float32 of normalised images [b channels h w], without gradients."""
        vit = self.encoder
        tokens = encode(vit, all_patches(images, patch_count(vit)), norm=self.pooling != "instance")
        if self.pooling == "instance":
            assert self.instance is not None  # is given with this pooling
            return represent(vit, self.instance, tokens).float()
        pooled = tokens[:, 0] if self.pooling == "class" else tokens[:, prefix_count(vit) :].float().mean(1)
        return pooled_norm(vit, pooled).float()

    def answered(self, features: Tensor) -> Tensor:
        """Logits [b c] of features [b d], in float32 also amid half precision: here alone are gradients."""
        with torch.autocast(features.device.type, enabled=False):
            assert self.norm is not None  # of every linear classifier
            return self.head(self.norm(features))

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b c] of normalised images [b channels h w]."""
        return self.answered(self.features(images))


class ProbeTraining(Training):
    """The training of a `LinearClassifier` by LARS. A step has the features of many parts, each taken as it arrives.

    Of several processes each encodes its images of every part; then all have the features of the whole step, over which
    the batch norm goes, and make the same update. Arguments are those of `Training`.
    """

    model: LinearClassifier
    recipe: ResolvedProbeRecipe

    def _share(self) -> None:
        """No gradients are averaged: all processes have the same ones."""
        self.parallel = self.model

    def _optimizer(self) -> torch.optim.Optimizer:
        """LARS, whose rate follows the weights' norm, but not for the bias, as in MAE's program."""
        head = self.model.head
        adapted = {"params": [head.weight], "weight_decay": self.recipe.weight_decay, "always_adapt": True}
        plain = {"params": [head.bias], "weight_decay": 0.0, "always_adapt": False}
        return Lars([adapted, plain], lr=self.recipe.peak(self.batch), momentum=self.recipe.momentum)

    def _batches(self, steps: int, workers: int) -> Any:
        """Batches that have features [b d] for views."""
        parts = self.recipe.parts(self.images)
        reading = self.seed, self.step * parts, steps * parts, workers, self.model.channels, rank(), world()
        size = self.images // parts // world()
        read: Any = training_batches(self.source, self.views, size, *reading, device=self.device)
        with closing(read):
            for _ in range(self.step, steps):
                yield self._encoded(islice(read, parts))

    def _encoded(self, parts: Iterable[Batch]) -> Batch:
        features, indices, unreadable = [], [], []
        for part in parts:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                features.append(self.model.features(normalize(part.views[0], self.mean, self.std)))
            indices.append(part.indices)
            unreadable += part.unreadable
        batch = Batch((torch.cat(features),), torch.cat(indices), unreadable)
        batch = batch.first(smallest(len(batch.indices)))
        whole = gathered(batch.indices.to(self.device)).cpu() if world() > 1 else batch.indices
        return batch._replace(views=(gathered(batch.views[0]),), indices=whole)

    def _answered(self, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = self.labels[batch.indices].to(self.device, non_blocking=True)
        return self.model.answered(batch.views[0]), labels

    def seconds_of_step(self) -> float:
        """See `Training`; from steps of one part each."""
        images, parts = self.images, self.recipe.parts(self.images)
        self.images //= parts
        try:
            return super().seconds_of_step() * parts
        finally:
            self.images = images


# How a classifier is to be trained, and its training from the first step or from where it was stopped.


@dataclass(frozen=True)
class FitPlan:
    """How the encoder and its controls are trained.

    Attributes:
        name: of the recipe.
        recipe: its values.
        rates: base learning rates to choose from.
        card: its mean and std normalise the images.
        settings: seed, device and workers.
        precision: of matrix products, as it was asked for; weights are float32.
        half: matrix products of the training are in bfloat16.
        kernels: torch or native, of the training.
        validation: images that the data brings for it; None: a share of those to train on.
    """

    name: str
    recipe: ResolvedRecipe
    rates: tuple[float, ...]
    card: EncoderCard
    settings: EvalSettings
    precision: Precision
    half: bool = False
    kernels: str = "torch"
    validation: Source | None = None

    def at(self, rate: float) -> FitPlan:
        """The same with another base learning rate."""
        return replace(self, recipe=replace(self.recipe, blr=rate))

    def batch(self, n: int) -> int:
        """Images of a step, repeats included, of a training on ``n`` images."""
        return images_per_step(self.recipe, self._trained_on(n), self.settings.accumulate)[1]

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
        kind = ProbeTraining if isinstance(model, LinearClassifier) else Training
        how: Any = {"half": self.half, "kernels": self.kernels}
        return kind(model, source, *numbers, settings, **how, validation=self.validation)


@contextmanager
def temporary_seed(seed: int) -> Iterator[None]:
    """Seed all random generators inside the context, and restore their states after it."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random_seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def train_classifier(
    model: Classifier, source: Source, plan: FitPlan, name: str, left: TimeLeft | None = None
) -> Trained:
    """Train on images whose labels are 0 ... c-1: all of ``source``, but for the recipe's share for validation.

    Ctrl-C and SIGTERM end it after a step; inside `keep_until_done` the same training then goes on from there.
    """
    with temporary_seed(plan.settings.seed), _enough_memory(plan, source):
        training = plan.begin(model, source)
        return training.run(name, left or TimeLeft(training.steps))


def seconds_of_step(model: Classifier, source: Source, plan: FitPlan) -> float:
    """Seconds of an update, the reading of its images included, from a few, by which ``model`` is changed."""
    with temporary_seed(plan.settings.seed), _enough_memory(plan, source):
        return plan.begin(model, source).seconds_of_step()


@contextmanager
def _enough_memory(plan: FitPlan, source: Source) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as problem:
        images = -(-plan.batch(len(source)) // world() // plan.settings.accumulate)
        raise PatchloomError(
            f"the device has too little memory for {images} {source.noun} at once: raise --accumulate, or lower "
            "--batch_size"
        ) from problem


# What the protocols that train share: the choice of a base learning rate, controls that are trained in the same way,
# and test images that are read once, at the end.


SCRATCH = "from scratch"
_RATE_VALIDATION_SHARE = 0.1
_MEASURED_FROM = 100  # steps: fewer are made sooner than told about

Build = Callable[[Recipe], Classifier]


@dataclass(frozen=True)
class Candidate:
    """A model to be trained and tested: the encoder or a control.

    Attributes:
        name: in the report.
        build: makes a classifier; random values come from torch's global generator.
        settings: its own, for the row.
        save: is called once with the trained classifier and all settings, before any test image is read.
    """

    name: str
    build: Build
    settings: Mapping[str, Any]
    save: Callable[[Classifier, dict[str, Any]], None] | None = None


def plan_for(
    name: str,
    changes: Mapping[str, Any],
    vit: Encoder,
    card: EncoderCard,
    train_on: Source,
    settings: EvalSettings,
    precision: Precision,
    known: Mapping[str, Sized] = RECIPES,
    validation: Source | None = None,
) -> FitPlan:
    """The plan for an encoder and training images; ``changes`` of the recipe may have a list of values for ``blr``.

    The recipe is one of those that are ``known``; ``validation`` is as `FitPlan` has it.
    """
    if settings.batch_size != "auto":
        changes = {**changes, "batch": settings.batch_size}
    given = changes.get("blr")
    rates = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not rates:
        raise PatchloomError("--blr has no rate to choose from: give numbers, such as '[1e-4, 1e-3]'")
    recipes = [recipe_for(name, vit, {**changes, "blr": rate}, known) for rate in rates]
    recipes = [recipe.acting_on(train_on) for recipe in recipes]
    _refuse_idle(changes, train_on)
    classes, n = count_classes(train_on), len(train_on)
    if classes < 2:
        raise PatchloomError(f"{train_on.name} has {train_on.noun} of one class only: a classifier needs two or more")
    if n < (wanted := len(class_names(train_on))):
        raise PatchloomError(
            f"{n} training {train_on.noun} are too few for {wanted} classes: give at least one of each"
        )
    device = settings.torch_device
    recipe = recipes[0].settled(n, device.type, validation is not None)
    check_shares(recipe, settings.accumulate)
    half = trains_in_bfloat16(device, precision)
    kernels, _ = choose_kernels(
        vit,
        device.type,
        half and not recipe.drop_path and not recipe.dropout,
        recipe.batch // recipe.parts(recipe.batch),
    )
    rates = tuple(sorted({recipe.blr for recipe in recipes}))
    plain = name, recipe, rates, card, settings, precision, half, kernels
    return FitPlan(*plain, validation=validation)


def _refuse_idle(changes: Mapping[str, Any], train_on: Source) -> None:
    """Refuse options that would not act."""
    given = [name for name, value in changes.items() if value is not None]
    for name in given:
        if any(name in options for noun, options in ONLY_FOR.items() if noun != train_on.noun):
            raise wrong_kind_error(name, train_on)
        if name in ("noise_share", "noise_volume") and not train_on.noise:
            raise PatchloomError(
                f"--{name} needs recordings of noise: evaluate keywords takes them from the folder _background_noise_"
            )


def fit(
    candidate: Candidate, plan: FitPlan, source: Source, left: TimeLeft | None = None
) -> tuple[Classifier, dict[str, Any]]:
    """Train a candidate, with the base learning rate chosen on a held-out, stratified tenth of the images.

    Of equally good rates the lowest is chosen.
    """
    chosen = {}
    if len(plan.rates) > 1:
        rest, held = hold_out(splittable(source), _RATE_VALIDATION_SHARE, len(source), plan.settings.seed)
        found = []
        for rate in plan.rates:
            model = _fitted(candidate, plan.at(rate), rest, f"{candidate.name}, blr {rate:g}", left).model
            found.append(predict_classes(model, held, plan.card, plan.settings, plan.precision).accuracy())
            if is_first():
                print(f"  {candidate.name}, blr {rate:g}: {found[-1]:.1%} of {len(held):,} held-out {source.noun}")
        best = int(np.argmax(found))
        plan = plan.at(plan.rates[best])
        chosen = {"held_out_accuracy": found[best], "held_out": len(held)}
    trained = _fitted(candidate, plan, source, candidate.name, left)
    how = {"precision": "bfloat16" if plan.half else "float32", **candidate.settings, **chosen, **trained.chosen}
    return trained.model, {"recipe": plan.name, **plan.values(), "lr": plan.peak(len(source)), **how}


def _fitted(candidate: Candidate, plan: FitPlan, source: Source, name: str, left: TimeLeft | None) -> Trained:
    with temporary_seed(plan.settings.seed):
        model = candidate.build(plan.recipe)
    return train_classifier(model, source, plan, name, left)


def _announced(candidates: Sequence[Candidate], plan: FitPlan, source: Source) -> TimeLeft:
    """Say what will be trained, and how long all of it takes, from a few steps."""
    n, rates = len(source), len(plan.rates)
    each = plan.steps(n)
    tried = plan.steps(n - max(1, round(_RATE_VALIDATION_SHARE * n))) * rates if rates > 1 else 0
    left = TimeLeft(len(candidates) * (each + tried))
    if left.steps < _MEASURED_FROM:
        return left
    with temporary_seed(plan.settings.seed), progress_message("measuring a few steps"):
        model = candidates[0].build(plan.recipe)
        left.seconds = seconds_of_step(model, source, plan)
    names = ", then ".join(candidate.name for candidate in candidates)
    sooner = ", or less where the accuracy rises no more" if plan.recipe.validation and plan.recipe.patience < 1 else ""
    choosing = f", and {rates} rates to choose from" if rates > 1 else ""
    length = f"{plan.recipe.epochs:,} epochs of {plan.per_epoch(n):,} steps"
    if plan.recipe.updates:
        length = f"{each:,} updates, {each / plan.per_epoch(n):.3g} epochs,"
    whole = duration(left.steps * left.seconds)
    by = f" by {world()} processes" if world() > 1 else ""
    if is_first():
        print(f"Training {names}{by}: {length} each{choosing}. All of it takes about {whole}{sooner}.", flush=True)
    return left


def train_and_test(
    protocol: str, title: str, done: str, candidates: Sequence[Candidate], plan: FitPlan, parts: Parts
) -> Report:
    """Train every candidate, then test each on the test images, which are not read before."""
    rows, found = train_and_predict(protocol, candidates, plan, parts)
    said = [done, recipe_sentence(plan, parts, rows[0].settings)]
    return training_report(protocol, f"{title} ({plan.name}): ", said, rows, parts, plan.settings, found[-1]).beside(
        True
    )


def train_and_predict(
    protocol: str, candidates: Sequence[Candidate], plan: FitPlan, parts: Parts
) -> tuple[list[Row], list[ClassPredictions]]:
    """The row of each candidate, and its predictions for the test images; arguments as of `train_and_test`."""
    fitted, left = [], _announced(candidates, plan, parts.train)
    for candidate in candidates:
        model, row_settings = fit(candidate, plan, parts.train, left)
        if candidate.save is not None and is_first():
            candidate.save(model, row_settings)
        fitted.append((candidate, model.cpu(), row_settings))
    # every choice has been made: now the test images are read
    rows, found = [], []
    for candidate, model, row_settings in fitted:
        found.append(predict_classes(model, parts.test, plan.card, plan.settings, plan.precision, candidate.name))
        rows.append(Row.of_images(candidate.name, model.pooling, protocol, row_settings, found[-1].right))
        model.cpu()
    return rows, found


def training_report(
    protocol: str,
    title: str,
    said: list[str],
    rows: list[Row],
    parts: Parts,
    settings: EvalSettings,
    found: ClassPredictions,
) -> Report:
    """A report in which every row is quoted, beside the majority class."""
    n = len(found.labels)
    chance = majority(protocol, labels_of(parts.train), found.labels)
    said = [*said, parts.story, *note_unreadable(found.unreadable, f"test {parts.test.noun}")]
    controls = [f"{row.number()} {row.encoder}" for row in (*rows[1:], chance)]
    first = rows[0].text() if rows[0].encoder != SCRATCH else f"{SCRATCH} {rows[0].text()}"
    against = f"{', '.join(controls[:-1])} and {controls[-1]}" if len(controls) > 1 else controls[0]
    return Report(
        rows=[*rows, chance],
        protocol=" ".join(said),
        headline=f"{title}{first} against {against} on {n:,} test {parts.test.noun}.",
        quoted=tuple(rows),
        data=parts.test.name,
        fingerprint=parts.test.fingerprint(),
        seed=settings.seed,
        n_test=n,
        noun=parts.test.noun,
    )


def recipe_sentence(plan: FitPlan, parts: Parts, row_settings: Mapping[str, Any]) -> str:
    """How everything was trained, and on what, from the settings of any row."""
    values = {name: row_settings[name] for name in (*plan.values(), "precision")}
    values["batch"] = plan.batch(len(parts.train))  # of which there may be fewer than the recipe's
    values["blr"] = " or ".join(f"{rate:g}" for rate in plan.rates)
    if plan.recipe.lr:  # no base learning rate has had a say
        del values["blr"]
    recipe = ", ".join(f"{name.replace('_', ' ')} {format_recipe_value(value)}" for name, value in values.items())
    noun, chosen = parts.train.noun, ""
    if plan.recipe.recordings:
        noise = "" if parts.train.noise else "; no noise was added"
        chosen = f" What recipes do to images (crops, mirroring, RandAugment, erasing, cutmix) does not act{noise}."
    if len(plan.rates) > 1:
        chosen += (
            " The base learning rate was chosen, for each model by itself, on a stratified "
            f"{_RATE_VALIDATION_SHARE:.0%} of the training {noun}, then all of them were trained on."
        )
    if plan.recipe.validation:
        held, patience = row_settings["validation_images"], plan.recipe.patience
        unit, units = ("update", "updates") if plan.recipe.updates else ("epoch", "epochs")
        ended = f"; {patience:.0%} of the {units} without a higher accuracy end the training" if patience < 1 else ""
        of = (
            f"{held:,} of them, which were not trained on"
            if plan.validation is None
            else f"the data's own {held:,} {noun} for validation"
        )
        chosen += f" The {unit} that is tested was chosen on {of}{ended}."
    by = f" by {world()} processes" if world() > 1 else ""
    return (
        f"Trained on {len(parts.train):,} {noun}{by} by the recipe {plan.name}: {recipe}.{chosen} Tested once, on "
        f"{len(parts.test):,} others."
    )


def format_recipe_value(value: Any) -> str:
    """A recipe's value, as a sentence has it."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
