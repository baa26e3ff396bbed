"""Shards: tar files of images and labels in WebDataset's layout, with random access.

The index of a shard lists its images and their positions. Remote shards are fetched whole into
``cache_root()/shards/fetched``, a cache of bounded size: the least recently used file is removed first, and any file
there may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import tarfile
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock

from patchloom.data.decode import IMAGE_SUFFIXES, Unreadable
from patchloom.data.notes import count_of, note_on_splits
from patchloom.data.source import Data, digest, in_classes, number_words
from patchloom.data.sources.files import EncodedFiles, Files, PackedStrings
from patchloom.data.sources.names import choose_splits, in_foreign, is_foreign, split_of
from patchloom.data.sources.urls import PIPE, Shard, addresses_of, connect, error_line, is_address, stat_shards
from patchloom.data.workers import in_threads
from patchloom.display import track_progress
from patchloom.errors import PatchloomError, TemporaryError
from patchloom.system.documents import is_whole
from patchloom.system.files import cache_root, open_regular, write_whole
from patchloom.system.network import network_error

# The cache of remote shards.

ROOM = "PATCHLOOM_SHARDS_GB"
_ROOM = 20  # GB
_PAUSES = (1.0, 5.0)  # seconds before another attempt, so that a short outage does not cost a shard's images
_FEW, _REMEMBERED = 4, 16
_FORGOTTEN = 3600  # seconds after which a half-written file must be left over from a dead process
_LOCKS = 64

# exit codes of programs by which they did not reach a host, or lost it; a host without an address is a typo (curl: 6)
_UNREACHABLE = {"curl": (7, 18, 28, 52, 55, 56), "wget": (4,)}

_asked: dict[str, int] = {}  # by address: number of recent requests of this process for parts of it


def open_shard(shard: Shard) -> BinaryIO:
    """Open a shard, fetching it if it is remote. The open file stays readable if it is deleted."""
    try:
        return open_regular(shard.address, follow=True) if shard.local else _fetched(shard)
    except OSError as error:
        raise Unreadable(f"{shard.address} cannot be read: {error_line(error)}") from error


def read_range(shard: Shard, start: int, size: int) -> bytes:
    """Read ``size`` bytes from offset ``start``, or fewer if the shard ends before.

    The first few parts of a remote shard are fetched alone, so that a few images do not need the whole shard.
    """
    if not (shard.local or shard.pipe or cached_path(shard).exists()) and _seldom(shard.address):
        with contextlib.suppress(Exception):  # a server without range requests may still send the whole shard
            fs, path = connect(shard.address)
            content = fs.cat_file(path, start=start, end=start + size)
            if len(content) == size:  # some servers ignore the range
                return content
    with open_shard(shard) as file:
        file.seek(start)
        return file.read(size)


def check_cache_room(shards: Iterable[Shard], together: int, name: str) -> None:
    """Refuse shards that do not fit into the cache together and would be fetched again and again."""
    elsewhere = [shard for shard in shards if not shard.local]
    largest = sorted((shard.size for shard in elsewhere if not shard.pipe), reverse=True)[:together]
    needed = sum(largest) + sum(shard.size for shard in elsewhere if shard.pipe)
    if needed > _room():
        raise PatchloomError(
            f"{name} needs {needed / 1e9:.3g} GB of its shards on this machine at the same time, and "
            f"{_room() / 1e9:.3g} GB are allowed: raise {ROOM}, or make smaller shards"
        )


def _fetched(shard: Shard) -> BinaryIO:
    place = cached_path(shard)
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
    except Exception as error:  # each file system has its own exceptions
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        to.unlink(missing_ok=True)
        raise Unreadable(f"{shard.address} cannot be fetched: {error_line(error)}") from error
    return to.open("rb")


def _run(command: str, to: Path) -> None:
    with to.open("wb") as file:
        done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE)
    if not done.returncode:
        return
    # a shell gives the code of the last command: that of gzip for ``curl ... | gzip -dc``
    passing, lexer = {TemporaryError.exit_code}, shlex.shlex(command, posix=True, punctuation_chars=True)
    with contextlib.suppress(ValueError):  # an unbalanced quote
        first, *others = lexer
        if not any(word and set(word) <= set("|&;()") for word in others):
            passing.update(_UNREACHABLE.get(os.path.basename(first), ()))
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    text = lines[-1] if lines else f"the command ended with code {done.returncode}"
    raise TemporaryError(text) if done.returncode in passing else ValueError(text)


def shard_cache() -> Path:
    return cache_root() / "shards" / "fetched"


def cached_path(shard: Shard) -> Path:
    return shard_cache() / f"{digest([shard.address, shard.state])}.tar"


def _touched(place: Path) -> BinaryIO:
    os.utime(place)
    return place.open("rb")


def _room() -> float:
    """Return the bytes that fetched shards may take."""
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
    for path in shard_cache().iterdir():
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
    """Return whether this is one of the first few recent requests for the shard."""
    _asked[address] = _asked.pop(address, 0) + 1
    while len(_asked) > _REMEMBERED:
        del _asked[next(iter(_asked))]
    return _asked[address] <= _FEW


# The index of a shard: names, offsets, sizes and labels of its images.


_FORMAT = "index 2"  # increment when the code that makes an index changes
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


@dataclass(frozen=True)
class ShardIndex:
    """Images in a shard.

    Attributes:
        names: names of the members.
        starts, sizes: offsets and sizes of the images, in bytes.
        labels: text of each label, or None.
        size: size of the shard, in bytes.
    """

    names: list[str]
    starts: list[int]
    sizes: list[int]
    labels: list[str | None]
    size: int


def index_of(shard: Shard) -> ShardIndex:
    """Return the index of a shard, from the cache or read from the shard."""
    cached = cache_root() / "shards" / "index" / f"{digest([_FORMAT, shard.address, shard.state])}.json"
    try:
        return ShardIndex(**json.loads(cached.read_text("utf-8")))
    except (OSError, ValueError, TypeError):  # none there, or damaged
        pass
    try:
        with open_shard(shard) as file:
            index = read_index(file, shard.address)
    except Unreadable as error:  # in training, it costs the shard's images; here, the command
        raise network_error(str(error), error) from error
    write_whole(cached, json.dumps(asdict(index)))
    return index


def read_index(file: BinaryIO, name: str) -> ShardIndex:
    """Read the index of an open shard."""
    samples: dict[str, list[tarfile.TarInfo]] = {}
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            last = -1
            for member in tar:
                if min(member.size, tar.offset - last - 1) < 0:  # tarfile would read the same member again, for ever
                    raise tarfile.ReadError(f"the size of {member.name} is wrong")
                last = tar.offset
                if member.isfile() and not _base(member).startswith(".") and not in_foreign(member.name):
                    samples.setdefault(member.name.removesuffix(_suffix(member)), []).append(member)
            end = tar.offset
    except Exception as error:  # tarfile's own exceptions, and others from wrong numbers in a header
        file.seek(0)
        if file.read(8).startswith(_COMPRESSED):
            raise PatchloomError(
                f"{name} is compressed, so that no sample can be read alone: unpack it, or give the command that does, "
                "such as 'pipe:gzip -dc {000..012}.tar.gz'"
            ) from error
        raise PatchloomError(f"{name} is not a tar file, or is damaged ({error_line(error)}): make it again") from error
    file.seek(end)
    rest = file.read(tarfile.RECORDSIZE)
    if not rest or rest.strip(b"\0"):  # tarfile stops silently where it finds no header
        raise PatchloomError(f"{name} is cut off or damaged after byte {end:,}: make it again")
    index = ShardIndex([], [], [], [], file.seek(0, os.SEEK_END))
    for members in samples.values():
        # NAME.jpg or the like if there is one, else NAME.npy, else NAME.WORD.jpg or the like
        kinds: list[list[tarfile.TarInfo]] = [[], [], []]
        for member in members:
            suffix = _suffix(member).lower()
            if suffix in IMAGE_SUFFIXES:
                kinds[suffix == ".npy"].append(member)
            elif os.path.splitext(suffix[1:])[1] in IMAGE_SUFFIXES:
                kinds[2].append(member)
        found = next(filter(None, kinds), [])
        if len(found) > 1:
            raise PatchloomError(
                f"{name} has several images in one sample ({found[0].name}, {found[1].name}): keep one, since files "
                "with the same name up to the first dot are one sample"
            )
        for image in found:
            index.names.append(image.name)
            index.starts.append(image.offset_data)
            index.sizes.append(image.size)
            index.labels.append(_label(file, members))
    return index


def _base(member: tarfile.TarInfo) -> str:
    return member.name.rpartition("/")[2]


def _suffix(member: tarfile.TarInfo) -> str:
    """Return the suffix of a member from its first dot on; the name before it is that of the sample."""
    return member.name[len(member.name) - len(_base(member).partition(".")[2]) - 1 :] if "." in _base(member) else ""


def _label(file: BinaryIO, members: list[tarfile.TarInfo]) -> str | None:
    """Return the text of NAME.cls; a number loses its leading zeros."""
    for member in members:
        if _suffix(member).lower() == ".cls":
            file.seek(member.offset_data)
            text = file.read(member.size).decode("utf-8", "replace").strip()
            return str(int(text)) if is_whole(text) else text or None
    return None


WINDOW = 8  # number of shards whose images are mixed at any time


class Shards(EncodedFiles):
    """Images in tar files.

    Args:
        name: name as the user typed it.
        shards: tar files.
        names: names of the images' members.
        at: int64 [n 3], for each image the number of its shard, its offset and its size in bytes.
        classes: names of the classes.
        labels: int64 [n], indices into ``classes``, -1 for none.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[Shard],
        names: Sequence[str],
        at: np.ndarray,
        classes: tuple[str, ...] = (),
        labels: np.ndarray | None = None,
    ) -> None:
        self.name, self.shards, self.names, self.at = name, tuple(shards), PackedStrings(names), at
        self.classes, self.labels = classes, labels
        self.to_label = "put the class of each image into a member NAME.cls beside it"

    def __len__(self) -> int:
        return len(self.at)

    def stored(self, i: int) -> bytes:
        number, start, size = self.at[i].tolist()
        try:
            content = read_range(self.shards[number], start, size)
        except Unreadable as error:
            raise Unreadable(f"{self.describe(i)}: {error}") from error
        if len(content) < size:
            raise Unreadable(f"{self.describe(i)} cannot be read as an image: its shard was cut off")
        return content

    def order(self, rng: np.random.Generator, chosen: np.ndarray | None = None) -> np.ndarray:
        """Draw shards in random order, with the images of each spread over the span of `WINDOW` shards.

        Images of `WINDOW` shards are mixed at any time, and only these shards have to be available. The span wraps
        around from the end of the epoch to its beginning. Up to `WINDOW` shards are shuffled uniformly.
        """
        shard = self.at[:, 0] if chosen is None else self.at[chosen, 0]
        count = len(self.shards)
        turn = rng.permutation(count)[shard] + min(WINDOW, count) * rng.random(len(shard))
        return np.argsort(turn % count, kind="stable")

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray | None:
        """Return hashes of the images' bytes in the shards; None if shards would have to be fetched."""
        return super().contents(chosen) if all(shard.local for shard in self.shards) else None

    def describe(self, i: int) -> str:
        return f"{self.shards[self.at[i, 0]].address}:{self.names[i]}"

    def place(self, i: int) -> str:
        return f"{self.shards[self.at[i, 0]].address.rpartition('/')[2]}/{self.names[i]}"

    def fingerprint(self) -> str:
        """Return a digest of the index, of name, size and mtime of local shards, and of address and state of others."""
        paths = [Path(shard.address) for shard in self.shards if shard.local]
        here = [Files(self.name, path.parent, [path.name]).fingerprint() for path in paths]
        away = [f"{shard.address}\t{shard.state}" for shard in self.shards if not shard.local]
        labels = [] if self.labels is None else self.labels.tolist()
        return digest(chain(self.classes, map(str, labels), [self._places()], here, away))

    def stamp(self) -> str | None:
        now = stat_shards(shard.address for shard in self.shards)
        if not all(shard.certain for shard in now):
            return None
        return digest(chain([self._places()], (f"{shard.address}\t{shard.state}" for shard in now)))

    def _places(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.at).data).hexdigest()


def is_shards(name: str) -> bool:
    """Return whether the user typed shards, and not a folder or a list."""
    return is_address(name) or re.search(r"\.(tar|tgz|tar\.\w+)$", name) is not None


def holds_shards(folder: Path) -> bool:
    """Return whether a folder holds tar files, and neither images nor folders."""
    entries = [path for path in folder.iterdir() if not path.name.startswith(".") and not is_foreign(path.name)]
    suffixes = {path.suffix.lower() for path in entries}
    return ".tar" in suffixes and not suffixes & IMAGE_SUFFIXES and not any(path.is_dir() for path in entries)


def open_shards(pattern: str, name: str) -> Data:
    """Open the shards that a pattern matches."""
    return Data(_source(addresses_of(pattern), name), None)


def open_shard_folder(folder: Path, name: str) -> Data:
    """Open all tar files of a folder; ``train-*.tar`` and ``test-*``, ``val-*`` or ``validation-*`` are splits.

    If there are two of these, shards of any other name are left out.
    """
    by_split: dict[str, list[str]] = {}
    for path in sorted(folder.absolute().glob("*.tar")):
        if not path.name.startswith("."):
            by_split.setdefault(re.split("[-_.]", path.name)[0], []).append(os.fspath(path))
    first, second = choose_splits(by_split)
    if first is None or second is None:
        return Data(_source([*chain.from_iterable(by_split.values())], name), None)
    sizes = {split: count_of(len(some), "shard") for split, some in by_split.items()}
    trained, last = (f"{split} ({sizes.pop(split)})" for split in (first, second))
    notes = (note_on_splits(trained, last, sizes, f"name {{}} {first}-*"),) if sizes else ()
    train = _source(by_split[first], name)
    test = in_classes(_source(by_split[second], name), train.classes, second)
    others = {split: in_classes(_source(by_split[split], name), train.classes) for split in sizes if split_of(split)}
    return Data(train, test, notes, others)


def _source(addresses: list[str], name: str) -> Shards:
    """Index shards."""
    shards = stat_shards(addresses)
    check_cache_room(shards, 2 * WINDOW, name)  # twice, because workers are at different places
    indices: list[ShardIndex] = []
    with closing(in_threads(index_of, shards)) as made:  # else threads would continue after an exception
        for number, index in enumerate(track_progress(made, len(shards), f"indexing the shards of {name}")):
            shards[number] = replace(shards[number], size=index.size)
            indices.append(index)
            if shards[number].pipe:  # its size was not known before
                check_cache_room(shards, 2 * WINDOW, name)
    names = [image for index in indices for image in index.names]
    if not names:
        some = shards[0].address if len(shards) == 1 else f"the {len(shards)} shards of {name}"
        wanted = ", ".join(sorted(IMAGE_SUFFIXES))
        raise PatchloomError(
            f"{some}: no sample has an image, with a suffix of {wanted}; recordings are read from folders, not shards"
        )
    numbers = np.repeat(np.arange(len(shards)), [len(index.names) for index in indices])
    starts = [start for index in indices for start in index.starts]
    sizes = [size for index in indices for size in index.sizes]
    texts = [text or "" for index in indices for text in index.labels]
    numeric = next((i for i, text in enumerate(texts) if is_whole(text)), None)
    word = next((i for i, text in enumerate(texts) if text and not is_whole(text)), None)
    if numeric is not None and word is not None:
        raise PatchloomError(
            f"{name} mixes labels: {names[numeric]} has the number {texts[numeric]} and {names[word]} the word "
            f"{texts[word]}, so write all of them in one way"
        )
    at = np.stack([numbers, starts, sizes], 1).astype(np.int64)
    return Shards(name, shards, names, at, *number_words(texts))
