"""Native kernels: compiled once for each user by the system's C++ compiler, cached with a checksum, and loaded.

The checksum follows the library in the same file: a truncated library would still load, and end the process with a bus
error.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.system.device import openmp_libraries, processor
from patchloom.system.files import cache_root, open_regular, write_whole

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_EXTENSIONS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma")
_FORMAT = "library, checksum"  # format of the file
_CHECKSUM = hashlib.sha256().digest_size  # bytes
_FLAGS = ("-std=c++17", "-O3", "-funroll-loops", "-fopenmp", "-fPIC", "-w")


def compiler() -> list[str] | None:
    """Return the command of GNU's C++ compiler: ``$CXX`` if it is one, or g++. Others would link a second OpenMP."""
    for command in (os.environ.get("CXX", ""), "g++"):
        words = shlex.split(command)
        name = Path(words[0]).name if words else ""
        if "g++" in name and "clang" not in name and shutil.which(words[0]):
            return words
    return None


def lacking() -> str | None:
    """Return a short reason why this machine cannot have the kernels; None if none is known."""
    if sys.platform != "linux":
        return "they are for Linux"
    if not set(_EXTENSIONS) <= set(processor("flags").split()):
        return "the processor has no AVX512-BF16"
    if compiler() is None and not _is_intact(_place()):
        return "g++ was not found"
    return None


def missing() -> str | None:
    """Return `lacking`, or the reason why compiling or loading the kernels fails; None if they work."""
    try:
        library()
    except PatchloomError as problem:
        return str(problem).rpartition(": ")[0]
    return None


@cache
def library() -> ctypes.CDLL:
    """Load the kernels; compile them first if the cache has none for this source and torch, or a damaged one."""
    if reason := lacking():
        raise PatchloomError(f"native kernels are not available, because {reason}: use --kernels torch")
    path, command = _place(), compiler()
    if _is_intact(path):
        with contextlib.suppress(OSError):  # for example from another system that shares this folder
            return ctypes.CDLL(str(path))
    if command is None:
        raise PatchloomError(f"{path} cannot be loaded, and g++ was not found: use --kernels torch")
    with StatusMessage("compiling the native kernels once"):
        write_whole(path, lambda unfinished: _compile(command, unfinished))
    try:
        return ctypes.CDLL(str(path))
    except OSError as problem:
        raise PatchloomError(f"{path} cannot be loaded ({problem}): use --kernels torch") from problem


def _place() -> Path:
    """Return the path of the library, named by everything that determines it except the compiler, which may be gone."""
    content = b"".join(path.read_bytes() for path in (*_SOURCES, *_HEADERS))
    about = _FORMAT, _FLAGS, _EXTENSIONS, _openmp(), torch.__version__, platform.libc_ver(), os.getuid()
    return cache_root() / "native" / f"{hashlib.sha256(content + repr(about).encode()).hexdigest()[:16]}.so"


def _is_intact(path: Path) -> bool:
    """Return whether ``path`` is complete, as `_compile` wrote it, and no other user can have written it."""
    try:
        with open_regular(path) as file:
            about, content = os.fstat(file.fileno()), file.read()
    except OSError:
        return False
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    return hashlib.sha256(content[:-_CHECKSUM]).digest() == content[-_CHECKSUM:]


def _compile(command: list[str], to: Path) -> None:
    command = [*command, *_FLAGS, *(f"-m{name.replace('_', '')}" for name in _EXTENSIONS), "-shared"]
    # torch's own OpenMP comes first, so that its threads do the work: two thread pools would compete for the cores
    words = [*command, *map(str, _SOURCES), "-o", str(to), "-Wl,--as-needed", *_openmp()]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit status {done.returncode}")
        raise PatchloomError(f"{command[0]} cannot compile the native kernels ({said}): use --kernels torch")
    with to.open("ab") as file:
        file.write(hashlib.sha256(to.read_bytes()).digest())
    to.chmod(0o755)  # the user's umask may let the group write


def _openmp() -> list[str]:
    """Return the path of the loaded OpenMP library that came with torch, if it can be found."""
    own = Path(torch.__file__).parent
    return sorted(path for path in openmp_libraries() if path.startswith((f"{own}/", f"{own}.libs/")))[:1]
