"""Listing of a folder: hidden files and the folders of runs are left out."""

import pytest
from PIL import Image

from patchloom.data.sources.open import open_data
from patchloom.data.sources.scandir import images_in


def test_hidden_files_are_skipped_and_names_need_not_be_text(tmp_path):
    for name in ("b/c/2.png", "b/c/\udcff.png", "b/text.txt", "a/ü.jpg", "a/1.png", ".hidden/3.png", "a/.4.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert list(images_in(tmp_path, "photos")) == ["a/1.png", "a/ü.jpg", "b/c/2.png", "b/c/\udcff.png"]


@pytest.mark.parametrize("split", ["", "train/"])
@pytest.mark.parametrize("files", [("requested.yaml", "config.yaml"), ("compare.yaml", "comparison.csv")])
def test_pictures_of_a_run_are_not_data(tmp_path, split, files):
    for path in ("a.png", f"{split}b.png", "test/c.png" if split else "c.png", "runs/own/pictures/1.png"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / path)
    before = open_data(tmp_path)
    for file in files:
        assert open_data(tmp_path).notes == before.notes  # one of the two files alone does not make a run
        (tmp_path / "runs" / "own" / file).write_text("")
    after = open_data(tmp_path)
    assert len(after.train) == (1 if split else 3)
    assert any("run" in note and "runs/own" in note and note.startswith("1 file") for note in after.notes)
    assert not any(after.train.describe(i).endswith("1.png") for i in range(len(after.train)))
    assert len(open_data(tmp_path / "runs" / "own").train) == 1  # named itself, it is data
