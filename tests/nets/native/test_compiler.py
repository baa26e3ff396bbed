"""Compiled kernels are cached intact or compiled again, and need no compiler once they are cached."""

import hashlib
import multiprocessing
import os

import pytest
from refusing import refusal

from patchloom.nets import native
from patchloom.nets.native import compiler as made

pytestmark = pytest.mark.skipif(native.lacking() is not None, reason=f"no native kernels: {native.lacking()}")
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile a small source once; return it and the content of its library."""
    source = tmp_path_factory.mktemp("small") / "small.cpp"
    # longer than a page, so that a truncated part is not mapped
    source.write_text('static char filler[99999] = {1};\nextern "C" int answer() { return 41 + filler[0]; }\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "_SOURCES", [source])
        made._compile(made.compiler(), source.with_suffix(".so"))
    return source, source.with_suffix(".so").read_bytes()


@pytest.fixture
def empty(compiled, tmp_path, monkeypatch):
    """Use the small source and an empty cache; return the path of its library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(made, "_SOURCES", [compiled[0]])
    monkeypatch.setattr(made, "library", made.library.__wrapped__)
    return made._place()


@pytest.fixture
def cached(empty, compiled):
    """Put the library into the cache, from where this process has not loaded it yet; return its path."""
    empty.parent.mkdir(parents=True)
    empty.write_bytes(compiled[1])
    empty.chmod(0o755)
    return empty


def without_compiler(monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")


def test_a_cached_library_needs_no_compiler(cached, monkeypatch):
    without_compiler(monkeypatch)
    written = cached.stat()
    assert made.compiler() is None and made.lacking() is None and made.missing() is None
    assert made.library().answer() == 42 and cached.stat() == written


@pytest.mark.parametrize(
    ("variable", "command"),
    [("g++ -O1", ["g++", "-O1"]), ("clang++", ["g++"]), ("", ["g++"]), ("/nowhere/g++", ["g++"])],
)
def test_the_compiler_is_gnus(monkeypatch, variable, command):
    monkeypatch.setenv("CXX", variable)
    assert made.compiler() == command


def sealed(content):
    return content + hashlib.sha256(content).digest()


def changed(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


SPOILT = {  # content and mode of a cached file, and whether a checksum shows it
    "empty": (lambda content: b"", 0o755, True),
    "half": (lambda content: content[: len(content) // 2], 0o755, True),
    "shorter": (lambda content: content[:-1], 0o755, True),
    "changed": (changed, 0o755, True),
    "written by a group": (lambda content: content, 0o775, True),
    "written by others": (lambda content: content, 0o757, True),
    "of another system": (lambda content: sealed(b"\x7fELF" + bytes(100)), 0o755, False),
}


@pytest.mark.parametrize(("spoil", "mode", "shows"), SPOILT.values(), ids=SPOILT)
def test_a_spoilt_library_is_compiled_again_or_rejected_without_a_compiler(cached, spoil, mode, shows, monkeypatch):
    cached.write_bytes(spoil(cached.read_bytes()))
    cached.chmod(mode)
    assert made._is_intact(cached) != shows
    with monkeypatch.context() as patch:
        without_compiler(patch)
        assert made.lacking() == ("g++ was not found" if shows else None) and "g++ was not found" in made.missing()
        assert "g++ was not found: use --kernels torch" in refusal(made.library)
    before = os.umask(0o002)
    try:
        assert made.library().answer() == 42
    finally:
        os.umask(before)
    assert made._is_intact(cached) and cached.stat().st_mode & 0o022 == 0


def test_a_library_of_another_user_or_behind_a_link_is_not_loaded(cached, tmp_path, monkeypatch):
    cached.rename(tmp_path / "elsewhere.so")
    cached.symlink_to(tmp_path / "elsewhere.so")
    assert not made._is_intact(cached)
    (tmp_path / "elsewhere.so").rename(cached)
    assert made._is_intact(cached)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert made._place() != cached and not made._is_intact(cached)


def test_several_processes_compile_at_once(empty):
    processes = [FORK.Process(target=made.library) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert list(empty.parent.iterdir()) == [empty] and made._is_intact(empty) and made.library().answer() == 42
