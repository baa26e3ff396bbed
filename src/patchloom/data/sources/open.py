"""From what the user typed to images."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from patchloom.data.read import IMAGE_SUFFIXES
from patchloom.data.sources.addresses import is_address
from patchloom.data.sources.base import Data
from patchloom.data.sources.builtin import BUILTIN, is_builtin, open_builtin
from patchloom.data.sources.folder import open_folder
from patchloom.data.sources.hub import is_hub, lasting_hub, open_hub
from patchloom.data.sources.list import open_list
from patchloom.data.sources.shards import holds_shards, is_shards, open_shard_folder, open_shards
from patchloom.errors import PatchloomError


def open_data(data: str | Path, seed: int = 0) -> Data:
    """Open a folder of images, a text file that lists them, or built-in data by its name (see `BUILTIN`).

    Or shards, by a pattern of paths, an address that fsspec knows, or a `pipe:` command, which is run. Or a data set of
    Hugging Face, as `hf:NAME` or `hf:FOLDER`.

    A name wins over a folder that is called the same: write `./shapes`, or give a `Path`, for the folder. `seed` draws
    the built-in shapes.

    Raises: PatchloomError if there is no such data or there are no images in it.
    """
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
    """What data is called from any folder: names and addresses stay, paths and patterns of them become absolute.

    Commands stay, too: nobody can tell which of their words are paths.
    """
    name = os.fspath(data)
    if isinstance(data, str) and (is_builtin(name) or is_address(name)):
        return name
    if is_hub(name):
        return lasting_hub(name)
    exists = Path(name).exists() or (is_shards(name) and not name.startswith("~"))
    return str(Path(name).absolute()) if exists else name
