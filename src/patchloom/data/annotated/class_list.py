"""The names of classes, and the numbers by which label maps mean them: ``classes.txt``, ADE20K's list, or numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from patchloom.errors import PatchloomError

CLASSES, ADE_CLASSES = "classes.txt", "objectInfo150.txt"
ADE_COUNT = 150

_NUMBERED = re.compile(r"(\d+)(?:\s*[:,;=]\s*|\s+)(\S.*)")  # "7 road", "7: road"
_COLOURED = re.compile(r"(\d+)[\s,]+(\d+)[\s,]+(\d+)[\s,:]+(\S.*)")  # "128 64 128 road"
_SPARSE = 32  # numbers from which on a list of classes is asked for where few of them occur
_MOST = 2**15 - 1  # classes, as label maps become int16


@dataclass(frozen=True)
class ClassList:
    """Classes in order.

    Attributes:
        names: of the classes.
        ids: the number of each in label maps as they are stored.
        colours: uint8 [k 3], the colour of each in colour-coded label maps, where the list gives them.
        source: the file, or in words what the names are taken from.
    """

    names: tuple[str, ...]
    ids: tuple[int, ...]
    colours: np.ndarray | None
    source: str

    def without(self, ignored: Collection[int]) -> ClassList:
        """The same without the classes that have these numbers in label maps."""
        kept = [place for place, number in enumerate(self.ids) if number not in ignored]
        return replace(self, names=tuple(self.names[i] for i in kept), ids=tuple(self.ids[i] for i in kept))


def read_classes(file: Path) -> ClassList:
    """Read ``classes.txt``: a name a line, line i (from 0) being class i; or ``ID NAME``, ``ID: NAME``, ``R G B NAME``.

    Raises:
        PatchloomError: it is no text, is empty or has an empty line, or names one thing twice.
    """
    lines = _lines(file)
    if not lines:
        raise PatchloomError(f"{file} is empty: write the name of a class a line")
    if "" in lines:
        raise PatchloomError(
            f"line {lines.index('') + 1} of {file} is empty: write the name of a class in every line, as they count"
        )
    numbers: Sequence[int] = range(len(lines))
    colours = None
    if all(rows := [_COLOURED.fullmatch(line) for line in lines]):
        names = [row[4] for row in rows if row]
        values = [tuple(map(int, row.groups()[:3])) for row in rows if row]
        if wrong := next((line for line, value in zip(lines, values, strict=True) if max(value) > 255), None):
            raise PatchloomError(f"{file} has the line {wrong}: colours are three numbers from 0 to 255")
        _refuse_twice(file, values, "colour")
        colours = np.array(values, np.uint8)
    elif all(rows := [_NUMBERED.fullmatch(line) for line in lines]):
        names, numbers = [row[2] for row in rows if row], [int(row[1]) for row in rows if row]
        _refuse_twice(file, numbers, "number")
    else:
        names = lines
    _refuse_twice(file, names, "name")
    if max(numbers) > 65535 or len(names) > _MOST:
        raise PatchloomError(f"{file} has classes up to {max(numbers):,}: label maps hold numbers up to 65,535")
    return ClassList(tuple(names), tuple(numbers), colours, str(file))


def read_ade_classes(file: Path) -> ClassList:
    """Read ADE20K's ``objectInfo150.txt``: a table whose last column is the name, the first being the number.

    Raises:
        PatchloomError: it is another table.
    """
    rows = [line.split("\t") for line in _lines(file)[1:] if line]
    firsts = [row[0].strip() for row in rows]
    if firsts != [str(number + 1) for number in range(ADE_COUNT)]:
        raise PatchloomError(f"{file} is not ADE20K's list of 150 classes: give it as it was published, or none")
    full = [row[-1].strip() for row in rows]
    short = [re.split("[,;]", name)[0].strip() for name in full]
    names = [brief if short.count(brief) == 1 else whole for brief, whole in zip(short, full, strict=True)]
    return ClassList(tuple(names), tuple(range(1, ADE_COUNT + 1)), None, str(file))


def numbered_classes(occurring: Collection[int], ignored: Collection[int], name: str) -> ClassList:
    """The classes of label maps without a list: all numbers from 0 to the largest that counts, called so.

    Args:
        occurring: numbers in label maps.
        ignored: those that do not count.
        name: what the user calls the data.

    Raises:
        PatchloomError: few of many numbers occur, so that a list has to say which are classes.
    """
    counted = sorted({number for number in occurring if number not in ignored})
    ids = [number for number in range(counted[-1] + 1 if counted else 0) if number not in ignored]
    if len(ids) > _SPARSE and 4 * len(counted) < len(ids):
        raise PatchloomError(
            f"label maps of {name} hold {len(counted)} numbers up to {counted[-1]:,}: say in {CLASSES} which are "
            f"classes, a line for each, such as {counted[-1]} NAME"
        )
    return ClassList(tuple(map(str, ids)), tuple(ids), None, "the numbers in label maps")


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise PatchloomError(f"{file} cannot be read as text: write the name of a class a line") from problem
    return [line.strip() for line in text.rstrip().splitlines()]


def _refuse_twice(file: Path, those: Sequence[object], what: str) -> None:
    if len(set(those)) < len(those):
        twice = next(one for i, one in enumerate(those) if one in those[:i])
        raise PatchloomError(f"{file} has the {what} {twice} twice: give each class its own")
