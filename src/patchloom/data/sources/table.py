"""Lists of images or recordings: tables (CSV, TSV) of spreadsheets and annotation tools, and plain text files."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from patchloom.data.conversions import limit_examples
from patchloom.data.decode import IMAGE_SUFFIXES, SOUND_SUFFIXES
from patchloom.data.near_duplicates import grouping_columns
from patchloom.data.source import TEST_SPLITS, Data
from patchloom.data.sources.files import Files
from patchloom.data.sources.media_type import detect_sound
from patchloom.errors import PatchloomError
from patchloom.system.documents import is_whole
from patchloom.system.files import LIST_FILE, read_text

# Roles of the columns of a table: the path, and optionally label, split and group.


_SAMPLED_FOLDERS = 100  # folders that are searched for the first file of a list none of whose files exists
_SAMPLED_ROWS = 100  # rows by which columns are recognised
_MAX_NAMED = 5  # columns, or files, in a message
# names of columns, without spaces, dashes, underscores and capitals
_PATH_COLUMNS = {"path", "file", "image", "img", "filename", "filepath", "fullpath", "relativepath"}
_PATH_COLUMNS |= {f"{of}{what}" for of in ("image", "img") for what in ("path", "file", "name", "filename", "filepath")}
_LABELS = {"label", "class", "category", "target"}
_LABELS |= {f"{of}{what}" for of in ("label", "class", "category") for what in ("name", "id")}
_KNOWN = {"path": _PATH_COLUMNS, "label": _LABELS, "split": {"split", "subset", "set", "partition"}, "group": {"group"}}
# other names of splits
_SPLITS = {"training": "train", "testing": "test", "valid": "val", "dev": "val"}


def split_choice(name: str) -> tuple[str, dict[str, str]]:
    """Return file and columns of ``FILE@path=COLUMN,label=COLUMN``; any other name is returned unchanged."""
    file, at, words = name.rpartition("@")
    if (
        not at
        or "=" not in words
        or os.path.exists(Path(name).expanduser())
        or not os.path.isfile(Path(file).expanduser())
    ):
        return name, {}
    chosen = {role: column for role, _, column in (word.partition("=") for word in words.split(","))}
    for role in chosen:
        if role not in _KNOWN:
            raise PatchloomError(f"{name} chooses a column for {role}: after @, write {', '.join(_KNOWN)}, each with =")
    return file, chosen


def describe_roles(roles: Mapping[str, str], names: Sequence[str], name: str) -> str:
    """Return a sentence on the roles of the columns."""
    said = ", ".join(f"{role} from {column}" if role != column else role for role, column in roles.items())
    left = [column for column in names if column not in roles.values()]
    more = "" if "label" in roles else f" ({name.partition('@')[0]}@label=COLUMN takes one as the label)"
    return f"{name}: columns used: {said}" + (f"; other columns: {join_some(left)}{more}" if left else "")


class ColumnRoles(NamedTuple):
    """Assignment of columns to roles."""

    columns: Mapping[str, list[str]]
    file: Path
    name: str
    chosen: Mapping[str, str]

    def assign(self) -> dict[str, str]:
        """Return columns by role: path, and label, split and group if there are such columns."""
        for column in self.chosen.values():
            if column and column not in self.columns:
                raise PatchloomError(f"{self.name} has no column {column}: it has {join_some(self.columns)}")
        found = {role: column for role, column in self.chosen.items() if column}
        rest = [role for role in _KNOWN if role not in self.chosen]
        taken = set(found.values())
        for role in rest:
            candidates = [one for one in self.columns if normalize_column(one) in _KNOWN[role] and one not in taken]
            if role == "path":
                candidates = self._of_images(candidates)
            elif role == "label":
                candidates = self._different(candidates)
            elif role == "split":
                candidates = [one for one in candidates if self._of_splits(one)]
            if len(candidates) > 1:
                raise PatchloomError(
                    f"{self.name} has the columns {' and '.join(candidates)}, and each could be the {role}: choose "
                    f"one, as {self._typed}@{role}={candidates[0]}"
                )
            if candidates:
                found[role] = candidates[0]
                taken.add(candidates[0])
        return found

    @property
    def _typed(self) -> str:
        return self.name.partition("@")[0]

    def _of_images(self, candidates: list[str]) -> list[str]:
        """Return the column of paths; several if that is unclear."""
        if len(candidates) == 1:
            return candidates
        if len(candidates) > 1:
            there = [one for one in candidates if any(map(self._there, islice(self.columns[one], _SAMPLED_ROWS)))]
            return there or candidates
        suffixes = {one: map(os.path.splitext, islice(self.columns[one], _SAMPLED_ROWS)) for one in self.columns}
        known = IMAGE_SUFFIXES | SOUND_SUFFIXES
        found = [one for one, each in suffixes.items() if any(suffix.lower() in known for _, suffix in each)]
        found = found or [
            one for one in self.columns if any(map(self._there, islice(self.columns[one], _SAMPLED_ROWS)))
        ]
        if not found:
            raise PatchloomError(
                f"{self.name} has the columns {join_some(self.columns)}, and none is called path, file, image or "
                f"filename: rename the one with the paths, or name it as {self._typed}@path=COLUMN"
            )
        return found

    def _of_splits(self, column: str) -> bool:
        """Return whether a column has names of splits. A column called split must have them."""
        strange = {split_of(word) for word in self.columns[column]} - {"", "train", *TEST_SPLITS}
        if strange and normalize_column(column) == "split":
            raise PatchloomError(
                f"{self.name} has the split {min(strange)}: write train, val or test, or ignore the column {column} by "
                f"{self._typed}@split="
            )
        return not strange

    def _there(self, cell: str) -> bool:
        return bool(cell) and os.path.isfile(self.file.parent / cell)

    def _different(self, candidates: list[str]) -> list[str]:
        """Select one of several columns of the same classes, such as a number and a word: the first with words."""
        values = [self.columns[one] for one in candidates]
        if len(candidates) < 2 or len(set(zip(*values, strict=True))) > min(len(set(each)) for each in values):
            return candidates
        words = [one for one, each in zip(candidates, values, strict=True) if not all(map(str.isdecimal, each))]
        return (words or candidates)[:1]


def normalize_column(column: str) -> str:
    return "".join(letter for letter in column.casefold() if letter not in " _-")


def join_some(names: Sequence[str] | Mapping[str, object]) -> str:
    first = ", ".join(islice(names, _MAX_NAMED))
    return first if len(names) <= _MAX_NAMED else f"{first} and {len(names) - _MAX_NAMED:,} more"


def split_of(word: str) -> str:
    word = word.casefold()
    return _SPLITS.get(word, word)


_SUFFIXES = IMAGE_SUFFIXES | SOUND_SUFFIXES


class SourceTable(NamedTuple):
    """Cells of a table, and the names of its columns.

    Attributes:
        cells: rows of cells, all as long as ``names``.
        names: names of the columns; () if the file has none.
        delimiter: tab, comma, semicolon, or a space for any white space.
    """

    cells: list[list[str]]
    names: tuple[str, ...]
    delimiter: str = ","


def parse_table(lines: Sequence[str], file: Path) -> SourceTable | None:
    """Parse the lines of a file as a table; return None for a plain list of paths, with or without tabs and labels.

    A first row is a header if none of its cells is an image, and one of them is a common name for paths, or cells below
    are images. A table without a header is recognised by commas, semicolons, or three columns with tabs between them.
    Cells with spaces or tabs between them are a table if a cell of the first rows is an existing image.
    """

    def is_image(cell: str) -> bool:
        return os.path.splitext(cell)[1].lower() in _SUFFIXES or os.path.isfile(os.path.join(file.parent, cell))

    begin = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    lines = lines[begin:]
    head = [(each, next(iter(_rows(lines[:1], each, 0, file)), [])) for each in ("\t", ",", ";")]
    if _is_spaced(lines[:_SAMPLED_ROWS], file):
        head.append((" ", lines[0].split()))
    head = [
        (delimiter, first)
        for delimiter, first in head
        if len(first) > 1 or normalize_column("".join(first)) in _PATH_COLUMNS
    ]
    for delimiter, first in head:
        if _PATH_COLUMNS & set(map(normalize_column, first)) and not any(map(is_image, first)):
            return SourceTable(_rows(lines, delimiter, len(first), file)[1:], tuple(first))
    if any(os.path.isfile(os.path.join(file.parent, line.strip())) for line in lines[:_SAMPLED_ROWS] if line.strip()):
        return None
    for delimiter, first in head:
        if delimiter == "\t" and len(first) == 2:  # a missing path, and its label
            continue
        below = _rows(lines[1:_SAMPLED_ROWS], delimiter, 0, file)
        if any(map(is_image, first)):
            return SourceTable(_rows(lines, delimiter, len(first), file), (), delimiter)
        if file.suffix.lower() in (".csv", ".tsv") or any(is_image(cell) for row in below for cell in row):
            return SourceTable(_rows(lines, delimiter, len(first), file)[1:], tuple(first))
    return None


def _is_spaced(lines: Sequence[str], file: Path) -> bool:
    """Return whether lines are a table with spaces between cells, and not paths that hold spaces."""
    rows = [line.split() for line in lines if line.strip()]
    cells = _with_slashes([cell for row in rows for cell in row], file)
    there = any(os.path.isfile(os.path.join(file.parent, cell)) for cell in cells)
    return there and len(set(map(len, rows))) == 1 and not any("\t" in line for line in lines)


_MANY_ONCE = 5  # labels that occur once, above which a note may say that they are numbers
_ABSENT = {"nan", "<na>", "null"}  # as pandas and others write a missing value


def open_table(table: SourceTable, file: Path, name: str, chosen: Mapping[str, str]) -> Data:
    """Open the images of a table. Paths are relative to the file's folder."""
    if not table.cells:
        raise PatchloomError(f"{name} lists no images: write a row for each below its header")
    names = table.names or _unnamed(table, name, chosen)
    if len(set(names)) < len(names):
        twice = next(one for one in names if names.count(one) > 1)
        raise PatchloomError(f"{name} has two columns called {twice!r}: rename one")
    columns = {column: [row[i] for row in table.cells] for i, column in enumerate(names)}
    roles = ColumnRoles(columns, file, name, chosen).assign()
    columns[roles["path"]] = _with_slashes(columns[roles["path"]], file)
    compared: dict[str, list[str]] = {role: columns[roles[role]] for role in ("label", "split") if role in roles}
    kept, notes = _existing_rows(columns[roles["path"]], compared, file, name)
    columns = {column: [values[i] for i in kept] for column, values in columns.items()}
    words = columns[roles["label"]] if "label" in roles else []
    splits = [split_of(word) for word in columns[roles["split"]]] if "split" in roles else [""] * len(kept)
    train, test, others, said = _parts(splits, name)
    classes = _ordered({words[i] for i in train} - {""}) if words else ()
    number = {word: i for i, word in enumerate(classes)}
    asked = f"{name}," if chosen and "label" not in chosen else f"{name.rpartition('@')[0] if chosen else name}@"

    sound = detect_sound(columns[roles["path"]], name)
    subjects = grouping_columns({one: values for one, values in columns.items() if one not in roles.values()})

    def files(chosen: Sequence[int]) -> Files:
        labels = np.array([number.get(words[i], -1) for i in chosen], np.int64) if classes else None
        told = {column: [values[i] for i in chosen] for column, values in columns.items() if column != roles["path"]}
        paths = [columns[roles["path"]][i] for i in chosen]
        groups = None
        if "group" in roles:
            each = [columns[roles["group"]][i] or f"\0{i}" for i in chosen]  # an empty cell is a group of its own
            groups = np.unique(each, return_inverse=True)[1].astype(np.int64)
        found = Files(name, file.parent, paths, classes, labels, told, sound, groups)
        found.to_label = f"name the column that holds them, {asked}label=COLUMN"
        found.subjects = subjects
        return found

    number_hint = f"; {asked}label= ignores numbers that are no classes" if all(map(_is_number, classes)) else ""
    for i in test if classes else []:
        if words[i] and words[i] not in number:
            raise PatchloomError(
                f"{name} has the class {words[i]} in test images but not in training images: give both the same "
                f"classes, or remove that one{number_hint}"
            )
    counts = Counter(words[i] for i in [*train, *test] if words[i]) if classes else Counter[str]()
    once = sum(count == 1 for count in counts.values())
    if once > max(_MANY_ONCE, len(counts) / 2) and all(map(_is_number, counts)):
        said.append(
            f"{name}: {once:,} of the {len(counts):,} numbers in {roles['label']} occur once, and each number is a "
            f"class: group them into classes, or predict them by evaluate regress --column {roles['label']}"
        )
    if absent := [word for word in classes if word.lower() in _ABSENT]:
        said.append(
            f"{name}: the label {absent[0]} is a class like others: leave the cell empty where an image has no label"
        )
    notes = [describe_roles(roles, names, name), *notes, *said]
    split_off = {split: files(rows) for split, rows in others.items()}
    return Data(files(train), files(test) if test else None, tuple(notes), split_off)


def _is_number(word: str) -> bool:
    with suppress(ValueError):
        return math.isfinite(float(word))
    return False


def _rows(lines: Sequence[str], delimiter: str, width: int, file: Path) -> list[list[str]]:
    """Return rows of stripped cells without empty rows; ``width`` cells each, unless that is 0."""
    reader = (
        csv.reader(lines, delimiter=delimiter, skipinitialspace=True) if delimiter != " " else map(str.split, lines)
    )
    rows: list[list[str]] = []
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            while width and len(cells) > width and not cells[-1]:
                cells.pop()
            if width and len(cells) > width:
                raise PatchloomError(
                    f"{file} has {len(cells)} cells in a row and {width} in its first ({', '.join(cells)}): put quotes "
                    f"around cells that hold a {_DELIMITERS[delimiter]}"
                )
            if any(cells):
                rows.append(cells + [""] * (width - len(cells)))
    except csv.Error as problem:
        raise PatchloomError(f"{file} cannot be read as a table ({problem}): save it as CSV") from problem
    return rows


_DELIMITERS = {"\t": "tab", ",": "comma", ";": "semicolon", " ": "space"}


def _unnamed(table: SourceTable, name: str, chosen: Mapping[str, str]) -> tuple[str, ...]:
    """Return names for the columns of a table without a header: the images are the path, another column the label.

    Columns that the user chooses are called by their numbers, from 1.
    """
    width = len(table.cells[0])
    if chosen:
        return tuple(str(i + 1) for i in range(width))
    suffixes = [os.path.splitext(cell)[1].lower() in _SUFFIXES for cell in table.cells[0]]
    if width > 2 or sum(suffixes) > 1:
        usual = _usual_names(table, suffixes)
        path, label = usual.index("path") + 1, usual.index("label") + 1
        header = f"such as '{table.delimiter.join(usual)}'"
        if width > _MAX_NAMED:
            header = f"of {width} names, path and label among them"
        elif table.delimiter == "\t":
            header = f"of {width} names with tabs between: {', '.join(usual)}"
        raise PatchloomError(
            f"{name} does not name its {width} columns: choose them by their numbers, as "
            f"{name}@path={path},label={label}, or add a header line {header}"
        )
    return ("label", "path") if suffixes[1] else ("path", "label")


def _usual_names(table: SourceTable, suffixes: Sequence[bool]) -> list[str]:
    """Return names for a header that the table's cells fit; ``suffixes``: the columns whose first cell is an image."""
    columns = [*zip(*table.cells, strict=True)]
    path = suffixes.index(True) if any(suffixes) else 0
    split = next((i for i, cells in enumerate(columns) if {*map(split_of, cells)} <= {"train", *TEST_SPLITS}), None)
    free = [i for i in range(len(columns)) if i not in (path, split)]
    if not free:  # a path and a split alone
        free, split = [1 - path], None
    names = {path: "path", **({} if split is None else {split: "split"}), free[0]: "label"}
    names |= {column: "other" if i == 0 else f"other{i + 1}" for i, column in enumerate(free[1:])}
    return [names[i] for i in range(len(columns))]


def _with_slashes(paths: Sequence[str], file: Path) -> list[str]:
    """Replace the backslashes of Windows in paths, unless a file has such a name."""
    return [
        path if "\\" not in path or os.path.isfile(os.path.join(file.parent, path)) else path.replace("\\", "/")
        for path in paths
    ]


def _note_on_repeated(
    rows: Sequence[tuple[int, int]], paths: Sequence[str], columns: Mapping[str, Sequence[str]], name: str
) -> list[str]:
    """Return a note on files that are listed again; ``rows`` are pairs of the first row of a file and a later one."""
    if not rows:
        return []
    note = f"{name}: {len(rows):,} of {len(paths):,} rows are left out, since their file was listed before"
    for role, values in columns.items():
        other = {first: again for first, again in reversed(rows) if values[first] != values[again]}
        if other:
            some = (f"{paths[first]}: {values[first]!r}, then {values[again]!r}" for first, again in other.items())
            note += (
                f"; {len(other):,} of these files {'has' if len(other) == 1 else 'have'} another {role} there, and the "
                f"first one counts ({limit_examples(some, len(other))})"
            )
    return [note]


def _existing_rows(
    paths: list[str], columns: Mapping[str, Sequence[str]], file: Path, name: str
) -> tuple[list[int], list[str]]:
    """Return the rows whose files exist, each file once, and notes on the others; ``columns`` should not differ."""
    rows: list[int] = []
    missing: list[str] = []
    seen: dict[str, int] = {}
    again: list[tuple[int, int]] = []
    empty = 0
    for i, path in enumerate(paths):
        whole = os.path.normpath(os.path.join(file.parent, path))
        if not path:
            empty += 1
        elif whole in seen:
            again.append((seen[whole], i))
        elif os.path.isfile(whole):
            seen[whole] = i
            rows.append(i)
        else:
            missing.append(path)
    if not rows:
        raise none_exists(len(paths), name, file, next(filter(None, paths), ""))
    notes: list[str] = []
    if missing:
        notes.append(missing_files(missing, len(paths), name) + "; they are left out")
    notes += _note_on_repeated(again, paths, columns, name)
    if empty:
        notes.append(f"{name}: {empty:,} of {len(paths):,} rows are left out, since they have no path")
    return rows, notes


def none_exists(count: int, name: str, file: Path, first: str) -> PatchloomError:
    """Return the error for a list none of whose files exists."""
    folder = _folder_with(first, file.parent)
    found = f"; {folder} has such a file: move {file.name} there, or write its paths anew" if folder else ""
    return PatchloomError(
        f"none of the {count} files listed in {name} exists: paths are relative to {file.parent}, and the first is "
        f"{first}{found}"
    )


def _folder_with(path: str, start: Path) -> Path | None:
    """Return a folder near ``start`` that has the file ``path``: a folder inside it, beside it or above it."""
    with suppress(OSError):
        inside = sorted(islice((one for one in start.iterdir() if one.is_dir()), _SAMPLED_FOLDERS))
        beside = sorted(islice((one for one in start.parent.iterdir() if one.is_dir()), _SAMPLED_FOLDERS))
        return next(
            (one for one in (*inside, *start.parents, *beside, Path.cwd()) if path and os.path.isfile(one / path)), None
        )
    return None


def missing_files(missing: Sequence[str], count: int, name: str) -> str:
    """Return a note on listed files that do not exist."""
    return f"{name}: {len(missing):,} of {count:,} listed files do not exist ({join_some(missing)})"


def _parts(splits: list[str], name: str) -> tuple[list[int], list[int], dict[str, list[int]], list[str]]:
    """Return the rows of training images, of test images and of each other split, and notes on the latter."""
    there = dict.fromkeys(splits)
    second = next((one for one in TEST_SPLITS if one in there), None)
    if second is not None and "train" not in there:
        if len(there) > 1:
            raise PatchloomError(
                f"{name} has rows of the split {second} and none of train: mark the images to train on as train, or "
                "add @split= to the name to use all rows"
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
    numbers = all(map(is_whole, words))
    return tuple(sorted(words, key=lambda word: (int(word) if numbers else 0, word)))


# Text files that list images or recordings.


def open_list(file: Path, name: str, chosen: Mapping[str, str] | None = None) -> Data:
    """Open a text file that lists images or recordings: a table (see `parse_table`), or one path per line.

    Paths are relative to the file's folder. In a plain list, a tab and a label may follow; ``#`` begins a comment.
    """
    try:
        text = read_text(file, "utf-8-sig", most=LIST_FILE, follow=True)
    except OSError as error:
        raise PatchloomError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:  # which no path can have
        raise PatchloomError(f"{name} is not text: give a folder of images, or a text file with one path per line")
    lines = text.splitlines()
    table = parse_table(lines, file)
    if table is not None:
        return open_table(table, file, name, chosen or {})
    if chosen:
        raise PatchloomError(f"{file} is a plain list, which has no columns to choose: give it without @...")
    rows = [line.partition("\t") for line in map(str.strip, lines) if line and not line.startswith("#")]
    paths, words = _with_slashes([row[0].strip() for row in rows], file), [row[2].strip() for row in rows]
    if not paths:
        raise PatchloomError(f"{name} lists no images: write one path per line, relative to the folder of {file.name}")
    seen: dict[str, int] = {}
    first = [seen.setdefault(os.path.normpath(os.path.join(file.parent, path)), i) for i, path in enumerate(paths)]
    repeated = _note_on_repeated([(a, i) for i, a in enumerate(first) if a != i], paths, {"label": words}, name)
    paths, words = [paths[i] for i in seen.values()], [words[i] for i in seen.values()]
    missing = [path for path in paths if not os.path.isfile(file.parent / path)]
    if len(missing) == len(paths):
        raise none_exists(len(paths), name, file, paths[0])
    classes = tuple(sorted(set(words) - {""}))
    number = {word: i for i, word in enumerate(classes)}
    labels = np.array([number.get(word, -1) for word in words], dtype=np.int64) if classes else None
    if missing:
        repeated.append(missing_files(missing, len(paths), name) + "; they count as files that cannot be read")
    return Data(Files(name, file.parent, paths, classes, labels, sound=detect_sound(paths, name)), None, (*repeated,))
