"""Images that a text file lists."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from patchloom.data.sources.base import Data
from patchloom.data.sources.files import Files
from patchloom.errors import PatchloomError


def open_list(file: Path, name: str) -> Data:
    """Open a text file with one path per line, relative to its folder, optionally a tab and a label; ``#``: comment.

    Raises:
        PatchloomError: it is not text, it is empty, or none of its files exists.
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
