"""A folder of images. The listing of a large one is cached, and holds as long as no folder in it has changed."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.read import IMAGE_SUFFIXES
from patchloom.data.sources.base import TEST_SPLITS, Data, digest
from patchloom.data.sources.files import Files, Names
from patchloom.errors import PatchloomError
from patchloom.files import cache_root, write_whole

_FORMAT = "listing 1"
_WORTH_CACHING = 20_000  # images; fewer are listed in no time
# file systems that update a folder's mtime when its entries change; some mounts of cloud storage do not
_TRUSTED = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}
_SETTLED = 2 * 10**9  # nanoseconds: a change just after the listing could carry the same mtime


def open_folder(folder: Path, name: str) -> Data:
    """Open a folder of images, at any depth. Hidden files are skipped; a folder that links reach twice is read once.

    Sub-folders ``train`` and one of ``test``, ``val``, ``validation`` are the splits. First-level sub-folders are
    classes if at least two of them hold images and no image lies beside them. A test split with images directly in it
    has no labels, whatever the training split has.

    Raises:
        PatchloomError: no images, or a class in the test split that the training split lacks.
    """
    test = next((folder / split for split in TEST_SPLITS if (folder / split).is_dir()), None)
    if test is None or not (folder / "train").is_dir():
        return Data(_folder_source(folder, name, images_in(folder, name)), None)
    train = _folder_source(folder / "train", name, images_in(folder / "train", f"{name} (train)"))
    return Data(train, _test_source(test, name, train.classes))


def _folder_source(root: Path, name: str, paths: Sequence[str]) -> Files:
    classes = tuple(sorted({path.split("/")[0] for path in paths if "/" in path}))
    if len(classes) < 2 or any("/" not in path for path in paths):
        return Files(name, root, paths)
    return Files(name, root, paths, classes, _labels(paths, classes))


def _test_source(root: Path, name: str, classes: tuple[str, ...]) -> Files:
    paths = images_in(root, f"{name} ({root.name})")
    if not classes or any("/" not in path for path in paths):
        return Files(name, root, paths)
    strange = sorted({path.split("/")[0] for path in paths} - set(classes))
    if strange:
        raise PatchloomError(
            f"{name} has the class {strange[0]} in {root.name} but not in train: "
            "name the class folders of both alike, or take that one out"
        )
    return Files(name, root, paths, classes, _labels(paths, classes))


def _labels(paths: Sequence[str], classes: tuple[str, ...]) -> np.ndarray:
    number = {word: i for i, word in enumerate(classes)}
    return np.array([number[path.split("/")[0]] for path in paths], dtype=np.int64)


def images_in(root: Path, name: str) -> Names:
    """Sorted paths of the images under a folder, relative to it, with forward slashes.

    Hidden files are skipped, and a folder that links reach twice is read once. The listing of a large folder is cached
    with the state of every sub-folder, so that one ``stat`` per folder shows whether it is still valid.

    Args:
        root: the folder.
        name: what the user calls it.

    Raises:
        PatchloomError: there are no images in it.
    """
    cached = cache_root() / "listings" / digest([_FORMAT, os.path.abspath(root)])
    paths = _read(cached, root)
    if paths is not None:
        return paths
    begin = time.time_ns()
    found, folders = _walk(root, name)
    paths = Names(found)
    settled = all(changed < begin - _SETTLED for *_, changed in folders)
    if len(paths) >= _WORTH_CACHING and settled and _trusted({device for _, device, *_ in folders}):
        about = json.dumps(folders).encode()
        sizes = np.array([len(about), len(paths)], np.int64).tobytes()
        try:
            write_whole(cached, b"".join([sizes, about, paths.ends.tobytes(), paths.letters]))
        except PatchloomError:  # a full or read-only disc only costs another listing
            pass
    return paths


def _read(cached: Path, root: Path) -> Names | None:
    """The cached listing, if it is still valid."""
    try:
        content = cached.read_bytes()
        about, count = np.frombuffer(content, np.int64, 2).tolist()
        folders = json.loads(content[16 : 16 + about])
        if not all(_state(os.path.join(root, folder)) == state for folder, *state in folders):
            return None
        ends = np.frombuffer(content, np.int64, count, 16 + about).copy()  # aligned
        letters = content[16 + about + ends.nbytes :]
        return Names.of(letters, ends) if count and ends[-1] == len(letters) else None
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


def _walk(root: Path, name: str) -> tuple[list[str], list[list[Any]]]:
    """The paths of the images, and for every folder [its path, *state]."""
    found: list[list[str]] = []
    folders: list[list[Any]] = []
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
