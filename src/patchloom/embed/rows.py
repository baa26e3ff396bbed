"""The rows of a file: how the formats are given them, and how they give them back. Never all vectors at once.

Letters: m rows of a part.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from patchloom.data import Source
from patchloom.data.sources.files import Files
from patchloom.data.sources.several import Several
from patchloom.embed.card import COUNTS, Card, plain
from patchloom.embed.parts import Parts


class Chunk(NamedTuple):
    """Some consecutive rows of a file: vectors [m ...], and of each path, split and name of its class, or None."""

    vectors: np.ndarray
    paths: list[str]
    splits: list[str]
    labels: list[str | None]


@dataclass(frozen=True)
class Rows:
    """What becomes a file: the rows of all parts, in order, one part at a time.

    Attributes:
        parts: all of them are on the disc.
        card: how they were made, with the counts.
        classes: names of the classes.
        splits: names of the splits.
        unreadable: names of images that could not be read.
    """

    parts: Parts
    card: Card
    classes: tuple[str, ...]
    splits: tuple[str, ...]
    unreadable: tuple[str, ...]

    @classmethod
    def of(cls, parts: Parts, card: Card) -> Rows:
        """With the counts, for which the numbers of all images are read."""
        rows, unreadable = 0, []
        for part, indices in parts.indices():
            rows += len(indices)
            missing = np.setdiff1d(np.arange(part.start, part.stop), indices)
            unreadable += [parts.sources[part.split].describe(int(i)) for i in missing]
        counts = dict(zip(COUNTS, (rows, len(unreadable)), strict=True))
        return cls(parts, card | counts, tuple(card["classes"]), tuple(parts.sources), tuple(unreadable))

    @property
    def count(self) -> int:
        """How many there are."""
        found: int = self.card["rows"]
        return found

    def paths(self) -> Iterator[list[str]]:
        """Of each part [m]."""
        for part, indices in self.parts.indices():
            yield [path_of(self.parts.sources[part.split], int(i)) for i in indices]

    def labels(self) -> Iterator[np.ndarray]:
        """Of each part, int64 [m], numbers in ``classes``; -1 for none."""
        for part, indices in self.parts.indices():
            labels = self.parts.sources[part.split].labels
            yield np.full(len(indices), -1, np.int64) if labels is None else labels[indices].astype(np.int64)

    def split_numbers(self) -> Iterator[np.ndarray]:
        """Of each part, uint8 [m], numbers in ``splits``."""
        for part, indices in self.parts.indices():
            yield np.full(len(indices), self.splits.index(part.split), np.uint8)

    def chunks(self) -> Iterator[Chunk]:
        """Each part with all that is known of its rows."""
        columns = (self.parts.vectors(), self.paths(), self.labels(), self.split_numbers())
        for vectors, paths, labels, splits in zip(*columns, strict=True):
            yield chunk_of(vectors, paths, splits, labels, self.splits, self.classes)


def chunk_of(
    vectors: np.ndarray,
    paths: list[str],
    splits: np.ndarray,
    labels: np.ndarray,
    split_names: tuple[str, ...],
    classes: tuple[str, ...],
) -> Chunk:
    """A `Chunk` from the numbers of splits and classes, [m] each."""
    names = [None if label < 0 else classes[label] for label in labels.tolist()]
    return Chunk(vectors, paths, [split_names[i] for i in splits.tolist()], names)


def path_of(source: Source, i: int) -> str:
    """What image i is called: its path within the folder that was given, or as a list or several sources have it.

    Without a path it is its name in messages, such as "shapes #3".
    """
    whole = source.describe(i)
    if isinstance(source, Files | Several):
        folder, path = PurePath(os.path.expanduser(source.name)), PurePath(whole)
        if path.is_relative_to(folder):  # with the folder of its split, by which the paths of two splits differ
            return plain(path.relative_to(folder).as_posix())
    place = None if isinstance(source, Several) else source.place(i)
    return plain(place or whole)
