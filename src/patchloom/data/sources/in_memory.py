"""Images given as Python objects: arrays, tensors, PIL images, paths, or a torch Dataset.

They cannot be opened again by their name (`object_name`), only by giving the same object.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset
from torch.utils.data import Subset as TorchSubset

from patchloom.data.conversions import record_conversion
from patchloom.data.decode import Unreadable, from_array, from_pil, unreadable
from patchloom.data.duplicates import PIXEL_KIND, contents_of, contents_on_disc
from patchloom.data.source import Data, Source, digest, in_classes
from patchloom.data.sources.files import Files
from patchloom.data.sources.names import TEST, VALIDATION, choose_splits, split_of
from patchloom.data.sources.scandir import detect_sound
from patchloom.display import track_progress
from patchloom.errors import PatchloomError, one_line

# Items of a list or Dataset: image, label, and the order of an array's axes.


KINDS = (
    "give a folder, a list of paths, arrays or PIL images, an array [n h w c] or [n c h w], or a Dataset with a length"
)
ImageObject = np.ndarray | Tensor | Image.Image  # an image in memory
_SAMPLED_ITEMS = 16  # items that are checked on opening
_LABEL_HINT = "give tuples of an image and its label, or dicts with the keys image and label"


def image_of(item: Any) -> Any:
    """Return the image of an item: the first of a tuple, the one called ``image`` in a dict, or the item itself."""
    if isinstance(item, Mapping):
        return item["image"] if "image" in item else next(iter(item.values()), None)
    if isinstance(item, tuple | list):
        return item[0] if item else None
    return item


def label_of(item: Any) -> int | str | None:
    """Return an item's label, a whole number or a word: the second of a tuple, the one called ``label`` in a dict."""
    found = None
    if isinstance(item, Mapping):
        found = item.get("label")
    elif isinstance(item, tuple | list) and len(item) > 1:
        found = item[1]
    if isinstance(found, Tensor | np.generic) and tuple(found.shape) == ():
        found = found.item()
    if isinstance(found, bool) or (isinstance(found, float) and found.is_integer()):
        return int(found)
    return found if isinstance(found, int | str) else None


def encode_labels(labels: Sequence[int | str | None]) -> tuple[tuple[str, ...], np.ndarray | None]:
    """Return the names of the classes, and the labels as their numbers, int64 [n], -1 for none. Words are sorted."""
    known = {label for label in labels if label is not None}
    if not known:
        return (), None
    words = sorted(label for label in known if isinstance(label, str))
    if len(words) not in (0, len(known)):
        raise PatchloomError(f"some labels are numbers and some are words, such as {words[0]}: write all in one way")
    whole = [label for label in known if not isinstance(label, str) and label >= 0]
    numbers: dict[int | str | None, int] = {label: i for i, label in enumerate(words)} or {i: i for i in whole}
    classes = tuple(words) if words else tuple(map(str, range(max(whole, default=-1) + 1)))
    return classes, np.array([numbers.get(label, -1) for label in labels], dtype=np.int64)


def to_image_object(image: Any, name: str) -> ImageObject:
    """Check that an object is an image, and load it into memory; ``name`` is for the error."""
    if isinstance(image, Tensor):
        return image.detach().cpu()
    if isinstance(image, Image.Image):
        with unreadable(name, "an image"):
            image.load()  # worker processes cannot share a file that is still open
        return image
    if isinstance(image, np.ndarray) and image.dtype.kind not in "OUS":
        return image
    raise PatchloomError(f"{name} is of type {type(image).__name__}, not an image: {KINDS}")


def is_channels_first(images: Iterable[ImageObject], kind: str) -> bool:
    """Return whether arrays are [c h w], and not [h w c]: there are fewer channels than pixels on either side.

    Args:
        images: images in memory; PIL images and arrays [h w] are ignored.
        kind: name of the collection, for the error.
    """
    shapes = dict.fromkeys(tuple(one.shape) for one in images if not isinstance(one, Image.Image))
    for shape in shapes:
        if len(shape) not in (2, 3):
            raise PatchloomError(
                f"an image of this {kind} is an array {format_shape(shape)}: give [h w], [h w c] or [c h w]"
            )
    fits = {(c, h, w): (c < min(h, w), w < min(c, h)) for c, h, w in (one for one in shapes if len(one) == 3)}
    unclear = next((shape for shape, fit in fits.items() if not any(fit)), None)
    if unclear:
        raise PatchloomError(
            f"an image of this {kind} is an array {format_shape(unclear)}, whose channels cannot be distinguished from "
            "rows and columns: give fewer channels than pixels on a side, or PIL images"
        )
    if len(set(fits.values())) > 1:
        one, other = (next(shape for shape, fit in fits.items() if fit[0] is first) for first in (True, False))
        raise PatchloomError(
            f"this {kind} has images {format_shape(one)} with channels first and {format_shape(other)} with channels "
            "last: convert all to one of them"
        )
    return any(first for first, _ in fits.values())


def format_shape(shape: Sequence[int]) -> str:
    """Format a shape for messages."""
    return f"[{' '.join(map(str, shape))}]"


def to_image_tensor(image: Any, first: bool, name: str) -> Tensor:
    """Convert an image to a tensor [c h w], uint8, or float32 in [0, 1]."""
    try:
        picture = to_image_object(image, name)
        if isinstance(picture, Image.Image):
            deep = picture.mode == "F" or picture.mode.startswith("I;16")
            if picture.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9):
                record_conversion("turned")
            upright = ImageOps.exif_transpose(picture)  # a copy: the caller's image is not changed
            return from_array(np.asarray(upright)) if deep else from_pil(upright)
        if isinstance(picture, Tensor):
            picture = (picture.float() if picture.dtype == torch.bfloat16 else picture).numpy()
        if picture.dtype == bool:
            picture = picture.astype(np.uint8) * 255
        return from_array(np.moveaxis(picture, 0, -1) if picture.ndim == 3 and first else picture)
    except Unreadable:
        raise
    except (ValueError, PatchloomError) as error:
        raise Unreadable(f"{name} cannot be read as an image: {error}") from error


def fingerprint_images(source: Source, contents: np.ndarray) -> str:
    """Return a fingerprint of images and their labels, from the contents of all images or of a sample."""
    labels = [] if source.labels is None else source.labels.tolist()
    return digest([str(len(source)), contents.tobytes().hex(), *source.classes, *map(str, labels)])


def read_or_refuse(source: Source, i: int) -> Tensor:
    """Read image i, one of those that are checked on opening."""
    try:
        return source.read(i)
    except Unreadable as problem:
        raise PatchloomError(str(problem)) from problem


def pixels_of(source: Source, i: int) -> list[np.ndarray | bytes]:
    """Return the pixels [h w c] of image i, to be hashed; its name if it cannot be read."""
    try:
        return [np.ascontiguousarray(source.read(i).permute(1, 2, 0).numpy())]
    except Unreadable:
        return [source.describe(i).encode()]


def evenly_spaced(n: int, count: int) -> list[int]:
    """Return up to ``count`` of n indices, evenly spaced."""
    return np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(int)).tolist()


# A torch Dataset, or another object with images by index.


_LABELS = ("targets", "labels", "_labels")  # names in torchvision
_SAMPLED = 64  # items whose pixels are hashed for the fingerprint


class DatasetSource(Source):
    """Images of a torch Dataset, or of any object with ``__len__`` and ``__getitem__``.

    Labels are its attribute ``targets``, as in torchvision. If there is none, and items have labels, all items are read
    once for these.

    Args:
        name: name, see `object_name`.
        dataset: data set whose items are an image each, alone or with a label.
    """

    def __init__(self, name: str, dataset: Any) -> None:
        self.name, self.dataset, self.kind = name, dataset, type(dataset).__name__
        self.to_label = _LABEL_HINT
        items: dict[int, Any] = {}
        problem: Unreadable | None = None
        for i in evenly_spaced(len(dataset), _SAMPLED_ITEMS):
            try:
                items[i] = self._item(i)
            except Unreadable as error:  # it is skipped like a broken file, if there are others
                problem = error
        if not items:
            raise PatchloomError(str(problem)) from problem
        self.first = is_channels_first(
            [to_image_object(image_of(one), self.describe(i)) for i, one in items.items()], self.kind
        )
        for i in items:
            if not torch.equal(read_or_refuse(self, i), read_or_refuse(self, i)):
                raise PatchloomError(
                    f"{self.describe(i)} differs each time it is read, so a run could not be resumed: remove random "
                    "transforms from the dataset; patchloom crops and flips the images"
                )
        self.classes, self.labels = stored_labels(dataset) or ((), None)
        if self.labels is None and any(label_of(item) is not None for item in items.values()):
            what, labels = "reading items for their labels, since the dataset has no targets", []
            for i in track_progress(range(len(self)), len(self), what):
                label = None
                with suppress(Unreadable):  # reported by training
                    label = label_of(self._item(i))
                labels.append(label)
            self.classes, self.labels = encode_labels(labels)

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, i: int) -> Tensor:
        return to_image_tensor(image_of(self._item(i)), self.first, self.describe(i))

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray | None:
        """Return hashes of the files if the dataset names them, as torchvision's do; otherwise None, to save time."""
        files = getattr(self.dataset, "samples", None)
        if not (isinstance(files, list) and len(files) == len(self) and isinstance(image_of(files[0]), str)):
            return None
        return contents_on_disc(self, lambda i: image_of(files[i]), chosen)

    def stamp(self) -> None:
        """Return None: changes of an item cannot be noticed."""

    def describe(self, i: int) -> str:
        return f"{self.kind}[{i}]"

    def fingerprint(self) -> str:
        """Return a digest of a sample of the images, their number and the labels; all images would take too long."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint_images(
            self, contents_of(PIXEL_KIND, (pixels_of(self, i) for i in evenly_spaced(len(self), _SAMPLED)))
        )

    def _item(self, i: int) -> Any:
        try:
            return self.dataset[i]
        except Exception as error:  # a dataset may raise anything
            raise Unreadable(f"{self.describe(i)} cannot be read as an image: {one_line(error)}") from error


def stored_labels(dataset: Any) -> tuple[tuple[str, ...], np.ndarray] | None:
    """Return class names and labels [n] that a dataset has without making items; None if it has none."""
    if isinstance(dataset, TorchSubset):
        classes, labels = stored_labels(dataset.dataset) or ((), None)
        return None if labels is None else (classes, labels[np.asarray(dataset.indices, dtype=np.int64)])
    if isinstance(dataset, ConcatDataset):
        each = [stored_labels(one) for one in dataset.datasets]
        parts = [one for one in each if one is not None]
        if len(parts) < len(each) or len({classes for classes, _ in parts}) > 1:
            return None
        return parts[0][0], np.concatenate([labels for _, labels in parts])
    for attribute in _LABELS:
        found = getattr(dataset, attribute, None)
        if isinstance(found, list | tuple | np.ndarray | Tensor) and len(found) == len(dataset):
            labels = np.asarray(found)
            if labels.ndim == 1 and labels.dtype.kind in "iu":
                names, count = getattr(dataset, "classes", ()), int(labels.max()) + 1
                named = names if isinstance(names, list | tuple) and len(names) >= count else range(count)
                return tuple(map(str, named)), labels.astype(np.int64)
    return None


# data as the verbs take it in Python: names, paths or objects
DataLike = (
    str | os.PathLike[str] | Source | Data | Dataset[Any] | np.ndarray | Tensor | Sequence[Any] | Mapping[str, Any]
)

_GIVEN = re.compile(r"[\d,]+ images? given in Python")


def is_object(data: DataLike) -> bool:
    """Return whether images are given as an object, and not by names or paths."""
    if isinstance(data, list | tuple) and data:
        return not all(isinstance(one, str | os.PathLike) for one in data)
    return not isinstance(data, str | os.PathLike)


def object_name(data: DataLike) -> str:
    """Return the name of images that are given as an object, also used in a run's settings."""
    if isinstance(data, Data):
        data = data.train
    elif isinstance(data, Mapping):
        data = _training(data)
    n = len(_sized(data))
    return f"{n:,} image{'s' * (n != 1)} given in Python"


def is_object_name(name: Any) -> bool:
    """Return whether the name of images in a run's settings is an `object_name`."""
    return isinstance(name, str) and _GIVEN.fullmatch(name) is not None


def open_objects(data: DataLike) -> Data:
    """Open images that are given as an object.

    Args:
        data: arrays or tensors [h w], [h w c] or [c h w] in a list, or all in one array with n first; PIL images;
            paths; a Dataset; or a dict of the splits train, test and val. Each item may also be a tuple of an image
            and a label, or a dict with the keys image and label.
    """
    if isinstance(data, Data):
        return data
    name = object_name(data)
    if not isinstance(data, Mapping):
        return Data(_source(data, name), None)
    train = _source(_training(data), name)
    known = [split for split in data if split_of(split) in (TEST, VALIDATION)]
    others = {split: _source(data[split], f"{name} ({split})") for split in known}
    second = choose_splits(others)[1]
    test = None if second is None else in_classes(others.pop(second), train.classes, second)
    return Data(train, test, (), {split: in_classes(source, train.classes) for split, source in others.items()})


def _training(data: Mapping[str, Any]) -> Any:
    """Return the training images of a dict of splits."""
    first, _ = choose_splits(map(str, data))
    if first is None:
        raise PatchloomError("a dict of images has the key train, and may have the key test: name its splits so")
    return data[first]


def _sized(data: Any) -> Any:
    """Return the object if its images can be counted and read in any order."""
    kind = type(data).__name__
    if isinstance(data, DataLoader):
        raise PatchloomError(f"a {kind} chooses batches and order itself: give its dataset, as loader.dataset")
    if isinstance(data, IterableDataset | Iterator):
        raise PatchloomError(
            f"the images of a {kind} come in one order, and a run needs random access: give a list, or a Dataset with "
            "__len__ and __getitem__"
        )
    if isinstance(data, Image.Image):
        raise PatchloomError("that is a single image: give a list of images")
    if isinstance(data, bytes | bytearray) or not (isinstance(data, Sized | Source) and hasattr(data, "__getitem__")):
        if not isinstance(data, Source):
            raise PatchloomError(f"an object of type {kind} is not a set of images: {KINDS}")
    try:
        len(data)
    except (TypeError, NotImplementedError) as problem:  # an array without dimensions, and torch's own Dataset
        raise PatchloomError(f"this {kind} has no length: {KINDS}") from problem
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
        shape = tuple(data.shape)
        if len(shape) == 3 and min(shape[0], shape[-1]) <= 4:
            raise PatchloomError(
                f"an array {format_shape(shape)} looks like one image: give [n h w c] or [n c h w], n images"
            )
        if len(shape) not in (3, 4):
            raise PatchloomError(
                f"an array {format_shape(shape)} is not a set of images: give [n h w], [n h w c] or [n c h w]"
            )
        return InMemorySource(name, data, kind)
    if not isinstance(data, list | tuple):
        return DatasetSource(name, data)
    paths = [isinstance(image_of(item), str | os.PathLike) for item in data]
    if all(paths):
        files = [os.path.abspath(os.path.expanduser(image_of(item))) for item in data]
        if folder := next((path for path in files if os.path.isdir(path)), None):
            raise PatchloomError(f"{folder} is a folder among image files: give only folders, or only files")
        if not any(map(os.path.isfile, files)):
            raise PatchloomError(f"none of the {len(files):,} files of the list exists: the first is {files[0]}")
        labels = encode_labels([label_of(item) for item in data])
        return Files(name, Path(os.sep), files, *labels, sound=detect_sound(files, name))
    if any(paths):
        path, other = paths.index(True), paths.index(False)
        raise PatchloomError(f"{kind}[{path}] is a path and {kind}[{other}] is not: give only paths, or only images")
    return InMemorySource(name, data, kind)


class InMemorySource(Source):
    """Images in memory.

    Args:
        name: name, see `object_name`.
        items: array with n first, or list of images, each alone or with a label.
        kind: name of the collection, for messages.
    """

    in_memory = True

    def __init__(self, name: str, items: Sequence[Any] | np.ndarray | Tensor, kind: str) -> None:
        self.name, self.kind, self.to_label = name, kind, _LABEL_HINT
        self.images: Any
        if isinstance(items, np.ndarray | Tensor):
            self.images = items.detach().cpu() if isinstance(items, Tensor) else items
        else:
            self.images = [to_image_object(image_of(item), self.describe(i)) for i, item in enumerate(items)]
            self.classes, self.labels = encode_labels([label_of(item) for item in items])
        self.first = is_channels_first(self.images if isinstance(self.images, list) else self.images[:1], kind)
        for i in evenly_spaced(len(self), _SAMPLED_ITEMS):  # an error that all images have is raised at once
            read_or_refuse(self, i)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, i: int) -> Tensor:
        return to_image_tensor(self.images[i], self.first, self.describe(i))

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray:
        if self._contents is None:
            self._contents = contents_of(PIXEL_KIND, (pixels_of(self, i) for i in range(len(self))))
        return self._contents if chosen is None else self._contents[chosen]

    def describe(self, i: int) -> str:
        return f"{self.kind}[{i}]"

    def fingerprint(self) -> str:
        """Return a digest of the pixels and labels, independent of the type of the array."""
        return fingerprint_images(self, self.contents())
