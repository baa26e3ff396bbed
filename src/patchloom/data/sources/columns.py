"""What the columns of a table of images are: the path, and the label, the split and the group, where there are such."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from patchloom.data.formats import IMAGE_SUFFIXES, SOUND_SUFFIXES
from patchloom.data.sources.base import TEST_SPLITS
from patchloom.errors import PatchloomError

LOOKED = 100  # rows by which columns are recognised
NAMED = 5  # columns, or files, in a message
# names of columns, without spaces, dashes, underscores and capitals
PATHS = {"path", "file", "image", "img", "filename", "filepath", "fullpath", "relativepath"}
PATHS |= {f"{of}{what}" for of in ("image", "img") for what in ("path", "file", "name", "filename", "filepath")}
_LABELS = {"label", "class", "category", "target"}
_LABELS |= {f"{of}{what}" for of in ("label", "class", "category") for what in ("name", "id")}
_KNOWN = {"path": PATHS, "label": _LABELS, "split": {"split", "subset", "set", "partition"}, "group": {"group"}}
# what a split may be called, beside its usual name
_SPLITS = {"training": "train", "testing": "test", "valid": "val", "dev": "val"}


def split_choice(name: str) -> tuple[str, dict[str, str]]:
    """File and columns of ``FILE@path=COLUMN,label=COLUMN``; a name that is no such thing comes back whole.

    Raises:
        PatchloomError: something else than path, label, split or group is chosen.
    """
    file, at, words = name.rpartition("@")
    if not at or "=" not in words or Path(name).expanduser().exists() or not Path(file).expanduser().is_file():
        return name, {}
    chosen = {role: column for role, _, column in (word.partition("=") for word in words.split(","))}
    for role in chosen:
        if role not in _KNOWN:
            raise PatchloomError(f"{name} chooses a column for {role}: after @ stand {', '.join(_KNOWN)}, each with =")
    return file, chosen


def read_as(roles: Mapping[str, str], names: Sequence[str], name: str) -> str:
    """Which column was taken for what."""
    said = ", ".join(f"{role} from {column}" if role != column else role for role, column in roles.items())
    left = [column for column in names if column not in roles.values()]
    more = "" if "label" in roles else f" ({name.partition('@')[0]}@label=COLUMN takes one as the label)"
    return f"{name}: columns taken: {said}" + (f"; not used: {some_of(left)}{more}" if left else "")


class Roles(NamedTuple):
    """Finds out which column is what."""

    columns: Mapping[str, list[str]]
    file: Path
    name: str
    chosen: Mapping[str, str]

    def found(self) -> dict[str, str]:
        """Columns by role: path, and label, split and group where there are such.

        Raises:
            PatchloomError: it is unclear.
        """
        for column in self.chosen.values():
            if column and column not in self.columns:
                raise PatchloomError(f"{self.name} has no column {column}: it has {some_of(self.columns)}")
        found = {role: column for role, column in self.chosen.items() if column}
        rest = [role for role in _KNOWN if role not in self.chosen]
        taken = set(found.values())
        for role in rest:
            candidates = [one for one in self.columns if plain(one) in _KNOWN[role] and one not in taken]
            if role == "path":
                candidates = self._of_images(candidates)
            elif role == "label":
                candidates = self._different(candidates)
            elif role == "split":
                candidates = [one for one in candidates if self._of_splits(one)]
            if len(candidates) > 1:
                raise PatchloomError(
                    f"{self.name} has the columns {' and '.join(candidates)}, and each could be the {role}: say which, "
                    f"as {self._typed}@{role}={candidates[0]}"
                )
            if candidates:
                found[role] = candidates[0]
                taken.add(candidates[0])
        return found

    @property
    def _typed(self) -> str:
        return self.name.partition("@")[0]

    def _of_images(self, candidates: list[str]) -> list[str]:
        """The column of paths; several if that is unclear."""
        if len(candidates) == 1:
            return candidates
        if len(candidates) > 1:
            there = [one for one in candidates if any(map(self._there, islice(self.columns[one], LOOKED)))]
            return there or candidates
        suffixes = {one: map(os.path.splitext, islice(self.columns[one], LOOKED)) for one in self.columns}
        known = IMAGE_SUFFIXES | SOUND_SUFFIXES
        found = [one for one, each in suffixes.items() if any(suffix.lower() in known for _, suffix in each)]
        found = found or [one for one in self.columns if any(map(self._there, islice(self.columns[one], LOOKED)))]
        if not found:
            raise PatchloomError(
                f"{self.name} has the columns {some_of(self.columns)}, and none is called path, file, image or "
                f"filename: rename the one with the paths, or say which it is, as {self._typed}@path=COLUMN"
            )
        return found

    def _of_splits(self, column: str) -> bool:
        """Whether a column has names of splits. One that is called split must have."""
        strange = {split_of(word) for word in self.columns[column]} - {"", "train", *TEST_SPLITS}
        if strange and plain(column) == "split":
            raise PatchloomError(
                f"{self.name} has the split {min(strange)}: write train, val or test, or say that {column} is none, as "
                f"{self._typed}@split="
            )
        return not strange

    def _there(self, cell: str) -> bool:
        return bool(cell) and (self.file.parent / cell).is_file()

    def _different(self, candidates: list[str]) -> list[str]:
        """Of columns that tell the same classes, such as a number and a word, the first one with words."""
        values = [self.columns[one] for one in candidates]
        if len(candidates) < 2 or len(set(zip(*values, strict=True))) > min(len(set(each)) for each in values):
            return candidates
        words = [one for one, each in zip(candidates, values, strict=True) if not all(map(str.isdecimal, each))]
        return (words or candidates)[:1]


def plain(column: str) -> str:
    return "".join(letter for letter in column.casefold() if letter not in " _-")


def some_of(names: Sequence[str] | Mapping[str, object]) -> str:
    first = ", ".join(islice(names, NAMED))
    return first if len(names) <= NAMED else f"{first} and {len(names) - NAMED:,} more"


def split_of(word: str) -> str:
    word = word.casefold()
    return _SPLITS.get(word, word)
