"""Choosing the source by what the user typed."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from patchloom.data.formats import IMAGE_SUFFIXES
from patchloom.data.sources.addresses import is_address
from patchloom.data.sources.base import Data
from patchloom.data.sources.builtin import BUILTIN, is_builtin, open_builtin
from patchloom.data.sources.folder import open_folder
from patchloom.data.sources.hub import is_hub, lasting_hub, open_hub
from patchloom.data.sources.list import open_list
from patchloom.data.sources.shards import holds_shards, is_shards, open_shard_folder, open_shards
from patchloom.errors import PatchloomError
from patchloom.waiting import Waiting


def open_data(data: str | Path, seed: int = 0) -> Data:
    """Open images by a path, an address or a name.

    Args:
        data: a folder of images; a text file that lists them; the name of built-in data (see `BUILTIN`); shards, as a
            pattern of paths, an address for fsspec, or a ``pipe:`` command, which is run; or a Hugging Face data set,
            as ``hf:NAME`` or ``hf:FOLDER``. A built-in name wins over a folder of that name: write ``./shapes``, or
            give a `Path`, for the folder.
        seed: of the built-in shapes.

    Raises:
        PatchloomError: no such data, or no images in it.
    """
    with Waiting(f"looking for the images of {os.fspath(data)}"):
        return _opened(data, seed)


def _opened(data: str | Path, seed: int) -> Data:
    name = os.fspath(data)
    if isinstance(data, str):
        builtin = open_builtin(data, seed)
        if builtin is not None:
            return builtin
    if is_hub(name):
        return open_hub(name)
    path = Path(data).expanduser()
    if path.is_dir():
        return open_shard_folder(path, name) if holds_shards(path) else open_folder(path, name)
    if is_shards(name):
        return open_shards(name, name)
    if path.is_file():
        if path.suffix.lower() in IMAGE_SUFFIXES:
            raise PatchloomError(f"{name} is a single image: give the folder that holds it")
        return open_list(path, name)
    typed = name.lower().partition("@")[0].partition(":")[0].replace("-", "").replace("_", "")
    near = difflib.get_close_matches(typed, BUILTIN, n=1, cutoff=0.7)
    if near:
        raise PatchloomError(f"{name} does not exist: did you mean the built-in data {near[0]}?")
    raise PatchloomError(f"{name} does not exist: give a folder, a text file of paths, or one of {', '.join(BUILTIN)}")


def lasting(data: str | Path) -> str:
    """``data`` as it can be opened from any working directory: paths and patterns of them become absolute.

    Commands stay as they are, because which of their words are paths is unknown.
    """
    name = os.fspath(data)
    if isinstance(data, str) and (is_builtin(name) or is_address(name)):
        return name
    if is_hub(name):
        return lasting_hub(name)
    exists = Path(name).exists() or (is_shards(name) and not name.startswith("~"))
    return str(Path(name).absolute()) if exists else name
