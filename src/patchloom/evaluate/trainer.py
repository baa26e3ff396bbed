"""A training of an evaluation, step by step: the same whether it is stopped and gone on with or not.

What is trained, and on what, is said by those that build on it: `patchloom.evaluate.training.Training` for classifiers
and `patchloom.dense.training.DenseTraining` for maps and boxes.

Several processes share every step, each with its part of the batch: gradients are averaged, validation and test images
are shared. Which images a step holds and how they are cropped is the same for any number of processes. What is drawn
beyond that (mixup, erasing, stochastic depth, dropout) follows from step and rank, so it differs with their number.
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
from patchloom.display import StatusMessage, TimeLeft, duration, is_first
from patchloom.errors import PatchloomError, Stopped
from patchloom.estimate import time_steps, typical_seconds
from patchloom.evaluate.features import digest_tensors
from patchloom.evaluate.settings import EvalSettings
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
    total,
    world,
)
from patchloom.system.files import cache_root
from patchloom.system.signals import Stop
from patchloom.version import __version__

# Which epoch's weights are tested: the best one on validation images, which are training images held out from it.


_TIMES = 30  # that a training is validated at most


class EpochScore(NamedTuple):
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
        self.score: EpochScore | None = None
        self.latest: EpochScore | None = None
        self.step = self.risen = 0  # of the best weights, and where the accuracy was last raised
        self.weights: dict[str, Tensor] = {}

    def due(self, step: int) -> bool:
        """Whether the weights after ``step`` steps are to be validated."""
        return bool(self.images) and (step % self.every == 0 or step == self.steps)

    def compare(self, step: int, score: EpochScore, model: nn.Module) -> None:
        """Keep a model's weights after ``step`` steps, if they are better than all before."""
        self.latest = score
        if self.score is None or score.accuracy > self.score.accuracy:
            self.risen = step
        if self.score is None or score > self.score:
            self.score, self.step = score, step
            self.weights = whole_weights(model)

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
        self.score, self.latest = (
            None if one is None else EpochScore(*one) for one in (about["score"], about["latest"])
        )


def score_of(logits: Tensor, labels: Tensor) -> EpochScore:
    """Of logits [n c] for images with ``labels`` [n]."""
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return EpochScore(accuracy, -torch.nn.functional.cross_entropy(logits.double(), labels).item())


# Trainings of an evaluation that were stopped or killed, kept on disc until the same command goes on with them.


_SAVE_EVERY = 30.0  # seconds
_FORGOTTEN = 30 * 86_400  # seconds after which nobody will go on

_OPENED: ContextVar[list[Path] | None] = ContextVar("_OPENED", default=None)


@contextmanager
def keep_until_done() -> Iterator[None]:
    """While entered, trainings are kept; on leaving without an error those that were kept are removed."""
    opened: list[Path] = []
    token = _OPENED.set(opened)
    try:
        yield
    finally:
        _OPENED.reset(token)
    for folder in opened:
        shutil.rmtree(folder, ignore_errors=True)


class TrainingCheckpoints:
    """The checkpoints of one training.

    Args:
        about: all that decides the training, as JSON has it; None keeps nothing.
    """

    def __init__(self, about: Any):
        opened = _OPENED.get()
        self._checkpoints: Checkpoints | None = None
        if about is None or opened is None:  # nobody would remove what was kept
            return
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()[:32]
        folder = cache_root() / "trainings" / name
        _forget_old(folder.parent)
        opened.append(folder)
        self._checkpoints = Checkpoints(folder)
        self._timer = SaveTimer(_SAVE_EVERY, _SAVE_EVERY)
        self._kept = False

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The tensors and plain values that were saved last; None if there are none that are sound."""
        if self._checkpoints is None or not self._checkpoints.there():
            return None
        self._checkpoints.clean()
        with contextlib.suppress(PatchloomError):  # it begins again
            tensors, about, _ = self._checkpoints.read()
            self._kept = True
            return tensors, about
        return None

    @property
    def due(self) -> bool:
        """Whether it is time to save."""
        return self._checkpoints is not None and self._timer.due

    @property
    def worth(self) -> bool:
        """Whether a training that has ended is to be kept for the one that follows: it has taken a while."""
        return self._checkpoints is not None and (self._kept or self.due)

    def save(self, tensors: dict[str, Tensor], about: dict[str, Any]) -> bool:
        """Keep the state of the training; whether it could be: a disc without room costs nothing but that.

        Of several processes, the first of each machine writes.
        """
        if self._checkpoints is None:
            return False
        begun = time.perf_counter()
        with contextlib.suppress(PatchloomError):
            if os.environ.get("LOCAL_RANK", "0") == "0":
                self._checkpoints.save(tensors, about)
            self._kept = True
        self._timer.saved(time.perf_counter() - begun)
        return self._kept


def _forget_old(home: Path) -> None:
    with contextlib.suppress(OSError):
        for folder in home.iterdir():
            if time.time() - folder.stat().st_mtime > _FORGOTTEN:
                shutil.rmtree(folder, ignore_errors=True)


_CHECKED = 50  # times in a training that a GPU is waited for, to look at the loss
_MEASURED = 3  # steps of which the time is taken, after one that does not count
# to be raised with changes of the code after which a training that was stopped cannot go on
_PROGRAMS = ("training 2", __version__, torch.__version__)
_AVERAGE = "average."  # in the names of a checkpoint


@dataclass(frozen=True)
class Trained:
    """A model, and what was chosen on validation images: nothing, if there were none."""

    model: Any
    chosen: dict[str, Any]


class _Progress(StatusMessage):
    """The line of a training: the time left of all trainings first, since a narrow terminal cuts the end."""

    def __init__(self, name: str, left: TimeLeft):
        super().__init__(name)
        self.left, self.text = left, "the first step"

    def line(self) -> str:
        """See `StatusMessage`."""
        return f"{self.left} · {self.what} · {self.text}"


class Loop(ABC):
    """A model, its optimiser, and how far they are. Several processes may train together: each has its own batches.

    Attributes:
        model: is trained in place.
        parallel: calls the model, and averages its gradients over the processes.
        source: the images to train on.
        settings: of the evaluation.
        average: the moving average of its weights, if that is what will be tested.
        device, seed: of the training.
        clip: maximal norm of the gradient; 0 switches it off.
        steps, step: how many there are, and have been made.
        per_epoch: steps of an epoch.
        best: which weights are best on validation images.
        about: all that decides the training, as JSON has it; None keeps nothing of one that is stopped.
        unreadable: names of images.
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
        """The batches from this step up to ``steps``."""

    @abstractmethod
    def _loss(self, batch: Batch) -> Tensor:
        """The loss of a batch."""

    @abstractmethod
    def _validated(self) -> EpochScore:
        """How good the model is on the validation images."""

    @abstractmethod
    def _position(self) -> str:
        """How far the training is, as "epoch 2.0 of 10"."""

    @abstractmethod
    def _told(self, loss: float) -> str:
        """What the line of progress says."""

    @abstractmethod
    def _outcome(self, chosen: dict[str, Any]) -> str:
        """What is said at the end."""

    @abstractmethod
    def _rate_option(self) -> str:
        """The option that says what the learning rate is, with its value."""

    def _share(self) -> None:
        """Let the processes train the model together."""
        if world() > 1:
            self.model = share_batch_norms(self.model)
        self.parallel = DistributedDataParallel(self.model) if world() > 1 else self.model

    def _workers(self) -> int:
        """Processes that read them."""
        return self.settings.workers_for(self.source, self.steps - self.step, trained=True)

    def _chosen(self) -> dict[str, Any]:
        """Take the best weights; what to write beside the result."""
        return self.best.choose(self.tested)

    @property
    def tested(self) -> Any:
        """The model whose predictions count."""
        return self.average.module if self.average else self.model

    def seconds_of_step(self) -> float:
        """Seconds of a step, the reading of its images included, from a few steps."""
        steps, batches = count(), self._batches(1 + _MEASURED, workers=0)
        return typical_seconds(time_steps(lambda: self.update(next(steps), next(batches)).item(), least=_MEASURED))

    def run(self, name: str, left: TimeLeft) -> Trained:
        """Train to the end; arguments and errors as of `patchloom.evaluate.training.train_classifier`."""
        kept, losses, begun = TrainingCheckpoints(self.about), list[Tensor](), time.perf_counter()
        ended = self._restored(kept, name, left)
        left.begin()
        progress = _Progress(name, left)
        with Stop() as stop, ExitStack() as reading, progress:
            if not ended:
                batches = reading.enter_context(closing(self._batches(self.steps, self._workers())))
            while not ended:
                batch = next(batches)
                self.unreadable.update(batch.unreadable)
                random_seed((self.seed * 1_000_003 + self.step * world() + rank()) % 2**32)
                losses.append(self.update(self.step, batch))
                self.step += 1
                left.step()
                if self.best.due(self.step):
                    self.best.compare(self.step, self._validated(), self.tested)
                ended = self.step == self.steps or self.best.hopeless(self.step)
                if ended or self.device.type == "cpu" or self.step % max(1, self.steps // _CHECKED) == 0:
                    progress.text = self._told(self._mean(losses))
                    losses = losses[-self.per_epoch :]
                asked, saved = any_process(stop.asked), False
                if asked or any_process(kept.worth if ended else kept.due):
                    saved = kept.save(*self._state(ended))
                if asked:
                    after = f"stopped at {self._position()} of {name}"
                    raise Stopped(f"{after}: the same command goes on from there" if saved else after)
        left.skip(self.steps - self.step)
        chosen = self._chosen()
        if is_first():
            print(f"  {name}: {self._outcome(chosen)}, {duration(time.perf_counter() - begun)}", flush=True)
        if (unreadable := {*collected([*self.unreadable])}) and is_first():
            count, first = len(unreadable), min(unreadable)
            print(
                f"  {name}: {count:,} training {self.source.noun} could not be read and were left out, such as {first}"
            )
        return Trained(self.tested.eval(), chosen)

    @property
    def epoch(self) -> float:
        """How many have been trained."""
        return self.step / self.per_epoch

    def update(self, step: int, batch: Batch) -> Tensor:
        """Update the weights once by a batch; the loss before that."""
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
        """Compute the gradients of a batch, in ``--accumulate`` parts one after the other; its loss."""
        parts, losses = batch.split(self.settings.accumulate), list[Tensor]()
        for number, part in enumerate(parts, 1):
            shared = self.parallel if isinstance(self.parallel, DistributedDataParallel) else None
            # the last one shares the sum of all
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

    def _restored(self, kept: TrainingCheckpoints, name: str, left: TimeLeft) -> bool:
        """Go to where an earlier process was; whether it had reached the end."""
        found = kept.read()
        step = -1 if found is None else int(found[1]["step"])
        # where processes have caches of their own, what one has kept is of no use to the others: all begin again
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
        left.skip(self.step)
        if not about["ended"] and is_first():
            print(f"  {name} goes on at {self._position()}.", flush=True)
        return bool(about["ended"])


def training_identity(
    model: nn.Module, recipe: Mapping[str, Any], numbers: Sequence[Any], device: Sequence[Any], accumulate: int
) -> dict[str, Any]:
    """What decides a training besides its images, as JSON has it."""
    return {
        "programs": _PROGRAMS,
        "weights": digest_tensors(model.state_dict()),
        # what is frozen is not seen in the weights
        "model": [str(model), [name for name, weight in model.named_parameters() if weight.requires_grad]],
        "recipe": recipe,
        "numbers": numbers,
        "device": device,
        "shares": [world(), accumulate],
    }
