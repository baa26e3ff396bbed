"""Answers of trained segmenters and detectors to pictures, which worker processes read ahead.

Letters: b batch, c channels, h w height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from patchloom.data.decode import Unreadable
from patchloom.data.loader import prepared
from patchloom.dense.annotations.base import Annotated, T
from patchloom.dense.segmenter import PixelSegmenter
from patchloom.display import track_progress
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import results_ahead, runs_in_bfloat16
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.heads import OnEncoder
from patchloom.options.evaluate import Precision
from patchloom.system.distributed import collected, rank, world

_AT_ONCE = 8  # pictures on a GPU; a CPU is as fast with one


class ReadPicture(NamedTuple):
    """Picture [c h w] of any size, or None if it cannot be read, with its number in a source and perhaps annotation."""

    number: int
    image: Tensor | None
    truth: Any = None


@dataclass
class Pictures(Dataset[ReadPicture | PatchloomError]):
    """Data set of pictures by their numbers; ``read`` is `Source.read_as`, and ``truth`` reads an annotation."""

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
    """Yield the readable ones of ``pictures``, each with its answer on the CPU; ``what`` is the line of progress.

    ``answer`` is given several images of one dtype, and does not wait for a GPU.
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
    what: str = "",
) -> list[A | None]:
    """Apply a model to every image; None for unreadable ones. Processes take turns, and all must call it.

    ``answer`` is that of `answered`, given the device and whether to compute in bfloat16, too; ``finish`` is applied to
    its result on the CPU. ``truth`` reads the annotation with the picture.
    """
    device = settings.torch_device
    model.to(device).eval()
    half = runs_in_bfloat16(device, precision)
    turns = range(rank(), len(images), world())
    pictures = Pictures(images.images.read_as, model.channels, turns, images.truth if truth else None)
    workers = settings.workers_for(images.images, len(turns))
    each = answered(pictures, lambda some: answer(some, device, half), device, workers, what)
    by_image = dict(collected([(picture.number, finish(picture, found)) for picture, found in each]))
    return [by_image.get(i) for i in range(len(images))]


def mask_padding(images: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
    """Set the padding of images [b c h w] to zero, outside of each (h, w)."""
    rows = torch.arange(images.shape[-2], device=images.device)[None, :, None]
    columns = torch.arange(images.shape[-1], device=images.device)[None, None, :]
    own = torch.tensor(sizes).to(images.device, non_blocking=True)
    inside = (rows < own[:, 0, None, None]) & (columns < own[:, 1, None, None])
    return images * inside[:, None]
