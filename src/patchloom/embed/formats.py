"""Tables of vectors as Parquet, npz and safetensors files, each with a card that describes how it was made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from patchloom.errors import PatchloomError, pip_install
from patchloom.system.files import regular, write_whole

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


def parse_card(text: str, path: Path, counts: bool = False) -> Card:
    """Parse a card from JSON; ``counts``: require its counts."""
    try:
        card = json.loads(text)
    except ValueError:
        card = None
    known = isinstance(card, dict) and all(isinstance(card.get(name), dict) for name in _NESTED)
    if not known or (counts and not all(isinstance(card.get(name), int) for name in COUNTS)):
        raise PatchloomError(f"{path} exists and was not written by embed: choose another --to, or remove it")
    return card


# Parquet with pyarrow, an extra: columns path, split, label and vector.
# npz without pickle: vectors, paths, splits, labels (int64 indices into classes, -1 for none) and card.
# safetensors, which has no text type: vectors, labels (int64) and splits (uint8) as indices into the card, and
# concatenated paths in UTF-8 (uint8); path i is from path_ends[i] to path_ends[i + 1].
FORMATS = (".parquet", ".npz", ".safetensors")


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


def write_rows(path: Path, rows: Rows, card: Card) -> None:
    """Write rows with a card to a file, in the format of its suffix."""

    def write(unfinished: Path) -> None:
        if path.suffix.lower() == ".parquet":
            # vectors are lists of fixed length, and n patch tokens lists of n vectors
            pa, shape = arrow(), rows.vectors.shape[1:]
            vector = reduce(pa.list_, reversed(shape), pa.from_numpy_dtype(rows.vectors.dtype))
            kinds = {"path": pa.string(), "split": pa.string(), "label": pa.string(), "vector": vector}
            schema = pa.schema(list(kinds.items()), metadata={METADATA_KEY: json.dumps(card)})
            vectors = reduce(pa.FixedSizeListArray.from_arrays, reversed(shape), pa.array(rows.vectors.ravel()))
            texts = [pa.array(values, pa.string()) for values in (rows.paths, rows.splits, rows.labels)]
            # features hardly compress, and are read faster uncompressed
            packed = {"path": "zstd", "split": "zstd", "label": "zstd", "vector" + ".list.element" * len(shape): "none"}
            group = max(1, min(ROWS, BYTES // (rows.vectors.itemsize * int(np.prod(shape)))))
            table = pa.table([*texts, vectors], schema=schema)
            pa.parquet.write_table(
                table, unfinished, row_group_size=group, compression=packed, use_dictionary=["split", "label"]
            )
        elif path.suffix.lower() == ".npz":
            columns: dict[str, Any] = {
                "card": np.array(json.dumps(card)),
                "classes": np.array(card["classes"], str),
                "labels": _numbers(rows.labels, card["classes"]),
                "splits": np.array(rows.splits, str),
                "paths": np.array(rows.paths, str),
                "vectors": rows.vectors,
            }
            with open(unfinished, "wb") as file:  # numpy would append a suffix to a path
                np.savez(file, **columns)
        else:
            paths = [one.encode() for one in rows.paths]
            columns = {
                "labels": _numbers(rows.labels, card["classes"]),
                "path_ends": np.cumsum([0, *map(len, paths)], dtype=np.int64),
                "vectors": rows.vectors,
                "splits": _numbers(rows.splits, list(card["data"]["splits"])).astype(np.uint8),
                "paths": np.frombuffer(b"".join(paths), np.uint8),
            }
            unfinished.touch()
            mode = unfinished.stat().st_mode
            save_file(columns, unfinished, {METADATA_KEY: json.dumps(card)})
            unfinished.chmod(mode)  # the library makes the file private to its owner

    write_whole(path, write)


def _numbers(names: Sequence[str | None], known: Sequence[str]) -> np.ndarray:
    """Return the index int64 [m] of each name in ``known``; -1 for None."""
    places: dict[str | None, int] = {name: i for i, name in reversed([*enumerate(known)])}
    return np.array([-1 if name is None else places[name] for name in names], np.int64)


def _names(numbers: np.ndarray, known: Sequence[str]) -> list[str | None]:
    return [None if i < 0 else known[i] for i in numbers.tolist()]


def read_card(path: Path) -> Card:
    """Read the card of a file."""
    with _as_vectors(path):
        if path.suffix.lower() == ".parquet":
            found = (arrow().parquet.read_schema(path).metadata or {}).get(METADATA_KEY.encode(), b"")
            text = found.decode("utf-8", "replace")
        elif path.suffix.lower() == ".npz":
            with np.load(regular(path, follow=True)) as file:
                text = str(file["card"]) if "card" in file else ""
        else:
            with safe_open(regular(path, follow=True), "np") as file:
                text = (file.metadata() or {}).get(METADATA_KEY, "")
        return parse_card(text, path, counts=True)


def read_rows(path: Path) -> Rows:
    """Read all rows of a file."""
    with _as_vectors(path):
        if path.suffix.lower() == ".parquet":
            with arrow().parquet.ParquetFile(path, pre_buffer=False) as file:  # pre-buffering would take more memory
                table = file.read()
            vectors, shape = table["vector"].combine_chunks(), [len(table)]
            while hasattr(vectors.type, "list_size"):
                shape.append(vectors.type.list_size)
                vectors = vectors.flatten()
            rows = Rows(
                vectors.to_numpy().reshape(shape), *(table[name].to_pylist() for name in ("path", "split", "label"))
            )
        elif path.suffix.lower() == ".npz":
            with np.load(regular(path, follow=True)) as file:
                labels = _names(file["labels"], file["classes"].tolist())
                rows = Rows(file["vectors"], file["paths"].tolist(), file["splits"].tolist(), labels)
        else:
            with safe_open(regular(path, follow=True), "np") as file:
                card = json.loads(file.metadata()[METADATA_KEY])
                columns = {
                    name: file.get_tensor(name) for name in ("vectors", "labels", "splits", "paths", "path_ends")
                }
            text, ends = columns["paths"].tobytes(), columns["path_ends"].tolist()
            paths = [text[a:b].decode() for a, b in zip(ends, ends[1:], strict=False)]
            splits = [list(card["data"]["splits"])[i] for i in columns["splits"]]
            rows = Rows(columns["vectors"], paths, splits, _names(columns["labels"], card["classes"]))
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
