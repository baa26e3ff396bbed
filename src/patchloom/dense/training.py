"""The training of a head for maps or boxes, with its encoder or on a frozen one, by one process or by several.

Letters: b batch, c channels, h w height and width, k classes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from timm.scheduler import MultiStepLRScheduler, PolyLRScheduler
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from patchloom.data.decode import Unreadable
from patchloom.data.loader import prepared, training_batches
from patchloom.dense.annotations.base import Annotated, T
from patchloom.dense.recipes import ResolvedDenseRecipe
from patchloom.dense.segmenter import PixelSegmenter
from patchloom.display import track_progress
from patchloom.errors import PatchloomError
from patchloom.estimate import count_step, time_steps
from patchloom.evaluate.features import Precision, results_ahead, runs_in_bfloat16
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trainer import BestEpoch, EpochScore, Loop, training_identity
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.heads import OnEncoder
from patchloom.nets.performance import choose_attention, fuse_attention, use_kernels
from patchloom.system.distributed import broadcast_buffers, collected, rank, world
from patchloom.system.hardware import keep_freed_memory

_VALIDATED = 10  # times in a training
_TIMED_IMAGES = 4


class DenseTraining(Loop, Generic[T]):
    """Training of a segmenter or detector: model, optimiser and progress.

    Args:
        model: model with a method ``groups``; it is trained in place.
        train: annotated training images.
        held: annotated images for choosing the weights; None: the last weights are taken.
        recipe: values of the recipe.
        card: card of the encoder, with mean and std to normalise images.
        settings: seed, device and workers.
        half: whether matrix products are in bfloat16.
        kernels: torch or native.
    """

    measure: str  # of the validation, in what is printed
    augment: Callable[..., Any]
    held: Annotated[T] | None
    truth: Callable[[int], T]

    def __init__(
        self,
        model: OnEncoder | PixelSegmenter,
        train: Annotated[T],
        held: Annotated[T] | None,
        recipe: ResolvedDenseRecipe,
        card: EncoderCard,
        settings: EvalSettings,
        *,
        half: bool,
        kernels: str,
    ) -> None:
        self.recipe, self.card, self.settings, self.half, self.held = recipe, card, settings, half, held
        self.source, self.truth = train.images, train.outlined
        self.device, self.seed, self.clip = settings.torch_device, settings.seed, recipe.clip
        numbers, device = [card.mean, card.std, self.seed], [self.device.type, half, kernels != "torch"]
        images = [train.fingerprint(), None if held is None else held.fingerprint()]
        plain = {"recipe": recipe.plain(), "images": images}
        self.about = training_identity(model, plain, numbers, device, settings.accumulate) if settings.cache else None
        self.model: OnEncoder | PixelSegmenter = model.to(self.device).train()
        keep_freed_memory()
        if isinstance(self.model, OnEncoder):
            attention, _ = choose_attention(self.model.inner_encoder(), self.device.type, half, recipe.batch)
            fuse_attention(self.model, attention == "fused")
        use_kernels(self.model, kernels)
        self._share()
        self.batch = recipe.batch // world()
        self.steps, self.per_epoch = recipe.steps, max(1, len(train) // recipe.batch)
        every = max(1, math.ceil(self.steps / _VALIDATED))
        n_held = 0 if held is None else len(held)
        self.best = BestEpoch(n_held, self.steps, self.steps, recipe.patience, every, dense_warmup(recipe))
        groups = self.model.groups(recipe.weight_decay, recipe.layer_decay)
        fused = self.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=fused)
        self.schedule = rate_schedule(self.optimizer, recipe)
        self.unreadable: set[str] = set()

    @abstractmethod
    def score(self, images: Annotated[T]) -> float:
        """Return the score of the tested model on some images; all processes must call it."""

    def seconds_of_image(self, images: Annotated[T]) -> float:
        """Return the seconds that the score of an image takes, measured on a few images."""
        some = images.subset(range(min(len(images), _TIMED_IMAGES)))
        return time_steps(lambda: self.score(some), least=1)[0] / len(some)

    @abstractmethod
    def _outline(self, images: Tensor) -> Tensor:
        """Return a loss of normalised images [b c h w] with the memory of `_loss`, but independent of values."""

    def bytes_of_step(self, images: int) -> int | None:
        """Return the peak bytes of a step of ``images``, with weights, gradients and both moments.

        They are counted with fake tensors, which replace the model's weights, so it cannot be trained afterwards. None
        for an encoder that needs values.
        """
        use_kernels(self.model, "torch")  # native kernels need numbers, and keep no less
        found = count_step(self.model, self.device.type, lambda: self._fake(self._outline, images))
        moments = 2 * sum(one.nbytes for one in self.model.parameters() if one.requires_grad)
        return None if found is None else found.peak + moments

    def bytes_of_test(self, image: tuple[int, int]) -> int:
        """Return the peak bytes of a test on an image (h, w) if they may exceed those of a step, else 0."""
        return 0

    def _fake(self, work: Callable[[Tensor], Any], images: int) -> Any:
        """Apply ``work`` to a batch, as in a step."""
        views = torch.zeros(images, self.model.channels, *self.model.size, device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            return work(views)

    def _batches(self, steps: int, workers: int) -> Any:
        reading = self.batch, self.seed, self.step, steps, workers, self.model.channels, rank(), world()
        return training_batches(self.source, self.augment, *reading, device=self.device, truth=self.truth)

    def _validated(self) -> EpochScore:
        assert self.held is not None
        broadcast_buffers(self.tested.buffers())
        found = self.score(self.held)
        self.model.train()
        return EpochScore(
            found, float(self.step)
        )  # of equal scores, such as 0 at first, the one that was trained longest

    def _chosen(self) -> dict[str, Any]:
        found = super()._chosen()
        broadcast_buffers(self.tested.buffers())
        if not found:
            return {}
        return {
            "best_step": self.best.step,
            "validation_score": found["validation_accuracy"],
            "validation_images": found["validation_images"],
        }

    def _remark(self) -> str:
        """Return what a training should say about its answers so far, for the line of progress; "" for nothing."""
        return ""

    def _position(self) -> str:
        return f"step {self.step:,} of {self.steps:,}"

    def _progress_text(self, loss: float) -> str:
        found = self.best.latest
        validated = "" if found is None else f" · validation {self.measure} {found.accuracy:.1%}"
        remark = self._remark()
        return f"step {self.step:,}/{self.steps:,} · loss {loss:.3f}{validated}{' · ' * bool(remark)}{remark}"

    def _outcome(self, chosen: dict[str, Any]) -> str:
        remark = self._remark()
        remark = f", {remark}" if remark else ""
        if not chosen:
            return f"trained for {self.steps:,} steps{remark}"
        early = f", ended after {self.step:,}" if self.step < self.steps else ""
        return (
            f"step {chosen['best_step']:,} of {self.steps:,} was best{early} ({self.measure} "
            f"{chosen['validation_score']:.1%} on {chosen['validation_images']:,} validation images){remark}"
        )

    def _rate_option(self) -> str:
        return f"--lr (now {self.recipe.lr:g})"


def images_scored(held: Annotated[T] | None, test: Annotated[T]) -> int:
    """Return the number of images that one training scores: validation images several times, test images once."""
    return _VALIDATED * len(held or ()) + len(test)


def mask_padding(images: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
    """Set the padding of images [b c h w] to zero, outside of each (h, w)."""
    rows = torch.arange(images.shape[-2], device=images.device)[None, :, None]
    columns = torch.arange(images.shape[-1], device=images.device)[None, None, :]
    own = torch.tensor(sizes).to(images.device, non_blocking=True)
    inside = (rows < own[:, 0, None, None]) & (columns < own[:, 1, None, None])
    return images * inside[:, None]


def dense_warmup(recipe: ResolvedDenseRecipe) -> int:
    """Return the number of steps of the warm-up."""
    return min(recipe.warmup_steps, recipe.steps - 1)


def rate_schedule(optimizer: torch.optim.Optimizer, recipe: ResolvedDenseRecipe) -> Any:
    """Return the schedule of the learning rate. It never reaches 0: the linear decay ends one step after the last."""
    warmup = dense_warmup(recipe)
    if recipe.decay == "steps":
        # timm lowers the rate at the number before a drop, and updates count from 1: as many have the rate before it
        drops = [round(share * recipe.steps) + 2 for share in recipe.drops]
        return MultiStepLRScheduler(optimizer, drops, 0.1, warmup_t=warmup, warmup_prefix=False, t_in_epochs=False)
    total = recipe.steps - warmup + 1
    return PolyLRScheduler(optimizer, total, power=1.0, warmup_t=warmup, warmup_prefix=True, t_in_epochs=False)


# Answers of a trained model to pictures, which are read ahead by worker processes.


_AT_ONCE = 8  # pictures on a GPU; a CPU is as fast with one


class ReadPicture(NamedTuple):
    """Picture of any size.

    Attributes:
        number: its number in a source.
        image: [c h w]; None if it cannot be read.
        truth: its annotation, if that is read as well.
    """

    number: int
    image: Tensor | None
    truth: Any = None


@dataclass
class Pictures(Dataset[ReadPicture | PatchloomError]):
    """Data set of pictures.

    Args:
        read: reads an image by its number, with a number of channels: `Source.read_as`.
        channels: number of channels.
        numbers: numbers of the pictures.
        truth: reads an annotation by its number; None: there is none.
    """

    read: Callable[[int, int], Tensor]
    channels: int
    numbers: range
    truth: Callable[[int], Any] | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the largest of three pictures, with its annotation."""
        some = {self.numbers[0], self.numbers[len(self.numbers) // 2], self.numbers[-1]}
        return max(sum(one.nbytes for one in tree_leaves(self[i]) if isinstance(one, Tensor)) for i in some)

    def __getitem__(self, number: int) -> ReadPicture | PatchloomError:
        try:
            try:
                image = self.read(number, self.channels)
            except Unreadable:
                return ReadPicture(number, None)
            return ReadPicture(number, image, None if self.truth is None else self.truth(number))
        except PatchloomError as error:  # returned, as by the data sets of batches
            return error


def answered(
    pictures: Pictures,
    answer: Callable[[list[Tensor]], Sequence[Any]],
    device: torch.device,
    workers: int,
    what: str = "",
) -> Iterator[tuple[ReadPicture, Any]]:
    """Yield the readable ones of ``pictures``, each with its answer on the CPU.

    Args:
        pictures: the pictures.
        answer: answers several images of one dtype, without waiting for a GPU.
        device: device on which answers are computed.
        workers: number of processes that read.
        what: text of the line of progress; none without it.
    """
    numbers = pictures.numbers
    read = track_progress(prepared(pictures, numbers, workers, device, repeated=True), len(numbers), what)
    groups = _groups((one for one in read if one.image is not None), _AT_ONCE if device.type == "cuda" else 1)

    def compute(group: list[ReadPicture]) -> Sequence[Any]:
        return answer([one.image for one in group if one.image is not None])

    for group, answers in results_ahead(groups, compute):
        yield from zip(group, answers, strict=True)


def _groups(pictures: Iterable[ReadPicture], most: int) -> Iterator[list[ReadPicture]]:
    for _, alike in groupby(pictures, lambda one: one.image is not None and one.image.dtype):
        while group := [*islice(alike, most)]:
            yield group


A = TypeVar("A")


def predict_images(
    model: OnEncoder | PixelSegmenter,
    images: Annotated[T],
    settings: EvalSettings,
    answer: Callable[[list[Tensor], torch.device, bool], Sequence[Any]],
    finish: Callable[[ReadPicture, Any], A],
    *,
    truth: bool = False,
    precision: Precision = "auto",
    half: bool | None = None,
    what: str = "",
) -> list[A | None]:
    """Apply a model to every image; None for unreadable ones. Processes take turns, and all must call it.

    Args:
        model: model, which is moved to the device and set to eval mode.
        images: annotated images.
        settings: settings with device and workers.
        answer: function of images [c h w], the device, and whether to compute in bfloat16, see `answered`.
        finish: function of a picture and its answer on the CPU.
        truth: whether the annotation is read with a picture.
        precision: precision of matrix products, unless ``half`` is given.
        half: whether matrix products are in bfloat16.
        what: text of the line of progress; none without it.
    """
    device = settings.torch_device
    model.to(device).eval()
    in_half = runs_in_bfloat16(device, precision) if half is None else half
    turns = range(rank(), len(images), world())
    pictures = Pictures(images.images.read_as, model.channels, turns, images.truth if truth else None)
    workers = settings.workers_for(images.images, len(turns))
    each = answered(pictures, lambda some: answer(some, device, in_half), device, workers, what)
    by_image = dict(collected([(picture.number, finish(picture, found)) for picture, found in each]))
    return [by_image.get(i) for i in range(len(images))]
