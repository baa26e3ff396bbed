"""What a source of images is: the interface that all of them implement, and the subset of one."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from torch import Tensor

TEST_SPLITS = ("test", "val", "validation")  # what a split of test images may be called, the first that is there
CONTENT = np.dtype("V16")  # what is equal for exact copies of an image


class Source(ABC):
    """A finite, ordered collection of images.

    name: what the user typed. classes: names of the classes, () without labels. labels: int64 [n], -1 where an image
    has none, or None if no image has one.
    """

    name: str
    classes: tuple[str, ...] = ()
    labels: np.ndarray | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, i: int) -> Tensor:
        """Image i: uint8 [c h w], or float32 [c h w] in [0, 1]. Do not write into it. Raises: Unreadable."""

    @abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits that change when the content does."""

    def stamp(self) -> str | None:
        """16 hex digits that no other pixels can have, for what is cached; None: that cannot be known.

        Stricter than `fingerprint`, which a folder keeps when it is moved or copied with its times.
        """
        return self.fingerprint()

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray | None:
        """16 bytes of each image [n], `CONTENT`, which are equal for exact copies, and for them alone.

        None: all images would have to be fetched or decoded for it. chosen: of these images only, [len(chosen)].
        """
        return None

    def order(self, rng: np.random.Generator, chosen: np.ndarray | None = None) -> np.ndarray:
        """The order in which a pass of the training takes the images: a permutation, int64 [n].

        chosen: only these images, in some order; the permutation is then of them, int64 [len(chosen)].
        """
        return rng.permutation(len(self) if chosen is None else len(chosen))

    def describe(self, i: int) -> str:
        """What to call image i in a message: its path, or its number."""
        return f"{self.name} #{i}"

    def subset(self, indices: Sequence[int] | np.ndarray) -> Source:
        """Only these images, in this order."""
        return Subset(self, indices)


class Subset(Source):
    """Some images of another source, in the order of `indices`; classes keep their numbers."""

    def __init__(self, source: Source, indices: Sequence[int] | np.ndarray) -> None:
        self.source, self.indices = source, np.asarray(indices, dtype=np.int64)
        self.name, self.classes = source.name, source.classes
        self.labels = None if source.labels is None else source.labels[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, i: int) -> Tensor:
        return self.source.read(int(self.indices[i]))

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray | None:
        return self.source.contents(self.indices if chosen is None else self.indices[chosen])

    def order(self, rng: np.random.Generator, chosen: np.ndarray | None = None) -> np.ndarray:
        return self.source.order(rng, self.indices if chosen is None else self.indices[chosen])

    def describe(self, i: int) -> str:
        return self.source.describe(int(self.indices[i]))

    def fingerprint(self) -> str:
        return digest(chain([self.source.fingerprint()], map(str, self.indices)))

    def stamp(self) -> str | None:
        whole = self.source.stamp()
        return None if whole is None else digest(chain([whole], map(str, self.indices)))


@dataclass(frozen=True)
class Data:
    """What `open_data` found: images to train on and, where the data says so itself, images to test on."""

    train: Source
    test: Source | None


def digest(parts: Iterable[str]) -> str:
    """16 hex digits of a sequence of strings."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode("utf-8", "surrogateescape") + b"\0")
    return total.hexdigest()[:16]


def stamp_of_files(paths: Iterable[str | os.PathLike[str]]) -> str:
    """16 hex digits that change when a file is written, replaced or touched, even if its time is set back.

    Nothing is read: the file's number (inode) and the system's own record of its last change (ctime) tell. Of its name
    only the suffix matters, which says how it is read.
    """
    return digest(map(_state, paths))


def _state(path: str | os.PathLike[str]) -> str:
    try:
        s = os.stat(path)
        known = f"{s.st_ino}\t{s.st_size}\t{s.st_mtime_ns}\t{s.st_ctime_ns}"
    except OSError:
        known = "missing"
    return f"{os.path.splitext(path)[1]}\t{known}"
