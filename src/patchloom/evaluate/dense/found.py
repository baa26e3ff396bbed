"""What a detector found in an image, and its masks as run lengths: a mask of 4 megapixels takes a kilobyte then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.data.annotated.base import Objects
from patchloom.errors import PatchloomError
from patchloom.hints import pip_install

# COCO's compressed run lengths: {"size": [h, w], "counts": bytes}
RunLengths = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """The objects that were found in an image, in its own pixels. Letter: m objects.

    Attributes:
        boxes: float32 [m 4], x0 y0 x1 y1, x1 and y1 exclusive.
        labels: int64 [m], numbers of classes, from 0.
        scores: float32 [m], in [0, 1].
        masks: m run lengths; None of a detector without masks.
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    masks: tuple[RunLengths, ...] | None = None

    def __len__(self) -> int:
        return len(self.boxes)

    def above(self, score: float) -> Found:
        """Those of at least this score, the surest first."""
        order = self.scores.argsort(descending=True, stable=True)
        kept = order[self.scores[order] >= score]
        masks = None if self.masks is None else tuple(self.masks[i] for i in kept.tolist())
        return Found(self.boxes[kept], self.labels[kept], self.scores[kept], masks)

    def objects(self, size: tuple[int, int]) -> Objects:
        """The same without scores, with the masks decoded for an image of ``size`` (h, w), to be drawn.

        Raises:
            PatchloomError: as `coco_tool`.
        """
        masks = None if self.masks is None else from_run_lengths(self.masks, size)
        return Objects(self.boxes, self.labels, masks, torch.zeros(len(self), dtype=torch.bool))


def coco_tool(name: str) -> Any:
    """A module of faster-coco-eval, which has COCO's scores and run lengths.

    Raises:
        PatchloomError: it is not installed.
    """
    try:
        return import_module(f"faster_coco_eval.core.{name}")
    except ImportError as problem:
        raise PatchloomError(
            "detection is scored, and its masks are written, by faster-coco-eval, which is not here: "
            + pip_install("dense")
        ) from problem


def run_lengths(masks: Tensor) -> tuple[RunLengths, ...]:
    """Masks bool [m h w] as run lengths.

    Raises:
        PatchloomError: as `coco_tool`.
    """
    if not len(masks):
        return ()
    columns = np.asfortranarray(masks.cpu().numpy().transpose(1, 2, 0).astype(np.uint8))
    return tuple(coco_tool("mask").encode(columns))


def from_run_lengths(masks: Sequence[RunLengths], size: tuple[int, int]) -> Tensor:
    """Run lengths of masks of an image of ``size`` (h, w) as bool [m h w].

    Raises:
        PatchloomError: as `coco_tool`.
    """
    if not masks:
        return torch.zeros(0, *size, dtype=torch.bool)
    columns = coco_tool("mask").decode(list(masks))
    return torch.from_numpy(np.ascontiguousarray(columns.transpose(2, 0, 1))).bool()
