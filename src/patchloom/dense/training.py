"""The training of a head for maps or boxes, with its encoder or on a frozen one, by one process or by several.

Letters: b batch, c channels, h w height and width, k classes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from timm.scheduler import MultiStepLRScheduler, PolyLRScheduler
from torch import Tensor

from patchloom.data.decode import Unreadable, to_channels
from patchloom.data.loader import training_batches
from patchloom.dense.annotations.base import Annotated, T
from patchloom.dense.recipes import ResolvedDenseRecipe
from patchloom.dense.segmenter import PixelSegmenter
from patchloom.display import track_progress
from patchloom.estimate import count_step
from patchloom.evaluate.features import Precision, runs_in_bfloat16
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trainer import BestEpoch, EpochScore, Loop, training_identity
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.heads import OnEncoder
from patchloom.nets.performance import fuse_attention, use_kernels
from patchloom.system.distributed import broadcast_buffers, collected, rank, world
from patchloom.system.hardware import keep_freed_memory

VALIDATED = 10  # times in a training


class DenseTraining(Loop, Generic[T]):
    """A model that answers with maps or boxes, its optimiser, and how far they are.

    Args:
        model: is trained in place; has ``groups``.
        train: annotated images.
        held: others, by which the weights are chosen; None takes the last ones.
        recipe: its values.
        card: its mean and std normalise the images.
        settings: seed, device and workers.
        half: take matrix products in bfloat16.
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
        fuse_attention(self.model, not (half and self.device.type == "cpu"))
        use_kernels(self.model, kernels)
        self._share()
        self.batch = recipe.batch // world()
        self.steps, self.per_epoch = recipe.steps, max(1, len(train) // recipe.batch)
        every = max(1, math.ceil(self.steps / VALIDATED))
        self.best = BestEpoch(0 if held is None else len(held), self.steps, self.steps, recipe.patience, every)
        groups = self.model.groups(recipe.weight_decay, recipe.layer_decay)
        fused = self.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=fused)
        self.schedule = rate_schedule(self.optimizer, recipe)
        self.unreadable: set[str] = set()

    @abstractmethod
    def score(self, images: Annotated[T]) -> float:
        """The score of what is tested, on some images; all processes must ask."""

    @abstractmethod
    def _outline(self, images: Tensor) -> Tensor:
        """A loss of normalised images [b c h w] that takes the memory of `_loss`, but needs no numbers."""

    def bytes_of_step(self, images: int) -> int | None:
        """Return the peak bytes of a step of ``images``, with weights, gradients and both moments.

        They are counted with fake tensors, which take the place of the model's weights: it cannot be trained after it.
        None for an encoder that needs numbers.
        """
        use_kernels(self.model, "torch")  # native kernels need numbers, and keep no less
        found = count_step(self.model, self.device.type, lambda: self._fake(self._outline, images))
        moments = 2 * sum(one.nbytes for one in self.model.parameters() if one.requires_grad)
        return None if found is None else found.peak + moments

    def bytes_of_test(self, image: tuple[int, int]) -> int:
        """Return the peak bytes of testing on an image (h, w) where that may be more than of a step, else 0."""
        return 0

    def _fake(self, work: Callable[[Tensor], Any], images: int) -> Any:
        """Do ``work`` on a batch, as a step would."""
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

    def _position(self) -> str:
        return f"step {self.step:,} of {self.steps:,}"

    def _progress_text(self, loss: float) -> str:
        found = self.best.latest
        validated = "" if found is None else f" · validation {self.measure} {found.accuracy:.1%}"
        return f"step {self.step:,}/{self.steps:,} · loss {loss:.3f}{validated}"

    def _outcome(self, chosen: dict[str, Any]) -> str:
        if not chosen:
            return f"trained for {self.steps:,} steps"
        early = f", ended after {self.step:,}" if self.step < self.steps else ""
        return (
            f"step {chosen['best_step']:,} of {self.steps:,} was best{early} ({self.measure} "
            f"{chosen['validation_score']:.1%} on {chosen['validation_images']:,} validation images)"
        )

    def _rate_option(self) -> str:
        return f"--lr (now {self.recipe.lr:g})"


def mask_padding(images: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
    """Images [b c h w] with zeros outside of their own (h, w), whatever the padding was."""
    rows = torch.arange(images.shape[-2], device=images.device)[None, :, None]
    columns = torch.arange(images.shape[-1], device=images.device)[None, None, :]
    own = torch.tensor(sizes, device=images.device)
    inside = (rows < own[:, 0, None, None]) & (columns < own[:, 1, None, None])
    return images * inside[:, None]


def rate_schedule(optimizer: torch.optim.Optimizer, recipe: ResolvedDenseRecipe) -> Any:
    """The learning rate of each step. It never is 0: of the linear decay there is one step more than is made."""
    warmup = min(recipe.warmup_steps, recipe.steps - 1)
    if recipe.decay == "steps":
        # timm lowers the rate at the number before a drop, and updates count from 1: as many have the rate before it
        drops = [round(share * recipe.steps) + 2 for share in recipe.drops]
        return MultiStepLRScheduler(optimizer, drops, 0.1, warmup_t=warmup, warmup_prefix=False, t_in_epochs=False)
    total = recipe.steps - warmup + 1
    return PolyLRScheduler(optimizer, total, power=1.0, warmup_t=warmup, warmup_prefix=True, t_in_epochs=False)


# A trained model's answers to annotated images, which several processes find together.


A = TypeVar("A")


def predict_images(
    model: OnEncoder,
    images: Annotated[T],
    settings: EvalSettings,
    answer: Callable[[int, Tensor, torch.device, bool], A],
    *,
    precision: Precision = "auto",
    half: bool | None = None,
    what: str = "",
) -> list[A | None]:
    """Ask a model about every image; several processes take turns, and all must ask.

    Args:
        model: is moved to the device, and put into eval mode.
        images: annotated.
        settings: the device.
        answer: to image number i, of which it is given the number, the pixels [c h w], the device, and whether to
            compute in bfloat16.
        precision: of matrix products, unless ``half`` says it.
        half: whether they are in bfloat16.
        what: is being done, in a line of progress; there is none without it.
    """
    device = settings.torch_device
    model.to(device).eval()
    if half is None:
        half = runs_in_bfloat16(device, precision)
    found: list[tuple[int, A]] = []
    turns = range(rank(), len(images), world())
    for i in track_progress(turns, len(turns), what):
        try:
            image = to_channels(images.images.read(i), model.channels)
        except Unreadable:
            continue
        found.append((i, answer(i, image, device, half)))
    by_image = dict(collected(found))
    return [by_image.get(i) for i in range(len(images))]
