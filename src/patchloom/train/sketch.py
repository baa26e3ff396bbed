"""What a step would take of memory and work, counted without numbers, so that nothing of it is taken yet."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from patchloom.errors import PatchloomError
from patchloom.nets.build import outline
from patchloom.nets.performance import kept_bytes, patches_of
from patchloom.runs.settings import Settings
from patchloom.runs.task import prepare_task, unknown_stats
from patchloom.tasks.task import Task
from patchloom.train.step import autocast

_SMALL = 64  # pixels of the images that tell how many views there are


class Sizes(NamedTuple):
    """Of a task, in bytes.

    Attributes:
        weights: all of them, and the tables that belong to the task.
        trained: of the weights that have a gradient and two moments.
        checkpoint: of its file, once there are moments.
        encoder: of the encoder's file.
    """

    weights: int
    trained: int
    checkpoint: int
    encoder: int

    @classmethod
    def of(cls, task: Task) -> Sizes:
        """Those of a task, with numbers or without."""
        trained = _bytes(weight for weight in task.parameters() if weight.requires_grad)
        stored = _bytes(task.state_dict().values()) + 2 * trained
        encoder = _bytes(task.encoder.state_dict().values())
        return cls(_bytes([*task.parameters(), *task.buffers()]), trained, stored, encoder)

    @property
    def state(self) -> int:
        """Bytes in memory that do not depend on the number of images: weights, gradients and moments."""
        return self.weights + 3 * self.trained


class Sketch(NamedTuple):
    """What a step takes.

    Attributes:
        images: of the step, in one process.
        sizes: of the task.
        pixels: bytes of the images, 8 bits each.
        activations: bytes that are kept for the way back; None where they could not be counted.
        flops: operations of the step's matrix products, there and back; None likewise.
    """

    images: int
    sizes: Sizes
    pixels: int
    activations: int | None
    flops: float | None

    def least(self, images: int | None = None) -> float:
        """Bytes that are in memory together when the way back begins, with so many images or with all."""
        share = 1.0 if images is None else images / self.images
        return self.sizes.state + share * (self.pixels + (self.activations or 0))

    @property
    def likely(self) -> float:
        """Bytes with what is in use for a moment: pixels as numbers, and a quarter more than is kept."""
        return self.sizes.state + 5 * self.pixels + 1.25 * (self.activations or 0)


def upper(settings: Settings, images: int) -> float:
    """Bytes that a step of ``images`` hardly exceeds, from the encoder's outline alone, which takes no time."""
    vit = outline(settings.encoder_spec())
    h, w = settings.img_size
    tokens = patches_of(vit)
    weights = sum(weight.numel() for weight in vit.parameters())
    tables = 2 * tokens**2  # of distances between any two places
    pixels = 4 * images * settings.channels * h * w
    return 4.0 * (16 * weights + tables + pixels) + 2 * kept_bytes(vit, images, settings.attention == "fused")


def sketch(settings: Settings, images: int) -> Sketch:
    """Count what a step of resolved ``settings`` takes in a process that has ``images`` of it.

    Tensors have shapes here and no numbers, so that it takes seconds for any size.

    Raises:
        PatchloomError: the settings do not fit each other; as `prepare_task`.
    """
    c = settings.channels
    plain = replace(settings, kernels="torch")  # native ones need numbers, and keep no less
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # that tensors without numbers were not given any
        with torch.device("meta"):
            task = prepare_task(plain, unknown_stats(c)).train()
        sizes, views = Sizes.of(task), _views(task, c)
        activations, flops = _counted(task, plain, images, views)
    h, w = task.augment.size
    return Sketch(images, sizes, images * views * c * h * w, activations, flops)


def _views(task: Task, channels: int) -> int:
    """How many views the task's augmentation makes of an image."""
    augment = copy.copy(task.augment)
    augment.size = (_SMALL, _SMALL)
    return len(augment(torch.zeros(channels, _SMALL, _SMALL, dtype=torch.uint8), np.random.default_rng(0)))


def _counted(task: nn.Module, settings: Settings, images: int, views: int) -> tuple[int | None, float | None]:
    """Bytes of activations and operations of a step; None where the task does what cannot be done without numbers."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            task.to_empty(device="cpu")
            own = {one.untyped_storage()._cdata for one in (*task.parameters(), *task.buffers())}
            kept: dict[int, int] = {}

            def keep(value: Tensor) -> Tensor:
                storage = value.untyped_storage()
                if storage._cdata not in own:
                    kept[storage._cdata] = storage.nbytes()
                alive.append(value)  # else a later one may have its place
                return value

            alive: list[Tensor] = []
            shape = images, settings.channels, *task.augment.size
            counter = FlopCounterMode(display=False, custom_mapping=_FUSED)
            with saved_tensors_hooks(keep, lambda value: value), counter:
                with autocast("cpu", settings.precision):
                    loss = task(*(torch.zeros(shape) for _ in range(views)), progress=0.5).loss
                there = sum(kept.values())  # the way back may keep more, to compute activations again
                loss.backward()  # there is none through teachers, nor through blocks that stay as they are
            return there, float(counter.get_total_flops())
    except PatchloomError:
        raise
    except Exception:  # a task of the user's own may do anything; then nothing is known, and nothing is said
        return None, None


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of the fused kernel on a CPU; from shapes [b h n d]."""
    b, h, n, d = query
    return 2 * b * h * n * key[2] * (d + value[3])


def _attention_back_flops(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of its way back, which multiplies queries and keys once more."""
    b, h, n, d = query
    return 2 * b * h * n * key[2] * (3 * d + 2 * value[3])


# torch's counter does not know them
_FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_back_flops,
}


def _bytes(tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
