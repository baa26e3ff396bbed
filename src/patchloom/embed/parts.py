"""Parts in which vectors reach the disc as they come, beside the file that they become: what a kill leaves is kept.

A part has the vectors of some consecutive images of a split, those that cannot be read left out, and the numbers of its
images. Parts begin where batches begin, so that a pass that goes on has the same batches, and the same bits.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from patchloom.data import Source
from patchloom.embed.card import Card, as_text, differences, from_text
from patchloom.errors import PatchloomError
from patchloom.files import make_folder, remove_leftovers, write_whole
from patchloom.hints import listing

_ROWS, _BYTES = 1024, 2**26  # of a part, whichever is less
_WAIT = 5.0  # seconds for a process that is about to end


class Part(NamedTuple):
    """Images ``start`` to ``stop`` - 1 of a split, and the file with their vectors."""

    split: str
    start: int
    stop: int
    path: Path


def rows_of_part(row_bytes: int, batch_size: int) -> int:
    """Images of a part: whole batches, of up to 1,024 images and 64 MB, or one."""
    return batch_size * max(1, min(_ROWS, _BYTES // row_bytes) // batch_size)


class Parts:
    """The parts of a file, in a folder beside it.

    Args:
        file: what they become; the folder's name is the file's with ``.parts`` behind it.
        sources: images by split, in the order of the rows.
        shape: of the vector of an image.
        dtype: of what is written.
        batch_size: images of a batch.
    """

    def __init__(
        self, file: Path, sources: Mapping[str, Source], shape: tuple[int, ...], dtype: np.dtype, batch_size: int
    ) -> None:
        self.folder, self.sources, self.shape, self.dtype = file.with_name(f"{file.name}.parts"), sources, shape, dtype
        self.batch_size = batch_size
        rows = rows_of_part(int(np.prod(shape)) * dtype.itemsize, batch_size)
        self.all = [
            Part(split, start, min(start + rows, len(source)), self.folder / f"{split}-{start:09}.safetensors")
            for split, source in sources.items()
            for start in range(0, len(source), rows)
        ]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing the same parts.

        Raises:
            PatchloomError: another process is at it, or the folder cannot be made.
        """
        make_folder(self.folder)
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=_WAIT)
        except Timeout:
            raise PatchloomError(
                f"another process is writing {self.folder}: wait for its end, or choose another --to"
            ) from None
        except (OSError, NotImplementedError):  # a file system without locks, or read-only: what is written next tells
            pass
        try:
            yield
        finally:
            lock.release()

    @property
    def noun(self) -> str:
        """What the sources hold: images or recordings."""
        return next(iter(self.sources.values())).noun

    @property
    def images(self) -> int:
        """How many there are in all splits."""
        return sum(map(len, self.sources.values()))

    def are_of(self, card: Card) -> bool:
        """Whether parts of this card are on the disc."""
        with contextlib.suppress(OSError, PatchloomError):
            return not differences(card, self._card())
        return False

    def _card(self) -> Card:
        path = self.folder / "card.json"
        return from_text(path.read_text("utf-8", "replace"), path)

    def begin(self, card: Card) -> None:
        """Take the folder for vectors of this ``card``, or go on with those that are there; it must be locked.

        Raises:
            PatchloomError: parts of another card are there, or nothing can be written.
        """
        with contextlib.suppress(FileNotFoundError):
            if other := differences(card, self._card()):
                raise PatchloomError(
                    f"{self.folder} holds what a command with another {listing(other[:3], 'and')} began: repeat that "
                    "command, choose another --to, or remove that folder"
                )
        remove_leftovers(self.folder)
        write_whole(self.folder / "card.json", as_text(card))

    def there(self) -> int:
        """How many parts are on the disc; they are written in order."""
        return next((i for i, part in enumerate(self.all) if not part.path.exists()), len(self.all))

    def write(self, part: Part, indices: Sequence[np.ndarray], vectors: Sequence[np.ndarray]) -> None:
        """Write a part from its batches: numbers of images, int64 [b] each, and vectors [b ...].

        Raises:
            PatchloomError: a disc that is full.
        """
        content = {
            "indices": np.concatenate([np.zeros(0, np.int64), *indices]),
            "vectors": np.concatenate([np.zeros((0, *self.shape), self.dtype), *vectors]),
        }
        write_whole(part.path, save(content))

    def indices(self) -> Iterator[tuple[Part, np.ndarray]]:
        """Each part, and the numbers int64 [m] of its images that could be read."""
        for part in self.all:
            yield part, self._read(part, "indices")

    def vectors(self) -> Iterator[np.ndarray]:
        """Vectors [m ...] of each part."""
        for part in self.all:
            yield self._read(part, "vectors")

    def _read(self, part: Part, name: str) -> np.ndarray:
        try:
            with safe_open(part.path, "np") as file:
                found: np.ndarray = file.get_tensor(name)
                return found
        except (OSError, SafetensorError) as problem:
            raise PatchloomError(
                f"{part.path} cannot be read ({problem}): remove it, and give the same command again"
            ) from problem

    def remove(self) -> None:
        """Remove the folder, since the file is whole."""
        shutil.rmtree(self.folder, ignore_errors=True)


def narrowed(vectors: np.ndarray, dtype: str) -> np.ndarray:
    """A copy of float32 vectors in the numbers of a file.

    Raises:
        PatchloomError: float16 cannot hold them.
    """
    with np.errstate(over="ignore"):  # told below
        narrow = vectors.astype(dtype)
    if not np.isfinite(narrow).all():
        raise PatchloomError("some vectors have values beyond 65,504, which float16 cannot hold: leave out --dtype")
    return narrow


class PartWriter:
    """Collects the batches of a split, and writes each part when its last batch has come.

    Args:
        parts: of all splits.
        missing: those that are to be written: the last ones of a split, in order.
    """

    def __init__(self, parts: Parts, missing: Sequence[Part]) -> None:
        self.parts, self.missing = parts, list(missing)
        self.indices: list[np.ndarray] = []
        self.vectors: list[np.ndarray] = []

    def add(self, indices: np.ndarray, vectors: np.ndarray) -> None:
        """Take a batch: numbers of images, int64 [b], b at least 1, and vectors [b ...] float32.

        Raises:
            PatchloomError: as `Parts.write`; or values that float16 cannot hold.
        """
        while self.missing[0].stop <= indices[0]:
            self._write()
        self.indices.append(indices)
        self.vectors.append(narrowed(vectors, self.parts.dtype))
        # a batch ends where it would end if all of it could be read
        if (int(indices[0]) // self.parts.batch_size + 1) * self.parts.batch_size >= self.missing[0].stop:
            self._write()

    def finish(self) -> None:
        """No batch will come any more: what is left has no image that can be read.

        Raises:
            PatchloomError: as `Parts.write`.
        """
        while self.missing:
            self._write()

    def _write(self) -> None:
        self.parts.write(self.missing.pop(0), self.indices, self.vectors)
        self.indices, self.vectors = [], []
