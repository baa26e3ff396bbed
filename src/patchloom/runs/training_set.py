"""Record of the images that weights were trained on, by content, so that no later run holds them out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from patchloom.data.source import CONTENT
from patchloom.errors import PatchloomError
from patchloom.system.files import LIST_FILE, read_bytes, read_sealed, write_sealed


class Record(NamedTuple):
    """Record of the images that a run and those before it trained on.

    Attributes:
        contents: sorted unique content digests, as in `Source.contents`.
        unknown: names of data or weights with unknown contents.
    """

    contents: np.ndarray
    unknown: tuple[str, ...] = ()

    def and_trained_on(self, contents: np.ndarray | None, data: str) -> Record:
        """Add the images of another training; ``contents`` of None add ``data`` to the unknown names."""
        if contents is None:
            return Record(self.contents, tuple(dict.fromkeys([*self.unknown, data])))
        return Record(np.unique(np.concatenate([self.contents, contents])), self.unknown)


def no_record(*unknown: str) -> Record:
    """Return an empty record, with the names of weights whose training images are unknown."""
    return Record(np.empty(0, CONTENT), unknown)


def write_record(record: Record, path: Path) -> None:
    """Write a record with its checksum; the file appears whole or not at all."""
    about = json.dumps({"unknown": record.unknown}).encode()  # without line breaks
    write_sealed(path, about + b"\n" + record.contents.tobytes())


def read_record(path: Path) -> Record | None:
    """Read a record; None if there is no such file."""
    try:
        content = read_sealed(path)
        if content is None:
            raise ValueError("its checksum does not match")
        about, _, contents = content.partition(b"\n")
        return Record(np.frombuffer(contents, CONTENT), tuple(json.loads(about)["unknown"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise PatchloomError(
            f"{path} is not what patchloom wrote ({problem}): restore it from a copy, or delete it; without it, the "
            "training images of these weights are unknown"
        ) from problem


def digest_of_record(path: Path) -> str:
    """Return the SHA-256 digest of a record's file, which an encoder's card stores; "" if there is none."""
    try:
        return hashlib.sha256(read_bytes(path, LIST_FILE)).hexdigest()
    except FileNotFoundError:
        return ""
    except OSError as problem:
        raise PatchloomError(
            f"{path} cannot be read ({problem.strerror or problem}): restore it from a copy"
        ) from problem
