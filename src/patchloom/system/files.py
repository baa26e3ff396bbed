"""Locations of files, reading of regular files only, and atomic writing.

A crash leaves the old file or the new one, never half of one.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from patchloom.errors import PatchloomError, TemporaryError, closest_word

# errors that the user can fix: no space, no permission, a disc that is read-only or faulty
_MENDABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG, errno.ESTALE)
# of these, the ones that may pass by themselves: no space, a quota, a fault of a disc or of a network's file system
_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
# safetensors' exception has the number in its words alone
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
# errors of a name that no file can have, or that names another kind of file
_NAMED = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
_LARGE = 2**28  # bytes that a disc may take seconds to write
SMALL_FILE = 2**26  # bytes: largest file of settings, results or text that patchloom writes, or that configures it
LIST_FILE = 2**32  # bytes: largest list, table, annotation or record of images
_SEAL = hashlib.sha256().digest_size
# ValueError: characters that no name can have; RecursionError: a name a thousand folders deep
_REFUSALS = (OSError, ValueError, RecursionError)
# temporary names of files that are being written, here and by safetensors
_BESIDE = re.compile(r"\..+\.[0-9a-f]{32}|\.tmp[0-9A-Za-z]{6}")


class _PlainLoader(yaml.SafeLoader):
    """Loader for YAML of plain values, without repeated keys and without aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # a few lines of aliases can expand to more than fits into memory
            event = self.peek_event()
            raise yaml.MarkedYAMLError(
                None, None, f"*{event.anchor} repeats another part: write it out", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if key.value in seen if isinstance(key, yaml.ScalarNode) else False:
                raise yaml.MarkedYAMLError(None, None, f"repeated key {key.value}: leave one", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_yaml(text: str | bytes) -> Any:
    """Return the plain values in an untrusted YAML text."""
    return yaml.load(text, _PlainLoader)  # which is a SafeLoader


class UnsafeFile(PatchloomError, OSError):
    """A link, a pipe, a device or a folder where a file is expected, or a file that is too large.

    Args:
        number: number of the error, as in `errno`.
        why: description.
        path: path of the file.
    """

    def __init__(self, number: int, why: str, path: str | Path):
        OSError.__init__(self, number, why, str(path))

    def __str__(self) -> str:
        return f"{self.filename} is not used, because {self.strerror}: put another file there"


def open_regular(path: str | Path, follow: bool = False) -> BinaryIO:
    """Open a regular file to read its bytes. Files may come from strangers: a pipe or a device could be endless.

    Args:
        path: path of the file.
        follow: whether ``path`` may be a link, as for a path that the user typed, and for files of data.

    Raises:
        UnsafeFile: the path is a link, a pipe, a device, a socket or a folder.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
    try:
        handle = _open_regular(path, flags if follow else flags | getattr(os, "O_NOFOLLOW", 0))
    except OSError as problem:
        if problem.errno == errno.ELOOP and not follow:
            raise UnsafeFile(errno.ELOOP, "it is a link, and links are not followed here", path) from problem
        raise
    return open(handle, "rb")


def _open_regular(path: str | Path, flags: int) -> int:
    """Open a file if it is a regular one, which is checked after opening it, and return its descriptor."""
    try:
        # without O_NONBLOCK, opening a pipe would wait for its other end
        handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    except OSError as problem:
        if problem.errno == errno.ENXIO:  # a socket, or a pipe to write to
            raise UnsafeFile(errno.ENXIO, "it is not a regular file", path) from problem
        raise
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise UnsafeFile(errno.EINVAL, "it is not a regular file", path)


def read_bytes(path: str | Path, most: int = SMALL_FILE, follow: bool = False) -> bytes:
    """Return the content of a file of at most ``most`` bytes, opened by `open_regular`."""
    with open_regular(path, follow) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise UnsafeFile(errno.EFBIG, f"it is larger than {size_in_words(most)}", path)
        return file.read()


def read_text(
    path: str | Path,
    encoding: str = "utf-8",
    errors: str = "strict",
    newline: str | None = None,
    *,
    most: int = SMALL_FILE,
    follow: bool = False,
) -> str:
    """Return the text of a file, with the arguments of `open` and of `read_bytes`."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most, follow)), encoding, errors, newline).read()


def regular(path: str | Path, follow: bool = False) -> Path:
    """Return ``path`` if `open_regular` opens it, for libraries that open files by their names."""
    open_regular(path, follow).close()
    return Path(path)


def copy_tree(folder: Path, to: Path, left_out: Callable[[Path], bool]) -> None:
    """Copy the regular files of a folder, at any depth; links, pipes and devices are neither followed nor copied.

    Weights, which are never written in place, are hard-linked.

    Args:
        folder: folder, which may itself be a link.
        to: new folder.
        left_out: whether a file or folder is not copied.
    """
    to.mkdir()
    for one in sorted(folder.iterdir()):
        mode = one.lstat().st_mode
        if left_out(one):
            continue
        if stat.S_ISDIR(mode):
            copy_tree(one, to / one.name, left_out)
        elif stat.S_ISREG(mode):
            if one.suffix == ".safetensors":
                with contextlib.suppress(OSError):  # a file system without hard links
                    os.link(one, to / one.name, follow_symlinks=False)
                    continue
            with open_regular(one) as file, (to / one.name).open("xb") as copy:
                shutil.copyfileobj(file, copy)
            shutil.copystat(one, to / one.name, follow_symlinks=False)


def find_linked_folder(folder: Path) -> Path | None:
    """Return the first link to a folder at any depth in ``folder``; None if there is none."""
    for place, names, _ in os.walk(folder):  # does not follow links
        for name in names:
            if os.path.islink(path := os.path.join(place, name)):
                return Path(path)
    return None


def cache_root() -> Path:
    """Return the folder of caches: ``$XDG_CACHE_HOME/patchloom`` or ``~/.cache/patchloom``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "patchloom"


def write_whole(path: Path, content: bytes | str | Callable[[Path], object]) -> None:
    """Write ``content`` beside ``path``, flush it to the disc, and rename it into place.

    Any number of processes may do so at once, also on several machines or in containers: the last one to finish wins.
    """
    # not the number of this process: containers that share a disc may use equal numbers
    unfinished = path.parent / f".{path.name[:50]}.{uuid.uuid4().hex}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(unfinished)
        else:
            unfinished.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
        _flush(unfinished)
        os.replace(unfinished, path)
        _flush(path.parent)  # otherwise a power cut could undo the renaming
    except BaseException as problem:  # Ctrl-C among them
        try:
            _remove(unfinished)
        except KeyboardInterrupt:  # once more while it was being removed
            _remove(unfinished)
        if isinstance(problem, _REFUSALS):
            raise write_error(path, problem) from problem
        raise


def move_whole(path: Path, to: Path) -> None:
    """Rename a file of `write_whole` to another place on the same disc, where it appears whole or not at all."""
    try:
        os.replace(path, to)
        _flush(to.parent)
    except OSError as problem:
        raise write_error(to, problem) from problem


class BackgroundWork:
    """Work in a thread, which ends with the program, or with its work.

    It may last long without noticing signals, as when writing a large file; `wait` notices them.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as problem:
            self._problem = problem

    @property
    def done(self) -> bool:
        """Whether the work has ended, perhaps with an error."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of the work, and raise its error; Ctrl-C acts at once."""
        while not self.done:
            self._thread.join(0.2)
        if self._problem is not None:
            raise self._problem


def write_sealed(path: Path, content: bytes) -> None:
    """Write ``content`` after its checksum, for `read_sealed`."""
    write_whole(path, hashlib.sha256(content).digest() + content)


def read_sealed(path: Path) -> bytes | None:
    """Return the content that `write_sealed` has written; None if a single bit has changed."""
    content = read_bytes(path, LIST_FILE)
    seal, content = content[:_SEAL], content[_SEAL:]
    return content if hashlib.sha256(content).digest() == seal else None


def read_cached(path: Path) -> bytes | None:
    """Return the content of a cached file of `write_sealed`; None if it is missing or damaged."""
    with contextlib.suppress(OSError):
        return read_sealed(path)
    return None


def append(path: Path, text: str) -> None:
    """Append ``text`` to a file."""
    try:
        with open(path, "a", encoding="utf-8", errors="surrogateescape", opener=no_link) as file:
            file.write(text)
    except OSError as problem:
        raise write_error(path, problem) from problem


def no_link(path: str, flags: int) -> int:
    """Open a regular file to write in place, as ``opener`` of `open`, and refuse links.

    The folder may be untrusted: its links could lead to other files of the user, and a pipe would wait for a reader.
    """
    if os.path.islink(path):
        raise PatchloomError(f"{path} is a link, and links are not written to: replace it by the file itself")
    return _open_regular(path, flags | getattr(os, "O_NOFOLLOW", 0))


def no_such_path(name: object, path: Path, remedy: str) -> PatchloomError:
    """Return the error for a path that is not there: with a similar name in the same folder, or else with a remedy."""
    with contextlib.suppress(*_REFUSALS):
        if path.exists():
            return PatchloomError(f"{name} is no folder: {remedy}")
        beside = [one.name for one in path.parent.iterdir() if one.name[0] != "."]
        if near := closest_word(path.name, beside, cutoff=0.75):
            remedy = f"did you mean {path.with_name(near)}?"
    return PatchloomError(f"{name} does not exist: {remedy}")


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of different folders, with as many parent folders prepended as needed to be unique."""
    places = [folder.absolute().parts for folder in folders]
    names = []
    for place in places:
        others = [other for other in places if other != place]
        count = next(n for n in range(1, len(place) + 1) if place[-n:] not in [other[-n:] for other in others])
        names.append(str(Path(*place[-count:])))
    return names


def make_folder(path: Path) -> None:
    """Create a folder and its parents if they do not exist."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except _REFUSALS as problem:
        raise write_error(path, problem) from problem


def size_in_words(count: float) -> str:
    """Format a number of bytes, such as "1.2 GB" or "34.0 MB"."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def write_error(path: object, problem: Exception) -> PatchloomError:
    """Return the error for a file that could not be written."""
    if isinstance(problem, UnsafeFile):
        return problem
    why = getattr(problem, "strerror", None) or problem
    return disk_error_kind(problem)(f"{path} could not be written ({why}): choose another folder, or free space")


def disk_error(problem: Exception) -> PatchloomError | None:
    """Return the error for an operation that the disc has refused; None if it is not at fault."""
    if isinstance(problem, UnsafeFile):
        return problem
    if not isinstance(problem, OSError) or problem.errno not in (*_MENDABLE, *_NAMED):
        return None
    name, why = str(problem.filename or "a file"), problem.strerror or problem
    if problem.errno in _NAMED:
        return PatchloomError(f"{name[:100]} cannot be used as a path here ({why}): give another one")
    return disk_error_kind(problem)(
        f"{name} could not be read or written ({why}): choose another folder, or free space"
    )


def disk_error_kind(problem: Exception) -> type[PatchloomError]:
    """Return `TemporaryError` for a temporary fault of a disc, else `PatchloomError`."""
    number = getattr(problem, "errno", None)
    if not number and (said := _OS_ERROR.search(str(problem))):
        number = int(said[1])
    return TemporaryError if number in _MAY_PASS else PatchloomError


def remove_leftovers(folder: Path, age: float = 0) -> None:
    """Remove unfinished files of killed processes (see `write_whole`) in ``folder``.

    Nothing may be writing there, or only files younger than ``age`` in seconds.
    """
    for path in folder.glob(".*"):
        with contextlib.suppress(OSError):  # removed by another process
            if _BESIDE.fullmatch(path.name) and time.time() - path.stat().st_mtime >= age:
                path.unlink()


def _remove(path: Path) -> None:
    with contextlib.suppress(*_REFUSALS):
        path.unlink()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        if os.fstat(handle).st_size < _LARGE:
            os.fsync(handle)
        else:
            BackgroundWork(lambda: os.fsync(handle)).wait()
    except OSError as problem:
        if problem.errno != errno.EINVAL:  # some file systems cannot flush folders
            raise
    finally:
        os.close(handle)
