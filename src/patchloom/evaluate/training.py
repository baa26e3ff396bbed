"""The training of a classifier by a recipe: the same whether it is stopped and gone on with or not."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, random_seed
from torch import Tensor

from patchloom.data import Batch, Source, hold_out, normalize, training_batches
from patchloom.data.groups import splittable
from patchloom.errors import PatchloomError, Stopped
from patchloom.evaluate.answers import predictions
from patchloom.evaluate.best_epoch import BestEpoch, score_of
from patchloom.evaluate.cache import digest_of
from patchloom.evaluate.classifier import Classifier
from patchloom.evaluate.features import labels_of
from patchloom.evaluate.pace import TimeLeft
from patchloom.evaluate.recipes import Recipe, of_step
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.unfinished import Unfinished
from patchloom.evaluate.views import Views
from patchloom.memory import keep_freed_memory
from patchloom.nets.encode import attention_heads
from patchloom.nets.native.blocks import use_native
from patchloom.nets.performance import fuse_attention
from patchloom.runs.checkpoint import restore, tensors_of
from patchloom.stopping import Stop
from patchloom.version import __version__
from patchloom.waiting import Waiting, duration

_CHECKED = 50  # times in a training that a GPU is waited for, to look at the loss
_MEASURED = 4  # steps of which the time is taken, the first of which does not count
# to be raised with changes of the code after which a training that was stopped cannot go on
_PROGRAMS = ("training 1", __version__, torch.__version__)
_AVERAGE, _BEST = "average.", "best."  # in the names of a checkpoint


@dataclass(frozen=True)
class Trained:
    """A classifier, and what was chosen on validation images: nothing, if there were none."""

    model: Classifier
    chosen: dict[str, Any]


class _Progress(Waiting):
    """The line of a training: the time left of all trainings first, since a narrow terminal cuts the end."""

    def __init__(self, name: str, left: TimeLeft):
        super().__init__(name)
        self.left, self.text = left, "the first step"

    def line(self) -> str:
        """See `Waiting`."""
        return f"{self.left} · {self.what} · {self.text}"


class Training:
    """A model, its optimiser, and how far they are.

    Args:
        model: is trained in place.
        source: labelled images; the recipe's share of them is for validation.
        recipe: with every ``auto`` resolved.
        mean, std: normalise the images.
        settings: seed, device and workers.
        half: take matrix products in bfloat16.
        native: with our own kernels.
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
    ) -> None:
        self.recipe, self.mean, self.std, self.settings, self.half = recipe, mean, std, settings, half
        self.device, self.seed = settings.at, settings.seed
        self._about = self._all_that_decides(model, source, native) if settings.cache else None
        self.held: Source | None = None
        if recipe.validation:
            source, self.held = hold_out(splittable(source), recipe.validation, seed=settings.seed)
        self.source, self.labels = source, labels_of(source)
        self.model = model.to(self.device).train()
        keep_freed_memory()
        fuse_attention(model, not (half and self.device.type == "cpu"))
        use_native(model, native)
        n, (self.images, self.batch) = len(source), of_step(recipe, len(source))
        self.per_epoch = max(1, n // self.batch)
        self.steps, self.step = recipe.epochs * self.per_epoch, 0
        held = 0 if self.held is None else len(self.held)
        self.best = BestEpoch(held, recipe.epochs, self.per_epoch, recipe.patience)
        self.views = Views(model.size, recipe, mean)
        self.optimizer = self._optimizer()
        warmup = min(round(recipe.warmup_epochs * self.per_epoch), self.steps - 1)
        # one more than there are steps, so that the learning rate of the last one is above 0
        self.schedule = CosineLRScheduler(
            self.optimizer, self.steps - warmup + 1, warmup_t=warmup, warmup_prefix=True, t_in_epochs=False
        )
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

    @property
    def tested(self) -> Classifier:
        """The model whose predictions count."""
        return self.average.module if self.average else self.model

    def seconds_of_step(self) -> float:
        """Seconds of a step, the reading of its images included, from a few steps."""
        seconds = []
        batches = self._batches(_MEASURED, workers=0)
        for step in range(_MEASURED):
            begun = time.perf_counter()
            self._step(step, next(batches)).item()
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds[1:])

    def _batches(self, steps: int, workers: int) -> Any:
        reading = self.seed, self.step, steps, workers, self.model.channels
        return training_batches(self.source, self.views, self.images, *reading, device=self.device)

    def run(self, name: str, left: TimeLeft) -> Trained:
        """Train to the end; arguments and errors as of `patchloom.evaluate.fit.train`."""
        kept, losses, begun = Unfinished(self._about), list[Tensor](), time.perf_counter()
        ended = self._restored(kept, name, left)
        left.begin()
        progress = _Progress(name, left)
        with Stop() as stop, ExitStack() as reading, progress:
            if not ended:
                workers = self.settings.workers_for(self.source, self.steps - self.step, trained=True)
                batches = reading.enter_context(closing(self._batches(self.steps, workers)))
            while not ended:
                batch = next(batches)
                self.unreadable.update(batch.unreadable)
                random_seed((self.seed * 1_000_003 + self.step) % 2**32)
                losses.append(self._step(self.step, batch))
                self.step += 1
                left.step()
                if self.best.due(self.step):
                    self.best.compare(self.step, self._validated(), self.tested)
                ended = self.step == self.steps or self.best.hopeless(self.step)
                if ended or self.device.type == "cpu" or self.step % max(1, self.steps // _CHECKED) == 0:
                    progress.text = self._told(self._mean(losses))
                    losses = losses[-self.per_epoch :]
                saved = False
                if stop.asked or (kept.worth if ended else kept.due):
                    saved = kept.save(*self._state(ended))
                if stop.asked:
                    after = f"stopped at epoch {self.epoch:.1f} of {self.recipe.epochs} of {name}"
                    raise Stopped(f"{after}: the same command goes on from there" if saved else after)
        left.skip(self.steps - self.step)
        chosen = self.best.choose(self.tested)
        print(f"  {name}: {self._outcome(chosen)}, {duration(time.perf_counter() - begun)}", flush=True)
        if self.unreadable:
            count, first = len(self.unreadable), min(self.unreadable)
            print(f"  {name}: {count:,} training images could not be read and were left out, such as {first}")
        return Trained(self.tested.eval(), chosen)

    @property
    def epoch(self) -> float:
        """How many have been trained."""
        return self.step / self.per_epoch

    def _step(self, step: int, batch: Batch) -> Tensor:
        self.schedule.step_update(step + 1)
        logits, labels = self._answered(batch)
        loss = self.loss(logits.float(), labels)
        loss.backward()
        if self.recipe.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average:
            self.average.update(self.model, step + 1)
        return loss.detach()

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

    def _mean(self, losses: list[Tensor]) -> float:
        loss = torch.stack(losses).mean().item()
        if not math.isfinite(loss):
            raise PatchloomError(f"the loss is not finite after {self.step} steps: lower {self.recipe.rate_option()}")
        return loss

    def _validated(self) -> Any:
        precision = "bfloat16" if self.half else "float32"
        logits, indices, _ = predictions(self.tested, self.held, self.mean, self.std, self.settings, precision)
        self.model.train()
        return score_of(logits, labels_of(self.held, indices))

    def _told(self, loss: float) -> str:
        found = self.best.latest
        validated = "" if found is None else f" · validation {found.accuracy:.1%}"
        return f"epoch {self.epoch:.1f}/{self.recipe.epochs} · loss {loss:.3f}{validated}"

    def _outcome(self, chosen: dict[str, Any]) -> str:
        if not chosen:
            return f"trained for {self.recipe.epochs} epoch{'s'[: self.recipe.epochs != 1]}"
        early = f", ended after {self.epoch:.0f}" if self.step < self.steps else ""
        return (
            f"epoch {chosen['best_epoch']:g} of {self.recipe.epochs} was best{early} "
            f"({chosen['validation_accuracy']:.1%} of {chosen['validation_images']:,} validation images)"
        )

    def _all_that_decides(self, model: Classifier, source: Source, native: bool) -> dict[str, Any]:
        return {
            "programs": _PROGRAMS,
            "weights": digest_of(model.state_dict()),
            # neither what is frozen nor heads and pixels are seen in the weights, nor the latter two in the layers
            "model": [str(model), [name for name, weight in model.named_parameters() if weight.requires_grad]],
            "sizes": [attention_heads(model.encoder), model.size],
            "images": source.fingerprint(),
            "labels": digest_of({"labels": labels_of(source)}),
            # by which the images for validation are drawn
            "groups": None if source.groups is None else digest_of({"groups": torch.from_numpy(source.groups)}),
            "recipe": self.recipe.plain(),
            "numbers": [self.mean, self.std, self.seed],
            "device": [self.device.type, self.half, native],
        }

    def _state(self, ended: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = tensors_of(self.model, self.optimizer)
        if self.average:
            average = self.average.module.state_dict()
            tensors |= {_AVERAGE + name: value.cpu().contiguous() for name, value in average.items()}
        tensors |= {_BEST + name: value for name, value in self.best.weights.items()}
        about = {"step": self.step, "ended": ended, "best": self.best.plain(), "unreadable": sorted(self.unreadable)}
        return tensors, about

    def _restored(self, kept: Unfinished, name: str, left: TimeLeft) -> bool:
        """Go to where an earlier process was; whether it had reached the end."""
        found = kept.read()
        if found is None:
            return False
        tensors, about = found
        average, best = (
            {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            for prefix in (_AVERAGE, _BEST)
        )
        own = {key: value for key, value in tensors.items() if not key.startswith((_AVERAGE, _BEST))}
        restore(own, self.model, self.optimizer)
        if self.average:
            self.average.module.load_state_dict(average)
        self.best.restore(about["best"], best)
        self.step, self.unreadable = about["step"], set(about["unreadable"])
        left.skip(self.step)
        if not about["ended"]:
            print(f"  {name} goes on at epoch {self.epoch:.1f} of {self.recipe.epochs}.", flush=True)
        return bool(about["ended"])
