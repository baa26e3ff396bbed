"""Folders of parts, each a complete file with the vectors of consecutive images, for any number of processes.

Parts start at batch boundaries, so a part has the same batches regardless of the process that computes it. Existing
parts are not computed again. The card of the folder, ``_card.json``, has the number of rows once all parts exist.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from patchloom.data.source import Source
from patchloom.data.sources.concat import ConcatSource
from patchloom.data.sources.files import Files
from patchloom.embed.formats import BYTES, COUNTS, ROWS, Card, Rows, parse_card, read_card, read_rows, write_rows
from patchloom.errors import PatchloomError, listing
from patchloom.system.files import make_folder, move_whole, read_text, remove_leftovers, write_whole

CARD = "_card.json"  # readers of Parquet folders ignore names with an underscore
_RENAMED = "encoder name"  # may change if the run's folder is renamed; the weights have their own digest
_WAIT = 5.0  # seconds to wait for a lock


def _flat(card: Card) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in card.items():
        nested = isinstance(value, dict)
        found |= {f"{name} {key}": one for key, one in value.items()} if nested else {name: value}
    return found


def to_utf8(text: str) -> str:
    """Replace characters that UTF-8 cannot encode: all formats need UTF-8, and some file names are not."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def path_of(source: Source, i: int) -> str:
    """Return the path of image i relative to the given folder, or the whole path for a list or several sources.

    For an image without a path it is its name in messages, such as "shapes #3".
    """
    whole = source.describe(i)
    if isinstance(source, Files | ConcatSource):
        folder, path = PurePath(os.path.expanduser(source.name)), PurePath(whole)
        if path.is_relative_to(folder):  # includes the folder of the split, which makes paths unique
            return to_utf8(path.relative_to(folder).as_posix())
    place = None if isinstance(source, ConcatSource) else source.place(i)
    return to_utf8(place or whole)


def cast_vectors(vectors: np.ndarray, dtype: str | np.dtype) -> np.ndarray:
    """Return a copy of float32 vectors as ``dtype``."""
    with np.errstate(over="ignore"):  # checked below
        narrow = vectors.astype(dtype)
    if not np.isfinite(narrow).all():
        raise PatchloomError("some vectors have values beyond 65,504, which float16 cannot hold: leave out --dtype")
    return narrow


class Part(NamedTuple):
    """Part: images ``start`` to ``stop`` - 1 of a split, and the file with their vectors."""

    split: str
    start: int
    stop: int
    path: Path


class PartFolder:
    """Folder with the parts of all splits, in the order of the rows.

    Args:
        folder: path of the folder.
        suffix: file suffix, one of `FORMATS`.
        sources: images by split.
        card: how the vectors are made, without counts.
        batch_size: number of images per batch. A part has whole batches: up to 1,024 images and 64 MB, or one batch.
    """

    def __init__(self, folder: Path, suffix: str, sources: Mapping[str, Source], card: Card, batch_size: int) -> None:
        self.folder, self.suffix, self.sources, self.card = folder, suffix, sources, card
        self.batch_size, self.dtype, self.shape = batch_size, np.dtype(card["dtype"]), tuple(card["shape"])
        row_bytes = int(np.prod(self.shape)) * self.dtype.itemsize
        rows = batch_size * max(1, min(ROWS, BYTES // row_bytes) // batch_size)
        self.all = [
            Part(split, start, min(start + rows, len(source)), folder / f"{split}-{start:09}{suffix}")
            for split, source in sources.items()
            for start in range(0, len(source), rows)
        ]

    @property
    def noun(self) -> str:
        """Images or recordings."""
        return next(iter(self.sources.values())).noun

    @property
    def size(self) -> int:
        """Size of the existing parts in bytes."""
        return sum(part.path.stat().st_size for part in self.all if part.path.exists())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and prevent other commands from writing the same parts."""
        make_folder(self.folder)
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=_WAIT)
        except Timeout:
            raise PatchloomError(
                f"another process is writing {self.folder}: wait until it ends, or choose another --to"
            ) from None
        except (OSError, NotImplementedError):  # no locks, or read-only: the next write reports it
            pass
        try:
            yield
        finally:
            lock.release()

    def missing(self) -> list[Part]:
        """Return the missing parts.

        Raises:
            PatchloomError: if the folder has other files, or a part is damaged or was made with other settings.
        """
        begun = self._read_card()
        if begun is None:
            if self.folder.is_dir() and any(not one.name.startswith(".") for one in self.folder.iterdir()):
                raise PatchloomError(
                    f"{self.folder} exists and was not written by embed: choose another --to, or remove it"
                )
            return self.all
        self.check(begun, self.folder)
        there = {part for part in self.all if part.path.exists()}
        for part in there:
            self.check(read_card(part.path), part.path)
        return [part for part in self.all if part not in there]

    def check(self, found: Card, path: Path, **more: str) -> None:
        """Refuse a file or folder whose card says that it was made otherwise; ``more``: further fields."""
        mine, its = _flat(self.card | more), _flat(found)
        names = [name for name in dict.fromkeys([*mine, *its]) if mine.get(name) != its.get(name)]
        names = [name for name in names if name not in (*COUNTS, _RENAMED)]
        names.sort(key=lambda name: name != "encoder weights_sha256")
        if names:
            raise PatchloomError(
                f"{path} was made by a command with another {listing(names[:3], 'and')}: repeat that command, choose "
                "another --to, or remove it"
            )

    def finished(self) -> Card | None:
        """Return the card with its counts if all parts exist; call `missing` first, which checks them."""
        card = self._read_card()
        return card if card and COUNTS[0] in card and all(part.path.exists() for part in self.all) else None

    def begin(self) -> None:
        """Write the card if there is none; the folder must be locked."""
        remove_leftovers(self.folder)
        if not (self.folder / CARD).exists():
            write_whole(self.folder / CARD, json.dumps(self.card))

    def _read_card(self) -> Card | None:
        path = self.folder / CARD
        return parse_card(read_text(path, errors="replace"), path) if path.exists() else None

    def write(self, part: Part, indices: Sequence[np.ndarray], vectors: Sequence[np.ndarray]) -> None:
        """Write a part from its batches: numbers int64 [b] of readable images, and vectors [b ...]."""
        numbers = np.concatenate([np.zeros(0, np.int64), *indices]).tolist()
        source, classes = self.sources[part.split], self.card["classes"]
        labels = [-1] * len(numbers) if source.labels is None else source.labels[numbers].tolist()
        rows = Rows(
            np.concatenate([np.zeros((0, *self.shape), self.dtype), *vectors]),
            [path_of(source, i) for i in numbers],
            [part.split] * len(numbers),
            [None if label < 0 else classes[label] for label in labels],
        )
        card = self.card | {"rows": len(numbers), "unreadable": part.stop - part.start - len(numbers)}
        write_rows(part.path, rows, card)

    def finish(self) -> tuple[Card, list[str]]:
        """Write and return the card with its counts; also return the names of unreadable images."""
        prints = {name: source.fingerprint() for name, source in self.sources.items()}
        if prints != self.card["data"]["fingerprint"]:
            raise PatchloomError(
                f"{self.card['data']['name']} has changed while its {self.noun} were read: remove {self.folder} and "
                "repeat the command"
            )
        rows, unreadable = dict.fromkeys(self.sources, 0), list[str]()
        for part in self.all:
            here = read_card(part.path)
            self.check(here, part.path)  # another machine may have another version, or other images
            rows[part.split] += here["rows"]
            if here["unreadable"]:
                there, source = {*self._read(part).paths}, self.sources[part.split]
                lost = [i for i in range(part.start, part.stop) if path_of(source, i) not in there]
                unreadable += map(source.describe, lost)
        for split, source in self.sources.items():
            if not rows[split]:
                raise PatchloomError(f"nothing in {source.name} could be read, beginning with {source.describe(0)}")
        card = self.card | {"rows": sum(rows.values()), "unreadable": len(unreadable)}
        write_whole(self.folder / CARD, json.dumps(card))
        return card, unreadable

    def join(self, file: Path, card: Card) -> None:
        """Join all parts in memory, write them as one file, and remove the folder."""
        vectors, *texts = zip(*map(self._read, self.all), strict=True)
        rows = Rows(np.concatenate(vectors), *(list(chain.from_iterable(column)) for column in texts))
        # written among the parts first, so that an interruption leaves files only in their folder
        whole = self.folder / f"whole{self.suffix}"
        write_rows(whole, rows, card)
        move_whole(whole, file)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, part: Part) -> Rows:
        rows, count = read_rows(part.path), read_card(part.path)["rows"]
        if rows.vectors.shape != (count, *self.shape):
            raise PatchloomError(
                f"{part.path} does not have the {count} vectors of its card: remove it and repeat the command"
            )
        return rows


class PartWriter:
    """Writer of consecutive parts, which writes each part after its last batch.

    Args:
        folder: the folder of all parts.
        parts: consecutive parts of one split.
    """

    def __init__(self, folder: PartFolder, parts: Sequence[Part]) -> None:
        self.folder, self.parts = folder, list(parts)
        self.indices: list[np.ndarray] = []
        self.vectors: list[np.ndarray] = []

    def add(self, indices: np.ndarray, vectors: np.ndarray) -> None:
        """Add a batch: numbers of images, int64 [b], b at least 1, and vectors [b ...] float32."""
        while self.parts[0].stop <= indices[0]:
            self._write()
        self.indices.append(indices)
        self.vectors.append(cast_vectors(vectors, self.folder.dtype))
        # batch boundaries do not depend on unreadable images
        if (int(indices[0]) // self.folder.batch_size + 1) * self.folder.batch_size >= self.parts[0].stop:
            self._write()

    def finish(self) -> None:
        """Write the remaining parts, which have no readable images."""
        while self.parts:
            self._write()

    def _write(self) -> None:
        self.folder.write(self.parts.pop(0), self.indices, self.vectors)
        self.indices, self.vectors = [], []


def consecutive(parts: Sequence[Part]) -> list[list[Part]]:
    """Group parts into runs that one pass over a split can write."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and (runs[-1][-1].split, runs[-1][-1].stop) == (part.split, part.start):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs
