"""What annotated images are: the interface that all of them implement, and the subset of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from patchloom.data.sources.base import Source, digest

IGNORED = -1  # in label maps: pixels that do not count


@dataclass(frozen=True)
class Objects:
    """The annotated objects of an image. Letters: m objects, h w height and width of the image in pixels.

    Attributes:
        boxes: float32 [m 4], x0 y0 x1 y1 in pixels, x1 and y1 exclusive.
        labels: int64 [m], numbers of classes, from 0.
        masks: bool [m h w]; None where the data has boxes alone.
        crowd: bool [m], groups or doubtful objects: whatever is found there is neither right nor wrong.
        decode: returns the mask of object k, bool [h w]; in the place of ``masks``, so that not all are in memory.
    """

    boxes: Tensor
    labels: Tensor
    masks: Tensor | None
    crowd: Tensor
    decode: Callable[[int], Tensor] | None = None

    @property
    def has_masks(self) -> bool:
        """True if objects have masks, decoded or not."""
        return self.masks is not None or self.decode is not None

    def mask(self, k: int) -> Tensor:
        """Return the mask of object k, bool [h w]."""
        if self.decode is not None:
            return self.decode(k)
        assert self.masks is not None
        return self.masks[k]


T = TypeVar("T", Tensor, Objects)


class Annotated(ABC, Generic[T]):
    """Images with what is known of their parts: a label map, int16 [h w] with `IGNORED`, or `Objects`.

    Attributes:
        images: the images alone, in the same order.
        classes: names of the classes.
    """

    images: Source
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    @abstractmethod
    def truth(self, i: int) -> T:
        """What is known of image i.

        Raises:
            PatchloomError: the annotation cannot be read, or does not fit its image.
        """

    def outlined(self, i: int) -> T:
        """Return `truth`, with masks that are decoded one at a time where the data store outlines."""
        return self.truth(i)

    def size(self, i: int) -> tuple[int, int]:
        """(h, w) of image i in pixels."""
        height, width = self.images.read(i).shape[1:]
        return height, width

    @abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits that change when an image or an annotation does."""

    def subset(self, indices: Sequence[int] | np.ndarray) -> Annotated[T]:
        """Only these images, in this order."""
        return Subset(self, indices)


class Subset(Annotated[T]):
    """Some images of others, in the order of ``indices``, with the same classes."""

    def __init__(self, whole: Annotated[T], indices: Sequence[int] | np.ndarray) -> None:
        self.whole, self.indices = whole, np.asarray(indices, dtype=np.int64)
        self.images, self.classes = whole.images.subset(self.indices), whole.classes

    def truth(self, i: int) -> T:
        return self.whole.truth(int(self.indices[i]))

    def outlined(self, i: int) -> T:
        return self.whole.outlined(int(self.indices[i]))

    def size(self, i: int) -> tuple[int, int]:
        return self.whole.size(int(self.indices[i]))

    def fingerprint(self) -> str:
        return digest(chain([self.whole.fingerprint()], map(str, self.indices)))


@dataclass(frozen=True)
class AnnotatedData(Generic[T]):
    """The parts into which annotated images come.

    Attributes:
        train: images to train on.
        validation: images to choose by; None if the data brings none.
        test: images to test on; None if the data brings none.
        notes: a line for each thing that was left out or taken otherwise than its name says.
    """

    train: Annotated[T]
    validation: Annotated[T] | None
    test: Annotated[T] | None
    notes: tuple[str, ...] = ()
