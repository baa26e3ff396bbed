"""Notes on files and splits of a folder that a run does not read, or reads in an unexpected way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from patchloom.data import decode
from patchloom.data.sources import scandir
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import only_labelled


@pytest.fixture
def without_extras(monkeypatch):
    """Neither pillow-heif nor pydicom is installed."""
    monkeypatch.setattr(scandir, "IMAGE_SUFFIXES", decode.IMAGE_SUFFIXES - set(decode.EXTRAS))


def holding(draw, **counts):
    for folder, count in counts.items():
        for i in range(count):
            draw(f"{folder}/{folder}{i}.png")


def test_no_notes_if_all_files_are_used(tmp_path, draw):
    holding(draw, train=4, test=2)
    (tmp_path / "README.md").touch()
    assert open_data(tmp_path).notes == ()


@pytest.mark.parametrize("case", [str.lower, str.title, str.upper])
def test_further_splits_are_left_out_and_counted(tmp_path, draw, case):
    holding(draw, **{case(name): count for name, count in {"train": 5, "val": 3, "test": 2}.items()})
    data = open_data(tmp_path)
    assert (len(data.train), len(data.test)) == (5, 2) and data.train.labels is None
    train, val, test = map(case, ("train", "val", "test"))
    assert data.notes == (
        f"Of 10 images, {train} (5) is trained on, {test} (2) is the test, and {val} (3) is neither: choose between "
        f"runs by it, or move it into {train} to train on it",
    )


def test_other_folders_beside_the_splits_are_counted(tmp_path, draw):
    holding(draw, train=5, test=2, extra=3)
    draw("beside.png")
    (tmp_path / "clip.mp4").touch()
    note, other = open_data(tmp_path).notes
    assert other == "1 file was left out, in formats that are not read: 1 .mp4 (clip.mp4)"
    assert "and extra (3) and the folder itself (1) are neither: choose between runs by them" in note


def test_splits_in_another_folder(tmp_path, draw):
    for folder, count in {"train": 5, "valid": 3}.items():
        for kind in "ab":
            for i in range(count):
                draw(f"images/{folder}/{kind}/{i}.png")
    data = open_data(tmp_path)
    assert data.train.classes == data.test.classes == ("a", "b") and (len(data.train), len(data.test)) == (10, 6)
    assert data.notes == ("images/valid (6) is the test, since no folder is called test",)
    draw("samples/1.png")
    draw("images/2.png")
    data = open_data(tmp_path)
    assert (len(data.train), len(data.test)) == (10, 6)
    assert "Of 18 images" in data.notes[0] and "images itself (1) and other folders (1) are neither" in data.notes[0]


def test_splits_in_several_folders_are_not_used(tmp_path, draw):
    for kind in "bottle", "cable":
        for split in "train", "test":
            draw(f"{kind}/{split}/{kind}{split}.png")
    data = open_data(tmp_path)
    assert data.test is None and data.train.classes == ("bottle", "cable") and len(data.train) == 4
    assert data.notes == (
        "Train and test within several folders are not used as splits: all are trained on (bottle, cable)",
    )


def test_formats_that_are_not_read_are_counted(tmp_path, draw, without_extras):
    draw("a/1.png")
    for name in ("a/1.HEIC", "a/2.heic", "b/3.heic", "b/1.dcm", "film.mp4", "notes.txt", ".hidden.heic", "x.xml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    data = open_data(tmp_path)
    assert len(data.train) == 1
    assert data.notes == (
        "5 files were left out, in formats that are not read: 3 .heic (pip install 'pillow-heif>=0.22' to read them), "
        "1 .dcm (pip install 'pydicom>=3' to read them), 1 .mp4 (such as a/1.HEIC, a/2.heic, b/1.dcm)",
    )
    (tmp_path / "train").mkdir()
    (tmp_path / "a").rename(tmp_path / "train" / "a")
    draw("test/2.png")
    (tmp_path / "test" / "one.svg").touch()
    notes = open_data(tmp_path).notes
    assert any("1 .svg" in note and "3 .heic" in note and "1 .mp4" in note for note in notes)


def test_a_folder_with_nothing_else_says_what_to_install(tmp_path, without_extras):
    (tmp_path / "1.dcm").touch()
    with pytest.raises(PatchloomError, match=r"holds no images.*\.dcm \(pip install 'pydicom>=3' to read them"):
        open_data(tmp_path)


def test_one_class_folder_and_none_have_different_reasons(tmp_path, draw):
    draw("cat/1.png")
    with pytest.raises(
        PatchloomError, match=r"labels are the names of sub-folders, and there is only one \(cat\), so put"
    ):
        only_labelled(open_data(tmp_path).train.subset([0]))
    draw("dog/2.png")
    assert only_labelled(open_data(tmp_path).train).classes == ("cat", "dog")
    draw("beside.png")
    with pytest.raises(PatchloomError, match=r"but beside.png lies outside of them, so put"):
        only_labelled(open_data(tmp_path).train)
    draw("train/3.png")
    draw("test/3.png")
    with pytest.raises(
        PatchloomError, match="has no labels: put the images .*, or give a table with a column of labels$"
    ):
        only_labelled(open_data(tmp_path).train)


def test_names_that_are_not_unicode_can_be_printed(tmp_path, draw, capsys):
    if sys.platform == "darwin":
        pytest.skip("its file systems take no such names")
    draw("1.png")
    Path(str(tmp_path / "bad\udcff.mp4")).touch()
    (note,) = open_data(tmp_path).notes
    print(note)
    assert r"bad\udcff.mp4" in capsys.readouterr().out


def test_archives_beside_images_are_named(tmp_path, draw):
    for name in ("a.png", "b.png"):
        draw(name)
    (tmp_path / "more.zip").write_bytes(b"PK")
    (note,) = open_data(tmp_path).notes
    assert "1 .zip (unpack to read)" in note and "more.zip" in note
    for name in ("a.png", "b.png"):
        (tmp_path / name).unlink()
    with pytest.raises(PatchloomError, match=r"holds no images, only files of other types \(.zip \(unpack to read\)\)"):
        open_data(tmp_path)
