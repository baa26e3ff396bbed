"""Parts in which vectors reach the disc as they come, beside the file that they become: what a kill leaves is kept.

A part has the vectors of some consecutive images of a split, those that cannot be read left out, and the numbers of its
images. Parts begin where batches begin, so that a pass that goes on has the same batches, and the same bits.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from patchloom.data.source import Source
from patchloom.data.sources.concat import ConcatSource
from patchloom.data.sources.files import Files
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.features import digest_tensors, runs_in_bfloat16
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import attention_heads, input_channels, input_size
from patchloom.nets.heads import InstanceHead
from patchloom.nets.swin import Encoder
from patchloom.system.files import make_folder, remove_leftovers, write_whole
from patchloom.version import __version__

# The card of a file of vectors: how they were made. It has no date, so that the same command gives the same bytes.


METADATA_KEY = "patchloom-embeddings-1"  # under which a file has its card
_COUNTS = ("rows", "unreadable")  # what is known at the end alone

_RENAMED = "encoder name"  # of a run whose folder was renamed; its weights have a digest of their own
_NESTED = ("encoder", "preprocessing", "computed", "data")

Card = dict[str, Any]


def card_of(
    vit: Encoder,
    card: EncoderCard,
    head: InstanceHead | None,
    sources: Mapping[str, Source],
    settings: EvalSettings,
    *,
    pooling: str,
    layer: str,
    shape: tuple[int, ...],
    dtype: str,
) -> Card:
    """Everything on which the bytes of the vectors depend, but for `_COUNTS`, as plain values of JSON."""
    first = next(iter(sources.values()))
    half = runs_in_bfloat16(settings.at, "auto")
    prepared: Card = {"size": list(input_size(vit)), "channels": input_channels(vit)}
    prepared |= {"mean": list(card.mean), "std": list(card.std)}
    if card.sound is None:
        prepared |= {"crop": "the largest at the centre of that shape", "resize": "bicubic, antialiased"}
    else:
        prepared |= {"sound": asdict(card.sound)}
    encoder = {
        "name": card.name,
        "arguments": {"timm": card.timm_name} if card.spec is None else asdict(card.spec),
        "heads": attention_heads(vit),
        "weights_sha256": digest_tensors(vit.state_dict()),
        **({} if head is None else {"head_sha256": digest_tensors(head.state_dict())}),
    }
    made = {
        "encoder": encoder,
        "pooling": pooling,
        "layer": layer,
        "shape": list(shape),
        "dtype": dtype,
        "preprocessing": prepared,
        "computed": {"device": settings.at.type, "products": "bfloat16" if half else "float32"}
        | {"batch_size": settings.at_once},
        "data": {
            "name": to_utf8(_one_spelling(first.name)),
            "splits": {name: len(source) for name, source in sources.items()},
            "fingerprint": fingerprints(sources),
        },
        "classes": list(map(to_utf8, first.classes)),
        "patchloom": __version__,
    }
    found: Card = json.loads(as_text(made))
    return found


def _one_spelling(name: str) -> str:
    """The name of data; that of a folder without what can be left out, as in ./photos/."""
    place = Path(name).expanduser()
    return str(place) if place.is_dir() else name


def fingerprints(sources: Mapping[str, Source]) -> dict[str, str]:
    """Of each split, 16 hex digits that change when its images do."""
    return {name: source.fingerprint() for name, source in sources.items()}


def as_text(card: Card) -> str:
    """The card as it stands in a file."""
    return json.dumps(card)


def to_utf8(text: str) -> str:
    """The same in UTF-8, which every format wants, and not every file name is."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def from_text(text: str | None, path: Path) -> Card:
    """The card that a file has."""
    try:
        card = json.loads(text or "")
    except ValueError:
        card = None
    if not isinstance(card, dict) or not all(isinstance(card.get(name), dict) for name in _NESTED):
        raise PatchloomError(f"{path} is there already, and embed did not write it: choose another --to, or remove it")
    return card


def differing_fields(mine: Card, other: Card) -> list[str]:
    """Names of what two cards say otherwise, but for `_COUNTS` and the encoder's name; that of the weights comes
    first.
    """
    flat, its = _flat(mine), _flat(other)
    names = [name for name in dict.fromkeys([*flat, *its]) if flat.get(name) != its.get(name)]
    names = [name for name in names if name not in (*_COUNTS, _RENAMED)]
    return sorted(names, key=lambda name: name != "encoder weights_sha256")


def _flat(card: Card) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in card.items():
        # all of them have names and sizes
        found |= {f"{name} {key}": one for key, one in value.items()} if name in _NESTED else {name: value}
    return found


_ROWS, _BYTES = 1024, 2**26  # of a part, whichever is less
_WAIT = 5.0  # seconds for a process that is about to end


class VectorPart(NamedTuple):
    """Images ``start`` to ``stop`` - 1 of a split, and the file with their vectors."""

    split: str
    start: int
    stop: int
    path: Path


def rows_of_part(row_bytes: int, batch_size: int) -> int:
    """Images of a part: whole batches, of up to 1,024 images and 64 MB, or one."""
    return batch_size * max(1, min(_ROWS, _BYTES // row_bytes) // batch_size)


class VectorParts:
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
            VectorPart(split, start, min(start + rows, len(source)), self.folder / f"{split}-{start:09}.safetensors")
            for split, source in sources.items()
            for start in range(0, len(source), rows)
        ]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing the same parts."""
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
            return not differing_fields(card, self._card())
        return False

    def _card(self) -> Card:
        path = self.folder / "card.json"
        return from_text(path.read_text("utf-8", "replace"), path)

    def begin(self, card: Card) -> None:
        """Take the folder for vectors of this ``card``, or go on with those that are there; it must be locked."""
        with contextlib.suppress(FileNotFoundError):
            if other := differing_fields(card, self._card()):
                raise PatchloomError(
                    f"{self.folder} holds what a command with another {listing(other[:3], 'and')} began: repeat that "
                    "command, choose another --to, or remove that folder"
                )
        remove_leftovers(self.folder)
        write_whole(self.folder / "card.json", as_text(card))

    def there(self) -> int:
        """How many parts are on the disc; they are written in order."""
        return next((i for i, part in enumerate(self.all) if not part.path.exists()), len(self.all))

    def write(self, part: VectorPart, indices: Sequence[np.ndarray], vectors: Sequence[np.ndarray]) -> None:
        """Write a part from its batches: numbers of images, int64 [b] each, and vectors [b ...]."""
        content = {
            "indices": np.concatenate([np.zeros(0, np.int64), *indices]),
            "vectors": np.concatenate([np.zeros((0, *self.shape), self.dtype), *vectors]),
        }
        write_whole(part.path, save(content))

    def indices(self) -> Iterator[tuple[VectorPart, np.ndarray]]:
        """Each part, and the numbers int64 [m] of its images that could be read."""
        for part in self.all:
            yield part, self._read(part, "indices")

    def vectors(self) -> Iterator[np.ndarray]:
        """Vectors [m ...] of each part."""
        for part in self.all:
            yield self._read(part, "vectors")

    def _read(self, part: VectorPart, name: str) -> np.ndarray:
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


def cast_vectors(vectors: np.ndarray, dtype: str) -> np.ndarray:
    """A copy of float32 vectors in the numbers of a file."""
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

    def __init__(self, parts: VectorParts, missing: Sequence[VectorPart]) -> None:
        self.parts, self.missing = parts, list(missing)
        self.indices: list[np.ndarray] = []
        self.vectors: list[np.ndarray] = []

    def add(self, indices: np.ndarray, vectors: np.ndarray) -> None:
        """Take a batch: numbers of images, int64 [b], b at least 1, and vectors [b ...] float32."""
        while self.missing[0].stop <= indices[0]:
            self._write()
        self.indices.append(indices)
        self.vectors.append(cast_vectors(vectors, self.parts.dtype))
        # a batch ends where it would end if all of it could be read
        if (int(indices[0]) // self.parts.batch_size + 1) * self.parts.batch_size >= self.missing[0].stop:
            self._write()

    def finish(self) -> None:
        """No batch will come any more: what is left has no image that can be read."""
        while self.missing:
            self._write()

    def _write(self) -> None:
        self.parts.write(self.missing.pop(0), self.indices, self.vectors)
        self.indices, self.vectors = [], []


# The rows of a file: how the formats are given them, and how they give them back. Never all vectors at once.


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

    parts: VectorParts
    card: Card
    classes: tuple[str, ...]
    splits: tuple[str, ...]
    unreadable: tuple[str, ...]

    @classmethod
    def of(cls, parts: VectorParts, card: Card) -> Rows:
        """With the counts, for which the numbers of all images are read."""
        rows, unreadable = 0, []
        for part, indices in parts.indices():
            rows += len(indices)
            missing = np.setdiff1d(np.arange(part.start, part.stop), indices)
            unreadable += [parts.sources[part.split].describe(int(i)) for i in missing]
        counts = dict(zip(_COUNTS, (rows, len(unreadable)), strict=True))
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
    if isinstance(source, Files | ConcatSource):
        folder, path = PurePath(os.path.expanduser(source.name)), PurePath(whole)
        if path.is_relative_to(folder):  # with the folder of its split, by which the paths of two splits differ
            return to_utf8(path.relative_to(folder).as_posix())
    place = None if isinstance(source, ConcatSource) else source.place(i)
    return to_utf8(place or whole)
