"""Files are complete or absent, also with several writers, and after any interruption."""

import os
from pathlib import Path

import pytest

from patchloom.errors import PatchloomError
from patchloom.system.files import UnsafeFile, append, copy_tree, read_bytes, read_text, remove_leftovers, write_whole


def test_processes_with_the_same_number_do_not_collide(tmp_path, monkeypatch):
    """Two containers that share a disc: each is in the middle of its file when the other one ends."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    path = tmp_path / "shared.bin"

    def slowly(beside: Path) -> None:
        beside.write_bytes(b"one" * 1000)
        write_whole(path, b"two")
        assert path.read_bytes() == b"two" and beside.read_bytes() == b"one" * 1000

    write_whole(path, slowly)
    assert path.read_bytes() == b"one" * 1000 and os.listdir(tmp_path) == ["shared.bin"]


@pytest.mark.parametrize("problem", [KeyboardInterrupt, PatchloomError("gone"), OSError(28, "full"), MemoryError])
def test_no_unfinished_file_remains_after_an_exception(problem, tmp_path):
    path = tmp_path / "file"
    path.write_text("before")

    def failing(beside: Path) -> None:
        beside.write_text("half")
        raise problem

    with pytest.raises(
        PatchloomError if isinstance(problem, OSError) else (KeyboardInterrupt, PatchloomError, MemoryError)
    ):
        write_whole(path, failing)
    assert os.listdir(tmp_path) == ["file"] and path.read_text() == "before"


def test_no_unfinished_file_remains_after_a_second_signal(tmp_path, monkeypatch):
    """Two Ctrl-C: the first one interrupts the writing, the second one the removal."""
    unlink, calls = Path.unlink, []

    def interrupted(path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        unlink(path)

    def failing(beside: Path) -> None:
        beside.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", failing)
    assert os.listdir(tmp_path) == [] and len(calls) == 2


def test_names_of_the_largest_length(tmp_path):
    for name in ("a" * 255, "é" * 127):
        write_whole(tmp_path / name, "whole")
        assert (tmp_path / name).read_text() == "whole"


def test_only_leftovers_of_killed_processes_are_removed(tmp_path):
    there = {".lock", ".gitignore", ".nfs000000000035a1b200000001", "metrics.csv", ".metrics.csv.bak", ".hidden.1a"}
    there |= {".tmp", ".tmpABCDEFG", "tmpABCDEF"}
    for name in there | {
        ".metrics.csv.4711",
        ".tmpx3Yz0Q",
    }:  # names in patchloom until November 2026, and in safetensors
        (tmp_path / name).touch()
    left = []

    def killed(beside: Path) -> None:
        beside.write_text("half")
        left.append(beside.rename(tmp_path / "kept"))
        raise KeyboardInterrupt

    names = []
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "metrics.csv", lambda beside: names.append(beside.name) or killed(beside))
    left[0].rename(tmp_path / names[0])
    remove_leftovers(tmp_path)
    assert set(os.listdir(tmp_path)) == there


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to a device"])
def test_only_regular_files_are_read_and_written(kind, tmp_path):
    path = Path("/dev/zero") if kind == "device" else tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    for follow in (False, True):
        with pytest.raises(UnsafeFile) as caught:
            read_bytes(path, follow=follow)
        assert isinstance(caught.value, PatchloomError) and isinstance(caught.value, OSError)
        assert str(path) in str(caught.value)
    with pytest.raises(PatchloomError):
        append(path, "x")


def test_links_are_followed_only_on_request(tmp_path):
    (tmp_path / "file").write_bytes(b"a\r\nb")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(UnsafeFile, match="link"):
        read_bytes(tmp_path / "link")
    assert read_text(tmp_path / "link", follow=True) == "a\nb"
    assert read_text(tmp_path / "file", newline="") == "a\r\nb"
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")


def test_a_file_has_a_limit_of_bytes(tmp_path):
    path = tmp_path / "sparse"
    path.write_bytes(b"12345")
    assert read_bytes(path, most=5) == b"12345"
    with pytest.raises(UnsafeFile, match="larger"):
        read_bytes(path, most=4)
    os.truncate(path, 2**40)  # takes no space on the disc
    with pytest.raises(UnsafeFile, match="larger"):
        read_bytes(path)


def test_a_copied_folder_holds_regular_files_only(tmp_path):
    (tmp_path / "from" / "deep").mkdir(parents=True)
    for name in ("a.txt", "deep/b.safetensors", "left"):
        (tmp_path / "from" / name).write_text(name)
    (tmp_path / "from" / "link").symlink_to("a.txt")
    (tmp_path / "from" / "up").symlink_to("..")
    os.mkfifo(tmp_path / "from" / "deep" / "pipe")
    os.chmod(tmp_path / "from" / "a.txt", 0o640)
    copy_tree(tmp_path / "from", tmp_path / "to", lambda one: one.name == "left")
    assert sorted(map(str, (path.relative_to(tmp_path / "to") for path in (tmp_path / "to").rglob("*")))) == [
        *("a.txt", "deep", "deep/b.safetensors")
    ]
    assert (tmp_path / "to" / "a.txt").read_text() == "a.txt"
    assert (tmp_path / "to" / "a.txt").stat().st_mode & 0o777 == 0o640
    assert os.path.samefile(tmp_path / "from/deep/b.safetensors", tmp_path / "to/deep/b.safetensors")
