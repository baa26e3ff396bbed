"""Images or recordings that a text file lists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from patchloom.data.sources.base import Data
from patchloom.data.sources.files import Files
from patchloom.data.sources.kinds import sound_of
from patchloom.data.sources.table import missing_files, none_exists, open_table, table_of
from patchloom.errors import PatchloomError


def open_list(file: Path, name: str, chosen: Mapping[str, str] | None = None) -> Data:
    """Open a text file that lists images or recordings: a table (see `table_of`), or one path per line.

    Paths are relative to the file's folder. In a plain list, a tab and a label may follow; ``#`` begins a comment.

    Args:
        file: the list.
        name: what the user typed.
        chosen: columns of a table, as for `open_table`.

    Raises:
        PatchloomError: it is not text, it is empty, none of its files exists, or a table is unclear.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise PatchloomError(
            f"{name} is not text: give a folder of images, or a text file with a path a line"
        ) from error
    table = table_of(lines, file)
    if table is not None:
        return open_table(table, file, name, chosen or {})
    if chosen:
        raise PatchloomError(f"{file} is a plain list, which has no columns to choose: give it without @...")
    rows = [line.partition("\t") for line in map(str.strip, lines) if line and not line.startswith("#")]
    paths, words = [row[0].strip() for row in rows], [row[2].strip() for row in rows]
    if not paths:
        raise PatchloomError(f"{name} lists no images: write a path a line, relative to the folder of {file.name}")
    missing = [path for path in paths if not (file.parent / path).is_file()]
    if len(missing) == len(paths):
        raise none_exists(len(paths), name, file, paths[0])
    classes = tuple(sorted(set(words) - {""}))
    number = {word: i for i, word in enumerate(classes)}
    labels = np.array([number.get(word, -1) for word in words], dtype=np.int64) if classes else None
    notes = (missing_files(missing, len(paths), name) + "; they count as files that cannot be read",) if missing else ()
    return Data(Files(name, file.parent, paths, classes, labels, sound=sound_of(paths, name)), None, notes)
