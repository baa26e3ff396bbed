"""What a set of images is, and how to split one."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from torch import Tensor

from patchloom.errors import PatchloomError

MOST_HELD_OUT = 2000
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
        """16 hex digits that no other pixels can have, for what is kept and used again; None: that cannot be known.

        Stricter than `fingerprint`, which a folder keeps when it is moved or copied with its times.
        """
        return self.fingerprint()

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray | None:
        """16 bytes of each image [n], `CONTENT`, which are equal for exact copies, and for them alone.

        None: that cannot be told without fetching or decoding all images. chosen: of these images only, [len(chosen)].
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


def hold_out(
    source: Source, share: float = 0.05, most: int = MOST_HELD_OUT, seed: int = 0, *, exact: bool = True
) -> tuple[Source, Source]:
    """Split into (training, held out); the second takes `share` of the images, at least 1 and at most `most`.

    Stratified where there are labels. Both keep the source's order. Exact copies of held-out images are in neither
    part; exact=False does not look for them, and reads no files.

    Raises: PatchloomError for fewer than 2 images.
    """
    return apart(source, *choose(source, min(round(share * len(source)), most), seed, exact=exact))


def split_for_test(source: Source, share: float = 0.2, seed: int = 0) -> tuple[Source, Source]:
    """Split labelled data that brings no test images into (training, test), stratified.

    Exact copies of test images are in neither part. Raises: PatchloomError for fewer than 2 images.
    """
    return apart(source, *choose(source, round(share * len(source)), seed))


def apart(source: Source, second: np.ndarray, copies: np.ndarray) -> tuple[Source, Source]:
    """(all other images, those of the indices `second`); `copies` are indices that are in neither part."""
    rest = np.setdiff1d(np.arange(len(source)), np.concatenate([second, copies]))
    return source.subset(rest), source.subset(second)


def choose(
    source: Source, count: int, seed: int, known: np.ndarray | None = None, *, exact: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` images, at least 1 and never all, stratified where there are labels.

    known: contents that are not drawn, as long as there are others; then perhaps fewer than `count` are.
    exact: look for copies, where they can be told.

    Returns: their indices and those of their exact copies, both sorted. Raises: PatchloomError for fewer than 2 images.
    """
    n = len(source)
    if n < 2:
        raise PatchloomError(
            f"{source.name} holds {n} image{'s'[: n != 1]}, which cannot be split: add at least 2 images"
        )
    labels = np.zeros(n, np.int64) if source.labels is None else source.labels
    contents = source.contents() if exact else None
    if contents is None:
        return pick(labels, min(max(count, 1), n - 1), seed), np.empty(0, np.int64)
    _, first, which = np.unique(contents, return_index=True, return_inverse=True)
    if len(first) < 2:
        raise PatchloomError(
            f"the {n} files of {source.name} are copies of one image, or none could be read: add others"
        )
    candidates = np.sort(first)  # one of each content: all images, where there are no copies
    if known is not None:
        new = candidates[~np.isin(contents[candidates], known)]
        candidates = new if len(new) else candidates
    count = min(max(count, 1), len(first) - 1, len(candidates))
    chosen = candidates[pick(labels[candidates], count, seed)]
    return chosen, np.setdiff1d(np.flatnonzero(np.isin(which, which[chosen])), chosen)


def pick(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Sorted indices of `count` images drawn at random, from each label in proportion.

    The last image of a label is drawn only when nothing else is left: a rare class stays in the training images.
    """
    rng = np.random.default_rng(seed)
    turn = np.empty(len(labels))
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        # Evenly spaced with a random start: any prefix of the sorted turns holds the labels in proportion.
        turn[members] = (np.arange(len(members)) + rng.random()) / len(members)
        turn[members[-1]] += 1
    return np.sort(np.argsort(turn, kind="stable")[:count])
