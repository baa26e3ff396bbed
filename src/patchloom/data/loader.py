"""Batches as a pure function of the step, so that a resumed run continues with the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from patchloom.data.augment import ColorPlan, ImagePart, plan_colors, recolor
from patchloom.data.decode import Unreadable
from patchloom.data.modality import IMAGES
from patchloom.data.parts import PackedParts, pixels_sent
from patchloom.data.source import Source
from patchloom.data.workers import in_workers
from patchloom.errors import PatchloomError

# Batches and their transfer to the device, which overlaps with computation on earlier batches.


class Batch(NamedTuple):
    """A batch of images.

    Attributes:
        views: each uint8 [b c h w], or float32 in [0, 1] if any image of the batch has more than 8 bits, or for
            pictures made from other items. Before that, the items themselves, such as int16 [b 1 1 n].
        indices: int64 [b], of the images in the source; always on the CPU.
        unreadable: names of images that could not be read while the batch was made.
        colors: colour changes for each view that `recolor` has still to apply, or None.
        truths: annotation of each image, changed like its views; always on the CPU; () without annotations.
        parts: parts of the images that `on` has still to resize to views, while there are none; for each view.
    """

    views: tuple[Tensor, ...]
    indices: Tensor
    unreadable: list[str]
    colors: tuple[ColorPlan, ...] | None = None
    truths: tuple[Any, ...] = ()
    parts: tuple[PackedParts, ...] = ()

    def on(self, device: torch.device | str) -> Batch:
        """Return the batch with its views on a device; changed colours are float32 in [0, 1].

        Pixels are copied before the conversion, asynchronously.
        """
        views = tuple(view.to(device, non_blocking=True) for view in self.views)
        views = tuple(part.on(device) for part in self.parts) or views
        if self.colors is not None:
            views = tuple(recolor(view, plan.to(device)) for view, plan in zip(views, self.colors, strict=True))
        return self._replace(views=views, colors=None, parts=())

    def pictured(self, pictures: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with its views converted to pictures by a source's function."""
        return self._replace(views=tuple(map(pictures, self.views)))

    def first(self, count: int) -> Batch:
        """Return the first ``count`` images."""
        if count == len(self.indices):
            return self
        colors = None if self.colors is None else tuple(plan.first(count) for plan in self.colors)
        return self._replace(
            views=tuple(view[:count] for view in self.views),
            indices=self.indices[:count],
            colors=colors,
            truths=self.truths[:count],
            parts=tuple(part.first(count) for part in self.parts),
        )

    def split(self, parts: int) -> list[Batch]:
        """Split the batch into up to ``parts`` batches of consecutive images, on the same device."""
        if parts == 1:
            return [self]
        size = -(-len(self.indices) // parts)
        starts = range(0, len(self.indices), size)
        return [
            self._replace(
                views=tuple(view[at : at + size] for view in self.views),
                indices=self.indices[at : at + size],
                truths=self.truths[at : at + size],
            )
            for at in starts
        ]


class Prefetcher(Iterator[Batch]):
    """Batches on a device. Copies to a GPU use a separate CUDA stream, and overlap with work on earlier batches.

    Args:
        batches: batches on the CPU; in pinned memory if they go to a GPU.
        device: device to copy to.
        pictures: function that converts items to pictures, on the device.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        device: torch.device | str,
        pictures: Callable[[Tensor], Tensor] = IMAGES.pictures,
    ) -> None:
        self.batches, self.device, self.pictures = batches, torch.device(device), pictures
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.coming: Batch | None = None

    def send(self) -> None:
        """Start copying the next batch, unless one is being copied. Call it when the device has work queued."""
        if self.coming is None and (batch := next(self.batches, None)) is not None:
            with torch.cuda.stream(self.stream):  # without a stream this does nothing
                self.coming = batch.on(self.device).pictured(self.pictures)

    def close(self) -> None:
        """Drop the batches, which ends the worker processes."""
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


_MAX_TRIES = 100

Augment = Callable[[Tensor, np.random.Generator], tuple[Tensor, ...]]
# the same for an image with its annotation, such as a label map
AnnotatedAugment = Callable[[Tensor, Any, np.random.Generator], tuple[tuple[Tensor, ...], Any]]


def draw_views(augment: Augment, image: Tensor, rng: np.random.Generator) -> tuple[tuple[Any, ...], Tensor | None]:
    """Return what a reader makes of an image: views or an `ImagePart` each, and draws of colours for the device."""
    split = getattr(augment, "split", None)
    return (augment(image, rng), None) if split is None else split(image, rng)


def steps_per_epoch(n: int, batch_size: int, world: int = 1) -> int:
    """Return the steps per epoch over ``n`` images, with ``world`` processes of ``batch_size`` images each; at least 1.

    An incomplete last batch is dropped. A data set smaller than one batch makes one smaller batch; no batch ever
    repeats an image.
    """
    return max(1, n // (batch_size * world))


def steps_of(epochs: float, n: int, batch_size: int) -> int:
    """Return the number of steps in ``epochs`` over ``n`` images, also for fractions of an epoch; at least 1."""
    return max(1, round(epochs * steps_per_epoch(n, batch_size)))


def training_batches(
    source: Source,
    augment: Augment | AnnotatedAugment,
    batch_size: int,
    seed: int,
    first_step: int,
    steps: int,
    workers: int = 0,
    channels: int = 3,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str | None = None,
    prepare: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
    truth: Callable[[int], Any] | None = None,
) -> Iterator[Batch]:
    """Return the batches of steps ``first_step`` ... ``steps`` - 1 of a run.

    Every epoch is a new permutation of the images, and an image's augmentation is drawn from (seed, epoch, index). So a
    step's batch depends on neither ``first_step`` nor ``workers``. An unreadable image is reported and replaced by one
    from further along the permutation. If all of these are in the step already, this process's batch is smaller.
    """
    if len(source) < world:
        raise PatchloomError(
            f"{source.name} holds {len(source)} images for {world} processes: use at most one per image"
        )
    batches = _TrainingBatches(source, augment, batch_size, seed, channels, rank, world, truth)
    made = prepare(prepared(batches, range(first_step, steps), workers, device))
    return _arriving(made, device, source)


def plain_batches(
    source: Source,
    size: tuple[int, int],
    batch_size: int,
    workers: int = 0,
    channels: int = 3,
    device: torch.device | str | None = None,
    first: int = 0,
    native: bool = False,
    stop: int | None = None,
    test_crop: float = 1.0,
) -> Iterator[Batch]:
    """Return batches of every image once, in order, centre-cropped to ``size``; ``test_crop`` is as in `CentreCrop`.

    Unreadable images are left out; no batch is empty. ``first`` and ``stop`` select the batches ``first`` ...
    ``stop`` - 1.
    """
    batches = _PlainBatches(source, size, batch_size, channels, native, test_crop)
    count = -(-len(source) // batch_size)
    numbers = range(first, count if stop is None else stop)
    made = prepared(batches, numbers, workers, device, repeated=True)
    return _arriving(_without_empty(made, source, may_be_none=len(numbers) < count), device, source)


def batch_bytes(augment: Any, images: int, channels: int) -> int:
    """Return the bytes of a batch as readers send it, of images of 8 bits; 0 for an augmentation without sizes."""
    sound = getattr(augment, "sound", None)
    if sound is not None:
        return int(images * getattr(augment, "n_views", 1) * 2 * sound.samples)
    pixels = prod(getattr(augment, "size", (0,))) * pixels_sent(augment)
    return int(images * getattr(augment, "n_views", 1) * channels * pixels)


def prepared(
    made: Dataset[Any], numbers: range, workers: int, device: torch.device | str | None, repeated: bool = False
) -> Iterator[Any]:
    """Yield ``made[number]``, by no more worker processes than can read while another is used; see `in_workers`."""
    on_gpu = device is not None and torch.device(device).type == "cuda"
    return in_workers(made, numbers, max(0, min(workers, len(numbers) - 1)), on_gpu, repeated)


def _arriving(batches: Iterator[Batch], device: torch.device | str | None, source: Source) -> Iterator[Batch]:
    pictures = source.modality.pictures
    if device is None:  # colour changes are not applied
        return (batch.pictured(pictures) for batch in batches)
    return Prefetcher(batches, device, pictures)


class _TrainingBatches(Dataset[Batch | PatchloomError]):
    """Data set of batches by step. One worker makes a whole batch, so that no replacement repeats an image in it."""

    def __init__(
        self,
        source: Source,
        augment: Augment | AnnotatedAugment,
        batch_size: int,
        seed: int,
        channels: int,
        rank: int,
        world: int,
        truth: Callable[[int], Any] | None,
    ) -> None:
        self.source, self.augment, self.seed, self.channels, self.truth = source, augment, seed, channels, truth
        self.rank, self.world = rank, world
        self.batch_size = min(batch_size, len(source) // world)
        self.steps = steps_per_epoch(len(source), batch_size, world)
        self._order: tuple[int, np.ndarray] | None = None
        self.nbytes = batch_bytes(augment, self.batch_size, channels)

    def __getitem__(self, step: int) -> Batch | PatchloomError:
        try:
            return self._batch(*divmod(step, self.steps))
        except PatchloomError as error:
            # Returned, because a DataLoader puts a traceback into the message of an exception of a worker.
            return error

    def _batch(self, epoch: int, step: int) -> Batch:
        order, n = self._permutation(epoch), len(self.source)
        start = (step * self.world + self.rank) * self.batch_size
        end = (step + 1) * self.world * self.batch_size
        mine = range(start, start + self.batch_size)
        # Replacements come after the global batch, with a stride per process, so that no two processes take the same.
        spare = range(end + self.rank, end + n - self.world * self.batch_size, self.world)
        views: list[Any] = []
        truths: list[Any] = []
        draws: list[Any] = []
        indices: list[int] = []
        unreadable: list[str] = []
        failed = 0
        self.source.make_ready(order[mine.start : mine.stop])
        for position in (*mine, *spare):
            if len(indices) == self.batch_size:
                break
            index = int(order[position % n])
            try:
                image = self.source.read_as(index, self.channels)
                truth = None if self.truth is None else self.truth(index)
            except Unreadable as error:
                unreadable.append(self.source.describe(index))
                failed += 1
                if failed > _MAX_TRIES:
                    raise PatchloomError(
                        f"{failed} images of {self.source.name} in a row cannot be read; the last one: {error}"
                    ) from error
                continue
            failed = 0
            rng = np.random.default_rng((self.seed, epoch, index))
            if self.truth is not None:
                some, changed = cast(AnnotatedAugment, self.augment)(image, truth, rng)
                views.append(some)
                truths.append(changed)
            else:
                some, draw = draw_views(cast(Augment, self.augment), image, rng)
                views.append(some)
                draws += [] if draw is None else [draw]
            indices.append(index)
        if not indices:
            shared = self.world > 1
            by, fewer = (f" by process {self.rank}", ", or use fewer processes") if shared else ("", "")
            raise PatchloomError(
                f"nothing in {self.source.name} could be read{by}, beginning with {unreadable[0]}: repair "
                f"the files that patchloom check lists{fewer}"
            )
        batch = stack(views, indices, unreadable)._replace(truths=tuple(truths))
        if not draws:
            return batch
        return batch._replace(colors=tuple(plan_colors(one, self.channels) for one in torch.stack(draws, dim=1)))

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            n = len(self.source)
            # To numpy the seeds (s, e) and (s, e, 0) are the same; with n, no image shares the permutation's stream.
            self._order = epoch, self.source.order(np.random.default_rng((self.seed, epoch, n)))
        return self._order[1]


@dataclass
class _PlainBatches(Dataset[Batch | PatchloomError]):
    """Data set of centre-cropped batches; equal ones are of the same source."""

    source: Source
    size: tuple[int, int]
    batch_size: int
    channels: int
    native: bool
    test_crop: float

    def __post_init__(self) -> None:
        self.centre = self.source.modality.centre(self.size, self.native, self.source.name, self.test_crop)
        self.nbytes = batch_bytes(self.centre, self.batch_size, self.channels)

    def __getitem__(self, step: int) -> Batch | PatchloomError:
        views, indices, unreadable = [], [], []
        numbers = range(step * self.batch_size, min((step + 1) * self.batch_size, len(self.source)))
        self.source.make_ready(numbers)
        for index in numbers:
            try:
                image = self.source.read_as(index, self.channels)
            except Unreadable:
                unreadable.append(self.source.describe(index))
                continue
            except PatchloomError as error:
                return error
            views.append(self.centre(image))
            indices.append(index)
        return stack(views, indices, unreadable)


def stack(views: Sequence[tuple[Any, ...]], indices: Sequence[int] = (), unreadable: Sequence[str] = ()) -> Batch:
    """Return a batch of the images' views or of each `ImagePart`; of views if any image has more than 8 bits."""
    batch = Batch((), torch.tensor(indices, dtype=torch.int64), list(unreadable))
    ways = [*zip(*views, strict=True)]
    if ways and all(isinstance(one, ImagePart) for way in ways for one in way):
        if all(one.image.dtype == torch.uint8 for one in ways[0]):
            return batch._replace(parts=tuple(map(PackedParts.of, ways)))
        ways = [tuple(part.view() for part in way) for way in ways]
    return batch._replace(views=tuple(map(_stack_view, ways)))


def _stack_view(images: Sequence[Tensor]) -> Tensor:
    if any(image.is_floating_point() for image in images):
        images = [image if image.is_floating_point() else image.float() / 255 for image in images]
    if all(image.stride(0) == 1 for image in images):  # channels-last after resizing: the device reorders faster
        return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    return torch.stack(tuple(images))


def _without_empty(batches: Iterator[Batch], source: Source, may_be_none: bool = False) -> Iterator[Batch]:
    """Drop empty batches; the names of their unreadable images go to a neighbouring batch."""
    held: Batch | None = None
    names: list[str] = []
    for batch in batches:
        if len(batch.indices) == 0:
            names += batch.unreadable
            continue
        if held is not None:
            yield held
        held, names = batch._replace(unreadable=names + batch.unreadable), []
    if held is None and may_be_none:
        return
    if held is None:
        first = names[0] if names else "no image"
        raise PatchloomError(
            f"nothing in {source.name} could be read, beginning with {first}: patchloom check says why"
        )
    yield held._replace(unreadable=held.unreadable + names)
