"""Vectors of a few images in small parts, a reader of each format by its own library, and processes that are killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet
from dying import die_at
from forked import server
from safetensors import safe_open
from safetensors.numpy import load_file

SUFFIXES = (".parquet", ".npz", ".safetensors")
KEY = "patchloom-embeddings-1"
SMALL = {"device": "cpu", "batch_size": 4, "workers": 0}
ROWS = 8  # of a part


class Read(NamedTuple):
    """What is in a file, as its own library reads it."""

    vectors: np.ndarray
    paths: list[str]
    splits: list[str]
    labels: list[str | None]
    card: dict[str, Any]


def read(path: Path) -> Read:
    """By pyarrow, numpy or safetensors, as docs/embed.md shows it."""
    if path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
        card = json.loads(table.schema.metadata[KEY.encode()])
        vectors = np.array(table["vector"].to_pylist(), card["dtype"])
        return Read(vectors, *(table[name].to_pylist() for name in ("path", "split", "label")), card)
    if path.suffix == ".npz":
        with np.load(path) as file:
            card = json.loads(str(file["card"]))
            vectors, paths, splits = file["vectors"], file["paths"].tolist(), file["splits"].tolist()
            labels = [None if i < 0 else str(file["classes"][i]) for i in file["labels"]]
            assert file["classes"].tolist() == card["classes"]
            return Read(vectors, paths, splits, labels, card)
    with safe_open(path, "np") as file:
        card = json.loads(file.metadata()[KEY])
    found = load_file(path)
    text, ends = found["paths"].tobytes(), found["path_ends"]
    paths = [text[a:b].decode() for a, b in zip(ends, ends[1:], strict=False)]
    splits = [list(card["data"]["splits"])[i] for i in found["splits"]]
    labels = [None if i < 0 else card["classes"][i] for i in found["labels"]]
    return Read(found["vectors"], paths, splits, labels, card)


def _work(run: str, data: str, to: str, event: int | None, told: Any) -> None:
    seen = die_at(event, os.path.dirname(to), ("open", "os.rename"))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    import torch

    from patchloom.embed import chunks, embed

    torch.set_num_threads(1)
    chunks._ROWS = ROWS
    embed.embed(run, data, to=to, **SMALL)
    told.put(len(seen))


def embed_apart(run: Path, data: Path, to: Path, event: int | None = None) -> int | None:
    """``embed`` in a process of its own, killed at this event of its files (from 1).

    Returns:
        How many events there were; None if it was killed.
    """
    context = server()
    told = context.SimpleQueue()
    process = context.Process(target=_work, args=(str(run), str(data), str(to), event, told))
    process.start()
    process.join()
    if process.exitcode == 0:
        found: int = told.get()
        return found
    assert process.exitcode == -signal.SIGKILL, f"{to} ended with {process.exitcode}"
    return None
