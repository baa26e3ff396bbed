"""Tables of vectors as Parquet, npz and safetensors files, each with a card that describes how it was made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from patchloom.errors import PatchloomError, pip_install
from patchloom.system.files import regular

METADATA_KEY = "patchloom-embeddings-1"  # key of the card in a file
ROWS, BYTES = 1024, 2**26  # largest part or row group
_READ_BYTES = 2**24  # largest chunk of vectors read
COUNTS = ("rows", "unreadable")  # fields of a card that are unknown before the images are read
_NESTED = ("encoder", "preprocessing", "computed", "data")

Card = dict[str, Any]


class Rows(NamedTuple):
    """Rows of a file: vectors [m ...] with the path, split and label (None: unlabelled) of each."""

    vectors: np.ndarray
    paths: list[str]
    splits: list[str]
    labels: list[str | None]


def parse_card(text: str | None, path: Path, counts: bool = False) -> Card:
    """Parse a card from JSON; ``counts``: require its counts."""
    try:
        card = json.loads(text or "")
    except ValueError:
        card = None
    known = isinstance(card, dict) and all(isinstance(card.get(name), dict) for name in _NESTED)
    if not known or (counts and not all(isinstance(card.get(name), int) for name in COUNTS)):
        raise PatchloomError(f"{path} exists and was not written by embed: choose another --to, or remove it")
    return card


# Parquet with pyarrow, an extra: columns path, split, label and vector.


def arrow() -> ModuleType:
    """Import the library that reads and writes Parquet."""
    try:
        import pyarrow as library  # an extra
        import pyarrow.parquet
    except ImportError as error:
        raise PatchloomError(
            f"Parquet needs pyarrow: {pip_install('parquet')}, or choose .npz or .safetensors (--format for a folder)"
        ) from error
    return library


def _write_parquet(path: Path, rows: Rows, card: Card) -> None:
    """Write vectors as lists of fixed length, and n patch tokens as lists of n vectors."""
    pa, shape = arrow(), rows.vectors.shape[1:]
    vector = reduce(pa.list_, reversed(shape), pa.from_numpy_dtype(rows.vectors.dtype))
    kinds = {"path": pa.string(), "split": pa.string(), "label": pa.string(), "vector": vector}
    schema = pa.schema(list(kinds.items()), metadata={METADATA_KEY: json.dumps(card)})
    vectors = reduce(pa.FixedSizeListArray.from_arrays, reversed(shape), pa.array(rows.vectors.ravel()))
    texts = [pa.array(values, pa.string()) for values in (rows.paths, rows.splits, rows.labels)]
    # features hardly compress, and are read faster uncompressed
    packed = {"path": "zstd", "split": "zstd", "label": "zstd", "vector" + ".list.element" * len(shape): "none"}
    group = max(1, min(ROWS, BYTES // (rows.vectors.itemsize * int(np.prod(shape)))))
    columns = pa.table([*texts, vectors], schema=schema)
    pa.parquet.write_table(columns, path, row_group_size=group, compression=packed, use_dictionary=["split", "label"])


def _read_parquet_card(path: Path) -> str | None:
    found = (arrow().parquet.read_schema(path).metadata or {}).get(METADATA_KEY.encode())
    return None if found is None else found.decode("utf-8", "replace")


def _read_parquet(path: Path) -> Rows:
    with arrow().parquet.ParquetFile(path, pre_buffer=False) as file:  # pre-buffering would take more memory
        table = file.read()
    vectors, shape = table["vector"].combine_chunks(), [len(table)]
    while hasattr(vectors.type, "list_size"):
        shape.append(vectors.type.list_size)
        vectors = vectors.flatten()
    return Rows(vectors.to_numpy().reshape(shape), *(table[name].to_pylist() for name in ("path", "split", "label")))


# npz without pickle: vectors, paths, splits, labels (int64 indices into classes, -1 for none) and card.


def _write_npz(path: Path, rows: Rows, card: Card) -> None:
    columns: dict[str, Any] = {
        "card": np.array(json.dumps(card)),
        "classes": np.array(card["classes"], str),
        "labels": _numbers(rows.labels, card["classes"]),
        "splits": np.array(rows.splits, str),
        "paths": np.array(rows.paths, str),
        "vectors": rows.vectors,
    }
    with open(path, "wb") as file:  # numpy would append a suffix to a path
        np.savez(file, **columns)


def _read_npz_card(path: Path) -> str | None:
    with np.load(regular(path, follow=True)) as file:
        return str(file["card"]) if "card" in file else None


def _read_npz(path: Path) -> Rows:
    with np.load(regular(path, follow=True)) as file:
        labels = _names(file["labels"], file["classes"].tolist())
        return Rows(file["vectors"], file["paths"].tolist(), file["splits"].tolist(), labels)


# safetensors, which has no text type: vectors, labels (int64) and splits (uint8) as indices into the card, and
# concatenated paths in UTF-8 (uint8); path i is from path_ends[i] to path_ends[i + 1].


def _write_safetensors(path: Path, rows: Rows, card: Card) -> None:
    paths = [one.encode() for one in rows.paths]
    columns = {
        "labels": _numbers(rows.labels, card["classes"]),
        "path_ends": np.cumsum([0, *map(len, paths)], dtype=np.int64),
        "vectors": rows.vectors,
        "splits": _numbers(rows.splits, list(card["data"]["splits"])).astype(np.uint8),
        "paths": np.frombuffer(b"".join(paths), np.uint8),
    }
    path.touch()
    mode = path.stat().st_mode
    save_file(columns, path, {METADATA_KEY: json.dumps(card)})
    path.chmod(mode)  # the library makes the file private to its owner


def _read_safetensors_card(path: Path) -> str | None:
    with safe_open(regular(path, follow=True), "np") as file:
        return (file.metadata() or {}).get(METADATA_KEY)


def _read_safetensors(path: Path) -> Rows:
    with safe_open(regular(path, follow=True), "np") as file:
        card = json.loads(file.metadata()[METADATA_KEY])
        columns = {name: file.get_tensor(name) for name in ("vectors", "labels", "splits", "paths", "path_ends")}
    text, ends = columns["paths"].tobytes(), columns["path_ends"].tolist()
    paths = [text[a:b].decode() for a, b in zip(ends, ends[1:], strict=False)]
    splits = [list(card["data"]["splits"])[i] for i in columns["splits"]]
    return Rows(columns["vectors"], paths, splits, _names(columns["labels"], card["classes"]))


def _numbers(names: Sequence[str | None], known: Sequence[str]) -> np.ndarray:
    """Return the index int64 [m] of each name in ``known``; -1 for None."""
    places: dict[str | None, int] = {name: i for i, name in reversed([*enumerate(known)])}
    return np.array([-1 if name is None else places[name] for name in names], np.int64)


def _names(numbers: np.ndarray, known: Sequence[str]) -> list[str | None]:
    return [None if i < 0 else known[i] for i in numbers.tolist()]


# Reading and writing by file suffix.


class Format(NamedTuple):
    """Writer and readers of one kind of file.

    Attributes:
        write: function that writes rows with a card to a path.
        read: function that reads all rows.
        read_card: function that reads the text of the card; None without one.
    """

    write: Callable[[Path, Rows, Card], None]
    read: Callable[[Path], Rows]
    read_card: Callable[[Path], str | None]


FORMATS = {
    ".parquet": Format(_write_parquet, _read_parquet, _read_parquet_card),
    ".npz": Format(_write_npz, _read_npz, _read_npz_card),
    ".safetensors": Format(_write_safetensors, _read_safetensors, _read_safetensors_card),
}


def read_card(path: Path) -> Card:
    """Read the card of a file."""
    with _as_vectors(path):
        return parse_card(FORMATS[path.suffix.lower()].read_card(path), path, counts=True)


def read_rows(path: Path) -> Rows:
    """Read all rows of a file."""
    with _as_vectors(path):
        rows = FORMATS[path.suffix.lower()].read(path)
        if rows.vectors.dtype.kind != "f" or rows.vectors.ndim < 2:
            raise ValueError(f"its vectors are {rows.vectors.dtype} of {rows.vectors.ndim} dimensions")
        if len({len(column) for column in rows}) != 1:
            raise ValueError("its columns are of different lengths")
        if not all(isinstance(one, str) for texts in (rows.paths, rows.splits) for one in texts):
            raise ValueError("its paths or splits are no texts")
        return rows


def iterate_rows(paths: Sequence[Path]) -> Iterator[Rows]:
    """Read the rows of several files, one at a time, and yield up to 16 MB of vectors at once."""
    for path in paths:
        rows = read_rows(path)
        size = max(1, _READ_BYTES // (4 * max(1, int(np.prod(rows.vectors.shape[1:])))))
        for start in range(0, len(rows.paths), size):
            some = slice(start, start + size)
            # a copy, because a view would keep the whole file in memory
            yield Rows(rows.vectors[some].copy(), rows.paths[some], rows.splits[some], rows.labels[some])


@contextmanager
def _as_vectors(path: Path) -> Iterator[None]:
    """Convert a library's errors in this block to one about a damaged or foreign file."""
    try:
        yield
    except PatchloomError:
        raise
    except Exception as problem:  # libraries raise nearly anything on files that are not as patchloom wrote them
        raise PatchloomError(
            f"{path} cannot be read as vectors ({' '.join(str(problem).split())[:200]}): remove it and repeat the "
            "command, or choose another --to"
        ) from problem
