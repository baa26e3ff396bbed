"""A torch Dataset, or another object that gives an image by its number."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset
from torch.utils.data import Subset as TorchSubset

from patchloom.data.contents import PIXELS, contents_of, contents_on_disc, pieces_of_file
from patchloom.data.read import Unreadable
from patchloom.data.sources.base import Source
from patchloom.data.sources.items import (
    LOOKED_AT,
    TO_LABEL,
    decoded,
    digest_of,
    held,
    image_of,
    is_channels_first,
    label_of,
    numbered,
    pixels_of,
    spread,
    tried,
)
from patchloom.errors import PatchloomError

_LABELS = ("targets", "labels", "_labels")  # as torchvision calls them
_SAMPLED = 64  # items whose pixels make the fingerprint
_PAUSE = 10  # seconds between two lines of progress


class Items(Source):
    """The images of a torch Dataset, or of any object with ``__len__`` and ``__getitem__``.

    Its labels are its attribute ``targets``, as torchvision has it. Where there is none, and items have labels, all
    items are read once for them.

    Args:
        name: as `given_name` says it.
        dataset: whose items are an image each, alone or with a label.

    Raises:
        PatchloomError: an item is no image or cannot be used, none can be read, or one changes between two readings.
    """

    def __init__(self, name: str, dataset: Any) -> None:
        self.name, self.dataset, self.kind = name, dataset, type(dataset).__name__
        self.to_label = TO_LABEL
        items: dict[int, Any] = {}
        problem: Unreadable | None = None
        for i in spread(len(dataset), LOOKED_AT):
            try:
                items[i] = self._item(i)
            except Unreadable as error:  # it is skipped like a broken file, if there are others
                problem = error
        if not items:
            raise PatchloomError(str(problem)) from problem
        self.first = is_channels_first([held(image_of(one), self.describe(i)) for i, one in items.items()], self.kind)
        for i in items:
            if not torch.equal(tried(self, i), tried(self, i)):
                raise PatchloomError(
                    f"{self.describe(i)} is another image whenever it is read, so a run could not be resumed: leave "
                    "random transforms out of the dataset, since patchloom crops and flips by itself"
                )
        self.classes, self.labels = _labels_told(dataset) or ((), None)
        if self.labels is None and any(label_of(item) is not None for item in items.values()):
            self.classes, self.labels = numbered([*self._labels_read()])

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, i: int) -> Tensor:
        return decoded(image_of(self._item(i)), self.first, self.describe(i))

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray | None:
        """Hashes of the files where the dataset names them, as torchvision's do; else all items would be made."""
        files = getattr(self.dataset, "samples", None)
        if not (isinstance(files, list) and len(files) == len(self) and isinstance(image_of(files[0]), str)):
            return None
        return contents_on_disc(self, lambda i: pieces_of_file(image_of(files[i])), chosen)

    def stamp(self) -> None:
        """None: what becomes of an item between two readings cannot be noticed."""

    def describe(self, i: int) -> str:
        return f"{self.kind}[{i}]"

    def fingerprint(self) -> str:
        """Of a sample of the images, their number and the labels: for more, all of them would have to be made."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return digest_of(self, contents_of(PIXELS, (pixels_of(self, i) for i in spread(len(self), _SAMPLED))))

    def _item(self, i: int) -> Any:
        try:
            return self.dataset[i]
        except Exception as error:  # a dataset may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise Unreadable(f"{self.describe(i)} cannot be read as an image: {reason}") from error

    def _labels_read(self) -> Iterator[int | str | None]:
        reported = time.monotonic()
        for i in range(len(self)):
            try:
                yield label_of(self._item(i))
            except Unreadable:  # which training reports
                yield None
            if time.monotonic() - reported > _PAUSE:
                print(
                    f"  {i + 1:,} of {len(self):,} items are read for their labels, which no targets tell", flush=True
                )
                reported = time.monotonic()


def _labels_told(dataset: Any) -> tuple[tuple[str, ...], np.ndarray] | None:
    """Names of the classes and labels [n] that a dataset tells without making items; None if it does not."""
    if isinstance(dataset, TorchSubset):
        classes, labels = _labels_told(dataset.dataset) or ((), None)
        return None if labels is None else (classes, labels[np.asarray(dataset.indices, dtype=np.int64)])
    if isinstance(dataset, ConcatDataset):
        parts = [_labels_told(one) for one in dataset.datasets]
        if None in parts or len({classes for classes, _ in parts}) > 1:
            return None
        return parts[0][0], np.concatenate([labels for _, labels in parts])
    for attribute in _LABELS:
        found = getattr(dataset, attribute, None)
        if isinstance(found, list | tuple | np.ndarray | Tensor) and len(found) == len(dataset):
            labels = np.asarray(found)
            if labels.ndim == 1 and labels.dtype.kind in "iu":
                names, count = getattr(dataset, "classes", ()), int(labels.max()) + 1
                classes = names if isinstance(names, list | tuple) and len(names) >= count else range(count)
                return tuple(map(str, classes)), labels.astype(np.int64)
    return None
