"""What weights were trained on, by content: a file beside them, so that no later run calls these images held out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from patchloom.data.source import CONTENT
from patchloom.errors import PatchloomError
from patchloom.system.files import add_checksum, strip_checksum, write_whole


class Record(NamedTuple):
    """The images that a run and those before it trained on.

    Attributes:
        contents: as `Source.contents` has them, sorted, each once.
        unknown: of what else nobody can tell the contents: data, or weights.
    """

    contents: np.ndarray
    unknown: tuple[str, ...] = ()

    def and_trained_on(self, contents: np.ndarray | None, data: str) -> Record:
        """With the images of a further training; ``contents`` of None are noted as unknown under the name ``data``."""
        if contents is None:
            return Record(self.contents, tuple(dict.fromkeys([*self.unknown, data])))
        return Record(np.unique(np.concatenate([self.contents, contents])), self.unknown)


def no_record(*unknown: str) -> Record:
    """That of fresh weights, or of weights of which nothing is known but what they are called."""
    return Record(np.empty(0, CONTENT), unknown)


def write_record(record: Record, path: Path) -> None:
    """Write a record with its checksum; the file appears whole or not at all."""
    about = json.dumps({"unknown": record.unknown}).encode()  # JSON has no line breaks of its own
    write_whole(path, add_checksum(about + b"\n" + record.contents.tobytes()))


def read_record(path: Path) -> Record | None:
    """What `write_record` wrote; None if there is no such file."""
    try:
        content = strip_checksum(path.read_bytes())
        if content is None:
            raise ValueError("its checksum is another one")
        about, _, contents = content.partition(b"\n")
        return Record(np.frombuffer(contents, CONTENT), tuple(json.loads(about)["unknown"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise PatchloomError(
            f"{path} is not what patchloom wrote ({problem}): restore it from a copy, or delete it, and a run that "
            "begins with these weights will not know what they were trained on"
        ) from problem


def digest_of_record(path: Path) -> str:
    """64 hex digits by which the record of an encoder is known; "" if there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""
    except OSError as problem:
        raise PatchloomError(f"{path} cannot be read ({problem.strerror or problem}): is it whole?") from problem
