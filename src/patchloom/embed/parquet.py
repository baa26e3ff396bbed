"""Vectors as Parquet by pyarrow, an extra: columns path, split, label and vector, a row group a part."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from patchloom.embed.chunks import METADATA_KEY, Chunk, Rows, as_text
from patchloom.errors import PatchloomError, pip_install

# numbers of a network do not become smaller by packing, and are read faster as they are
_PACKED = {"path": "zstd", "split": "zstd", "label": "zstd"}
_OFTEN_THE_SAME = ["split", "label"]


def arrow() -> ModuleType:
    """The library that reads and writes Parquet."""
    try:
        import pyarrow as library  # an extra
        import pyarrow.parquet
    except ImportError as error:
        raise PatchloomError(
            f"Parquet is written by pyarrow: {pip_install('parquet')}, or choose .npz or .safetensors"
        ) from error
    return library


def write(path: Path, rows: Rows) -> None:
    """Write a row for each image; a vector is a list of fixed length, and n patch tokens a list of n of them."""
    pa = arrow()
    vector = reduce(pa.list_, reversed(rows.parts.shape), pa.from_numpy_dtype(rows.parts.dtype))
    kinds = {"path": pa.string(), "split": pa.string(), "label": pa.string(), "vector": vector}
    schema = pa.schema(list(kinds.items()), metadata={METADATA_KEY: as_text(rows.card)})
    packed = {name: _PACKED.get(name, "none") for name in _leaves(rows.parts.shape)}
    with pa.parquet.ParquetWriter(path, schema, compression=packed, use_dictionary=_OFTEN_THE_SAME) as file:
        for some in rows.chunks():
            flat = pa.array(some.vectors.ravel())
            vectors = reduce(pa.FixedSizeListArray.from_arrays, reversed(rows.parts.shape), flat)
            columns = [pa.array(values, pa.string()) for values in (some.paths, some.splits, some.labels)]
            if len(some.paths):
                file.write_table(pa.table([*columns, vectors], schema=schema))


def _leaves(shape: tuple[int, ...]) -> list[str]:
    """Names of the columns as Parquet stores them."""
    return ["path", "split", "label", "vector" + ".list.element" * len(shape)]


def read_card(path: Path) -> str | None:
    """The text of its card; None if there is none."""
    found = (arrow().parquet.read_schema(path).metadata or {}).get(METADATA_KEY.encode())
    return None if found is None else found.decode("utf-8", "replace")


def chunks(path: Path, size: int) -> Iterator[Chunk]:
    """Its rows, up to ``size`` at once."""
    # else all row groups would be fetched ahead, and stay until the last one is read
    with arrow().parquet.ParquetFile(path, pre_buffer=False) as file:
        for some in file.iter_batches(size):
            paths, splits, labels = (some.column(name).to_pylist() for name in ("path", "split", "label"))
            yield Chunk(_numbers(some.column("vector")), paths, splits, labels)


def _numbers(lists: Any) -> np.ndarray:
    """Lists of fixed lengths as an array [m ...]."""
    shape = [len(lists)]
    while hasattr(lists.type, "list_size"):
        shape.append(lists.type.list_size)
        lists = lists.flatten()
    found: np.ndarray = lists.to_numpy(zero_copy_only=False).reshape(shape)
    return found
