"""The batches of a run: of as many images in every process, and of enough for the task."""

from __future__ import annotations

from collections.abc import Iterator

from patchloom.data import Batch
from patchloom.errors import PatchloomError, Told
from patchloom.processes import smallest, world
from patchloom.tasks import check_images
from patchloom.train.settings import Settings


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
        batch, problem = None, None
        try:
            batch = next(batches, None)
            if batch is None:
                return
        except PatchloomError as error:  # the others are told: they would wait for this process
            problem = error
        fewest = smallest(0 if batch is None else len(batch.indices))
        if problem is not None:
            raise problem
        if not fewest:
            raise Told("another process cannot read its images")
        if fewest < each:
            check_images(settings.task, settings.batch_size, fewest * world())
        yield batch.first(fewest)
