"""Images or recordings that a table lists: CSV or TSV, as spreadsheets and annotation tools write it."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from patchloom.data.formats import IMAGE_SUFFIXES, SOUND_SUFFIXES
from patchloom.data.sources.base import TEST_SPLITS, Data
from patchloom.data.sources.columns import LOOKED, PATHS, Roles, plain, read_as, some_of, split_of
from patchloom.data.sources.files import Files
from patchloom.data.sources.kinds import sound_of
from patchloom.errors import PatchloomError

_SUFFIXES = IMAGE_SUFFIXES | SOUND_SUFFIXES


class Table(NamedTuple):
    """The cells of a table, and what its columns are.

    Attributes:
        cells: rows of cells, all as long as ``names``.
        names: of the columns; () if the file does not name them.
    """

    cells: list[list[str]]
    names: tuple[str, ...]


def table_of(lines: Sequence[str], file: Path) -> Table | None:
    """The table that the lines of a file are; None if they are a plain list of paths, perhaps with labels behind a tab.

    A first row is a header if none of its cells is an image, and one has a name that is usual for paths, or those below
    it are images. Without one, a table has commas or semicolons.

    Raises:
        PatchloomError: a broken table, or one of more than two columns without a header.
    """

    def is_image(cell: str) -> bool:
        return os.path.splitext(cell)[1].lower() in _SUFFIXES or os.path.isfile(os.path.join(file.parent, cell))

    begin = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    lines = lines[begin:]
    head = [(each, next(iter(_rows(lines[:1], each, 0, file)), [])) for each in ("\t", ",", ";")]
    head = [(delimiter, first) for delimiter, first in head if len(first) > 1 or plain("".join(first)) in PATHS]
    for delimiter, first in head:
        if PATHS & set(map(plain, first)) and not any(map(is_image, first)):
            return Table(_rows(lines, delimiter, len(first), file)[1:], tuple(first))
    if any(os.path.isfile(os.path.join(file.parent, line.strip())) for line in lines[:LOOKED] if line.strip()):
        return None
    for delimiter, first in head:
        if delimiter == "\t" and len(first) == 2:  # a path that is not there, and its label
            continue
        below = _rows(lines[1:LOOKED], delimiter, 0, file)
        if any(map(is_image, first)):
            return None if delimiter == "\t" else Table(_rows(lines, delimiter, len(first), file), ())
        if file.suffix.lower() in (".csv", ".tsv") or any(is_image(cell) for row in below for cell in row):
            return Table(_rows(lines, delimiter, len(first), file)[1:], tuple(first))
    return None


def open_table(table: Table, file: Path, name: str, chosen: Mapping[str, str]) -> Data:
    """Open the images of a table. Paths are relative to the file's folder.

    Args:
        table: its cells.
        file: where it stands.
        name: what the user typed.
        chosen: the column for path, label, split or group, where its name does not tell; "" for none.

    Raises:
        PatchloomError: it is empty, or none of its files exists; or it is unclear which column is what; or a class or
            a split cannot be meant.
    """
    if not table.cells:
        raise PatchloomError(f"{name} lists no images: write a row for each below its header")
    names = table.names or _unnamed(table, name)
    if len(set(names)) < len(names):
        twice = next(one for one in names if names.count(one) > 1)
        raise PatchloomError(f"{name} has two columns called {twice!r}: rename one")
    columns = {column: [row[i] for row in table.cells] for i, column in enumerate(names)}
    roles = Roles(columns, file, name, chosen).found()
    kept, notes = _kept(columns[roles["path"]], file, name)
    columns = {column: [values[i] for i in kept] for column, values in columns.items()}
    words = columns[roles["label"]] if "label" in roles else []
    splits = [split_of(word) for word in columns[roles["split"]]] if "split" in roles else [""] * len(kept)
    train, test, others, said = _parts(splits, name)
    classes = _ordered({words[i] for i in train} - {""}) if words else ()
    number = {word: i for i, word in enumerate(classes)}
    asked = f"{name}," if chosen and "label" not in chosen else f"{name.rpartition('@')[0] if chosen else name}@"

    sound = sound_of(columns[roles["path"]], name)

    def files(chosen: Sequence[int]) -> Files:
        labels = np.array([number.get(words[i], -1) for i in chosen], np.int64) if classes else None
        told = {column: [values[i] for i in chosen] for column, values in columns.items() if column != roles["path"]}
        paths = [columns[roles["path"]][i] for i in chosen]
        found = Files(name, file.parent, paths, classes, labels, told, sound)
        found.to_label = f"say which column holds them, {asked}label=COLUMN"
        if "group" in roles:
            groups = [columns[roles["group"]][i] or f"\0{i}" for i in chosen]  # an empty cell is a group of its own
            found.groups = np.unique(groups, return_inverse=True)[1].astype(np.int64)
        return found

    for i in test if classes else []:
        if words[i] and words[i] not in number:
            raise PatchloomError(
                f"{name} has the class {words[i]} in test images but not in training images: give both the same "
                "classes, or take that one out"
            )
    notes = [read_as(roles, names, name), *notes, *said]
    split_off = {split: files(rows) for split, rows in others.items()}
    return Data(files(train), files(test) if test else None, tuple(notes), split_off)


def _rows(lines: Sequence[str], delimiter: str, width: int, file: Path) -> list[list[str]]:
    """Rows of stripped cells without empty rows; ``width`` cells each, unless that is 0.

    Raises:
        PatchloomError: a row has more cells, or is no CSV.
    """
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    rows: list[list[str]] = []
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            while width and len(cells) > width and not cells[-1]:
                cells.pop()
            if width and len(cells) > width:
                raise PatchloomError(
                    f"{file} has {len(cells)} cells in a row and {width} in its first ({', '.join(cells)}): put quotes "
                    "around cells that hold a comma"
                )
            if any(cells):
                rows.append(cells + [""] * (width - len(cells)))
    except csv.Error as problem:
        raise PatchloomError(f"{file} cannot be read as a table ({problem}): save it as CSV") from problem
    return rows


def _unnamed(table: Table, name: str) -> tuple[str, ...]:
    """Names for the columns of a table without a header: the one of images is the path, another one the label."""
    width = len(table.cells[0])
    suffixes = [os.path.splitext(cell)[1].lower() in _SUFFIXES for cell in table.cells[0]]
    if width > 2 or sum(suffixes) > 1:
        raise PatchloomError(
            f"{name} does not name its {width} columns: write a first line that does, such as "
            f"{','.join(['path', 'label', 'split', 'group', '...'][: max(2, width)])}"
        )
    return ("label", "path") if suffixes[1] else ("path", "label")


def _kept(paths: list[str], file: Path, name: str) -> tuple[list[int], list[str]]:
    """The rows whose files exist, each file once; and what is to be said of the others.

    Raises:
        PatchloomError: there are none.
    """
    rows: list[int] = []
    missing: list[str] = []
    seen: set[str] = set()
    again = empty = 0
    for i, path in enumerate(paths):
        whole = os.path.normpath(os.path.join(file.parent, path))
        if not path:
            empty += 1
        elif whole in seen:
            again += 1
        elif os.path.isfile(whole):
            seen.add(whole)
            rows.append(i)
        else:
            missing.append(path)
    if not rows:
        raise none_exists(len(paths), name, file, next(filter(None, paths), ""))
    notes: list[str] = []
    if missing:
        notes.append(missing_files(missing, len(paths), name) + "; they are left out")
    if again:
        notes.append(f"{name}: {again:,} of {len(paths):,} rows are left out, since their file was listed before")
    if empty:
        notes.append(f"{name}: {empty:,} of {len(paths):,} rows are left out, since they have no path")
    return rows, notes


def none_exists(count: int, name: str, file: Path, first: str) -> PatchloomError:
    """What to say where no listed file exists."""
    return PatchloomError(
        f"none of the {count} files listed in {name} exists: paths are relative to {file.parent}, and the first is "
        f"{first}"
    )


def missing_files(missing: Sequence[str], count: int, name: str) -> str:
    """That some listed files do not exist, for a note."""
    return f"{name}: {len(missing):,} of {count:,} listed files do not exist ({some_of(missing)})"


def _parts(splits: list[str], name: str) -> tuple[list[int], list[int], dict[str, list[int]], list[str]]:
    """The rows of training images, of test images and of each other split, and what is to be said of others."""
    there = dict.fromkeys(splits)
    second = next((one for one in TEST_SPLITS if one in there), None)
    if second is not None and "train" not in there:
        if len(there) > 1:
            raise PatchloomError(
                f"{name} has rows of the split {second} and none of train: write train beside the images to train on, "
                "or put @split= behind the name to use all rows"
            )
        return list(range(len(splits))), [], {}, [f"{name}: all rows are of the split {second}, and all are used"]
    if second is None:
        return list(range(len(splits))), [], {}, []
    rows = {which: [i for i, one in enumerate(splits) if one == which] for which in there}
    train, test, left = rows.pop("train"), rows.pop(second), [*rows]
    said = [f"{name}: {len(rows[one]):,} rows {'of the split ' + one if one else 'without a split'}" for one in left]
    said = [f"{line} are neither trained on (train) nor the test ({second})" for line in said]
    return train, test, {one: rows[one] for one in left if one}, said


def _ordered(words: set[str]) -> tuple[str, ...]:
    numbers = all(map(str.isdecimal, words))
    return tuple(sorted(words, key=lambda word: (int(word) if numbers else 0, word)))
