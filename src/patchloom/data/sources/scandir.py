"""Listing of the files of a folder, at any depth, and their media type."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from patchloom.audio.config import Sound
from patchloom.audio.decode import soundfile
from patchloom.data.containers.arrays import ZARR
from patchloom.data.containers.open import PLANES, suffix_of
from patchloom.data.decode import EXTRAS, FILMS, IMAGE_SUFFIXES, LOOK_ALIKES, SOUND, SOUND_SUFFIXES
from patchloom.data.notes import MAX_EXAMPLES, count_of, left_out, limit_examples
from patchloom.data.sources.files import PackedStrings
from patchloom.data.sources.names import choose_splits, is_foreign
from patchloom.errors import PatchloomError, pip_install

_ARCHIVES = frozenset(".zip .7z .rar .tar .tgz .gz .bz2 .xz .zst".split())
_RUNS = ("requested.yaml", "config.yaml"), ("compare.yaml", "summary.txt")  # files of a run, of a comparison


@dataclass(frozen=True)
class Listing:
    """Contents of a folder. All paths are relative to it, with forward slashes, and sorted.

    Attributes:
        paths: paths of the images.
        folders: all folders, including the folder itself, "".
        others: files that are not read, by suffix ("" without one).
        recordings: paths of the recordings.
        foreign: images and recordings in folders of other programs, see `is_foreign`.
    """

    paths: PackedStrings
    folders: tuple[str, ...]
    others: Mapping[str, PackedStrings]
    recordings: PackedStrings
    foreign: PackedStrings

    @classmethod
    def of(
        cls,
        files: Iterable[str],
        folders: Iterable[str] = ("",),
        foreign: Collection[str] = (),
        suffixes: frozenset[str] = frozenset(),
    ) -> Listing:
        """Sort out files by their names.

        Args:
            files: paths.
            folders: folders that hold them.
            foreign: those of the files in folders of other programs.
            suffixes: suffixes of images; without any, those that can be read whole.
        """
        suffixes = suffixes or IMAGE_SUFFIXES
        images, recordings, outside = list[str](), list[str](), list[str]()
        others: dict[str, list[str]] = {}
        for path in sorted(files):
            suffix = suffix_of(path)
            if path in foreign:
                if suffix in suffixes | SOUND_SUFFIXES:
                    outside.append(path)
            elif suffix in suffixes:
                images.append(path)
            elif suffix in SOUND_SUFFIXES:
                recordings.append(path)
            else:
                others.setdefault(suffix, []).append(path)
        unread = {suffix: PackedStrings(paths) for suffix, paths in others.items()}
        return cls(PackedStrings(images), tuple(folders), unread, PackedStrings(recordings), PackedStrings(outside))


def list_files(root: Path, suffixes: frozenset[str] = frozenset()) -> Listing:
    """List a folder, with files of some suffixes as its images, see `Listing.of`.

    Hidden files are skipped. A folder that links reach twice is read once, or once for each split of the folder. Files
    in folders of other programs are only counted, unless such a folder is ``root`` itself.
    """
    found, folders, foreign = list[str](), list[str](), set[str]()
    seen: set[tuple[str, str]] = set()
    start = len(os.path.join(root, ""))
    above = os.path.basename(os.path.abspath(root))
    outside = set[str]()  # folders of other programs
    apart = False  # whether the folders in the root are splits, between which links may lead
    for folder, subfolders, files in os.walk(root, followlinks=True):
        inside = os.path.join(folder, "")[start:].replace(os.sep, "/")
        subfolders[:] = sorted(sub for sub in subfolders if not sub.startswith("."))
        apart = apart or not inside and None not in choose_splits(subfolders)
        is_outside = inside.rstrip("/") in outside
        if not is_outside:
            folders.append(inside.rstrip("/"))
        real = inside.partition("/")[0] if apart else "", os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        outside.update(inside + sub for sub in subfolders if is_outside or is_foreign(f"{above}/{inside}{sub}"))
        stores = [sub for sub in subfolders if suffix_of(sub) in ZARR & suffixes]  # arrays, in many files each
        subfolders[:] = [sub for sub in subfolders if sub not in stores]
        paths = [inside + file for file in [*files, *stores] if not file.startswith(".")]
        found += paths
        if is_outside:
            foreign.update(paths)
    return Listing.of(found, folders, foreign, suffixes)


def some_images(listed: Listing, name: str) -> Listing:
    """Return the same listing if it has images; refuse it otherwise."""
    if len(listed.paths):
        return listed
    if len(listed.recordings):
        raise PatchloomError(f"{name} holds {len(listed.recordings):,} recordings and no images: give other data")
    if foreign := note_on_foreign(listed):
        raise PatchloomError(f"{name} holds no images of its own: {foreign[0]}")
    if not listed.others:
        raise PatchloomError(f"{name} is an empty folder: put images into it, at any depth")
    common = sorted(listed.others, key=lambda suffix: (-len(listed.others[suffix]), not suffix, suffix))[:5]
    types = ", ".join(map(_with_remedy, common))
    raise PatchloomError(f"{name} holds no images, only files of other types ({types}): {endings()}")


def without_runs(root: Path, listed: Listing) -> tuple[Listing, list[str]]:
    """Leave out the files of runs and comparisons: their pictures are not data."""
    if ".yaml" not in listed.others:
        return listed, []
    runs: list[str] = []
    for folder in sorted(listed.folders):
        inside = any(folder.startswith(run) for run in runs)
        if folder and not inside and any(all((root / folder / file).is_file() for file in files) for files in _RUNS):
            runs.append(f"{folder}/")

    def outside_runs(paths: PackedStrings) -> PackedStrings:
        those = np.ones(len(paths), bool)
        for run in runs:
            there = paths.under(run)
            those[there.start : there.stop] = False
        return paths.where(those)

    paths, recordings = outside_runs(listed.paths), outside_runs(listed.recordings)
    folders = tuple(folder for folder in listed.folders if not f"{folder}/".startswith(tuple(runs)))
    count = len(listed.paths) + len(listed.recordings) - len(paths) - len(recordings)
    names = limit_examples(run.rstrip("/") for run in runs)
    notes = [f"{count_of(count, 'file', 'were')} left out: they lie in the folder of a run ({names})"] if count else []
    return replace(listed, paths=paths, folders=folders, recordings=recordings), notes


def note_on_foreign(listed: Listing) -> list[str]:
    """Return a sentence on images in folders of other programs; an empty list if there are none."""
    why = ", in folders where other programs keep thumbnails or deleted files"
    return left_out(listed.foreign, why, remedy=": to use them, name such a folder itself")


def note_on_others(listed: Listing) -> list[str]:
    """Return sentences on files that are not read: in folders of other programs, and those that look like images."""
    unread = {
        suffix: paths
        for suffix, paths in listed.others.items()
        if suffix in LOOK_ALIKES or suffix in EXTRAS or suffix in _ARCHIVES
    }
    notes = note_on_foreign(listed)
    if unread:
        total = sum(map(len, unread.values()))
        common = sorted(unread, key=lambda suffix: (-len(unread[suffix]), suffix))
        kinds = ", ".join(f"{len(unread[suffix]):,} {_with_remedy(suffix)}" for suffix in common)
        some = limit_examples(sorted(path for paths in unread.values() for path in paths)[:MAX_EXAMPLES])
        such = "such as " if total > MAX_EXAMPLES else ""
        were = count_of(total, "file", "were")
        notes.append(f"{were} left out, in formats that are not read: {kinds} ({such}{some})")
    return notes


def endings() -> str:
    """Return a phrase that lists the suffixes of files that are read."""
    sound = f", and recordings in {', '.join(sorted(SOUND_SUFFIXES))}" if SOUND_SUFFIXES else ""
    return f"images end in {', '.join(sorted(IMAGE_SUFFIXES))}{sound}"


def _with_remedy(suffix: str) -> str:
    if suffix in _ARCHIVES:
        return f"{suffix} (unpack to read)"
    if suffix in FILMS:
        return f"{suffix} (@fps=1 after the name reads frames)"
    if suffix in PLANES - IMAGE_SUFFIXES - {*EXTRAS}:
        return f"{suffix} (@tile=256 or @slices=1 after the name reads parts)"
    extra = EXTRAS.get(suffix)
    return (suffix or "no suffix") if extra is None else f"{suffix} ({pip_install(extra)} to read them)"


# Media type of files: images or recordings, and the choice between them in folders with both.


_BESIDE = 0.01  # share of the files below which those of the other kind are left out, such as a cover picture


def select_kind(listed: Listing, name: str) -> tuple[Listing, Sound | None, list[str]]:
    """Select one kind of the files in a folder; return their listing, settings for recordings, and notes."""
    images, recordings = listed.paths, listed.recordings
    hears = len(recordings) > len(images)
    kept, beside = (recordings, images) if hears else (images, recordings)
    if len(beside) and len(beside) >= _BESIDE * (len(kept) + len(beside)):
        raise _mixed_kinds(name, images, recordings)
    kinds = ("image", "recordings") if hears else ("recording", "images")
    notes = left_out(beside, f", beside {len(kept):,} {kinds[1]}", kinds[0])
    return replace(listed, paths=kept, recordings=PackedStrings([])), Sound() if hears else None, notes


def detect_sound(paths: Iterable[str], name: str) -> Sound | None:
    """Return settings for recordings if the listed files are such, by their suffixes; None for images."""
    images, recordings = list[str](), list[str]()
    for path in paths:
        suffix = os.path.splitext(path)[1].lower()
        if suffix in SOUND:
            recordings.append(path)
        elif suffix in IMAGE_SUFFIXES:
            images.append(path)
    if images and recordings:
        raise _mixed_kinds(name, images, recordings)
    if not recordings:
        return None
    soundfile()
    return Sound()


def _mixed_kinds(name: str, images: Collection[str], recordings: Collection[str]) -> PatchloomError:
    pictures, sounds = (
        f"{count_of(len(paths), kind)} ({limit_examples(paths)})"
        for paths, kind in ((images, "image"), (recordings, "recording"))
    )
    return PatchloomError(
        f"{name} holds {pictures} and {sounds}: an encoder learns from one kind: put the two into separate folders, "
        "and give one of them"
    )
