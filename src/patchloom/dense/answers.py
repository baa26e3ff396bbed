"""Answers of trained segmenters and detectors to pictures, which worker processes read ahead.

Letters: b batch, c channels, h w height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from patchloom.data.decode import Unreadable
from patchloom.data.loader import prepared
from patchloom.data.stats import normalize
from patchloom.dense.annotations.base import Annotated, T
from patchloom.dense.augment import fill_up, fit_for_test, resized_for_test, to_original
from patchloom.dense.detector import Detections, Detector, paste_masks
from patchloom.dense.metrics import DetectedObjects, run_lengths
from patchloom.dense.segmenter import PixelSegmenter, Segmenter
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


# Predictions of a segmenter for images of any size, at their original resolution.

_STRIDE = 2 / 3  # of a window's side, from one to the next, as in mmseg (341 of 512 pixels)
AT_ONCE = 8  # windows
BAND = 2**24  # logits of a band that are in memory at once, each of 4 bytes


class _Window(NamedTuple):
    """Logits [k h' w'] of a window whose top left is at (top, left)."""

    top: int
    left: int
    logits: Tensor


def segment_image(
    model: Segmenter | PixelSegmenter,
    image: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    side: int | None,
    device: torch.device | str = "cpu",
    half: bool = False,
) -> Tensor:
    """Return the class of each pixel, int16 [h w], on the CPU; arguments as in `segment_images`."""
    (answer,) = segment_images(model, [image], mean, std, side, device, half)
    return answer.cpu()


@torch.inference_mode()
def segment_images(
    model: Segmenter | PixelSegmenter,
    images: Sequence[Tensor],
    mean: Sequence[float],
    std: Sequence[float],
    side: int | None,
    device: torch.device | str = "cpu",
    half: bool = False,
) -> list[Tensor]:
    """Return the class of each pixel of each image, int16 [h w], on the device, without waiting for it.

    The shorter side of an image is resized to ``side``, unless that is None. The image is processed in windows of the
    model's size, which overlap by a third; overlapping logits are averaged. The logits are resized to the original size
    before the best class is taken. An image smaller than a window is padded with its mean colour, as in training.

    Args:
        model: model on the device, in eval mode.
        images: [c h w] of any sizes, all uint8 or all float in [0, 1], with the channels of the model.
        mean, std: statistics that normalise images.
        side: shorter side in pixels; None: no resizing.
        device: device of the model.
        half: whether matrix products are in bfloat16.
    """
    device = torch.device(device)
    resized = [image if side is None else resized_for_test(image, side) for image in images]
    padded = [fill_up(one, model.size).to(device, non_blocking=True) for one in resized]
    places = [
        (i, top, left)
        for i, one in enumerate(padded)
        for top in starts(one.shape[1], model.size[0])
        for left in starts(one.shape[2], model.size[1])
    ]
    found: list[list[_Window]] = [[] for _ in images]
    answers: list[Tensor] = []
    for some in (places[i : i + AT_ONCE] for i in range(0, len(places), AT_ONCE)):
        cut = [padded[i][:, top : top + model.size[0], left : left + model.size[1]] for i, top, left in some]
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logits = model(normalize(torch.stack(cut), mean, std)).main
        for (i, top, left), one in zip(some, logits.float(), strict=True):
            found[i].append(_Window(top, left, one))
        done = len(images) if some[-1] == places[-1] else some[-1][0]  # of the last one, windows may be missing
        for i in range(len(answers), done):
            there, own = ((int(one.shape[1]), int(one.shape[2])) for one in (resized[i], images[i]))
            answers.append(
                torch.cat([one.argmax(0).to(torch.int16) for one in _bands(found[i], model.size, there, own)])
            )
            found[i].clear()
    return answers


def starts(length: int, window: int) -> list[int]:
    """Return the starts of windows along a side: two thirds of a window apart, the last one at the end of the side."""
    stride = max(1, int(_STRIDE * window))
    return [min(i * stride, length - window) for i in range(math.ceil(max(0, length - window) / stride) + 1)]


def _bands(
    windows: Sequence[_Window], size: tuple[int, int], there: tuple[int, int], own: tuple[int, int]
) -> Iterator[Tensor]:
    """The logits [k rows w] of an image, some of its rows after others: all at once may not fit into memory."""
    classes = len(windows[0].logits)
    step = max(1, int(BAND / (classes * max(own[1], there[1], size[1]) * max(1, there[0] / own[0]))))
    for first in range(0, own[0], step):
        last = min(own[0], first + step)
        rows = _Rows.between(there[0], own[0], first, last)
        top, end = int(rows.above[0]), int(rows.below[-1]) + 1
        total = windows[0].logits.new_zeros(classes, end - top, there[1])
        count = total.new_zeros(end - top, there[1])
        for above, left, logits in windows:
            begin, until, right = max(top, above), min(end, above + size[0]), min(there[1], left + size[1])
            if begin >= until or left >= right:
                continue
            part = _Rows.between(logits.shape[1], size[0], begin - above, until - above).of(logits)
            total[:, begin - top : until - top, left:right] += _resized(part, size[1])[..., : right - left]
            count[begin - top : until - top, left:right] += 1
        yield _resized(rows.of(total / count, top), own[1])


class _Rows(NamedTuple):
    """Two rows that are mixed for each row of an enlarged map, and the weight of the second one."""

    above: Tensor
    below: Tensor
    share: Tensor

    @classmethod
    def between(cls, length: int, becomes: int, first: int, last: int) -> _Rows:
        """Return the rows of ``length`` for rows ``first`` to ``last`` of ``becomes``."""
        at = ((torch.arange(first, last).double() + 0.5) * length / becomes - 0.5).clamp(0, length - 1)
        above = at.floor().long()
        return cls(above, (above + 1).clamp(max=length - 1), at - above)

    def of(self, maps: Tensor, top: int = 0) -> Tensor:
        """Mix the rows of maps [k h w], which begin at row ``top``."""
        above, below = (one.to(maps.device, non_blocking=True) - top for one in (self.above, self.below))
        share = self.share[:, None].to(maps.dtype).to(maps.device, non_blocking=True)
        return maps[:, above] * (1 - share) + maps[:, below] * share


def _resized(rows: Tensor, width: int) -> Tensor:
    """Logits [k rows w'] that are ``width`` wide."""
    return rows if rows.shape[2] == width else F.interpolate(rows[None], (rows.shape[1], width), mode="bilinear")[0]


class Fit(NamedTuple):
    """Factor by which `fit_for_test` brought an image to the canvas of a detector, and the image's own size (h, w)."""

    factor: float
    own: tuple[int, int]

    def detected(self, found: Detections, score: float) -> DetectedObjects:
        """Return the objects of at least a ``score`` in pixels of the image itself, on the CPU."""
        kept = (found.scores >= score).cpu()
        boxes = to_original(found.boxes.float().cpu()[kept], self.factor, self.own)
        labels, scores = found.labels.cpu()[kept], found.scores.float().cpu()[kept]
        masks = None
        if found.masks is not None:
            # a mask of the whole image each, so not all of them at once
            small = found.masks.float().cpu()[kept]
            pasted = (paste_masks(small[i : i + 1], boxes[i : i + 1], self.own) for i in range(len(boxes)))
            masks = tuple(one for each in pasted for one in run_lengths(each))
        return DetectedObjects(boxes, labels, scores, masks).above(score)


@torch.inference_mode()
def detect_images(
    model: Detector,
    images: Sequence[Tensor],
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | str = "cpu",
    half: bool = False,
    score: float = 0.05,
) -> list[tuple[Detections, Fit]]:
    """Detect objects of at least a ``score`` in images [c h w], which are resized by `fit_for_test`.

    The answers stay on the device, and the `Fit` of each brings them to the pixels of its image. Other arguments are
    those of `segment_images`.
    """
    device = torch.device(device)
    canvases, factors, fitted = zip(*(fit_for_test(one, model.size, model.sides) for one in images), strict=True)
    model.least_score = score
    batch = torch.stack(canvases).to(device, non_blocking=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        found = model(mask_padding(normalize(batch, mean, std), [*fitted]), [*fitted])
    own = [(int(one.shape[1]), int(one.shape[2])) for one in images]
    return list(zip(found, map(Fit, factors, own), strict=True))
