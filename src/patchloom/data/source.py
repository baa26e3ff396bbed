"""Interface of all sources of images or recordings, and subsets of a source."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from patchloom.audio.config import Sound
from patchloom.audio.recordings import modality_of
from patchloom.data.modality import Modality
from patchloom.errors import PatchloomError
from patchloom.system.documents import is_whole

CONTENT = np.dtype("V16")  # the hash of an image's content


class Source(ABC):
    """Finite, ordered collection of images, or of recordings, which become pictures of their spectrum.

    Attributes:
        name: name as the user typed it.
        classes: names of the classes; () without labels.
        labels: int64 [n], -1 for images without a label, or None if no image has one.
        no_labels: reason why there are no labels, if it is known.
        to_label: advice on how to give such images labels.
        subjects: columns that may name what several images share, such as a patient, and have no role.
        groups: int64 [n], equal for images that must stay in one split, such as frames of one video; None: no groups.
        in_memory: whether reading an image needs no decoding.
        sound: how recordings become pictures; None for images.
        noise: recordings of noise, int16 [1 1 n] each, which training may add to others.
    """

    name: str
    classes: tuple[str, ...] = ()
    labels: np.ndarray | None = None
    no_labels: str = ""
    subjects: Sequence[str] = ()
    to_label: str = "put the images of each class in a separate sub-folder, or give a table with a column of labels"
    groups: np.ndarray | None = None
    in_memory: bool = False
    sound: Sound | None = None
    noise: tuple[Tensor, ...] = ()
    _contents: np.ndarray | None = None  # cached by `contents_on_disc`

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, i: int) -> Tensor:
        """Read image i: uint8 [c h w], or float32 [c h w] in [0, 1], which must not be modified.

        A recording is int16 [1 1 n], mono, at the rate of ``sound``, in its full length.
        """

    def make_ready(self, indices: Sequence[int] | np.ndarray) -> None:  # noqa: B027  # most sources have nothing to do
        """Prepare images that will be read next, if the source does that faster for many than for each."""

    def read_as(self, i: int, channels: int) -> Tensor:
        """Read image i and convert it to a number of channels, see `with_channels`."""
        return self.with_channels(i, self.read(i), channels)

    def with_channels(self, i: int, item: Tensor, channels: int) -> Tensor:
        """Convert image i, already read, to a number of channels; the error names it."""
        try:
            return self.modality.with_channels(item, channels)
        except PatchloomError as error:
            have = f"{len(item)} channel{'s' * (len(item) > 1)}"
            raise PatchloomError(
                f"{self.describe(i)} has {have} where {channels} are expected, and only 1 and 3 can be converted to "
                f"each other: take it out if other images have {channels} (patchloom check finds all such), choose "
                f"channels with @bands= behind the name of the data (docs/how-to/formats.md), or use an "
                f"encoder for {have}, such as one adapted to them by pretrain --init"
            ) from error

    @property
    def modality(self) -> Modality:
        """Modality of the items: their names, and how they become pictures."""
        return modality_of(self.sound)

    @property
    def noun(self) -> str:
        """Plural name of the items: images or recordings."""
        return self.modality.noun

    def cut(self, crop: Any, **excerpts: Any) -> Any:
        """Return the random crop of the items for training.

        Args:
            crop: random crop for images, for which it is returned.
            excerpts: options of `Excerpt`, which crops recordings and adds the ``noise`` to them.
        """
        return self.modality.cut(crop, self.noise, **excerpts)

    def heard_as(self, sound: Sound | None) -> Source:
        """Return the same recordings with another `Sound` for their pictures; with None, images unchanged."""
        if sound is None:
            return self
        if self.sound is None:
            raise PatchloomError(f"{self.name} holds images, which have no rate or length: give a folder of recordings")
        return self._heard_as(sound)

    def _heard_as(self, sound: Sound) -> Source:
        heard = copy(self)
        heard.sound = sound
        return heard

    @abstractmethod
    def fingerprint(self) -> str:
        """Return 16 hex digits that change when the content does."""

    def stamp(self) -> str | None:
        """Return 16 hex digits that change whenever a pixel may have changed, for caches; None if that is unknown.

        Stricter than `fingerprint`, which stays the same when a folder is moved, or copied with its modification times.
        """
        return self.fingerprint()

    def known_stamp(self) -> str | None:
        """Return the `stamp`; None also if a shard is missing, which costs only its images."""
        with suppress(PatchloomError):
            return self.stamp()
        return None

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray | None:
        """Return a hash of each image, `CONTENT` [n], equal for exact copies only; None if there are no hashes."""
        return None

    def order(self, rng: np.random.Generator, chosen: np.ndarray | None = None) -> np.ndarray:
        """Draw the order of the images in one epoch: a random permutation, int64 [n]."""
        return rng.permutation(len(self) if chosen is None else len(chosen))

    def describe(self, i: int) -> str:
        """Return the name of image i for messages: its path or its number."""
        return f"{self.name} #{i}"

    def place(self, i: int) -> str | None:
        """Return the path of image i within the source, with forward slashes; None if it has none."""
        return None

    def stored(self, i: int) -> Path | bytes | None:
        """Return the path of the file of image i, or the bytes of that file; None if it has no file of its own."""
        return None

    def column(self, name: str) -> Sequence[str] | None:
        """Return the values [n] in the column ``name`` of a table of images; None if there is no such column."""
        return None

    def column_names(self) -> Sequence[str]:
        """Return the names that `column` knows."""
        return ()

    def problem(self) -> str:
        """Return, once, a sentence on a fault that makes reading slow from now on; "" if there is none."""
        return ""

    def subset(self, indices: Sequence[int] | np.ndarray) -> Source:
        """Return only these images, in this order."""
        return Subset(self, indices)


class View(Source):
    """Images of other sources, in another order or selection."""

    @abstractmethod
    def _at(self, i: int) -> tuple[Source, int]:
        """Return the source that holds image i, and its index there."""

    def read(self, i: int) -> Tensor:
        source, inside = self._at(i)
        return source.read(inside)

    def describe(self, i: int) -> str:
        source, inside = self._at(i)
        return source.describe(inside)

    def place(self, i: int) -> str | None:
        source, inside = self._at(i)
        return source.place(inside)

    def stored(self, i: int) -> Path | bytes | None:
        source, inside = self._at(i)
        return source.stored(inside)


class Subset(View):
    """Some images of another source, in the order of ``indices``. Labels keep their meaning."""

    def __init__(self, source: Source, indices: Sequence[int] | np.ndarray) -> None:
        self.source, self.indices = source, np.asarray(indices, dtype=np.int64)
        self.name, self.classes, self.no_labels = source.name, source.classes, source.no_labels
        self.to_label, self.in_memory, self.sound = source.to_label, source.in_memory, source.sound
        self.noise, self.subjects = source.noise, source.subjects
        self.labels = None if source.labels is None else source.labels[self.indices]
        self.groups = None if source.groups is None else source.groups[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def _at(self, i: int) -> tuple[Source, int]:
        return self.source, int(self.indices[i])

    def make_ready(self, indices: Sequence[int] | np.ndarray) -> None:
        self.source.make_ready(self.indices[np.asarray(indices, np.int64)])

    def _heard_as(self, sound: Sound) -> Source:
        heard = copy(self)  # keeps groups that were assigned later
        heard.source, heard.sound = self.source.heard_as(sound), sound
        return heard

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray | None:
        return self.source.contents(self.indices if chosen is None else self.indices[chosen])

    def order(self, rng: np.random.Generator, chosen: np.ndarray | None = None) -> np.ndarray:
        return self.source.order(rng, self.indices if chosen is None else self.indices[chosen])

    def column(self, name: str) -> Sequence[str] | None:
        whole = self.source.column(name)
        return None if whole is None else [whole[i] for i in self.indices.tolist()]

    def column_names(self) -> Sequence[str]:
        return self.source.column_names()

    def problem(self) -> str:
        return self.source.problem()

    def fingerprint(self) -> str:
        return digest(chain([self.source.fingerprint()], map(str, self.indices)))

    def stamp(self) -> str | None:
        whole = self.source.stamp()
        return None if whole is None else digest(chain([whole], map(str, self.indices)))


@dataclass(frozen=True)
class Data:
    """Data opened by `open_data`.

    Attributes:
        train: training images.
        test: test images, if the data brings its own.
        notes: a line on each kind of file that was left out or read in an unexpected way: how many, which, and why.
        others: splits used neither for training nor as the test, such as val, by name.
    """

    train: Source
    test: Source | None
    notes: tuple[str, ...] = ()
    others: Mapping[str, Source] = field(default_factory=dict)

    @property
    def splits(self) -> dict[str, Source]:
        """All splits by name: train, test if there is one, and the others."""
        found = {"train": self.train} if self.test is None else {"train": self.train, "test": self.test}
        return found | {name: source for name, source in self.others.items() if name not in found}

    def heard_as(self, sound: Sound | None) -> Data:
        """Return the same recordings with another `Sound`, see `Source.heard_as`."""
        test = None if self.test is None else self.test.heard_as(sound)
        others = {name: source.heard_as(sound) for name, source in self.others.items()}
        return replace(self, train=self.train.heard_as(sound), test=test, others=others)


def number_words(words: Sequence[str], by_value: bool = True) -> tuple[tuple[str, ...], np.ndarray | None]:
    """Return the classes among the labels of images, and the number of each, int64 [n]; -1 and None for no labels.

    Args:
        words: label of each image; "" for none.
        by_value: whether classes that are whole numbers are sorted by their values, and not as text.
    """
    known = {*words} - {""}
    if not known:
        return (), None
    numbers = by_value and all(map(is_whole, known))
    classes = tuple(sorted(known, key=lambda word: (int(word) if numbers else 0, word)))
    number = {word: i for i, word in enumerate(classes)}
    return classes, np.array([number.get(word, -1) for word in words], np.int64)


def in_classes(source: Source, classes: tuple[str, ...], split: str = "", remedy: str = "") -> Source:
    """Return the source with labels that are numbers in ``classes``, those of the training images.

    An image of another class has no label; in the test, called ``split``, it is an error.
    """
    found = copy(source)
    if source.labels is not None:
        if split and classes:
            for i in np.unique(source.labels[source.labels >= 0]):
                if source.classes[i] not in classes:
                    raise PatchloomError(
                        f"{source.name} has the class {source.classes[i]} in {split} but not in train: "
                        f"{remedy or 'give both the same classes, or remove that one'}"
                    )
        number = {word: i for i, word in enumerate(classes)}
        labels = np.array([*(number.get(word, -1) for word in source.classes), -1], np.int64)[source.labels]
        found.labels, found.classes = (labels, classes) if classes else (None, ())
    return found


def digest(parts: Iterable[str]) -> str:
    """Return 16 hex digits that identify a sequence of strings."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode("utf-8", "surrogateescape") + b"\0")
    return total.hexdigest()[:16]


def stamp_of_files(paths: Iterable[str | os.PathLike[str]]) -> str:
    """Return 16 hex digits that change when a file is written, replaced or touched, even if its mtime is set back.

    The files are not read: inode, size, mtime and ctime are compared. Of a file's name only the suffix counts, which
    determines its format.
    """

    def state(path: str | os.PathLike[str]) -> str:
        known = "missing"
        with suppress(OSError, ValueError):  # ValueError: a name that no file can have
            s = os.stat(path)
            known = f"{s.st_ino}\t{s.st_size}\t{s.st_mtime_ns}\t{s.st_ctime_ns}"
        return f"{os.path.splitext(path)[1]}\t{known}"

    return digest(map(state, paths))
