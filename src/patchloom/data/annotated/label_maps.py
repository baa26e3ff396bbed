"""Images with a class for each pixel."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from patchloom.data.annotated.base import IGNORED, Annotated, Subset
from patchloom.data.annotated.class_list import ClassList
from patchloom.data.annotated.stored_maps import StoredMaps
from patchloom.data.sources.base import digest
from patchloom.errors import PatchloomError
from patchloom.waiting import Waiting

_NUMBERS = 2**16  # that a label map may hold
_UNKNOWN = -2  # for those that are neither a class nor ignored


class LabelMaps(Annotated[Tensor]):
    """Images whose label maps are stored.

    Args:
        maps: images and label maps.
        classes: the classes, and their numbers in label maps.
        ignored: numbers that do not count.
        rows: as `ids_of` gives them.

    Attributes:
        ids: the number of each class in label maps as they are stored.
        counts: pixels of each class in each image, int64 [n k].

    Raises:
        PatchloomError: a label map holds a number that is neither a class nor ignored.
    """

    def __init__(self, maps: StoredMaps, classes: ClassList, ignored: Collection[int], rows: np.ndarray) -> None:
        self.maps, self.images, self.ignored = maps, maps.images, sorted(ignored)
        self.classes, self.ids, self.source = classes.names, classes.ids, classes.source
        self._numbers = np.full(_NUMBERS, _UNKNOWN, np.int16)
        self._numbers[list(classes.ids)] = np.arange(len(classes.ids))
        self._numbers[[number for number in ignored if 0 <= number < _NUMBERS]] = IGNORED
        numbers = self._numbers[rows[:, 1]]
        strange = rows[numbers == _UNKNOWN]
        if len(strange):
            raise self._unknown(int(strange[0, 0]), int(strange[0, 1]), len(np.unique(strange[:, 0])))
        known = numbers >= 0
        self.counts = np.zeros((len(self.images), len(self.classes)), np.int64)
        self.counts[rows[known, 0], numbers[known]] = rows[known, 2]

    def truth(self, i: int) -> Tensor:
        ids = self.maps.ids(i)
        numbers = self._numbers[np.minimum(ids, _NUMBERS - 1) if ids.itemsize > 2 else ids]
        if (strange := numbers == _UNKNOWN).any():  # the file has changed since all were looked at
            raise self._unknown(i, int(ids[strange][0]), 1)
        return torch.from_numpy(numbers)

    def size(self, i: int) -> tuple[int, int]:
        return self.maps.image_size(i)

    def _unknown(self, i: int, number: int, files: int) -> PatchloomError:
        more = f" ({files - 1:,} more hold such numbers)" if files > 1 else ""
        return PatchloomError(
            f"{self.maps.describe(i)} holds the number {number}, which is none of the {len(self.ids)} classes of "
            f"{self.source}{more}: add it there, or give --ignore {number} if it does not count"
        )

    def fingerprint(self) -> str:
        about = [*self.classes, *map(str, self.ids), str(self.ignored)]
        return digest([self.images.fingerprint(), self.maps.fingerprint(), *about])


def class_pixels(annotated: Annotated[Tensor]) -> np.ndarray:
    """Pixels of each class in all images, int64 [k]."""
    whole, chosen = _whole(annotated)
    if isinstance(whole, LabelMaps):
        return np.asarray(whole.counts[chosen].sum(0))
    counts = np.zeros(len(annotated.classes), np.int64)
    with Waiting("counting the pixels of each class", len(annotated)) as waiting:
        for i in range(len(annotated)):
            truth = annotated.truth(i).numpy()
            counts += np.bincount(truth[truth != IGNORED], minlength=len(counts))
            waiting.advance()
    return counts


def class_ids(annotated: Annotated[Tensor]) -> tuple[int, ...]:
    """The number that means each class in the label maps as they are stored, for writing others like them."""
    whole, _ = _whole(annotated)
    return whole.ids if isinstance(whole, LabelMaps) else tuple(range(len(annotated.classes)))


def _whole(annotated: Annotated[Tensor]) -> tuple[Annotated[Tensor], np.ndarray]:
    """What some images were taken from, and which."""
    chosen = np.arange(len(annotated))
    whole = annotated
    while isinstance(whole, Subset):
        whole, chosen = whole.whole, whole.indices[chosen]
    return whole, chosen
