"""The training of a classifier by a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.utils import ModelEmaV3
from torch import Tensor

from patchloom.data import Batch, Source, hold_out, normalize, training_batches
from patchloom.data.groups import splittable
from patchloom.evaluate.answers import predictions
from patchloom.evaluate.best_epoch import BestEpoch, Score, score_of
from patchloom.evaluate.cache import digest_of
from patchloom.evaluate.classifier import Classifier
from patchloom.evaluate.features import labels_of
from patchloom.evaluate.loop import Loop, what_decides
from patchloom.evaluate.recipes import Recipe, of_step
from patchloom.evaluate.schedule import schedule_of
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.views import Views
from patchloom.memory import keep_freed_memory
from patchloom.nets.encode import attention_heads
from patchloom.nets.native.blocks import use_native
from patchloom.nets.performance import fuse_attention


class Training(Loop):
    """The training of a classifier.

    Args:
        model: is trained in place.
        source: labelled images.
        recipe: with every ``auto`` resolved.
        mean, std: normalise the images.
        settings: seed, device and workers.
        half: take matrix products in bfloat16.
        native: with our own kernels.
        validation: images that the data brings for it; None: the recipe's share of ``source``.
        noise: recordings of it, int16 [1 1 n] each, which are added to others.
    """

    def __init__(
        self,
        model: Classifier,
        source: Source,
        recipe: Recipe,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        settings: EvalSettings,
        *,
        half: bool = False,
        native: bool = False,
        validation: Source | None = None,
        noise: Sequence[Tensor] = (),
    ) -> None:
        self.recipe, self.mean, self.std, self.settings, self.half = recipe, mean, std, settings, half
        self.device, self.seed, self.clip = settings.at, settings.seed, recipe.clip
        self.held = validation if recipe.validation else None
        self.about = self._all_that_decides(model, source, native, noise) if settings.cache else None
        if recipe.validation and validation is None:
            source, self.held = hold_out(splittable(source), recipe.validation, seed=settings.seed)
        self.source, self.labels = source, labels_of(source)
        self.model = model.to(self.device).train()
        keep_freed_memory()
        fuse_attention(model, not (half and self.device.type == "cpu"))
        use_native(model, native)
        n, (self.images, self.batch) = len(source), of_step(recipe, len(source))
        self.per_epoch = max(1, n // self.batch)
        self.steps = recipe.updates or recipe.epochs * self.per_epoch
        held = 0 if self.held is None else len(self.held)
        self.best = BestEpoch(held, self.steps, self.per_epoch, recipe.patience)
        self.views = Views(model.size, recipe, mean, source.sound, noise)
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
        reading = self.seed, self.step, steps, workers, self.model.channels
        return training_batches(self.source, self.views, self.images, *reading, device=self.device)

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
            return self.model(images), labels

    def _validated(self) -> Score:
        precision = "bfloat16" if self.half else "float32"
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

    def _all_that_decides(
        self, model: Classifier, source: Source, native: bool, noise: Sequence[Tensor]
    ) -> dict[str, Any]:
        numbers, device = [self.mean, self.std, self.seed], [self.device.type, self.half, native]
        return {
            **what_decides(model, self.recipe.plain(), numbers, device),
            # neither heads nor pixels are seen in the weights, nor in the layers
            "sizes": [attention_heads(model.encoder), model.size],
            "images": source.fingerprint(),
            "labels": digest_of({"labels": labels_of(source)}),
            # by which the images for validation are drawn
            "groups": None if source.groups is None else digest_of({"groups": torch.from_numpy(source.groups)}),
            "sound": None if source.sound is None else asdict(source.sound),
            "noise": digest_of({str(number): wave for number, wave in enumerate(noise)}),
            "validation": None if self.held is None else [self.held.fingerprint(), labels_of(self.held).tolist()],
        }
