"""Readers of embedding files by other libraries, and embedding in processes that are killed."""

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
from ranks import free_port
from safetensors import safe_open
from safetensors.numpy import load_file

SUFFIXES = (".parquet", ".npz", ".safetensors")
KEY = "patchloom-embeddings-1"
SMALL = {"device": "cpu", "batch_size": 4, "workers": 0}
ROWS = 8  # rows per part


class Read(NamedTuple):
    """Contents of a file, as read by another library."""

    vectors: np.ndarray
    paths: list[str]
    splits: list[str]
    labels: list[str | None]
    card: dict[str, Any]


def read(path: Path) -> Read:
    """Read a file with pyarrow, numpy or safetensors, as in docs/how-to/embed.md."""
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


def read_parts(folder: Path) -> dict[str, Read]:
    return {path.name: read(path) for path in sorted(folder.glob("[!.]*-*"))}


def _work(run: str, data: str, to: str, event: int | None, told: Any) -> None:
    seen = die_at(event, os.path.dirname(to), ("os.rename",))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    import torch

    from patchloom.embed import embed, parts

    torch.set_num_threads(1)
    parts.ROWS = ROWS
    embed.embed(run, data, to=to, **SMALL)
    told.put(len(seen))


def embed_apart(run: Path, data: Path, to: Path, event: int | None = None) -> int | None:
    """Run ``embed`` in a separate process, killed before it renames this file (from 1) that it wrote.

    Returns:
        The number of events; None if it was killed.
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


class ProcessOutcome(NamedTuple):
    """Outcome of a process: exit code, number of parts written, whether the result was made, and the error."""

    code: int
    written: int
    made: bool
    told: str


def _rank(run: str, data: str, to: str, rank: int, world: int, port: int, failing: int, told: Any) -> None:
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in found.items()})
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    import torch

    from patchloom.embed import embed, parts
    from patchloom.errors import AlreadyReported, PatchloomError

    torch.set_num_threads(1)
    parts.ROWS, write, written = ROWS, parts.PartFolder.write, []

    def recording(self, part, *given):
        if failing == signal.SIGKILL:
            os.kill(os.getpid(), failing)
        if failing:
            raise PatchloomError("no")
        write(self, part, *given)
        written.append(part)

    parts.PartFolder.write = recording
    try:
        made = embed.embed(run, data, to=to, **SMALL).made
        told.put((rank, ProcessOutcome(0, len(written), made, "")))
    except AlreadyReported:
        told.put((rank, ProcessOutcome(2, len(written), False, "another")))
    except PatchloomError as error:
        told.put((rank, ProcessOutcome(2, len(written), False, f"PatchloomError: {error}")))


def embed_together(
    run: Path, data: Path, to: Path, world: int, failing: dict[int, int] | None = None
) -> list[ProcessOutcome]:
    """Run ``embed`` in several processes like torchrun; return the outcomes by rank.

    Args:
        run, data, to: as for ``embed``.
        world: number of processes.
        failing: how each rank fails to write a part: 1 with an error, SIGKILL by this signal.
    """
    context = server()
    told, port = context.SimpleQueue(), free_port()
    given = [
        (str(run), str(data), str(to), rank, world, port, (failing or {}).get(rank, 0), told) for rank in range(world)
    ]
    processes = [context.Process(target=_rank, args=one) for one in given]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    found: dict[int, ProcessOutcome] = {}
    while not told.empty():
        rank, ended = told.get()
        found[rank] = ended
    return [found.get(rank, ProcessOutcome(-1, 0, False, "nothing was heard")) for rank in range(world)]
