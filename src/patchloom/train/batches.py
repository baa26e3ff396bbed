"""The batches of a run: of as many images in every process, and of enough for the task."""

from __future__ import annotations

from collections.abc import Iterator

from patchloom.data import Batch
from patchloom.errors import PatchloomError, Told
from patchloom.processes import smallest, world
from patchloom.runs.settings import Settings
from patchloom.tasks import check_images


def evened(batches: Iterator[Batch], settings: Settings, each: int) -> Iterator[Batch]:
    """``batches`` of a process, in every one cut to as many images as the one has that could read fewest.

    So gradients are averaged with equal weights, and what joins images (negatives, batch norm, shared draws) fits
    together.

    Args:
        batches: of this process; others than ``each`` images only where too few can be read.
        settings: resolved.
        each: images of a whole batch.

    Raises:
        PatchloomError: images cannot be read, or too few for the task; in the other processes `Told`, or the same.
    """
    while True:
        try:
            batch = next(batches, None)
        except PatchloomError:
            smallest(0)  # the others are told: they would wait for this process
            raise
        if batch is None:
            return
        fewest = smallest(len(batch.indices))
        if not fewest:
            raise Told("another process cannot read its images")
        if fewest < each:
            check_images(settings.task, settings.batch_size, fewest * world())
        yield batch.first(fewest)
