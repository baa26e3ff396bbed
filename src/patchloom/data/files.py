"""Images of the user's own: a folder of them, or a text file that lists them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from torch import Tensor

from patchloom.data.read import IMAGE_SUFFIXES, read_image
from patchloom.data.source import Data, Source, digest, stamp_of_files
from patchloom.errors import PatchloomError

TEST_FOLDERS = ("test", "val", "validation")


class Names(Sequence[str]):
    """Strings in one block of bytes: a million paths cost their letters alone, and worker processes share them."""

    def __init__(self, names: Sequence[str]) -> None:
        lengths = (len(name.encode("utf-8", "surrogateescape")) for name in names)
        self._ends = np.cumsum(np.fromiter(lengths, np.int64, len(names)))
        self._letters = "".join(names).encode("utf-8", "surrogateescape")

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in memoryview(self._ends):
            yield self._letters[start:end].decode("utf-8", "surrogateescape")
            start = end

    def __getitem__(self, i: int) -> str:
        if not 0 <= i < len(self._ends):
            raise IndexError(i)
        return self._letters[self._ends[i - 1] if i else 0 : self._ends[i]].decode("utf-8", "surrogateescape")


class Files(Source):
    """Image files. paths: relative to `root`, or absolute. labels: index into `classes`, -1 for none."""

    def __init__(
        self,
        name: str,
        root: Path,
        paths: Sequence[str],
        classes: tuple[str, ...] = (),
        labels: np.ndarray | None = None,
    ) -> None:
        self.name, self.root, self.paths, self.classes, self.labels = name, root, Names(paths), classes, labels

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, i: int) -> Tensor:
        return read_image(self.root / self.paths[i])

    def describe(self, i: int) -> str:
        return str(self.root / self.paths[i])

    def fingerprint(self) -> str:
        """Of paths, sizes, times of change and labels; a folder that was moved as a whole keeps it."""
        return digest(chain(self.classes, self._states()))

    def _states(self) -> Iterator[str]:
        for i, path in enumerate(self.paths):
            try:
                stat = os.stat(self._place(path))
                size, changed = stat.st_size, stat.st_mtime_ns
            except OSError:
                size = changed = -1
            yield f"{path}\t{size}\t{changed}\t{-1 if self.labels is None else self.labels[i]}"

    def _place(self, path: str) -> str:
        # a Path for each of a million files would take longer than asking the system about them
        return os.path.join(os.fspath(self.root), path)

    def stamp(self) -> str:
        return stamp_of_files(map(self._place, self.paths))


def open_folder(folder: Path, name: str) -> Data:
    """A folder, read to any depth; hidden files are skipped, and a folder that links reach twice is read once.

    Sub-folders `train` and one of `test`, `val`, `validation` are taken as the splits. First-level sub-folders are
    classes if at least two of them hold images and no image lies beside them. A test split with images
    right at its root has no labels, whatever the training split has.

    Raises: PatchloomError if there are no images, or if the test split has a class that the training split lacks.
    """
    test = next((folder / split for split in TEST_FOLDERS if (folder / split).is_dir()), None)
    if test is None or not (folder / "train").is_dir():
        return Data(_folder_source(folder, name, _find(folder, name)), None)
    train = _folder_source(folder / "train", name, _find(folder / "train", f"{name} (train)"))
    return Data(train, _test_source(test, name, train.classes))


def open_list(file: Path, name: str) -> Data:
    """A text file: a path a line, relative to the file's folder, then perhaps a tab and a label; `#` begins a comment.

    Raises: PatchloomError if it is not text, is empty, or if none of its files exists.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise PatchloomError(
            f"{name} is not text: give a folder of images, or a text file with a path a line"
        ) from error
    rows = [line.partition("\t") for line in map(str.strip, lines) if line and not line.startswith("#")]
    paths, words = [row[0].strip() for row in rows], [row[2].strip() for row in rows]
    if not paths:
        raise PatchloomError(f"{name} lists no images: write a path a line, relative to the folder of {file.name}")
    if not any((file.parent / path).is_file() for path in paths):
        raise PatchloomError(
            f"none of the {len(paths)} files listed in {name} exists: paths are relative to {file.parent}, "
            f"and the first is {paths[0]}"
        )
    classes = tuple(sorted(set(words) - {""}))
    number = {word: i for i, word in enumerate(classes)}
    labels = np.array([number.get(word, -1) for word in words], dtype=np.int64) if classes else None
    return Data(Files(name, file.parent, paths, classes, labels), None)


def _folder_source(root: Path, name: str, paths: list[str]) -> Files:
    classes = tuple(sorted({path.split("/")[0] for path in paths if "/" in path}))
    if len(classes) < 2 or any("/" not in path for path in paths):
        return Files(name, root, paths)
    return Files(name, root, paths, classes, _labels(paths, classes))


def _test_source(root: Path, name: str, classes: tuple[str, ...]) -> Files:
    paths = _find(root, f"{name} ({root.name})")
    if not classes or any("/" not in path for path in paths):
        return Files(name, root, paths)
    strange = sorted({path.split("/")[0] for path in paths} - set(classes))
    if strange:
        raise PatchloomError(
            f"{name} has the class {strange[0]} in {root.name} but not in train: "
            "name the class folders of both alike, or take that one out"
        )
    return Files(name, root, paths, classes, _labels(paths, classes))


def _labels(paths: list[str], classes: tuple[str, ...]) -> np.ndarray:
    number = {word: i for i, word in enumerate(classes)}
    return np.array([number[path.split("/")[0]] for path in paths], dtype=np.int64)


def _find(root: Path, name: str) -> list[str]:
    """Sorted paths of the images under a folder, relative to it, with forward slashes."""
    found: list[str] = []
    others: Counter[str] = Counter()
    seen: set[str] = set()
    start = len(os.path.join(root, ""))
    for folder, subfolders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(sub for sub in subfolders if not sub.startswith("."))
        inside = os.path.join(folder, "")[start:].replace(os.sep, "/")
        for file in files:
            suffix = os.path.splitext(file)[1].lower()
            if file.startswith("."):
                continue
            if suffix in IMAGE_SUFFIXES:
                found.append(inside + file)
            else:
                others[suffix or "no suffix"] += 1
    if not found and others:
        types = ", ".join(suffix for suffix, _ in others.most_common(5))
        wanted = ", ".join(sorted(IMAGE_SUFFIXES))
        raise PatchloomError(f"{name} holds no images, only files of other types ({types}): images end in {wanted}")
    if not found:
        raise PatchloomError(f"{name} is an empty folder: put images into it, at any depth")
    return sorted(found)
