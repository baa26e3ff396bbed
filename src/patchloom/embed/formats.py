"""The formats by the ending of a file, and a file as it is read back, whichever of them it has."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError

from patchloom.embed import npz, parquet, tensors
from patchloom.embed.chunks import Card, Chunk, Rows, from_text
from patchloom.errors import PatchloomError, closest_word, listing

_BYTES = 2**24  # of vectors that are read at once


class Format(NamedTuple):
    """How vectors are written, and read back.

    Attributes:
        write: to a path, all rows.
        read_card: the text of the card in a file, or None.
        chunks: the rows of a file, up to a number of them at once.
    """

    write: Callable[[Path, Rows], None]
    read_card: Callable[[Path], str | None]
    chunks: Callable[[Path, int], Iterator[Chunk]]


FORMATS = {
    ".parquet": Format(parquet.write, parquet.read_card, parquet.chunks),
    ".npz": Format(npz.write, npz.read_card, npz.chunks),
    ".safetensors": Format(tensors.write, tensors.read_card, tensors.chunks),
}


def format_of(path: Path) -> Format:
    """By its ending, how a file is written."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        ending = closest_word(suffix, FORMATS) or ".parquet"
        raise PatchloomError(
            f"--to cannot be {path}: its ending says how it is written, {listing(FORMATS)}, as in "
            f"{path.name.removesuffix(path.suffix) or 'features'}{ending}"
        )
    if path.is_dir():
        raise PatchloomError(f"--to cannot be {path}, which is a folder: name a file in it")
    if suffix == ".parquet":
        parquet.arrow()
    return FORMATS[suffix]


def read_card(path: Path) -> Card:
    """The card of a file that is there."""
    with _as_it_was_written(path):
        return from_text(format_of(path).read_card(path), path)


def read_chunks(path: Path, shape: tuple[int, ...]) -> Iterator[Chunk]:
    """The rows of a file whose vectors are of ``shape``, some at once."""
    with _as_it_was_written(path):
        yield from format_of(path).chunks(path, max(1, _BYTES // (4 * int(np.prod(shape)))))


@contextmanager
def _as_it_was_written(path: Path) -> Iterator[None]:
    """While entered, what goes wrong in reading a file means that it is damaged, or another program's."""
    try:
        yield
    except PatchloomError:
        raise
    # pyarrow's own errors are of these kinds
    except (OSError, SafetensorError, zipfile.BadZipFile, ValueError, LookupError, TypeError, EOFError) as problem:
        raise PatchloomError(
            f"{path} cannot be read as vectors ({' '.join(str(problem).split())[:200]}): remove it, or choose another "
            "--to"
        ) from problem
