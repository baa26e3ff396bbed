"""Training of a classifier by a recipe."""

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
from patchloom.display import duration, is_first, print_line, progress_message, track_progress
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.classifier import Classifier, Pool, class_names
from patchloom.evaluate.features import (
    Precision,
    count_classes,
    digest_tensors,
    groups_of,
    labels_of,
    results_ahead,
    runs_in_bfloat16,
    trains_in_bfloat16,
)
from patchloom.evaluate.frozen import constant_answer
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
from patchloom.evaluate.settings import EvalSettings, Parts
from patchloom.evaluate.trainer import BestEpoch, EpochScore, Loop, Trained, score_of, training_identity
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import attention_heads, encode, patch_count, pooled_norm, prefix_count, width
from patchloom.nets.heads import InstanceHead, represent
from patchloom.nets.performance import choose_attention, choose_kernels, fuse_attention, use_kernels
from patchloom.nets.swin import Encoder
from patchloom.pace import Pace
from patchloom.results.evaluation import Evaluation, as_control, note_unreadable
from patchloom.results.result import Result
from patchloom.schedules import halving_rate
from patchloom.system.distributed import collected, gathered, rank, refused_by_all, smallest, world
from patchloom.system.hardware import keep_freed_memory
from patchloom.system.load import BackgroundLoad
from patchloom.withhold.encoder_input import all_patches

# Learning rate of a training as a function of the update.


def warmup_of(recipe: ResolvedRecipe, steps: int, per_epoch: int) -> int:
    """Return the number of updates of a recipe's warm-up."""
    return min(recipe.warmup_updates if recipe.updates else round(recipe.warmup_epochs * per_epoch), steps - 1)


def schedule_of(optimizer: torch.optim.Optimizer, recipe: ResolvedRecipe, steps: int, per_epoch: int) -> Scheduler:
    """Return the schedule of a recipe."""
    warmup = warmup_of(recipe, steps, per_epoch)
    if recipe.halve_every:
        return Halving(optimizer, warmup, recipe.halve_every)
    # one more than the number of steps, so that the last learning rate is above 0
    return CosineLRScheduler(optimizer, steps - warmup + 1, warmup_t=warmup, warmup_prefix=True, t_in_epochs=False)


class Halving(Scheduler):
    """Schedule of MP3 on speech, `patchloom.schedules.halving_rate`.

    Args:
        optimizer: optimizer with the peak rates.
        warmup: updates of warm-up.
        every: updates between halvings.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, warmup: int, every: int) -> None:
        super().__init__(optimizer, "lr", t_in_epochs=False)
        self.warmup, self.every = warmup, every

    def _get_lr(self, t: int) -> list[float]:
        """Return the rate of each group in update ``t``, counted from 1, before its scale."""
        return [halving_rate(t - 1, self.warmup, peak, self.every) for peak in self.base_values]


# Random views of training images according to a recipe.


class Views:
    """Random crops of an image with RandAugment, or the excerpts that a source cuts instead.

    Their number is the recipe's ``repeats``. Calls depend only on ``rng``.

    Args:
        size: size (h, w) of the crops.
        recipe: recipe with the augmentation.
        mean: mean of the channels, used by RandAugment to fill gaps.
        source: source of the images.
    """

    def __init__(self, size: tuple[int, int], recipe: Recipe, mean: tuple[float, ...], source: Source) -> None:
        change = RandAugment(recipe.randaugment, recipe.randaugment_std, mean) if recipe.randaugment else None
        own: dict[str, Any] = {"scale": (recipe.crop_scale, 1.0)}
        if isinstance(recipe.crop_scale, str):
            own = {"border": recipe.crop_scale}
        crop = RandomCrop(size, flip=recipe.flip, randaugment=change, **own)
        self.crop: Augment = source.cut(
            crop, shift=recipe.shift, noise_share=recipe.noise_share, noise_volume=recipe.noise_volume
        )
        self.size, self.repeats, self.n_views = size, recipe.repeats, recipe.repeats

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """Return views of an image [c h w] with the same dtype, resized to ``size``."""
        return tuple(view for _ in range(self.repeats) for view in self.crop(image, rng))


# Predictions of a classifier. Letters: n images, c classes.


@dataclass(frozen=True)
class ClassPredictions:
    """Predictions of a classifier for labelled images.

    Attributes:
        logits: [n c] float32, on the CPU.
        labels: [n] int64.
        unreadable: names of the images that could not be read.
        groups: [n] groups of the images, as in `ImageFeatures`.
    """

    logits: Tensor
    labels: Tensor
    unreadable: list[str]
    groups: Tensor | None = None

    @property
    def right(self) -> Tensor:
        """Correctness of the predictions, [n]."""
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
    test_crop: float = 1.0,
) -> ClassPredictions:
    """Predict the class of every image of ``source``, centre-cropped; ``test_crop`` is as in `CentreCrop`."""
    what = name and f"  {name}: predictions for {source.name}"
    numbers = card.mean, card.std
    logits, indices, unreadable = predictions(model, source, *numbers, settings, precision, what, test_crop)
    return ClassPredictions(logits, labels_of(source, indices), unreadable, groups_of(source, indices))


@torch.inference_mode()
def predictions(
    model: Classifier,
    source: Source,
    mean: Sequence[float],
    std: Sequence[float],
    settings: EvalSettings,
    precision: Precision,
    what: str = "",
    test_crop: float = 1.0,
) -> tuple[Tensor, Tensor, list[str]]:
    """Return logits [n c], indices [n] of the images, and names of unreadable ones; as `predict_classes`.

    Several processes share the batches, and all must call this.
    """
    device = settings.torch_device
    model.to(device).eval()
    reading, count = {**settings.reading(source), "test_crop": test_crop}, settings.batches(source)
    first, stop = count * rank() // world(), count * (rank() + 1) // world()
    batches = plain_batches(
        source, model.size, **reading, first=first, stop=stop, channels=model.channels, device=device
    )
    with torch.autocast(device.type, torch.bfloat16, enabled=runs_in_bfloat16(device, precision)):
        found = results_ahead(
            track_progress(batches, stop - first, what),
            lambda batch: model(normalize(batch.views[0], mean, std)).float(),
        )
        each = collected([(logits, batch._replace(views=())) for batch, logits in found])
    if not each:
        raise refused_by_all(f"nothing in {source.name} could be read")
    logits = torch.cat([logits for logits, _ in each])
    if not logits.isfinite().all():
        raise refused_by_all("the classifier gives non-finite logits: lower --blr")
    indices = torch.cat([batch.indices for _, batch in each])
    return logits, indices, [name for _, batch in each for name in batch.unreadable]


class Training(Loop):
    """Training of a classifier.

    Several processes give the same result as one within rounding, except for random draws of each process: mixup and
    cutmix pair images within a process and have factors per process, as erasing has places.

    Args:
        model: classifier, trained in place.
        source: labelled images.
        recipe: values of the recipe.
        mean, std: normalisation of the images.
        settings: seed, device and workers.
        half: compute matrix products in bfloat16.
        kernels: torch or native.
        validation: validation images of the data; None: the recipe's fraction of ``source``.
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
        n, (self.images, self.batch) = len(source), images_per_step(recipe, len(source), settings.accumulate)
        attention, _ = choose_attention(model.encoder, self.device.type, half, self.images)
        fuse_attention(model, attention == "fused")
        use_kernels(model, kernels)
        self._share()
        self.per_epoch = max(1, n // self.batch)
        self.steps = recipe.updates or recipe.epochs * self.per_epoch
        held = 0 if self.held is None else len(self.held)
        warmup = warmup_of(recipe, self.steps, self.per_epoch)
        self.best = BestEpoch(held, self.steps, self.per_epoch, recipe.patience, warmup=warmup)
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
        logits, labels = self._logits_and_targets(batch)
        return self.loss(logits.float(), labels)

    def _logits_and_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits, and the labels or class shares to compare them with."""
        images = torch.cat(batch.views)
        labels = self.labels[batch.indices].repeat(len(batch.views)).to(self.device, non_blocking=True)
        if self.mix and len(images) % 2:  # unreadable images made the batch odd
            images, labels = images[:-1], labels[:-1]
        images = self.erase(normalize(images, self.mean, self.std))
        if self.mix:
            images, labels = self.mix(images, labels)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            return self.parallel(images), labels

    def _validated(self) -> EpochScore:
        assert self.held is not None  # called with validation images only
        precision: Precision = "bfloat16" if self.half else "float32"
        numbers, test_crop = (self.mean, self.std), self.recipe.test_crop
        logits, indices, _ = predictions(
            self.tested, self.held, *numbers, self.settings, precision, test_crop=test_crop
        )
        self.model.train()
        return score_of(logits, labels_of(self.held, indices))

    def _progress_text(self, loss: float) -> str:
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
            # the weights show neither heads nor image size
            "sizes": [attention_heads(model.encoder), model.size],
            "images": source.fingerprint(),
            "labels": digest_tensors({"labels": labels_of(source)}),
            # groups affect the draw of validation images
            "groups": None if source.groups is None else digest_tensors({"groups": torch.from_numpy(source.groups)}),
            "sound": source.modality.plain(),
            "noise": digest_tensors({str(number): wave for number, wave in enumerate(source.noise)}),
            "validation": None if self.held is None else [self.held.fingerprint(), labels_of(self.held).tolist()],
        }


# The papers' linear probe: batch norm and a linear layer on a frozen encoder, trained by LARS on random crops.


class LinearClassifier(Classifier):
    """Linear layer on the features of a frozen encoder, with a batch norm without scale and shift.

    Args:
        encoder: encoder, not copied; its weights get no gradients.
        classes: number of classes.
        pooling: the class token or the mean of the patch tokens, after the encoder's last norm, or the instance
            representation.
        instance: instance head for that pooling, not copied.
    """

    def __init__(self, encoder: Encoder, classes: int, pooling: Pool, instance: InstanceHead | None = None) -> None:
        super().__init__(encoder, classes, pooling, instance=instance if pooling == "instance" else None)
        # the encoder is frozen, so all batches have equal weight in the mean and variance for testing
        self.norm = nn.BatchNorm1d(width(encoder), eps=1e-6, momentum=None, affine=False)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        for net in self._frozen():
            net.requires_grad_(False)

    def _frozen(self) -> list[nn.Module]:
        return [net for net in (self.encoder, self.instance) if net is not None]

    def train(self, mode: bool = True) -> LinearClassifier:
        """Set the mode; frozen parts stay in eval mode."""
        super().train(mode)
        for net in self._frozen():
            net.eval()
        return self

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return features [b d] float32 of normalised images [b channels h w], without gradients."""
        vit = self.encoder
        tokens = encode(vit, all_patches(images, patch_count(vit)), norm=self.pooling != "instance")
        if self.pooling == "instance":
            assert self.instance is not None  # required for this pooling
            return represent(vit, self.instance, tokens).float()
        pooled = tokens[:, 0] if self.pooling == "class" else tokens[:, prefix_count(vit) :].float().mean(1)
        return pooled_norm(vit, pooled).float()

    def classify(self, features: Tensor) -> Tensor:
        """Return logits [b c] of features [b d], in float32 even in mixed precision; only this part has gradients."""
        with torch.autocast(features.device.type, enabled=False):
            assert self.norm is not None  # set in every linear classifier
            return self.head(self.norm(features))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [b c] of normalised images [b channels h w]."""
        return self.classify(self.features(images))


class ProbeTraining(Training):
    """Training of a `LinearClassifier` by LARS or SGD. A step consists of many parts, each encoded as it arrives.

    Each of several processes encodes its images of every part; then all have the features of the whole step, which the
    batch norm needs, and make the same update. Arguments are those of `Training`.
    """

    model: LinearClassifier
    recipe: ResolvedProbeRecipe

    def _share(self) -> None:
        """Do not average gradients: all processes have the same ones."""
        self.parallel = self.model

    def _optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer; LARS scales rates by the norm of the weights except for the bias, as in MAE's code."""
        head = self.model.head
        if self.recipe.optimizer == "sgd":
            return torch.optim.SGD(
                head.parameters(),
                lr=self.recipe.peak(self.batch),
                momentum=self.recipe.momentum,
                weight_decay=self.recipe.weight_decay,
            )
        adapted = {"params": [head.weight], "weight_decay": self.recipe.weight_decay, "always_adapt": True}
        plain = {"params": [head.bias], "weight_decay": 0.0, "always_adapt": False}
        return Lars([adapted, plain], lr=self.recipe.peak(self.batch), momentum=self.recipe.momentum)

    def _batches(self, steps: int, workers: int) -> Any:
        """Return batches with features [b d] instead of views."""
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

    def _logits_and_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = self.labels[batch.indices].to(self.device, non_blocking=True)
        return self.model.classify(batch.views[0]), labels

    def seconds_of_step(self) -> float:
        """Measure steps of one part each; see `Training`."""
        images, parts = self.images, self.recipe.parts(self.images)
        self.images //= parts
        try:
            return super().seconds_of_step() * parts
        finally:
            self.images = images


# Plan of a classifier's training, and the training from the first step or from a checkpoint.


@dataclass(frozen=True)
class FitPlan:
    """Training plan of the encoder and its controls.

    Attributes:
        name: name of the recipe.
        recipe: values of the recipe.
        rates: base learning rates to choose from.
        card: provides mean and std to normalise images.
        settings: seed, device and workers.
        precision: requested precision of matrix products; weights are float32.
        half: compute matrix products of the training in bfloat16.
        kernels: torch or native.
        validation: validation images of the data; None: a fraction of the training images.
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
        """Return the plan with another base learning rate."""
        return replace(self, recipe=replace(self.recipe, blr=rate))

    def batch(self, n: int) -> int:
        """Return images per step, counting repeats, for ``n`` training images."""
        return images_per_step(self.recipe, self.trained_on(n), self.settings.accumulate)[1]

    def peak(self, n: int) -> float:
        """Return the peak learning rate for ``n`` training images."""
        return self.recipe.peak(self.batch(n))

    def steps(self, n: int) -> int:
        """Return the number of updates for ``n`` training images without early stopping."""
        return self.recipe.updates or self.recipe.epochs * self.per_epoch(n)

    def per_epoch(self, n: int) -> int:
        """Return updates per epoch for ``n`` images."""
        return max(1, self.trained_on(n) // self.batch(n))

    def values(self) -> dict[str, Any]:
        """Return the values of the recipe that have an effect, as JSON values."""
        own = self.recipe.plain()
        return own if self.validation is None else {name: own[name] for name in own if name != "validation"}

    def trained_on(self, n: int) -> int:
        """Return the number of ``n`` training images without those that choose the epoch."""
        return n if self.validation is not None else n - validation_images(self.recipe.validation, n)

    def begin(self, model: Classifier, source: Source) -> Training:
        """Create the training of ``model`` on ``source`` before its first step."""
        settings = self.settings
        numbers = self.recipe, self.card.mean, self.card.std
        kind = ProbeTraining if isinstance(model, LinearClassifier) else Training
        how: Any = {"half": self.half, "kernels": self.kernels}
        return kind(model, source, *numbers, settings, **how, validation=self.validation)


@contextmanager
def temporary_seed(settings: EvalSettings) -> Iterator[None]:
    """Seed all random generators inside this context, and restore those of the CPU and the device afterwards.

    Generators of other GPUs are seeded and stay so: reading the state of one would take half a gigabyte of its GPU.
    """
    before, device = (random.getstate(), np.random.get_state()), settings.torch_device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        random_seed(settings.seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def train_classifier(model: Classifier, source: Source, plan: FitPlan, name: str, pace: Pace | None = None) -> Trained:
    """Train on images with labels 0 ... c-1: all of ``source`` except for the recipe's validation images.

    Ctrl-C and SIGTERM stop it after a step; inside `keep_until_done` the same training resumes from there.
    """
    with temporary_seed(plan.settings), _enough_memory(plan, source):
        training = plan.begin(model, source)
        return training.run(name, pace or Pace(training.steps))


def seconds_of_step(model: Classifier, source: Source, plan: FitPlan) -> float:
    """Measure the seconds of an update, including data loading, from a few updates that change ``model``."""
    with temporary_seed(plan.settings), _enough_memory(plan, source):
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


# Shared by protocols that train: choice of a base learning rate, controls that are trained in the same way, and test
# images that are read once, at the end.


SCRATCH = "from scratch"
_RATE_VALIDATION_SHARE = 0.1
_MEASURED_FROM = 100  # steps: shorter trainings are not announced

Build = Callable[[Recipe], Classifier]


@dataclass(frozen=True)
class Candidate:
    """Model to be trained and tested: the encoder or a control.

    Attributes:
        name: name in the report.
        build: function that builds a classifier; random values come from torch's global generator.
        settings: additional settings for the row.
        save: function called with the trained classifier and all settings, before test images are read.
        card: provides mean and std to normalise its images; None: that of the plan.
    """

    name: str
    build: Build
    settings: Mapping[str, Any]
    save: Callable[[Classifier, dict[str, Any]], None] | None = None
    card: EncoderCard | None = None


def about_control(start: bool) -> str:
    """Return a sentence on the control of a training."""
    if start:
        return "Start is the same from the weights with which the run began, with their own normalisation."
    return f"{SCRATCH.capitalize()} is the same with newly initialised weights."


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
    """Return the plan for an encoder and training images; ``changes`` may have a list of values for ``blr``.

    The recipe is one of ``known``; ``validation`` is as in `FitPlan`.
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
    """Refuse options without effect."""
    given = [name for name, value in changes.items() if value is not None]
    for name in given:
        if any(name in options for noun, options in ONLY_FOR.items() if noun != train_on.noun):
            raise wrong_kind_error(name, train_on)
        if name in ("noise_share", "noise_volume") and not train_on.noise:
            raise PatchloomError(
                f"--{name} needs recordings of noise: evaluate keywords takes them from the folder _background_noise_"
            )


def fit(
    candidate: Candidate, plan: FitPlan, source: Source, pace: Pace | None = None
) -> tuple[Classifier, dict[str, Any]]:
    """Train a candidate, with the base learning rate chosen on a held-out, stratified tenth of the images.

    Ties go to the lowest rate.
    """
    chosen = {}
    plan = replace(plan, card=candidate.card or plan.card)
    if len(plan.rates) > 1:
        rest, held = hold_out(splittable(source), _RATE_VALIDATION_SHARE, len(source), plan.settings.seed)
        found = []
        for rate in plan.rates:
            model = _fitted(candidate, plan.at(rate), rest, f"{candidate.name}, blr {rate:g}", pace).model
            numbers = plan.card, plan.settings, plan.precision
            found.append(predict_classes(model, held, *numbers, test_crop=plan.recipe.test_crop).accuracy())
            if is_first():
                print_line(f"  {candidate.name}, blr {rate:g}: {found[-1]:.1%} of {len(held):,} held-out {source.noun}")
        best = int(np.argmax(found))
        plan = plan.at(plan.rates[best])
        chosen = {"held_out_accuracy": found[best], "held_out": len(held)}
    trained = _fitted(candidate, plan, source, candidate.name, pace)
    how = {"precision": "bfloat16" if plan.half else "float32", **candidate.settings, **chosen, **trained.chosen}
    return trained.model, {"recipe": plan.name, **plan.values(), "lr": plan.peak(len(source)), **how}


def _fitted(candidate: Candidate, plan: FitPlan, source: Source, name: str, pace: Pace | None) -> Trained:
    with temporary_seed(plan.settings):
        model = candidate.build(plan.recipe)
    return train_classifier(model, source, plan, name, pace)


def _announce(candidates: Sequence[Candidate], plan: FitPlan, source: Source) -> Pace:
    """Print the planned trainings and their duration, estimated from a few steps."""
    n, rates = len(source), len(plan.rates)
    each = plan.steps(n)
    tried = plan.steps(n - max(1, round(_RATE_VALIDATION_SHARE * n))) * rates if rates > 1 else 0
    pace = Pace(len(candidates) * (each + tried))
    if pace.total < _MEASURED_FROM:
        return pace
    with temporary_seed(plan.settings), progress_message("measuring a few steps"):
        model, others = candidates[0].build(plan.recipe), BackgroundLoad()
        pace.before = seconds_of_step(model, source, plan)
        load = others.load()
    names = ", then ".join(candidate.name for candidate in candidates)
    sooner = ", or less with early stopping" if plan.recipe.validation and plan.recipe.patience < 1 else ""
    choosing = f", and {rates} rates to choose from" if rates > 1 else ""
    length = _length(plan, n)
    whole = duration(pace.total * pace.before)
    by = f" by {world()} processes" if world() > 1 else ""
    if is_first():
        print_line(f"Training {names}{by}: {length} each{choosing}. This takes about {whole} in total{sooner}.")
        if busy := load.sentence():
            print_line(f"  {busy}")
    return pace


def train_and_test(
    protocol: str, title: str, done: str, candidates: Sequence[Candidate], plan: FitPlan, parts: Parts
) -> Evaluation:
    """Train every candidate, then test each on the test images, which are not read earlier."""
    rows, found = train_and_predict(protocol, candidates, plan, parts)
    said = [done, recipe_sentence(plan, parts, rows[0].settings)]
    return training_report(
        protocol, f"{title} ({plan.name}): ", said, rows, parts, plan.settings, found[-1]
    ).with_differences(True)


def plan_training(candidates: Sequence[Candidate], plan: FitPlan, parts: Parts) -> None:
    """End a dry run of a protocol that trains."""
    n, test = len(parts.train), parts.test
    values = {**plan.values(), "batch": plan.batch(n), "blr": " or ".join(f"{rate:g}" for rate in plan.rates)}
    values.pop("blr" if plan.recipe.lr else "lr", None)  # the one that is not used
    recipe = ", ".join(f"{name.replace('_', ' ')} {format_recipe_value(value)}" for name, value in values.items())
    trained, choosing = plan.trained_on(n), ""
    if trained < n:
        choosing = f", with {n - trained:,} others to choose the {'update' if plan.recipe.updates else 'epoch'},"
    plan.settings.end_if_dry(
        test,
        f"{listing([one.name for one in candidates], 'and')} would be trained on {trained:,} {test.noun}{choosing} for "
        f"{_length(plan, n)} each, and tested on {len(test):,} others. Recipe {plan.name}: {recipe}.",
        parts.story,
    )


def _length(plan: FitPlan, n: int) -> str:
    if plan.recipe.updates:
        return f"{plan.steps(n):,} updates, {plan.steps(n) / plan.per_epoch(n):.3g} epochs,"
    steps = plan.per_epoch(n)
    return f"{plan.recipe.epochs:,} epochs of {steps:,} step{'s' * (steps != 1)}"


def train_and_predict(
    protocol: str, candidates: Sequence[Candidate], plan: FitPlan, parts: Parts
) -> tuple[list[Result], list[ClassPredictions]]:
    """Return the row of each candidate and its predictions for the test images; arguments as in `train_and_test`."""
    plan_training(candidates, plan, parts)
    fitted, pace = [], _announce(candidates, plan, parts.train)
    for candidate in candidates:
        model, row_settings = fit(candidate, plan, parts.train, pace)
        if candidate.save is not None and is_first():
            candidate.save(model, row_settings)
        fitted.append((candidate, model.cpu(), row_settings))
    # all choices are made: read the test images
    rows, found = [], []
    for candidate, model, row_settings in fitted:
        card = candidate.card or plan.card
        how = plan.settings, plan.precision, candidate.name, plan.recipe.test_crop
        its = predict_classes(model, parts.test, card, *how)
        rows.append(
            Result.of_images(
                candidate.name, protocol, {"pooling": model.pooling, **row_settings}, its.right, its.groups
            )
        )
        found.append(its)
        model.cpu()
    return rows, found


def training_report(
    protocol: str,
    title: str,
    said: list[str],
    rows: list[Result],
    parts: Parts,
    settings: EvalSettings,
    found: ClassPredictions,
) -> Evaluation:
    """Return a report that quotes every row, with the best constant answer as a control."""
    n = len(found.labels)
    chance = constant_answer(protocol, found.labels, parts.test, found.groups)
    said = [*said, parts.story, *note_unreadable(found.unreadable, f"test {parts.test.noun}")]
    controls = [as_control(row) for row in (*rows[1:], chance)]
    first = rows[0].text() if rows[0].encoder != SCRATCH else f"{SCRATCH} {rows[0].text()}"
    against = f"{', '.join(controls[:-1])} and {controls[-1]}" if len(controls) > 1 else controls[0]
    return Evaluation.of_test(
        parts.test,
        settings.seed,
        n,
        results=[*rows, chance],
        method=" ".join(said),
        headline=f"{title}{first} against {against} on {n:,} test {parts.test.noun}.",
        quoted=tuple(rows),
    )


def recipe_sentence(plan: FitPlan, parts: Parts, row_settings: Mapping[str, Any]) -> str:
    """Describe training and data in a sentence, from the settings of any row."""
    values = {name: row_settings[name] for name in (*plan.values(), "precision")}
    values["batch"] = plan.batch(len(parts.train))  # may be fewer than the recipe's
    values["blr"] = " or ".join(f"{rate:g}" for rate in plan.rates)
    if plan.recipe.lr:  # the base learning rate is not used
        del values["blr"]
    recipe = ", ".join(f"{name.replace('_', ' ')} {format_recipe_value(value)}" for name, value in values.items())
    noun, chosen = parts.train.noun, ""
    if plan.recipe.recordings:
        noise = "" if parts.train.noise else "; no noise was added"
        chosen = f" Image augmentation (crops, mirroring, RandAugment, erasing, cutmix) does not apply{noise}."
    if len(plan.rates) > 1:
        chosen += (
            " The base learning rate was chosen for each model separately on a stratified "
            f"{_RATE_VALIDATION_SHARE:.0%} of the training {noun}; the final training used all of them."
        )
    if plan.recipe.validation:
        held, patience = row_settings["validation_images"], plan.recipe.patience
        unit, units = ("update", "updates") if plan.recipe.updates else ("epoch", "epochs")
        ended = ""
        if patience < 1:
            ended = f"; early stopping after the warm-up and {patience:.0%} of {units} without improvement"
        of = (
            f"{held:,} of them, held out from training"
            if plan.validation is None
            else f"the data's own {held:,} validation {noun}"
        )
        chosen += f" The tested {unit} was chosen on {of}{ended}."
    by = f" by {world()} processes" if world() > 1 else ""
    return (
        f"Trained on {len(parts.train):,} {noun}{by} with the recipe {plan.name}: {recipe}.{chosen} Tested once, on "
        f"{len(parts.test):,} others."
    )


def format_recipe_value(value: Any) -> str:
    """Format a recipe's value for a sentence."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
