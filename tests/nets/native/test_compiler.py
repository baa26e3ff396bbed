"""Compiled kernels are cached intact or compiled again, and need no compiler once they are cached."""

import hashlib
import multiprocessing
import os
from pathlib import Path

import pytest

from patchloom.errors import PatchloomError
from patchloom.nets import native
from patchloom.nets.native import compiler as made

pytestmark = pytest.mark.skipif(native.lacking() is not None, reason=f"no native kernels: {native.lacking()}")
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Use a source that compiles fast; return the path of its library."""
    source = tmp_path / "small.cpp"
    # longer than a page, so that a truncated part is not mapped
    source.write_text('static char filler[99999] = {1};\nextern "C" int answer() { return 41 + filler[0]; }\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(made, "_SOURCES", [source])
    monkeypatch.setattr(made, "library", made.library.__wrapped__)
    return tmp_path / "cache" / "patchloom" / "native"


def library_path(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def compile_elsewhere(folder: Path) -> None:
    """Compile in another process, so that this one has not loaded the library."""
    process = FORK.Process(target=made.library)
    process.start()
    process.join()
    assert process.exitcode == 0 and library_path(folder).suffix == ".so"


def without_compiler(monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")


def test_a_cached_library_needs_no_compiler(small, monkeypatch):
    compile_elsewhere(small)
    without_compiler(monkeypatch)
    assert made.compiler() is None and made.lacking() is None and made.missing() is None
    assert made.library().answer() == 42


def test_a_cached_library_works_with_another_compiler(small, monkeypatch):
    compile_elsewhere(small)
    written = library_path(small).stat()
    monkeypatch.setattr(made, "compiler", lambda: ["/another/g++-99"])
    assert made.library().answer() == 42 and library_path(small).stat() == written


@pytest.mark.parametrize("length", [0, 10, 0.5, -40, -1])
def test_a_truncated_library_is_compiled_again(small, length):
    compile_elsewhere(small)
    content = library_path(small).read_bytes()
    library_path(small).write_bytes(content[: int(len(content) * length) if 0 < length < 1 else length])
    assert made.library().answer() == 42 and made._is_intact(library_path(small))


def test_a_changed_library_is_rejected_without_a_compiler(small, monkeypatch):
    compile_elsewhere(small)
    content = bytearray(library_path(small).read_bytes())
    content[len(content) // 2] ^= 1
    library_path(small).write_bytes(content)
    without_compiler(monkeypatch)
    assert made.lacking() == "g++ was not found" == made.missing().rpartition("because ")[2]
    with pytest.raises(PatchloomError, match="not available, because g.. was not found: use --kernels torch"):
        made.library()


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_library_that_others_can_write_is_compiled_again(small, mode, monkeypatch):
    compile_elsewhere(small)
    library_path(small).chmod(mode)
    assert not made._is_intact(library_path(small))
    before = os.umask(0o002)
    try:
        assert made.library().answer() == 42
    finally:
        os.umask(before)
    assert made._is_intact(library_path(small)) and library_path(small).stat().st_mode & 0o022 == 0


def test_a_library_of_another_user_or_behind_a_link_is_not_loaded(small, tmp_path, monkeypatch):
    compile_elsewhere(small)
    path = library_path(small)
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    assert not made._is_intact(path)
    path.unlink()
    (tmp_path / "elsewhere.so").rename(path)
    assert made._is_intact(path)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert made._place() != path and not made._is_intact(path)


def test_a_library_of_another_system_is_compiled_again(small, monkeypatch):
    """A complete library that cannot be loaded here, for example in a folder shared by several machines."""
    foreign = b"\x7fELF" + bytes(100)
    small.mkdir(parents=True)
    made._place().write_bytes(foreign + hashlib.sha256(foreign).digest())
    made._place().chmod(0o755)
    assert made._is_intact(made._place())
    with monkeypatch.context() as patch:
        without_compiler(patch)
        with pytest.raises(PatchloomError, match=r"\.so cannot be loaded, and g.. was not found: use --kernels torch"):
            made.library()
    assert made.library().answer() == 42


def test_several_processes_compile_at_once(small):
    processes = [FORK.Process(target=made.library) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert made._is_intact(library_path(small)) and made.library().answer() == 42
