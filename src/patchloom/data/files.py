"""Images of the user's own: a folder of them, or a text file that lists them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from torch import Tensor

from patchloom.data.contents import contents_on_disc, pieces_of_file
from patchloom.data.listing import Names, images_in
from patchloom.data.read import read_image
from patchloom.data.source import Data, Source, digest, stamp_of_files
from patchloom.errors import PatchloomError

TEST_FOLDERS = ("test", "val", "validation")


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
        names = paths if isinstance(paths, Names) else Names(paths)
        self.name, self.root, self.paths, self.classes, self.labels = name, root, names, classes, labels

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, i: int) -> Tensor:
        return read_image(self.root / self.paths[i])

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray:
        return contents_on_disc(self, lambda i: pieces_of_file(self._place(self.paths[i])), chosen)

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
        return Data(_folder_source(folder, name, images_in(folder, name)), None)
    train = _folder_source(folder / "train", name, images_in(folder / "train", f"{name} (train)"))
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
