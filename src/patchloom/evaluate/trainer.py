"""Training with labels: one loop for every protocol that trains, with the same result whether or not it is interrupted.

`patchloom.train.loop` is another loop, of pre-training: it queues updates on a GPU, skips those that are not finite and
goes back, and has no labels to choose weights by. Both share optimiser, schedules, checkpoints and pace.

Several processes share every step, each with its part of the batch: gradients are averaged, and validation and test
images are shared. The images of a step and their crops are the same for any number of processes. Other random draws
(mixup, erasing, stochastic depth, dropout) depend on step and rank, and so on the number of processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.utils import ModelEmaV3, random_seed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from patchloom.data.loader import Batch, training_batches
from patchloom.data.source import Source
from patchloom.data.workers import living_workers
from patchloom.display import StatusMessage, duration, is_first, print_line
from patchloom.errors import PatchloomError
from patchloom.estimate import count_step, time_steps, typical_seconds
from patchloom.evaluate.features import digest_tensors
from patchloom.evaluate.recipes import Course
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.heads import OnEncoder
from patchloom.nets.optimizer import build_optimizer
from patchloom.nets.performance import choose_attention, fuse_attention, use_kernels
from patchloom.pace import Pace
from patchloom.runs.checkpoint import Checkpoints, SaveTimer, as_best, best_of, restore, tensors_of, whole_weights
from patchloom.system.device import keep_freed_memory
from patchloom.system.distributed import (
    any_process,
    broadcast_buffers,
    collected,
    rank,
    refused_by_all,
    share_batch_norms,
    smallest,
    stopped_by_all,
    total,
    world,
)
from patchloom.system.files import cache_root
from patchloom.system.load import LoadWatch
from patchloom.system.signals import Stop
from patchloom.version import __version__

# Choice of the weights to test by validation images, which are held out from the training images.


class Score(NamedTuple):
    """Score of some weights on validation images, higher being better, and what decides between equal scores."""

    value: float
    tie: float


class BestWeights:
    """Best weights so far by a number of validation images; without any, the last weights are tested."""

    def __init__(self, images: int, course: Course):
        self.images, self.course = images, course
        self.score: Score | None = None
        self.latest: Score | None = None
        self.step = self.risen = 0  # of the best weights, and of the last rise of the score
        self.weights: dict[str, Tensor] = {}

    def due(self, step: int) -> bool:
        """Return whether to validate the weights after ``step`` steps."""
        return bool(self.images) and (step % self.course.every == 0 or step == self.course.steps)

    def compare(self, step: int, score: Score, model: nn.Module) -> None:
        """Keep a model's weights after ``step`` steps if they are the best so far."""
        self.latest = score
        if self.score is None or score.value > self.score.value:
            self.risen = step
        if self.score is None or score > self.score:
            self.score, self.step = score, step
            self.weights = whole_weights(model)

    def hopeless(self, step: int) -> bool:
        """Return whether the score has not risen for the patience; the tie-breaker alone may improve indefinitely.

        A rate that still rises says nothing about the rates to come, so the warm-up does not count.
        """
        if self.course.patience >= 1 or self.score is None:
            return False
        return step - max(self.risen, self.course.warmup) >= self.course.patience * self.course.steps

    def choose(self, model: nn.Module) -> dict[str, Any]:
        """Load the best weights into a model; return values for its result."""
        if self.score is None:
            return {}
        model.load_state_dict(self.weights)
        return {
            f"best_{self.course.unit}": round(self.course.count(self.step), 2),
            "validation_score": self.score.value,
            "validation_images": self.images,
        }

    def plain(self) -> dict[str, Any]:
        """Return everything but the weights, for a checkpoint."""
        return {"step": self.step, "risen": self.risen, "score": self.score, "latest": self.latest}

    def restore(self, about: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.step, self.risen, self.weights = about["step"], about["risen"], weights
        self.score, self.latest = (None if one is None else Score(*one) for one in (about["score"], about["latest"]))


# Checkpoints of interrupted trainings, kept on disc until the same command resumes them.


_SAVE_EVERY = 30.0  # seconds
_FORGOTTEN = 30 * 86_400  # seconds after which checkpoints are removed

_OPENED: ContextVar[list[Path] | None] = ContextVar("_OPENED", default=None)


@contextmanager
def keep_until_done() -> Iterator[None]:
    """Keep checkpoints of trainings inside this context; remove them on leaving without an error."""
    opened: list[Path] = []
    token = _OPENED.set(opened)
    try:
        yield
    finally:
        _OPENED.reset(token)
    for folder in opened:
        shutil.rmtree(folder, ignore_errors=True)


class TrainingCheckpoints:
    """Checkpoints of the training that JSON values identify; None keeps nothing."""

    def __init__(self, about: Any):
        opened = _OPENED.get()
        self._checkpoints: Checkpoints | None = None
        if about is None or opened is None:  # checkpoints would never be removed
            return
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()[:32]
        folder = cache_root() / "trainings" / name
        with contextlib.suppress(OSError):
            for other in folder.parent.iterdir():
                if time.time() - other.stat().st_mtime > _FORGOTTEN:
                    shutil.rmtree(other, ignore_errors=True)
        opened.append(folder)
        self._checkpoints = Checkpoints(folder)
        self._timer = SaveTimer(_SAVE_EVERY, _SAVE_EVERY)
        self._kept = False

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the last tensors and JSON values; None without a valid checkpoint."""
        if self._checkpoints is None or not self._checkpoints.there():
            return None
        self._checkpoints.clean()
        with contextlib.suppress(PatchloomError):  # the training starts again
            tensors, about, _ = self._checkpoints.read()
            self._kept = True
            return tensors, about
        return None

    @property
    def due(self) -> bool:
        return self._checkpoints is not None and self._timer.due

    @property
    def worth(self) -> bool:
        """Return whether a finished training took long enough to be kept for the next one."""
        return self._checkpoints is not None and (self._kept or self.due)

    def save(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> bool:
        """Save the state by the first process of each machine; return whether it was saved. A full disc is no error."""
        if self._checkpoints is None:
            return False
        begun = time.perf_counter()
        with contextlib.suppress(PatchloomError):
            if os.environ.get("LOCAL_RANK", "0") == "0":
                self._checkpoints.save(tensors, about)
                self._checkpoints.wait()
            self._kept = True
        self._timer.saved(time.perf_counter() - begun)
        return self._kept


_CHECKED = 50  # number of checks of the loss in a training, for each of which a GPU is waited for
_MEASURED = 3  # timed steps, after one warm-up step
# increase the first number if trainings interrupted under older code cannot be resumed
_PROGRAMS = ("training 3", __version__, torch.__version__)
_AVERAGE = "average."  # prefix of names in a checkpoint


@dataclass(frozen=True)
class Trained:
    """Trained model in eval mode, and the choices made on validation images, if any."""

    model: Any
    chosen: dict[str, Any]


class _Progress(StatusMessage):
    """Status line of a training, with the time left for all trainings together."""

    def __init__(self, name: str, pace: Pace, every: int):
        super().__init__(name, pace=pace)
        self.text, self.every = "the first step", every
        self.validation = 0.0  # seconds of the last one

    def left(self) -> float | None:
        steps = self.pace.left()
        return None if steps is None else steps + self.validation * ((self.pace.total - self.pace.done) // self.every)

    def position(self) -> str:
        return self.text


Forward = Callable[..., Any]  # the model of all processes, in the precision of the training
Loss = Callable[[Forward, Batch], Tensor]
Batches = Callable[[int, int, int], Iterator[Batch]]  # of steps first ... last - 1, read by some processes
Validate = Callable[[Any], Score]


def image_batches(
    source: Source,
    augment: Any,
    images: int,
    channels: int,
    settings: EvalSettings,
    truth: Callable[[int], Any] | None = None,
) -> Batches:
    """Return the batches of a source in this process, whose share of a step is ``images``."""

    def batches(first: int, stop: int, workers: int) -> Iterator[Batch]:
        reading = images, settings.seed, first, stop, workers, channels, rank(), world()
        return training_batches(source, augment, *reading, device=settings.torch_device, truth=truth)

    return batches


class Trainer:
    """Training of a model with labels: `fit` trains it to the end, or from where the same training was interrupted.

    Args:
        model: model, trained in place on the settings' device. Its method ``groups`` returns parameter groups for an
            optimiser by weight and layer decay; ``lr_scale`` is a group's factor of the learning rate.
        loss: function from the model's forward pass and a batch to the loss.
        batches: function from the first step, the step after the last one and the number of data-loading processes to
            the batches of these steps, in this process.
        course: length, optimiser and learning rate.
        validate: function from the tested model to its `Score` on the validation images, if there are any.
        settings: seed, device and accumulation.
        identity: JSON values that identify data and recipe; None keeps no checkpoints.
        validation_images: number of validation images.
        measure: name of the validation score.
        noun: images or recordings.
        half: compute matrix products in bfloat16.
        kernels: torch or native.
        workers: number of data-loading processes for a number of steps.
        alike: all processes compute the same gradients, which need no averaging.
        remark: function from the number of finished steps to a remark for the line of progress.
        outline: function from the model and normalised images to a loss with the memory of ``loss``, but independent of
            values; None: memory is not foreseen.

    Attributes:
        average: moving average of the weights, if it is tested.
        step: number of finished steps.
        best: best weights on validation images.
        unreadable: names of unreadable images.
    """

    def __init__(
        self,
        model: Any,
        loss: Loss,
        batches: Batches,
        course: Course,
        validate: Validate | None = None,
        *,
        settings: EvalSettings,
        identity: Mapping[str, Any] | None = None,
        validation_images: int = 0,
        measure: str = "accuracy",
        noun: str = "images",
        half: bool = False,
        kernels: str = "torch",
        workers: Callable[[int], int] = lambda steps: 0,
        alike: bool = False,
        remark: Callable[[int], str] = lambda step: "",
        outline: Callable[[Any, Tensor], Tensor] | None = None,
    ) -> None:
        self.loss, self.batches, self.course, self.validate = loss, batches, course, validate
        self.settings, self.device, self.half, self.noun = settings, settings.torch_device, half, noun
        self.measure, self.workers, self.remark, self.outline = measure, workers, remark, outline
        self.about: dict[str, Any] | None = None
        if identity is not None and settings.cache:
            self.about = {
                **identity,
                "programs": _PROGRAMS,
                "weights": digest_tensors(model.state_dict()),
                # the weights do not show which of them are frozen
                "model": [str(model), [name for name, weight in model.named_parameters() if weight.requires_grad]],
                "seed": settings.seed,
                "device": [self.device.type, half, kernels != "torch"],
                "shares": [world(), settings.accumulate],
            }
        keep_freed_memory()
        self.model: Any = model.to(self.device).train()
        if isinstance(model, OnEncoder):
            attention, _ = choose_attention(model.inner_encoder(), self.device.type, half, course.batch)
            fuse_attention(model, attention == "fused")
        use_kernels(self.model, kernels)
        shared = world() > 1 and not alike
        if shared:
            self.model = share_batch_norms(self.model)
        self.parallel: nn.Module = DistributedDataParallel(self.model) if shared else self.model
        self.optimizer = build_optimizer(
            self.model.groups(course.weight_decay, course.layer_decay),
            course.optimizer,
            self.device.type,
            lr=course.peak,
            betas=course.betas,
            momentum=course.momentum,
        )
        self.average = ModelEmaV3(self.model, course.ema, use_warmup=True) if course.ema else None
        self.best = BestWeights(validation_images, course)
        self.step, self.unreadable = 0, set[str]()

    @property
    def tested(self) -> Any:
        return self.average.module if self.average else self.model

    def forward(self, *inputs: Any) -> Any:
        """Apply the model of all processes in the precision of the training."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            return self.parallel(*inputs)

    def fit(self, name: str, pace: Pace, quiet: bool = False) -> Trained:
        """Train to the end, and return the tested model.

        Ctrl-C and SIGTERM stop it after a step; inside `keep_until_done` the same training resumes from there.

        Args:
            name: name of the model in printed lines.
            pace: pace of all trainings of this name's protocol.
            quiet: print no line on the result.

        Raises:
            PatchloomError: the loss is not finite, or the training is stopped.
        """
        kept, losses, begun = TrainingCheckpoints(self.about), list[Tensor](), time.perf_counter()
        ended, course = self._restored(kept, name), self.course
        pace.total -= self.step  # steps that need not be run
        pace.resume()
        progress, load = _Progress(name, pace, course.every), LoadWatch()
        with Stop() as stop, living_workers(), ExitStack() as reading, progress:
            if not ended:
                batches = self.batches(self.step, course.steps, self.workers(course.steps - self.step))
                reading.enter_context(closing(batches))  # type: ignore[type-var]  # iterators of workers are closed
            while not ended:
                batch = next(batches)
                self.unreadable.update(batch.unreadable)
                random_seed((self.settings.seed * 1_000_003 + self.step * world() + rank()) % 2**32)
                losses.append(self.update(batch))
                pace.advance()
                if self.validate is not None and self.best.due(self.step):
                    validation = time.perf_counter()
                    broadcast_buffers(self.tested.buffers())
                    self.best.compare(self.step, self.validate(self.tested), self.tested)
                    self.model.train()
                    progress.validation = time.perf_counter() - validation
                    pace.resume()
                ended = self.step == course.steps or self.best.hopeless(self.step)
                if ended or self.device.type == "cpu" or self.step % max(1, course.steps // _CHECKED) == 0:
                    progress.text = self._progress_text(self._mean(losses))
                    losses = losses[-course.per_epoch :]
                if is_first() and (news := load.news()):
                    print_line(f"  {name}: {news}")
                asked, saved = any_process(stop.asked), False
                if asked or any_process(kept.worth if ended else kept.due):
                    saved = kept.save(*self._state(ended))
                if asked:
                    after = f"stopped at {course.position(self.step)} of {name}"
                    raise stopped_by_all(f"{after}: run the same command to resume" if saved else after)
        pace.total -= course.steps - self.step
        chosen = self.best.choose(self.tested)
        broadcast_buffers(self.tested.buffers())
        if is_first() and not quiet:
            print_line(f"  {name}: {self._outcome(chosen)}, {duration(time.perf_counter() - begun)}")
        if (unreadable := {*collected([*self.unreadable])}) and is_first():
            print_line(
                f"  {name}: {len(unreadable):,} training {self.noun} could not be read and were left out, such as "
                f"{min(unreadable)}"
            )
        return Trained(self.tested.eval(), chosen)

    def update(self, batch: Batch) -> Tensor:
        """Update the weights once by a batch; return the loss before the update."""
        course, rate = self.course, self.course.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        parts, losses = batch.split(self.settings.accumulate), list[Tensor]()
        for number, part in enumerate(parts, 1):
            shared = self.parallel if isinstance(self.parallel, DistributedDataParallel) else None
            # gradients are shared with the last part
            with nullcontext() if shared is None or number == len(parts) else shared.no_sync():
                one = self.loss(self.forward, part)
                if len(parts) > 1:
                    one = one * (len(part.indices) / len(batch.indices))
                one.backward()
            losses.append(one.detach())
        if course.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), course.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.average:
            self.average.update(self.model, self.step)
        return sum(losses[1:], losses[0])

    def _mean(self, losses: list[Tensor]) -> float:
        loss = (total(torch.stack(losses).mean()) / world()).item()
        if not math.isfinite(loss):
            raise refused_by_all(f"the loss is not finite after {self.step} steps: lower {self.course.rate_option}")
        return loss

    def _progress_text(self, loss: float) -> str:
        latest, remark = self.best.latest, self.remark(self.step)
        validated = "" if latest is None else f"validation {self.measure} {latest.value:.1%}"
        position = self.course.position(self.step).replace(" of ", "/")
        return " · ".join(filter(None, [position, f"loss {loss:.3f}", validated, remark]))

    def _outcome(self, chosen: Mapping[str, Any]) -> str:
        course, unit, remark = self.course, self.course.unit, self.remark(self.step)
        remark = f", {remark}" if remark else ""
        if not chosen:
            return f"trained for {course.length}{remark}"
        early = f", ended after {round(course.count(self.step), 1):,.10g}" if self.step < course.steps else ""
        return (
            f"{unit} {chosen[f'best_{unit}']:,.10g} of {course.total} was best{early} ({self.measure} "
            f"{chosen['validation_score']:.1%} on {chosen['validation_images']:,} validation {self.noun}){remark}"
        )

    def _state(self, ended: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = tensors_of(self.model, self.optimizer)
        if self.average:
            average = self.average.module.state_dict()
            tensors |= {_AVERAGE + name: value.cpu().contiguous() for name, value in average.items()}
        tensors |= as_best(self.best.weights)
        self.unreadable = {*collected([*self.unreadable])}
        about = {"step": self.step, "ended": ended, "best": self.best.plain(), "unreadable": sorted(self.unreadable)}
        return tensors, about

    def _restored(self, kept: TrainingCheckpoints, name: str) -> bool:
        """Restore an earlier process's checkpoint; return whether that training had ended."""
        found = kept.read()
        step = -1 if found is None else int(found[1]["step"])
        # if processes have separate caches, a checkpoint in one is of no use to the others: all start again
        if any_process(step != smallest(step)) or found is None:
            return False
        tensors, about = found
        average = {key: tensors.pop(key) for key in [*tensors] if key.startswith(_AVERAGE)}
        restore(tensors, self.model, self.optimizer)
        if self.average:
            named = {key.removeprefix(_AVERAGE): value for key, value in average.items()}
            self.average.module.load_state_dict(named)
        self.best.restore(about["best"], best_of(tensors))
        self.step, self.unreadable = about["step"], set(about["unreadable"])
        if not about["ended"] and is_first():
            print_line(f"  {name} resumes at {self.course.position(self.step)}.")
        return bool(about["ended"])

    def seconds_of_step(self) -> float:
        """Measure the seconds of a step, including data loading, from a few steps that change the model."""
        batches = self.batches(0, 1 + _MEASURED, 0)
        return typical_seconds(time_steps(lambda: self.update(next(batches)).item(), least=_MEASURED))

    def bytes_of_step(self, images: int) -> int | None:
        """Return the peak bytes of a step of ``images``, with weights, gradients and both moments.

        They are counted with fake tensors, which replace the model's weights, so it cannot be trained afterwards. None
        without an outline, or for an encoder that needs values.
        """
        if (outline := self.outline) is None:
            return None
        use_kernels(self.model, "torch")  # native kernels need numbers, and keep no less

        def loss() -> Tensor:
            views = torch.zeros(images, self.model.channels, *self.model.size, device=self.device)
            # not by `forward`, where processes would exchange fake tensors
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                return outline(self.model, views)

        found = count_step(self.model, self.device.type, loss)
        moments = 2 * sum(one.nbytes for one in self.model.parameters() if one.requires_grad)
        return None if found is None else found.peak + moments


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
