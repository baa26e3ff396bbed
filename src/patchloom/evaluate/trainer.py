"""Training loop of an evaluation, with the same result whether or not it is interrupted and resumed.

Subclasses define model and data: `patchloom.evaluate.training.Training` for classifiers and
`patchloom.dense.training.DenseTraining` for label maps and boxes.

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
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, random_seed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from patchloom.data.loader import Batch
from patchloom.data.source import Source
from patchloom.data.workers import living_workers
from patchloom.display import StatusMessage, duration, is_first, print_line
from patchloom.errors import PatchloomError
from patchloom.estimate import time_steps, typical_seconds
from patchloom.evaluate.features import digest_tensors
from patchloom.evaluate.settings import EvalSettings
from patchloom.pace import Pace
from patchloom.runs.checkpoint import (
    Checkpoints,
    SaveTimer,
    as_best,
    best_of,
    restore,
    tensors_of,
    whole_weights,
)
from patchloom.system.distributed import (
    any_process,
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

# Choice of the epoch to test by validation images, which are held out from the training images.


_TIMES = 30  # maximal number of validations of a training


class EpochScore(NamedTuple):
    """Score of an epoch: accuracy and, for ties, the loss or another criterion."""

    accuracy: float
    negative_loss: float


class BestEpoch:
    """Best weights so far.

    Args:
        images: number of validation images; 0: there are none, and the last weights are tested.
        steps, per_epoch: steps of the training and of an epoch.
        patience: fraction of the training without a higher accuracy after which it ends; 1: never.
        every: steps between two validations; by default whole epochs, at most 30 times.
        warmup: steps of the warm-up of the learning rate; the patience begins after it.
    """

    def __init__(
        self, images: int, steps: int, per_epoch: int, patience: float, every: int | None = None, warmup: int = 0
    ):
        self.images, self.steps, self.per_epoch, self.patience = images, steps, per_epoch, patience
        self.warmup = warmup
        self.every = every or math.ceil(steps / per_epoch / _TIMES) * per_epoch
        self.score: EpochScore | None = None
        self.latest: EpochScore | None = None
        self.step = self.risen = 0  # of the best weights, and of the last rise in accuracy
        self.weights: dict[str, Tensor] = {}

    def due(self, step: int) -> bool:
        """Return whether to validate the weights after ``step`` steps."""
        return bool(self.images) and (step % self.every == 0 or step == self.steps)

    def compare(self, step: int, score: EpochScore, model: nn.Module) -> None:
        """Keep a model's weights after ``step`` steps if they are the best so far."""
        self.latest = score
        if self.score is None or score.accuracy > self.score.accuracy:
            self.risen = step
        if self.score is None or score > self.score:
            self.score, self.step = score, step
            self.weights = whole_weights(model)

    def hopeless(self, step: int) -> bool:
        """Return whether the accuracy has not risen for the patience; the loss alone may fall indefinitely.

        A rate that still rises says nothing about the rates to come, so the warm-up does not count.
        """
        if self.patience >= 1 or self.score is None:
            return False
        return step - max(self.risen, self.warmup) >= self.patience * self.steps

    def choose(self, model: nn.Module) -> dict[str, Any]:
        """Load the best weights into a model; return values for its result."""
        if self.score is None:
            return {}
        model.load_state_dict(self.weights)
        epoch = round(self.step / self.per_epoch, 2)
        return {"best_epoch": epoch, "validation_accuracy": self.score.accuracy, "validation_images": self.images}

    def plain(self) -> dict[str, Any]:
        """Return everything but the weights, for a checkpoint."""
        return {"step": self.step, "risen": self.risen, "score": self.score, "latest": self.latest}

    def restore(self, about: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Restore the values of `plain` and the weights."""
        self.step, self.risen, self.weights = about["step"], about["risen"], weights
        self.score, self.latest = (
            None if one is None else EpochScore(*one) for one in (about["score"], about["latest"])
        )


def score_of(logits: Tensor, labels: Tensor) -> EpochScore:
    """Score logits [n c] of images with ``labels`` [n]."""
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return EpochScore(accuracy, -torch.nn.functional.cross_entropy(logits.double(), labels).item())


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
    """Checkpoints of one training.

    Args:
        about: JSON values that identify the training; None keeps nothing.
    """

    def __init__(self, about: Any):
        opened = _OPENED.get()
        self._checkpoints: Checkpoints | None = None
        if about is None or opened is None:  # checkpoints would never be removed
            return
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()[:32]
        folder = cache_root() / "trainings" / name
        _forget_old(folder.parent)
        opened.append(folder)
        self._checkpoints = Checkpoints(folder)
        self._timer = SaveTimer(_SAVE_EVERY, _SAVE_EVERY)
        self._kept = False

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the last saved tensors and JSON values; None without a valid checkpoint."""
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
        """Return whether it is time to save."""
        return self._checkpoints is not None and self._timer.due

    @property
    def worth(self) -> bool:
        """Return whether a finished training took long enough to be kept for the next one."""
        return self._checkpoints is not None and (self._kept or self.due)

    def save(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> bool:
        """Save the state of the training; return whether it was saved. A full disc is no error.

        With several processes, the first one of each machine writes.
        """
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


def _forget_old(home: Path) -> None:
    with contextlib.suppress(OSError):
        for folder in home.iterdir():
            if time.time() - folder.stat().st_mtime > _FORGOTTEN:
                shutil.rmtree(folder, ignore_errors=True)


_CHECKED = 50  # number of checks of the loss in a training, for each of which a GPU is waited for
_MEASURED = 3  # timed steps, after one warm-up step
# increase the first number if trainings interrupted under older code cannot be resumed
_PROGRAMS = ("training 2", __version__, torch.__version__)
_AVERAGE = "average."  # prefix of names in a checkpoint


@dataclass(frozen=True)
class Trained:
    """Trained model, and the choices made on validation images, if any."""

    model: Any
    chosen: dict[str, Any]


class _Progress(StatusMessage):
    """Status line of a training, with the time left for all trainings together.

    Attributes:
        text: progress of this training.
        validation: seconds of its last validation.
        every: steps between two validations.
    """

    def __init__(self, name: str, pace: Pace, every: int):
        super().__init__(name, pace=pace)
        self.text, self.validation, self.every = "the first step", 0.0, every

    def left(self) -> float | None:
        """Return the seconds of the steps and validations to come; None if unknown."""
        steps = self.pace.left()
        return None if steps is None else steps + self.validation * ((self.pace.total - self.pace.done) // self.every)

    def position(self) -> str:
        """Return the progress of this training."""
        return self.text


class Loop(ABC):
    """Training state: model, optimiser and step. Several processes may train together, each with its own batches.

    Attributes:
        model: trained in place.
        parallel: wrapper of the model that averages gradients over processes.
        source: training images.
        settings: settings of the evaluation.
        average: moving average of the weights, if it is tested.
        device, seed: device and random seed of the training.
        clip: maximal norm of the gradient; 0 disables clipping.
        steps, step: total and finished number of steps.
        per_epoch: steps of an epoch.
        best: best weights on validation images.
        about: JSON values that identify the training; None keeps no checkpoints.
        unreadable: names of unreadable images.
    """

    model: nn.Module
    parallel: nn.Module
    source: Source
    settings: EvalSettings
    average: ModelEmaV3 | None = None
    optimizer: torch.optim.Optimizer
    schedule: Scheduler
    device: torch.device
    seed: int
    clip: float
    steps: int
    step: int = 0
    per_epoch: int
    best: BestEpoch
    about: dict[str, Any] | None
    unreadable: set[str]

    @abstractmethod
    def _batches(self, steps: int, workers: int) -> Any:
        """Return the batches from this step up to ``steps``."""

    @abstractmethod
    def _loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""

    @abstractmethod
    def _validated(self) -> EpochScore:
        """Score the model on the validation images."""

    @abstractmethod
    def _position(self) -> str:
        """Return the progress, such as "epoch 2.0 of 10"."""

    @abstractmethod
    def _progress_text(self, loss: float) -> str:
        """Return the text of the progress line."""

    @abstractmethod
    def _outcome(self, chosen: dict[str, Any]) -> str:
        """Return the closing message."""

    @abstractmethod
    def _rate_option(self) -> str:
        """Return the learning-rate option with its value."""

    def _share(self) -> None:
        """Set up the model for training by all processes together."""
        if world() > 1:
            self.model = share_batch_norms(self.model)
        self.parallel = DistributedDataParallel(self.model) if world() > 1 else self.model

    def _workers(self) -> int:
        """Return the number of data-loading processes."""
        return self.settings.workers_for(self.source, self.steps - self.step, trained=True)

    def _chosen(self) -> dict[str, Any]:
        """Load the best weights; return values for the result."""
        return self.best.choose(self.tested)

    @property
    def tested(self) -> Any:
        """Model whose predictions are tested."""
        return self.average.module if self.average else self.model

    def seconds_of_step(self) -> float:
        """Measure the seconds of a step from a few steps, including data loading."""
        steps, batches = count(), self._batches(1 + _MEASURED, workers=0)
        return typical_seconds(time_steps(lambda: self.update(next(steps), next(batches)).item(), least=_MEASURED))

    def run(self, name: str, pace: Pace) -> Trained:
        """Train to the end; arguments and errors as in `patchloom.evaluate.training.train_classifier`."""
        kept, losses, begun = TrainingCheckpoints(self.about), list[Tensor](), time.perf_counter()
        ended = self._restored(kept, name)
        pace.total -= self.step  # steps that need not be run
        pace.resume()
        progress, load = _Progress(name, pace, self.best.every), LoadWatch()
        with Stop() as stop, living_workers(), ExitStack() as reading, progress:
            if not ended:
                batches = reading.enter_context(closing(self._batches(self.steps, self._workers())))
            while not ended:
                batch = next(batches)
                self.unreadable.update(batch.unreadable)
                random_seed((self.seed * 1_000_003 + self.step * world() + rank()) % 2**32)
                losses.append(self.update(self.step, batch))
                self.step += 1
                pace.advance()
                if self.best.due(self.step):
                    validation = time.perf_counter()
                    self.best.compare(self.step, self._validated(), self.tested)
                    progress.validation = time.perf_counter() - validation
                    pace.resume()
                ended = self.step == self.steps or self.best.hopeless(self.step)
                if ended or self.device.type == "cpu" or self.step % max(1, self.steps // _CHECKED) == 0:
                    progress.text = self._progress_text(self._mean(losses))
                    losses = losses[-self.per_epoch :]
                if is_first() and (news := load.news()):
                    print_line(f"  {name}: {news}")
                asked, saved = any_process(stop.asked), False
                if asked or any_process(kept.worth if ended else kept.due):
                    saved = kept.save(*self._state(ended))
                if asked:
                    after = f"stopped at {self._position()} of {name}"
                    raise stopped_by_all(f"{after}: run the same command to resume" if saved else after)
        pace.total -= self.steps - self.step
        chosen = self._chosen()
        if is_first():
            print_line(f"  {name}: {self._outcome(chosen)}, {duration(time.perf_counter() - begun)}")
        if (unreadable := {*collected([*self.unreadable])}) and is_first():
            count, first = len(unreadable), min(unreadable)
            print_line(
                f"  {name}: {count:,} training {self.source.noun} could not be read and were left out, such as {first}"
            )
        return Trained(self.tested.eval(), chosen)

    @property
    def epoch(self) -> float:
        """Number of finished epochs."""
        return self.step / self.per_epoch

    def update(self, step: int, batch: Batch) -> Tensor:
        """Update the weights once by a batch; return the loss before the update."""
        self.schedule.step_update(step + 1)
        loss = self._backward(batch)
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average:
            self.average.update(self.model, step + 1)
        return loss

    def _backward(self, batch: Batch) -> Tensor:
        """Compute the gradients of a batch, in ``--accumulate`` parts; return its loss."""
        parts, losses = batch.split(self.settings.accumulate), list[Tensor]()
        for number, part in enumerate(parts, 1):
            shared = self.parallel if isinstance(self.parallel, DistributedDataParallel) else None
            # gradients are shared with the last part
            with nullcontext() if shared is None or number == len(parts) else shared.no_sync():
                one = self._loss(part)
                if len(parts) > 1:
                    one = one * (len(part.indices) / len(batch.indices))
                one.backward()
            losses.append(one.detach())
        return sum(losses[1:], losses[0])

    def _mean(self, losses: list[Tensor]) -> float:
        loss = (total(torch.stack(losses).mean()) / world()).item()
        if not math.isfinite(loss):
            raise refused_by_all(f"the loss is not finite after {self.step} steps: lower {self._rate_option()}")
        return loss

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
            print_line(f"  {name} resumes at {self._position()}.")
        return bool(about["ended"])


def training_identity(
    model: nn.Module, recipe: Mapping[str, Any], numbers: Sequence[Any], device: Sequence[Any], accumulate: int
) -> dict[str, Any]:
    """Return JSON values that identify a training apart from its images."""
    return {
        "programs": _PROGRAMS,
        "weights": digest_tensors(model.state_dict()),
        # the weights do not show which of them are frozen
        "model": [str(model), [name for name, weight in model.named_parameters() if weight.requires_grad]],
        "recipe": recipe,
        "numbers": numbers,
        "device": device,
        "shares": [world(), accumulate],
    }
