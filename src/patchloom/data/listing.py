"""Listing a folder of images once: what was found is kept, and holds as long as no folder in it has changed."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from patchloom.data.read import IMAGE_SUFFIXES
from patchloom.data.source import digest
from patchloom.errors import PatchloomError
from patchloom.files import cache_root, write_whole

_FORMAT = "listing 1"
_WORTH_KEEPING = 20_000  # images; fewer are listed faster than anybody notices
# file systems that change a folder's time with its entries; some that show a cloud's objects as files do not
_TRUSTED = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}
_SETTLED = 2 * 10**9  # nanoseconds: what changes in the very moment of the listing may carry the same time


class Names(Sequence[str]):
    """Strings in one block of bytes: a million paths cost their letters alone, and worker processes share them."""

    def __init__(self, names: Sequence[str]) -> None:
        lengths = (len(name.encode("utf-8", "surrogateescape")) for name in names)
        self.ends = np.cumsum(np.fromiter(lengths, np.int64, len(names)))
        self.letters = "".join(names).encode("utf-8", "surrogateescape")

    @classmethod
    def of(cls, letters: bytes, ends: np.ndarray) -> Names:
        """From what another one has: all strings one after the other, and where each ends, int64 [n]."""
        names = cls.__new__(cls)
        names.letters, names.ends = letters, ends
        return names

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in memoryview(self.ends):
            yield self.letters[start:end].decode("utf-8", "surrogateescape")
            start = end

    def __getitem__(self, i: int) -> str:
        if not 0 <= i < len(self.ends):
            raise IndexError(i)
        return self.letters[self.ends[i - 1] if i else 0 : self.ends[i]].decode("utf-8", "surrogateescape")


def images_in(root: Path, name: str) -> Names:
    """Sorted paths of the images under a folder, relative to it, with forward slashes.

    Hidden files are skipped, and a folder that links reach twice is read once. The list of a large folder is kept in
    the cache, with the state of every folder in it: one `stat` for each folder tells that it still holds.

    Args:
        root: the folder.
        name: what the user calls it.

    Raises:
        PatchloomError: there are no images in it.
    """
    kept = cache_root() / "listings" / digest([_FORMAT, os.path.abspath(root)])
    paths = _read(kept, root)
    if paths is not None:
        return paths
    begin = time.time_ns()
    found, folders = _walk(root, name)
    paths = Names(found)
    settled = all(changed < begin - _SETTLED for *_, changed in folders)
    if len(paths) >= _WORTH_KEEPING and settled and _trusted({device for _, device, *_ in folders}):
        about = json.dumps(folders).encode()
        sizes = np.array([len(about), len(paths)], np.int64).tobytes()
        try:
            write_whole(kept, b"".join([sizes, about, paths.ends.tobytes(), paths.letters]))
        except PatchloomError:  # a full or read-only disc costs another listing, and nothing else
            pass
    return paths


def _read(kept: Path, root: Path) -> Names | None:
    """What is kept, if it still holds."""
    try:
        content = kept.read_bytes()
        about, count = np.frombuffer(content, np.int64, 2).tolist()
        folders = json.loads(content[16 : 16 + about])
        if not all(_state(os.path.join(root, folder)) == state for folder, *state in folders):
            return None
        ends = np.frombuffer(content, np.int64, count, 16 + about).copy()  # where a memoryview takes it
        letters = content[16 + about + ends.nbytes :]
        return Names.of(letters, ends) if count and ends[-1] == len(letters) else None
    except (OSError, ValueError, TypeError):  # none there, a folder that is gone, or damaged
        return None


def _state(folder: str) -> list[int]:
    """A folder's device and number, and when its entries changed."""
    found = os.stat(folder)
    return [found.st_dev, found.st_ino, found.st_mtime_ns]


def _trusted(devices: set[int]) -> bool:
    """Whether all devices have file systems of which the time of a folder can be trusted."""
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:  # not on Linux
        return False
    kinds = {}
    for line in lines:
        place, _, rest = line.partition(" - ")
        major, _, minor = place.split()[2].partition(":")
        kinds[os.makedev(int(major), int(minor))] = rest.split()[0]
    return all(kinds.get(device) in _TRUSTED for device in devices)


def _walk(root: Path, name: str) -> tuple[list[str], list[list]]:
    """The paths, and of every folder its path and state."""
    found: list[list[str]] = []
    folders: list[list] = []
    others: Counter[str] = Counter()
    seen: set[str] = set()
    start = len(os.path.join(root, ""))
    for folder, subfolders, files in os.walk(root, followlinks=True):
        state = _state(folder)
        real = os.path.realpath(folder)
        folders.append([os.path.join(folder, "")[start:], *state])
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(sub for sub in subfolders if not sub.startswith("."))
        inside = os.path.join(folder, "")[start:].replace(os.sep, "/")
        images: list[str] = []
        for file in files:
            suffix = os.path.splitext(file)[1].lower()
            if file.startswith("."):
                continue
            if suffix in IMAGE_SUFFIXES:
                images.append(inside + file)
            else:
                others[suffix or "no suffix"] += 1
        found.append(images)
    paths = sorted(chain.from_iterable(found))
    if not paths and others:
        types = ", ".join(suffix for suffix, _ in others.most_common(5))
        wanted = ", ".join(sorted(IMAGE_SUFFIXES))
        raise PatchloomError(f"{name} holds no images, only files of other types ({types}): images end in {wanted}")
    if not paths:
        raise PatchloomError(f"{name} is an empty folder: put images into it, at any depth")
    return paths, folders
