"""Lists of images or recordings: tables (CSV, TSV) of spreadsheets and annotation tools, and plain text files."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from patchloom.data.decode import IMAGE_SUFFIXES, SOUND_SUFFIXES
from patchloom.data.near_duplicates import grouping_columns
from patchloom.data.notes import count_of, limit_examples
from patchloom.data.source import Data, Source, in_classes, number_words
from patchloom.data.sources.files import Files
from patchloom.data.sources.names import TRAIN, choose_splits, split_of, split_settings
from patchloom.data.sources.scandir import detect_sound
from patchloom.data.splits import number_groups
from patchloom.errors import PatchloomError
from patchloom.system.files import LIST_FILE, read_text

_SAMPLED_FOLDERS = 100  # folders that are searched for the first file of a list none of whose files exists
_SAMPLED_ROWS = 100  # rows by which columns are recognised
_MAX_NAMED = 5  # columns, or files, in a message
_MANY_ONCE = 5  # labels that occur once, above which a note may say that they are numbers
_ABSENT = {"nan", "<na>", "null"}  # as pandas and others write a missing value
_SUFFIXES = IMAGE_SUFFIXES | SOUND_SUFFIXES
_DELIMITERS = {"\t": "tab", ",": "comma", ";": "semicolon", " ": "space"}
# names of columns, without spaces, dashes, underscores and capitals
_PATH_COLUMNS = {"path", "file", "image", "img", "filename", "filepath", "fullpath", "relativepath"}
_PATH_COLUMNS |= {f"{of}{what}" for of in ("image", "img") for what in ("path", "file", "name", "filename", "filepath")}
_LABELS = {"label", "class", "category", "target"}
_LABELS |= {f"{of}{what}" for of in ("label", "class", "category") for what in ("name", "id")}
_KNOWN = {"path": _PATH_COLUMNS, "label": _LABELS, "split": {"split", "subset", "set", "partition"}, "group": {"group"}}


def split_choice(name: str) -> tuple[str, dict[str, str]]:
    """Return file and columns of ``FILE@path=COLUMN,label=COLUMN``; any other name is returned unchanged."""
    file, chosen = split_settings(name)
    if not os.path.isfile(Path(file).expanduser()):
        return name, {}
    for role in chosen:
        if role not in _KNOWN:
            raise PatchloomError(f"{name} chooses a column for {role}: after @, write {', '.join(_KNOWN)}, each with =")
    return file, chosen


def open_list(file: Path, name: str, chosen: Mapping[str, str] | None = None, *, divided: bool = False) -> Data:
    """Open a text file that lists images or recordings: a table (see `parse_table`), or one path per line.

    Paths are relative to the file's folder. In a plain list, a tab and a label may follow; ``#`` begins a comment.

    Args:
        file: path of the file.
        name: name as the user typed it.
        chosen: columns by role, see `split_choice`.
        divided: whether the files will be divided into images; the paths may then be of parts of them, as `Parts` names
            them and `predict` writes them: ``a.tif#y=0,x=256``.
    """
    try:
        text = read_text(file, "utf-8-sig", most=LIST_FILE, follow=True)
    except OSError as error:
        raise PatchloomError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:  # which no path can have
        raise PatchloomError(f"{name} is not text: give a folder of images, or a text file with one path per line")
    (cells, names, is_list), chosen = parse_table(text.splitlines(), file), chosen or {}
    if chosen and is_list:
        raise PatchloomError(f"{file} is a plain list, which has no columns to choose: give it without @...")
    if not cells:
        where = f"one path per line, relative to the folder of {file.name}" if is_list else "a row for each image"
        raise PatchloomError(f"{name} lists no images: write {where}")
    names = names or _unnamed(cells[0], name, chosen)
    if len(set(names)) < len(names):
        twice = next(one for one in names if names.count(one) > 1)
        raise PatchloomError(f"{name} has two columns called {twice!r}: rename one")
    columns = {column: [row[i] for row in cells] for i, column in enumerate(names)}
    roles = _assign_roles(columns, file, name, chosen)
    columns[roles["path"]] = _with_slashes(columns[roles["path"]], file)
    compared: dict[str, list[str]] = {role: columns[roles[role]] for role in ("label", "split") if role in roles}
    kept, notes = _existing_rows(columns[roles["path"]], compared, file, name, keep_missing=is_list)
    columns = {column: [values[i] for i in kept] for column, values in columns.items()}
    if not is_list:
        used = ", ".join(f"{role} from {column}" if role != column else role for role, column in roles.items())
        left = [column for column in names if column not in roles.values()]
        more = "" if "label" in roles else f" ({name.partition('@')[0]}@label=COLUMN takes one as the label)"
        rest = f"; other columns: {limit_examples(left, most=_MAX_NAMED)}{more}" if left else ""
        notes.insert(0, f"{name}: columns used: {used}{rest}")
    words = columns[roles["label"]] if "label" in roles else [""] * len(kept)
    called: dict[str, str] = {}  # the first word for each split, such as val for validation
    splits = columns[roles["split"]] if "split" in roles else []
    splits = [called.setdefault(split_of(word) or word.casefold(), word.casefold()) for word in splits]
    parts, first, second, said = _parts(splits, len(kept), name)
    asked = f"{name}," if chosen and "label" not in chosen else f"{name.rpartition('@')[0] if chosen else name}@"
    sound = detect_sound(columns[roles["path"]], name)
    told = {} if is_list else {one: values for one, values in columns.items() if one != roles["path"]}
    subjects = grouping_columns({one: values for one, values in told.items() if one not in roles.values()})

    def files(rows: Sequence[int]) -> Files:
        listed = [split_part(columns[roles["path"]][i], file) for i in rows]
        if not divided and (part := next((f"{path}#{part}" for path, part in listed if part), None)):
            comma = "," if chosen else "@"
            raise PatchloomError(f"{name} lists parts of files, such as {part}: say which, as in {name}{comma}tile=256")
        paths = [path for path, _ in listed]
        groups = number_groups([columns[roles["group"]][i] for i in rows]) if "group" in roles else None
        others = {column: [values[i] for i in rows] for column, values in told.items()}
        found = Files(name, file.parent, paths, *number_words([words[i] for i in rows]), others, sound, groups)
        found.parts = [part for _, part in listed] if any(part for _, part in listed) else None
        if not is_list:
            found.to_label = f"name the column that holds them, {asked}label=COLUMN"
        found.subjects = subjects
        return found

    train = files(parts.pop(first))
    remedy = f"give both the same classes, or remove that one; {asked}label= ignores numbers that are no classes"
    remedy = remedy if all(map(_is_number, train.classes)) else ""
    test = None if second is None else in_classes(files(parts.pop(second)), train.classes, second, remedy)
    others = {split: in_classes(files(rows), train.classes) for split, rows in parts.items() if split}
    if not is_list:
        said += _notes_on_labels(train, test, roles, name)
    return Data(train, test, (*notes, *said), others)


def parse_table(lines: Sequence[str], file: Path) -> tuple[list[list[str]], tuple[str, ...], bool]:
    """Parse the lines of a file as a table, or as a plain list of paths, with or without tabs and labels.

    Returns the rows of cells, the names of the columns, () if the file has none, and whether it is a plain list.

    A first row is a header if none of its cells is an image, and one of them is a common name for paths, or cells below
    are images. A table without a header is recognised by commas, semicolons, or three columns with tabs between them.
    Cells with spaces or tabs between them are a table if a cell of the first rows is an existing image.
    """
    begin = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    lines = lines[begin:]
    head = [(each, next(iter(_rows(lines[:1], each, 0, file)), [])) for each in ("\t", ",", ";")]
    rows = [line.split() for line in lines[:_SAMPLED_ROWS] if line.strip()]
    cells = _with_slashes([cell for row in rows for cell in row], file)
    there = any(os.path.isfile(os.path.join(file.parent, cell)) for cell in cells)
    # spaces between cells, and not paths that hold spaces
    if there and len(set(map(len, rows))) == 1 and not any("\t" in line for line in lines[:_SAMPLED_ROWS]):
        head.append((" ", lines[0].split()))
    head = [
        (delimiter, first)
        for delimiter, first in head
        if len(first) > 1 or normalize_column("".join(first)) in _PATH_COLUMNS
    ]
    for delimiter, first in head:
        if _PATH_COLUMNS & set(map(normalize_column, first)) and not _has_image(first, file):
            return _rows(lines, delimiter, len(first), file)[1:], tuple(first), False
    if any(os.path.isfile(os.path.join(file.parent, line.strip())) for line in lines[:_SAMPLED_ROWS] if line.strip()):
        head = []
    for delimiter, first in head:
        if delimiter == "\t" and len(first) == 2:  # a missing path, and its label
            continue
        if _has_image(first, file):
            return _rows(lines, delimiter, len(first), file), (), False
        below = _rows(lines[1:_SAMPLED_ROWS], delimiter, 0, file)
        if file.suffix.lower() in (".csv", ".tsv") or any(_has_image(row, file) for row in below):
            return _rows(lines, delimiter, len(first), file)[1:], tuple(first), False
    pairs = [line.partition("\t") for line in map(str.strip, lines) if line and not line.startswith("#")]
    return [[path.strip(), label.strip()] for path, _, label in pairs], ("path", "label"), True


def _has_image(cells: Iterable[str], file: Path) -> bool:
    """Return whether one of some cells is the path of an image or a recording."""
    return any(
        os.path.splitext(cell)[1].lower() in _SUFFIXES or bool(cell) and os.path.isfile(os.path.join(file.parent, cell))
        for cell in cells
    )


def _assign_roles(
    columns: Mapping[str, Sequence[str]], file: Path, name: str, chosen: Mapping[str, str]
) -> dict[str, str]:
    """Return columns by role: path, and label, split and group if there are such columns.

    The user chooses columns by ``chosen``; others have the role that their name says. Without a known name, the only
    column with images is that of the paths.
    """
    typed = name.partition("@")[0]
    for column in chosen.values():
        if column and column not in columns:
            raise PatchloomError(f"{name} has no column {column}: it has {limit_examples(columns, most=_MAX_NAMED)}")
    roles = {role: column for role, column in chosen.items() if column}
    for role, known in _KNOWN.items():
        if role in chosen:
            continue
        found = [one for one in columns if normalize_column(one) in known and one not in roles.values()]
        if role == "path" and not found:
            found = [one for one in columns if _has_image(columns[one][:_SAMPLED_ROWS], file)]
            if not found:
                raise PatchloomError(
                    f"{name} has the columns {limit_examples(columns, most=_MAX_NAMED)}, and none is called path, "
                    f"file, image or filename: rename the one with the paths, or name it as {typed}@path=COLUMN"
                )
        if role == "split":
            strange = {one: {word for word in columns[one] if word and not split_of(word)} for one in found}
            for column in [one for one in found if strange[one] and normalize_column(one) == "split"]:
                raise PatchloomError(
                    f"{name} has the split {min(strange[column])}: write train, val or test, or ignore the column "
                    f"{column} by {typed}@split="
                )
            found = [one for one in found if not strange[one]]
        if len(found) > 1:
            raise PatchloomError(
                f"{name} has the columns {' and '.join(found)}, and each could be the {role}: choose one, as "
                f"{typed}@{role}={found[0]}"
            )
        if found:
            roles[role] = found[0]
    return roles


def normalize_column(column: str) -> str:
    return "".join(letter for letter in column.casefold() if letter not in " _-")


def _notes_on_labels(train: Files, test: Source | None, roles: Mapping[str, str], name: str) -> list[str]:
    """Return sentences on labels that seem to be measurements, or missing values."""
    notes = []
    counts = Counter(
        source.classes[label]
        for source in (train, test)
        if source is not None and source.labels is not None
        for label in source.labels.tolist()
        if label >= 0
    )
    once = sum(count == 1 for count in counts.values())
    if once > max(_MANY_ONCE, len(counts) / 2) and all(map(_is_number, counts)):
        notes.append(
            f"{name}: {once:,} of the {len(counts):,} numbers in {roles['label']} occur once, and each number is a "
            f"class: group them into classes, or predict them by evaluate regress --column {roles['label']}"
        )
    if absent := [word for word in train.classes if word.lower() in _ABSENT]:
        notes.append(
            f"{name}: the label {absent[0]} is a class like others: leave the cell empty where an image has no label"
        )
    return notes


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


def _unnamed(first: Sequence[str], name: str, chosen: Mapping[str, str]) -> tuple[str, ...]:
    """Return names for the columns of a table without a header: the images are the path, another column the label.

    Columns that the user chooses are called by their numbers, from 1.
    """
    if chosen:
        return tuple(str(i + 1) for i in range(len(first)))
    images = [i for i, cell in enumerate(first) if os.path.splitext(cell)[1].lower() in _SUFFIXES] or [0]
    if len(first) > 2 or len(images) > 1:
        free = [i for i, cell in enumerate(first) if i != images[0] and not split_of(cell)]
        label = next(iter(free), 1 - images[0])
        raise PatchloomError(
            f"{name} does not name its {len(first)} columns ({limit_examples(first, most=_MAX_NAMED)}): choose them by "
            f"their numbers, as {name}@path={images[0] + 1},label={label + 1}, or add a header line with their names"
        )
    return ("path", "label") if images == [0] else ("label", "path")


def split_part(path: str, file: Path) -> tuple[str, str]:
    """Return the path of a file and of a part in it, "" if the path is that of a whole file."""
    whole, sharp, part = path.rpartition("#")
    if not sharp or os.path.isfile(os.path.join(file.parent, path)):
        return path, ""
    return whole, part


def _with_slashes(paths: Sequence[str], file: Path) -> list[str]:
    """Replace the backslashes of Windows in paths, unless a file has such a name."""
    return [
        path if "\\" not in path or os.path.isfile(os.path.join(file.parent, path)) else path.replace("\\", "/")
        for path in paths
    ]


def _existing_rows(
    paths: list[str], columns: Mapping[str, Sequence[str]], file: Path, name: str, keep_missing: bool
) -> tuple[list[int], list[str]]:
    """Return the rows whose files exist, each file once, and notes on the others; ``columns`` should not differ."""
    rows: list[int] = []
    missing: list[str] = []
    seen: dict[str, int] = {}
    again: list[tuple[int, int]] = []
    found = False
    for i, path in enumerate(paths):
        whole = os.path.normpath(os.path.join(file.parent, path))
        if not path:
            continue
        if whole in seen:
            again.append((seen[whole], i))
            continue
        if os.path.isfile(os.path.join(file.parent, split_part(path, file)[0])):
            found = True
        else:
            missing.append(path)
            if not keep_missing:
                continue
        seen[whole] = i
        rows.append(i)
    if not found:
        first, hint, start = next(filter(None, paths), ""), "", file.parent
        with suppress(OSError, StopIteration):  # a folder inside, beside or above has the first file
            inside = sorted(islice((one for one in start.iterdir() if one.is_dir()), _SAMPLED_FOLDERS))
            beside = sorted(islice((one for one in start.parent.iterdir() if one.is_dir()), _SAMPLED_FOLDERS))
            near = (*inside, *start.parents, *beside, Path.cwd())
            folder = next(one for one in near if first and os.path.isfile(one / first))
            hint = f"; {folder} has such a file: move {file.name} there, or write its paths anew"
        raise PatchloomError(
            f"none of the {len(paths)} files listed in {name} exists: paths are relative to {file.parent}, and the "
            f"first is {first}{hint}"
        )
    notes: list[str] = []
    if missing:
        those = "count as files that cannot be read" if keep_missing else "are left out"
        some = limit_examples(missing, most=_MAX_NAMED)
        notes.append(f"{name}: {len(missing):,} of {len(paths):,} listed files do not exist ({some}); they {those}")
    if again:
        note = f"{name}: {len(again):,} of {len(paths):,} rows are left out, since their file was listed before"
        for role, values in columns.items():
            other = {one: later for one, later in reversed(again) if values[one] != values[later]}
            pairs = (f"{paths[one]}: {values[one]!r}, then {values[later]!r}" for one, later in other.items())
            have = "has" if len(other) == 1 else "have"
            if other:
                note += f"; {len(other):,} of these files {have} another {role} there, and the first one counts "
                note += f"({limit_examples(pairs)})"
        notes.append(note)
    if empty := paths.count(""):
        notes.append(f"{name}: {empty:,} of {len(paths):,} rows are left out, since they have no path")
    return rows, notes


def _parts(splits: list[str], count: int, name: str) -> tuple[dict[str, list[int]], str, str | None, list[str]]:
    """Return the rows of each split, which of them are train and the test, and notes on the others."""
    first, second = choose_splits({*splits})
    everything = {TRAIN: [*range(count)]}
    if second is None:
        return everything, TRAIN, None, []
    if first is None:
        if len({*splits}) > 1:
            raise PatchloomError(
                f"{name} has rows of the split {second} and none of train: mark the images to train on as train, or "
                "add @split= to the name to use all rows"
            )
        return everything, TRAIN, None, [f"{name}: all rows are of the split {second}, and all are used"]
    rows = {which: [i for i, one in enumerate(splits) if one == which] for which in dict.fromkeys(splits)}
    notes = []
    for split, those in rows.items():
        if split not in (first, second):
            what = f"of the split {split}" if split else "without a split"
            notes.append(
                f"{name}: {count_of(len(those), 'row')} {what} are neither trained on (train) nor the test ({second})"
            )
    return rows, first, second, notes
