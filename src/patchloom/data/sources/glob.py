"""Files of images or recordings, given by a pattern or one by one, as a shell expands an unquoted pattern."""

from __future__ import annotations

import functools
import glob
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from patchloom.audio.recordings import modality_of
from patchloom.data.containers.arrays import ZARR
from patchloom.data.containers.open import suffix_of
from patchloom.data.decode import IMAGE_SUFFIXES, SOUND
from patchloom.data.source import Data
from patchloom.data.sources.files import Files
from patchloom.data.sources.names import in_foreign
from patchloom.data.sources.scandir import Listing, endings, note_on_foreign, select_kind
from patchloom.data.sources.urls import expand_braces
from patchloom.errors import PatchloomError

_LOCAL = re.compile("^(file://|hf:)")  # before a path
_ESCAPED = re.compile(r"\[([*?[])\]")  # a letter that glob.escape has escaped
_SYSTEM = ("/proc", "/sys", "/dev")
_MOST_FOLDERS = 10**5


def is_pattern(name: str) -> bool:
    """Return whether a name is a pattern of paths: it has ``*``, ``?`` or ``[``, or braces with alternatives."""
    return glob.has_magic(name) or len(expand_braces(name)) > 1


def may_search_disc(name: str) -> bool:
    """Return whether opening a folder or a pattern could scan much more than a folder of images.

    This is so for folders above the user's home and the system's own, for ``..`` after a wildcard, for ``**`` twice,
    and below more than `_MOST_FOLDERS` folders, a number that loops of links reach, too.
    """
    home = Path(os.path.realpath(os.path.expanduser("~")))
    for one in expand_braces(os.path.expanduser(_LOCAL.sub("", name))):
        parts = Path(one).parts
        fixed = [*itertools.takewhile(lambda part: not glob.has_magic(_ESCAPED.sub("", part)), parts)]
        rest = parts[len(fixed) :]
        root = Path(os.path.realpath(Path(*(_ESCAPED.sub(r"\1", part) for part in fixed))))
        if ".." in rest or rest.count("**") > 1:
            return True
        if not root.is_dir() or (len(rest) == 1 and rest != ("**",)):  # a file, or files of one folder
            continue
        if home.is_relative_to(root) or any(map(root.is_relative_to, _SYSTEM)):
            return True
        folders = os.walk(root, followlinks=True) if rest else ()
        if sum(1 for _ in itertools.islice(folders, _MOST_FOLDERS + 1)) > _MOST_FOLDERS:
            return True
    return False


def absolute_pattern(name: str) -> str:
    """Make a pattern absolute; the working directory's own name is escaped."""
    path = os.path.expanduser(name)
    return path if os.path.isabs(path) else os.path.join(glob.escape(os.getcwd()), path)


def matches(pattern: str) -> list[str]:
    """Return the sorted paths that match: ``**`` matches folders of any depth, braces give alternatives.

    Of several paths through links to one folder, the first is returned.
    """
    each = (sorted(glob.iglob(one, recursive=True)) for one in expand_braces(os.path.expanduser(pattern)))
    without_links = functools.cache(os.path.realpath)  # a folder has many files
    once: dict[tuple[str, str], str] = {}
    for path in (os.path.normpath(path) for some in each for path in some):
        folder, file = os.path.split(path)
        once.setdefault((without_links(folder), file), path)
    found = list(once.values())
    if not found:
        raise PatchloomError(f"no file matches {pattern}: check the folder, and the ending of the files")
    return found


def open_images(paths: Sequence[str], name: str, suffixes: frozenset[str] = frozenset()) -> Data:
    """Open the images among ``paths``, by their suffixes (see `Listing.of`), or the recordings.

    Other files, and folders, are left out, with a note.

    Folders of other programs below the folder that all files share are left out, too, unless all files lie in such.
    """
    files = [path for path in paths if os.path.isfile(path) or suffix_of(path) in ZARR & suffixes]
    shared = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in files]) if files else ""
    foreign = {path for path in files if in_foreign(os.path.relpath(path, shared).replace(os.sep, "/"))}
    foreign = foreign if len(foreign) < len(files) else set()
    listed, sound, notes = select_kind(Listing.of(files, foreign=foreign, suffixes=suffixes), name)
    notes += note_on_foreign(listed)
    images = set(listed.paths)
    found = [path for path in files if path in images]
    folders = sum(map(os.path.isdir, paths))
    if not found:
        raise PatchloomError(f"{name} matches {len(paths):,} paths and no image: {endings()}")
    if others := sum(map(len, listed.others.values())):
        notes.append(f"{name}: {others:,} files that are not {modality_of(sound).noun} are left out")
    if folders and not re.search(r"\*\*", name):
        notes.append(f"{name}: {folders:,} folders are left out, since files match, too: use ** for the files in them")
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in found])
    source = Files(name, Path(root), [os.path.relpath(path, root) for path in found], sound=sound)
    source.no_labels = "files given one by one, or by a pattern, have none"
    return Data(source, None, tuple(notes))


def is_single(name: str) -> bool:
    """Return whether this is the name of a single image or recording."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES | SOUND
