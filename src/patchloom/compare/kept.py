"""What was measured of an encoder, kept in the comparison's folder, so that none is measured twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from patchloom.data import Source
from patchloom.files import make_folder, write_whole
from patchloom.nets.extra_modules import extra_module_file
from patchloom.nets.weights import weights_file
from patchloom.runs.encoder import unfinished
from patchloom.version import __version__

T = TypeVar("T")

_AT_ONCE = 2**20  # bytes


def kept(
    path: Path, key: str, make: Callable[[], T], to_plain: Callable[[T], Any], from_plain: Callable[[Any], T]
) -> T:
    """What a file holds, or what is made now and written there; that of another ``key`` is made anew.

    Args:
        path: of the file; its folder is made.
        key: all on which it depends, as `key_of` has it.
        make: what makes it.
        to_plain: makes values for JSON of it.
        from_plain: makes it of these; ValueError, KeyError and TypeError mean that they are damaged.

    Raises:
        PatchloomError: the file cannot be written, or what ``make`` raises.
    """
    try:
        values = json.loads(path.read_bytes())
        if values["key"] == key:
            return from_plain(values["found"])
    except (OSError, ValueError, KeyError, TypeError):  # missing, or damaged: it is made anew
        pass
    found = make()
    make_folder(path.parent)
    write_whole(path, json.dumps({"key": key, "found": to_plain(found)}, indent=1))
    return found


def key_of(place: str, about: Sequence[str], sources: Sequence[Source]) -> str:
    """All on which a measurement of an encoder depends: its weights, the images, what is asked, and this version.

    Args:
        place: of the encoder, as `load_encoder` takes it.
        about: what is asked of it.
        sources: images; their labels are in the fingerprint, and a file that was replaced is seen in the stamp.

    Raises:
        PatchloomError: there is no encoder.
    """
    states = [f"{len(one)} {one.fingerprint()} {one.stamp()}" for one in sources]
    # a folder that was moved is still the same encoder
    return "\n".join([weights_digest(place) or place, *about, *states, __version__])


def weights_digest(place: str) -> str:
    """64 hex digits of the files of an encoder; "" of timm's, whose name says which weights they are.

    Raises:
        PatchloomError: there is no encoder.
    """
    if place.startswith("timm:"):
        return ""
    run = unfinished(place)
    if run is not None:
        files = [run.checkpoints.last, run.checkpoints.before]
    else:
        head = extra_module_file(place, "pooling")
        files = [weights_file(place), *([] if head is None else [head])]
    total = hashlib.sha256()
    for file in files:
        if file.exists():
            total.update(f"\0{file.name}\0".encode())
            with open(file, "rb") as opened:
                while part := opened.read(_AT_ONCE):
                    total.update(part)
    return total.hexdigest()
