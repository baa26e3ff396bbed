"""Batches and their way to the device that works on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from patchloom.data.colors import ColorPlan, recolor


class Batch(NamedTuple):
    """Images as the processes that read make them, or as a device gets them.

    views: each uint8 [b c h w], or float32 in [0, 1] if any image of the batch is deep. indices: int64 [b], where in
    the source the images are; always on the CPU. unreadable: what could not be read on the way, by name. colors: for
    each view what `recolor` has still to do, or None.
    """

    views: tuple[Tensor, ...]
    indices: Tensor
    unreadable: list[str]
    colors: tuple[ColorPlan, ...] | None = None

    def on(self, device: torch.device | str) -> Batch:
        """The same with its views on a device, and their colours changed if they shall be: float32 in [0, 1] then.

        The copies are of bytes, and nobody waits for them.
        """
        views = tuple(view.to(device, non_blocking=True) for view in self.views)
        if self.colors is not None:
            views = tuple(recolor(view, plan.to(device)) for view, plan in zip(views, self.colors, strict=True))
        return self._replace(views=views, colors=None)

    def first(self, count: int) -> Batch:
        """The first ``count`` images."""
        if count == len(self.indices):
            return self
        colors = None if self.colors is None else tuple(plan.first(count) for plan in self.colors)
        return self._replace(
            views=tuple(view[:count] for view in self.views), indices=self.indices[:count], colors=colors
        )


class Arriving(Iterator[Batch]):
    """Batches on a device. To a GPU they travel on a stream of their own, while it works at what came before.

    Args:
        batches: as the processes that read make them; in pinned memory if they go to a GPU.
        device: where they go.
    """

    def __init__(self, batches: Iterator[Batch], device: torch.device | str):
        self.batches, self.device = batches, torch.device(device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.coming: Batch | None = None

    def send(self) -> None:
        """Send the next batch on its way, unless one is: to be called when the device has work to do.

        Raises:
            PatchloomError: what reading it raises.
        """
        if self.coming is None and (batch := next(self.batches, None)) is not None:
            with torch.cuda.stream(self.stream):  # of no stream it is nothing
                self.coming = batch.on(self.device)

    def close(self) -> None:
        """Let go of the batches, and so of the processes that read."""
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
                view.record_stream(working)  # else its memory could be given away while it is read
        return batch
