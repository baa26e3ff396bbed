"""One comparison at a time in a folder, and one process in each run, by the lock of run folders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from patchloom.errors import PatchloomError
from patchloom.files import make_folder
from patchloom.runs.folder import Locked, RunFolder


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """While entered, no other comparison works in a folder, which is made; one that stays empty is removed.

    Raises:
        PatchloomError: another one does, or the folder cannot be made.
    """
    made = not folder.exists()
    make_folder(folder)
    lock = RunFolder(folder)
    try:
        lock.lock()
    except Locked:
        raise PatchloomError(
            f"another comparison is at work in {folder}: wait for its end, or choose another folder with --out"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if made and [one.name for one in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
                folder.rmdir()
        lock.unlock()


def is_held(run: Path) -> bool:
    """Whether another process trains in the folder of a run."""
    if not (run / ".lock").exists():
        return False
    lock = RunFolder(run)
    try:
        lock.lock()
    except Locked:
        return True
    lock.unlock()
    return False
