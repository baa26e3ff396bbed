"""Images with their label maps as they are stored, wherever they lie, and one look at all of them before training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path

import numpy as np

from patchloom.data.annotated.header import header_of
from patchloom.data.annotated.label_files import read_ids
from patchloom.data.read import Unreadable
from patchloom.data.sources.base import Source, digest
from patchloom.data.sources.files import Files
from patchloom.data.workers import in_threads
from patchloom.errors import PatchloomError
from patchloom.files import cache_root, sealed, unsealed, write_whole
from patchloom.waiting import Waiting

_FORMAT = "label maps 1"  # to be raised with changes of the code that reads label maps


class StoredMaps(ABC):
    """Images and the label map of each, in the same order.

    Attributes:
        images: the images.
    """

    images: Source

    @abstractmethod
    def ids(self, i: int) -> np.ndarray:
        """The numbers in the label map of image i, of an integer dtype [h w], as `read_ids` says.

        Raises:
            Unreadable: it cannot be read.
            PatchloomError: it is no label map.
        """

    @abstractmethod
    def describe(self, i: int) -> str:
        """Name of the label map of image i in messages."""

    @abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits that change when a label map does; images do not count."""

    def stamp(self) -> str | None:
        """As `Source.stamp`, of images and label maps."""
        return None

    def image_size(self, i: int) -> tuple[int, int]:
        """(h, w) of image i.

        Raises:
            PatchloomError: it cannot be read.
        """
        height, width = self.images.read(i).shape[1:]
        return height, width


class FileMaps(StoredMaps):
    """Images and label maps in files.

    Args:
        images: the images.
        labels: their label maps, as files; they are never read as images.
        colours: for `read_ids`.
    """

    def __init__(self, images: Files, labels: Files, colours: np.ndarray | None) -> None:
        self.images, self.labels, self.colours = images, labels, colours

    def ids(self, i: int) -> np.ndarray:
        return read_ids(Path(self.describe(i)), self.describe(i), self.colours)

    def describe(self, i: int) -> str:
        return self.labels.describe(i)

    def fingerprint(self) -> str:
        return self.labels.fingerprint()

    def stamp(self) -> str | None:
        colours = "" if self.colours is None else str(self.colours.tolist())
        return digest([str(self.images.stamp()), self.labels.stamp(), colours])

    def image_size(self, i: int) -> tuple[int, int]:
        return size_in_head(Path(self.images.describe(i)), self.images.describe(i))


def size_in_head(stored: Path | bytes, name: str) -> tuple[int, int]:
    """(h, w) of an image by the head of its file.

    Raises:
        Unreadable: it is missing or broken.
    """
    try:
        return header_of(stored, name).size
    except FileNotFoundError as problem:
        raise Unreadable(f"{name} is not there") from problem


def ids_of(maps: StoredMaps, where: str) -> np.ndarray:
    """Look at all label maps: which numbers each holds, and in how many pixels.

    All problems are found before anything is trained. The result is cached until a file changes.

    Args:
        maps: images and label maps.
        where: what they are called while they are read.

    Returns:
        Rows of image, number and pixels, int64 [m 3], sorted.

    Raises:
        PatchloomError: a label map cannot be read, or is of another size than its image.
    """
    stamp = maps.stamp()
    place = None if stamp is None else cache_root() / "label_maps" / digest([_FORMAT, stamp])
    known = None if place is None else _read(place)
    if known is not None:
        return known
    found: list[np.ndarray] = []
    problems: list[PatchloomError] = []
    n = len(maps.images)
    with (
        Waiting(f"reading the label maps of {where}", n) as waiting,
        closing(in_threads(lambda i: _look(maps, i), range(n))) as looks,
    ):
        for i, look in enumerate(looks):
            waiting.advance()
            if isinstance(look, PatchloomError):
                problems.append(look)
            else:
                found.append(np.insert(look, 0, i, axis=1))
    if problems:
        more = f" ({len(problems) - 1:,} more of {n:,} cannot be used)" if len(problems) > 1 else ""
        raise PatchloomError(f"{problems[0]}{more}")
    rows = np.concatenate(found)
    if place is not None and maps.stamp() == stamp:  # otherwise files changed meanwhile
        try:
            write_whole(place, sealed(rows.tobytes()))
        except PatchloomError:  # a full or read-only disc only costs another pass
            pass
    return rows


def _look(maps: StoredMaps, i: int) -> np.ndarray | PatchloomError:
    """Numbers and pixels of a label map, int64 [m 2]; or what is wrong with it."""
    try:
        ids = maps.ids(i)
        size = maps.image_size(i)
        if size != ids.shape:  # a head may tell another size than what decoding makes of the file
            size = tuple(maps.images.read(i).shape[1:])
    except PatchloomError as problem:
        return problem
    if size != ids.shape:
        (h, w), (height, width) = ids.shape, size
        return PatchloomError(
            f"{maps.describe(i)} has {h} x {w} pixels and its image {maps.images.describe(i)} {height} x {width}: "
            "label maps have the size of their images"
        )
    if int(ids.max()) > 65535:
        return PatchloomError(f"{maps.describe(i)} holds the number {ids.max()}: label maps hold numbers up to 65,535")
    counts = np.bincount(ids.ravel())
    numbers = np.flatnonzero(counts)
    return np.stack([numbers, counts[numbers]], axis=1).astype(np.int64)


def _read(place: Path) -> np.ndarray | None:
    """The rows in a cached file; None if there is none, or it is damaged."""
    try:
        content = unsealed(place.read_bytes())
    except OSError:
        return None
    return None if content is None or len(content) % 24 else np.frombuffer(content, np.int64).reshape(-1, 3)
