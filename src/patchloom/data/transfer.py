"""Batches and their transfer to the device, which overlaps with its work on earlier ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patchloom.data.colors import ColorPlan, recolor
from patchloom.data.sound.features import pictures
from patchloom.sound import Sound


class Batch(NamedTuple):
    """A batch of images.

    Attributes:
        views: each uint8 [b c h w], or float32 in [0, 1] if any image of the batch has more than 8 bits; of recordings
            int16 [b 1 1 n].
        indices: int64 [b], of the images in the source; always on the CPU.
        unreadable: names of images that could not be read on the way.
        colors: for each view the colour changes that `recolor` has still to apply, or None.
        truths: of each image what its annotation became with its views; always on the CPU; () without annotations.
        sound: how recordings become pictures, which they still are to become; None of images.
    """

    views: tuple[Tensor, ...]
    indices: Tensor
    unreadable: list[str]
    colors: tuple[ColorPlan, ...] | None = None
    truths: tuple[Any, ...] = ()
    sound: Sound | None = None

    def on(self, device: torch.device | str) -> Batch:
        """The same with its views on a device; recordings become pictures, and changed colours float32 in [0, 1].

        Pixels and samples are copied before the conversion, asynchronously.
        """
        views = tuple(view.to(device, non_blocking=True) for view in self.views)
        if self.colors is not None:
            views = tuple(recolor(view, plan.to(device)) for view, plan in zip(views, self.colors, strict=True))
        if self.sound is not None:
            views = tuple(pictures(view, self.sound) for view in views)
        return self._replace(views=views, colors=None, sound=None)

    def first(self, count: int) -> Batch:
        """The first ``count`` images."""
        if count == len(self.indices):
            return self
        colors = None if self.colors is None else tuple(plan.first(count) for plan in self.colors)
        return self._replace(
            views=tuple(view[:count] for view in self.views),
            indices=self.indices[:count],
            colors=colors,
            truths=self.truths[:count],
        )


class Arriving(Iterator[Batch]):
    """Batches on a device. Copies to a GPU run on a CUDA stream of their own, while it computes on earlier batches.

    Args:
        batches: on the CPU; in pinned memory if they go to a GPU.
        device: where they go.
    """

    def __init__(self, batches: Iterator[Batch], device: torch.device | str) -> None:
        self.batches, self.device = batches, torch.device(device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.coming: Batch | None = None

    def send(self) -> None:
        """Start copying the next batch, unless one is being copied. Call it when the device has work queued.

        Raises:
            PatchloomError: the batch cannot be read.
        """
        if self.coming is None and (batch := next(self.batches, None)) is not None:
            with torch.cuda.stream(self.stream):  # without a stream this does nothing
                self.coming = batch.on(self.device)

    def close(self) -> None:
        """Drop the batches, which ends the processes that read."""
        self.batches, self.coming = iter(()), None

    def __next__(self) -> Batch:
        self.send()
        if self.coming is None:
            raise StopIteration
        batch, self.coming = self.coming, None
        if self.stream is not None:
            working = torch.cuda.current_stream(self.device)
            working.wait_stream(self.stream)  # the stream waits, not the program
            for view in batch.views:
                view.record_stream(working)  # otherwise its memory could be reused while it is read
        return batch
