"""The list of unreadable files: one line per name, for any name, and lists of older versions."""

import pytest

from patchloom.runs.folder import RunFolder, line_of, name_in

HARD = ["two\nlines.png", "a\r.png", "a\u2028b.png", "a\x85.png", '"quoted".png', '"', "", "two\n\udcff.png"]
PLAIN = ["plain.png", "back\\nslash.png", "C:\\new\\x.png", "\udcff.png", 'in "quotes".png', "äö.png"]


@pytest.mark.parametrize("name", HARD + PLAIN)
def test_a_name_is_one_line_and_comes_back(name):
    line = line_of(name)
    assert line.splitlines() == [line] and name_in(line) == name
    assert (line == name) == (name in PLAIN)


def test_a_list_is_counted_by_names(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.lock()
    folder.note_unreadable(HARD)
    folder.note_unreadable(PLAIN + HARD[:2])
    assert sorted(folder.unreadable_names()) == sorted(HARD + PLAIN)
    assert len(folder.unreadable.read_bytes().splitlines()) == len(HARD + PLAIN)


def test_a_list_of_an_older_version_is_read(tmp_path):
    folder = RunFolder(tmp_path)
    names = ["a\\nb.png", "C:\\new.png", '"half.png', '"a" and "b".png', "\udcff.png"]
    folder.unreadable.write_bytes("".join(f"{name}\n" for name in names).encode("utf-8", "surrogateescape"))
    assert folder.unreadable_names() == names
