"""The files of a folder at any depth. A large listing is cached, and holds as long as no folder in it has changed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.conversions import MAX_EXAMPLES, limit_examples
from patchloom.data.decode import EXTRAS, IMAGE_SUFFIXES, LOOK_ALIKES, SOUND_SUFFIXES
from patchloom.data.source import digest
from patchloom.data.sources.files import PackedStrings
from patchloom.errors import PatchloomError, pip_install
from patchloom.system.files import cache_root, write_whole

_FORMAT = "listing 3"
_WORTH_CACHING = 20_000  # images and recordings; fewer are listed in no time
# file systems that update a folder's mtime when its entries change; some mounts of cloud storage do not
_TRUSTED = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}
_RUNS = ("requested.yaml", "config.yaml"), ("compare.yaml", "comparison.csv")  # files of a run, of a comparison
_SETTLED = 2 * 10**9  # nanoseconds: a change just after the listing could carry the same mtime


@dataclass(frozen=True)
class UnreadFiles:
    """The files of one suffix that are not read.

    Attributes:
        count: of the files.
        examples: paths of the first of them.
    """

    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Listing:
    """What lies in a folder. All paths are relative to it, with forward slashes.

    Attributes:
        paths: of the images, sorted.
        folders: all of them, the folder itself, "", among them.
        others: files that are not read, by suffix ("" without one).
        recordings: their paths, sorted.
    """

    paths: PackedStrings
    folders: tuple[str, ...]
    others: Mapping[str, UnreadFiles]
    recordings: PackedStrings


def list_files(root: Path) -> Listing:
    """List a folder. Hidden files are skipped, and a folder that links reach twice is read once.

    The listing of a large folder is cached with the state of every sub-folder, so that one ``stat`` per folder shows
    whether it is still valid.
    """
    suffixes = ",".join(sorted(IMAGE_SUFFIXES | SOUND_SUFFIXES))  # which depend on the extras that are installed
    cached = cache_root() / "listings" / digest([_FORMAT, suffixes, os.path.abspath(root)])
    listed = _read(cached, root)
    if listed is not None:
        return listed
    begin = time.time_ns()
    listed, folders = _walk(root)
    kinds = listed.paths, listed.recordings
    settled = all(changed < begin - _SETTLED for *_, changed in folders)
    if sum(map(len, kinds)) >= _WORTH_CACHING and settled and _trusted({device for _, device, *_ in folders}):
        others = {suffix: [some.count, *some.examples] for suffix, some in listed.others.items()}
        about = json.dumps([folders, others]).encode()
        sizes = np.array([len(about), *map(len, kinds)], np.int64).tobytes()
        blocks = (block for paths in kinds for block in (paths.ends.tobytes(), paths.letters))
        try:
            write_whole(cached, b"".join([sizes, about, *blocks]))
        except PatchloomError:  # a full or read-only disc only costs another listing
            pass
    return listed


def list_names(names: Iterable[str]) -> Listing:
    """The listing of some files in one folder, by their names alone."""
    found = _Found()
    for name in sorted(names):
        found.add(name)
    return found.listing([("",)])


class _Found:
    """Parts files by what they are. Of those that are not read it counts each suffix, and keeps the first."""

    def __init__(self) -> None:
        self._images: list[str] = []
        self._recordings: list[str] = []
        self._counts: dict[str, int] = {}
        self._examples: dict[str, list[str]] = {}

    def add(self, path: str) -> None:
        suffix = os.path.splitext(path)[1].lower()
        if suffix in IMAGE_SUFFIXES:
            self._images.append(path)
        elif suffix in SOUND_SUFFIXES:
            self._recordings.append(path)
        else:
            self._counts[suffix] = self._counts.get(suffix, 0) + 1
            some = self._examples.setdefault(suffix, [])
            if len(some) < MAX_EXAMPLES:
                some.append(path)

    def listing(self, folders: Sequence[Sequence[Any]]) -> Listing:
        others = {suffix: UnreadFiles(count, tuple(self._examples[suffix])) for suffix, count in self._counts.items()}
        return Listing(
            PackedStrings(sorted(self._images)), _slashed(folders), others, PackedStrings(sorted(self._recordings))
        )


def images_in(root: Path, name: str) -> PackedStrings:
    """Sorted paths of the images under a folder, as `list_files` finds them."""
    return some_images(list_files(root), name).paths


def some_images(listed: Listing, name: str) -> Listing:
    """The same listing, if there are images in it."""
    if len(listed.paths):
        return listed
    if len(listed.recordings):
        raise PatchloomError(f"{name} holds {len(listed.recordings):,} recordings and no images: name others")
    if not listed.others:
        raise PatchloomError(f"{name} is an empty folder: put images into it, at any depth")
    common = sorted(listed.others, key=lambda suffix: (-listed.others[suffix].count, not suffix, suffix))[:5]
    types = ", ".join(map(_with_remedy, common))
    raise PatchloomError(f"{name} holds no images, only files of other types ({types}): {endings()}")


def without_runs(root: Path, listed: Listing, where: str = "") -> tuple[Listing, list[str]]:
    """Leave out the files of runs and comparisons: their pictures are no data."""
    if ".yaml" not in listed.others:
        return listed, []
    found: list[str] = []
    for folder in sorted(folder for folder in listed.folders if folder or where):
        inside = any(f"{folder}/".startswith(f"{run}/" if run else "") for run in found)
        if not inside and any(all((root / folder / file).is_file() for file in files) for files in _RUNS):
            found.append(folder)
    if not found:
        return listed, []

    def kept(paths: PackedStrings) -> PackedStrings:
        those = np.ones(len(paths), bool)
        for run in found:
            there = paths.under(f"{run}/") if run else range(len(paths))
            those[there.start : there.stop] = False
        return paths.where(those)

    paths, recordings = kept(listed.paths), kept(listed.recordings)
    folders = tuple(
        folder for folder in listed.folders if not any(f"{folder}/".startswith(f"{run}/") or not run for run in found)
    )
    count = len(listed.paths) + len(listed.recordings) - len(paths) - len(recordings)
    names = limit_examples((f"{where}{run}".rstrip("/") for run in found), len(found))
    notes = [f"{count_files_were(count)} left out: they lie in the folder of a run ({names})"] if count else []
    return replace(listed, paths=paths, folders=folders, recordings=recordings), notes


def note_on_others(listings: Mapping[str, Listing]) -> list[str]:
    """A sentence on the files that look like images and are not read; none if there are no such files."""
    counts: dict[str, int] = {}
    examples: list[str] = []
    for before, listed in listings.items():
        for suffix, some in listed.others.items():
            if suffix in LOOK_ALIKES or suffix in EXTRAS:
                counts[suffix] = counts.get(suffix, 0) + some.count
                examples += [before + path for path in some.examples]
    if not counts:
        return []
    total = sum(counts.values())
    by_suffix = (
        f"{counts[suffix]:,} {_with_remedy(suffix)}" for suffix in sorted(counts, key=lambda s: (-counts[s], s))
    )
    listed, names = ", ".join(by_suffix), limit_examples(sorted(examples), 0)
    such = "such as " if total > MAX_EXAMPLES else ""
    return [f"{count_files_were(total)} left out, in formats that are not read: {listed} ({such}{names})"]


def endings() -> str:
    """How the names of files that are read end."""
    sound = f", and recordings in {', '.join(sorted(SOUND_SUFFIXES))}" if SOUND_SUFFIXES else ""
    return f"images end in {', '.join(sorted(IMAGE_SUFFIXES))}{sound}"


def count_files_were(count: int) -> str:
    """As "12 files were"."""
    return "1 file was" if count == 1 else f"{count:,} files were"


def _with_remedy(suffix: str) -> str:
    extra = EXTRAS.get(suffix)
    return (suffix or "no suffix") if extra is None else f"{suffix} ({pip_install(extra)} to read them)"


def _read(cached: Path, root: Path) -> Listing | None:
    """The cached listing, if it is still valid."""
    try:
        content = cached.read_bytes()
        about, *counts = np.frombuffer(content, np.int64, 3).tolist()
        folders, others = json.loads(content[24 : 24 + about])
        if not all(_state(os.path.join(root, folder)) == state for folder, *state in folders):
            return None
        kinds, at = [], 24 + about
        for count in counts:
            ends = np.frombuffer(content, np.int64, count, at).copy()  # aligned
            begin = at + ends.nbytes
            at = begin + (int(ends[-1]) if count else 0)
            kinds.append(PackedStrings.of(content[begin:at], ends))
        if at != len(content) or not any(counts):
            return None
        skipped = {suffix: UnreadFiles(number, tuple(some)) for suffix, (number, *some) in others.items()}
        return Listing(kinds[0], _slashed(folders), skipped, kinds[1])
    except (OSError, ValueError, TypeError):  # not cached, damaged, or a folder is gone
        return None


def _state(folder: str) -> list[int]:
    """A folder's device, inode and mtime in nanoseconds."""
    found = os.stat(folder)
    return [found.st_dev, found.st_ino, found.st_mtime_ns]


def _trusted(devices: set[int]) -> bool:
    """Whether all devices have file systems on which the mtime of a folder can be relied on."""
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


def _slashed(folders: Sequence[Sequence[Any]]) -> tuple[str, ...]:
    return tuple(folder.replace(os.sep, "/").rstrip("/") for folder, *_ in folders)


def _walk(root: Path) -> tuple[Listing, list[list[Any]]]:
    """The listing, and for every folder [its path, *state]."""
    found = _Found()
    folders: list[list[Any]] = []
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
        for file in sorted(files):
            if not file.startswith("."):
                found.add(inside + file)
    return found.listing(folders), folders
