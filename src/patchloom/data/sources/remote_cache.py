"""Remote shards: fetched whole into a cache of bounded size, and then read like local ones.

The cache is ``cache_root()/shards/fetched``. The least recently used file is removed first; any file there may be
deleted at any time.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from patchloom.data.decode import Unreadable
from patchloom.data.source import digest
from patchloom.data.sources.urls import PIPE, Shard, connect, error_line, stat_shards
from patchloom.errors import PatchloomError
from patchloom.system.files import cache_root, write_whole

ROOM = "PATCHLOOM_SHARDS_GB"
_ROOM = 20  # GB
_PAUSES = (1.0, 5.0)  # seconds before another attempt, so that a short outage does not cost a shard's images
_FEW, _REMEMBERED = 4, 16
_FORGOTTEN = 3600  # seconds after which a half-written file must be left over from a dead process
_LOCKS = 64

_asked: dict[str, int] = {}  # by address: how often this process has lately asked for parts of it


def open_shard(shard: Shard) -> BinaryIO:
    """Open a shard, which is fetched if it is remote. The open file stays readable if it is deleted."""
    try:
        return open(shard.address, "rb") if shard.local else _fetched(shard)
    except OSError as error:
        raise Unreadable(f"{shard.address} cannot be read: {error_line(error)}") from error


def read_range(shard: Shard, start: int, size: int) -> bytes:
    """``size`` bytes from offset ``start``, or fewer if the shard ends before.

    The first few parts of a remote shard are fetched alone, so that a few images do not cost the whole shard.
    """
    if not (shard.local or shard.pipe or _place(shard).exists()) and _seldom(shard.address):
        with contextlib.suppress(Exception):  # a server without range requests may still send the whole shard
            fs, path = connect(shard.address)
            content = fs.cat_file(path, start=start, end=start + size)
            if len(content) == size:  # some servers ignore the range
                return content
    with open_shard(shard) as file:
        file.seek(start)
        return file.read(size)


def check_cache_room(shards: Iterable[Shard], together: int, name: str) -> None:
    """Refuse shards that do not fit into the cache together, and would be fetched again and again."""
    elsewhere = [shard for shard in shards if not shard.local]
    largest = sorted((shard.size for shard in elsewhere if not shard.pipe), reverse=True)[:together]
    needed = sum(largest) + sum(shard.size for shard in elsewhere if shard.pipe)
    if needed > _room():
        raise PatchloomError(
            f"{name} needs {needed / 1e9:.3g} GB of its shards on this machine at the same time, and "
            f"{_room() / 1e9:.3g} GB are allowed: raise {ROOM}, or make smaller shards"
        )


def _fetched(shard: Shard) -> BinaryIO:
    place = _place(shard)
    with contextlib.suppress(FileNotFoundError):
        return _touched(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    copies: list[BinaryIO] = []
    # without a lock, all workers would fetch it; a fixed number of locks, since they can never be deleted safely
    with FileLock(place.parent / f"{int(place.stem, 16) % _LOCKS}.lock"):
        with contextlib.suppress(FileNotFoundError):
            return _touched(place)
        for pause in (*_PAUSES, None):
            try:
                write_whole(place, lambda to: copies.append(_copied(shard, to)))
                break
            except Unreadable:
                if pause is None:
                    raise
                time.sleep(pause)
    _make_room(place)
    return copies[0]


def _copied(shard: Shard, to: Path) -> BinaryIO:
    """Fetch a shard into a file, and open it before it gets its final name, under which it could be deleted."""
    try:
        if shard.pipe:
            _run(shard.address.removeprefix(PIPE), to)
        else:
            fs, path = connect(shard.address)
            fs.get_file(path, os.fspath(to))
            if stat_shards([shard.address])[0].state != shard.state:
                raise ValueError("it has changed since it was opened")
        came = to.stat().st_size
        if shard.size and came != shard.size:  # a connection that broke, or a command that writes something else now
            raise ValueError(f"{came:,} bytes came instead of {shard.size:,}")
    except Exception as error:  # each file system has exceptions of its own
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        to.unlink(missing_ok=True)
        raise Unreadable(f"{shard.address} cannot be fetched: {error_line(error)}") from error
    return to.open("rb")


def _run(command: str, to: Path) -> None:
    with to.open("wb") as file:
        done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE)
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ValueError(lines[-1] if lines else f"the command ended with code {done.returncode}")


def _folder() -> Path:
    return cache_root() / "shards" / "fetched"


def _place(shard: Shard) -> Path:
    return _folder() / f"{digest([shard.address, shard.state])}.tar"


def _touched(place: Path) -> BinaryIO:
    os.utime(place)
    return place.open("rb")


def _room() -> float:
    """Bytes that fetched shards may take."""
    text = os.environ.get(ROOM) or str(_ROOM)
    try:
        room = float(text)
    except ValueError:
        room = math.nan
    if not room > 0:
        raise PatchloomError(f"{ROOM} is {text}: give the gigabytes that fetched shards may take, such as {_ROOM}")
    return room * 1e9


def _make_room(place: Path) -> None:
    """Delete the least recently used files until the rest fits; never ``place``, nor files being written."""
    files = []
    for path in _folder().iterdir():
        with contextlib.suppress(OSError):  # another process was faster
            if path.suffix != ".lock":
                files.append((path.stat().st_mtime, path.stat().st_size, path))
    total, room = sum(size for _, size, _ in files), _room()
    for used, size, path in sorted(files):
        if total <= room:
            return
        if path != place and not (path.name.startswith(".") and time.time() - used < _FORGOTTEN):
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


def _seldom(address: str) -> bool:
    """Whether this is one of the first few recent requests for the shard."""
    _asked[address] = _asked.pop(address, 0) + 1
    while len(_asked) > _REMEMBERED:
        del _asked[next(iter(_asked))]
    return _asked[address] <= _FEW
