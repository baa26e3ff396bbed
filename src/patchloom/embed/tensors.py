"""Vectors as a safetensors file, written and read a part at a time.

Text is UTF-8 in a row: ``paths`` uint8, of which path i goes from ``path_ends[i]`` to ``path_ends[i + 1]``. The format,
which the library can only write from memory: 8 bytes that tell the length of a header in JSON, the header, which names
dtype, shape and place of each tensor, and the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from safetensors import safe_open

from patchloom.embed.chunks import METADATA_KEY, Chunk, Rows, as_text, chunk_of

_NAMES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.int64): "I64", np.dtype(np.uint8): "U8"}

# dtype, shape, and arrays that, one behind the other, are the values
_Column = tuple[np.dtype, tuple[int, ...], Iterable[np.ndarray]]


def write(path: Path, rows: Rows) -> None:
    """Write ``vectors`` [n ...], ``labels`` [n] int64, ``splits`` [n] uint8, ``paths`` and ``path_ends`` [n + 1] int64.

    The card, as JSON in the metadata, has the names of splits and classes; the label -1 is none.
    """
    letters = sum(len(one.encode()) for some in rows.paths() for one in some)
    n, long, short = rows.count, np.dtype(np.int64), np.dtype(np.uint8)
    columns: dict[str, _Column] = {  # the widest numbers first, so that each lies where its width divides
        "labels": (long, (n,), rows.labels()),
        "path_ends": (long, (n + 1,), _ends(rows)),
        "vectors": (rows.parts.dtype, (n, *rows.parts.shape), rows.parts.vectors()),
        "splits": (short, (n,), rows.split_numbers()),
        "paths": (short, (letters,), (np.frombuffer("".join(some).encode(), short) for some in rows.paths())),
    }
    with open(path, "wb") as file:
        file.write(_header(columns, {METADATA_KEY: as_text(rows.card)}))
        for dtype, _, values in columns.values():
            for some in values:
                file.write(np.ascontiguousarray(some, dtype).tobytes())


def _header(columns: dict[str, _Column], about: dict[str, str]) -> bytes:
    places: dict[str, object] = {"__metadata__": about}
    end = 0
    for name, (dtype, shape, _) in columns.items():
        begin, end = end, end + dtype.itemsize * int(np.prod(shape))
        places[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(places).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _ends(rows: Rows) -> Iterator[np.ndarray]:
    yield np.zeros(1, np.int64)
    last = 0
    for some in rows.paths():
        ends = last + np.cumsum([len(one.encode()) for one in some], dtype=np.int64)
        yield ends
        last = int(ends[-1]) if len(ends) else last


def read_card(path: Path) -> str | None:
    """The text of its card; None if there is none."""
    with safe_open(path, "np") as file:
        return (file.metadata() or {}).get(METADATA_KEY)


def chunks(path: Path, size: int) -> Iterator[Chunk]:
    """Its rows, up to ``size`` at once."""
    with safe_open(path, "np") as file:
        card = json.loads(file.metadata()[METADATA_KEY])
        classes, splits = tuple(card["classes"]), tuple(card["data"]["splits"])
        columns = {name: file.get_slice(name) for name in ("vectors", "labels", "splits", "paths", "path_ends")}
        count = columns["labels"].get_shape()[0]
        for start in range(0, count, size):
            stop = min(start + size, count)
            ends = columns["path_ends"][start : stop + 1]
            text = columns["paths"][int(ends[0]) : int(ends[-1])].tobytes()
            paths = [text[a:b].decode() for a, b in zip(ends - ends[0], ends[1:] - ends[0], strict=False)]
            vectors, numbers, labels = (columns[name][start:stop] for name in ("vectors", "splits", "labels"))
            yield chunk_of(vectors, paths, numbers, labels, splits, classes)
