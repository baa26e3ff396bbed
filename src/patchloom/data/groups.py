"""Groups of images that no split may part, such as the frames of one video, by their paths or a column of a table."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace

import numpy as np

from patchloom.data.sources.base import Data, Source
from patchloom.data.sources.files import Files
from patchloom.errors import PatchloomError

PARENT = "parent"


def grouped(data: Data, group: str) -> Data:
    """Data whose images are in groups, with a note that says how many there are.

    Args:
        data: as it was opened; it stays as it is, since it may be a program's own.
        group: ``parent``, for the folder in which an image lies; the name of a column, where a table lists the images;
            or a regular expression that is searched for in the path of each image within the data, and whose brackets,
            if it has some, hold what names the group.

    Raises:
        PatchloomError: the images have no names, the expression is none or matches no image, or all are in one group.
    """
    names, train = _several_names(data.train, group), copy(data.train)
    train.groups = _numbered(names)
    found, alone = np.unique([name for name in names if name]), names.count("")
    few = f" ({_some(found)})" if len(found) <= 5 else ""
    notes = [f"--group {group}: {len(found):,} groups of {train.noun}{few}, which no split parts"]
    if alone:
        of = f"of {len(names):,} {train.noun}"
        notes.append(f"--group {group}: {alone:,} {of} are in no group, and count as one of their own each")
    if data.test is not None and data.test.place(0) is not None:
        if both := np.intersect1d(names_of(data.test, group), found).tolist():
            notes.append(
                f"--group {group}: the data has {train.noun} of {len(both):,} of its groups in training and in test "
                f"({_some(both)}), so scores say less about new {train.noun}"
            )
    return replace(data, train=train, notes=(*data.notes, *notes))


def ungrouped(source: Source) -> Source:
    """The same images, which a split may part as it likes."""
    free = source.subset(np.arange(len(source)))
    free.groups = None
    return free


def splittable(source: Source) -> Source:
    """The same images; `ungrouped` where all are one group, for a choice that has to be made on some of them."""
    one = source.groups is not None and len(np.unique(source.groups)) < 2
    return ungrouped(source) if one else source


def names_of(source: Source, group: str) -> list[str]:
    """The name of each image's group; "" for an image in none.

    Raises:
        PatchloomError: the images have no names, or the expression is none.
    """
    if (column := source.column(group)) is not None:
        return list(column)
    pattern = _expression(group)
    if source.place(0) is None:
        raise PatchloomError(f"--group {group} needs names of files, and the {source.noun} of {source.name} have none")
    if group == PARENT:  # the same folder name in two places is two folders
        return [source.describe(i).replace("\\", "/").rpartition("/")[0] for i in range(len(source))]
    return [_name(source.place(i) or "", pattern) for i in range(len(source))]


def _several_names(source: Source, group: str) -> list[str]:
    """As `names_of`, of images that a split can part.

    Raises:
        PatchloomError: as `grouped`.
    """
    names = names_of(source, group)
    alone = names.count("")
    if alone == len(names):
        columns = f"a column ({', '.join(source.columns)}), " if isinstance(source, Files) and source.columns else ""
        raise PatchloomError(
            f"--group {group} matches no image of {source.name}, such as {source.place(0)}: give {columns}a regular "
            "expression for a part of these paths, or parent for the folder"
        )
    if len({*names}) == 1:
        raise PatchloomError(
            f"--group {group} puts all {len(names):,} {source.noun} of {source.name} into one group, such as "
            f"{source.place(0)}, so none could be held out: give a pattern that parts them"
        )
    return names


def _numbered(names: list[str]) -> np.ndarray:
    """int64 [n], equal for equal names; "" makes a group of its own each time."""
    return np.unique([name or f"\0{i}" for i, name in enumerate(names)], return_inverse=True)[1].astype(np.int64)


def _name(path: str, pattern: re.Pattern[str]) -> str:
    found = pattern.search(path)
    return "" if found is None else found[pattern.groups] or ""


def _expression(group: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(group)
    except re.error as problem:
        raise PatchloomError(
            f"--group {group} is no regular expression ({problem}): write one such as '^(.*)_', or parent"
        ) from problem
    if pattern.groups > 1:
        raise PatchloomError(
            f"--group {group} has {pattern.groups} pairs of brackets: leave one around what names the group, and write "
            "the others as (?:...)"
        )
    return pattern


def _some(names: np.ndarray | list[str]) -> str:
    shown = [str(name).rpartition("/")[2] or str(name) for name in names]
    return ", ".join(shown[:5]) + ", ..." * (len(shown) > 5)
