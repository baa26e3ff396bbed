"""Before it starts: how large the file will be, whether the disc has room for it, and how long it takes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping

import numpy as np

from patchloom.data import Source
from patchloom.data.sources.items import spread
from patchloom.embed.parts import Parts
from patchloom.embed.rows import path_of
from patchloom.embed.vectors import Encoding
from patchloom.errors import PatchloomError
from patchloom.files import size_in_words

_FIRST, _TIMED = 8, 64  # images: of the first few much of the time is a beginning, so it is not that which is told
_SLOW = 1.0  # seconds, above which the next few are as few
_PATHS = 100  # are looked at
_BESIDE = 10  # bytes of a row for its split and label


def file_bytes(parts: Parts, suffix: str) -> int:
    """About how large the file will be, in bytes."""
    vector = int(np.prod(parts.shape)) * parts.dtype.itemsize
    total = 0.0
    for source in parts.sources.values():
        lengths = [len(path_of(source, i)) for i in spread(len(source), _PATHS)]
        # text of a fixed width has 4 bytes a letter, as many as the longest needs
        path = 4 * max(lengths) if suffix == ".npz" else sum(lengths) / len(lengths) + 8
        total += len(source) * (vector + path + _BESIDE)
    return round(total)


def check_room(parts: Parts, size: int) -> None:
    """Refuse to begin where the disc has no room for the parts and the file, which are there together at the end.

    Args:
        parts: some may be there already.
        size: of the file, in bytes.

    Raises:
        PatchloomError: there is too little.
    """
    folder = next(one for one in parts.folder.absolute().parents if one.is_dir())
    need = 2 * size - sum(part.path.stat().st_size for part in parts.all[: parts.there()])
    free = shutil.disk_usage(folder).free
    if need > free:
        raise PatchloomError(
            f"{parts.folder.name.removesuffix('.parts')} needs about {size_in_words(need)} while it is made, and "
            f"{folder} has {size_in_words(free)} free: make room, choose a --to on a larger disc, or take --dtype "
            "float16"
        )


def seconds_for(encoding: Encoding, sources: Mapping[str, Source], images: int) -> float | None:
    """About how long so many ``images`` take, by a few of them in this process; None where these tell nothing."""
    source = max(sources.values(), key=len)
    if images <= 2 * _TIMED:
        return None
    try:
        seconds = _seconds(encoding, source, _FIRST)
        count = _FIRST if seconds > _SLOW else _TIMED
        return _seconds(encoding, source, count) / count * images
    except PatchloomError:  # none of the few can be read: the pass itself tells what is wrong
        return None


def _seconds(encoding: Encoding, source: Source, count: int) -> float:
    begun = time.perf_counter()
    encoding.each(source.subset(spread(len(source), count)), lambda *_: None)
    return time.perf_counter() - begun
