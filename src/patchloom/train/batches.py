"""The batches of a run: of as many images in every process, and of enough for the task."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from patchloom.data import Arriving, Batch, RandomCrop, Source, training_batches
from patchloom.errors import AlreadyReported, PatchloomError
from patchloom.processes import rank, smallest, world
from patchloom.runs.settings import Settings
from patchloom.tasks import check_images


def batches_of(
    source: Source,
    augment: RandomCrop,
    settings: Settings,
    each: int,
    first: int,
    steps: int,
    device: torch.device,
) -> Arriving:
    """This process's batches from step ``first`` to the end, on their way to ``device``.

    What is in a batch follows from the seed and the number of its step alone, and does not depend on how many processes
    share it.

    Args:
        source: the training images.
        augment: makes the views of an image.
        settings: resolved.
        each: images of a whole batch in each process.
        first: the step (from 0) whose batch comes first.
        steps: of the whole training.
        device: where the batches are needed.
    """
    even = partial(evened, settings=settings, each=each)
    shape = settings.workers, settings.channels
    return training_batches(source, augment, each, settings.seed, first, steps, *shape, rank(), world(), device, even)


def evened(batches: Iterator[Batch], settings: Settings, each: int) -> Iterator[Batch]:
    """``batches`` of a process, in every one cut to as many images as the one has that could read fewest.

    So gradients are averaged with equal weights, and what joins images (negatives, batch norm, shared draws) fits
    together.

    Args:
        batches: of this process; others than ``each`` images only where too few can be read.
        settings: resolved.
        each: images of a whole batch.

    Raises:
        PatchloomError: images cannot be read, or too few for the task; in the other processes `AlreadyReported`, or
            the same.
    """
    while True:
        try:
            batch = next(batches, None)
        except PatchloomError:
            smallest(0)  # the others learn of it: they would wait for this process
            raise
        if batch is None:
            return
        fewest = smallest(len(batch.indices))
        if not fewest:
            raise AlreadyReported("another process cannot read its images")
        if fewest < each:
            check_images(settings.task, settings.batch_size, fewest * world())
        yield batch.first(fewest)
