"""Addresses of shards: expansion of patterns, and the state of each shard."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fsspec.core import url_to_fs

from patchloom.data.source import stamp_of_files
from patchloom.data.workers import in_threads
from patchloom.errors import PatchloomError, one_line
from patchloom.system.network import http_status, network_error, was_refused

PIPE = "pipe:"
_FILE = re.compile(r"file:///(?!.*://)")  # an address that is a path
_MOST = 10**6  # largest number of names that braces may expand to
_DEEPEST = 50  # nested braces
# names that file systems give to a property that changes with the content, the most reliable first
_VERSION_KEYS = (
    "etag",
    "checksum",
    "md5hash",
    "content_md5",
    "digest",
    "crc32c",
    "crc",
    "blob_id",
    "mtime",
    "lastmodified",
    "last_modified",
    "modified",
    "updated",
    "created",
)


@dataclass(frozen=True)
class Shard:
    """Tar file, local or remote.

    Attributes:
        address: an absolute path, an address for fsspec, or a ``pipe:`` command.
        state: known properties of the content: size, and an etag, checksum or modification time.
        size: in bytes, 0 if unknown.
        certain: whether other content is certain to have another state.
    """

    address: str
    state: str
    size: int
    certain: bool

    @property
    def local(self) -> bool:
        """Whether the address is a path."""
        return os.path.isabs(self.address)

    @property
    def pipe(self) -> bool:
        """Whether the address is a command."""
        return self.address.startswith(PIPE)


def is_address(name: str) -> bool:
    """Return whether this is an address for fsspec or a shell command, and not a path."""
    return name.startswith(PIPE) or "://" in name


def find_remote(name: str) -> str | None:
    """Return the first part of a name that is not a local file: a command, or an address.

    Braces are expanded first, and each part between commas is checked, since a list may be split there.
    """
    for whole in expand_braces(name):
        for one in {whole.strip(), *map(str.strip, whole.split(","))}:
            if PIPE in one.lower() or "::" in one or ("://" in one and not _FILE.match(one)):
                return one
    return None


def addresses_of(pattern: str) -> list[str]:
    """Expand a pattern to addresses, in order: braces as in a shell, and ``*`` for all existing ones."""
    found: list[str] = []
    for address in expand_braces(pattern):
        if address.startswith(PIPE) or "://" not in address:
            found += [address] if address.startswith(PIPE) else _local(address)
            continue
        fs, path = connect(address)
        if "file" in fs.protocol:
            found += _local(path)
        elif not ("*" in path or "[" in path):  # a ? is common in web addresses
            found.append(address)
        else:
            try:
                there = sorted(fs.glob(path))
            except Exception as error:  # each file system has its own exceptions
                raise _unreachable(address, error) from error
            before, here, after = address.partition(path)
            if not (there and here):
                raise PatchloomError(
                    f"there is no shard {address}: check it, or count the shards in braces, as {{000..012}}"
                )
            found += [before + one + after for one in there]
    return list(dict.fromkeys(found))


def stat_shards(addresses: Iterable[str]) -> list[Shard]:
    """Return the shards at the addresses, with their current state."""
    return list(in_threads(_state, addresses))


def connect(address: str) -> tuple[Any, str]:
    """Return file system and path of an address, for immediate use: forked processes cannot share connections."""
    try:
        return url_to_fs(address)
    except ImportError as error:
        raise PatchloomError(f"{address} needs another package ({error}): install it with pip") from error
    except Exception as error:  # each file system has its own exceptions
        raise _unreachable(address, error) from error


def error_line(error: BaseException) -> str:
    """Return the message of an exception in one line."""
    if isinstance(error, FileNotFoundError) and error.errno is None:  # fsspec's, which repeats the address
        cause = error.__cause__
        if cause is None:
            return "nothing was found there"
        # HTTP's stands for a failed connection and for any answer
        other = isinstance(cause, OSError) or http_status(cause) not in (None, 404, 410)
        return error_line(cause) if other else f"nothing was found there ({error_line(cause)})"
    return f"the connection was refused ({one_line(error)})" if was_refused(error) else one_line(error)


def expand_braces(pattern: str) -> list[str]:
    """Expand braces as a shell does: ``{000..012}``, ``{0..8..2}``, ``{a,b}``, also nested; other braces stay."""
    return _expanded(pattern, 0)


def _expanded(pattern: str, within: int) -> list[str]:
    if within > _DEEPEST:
        raise PatchloomError(f"braces are nested more than {_DEEPEST} deep in {pattern[:60]}...: write them flat")
    found, at = [""], 0
    while (group := _group(pattern, at)) is not None:
        begin, end, parts = group
        if len(parts) > 1:
            words = [word for part in parts for word in _expanded(part, within + 1)]
        else:
            words = _counted(parts[0], within)
        if len(found) * len(words) > _MOST:
            raise PatchloomError(
                f"{pattern[:60]}... stands for more than {_MOST:,} names: give a folder, or a list in a file"
            )
        found = [before + pattern[at:begin] + word for before in found for word in words]
        at = end + 1
    return [before + pattern[at:] for before in found]


def _group(pattern: str, at: int) -> tuple[int, int, list[str]] | None:
    """Return the first closed braces from ``at`` on: where they begin and end, and the parts between commas."""
    depth, cuts = 0, list[int]()
    for place in range(at, len(pattern)):
        letter = pattern[place]
        if letter == "{":
            depth += 1
            cuts = [place] if depth == 1 else cuts
        elif letter == "," and depth == 1:
            cuts.append(place)
        elif letter == "}" and depth:
            depth -= 1
            if depth == 0:
                return cuts[0], place, [pattern[a + 1 : b] for a, b in zip(cuts, [*cuts[1:], place], strict=True)]
    return None


def _counted(inside: str, within: int) -> list[str]:
    numbers = re.fullmatch(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.-?(\d{1,18}))?", inside)
    if numbers is None:
        return [f"{{{word}}}" for word in _expanded(inside, within + 1)]
    first, last, step = numbers[1], numbers[2], int(numbers[3] or 1) or 1
    if abs(int(first) - int(last)) // step >= _MOST:
        raise PatchloomError(f"{{{inside}}} stands for more than {_MOST:,} names: give a folder, or a list in a file")
    width = max(len(first), len(last)) if re.match("-?0.", first) or re.match("-?0.", last) else 0
    way = 1 if int(first) <= int(last) else -1
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + way, way * step)]


def _local(pattern: str) -> list[str]:
    path = os.path.abspath(os.path.expanduser(pattern))
    found = [path] if os.path.exists(path) else sorted(glob.glob(path))
    if not found:
        raise PatchloomError(f"there is no shard {path}: check the folder, and the numbers in the pattern")
    return found


def _state(address: str) -> Shard:
    if address.startswith(PIPE):
        return Shard(address, "", 0, certain=False)
    if os.path.isabs(address):
        if not os.path.isfile(address):
            raise PatchloomError(f"{address} is not a file: check the folder, and the numbers in the pattern")
        return Shard(address, stamp_of_files([address]), os.path.getsize(address), certain=True)
    fs, path = connect(address)
    try:
        fs.invalidate_cache()
        info = {key.lower().replace("-", "_"): value for key, value in fs.info(path).items()}
    except Exception as error:  # each file system has its own exceptions
        raise _unreachable(address, error) from error
    if info.get("type") == "directory":
        raise PatchloomError(f"{address} is a folder: name the shards in it, as {address.rstrip('/')}/*.tar")
    known = next((f"{key} {info[key]}" for key in _VERSION_KEYS if info.get(key)), "")
    size = info.get("size") or 0
    return Shard(address, f"{size} {known}", size, certain=bool(known))


def _unreachable(address: str, error: Exception) -> PatchloomError:
    return network_error(f"{address} cannot be opened: {error_line(error)}", error)
