"""Where files are kept, and how they are written: a crash leaves the old one or the new one, never half of one."""

import contextlib
import os
from pathlib import Path

from patchloom.errors import PatchloomError


def cache_root() -> Path:
    """Where what can be made again is kept: ``$XDG_CACHE_HOME/patchloom`` or ``~/.cache/patchloom``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "patchloom"


def write_whole(path: Path, content: bytes | str) -> None:
    """Write ``content`` beside ``path``, flush it to the disc, and rename it into place.

    Raises:
        PatchloomError: the folder cannot be written, or the disc is full.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as problem:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise PatchloomError(
            f"{path} could not be written ({problem.strerror}): choose another folder, or free space"
        ) from problem
