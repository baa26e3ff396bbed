"""Images that a program gives as objects: arrays, tensors, PIL images, paths, or a torch Dataset.

Their name leads nowhere (`given_name`): only who has the object can open them again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from patchloom.data.contents import PIXELS, contents_of
from patchloom.data.sources.base import TEST_SPLITS, Data, Source, in_classes
from patchloom.data.sources.dataset import Items
from patchloom.data.sources.files import Files
from patchloom.data.sources.items import (
    KINDS,
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
    said,
    spread,
    tried,
)
from patchloom.data.sources.kinds import sound_of
from patchloom.errors import PatchloomError

# what verbs take for images in Python: a name or a path, or objects
DataLike = (
    str | os.PathLike[str] | Source | Data | Dataset[Any] | np.ndarray | Tensor | Sequence[Any] | Mapping[str, Any]
)

_GIVEN = re.compile(r"[\d,]+ images? given in Python")


def is_object(data: DataLike) -> bool:
    """Whether images are given as an object, and not by names or paths."""
    if isinstance(data, list | tuple) and data:
        return not all(isinstance(one, str | os.PathLike) for one in data)
    return not isinstance(data, str | os.PathLike)


def given_name(data: DataLike) -> str:
    """What images that are given as an object are called, in a run's settings, too.

    Raises:
        PatchloomError: the object has no length.
    """
    if isinstance(data, Data):
        data = data.train
    elif isinstance(data, Mapping):
        data = _split(data, ("train",))
    n = len(_sized(data))
    return f"{n:,} image{'s' * (n != 1)} given in Python"


def is_given(name: Any) -> bool:
    """Whether this, of whatever a run's settings call its images, is a `given_name`."""
    return isinstance(name, str) and _GIVEN.fullmatch(name) is not None


def open_objects(data: DataLike) -> Data:
    """Open images that are given as an object.

    Args:
        data: arrays or tensors [h w], [h w c] or [c h w] in a list, or all in one array with n in front; PIL images;
            paths; a Dataset; or a dict of the splits train, test and val. Each item may also be a tuple of an image
            and a label, or a dict with the keys image and label.

    Raises:
        PatchloomError: it is no such object, or holds no images.
    """
    if isinstance(data, Data):
        return data
    name = given_name(data)
    if not isinstance(data, Mapping):
        return Data(_source(data, name), None)
    train = _source(_split(data, ("train",)), name)
    tests = {split: _source(data[split], f"{name} ({split})") for split in TEST_SPLITS if split in data}
    second = next(iter(tests), None)
    test = None if second is None else _as_named(tests.pop(second), train)
    return Data(train, test, (), {split: in_classes(source, train.classes) for split, source in tests.items()})


def _split(data: Mapping[str, Any], names: Iterable[str]) -> Any:
    for name in names:
        if name in data:
            return data[name]
    raise PatchloomError("a dict of images has the key train, and may have the key test: name its splits so")


def _as_named(test: Source, train: Source) -> Source:
    """Test images whose labels mean what those of the training images do."""
    if test.labels is None or not train.classes:
        return test
    strange = [
        test.classes[i] for i in np.unique(test.labels[test.labels >= 0]) if test.classes[i] not in train.classes
    ]
    if strange:
        raise PatchloomError(f"the test images have the class {strange[0]}, which those of train lack: take it out")
    return in_classes(test, train.classes)


def _sized(data: Any) -> Any:
    """The object, if its images can be counted, and taken in any order.

    Raises:
        PatchloomError: they cannot; the sentence says what can be done with such an object.
    """
    kind = type(data).__name__
    if isinstance(data, DataLoader):
        raise PatchloomError(f"a {kind} gives batches in an order of its own: give its dataset, as loader.dataset")
    if isinstance(data, IterableDataset | Iterator):
        raise PatchloomError(
            f"the images of a {kind} come in one order, and a run has to read any of them at any time: give a list, or "
            "a Dataset with __len__ and __getitem__"
        )
    if isinstance(data, Image.Image):
        raise PatchloomError("that is a single image: give a list of images")
    if isinstance(data, bytes | bytearray) or not (isinstance(data, Sized | Source) and hasattr(data, "__getitem__")):
        if not isinstance(data, Source):
            raise PatchloomError(f"an object of type {kind} is no set of images: {KINDS}")
    try:
        len(data)
    except (TypeError, NotImplementedError) as problem:  # an array without dimensions, and torch's own Dataset
        raise PatchloomError(f"this {kind} does not tell its length: {KINDS}") from problem
    return data


def _source(data: Any, name: str) -> Source:
    if isinstance(data, Source):
        return data
    if isinstance(data, np.ndarray) and data.dtype.kind in "UO":  # paths, or arrays of several sizes
        data = data.tolist()
    if not len(_sized(data)):
        raise PatchloomError("the list of images is empty: put images into it")
    kind = type(data).__name__
    if isinstance(data, np.ndarray | Tensor):
        return Objects(name, _rows(data), kind)
    if not isinstance(data, list | tuple):
        return Items(name, data)
    paths = [isinstance(image_of(item), str | os.PathLike) for item in data]
    if all(paths):
        return _files(data, name)
    if any(paths):
        path, other = paths.index(True), paths.index(False)
        raise PatchloomError(f"{kind}[{path}] is a path and {kind}[{other}] is none: give paths alone, or images alone")
    return Objects(name, data, kind)


def _rows(array: np.ndarray | Tensor) -> np.ndarray | Tensor:
    """An array of images, n in front.

    Raises:
        PatchloomError: it has another number of dimensions, or looks like a single image.
    """
    shape = tuple(array.shape)
    if len(shape) == 3 and min(shape[0], shape[-1]) <= 4:
        raise PatchloomError(f"an array {said(shape)} looks like one image: give [n h w c] or [n c h w], n images")
    if len(shape) not in (3, 4):
        raise PatchloomError(f"an array {said(shape)} is no set of images: give [n h w], [n h w c] or [n c h w]")
    return array


def _files(data: Sequence[Any], name: str) -> Files:
    paths = [os.path.abspath(os.path.expanduser(image_of(item))) for item in data]
    if folder := next((path for path in paths if os.path.isdir(path)), None):
        raise PatchloomError(f"{folder} is a folder among image files: give folders alone, or files alone")
    if not any(map(os.path.isfile, paths)):
        raise PatchloomError(f"none of the {len(paths):,} files of the list exists: the first is {paths[0]}")
    labels = numbered([label_of(item) for item in data])
    return Files(name, Path(os.sep), paths, *labels, sound=sound_of(paths, name))


class Objects(Source):
    """Images in memory.

    Args:
        name: as `given_name` says it.
        items: an array with n in front, or a list of images, each alone or with a label.
        kind: what the program calls it, for messages.

    Raises:
        PatchloomError: an item is no image, or one cannot be used.
    """

    in_memory = True

    def __init__(self, name: str, items: Sequence[Any] | np.ndarray | Tensor, kind: str) -> None:
        self.name, self.kind, self.to_label = name, kind, TO_LABEL
        self.images: Any
        if isinstance(items, np.ndarray | Tensor):
            self.images = items.detach().cpu() if isinstance(items, Tensor) else items
        else:
            self.images = [held(image_of(item), self.describe(i)) for i, item in enumerate(items)]
            self.classes, self.labels = numbered([label_of(item) for item in items])
        self.first = is_channels_first(self.images if isinstance(self.images, list) else self.images[:1], kind)
        for i in spread(len(self), LOOKED_AT):  # what is wrong with all of them is said at once
            tried(self, i)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, i: int) -> Tensor:
        return decoded(self.images[i], self.first, self.describe(i))

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray:
        if self._contents is None:
            self._contents = contents_of(PIXELS, (pixels_of(self, i) for i in range(len(self))))
        return self._contents if chosen is None else self._contents[chosen]

    def describe(self, i: int) -> str:
        return f"{self.kind}[{i}]"

    def fingerprint(self) -> str:
        """Of the pixels and labels, in whatever kind of array they are."""
        return digest_of(self, self.contents())
