"""From what the user typed to images."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from patchloom.data.builtin import BUILTIN, open_builtin
from patchloom.data.files import open_folder, open_list
from patchloom.data.read import IMAGE_SUFFIXES
from patchloom.data.source import Data, Source, Subset, hold_out, split_for_test
from patchloom.errors import PatchloomError

__all__ = ["BUILTIN", "Data", "Source", "Subset", "hold_out", "open_data", "split_for_test"]


def open_data(data: str | Path, seed: int = 0) -> Data:
    """Open a folder of images, a text file that lists them, or built-in data by its name (see `BUILTIN`).

    A name wins over a folder that is called the same: write `./shapes`, or give a `Path`, for the folder. `seed` draws
    the built-in shapes.

    Raises: PatchloomError if there is no such data or there are no images in it.
    """
    name = os.fspath(data)
    if isinstance(data, str):
        builtin = open_builtin(data, seed)
        if builtin is not None:
            return builtin
    path = Path(data).expanduser()
    if path.is_dir():
        return open_folder(path, name)
    if path.is_file():
        if path.suffix.lower() in IMAGE_SUFFIXES:
            raise PatchloomError(f"{name} is a single image: give the folder that holds it")
        return open_list(path, name)
    typed = name.lower().partition("@")[0].partition(":")[0].replace("-", "").replace("_", "")
    near = difflib.get_close_matches(typed, BUILTIN, n=1, cutoff=0.7)
    if near:
        raise PatchloomError(f"{name} does not exist: did you mean the built-in data {near[0]}?")
    raise PatchloomError(f"{name} does not exist: give a folder, a text file of paths, or one of {', '.join(BUILTIN)}")
