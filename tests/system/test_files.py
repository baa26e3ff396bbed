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


@pytest.mark.parametrize(
    ("problem", "raised"),
    [
        (KeyboardInterrupt, KeyboardInterrupt),
        (PatchloomError("gone"), PatchloomError),
        (OSError(28, "full"), PatchloomError),
        (MemoryError, MemoryError),
    ],
)
def test_no_unfinished_file_remains_after_an_exception(problem, raised, tmp_path):
    path = tmp_path / "file"
    path.write_text("before")

    def failing(beside: Path) -> None:
        beside.write_text("half")
        raise problem

    with pytest.raises(raised):
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


def test_only_leftovers_of_killed_processes_are_removed(tmp_path):
    there = {".lock", ".gitignore", ".nfs000000000035a1b200000001", "metrics.csv", ".metrics.csv.bak", ".hidden.1a"}
    there |= {".tmp", ".tmpABCDEFG", "tmpABCDEF", "a" * 255, "é" * 127}  # names of the largest length
    names = []
    for name in there:
        write_whole(tmp_path / name, lambda beside: names.append(beside.name) or beside.write_text("whole"))
    for name in (*names, ".tmpx3Yz0Q"):  # and of safetensors
        (tmp_path / name).write_text("half")
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


def test_links_are_followed_and_large_files_are_read_only_on_request(tmp_path):
    (tmp_path / "file").write_bytes(b"a\r\nb")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(UnsafeFile, match="link"):
        read_bytes(tmp_path / "link")
    assert read_text(tmp_path / "link", follow=True) == "a\nb"
    assert read_text(tmp_path / "file", newline="") == "a\r\nb"
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")
    assert read_bytes(tmp_path / "file", most=4) == b"a\r\nb"
    os.truncate(tmp_path / "link", 2**40)  # takes no space on the disc
    for limit in ({"most": 2**40 - 1}, {}):
        with pytest.raises(UnsafeFile, match="larger"):
            read_bytes(tmp_path / "file", **limit)


def test_a_copied_folder_holds_regular_files_only(tmp_path):
    (tmp_path / "from" / "deep").mkdir(parents=True)
    for name in ("a.txt", "deep/b.safetensors", "left"):
        (tmp_path / "from" / name).write_text(name)
    (tmp_path / "from" / "link").symlink_to("a.txt")
    (tmp_path / "from" / "up").symlink_to("..")
    os.mkfifo(tmp_path / "from" / "deep" / "pipe")
    os.chmod(tmp_path / "from" / "a.txt", 0o640)
    to = tmp_path / "to"
    copy_tree(tmp_path / "from", to, lambda one: one.name == "left")
    assert {str(path.relative_to(to)) for path in to.rglob("*")} == {"a.txt", "deep", "deep/b.safetensors"}
    assert (to / "a.txt").read_text() == "a.txt" and (to / "a.txt").stat().st_mode & 0o777 == 0o640
    assert os.path.samefile(tmp_path / "from/deep/b.safetensors", to / "deep/b.safetensors")
