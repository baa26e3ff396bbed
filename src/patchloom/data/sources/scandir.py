"""Listing of the files of a folder, at any depth."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from patchloom.data.conversions import MAX_EXAMPLES, limit_examples
from patchloom.data.decode import EXTRAS, IMAGE_SUFFIXES, LOOK_ALIKES, SOUND_SUFFIXES
from patchloom.data.sources.files import PackedStrings
from patchloom.errors import PatchloomError, pip_install

_ARCHIVES = frozenset(".zip .7z .rar .tar .tgz .gz .bz2 .xz .zst".split())
_RUNS = ("requested.yaml", "config.yaml"), ("compare.yaml", "summary.txt")  # files of a run, of a comparison
# folders in which other programs keep thumbnails, previews, deleted or recovered files: the ends of their paths
_FOREIGN = re.compile(
    r"""(?ix) (?: ^ | / ) (?:
        @eadir | @tmp | @sharebin | \#recycle | \#snapshot              # Synology
        | @recycle | @recently-snapshot | \.@__thumb                    # QNAP
        | \$recycle\.bin | system\ volume\ information | found\.\d{3}  # Windows
        | __macosx | \.appledouble | network\ trash\ folder | temporary\ items | \.trash[^/]*  # macOS, and Linux
        | lost\+found | \.thumbnails | \.picasaoriginals | \.dtrash | \.ipynb_checkpoints
        | [^/]+\.lrdata                                                # Lightroom
        | [^/]+\.(?:photo|photos|a|migratedphoto)library/(?!originals|masters)[^/]+  # Apple
    ) $"""
)


@dataclass(frozen=True)
class UnreadFiles:
    """Files of one suffix that are not read.

    Attributes:
        count: number of files.
        examples: paths of the first files.
    """

    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Listing:
    """Contents of a folder. All paths are relative to it, with forward slashes.

    Attributes:
        paths: paths of the images, sorted.
        folders: all folders, including the folder itself, "".
        others: files that are not read, by suffix ("" without one).
        recordings: paths of the recordings, sorted.
        foreign: images and recordings in folders of other programs, see `is_foreign`.
    """

    paths: PackedStrings
    folders: tuple[str, ...]
    others: Mapping[str, UnreadFiles]
    recordings: PackedStrings
    foreign: UnreadFiles = UnreadFiles(0, ())


def is_foreign(folder: str) -> bool:
    """Return whether the last folder of a path belongs to another program, such as ``photos/@eaDir``."""
    return _FOREIGN.search(folder) is not None


def in_foreign(path: str) -> bool:
    """Return whether a file lies in a folder that `is_foreign`, at any depth."""
    folders = path.split("/")[:-1]
    return any(is_foreign("/".join(folders[: depth + 1])) for depth in range(len(folders)))


def list_files(root: Path) -> Listing:
    """List a folder.

    Hidden files are skipped, and a folder that links reach twice is read once. Files in folders of other programs are
    only counted, unless such a folder is ``root`` itself.
    """
    found = _Collector()
    folders: list[str] = []
    seen: set[str] = set()
    start = len(os.path.join(root, ""))
    above = os.path.basename(os.path.abspath(root))
    outside = set[str]()  # folders of other programs
    for folder, subfolders, files in os.walk(root, followlinks=True):
        inside = os.path.join(folder, "")[start:].replace(os.sep, "/")
        folders.append(inside.rstrip("/"))
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(sub for sub in subfolders if not sub.startswith("."))
        if foreign := inside.rstrip("/") in outside:
            folders.pop()
        outside.update(inside + sub for sub in subfolders if foreign or is_foreign(f"{above}/{inside}{sub}"))
        for file in sorted(files):
            if not file.startswith("."):
                found.add(inside + file, foreign)
    return found.listing(folders)


def list_top(root: Path) -> tuple[Listing, list[str]]:
    """List the files directly in a folder, and return the names of its sub-folders, without those of other programs."""
    found = _Collector()
    with os.scandir(root) as entries:
        seen = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    for name, is_folder in seen:
        if not is_folder:
            found.add(name)
        elif is_foreign(name):
            found.add_foreign(name, list_files(root / name))
    return found.listing([""]), [name for name, is_folder in seen if is_folder and not is_foreign(name)]


def list_names(names: Iterable[str], foreign: Collection[str] = ()) -> Listing:
    """List some files in one folder, by their names alone; ``foreign`` are those in folders of other programs."""
    found = _Collector()
    for name in sorted(names):
        found.add(name, name in foreign)
    return found.listing([""])


class _Collector:
    """Files by type. Of files that are not read, each suffix is counted, and the first ones are kept."""

    def __init__(self) -> None:
        self._images: list[str] = []
        self._recordings: list[str] = []
        self._counts: dict[str, int] = {}
        self._examples: dict[str, list[str]] = {}
        self._foreign: list[str] = []

    def add(self, path: str, foreign: bool = False) -> None:
        suffix = os.path.splitext(path)[1].lower()
        if foreign:
            self._foreign += [path] if suffix in IMAGE_SUFFIXES | SOUND_SUFFIXES else []
        elif suffix in IMAGE_SUFFIXES:
            self._images.append(path)
        elif suffix in SOUND_SUFFIXES:
            self._recordings.append(path)
        else:
            self._counts[suffix] = self._counts.get(suffix, 0) + 1
            some = self._examples.setdefault(suffix, [])
            if len(some) < MAX_EXAMPLES:
                some.append(path)

    def add_foreign(self, folder: str, listed: Listing) -> None:
        self._foreign += (f"{folder}/{path}" for some in (listed.paths, listed.recordings) for path in some)

    def listing(self, folders: Sequence[str]) -> Listing:
        others = {suffix: UnreadFiles(count, tuple(self._examples[suffix])) for suffix, count in self._counts.items()}
        images, recordings = PackedStrings(sorted(self._images)), PackedStrings(sorted(self._recordings))
        foreign = UnreadFiles(len(self._foreign), tuple(sorted(self._foreign)[:MAX_EXAMPLES]))
        return Listing(images, tuple(folders), others, recordings, foreign)


def images_in(root: Path, name: str) -> PackedStrings:
    """Return the sorted paths of the images under a folder, as `list_files` finds them."""
    return some_images(list_files(root), name).paths


def some_images(listed: Listing, name: str) -> Listing:
    """Return the same listing if it has images; refuse it otherwise."""
    if len(listed.paths):
        return listed
    if len(listed.recordings):
        raise PatchloomError(f"{name} holds {len(listed.recordings):,} recordings and no images: give other data")
    if foreign := note_on_foreign({"": listed}):
        raise PatchloomError(f"{name} holds no images of its own: {foreign[0]}")
    if not listed.others:
        raise PatchloomError(f"{name} is an empty folder: put images into it, at any depth")
    common = sorted(listed.others, key=lambda suffix: (-listed.others[suffix].count, not suffix, suffix))[:5]
    types = ", ".join(map(_with_remedy, common))
    raise PatchloomError(f"{name} holds no images, only files of other types ({types}): {endings()}")


def without_runs(root: Path, listed: Listing, where: str = "") -> tuple[Listing, list[str]]:
    """Leave out the files of runs and comparisons: their pictures are not data."""
    if ".yaml" not in listed.others:
        return listed, []
    found: list[str] = []
    for folder in sorted(folder for folder in listed.folders if folder or where):
        inside = any(f"{folder}/".startswith(f"{run}/" if run else "") for run in found)
        if not inside and any(all((root / folder / file).is_file() for file in files) for files in _RUNS):
            found.append(folder)
    if not found:
        return listed, []

    def outside_runs(paths: PackedStrings) -> PackedStrings:
        those = np.ones(len(paths), bool)
        for run in found:
            there = paths.under(f"{run}/") if run else range(len(paths))
            those[there.start : there.stop] = False
        return paths.where(those)

    paths, recordings = outside_runs(listed.paths), outside_runs(listed.recordings)
    folders = tuple(
        folder for folder in listed.folders if not any(f"{folder}/".startswith(f"{run}/") or not run for run in found)
    )
    count = len(listed.paths) + len(listed.recordings) - len(paths) - len(recordings)
    names = limit_examples((f"{where}{run}".rstrip("/") for run in found), len(found))
    notes = [f"{count_files_were(count)} left out: they lie in the folder of a run ({names})"] if count else []
    return replace(listed, paths=paths, folders=folders, recordings=recordings), notes


def note_on_foreign(listings: Mapping[str, Listing]) -> list[str]:
    """Return a sentence on images in folders of other programs; an empty list if there are none."""
    total = sum(listed.foreign.count for listed in listings.values())
    names = sorted(before + path for before, listed in listings.items() for path in listed.foreign.examples)
    if not total:
        return []
    return [
        f"{count_files_were(total)} left out, in folders where other programs keep thumbnails or deleted files "
        f"({limit_examples(names, total)}): to use them, name such a folder itself"
    ]


def note_on_others(listings: Mapping[str, Listing]) -> list[str]:
    """Return sentences on files that are not read: in folders of other programs, and those that look like images."""
    return [*note_on_foreign(listings), *_note_on_formats(listings)]


def _note_on_formats(listings: Mapping[str, Listing]) -> list[str]:
    counts: dict[str, int] = {}
    examples: list[str] = []
    for before, listed in listings.items():
        for suffix, some in listed.others.items():
            if suffix in LOOK_ALIKES or suffix in EXTRAS or suffix in _ARCHIVES:
                counts[suffix] = counts.get(suffix, 0) + some.count
                examples += [before + path for path in some.examples]
    if not counts:
        return []
    total = sum(counts.values())
    by_suffix = (
        f"{counts[suffix]:,} {_with_remedy(suffix)}" for suffix in sorted(counts, key=lambda s: (-counts[s], s))
    )
    kinds, names = ", ".join(by_suffix), limit_examples(sorted(examples), 0)
    such = "such as " if total > MAX_EXAMPLES else ""
    return [f"{count_files_were(total)} left out, in formats that are not read: {kinds} ({such}{names})"]


def endings() -> str:
    """Return a phrase that lists the suffixes of files that are read."""
    sound = f", and recordings in {', '.join(sorted(SOUND_SUFFIXES))}" if SOUND_SUFFIXES else ""
    return f"images end in {', '.join(sorted(IMAGE_SUFFIXES))}{sound}"


def count_files_were(count: int) -> str:
    """Return a number of files with its verb, such as "12 files were"."""
    return "1 file was" if count == 1 else f"{count:,} files were"


def _with_remedy(suffix: str) -> str:
    if suffix in _ARCHIVES:
        return f"{suffix} (unpack to read)"
    extra = EXTRAS.get(suffix)
    return (suffix or "no suffix") if extra is None else f"{suffix} ({pip_install(extra)} to read them)"
