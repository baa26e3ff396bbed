"""Images with label maps that a program gives: pairs of arrays or paths."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.annotated.label_files import ids_in, read_ids
from patchloom.data.annotated.stored_maps import StoredMaps
from patchloom.data.sources.base import Source, digest
from patchloom.data.sources.objects import open_objects
from patchloom.errors import PatchloomError

_PARTS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}


class GivenMaps(StoredMaps):
    """Images, and for each a label map [h w] or the path of one.

    Args:
        images: the images.
        labels: paths, arrays, tensors or PIL images.
    """

    def __init__(self, images: Source, labels: Sequence[Any]) -> None:
        self.images, self.labels = images, labels

    def ids(self, i: int) -> np.ndarray:
        label = self.labels[i]
        if isinstance(label, str | os.PathLike):
            return read_ids(Path(label).expanduser(), self.describe(i))
        return ids_in(np.asarray(label), self.describe(i))

    def describe(self, i: int) -> str:
        label = self.labels[i]
        return (
            os.fspath(label) if isinstance(label, str | os.PathLike) else f"the label map of {self.images.describe(i)}"
        )

    def fingerprint(self) -> str:
        return digest(str(self.ids(i).shape) + self.ids(i).tobytes().hex() for i in range(len(self.labels)))


def is_pairs(data: Any) -> bool:
    """Whether this is a list of pairs of an image and a label map, or a dict of such lists."""
    if isinstance(data, Mapping):
        return bool(data) and set(data) <= set(_PARTS) and all(map(is_pairs, data.values()))
    return (
        isinstance(data, list | tuple) and bool(data) and all(isinstance(one, tuple) and len(one) == 2 for one in data)
    )


def given_maps(data: Any) -> tuple[dict[str, GivenMaps], dict[str, str]]:
    """Open what `is_pairs`: the parts, and what the dict calls each.

    Raises:
        PatchloomError: an image is none, or there is nothing to train on.
    """
    lists = data if isinstance(data, Mapping) else {"train": data}
    if "train" not in lists:
        raise PatchloomError("a dict of images with label maps has the key train: name its parts so")
    maps = {
        _PARTS[word]: GivenMaps(open_objects([image for image, _ in pairs]).train, [label for _, label in pairs])
        for word, pairs in lists.items()
    }
    return maps, {_PARTS[word]: word if isinstance(data, Mapping) else "" for word in lists}
