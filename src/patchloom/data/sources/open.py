"""Choice of the source by what the user typed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from patchloom.arguments import PathLike, plain_path, validate_arguments
from patchloom.data.containers.open import PLANES, suffix_of
from patchloom.data.decode import FILMS
from patchloom.data.source import Data
from patchloom.data.sources.builtin import is_builtin, open_builtin
from patchloom.data.sources.concat import concat_data, join_names, refuse_twice, split_commas
from patchloom.data.sources.division import split_division
from patchloom.data.sources.folder import open_folder
from patchloom.data.sources.glob import absolute_pattern, is_pattern, is_single, matches, may_search_disc, open_images
from patchloom.data.sources.huggingface import absolute_hub_name, hub_folder, is_hub, open_hub
from patchloom.data.sources.in_memory import DataLike, is_object, is_object_name, object_name, open_objects
from patchloom.data.sources.names import BUILTIN, is_foreign
from patchloom.data.sources.parts import divided
from patchloom.data.sources.shards import holds_shards, is_shards, open_shard_folder, open_shards
from patchloom.data.sources.speech_commands import is_speech_commands, open_speech_commands
from patchloom.data.sources.table import open_list, split_choice
from patchloom.data.sources.urls import PIPE, find_remote, is_address
from patchloom.data.splits import with_groups
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError, closest_word
from patchloom.system.files import no_such_path


@validate_arguments
def open_data(data: DataLike, seed: int = 0, *, group: str | None = None) -> Data:
    """Open images or recordings by a path, an address, a name or several of these, or as an object in Python.

    Args:
        data: a folder of images, or of recordings (see `SOUND_SUFFIXES`), also in Speech Commands' layout; a text file
            or a table (CSV, TSV) that lists them; a pattern of their paths; the name of built-in data (see `BUILTIN`);
            shards, as a pattern of paths, an address for fsspec, or a ``pipe:`` command, which is run; or a Hugging
            Face data set, as ``hf:NAME`` or ``hf:FOLDER``. After ``@`` stands how files are divided into images, as in
            ``slides/@tile=256``, see `patchloom.data.sources.division.Division`. A built-in name takes precedence over
            a folder of that name: for the folder, write ``./shapes``, or give a `Path`. Give several as a list, or as
            one text with commas between them; files may be given one by one. For objects, see `open_objects`.
        seed: random seed of built-in synthetic data.
        group: groups of images that must stay in one split, see `patchloom.data.splits.with_groups`.

    Raises:
        PatchloomError: if there is no such data, it holds no images, or there are no such groups.
    """
    return _open(data, seed, group, fetch=True)


def open_stored(data: DataLike, of: str, instead: str, *, group: str | None = None) -> Data:
    """Open data that a file names, such as a run's configuration, using only files of this machine.

    The file may be untrusted: for a name that the user has not typed, no command is run and nothing is fetched.
    """
    for name in [] if is_object(data) else map(str, split_names(data)):
        if (found := untyped(name)) is not None:
            raise PatchloomError(
                f"{of} names {found}; commands are run, addresses opened, and discs searched, only if you type them: "
                f"{instead}"
            )
    return _open(data, 0, group, fetch=False)


def untyped(name: str) -> str | None:
    """Describe the first part of a name that may only be opened if the user types it; None if there is none."""
    name = split_division(name)[0]
    found = find_remote(name)
    if found is None and is_hub(name) and not hub_folder(name):
        found = name
    if found is None:
        return f"{name[:80]}, which could be a whole disc" if may_search_disc(name) else None
    return "a command" if PIPE in found.lower() else f"{found[:80]}, which is not on this machine"


def _open(data: DataLike, seed: int, group: str | None, fetch: bool) -> Data:
    names = [] if is_object(data) else split_names(data)
    with StatusMessage(f"looking for the files of {join_names(names) if names else object_name(data)}"):
        # the image files among several names are one list, and each other name is a separate source
        images = []
        for name in map(str, names) if len(names) > 1 else ():
            elsewhere = os.path.isdir(name) or is_pattern(name) or is_address(name) or is_hub(name) or is_builtin(name)
            if is_single(name) and (os.path.isfile(name) or not elsewhere):
                images.append(name)
        if gone := [path for path in images if not os.path.isfile(os.path.expanduser(path))]:
            others = f" (and {len(gone) - 1:,} more of {len(images):,})" if len(gone) > 1 else ""
            raise PatchloomError(f"{gone[0]}{others} does not exist: give paths of existing images")
        some = set(images)
        rest = [name for name in names if os.fspath(name) not in some]
        parts = [] if names else [open_objects(data)]
        if rest:
            parts.append(_open_apart(rest, join_names(rest), seed, fetch))
        if images:
            parts.append(open_images([os.path.expanduser(path) for path in images], f"{len(images):,} image files"))
        opened = concat_data(parts, join_names(names))
        return opened if group is None else with_groups(opened, group)


def absolute_name(data: DataLike) -> str | list[str]:
    """Make ``data`` independent of the working directory: paths and patterns become absolute.

    Commands are not changed, because it is unknown which of their words are paths. Objects become their `object_name`.
    """
    if is_object(data):
        return object_name(data)
    names = [_lasting_one(name) for name in split_names(data)]
    return names[0] if len(names) == 1 else names


def split_names(data: DataLike) -> list[str | Path]:
    """Return the names in what the user typed."""
    if not isinstance(data, str | os.PathLike):
        names = [plain_path(name) for name in cast(Sequence[PathLike], data)]  # objects have no names
        if names and all(str(name).strip() for name in names):
            return names
        raise PatchloomError("the data has no name: give a folder of images, a list file, or shapes")
    name = os.fspath(data)
    if not name.strip():
        raise PatchloomError("the data has no name: give a folder of images, a list file, or shapes")
    # commas may also be in a path, in an address, and after @
    whole = not isinstance(data, str) or is_address(name) or "@" in name or is_object_name(name)
    whole = whole or os.path.exists(os.path.expanduser(name))
    parts = [] if whole else split_commas(name)
    return [*parts] if len(parts) > 1 else [plain_path(data)]


def _open_apart(names: Sequence[str | Path], name: str, seed: int, fetch: bool) -> Data:
    """Open several sources as one: the training images of all, and the test images of those that bring some."""
    refuse_twice(names)
    return concat_data([_open_one(one, seed, fetch) for one in names], name)


def _open_one(data: str | Path, seed: int, fetch: bool) -> Data:
    name = os.fspath(data)
    if is_object_name(name):
        raise PatchloomError(
            f"{name} cannot be found by that name: give the same object in Python again, or name other images, with "
            "--data where that is an option"
        )
    if isinstance(data, str) and is_builtin(name):
        return open_builtin(name, seed, fetch)
    if isinstance(data, str) and is_hub(name):
        return open_hub(name)
    whole, division = split_division(name)
    file, columns = split_choice(whole)
    path = Path(file).expanduser()
    if division is not None:
        suffixes = FILMS if division.fps is not None else PLANES
        if suffix_of(file) in suffixes and os.path.exists(path):
            return divided(open_images([str(path)], whole, suffixes), division)
        if os.path.isdir(path):
            return divided(open_folder(path, whole, suffixes), division)
        if os.path.isfile(path):
            return divided(open_list(path, whole, columns, divided=True), division)
        if is_pattern(whole):
            return divided(open_images(matches(whole), whole, suffixes), division)
        raise no_such_path(whole, path, "before @, give a folder of files, one file, a pattern, or a table")
    if os.path.isdir(path):
        if holds_shards(path):
            return open_shard_folder(path, name)
        return open_speech_commands(path, name) if is_speech_commands(path) else open_folder(path, name)
    if is_shards(name):
        return open_shards(name, name)
    if os.path.isfile(path):
        if is_single(file):
            raise PatchloomError(f"{name} is a single image or recording: give the folder that holds it")
        return open_list(path, name, columns)
    if is_pattern(name):
        found = matches(name)
        if all(map(os.path.isdir, found)):
            folders = [path for path in found if not is_foreign(path)] or found
            return _open_apart([*map(Path, folders)], name, seed, fetch)
        if all(one.endswith(".tar") for one in found):
            return open_shards(name, name)
        return open_images(found, name)
    typed = name.lower().partition("@")[0].partition(":")[0].replace("-", "").replace("_", "")
    if near := closest_word(typed, BUILTIN):
        raise PatchloomError(f"{name} does not exist: did you mean the built-in data {near}?")
    raise no_such_path(name, path, f"give a folder, a text file of paths, or one of {', '.join(BUILTIN)}")


def _lasting_one(data: str | Path) -> str:
    name = os.fspath(data)
    if isinstance(data, str) and (is_builtin(name) or is_address(name)):
        return name
    if is_hub(name):
        return absolute_hub_name(name)
    if os.path.exists(name) or (is_shards(name) and not name.startswith("~")):
        return str(Path(name).absolute())
    whole, division = split_division(name)
    file, _ = split_choice(whole)
    if division is not None or file != name:
        return f"{_lasting_one(file)}{name.removeprefix(file)}"
    return absolute_pattern(name) if is_pattern(name) else name
