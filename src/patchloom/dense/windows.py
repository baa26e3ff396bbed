"""Predictions of a segmenter for images of any size, at their original resolution.

Letters: c channels, h w height and width of the image, k classes, h' w' of the model's logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.stats import normalize
from patchloom.dense.augment import fill_up, fit_for_test, resized_for_test, to_original
from patchloom.dense.detector import Detector, paste_masks
from patchloom.dense.metrics import DetectedObjects, run_lengths
from patchloom.dense.segmenter import SegmentLogits
from patchloom.dense.training import mask_padding

_STRIDE = 2 / 3  # of a window's side, from one to the next, as in mmseg (341 of 512 pixels)
AT_ONCE = 8  # windows
BAND = 2**24  # logits of a band that are in memory at once, each of 4 bytes


class Segments(Protocol):
    """A model that gives each place of an image a class: `Segmenter`, or the baseline of pixels."""

    @property
    def size(self) -> tuple[int, int]: ...
    def __call__(self, images: Tensor) -> SegmentLogits: ...


class _Window(NamedTuple):
    """Logits [k h' w'] of a window whose top left is at (top, left)."""

    top: int
    left: int
    logits: Tensor


@torch.inference_mode()
def segment_image(
    model: Segments,
    image: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    side: int | None,
    device: torch.device | str = "cpu",
    half: bool = False,
) -> Tensor:
    """Return the class of each pixel, int16 [h w], on the CPU.

    The shorter side of the image is resized to ``side``, unless that is None. The image is processed in windows of the
    model's size, which overlap by a third; overlapping logits are averaged. The logits are resized to the original size
    before the best class is taken. An image smaller than a window is padded with its mean colour, as in training.

    Args:
        model: model on the device, in eval mode.
        image: [c h w], uint8 or float in [0, 1], with the channels of the model.
        mean, std: statistics that normalise images.
        side: shorter side in pixels; None: no resizing.
        device: device of the model.
        half: whether matrix products are in bfloat16.
    """
    device, own = torch.device(device), (int(image.shape[1]), int(image.shape[2]))
    resized = image if side is None else resized_for_test(image, side)
    there = (int(resized.shape[1]), int(resized.shape[2]))
    padded = fill_up(resized, model.size)
    whole = (int(padded.shape[1]), int(padded.shape[2]))
    places = [(top, left) for top in starts(whole[0], model.size[0]) for left in starts(whole[1], model.size[1])]
    found: list[_Window] = []
    for some in (places[i : i + AT_ONCE] for i in range(0, len(places), AT_ONCE)):
        cut = [padded[:, top : top + model.size[0], left : left + model.size[1]] for top, left in some]
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logits = model(normalize(torch.stack(cut).to(device), mean, std)).main
        found += [_Window(*place, one) for place, one in zip(some, logits.float(), strict=True)]
    best = [band.argmax(0).to(torch.int16).cpu() for band in _bands(found, model.size, there, own)]
    return torch.cat(best)


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
        above, below, share = _between(there[0], own[0], torch.arange(first, last))
        top, end = int(above[0]), int(below[-1]) + 1
        mean = _mean_of(windows, size, top, end, there[1])
        share = share[:, None].to(mean)
        rows = mean[:, above - top] * (1 - share) + mean[:, below - top] * share
        yield _resized(rows, own[1])


def _mean_of(windows: Sequence[_Window], size: tuple[int, int], first: int, last: int, width: int) -> Tensor:
    """The mean logits [k rows width] in rows ``first`` to ``last`` of the resized image."""
    one = windows[0].logits
    total = one.new_zeros(len(one), last - first, width)
    count = one.new_zeros(last - first, width)
    for top, left, logits in windows:
        begin, end, right = max(first, top), min(last, top + size[0]), min(width, left + size[1])
        if begin >= end or left >= right:
            continue
        above, below, share = _between(logits.shape[1], size[0], torch.arange(begin - top, end - top))
        share = share[:, None].to(logits)
        rows = _resized(logits[:, above] * (1 - share) + logits[:, below] * share, size[1])
        total[:, begin - first : end - first, left:right] += rows[..., : right - left]
        count[begin - first : end - first, left:right] += 1
    return total / count


def _between(length: int, becomes: int, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two rows of ``length`` mixed for each row of ``becomes``, and the weight of the second one."""
    at = ((places.double() + 0.5) * length / becomes - 0.5).clamp(0, length - 1)
    first = at.floor().long()
    return first, (first + 1).clamp(max=length - 1), at - first


def _resized(rows: Tensor, width: int) -> Tensor:
    """Logits [k rows w'] that are ``width`` wide."""
    return rows if rows.shape[2] == width else F.interpolate(rows[None], (rows.shape[1], width), mode="bilinear")[0]


@torch.inference_mode()
def detect_image(
    model: Detector,
    image: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | str = "cpu",
    half: bool = False,
    score: float = 0.05,
) -> DetectedObjects:
    """The objects of at least a ``score`` in an image, in its own pixels.

    The image is resized so that it just fits into what the model is given, or to the model's sides, as `fit_for_test`
    has it.

    Args:
        model: on the device, in eval mode.
        image: [c h w], uint8 or float in [0, 1], of the model's channels.
        mean, std: with which images are normalised.
        device: where the model is.
        half: whether products are taken in bfloat16.
        score: the lowest.
    """
    device, own = torch.device(device), (int(image.shape[1]), int(image.shape[2]))
    canvas, factor, fitted = fit_for_test(image, model.size, model.sides)
    model.least_score = score
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        (found,) = model(mask_padding(normalize(canvas[None].to(device), mean, std), [fitted]), [fitted])
    kept = (found.scores >= score).cpu()
    boxes = to_original(found.boxes.float().cpu()[kept], factor, own)
    labels, scores = found.labels.cpu()[kept], found.scores.float().cpu()[kept]
    masks = None
    if found.masks is not None:
        # a mask of the whole image each, so not all of them at once
        small = found.masks.float().cpu()[kept]
        masks = tuple(
            one for i in range(len(boxes)) for one in run_lengths(paste_masks(small[i : i + 1], boxes[i : i + 1], own))
        )
    return DetectedObjects(boxes, labels, scores, masks).above(score)
