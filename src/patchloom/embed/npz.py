"""Vectors as an .npz that ``numpy.load`` reads without pickle: zip64, stored, written and read a part at a time."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from patchloom.embed.chunks import Chunk, Rows, as_text, chunk_of

_YEAR = (1980, 1, 1, 0, 0, 0)  # the first that a zip can say: the same rows are the same bytes


def write(path: Path, rows: Rows) -> None:
    """Write ``vectors`` [n ...], ``labels`` [n] int64, ``paths`` [n], ``splits`` [n], ``classes`` and ``card``.

    The label -1 is none; text is of a fixed width, and the card JSON.
    """
    longest = max((len(one) for some in rows.paths() for one in some), default=1)
    splits = np.array(rows.splits)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as file:
        _put(file, "card", np.dtype(f"U{len(as_text(rows.card))}"), (), [np.array(as_text(rows.card))])
        _put(
            file,
            "classes",
            np.dtype(f"U{max(map(len, rows.classes), default=1)}"),
            (len(rows.classes),),
            [np.array(rows.classes, str)],
        )
        _put(file, "labels", np.dtype(np.int64), (rows.count,), rows.labels())
        _put(file, "splits", splits.dtype, (rows.count,), (splits[some] for some in rows.split_numbers()))
        _put(file, "paths", np.dtype(f"U{max(1, longest)}"), (rows.count,), map(np.array, rows.paths()))
        _put(file, "vectors", rows.parts.dtype, (rows.count, *rows.parts.shape), rows.parts.vectors())


def _put(
    file: zipfile.ZipFile, name: str, dtype: np.dtype, shape: tuple[int, ...], values: Iterable[np.ndarray]
) -> None:
    """An entry of this dtype and shape from arrays that, one behind the other, are its rows."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with file.open(zipfile.ZipInfo(f"{name}.npy", _YEAR), "w", force_zip64=True) as entry:
        np.lib.format.write_array_header_2_0(entry, header)
        for some in values:
            entry.write(np.ascontiguousarray(some, dtype).tobytes())


def read_card(path: Path) -> str | None:
    """The text of its card; None if there is none."""
    with zipfile.ZipFile(path) as file:
        if "card.npy" not in file.namelist():
            return None
        with file.open("card.npy") as entry:
            return str(np.lib.format.read_array(entry, allow_pickle=False))


def chunks(path: Path, size: int) -> Iterator[Chunk]:
    """Its rows, up to ``size`` at once."""
    with zipfile.ZipFile(path) as file:
        with file.open("classes.npy") as entry:
            classes = tuple(np.lib.format.read_array(entry, allow_pickle=False).tolist())
        columns = (_pieces(file.open(f"{name}.npy"), size) for name in ("vectors", "paths", "splits", "labels"))
        for vectors, paths, splits, labels in zip(*columns, strict=True):
            numbers = np.zeros(len(paths), np.uint8)
            yield chunk_of(vectors, paths.tolist(), numbers, labels, ("",), classes)._replace(splits=splits.tolist())


def _pieces(entry: IO[bytes], size: int) -> Iterator[np.ndarray]:
    """The array of an entry, up to ``size`` rows at once."""
    with entry:
        shape, dtype = _header(entry)
        row = dtype.itemsize * int(np.prod(shape[1:]))
        for start in range(0, shape[0], size):
            count = min(size, shape[0] - start)
            yield np.frombuffer(_exactly(entry, count * row), dtype).reshape(count, *shape[1:])


def _header(entry: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    np.lib.format.read_magic(entry)
    shape, _, dtype = np.lib.format.read_array_header_2_0(entry)
    return shape, dtype


def _exactly(entry: IO[bytes], count: int) -> bytes:
    found = entry.read(count)  # of a stored entry: all of it, or up to its end
    if len(found) < count:
        raise ValueError("it ends too early")
    return found
