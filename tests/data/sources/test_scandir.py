"""Listing of a folder: hidden files, and the folders of runs and of other programs are left out."""

import tarfile

import numpy as np
import pytest
from PIL import Image

from patchloom.data.sources.open import open_data
from patchloom.data.sources.scandir import images_in
from patchloom.data.splits import hold_out
from patchloom.errors import PatchloomError


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


FOREIGN = (
    "@eaDir/0.png/SYNOPHOTO_THUMB_XL.jpg",
    "#recycle/a.png",
    "$RECYCLE.BIN/S-1/a.png",
    "lost+found/a.png",
    "__MACOSX/a.png",
    "Trip Previews.lrdata/0/a.png",
    "My.photoslibrary/resources/derivatives/a.png",
)


def photographs(root, within=""):
    """Draw 6 different images and their thumbnails; within: a folder around them."""
    for i in range(6):
        for path in (f"{i}.png", f"@eaDir/{i}.png/SYNOPHOTO_THUMB_M.png", f"@eaDir/{i}.png/SYNOPHOTO_THUMB_XL.png"):
            file = root / within / path
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (40 * i, 9, 9)).save(file)


def names_of(source):
    return [source.describe(i) for i in range(len(source))]


@pytest.mark.parametrize("path", FOREIGN)
def test_folders_of_other_programs_are_left_out_with_one_note(tmp_path, path):
    for file in ("0.png", f"a/{path}", "a/1.png"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / file)
    data = open_data(tmp_path)
    assert names_of(data.train) == [str(tmp_path / "0.png"), str(tmp_path / "a/1.png")]
    (note,) = data.notes
    assert note.startswith("1 file") and f"a/{path}" in note
    outer = tmp_path / "a" / path.partition("/")[0]
    if "photoslibrary" not in path:  # named itself, it is data
        assert len(open_data(outer).train) == 1 and not open_data(outer).notes


@pytest.mark.parametrize("data", ["", "*", "**/*.png", "train"])
def test_thumbnails_of_a_store_are_no_photographs(tmp_path, data):
    photographs(tmp_path)
    photographs(tmp_path, "train")
    photographs(tmp_path, "test")
    opened = open_data(str(tmp_path / data))
    splits = [opened.train] if opened.test is None else [opened.train, opened.test]
    assert not any("@eaDir" in name for source in splits for name in names_of(source))
    assert sum(map(len, splits)) == {"": 12, "*": 6, "**/*.png": 18, "train": 6}[data]
    assert sum("other programs" in note for note in opened.notes) == (data != "*")  # which matches no thumbnail


def test_thumbnails_alone_are_named_in_the_refusal(tmp_path):
    photographs(tmp_path)
    for i in range(6):
        (tmp_path / f"{i}.png").unlink()
    with pytest.raises(PatchloomError, match="of its own.*@eaDir"):
        open_data(tmp_path)
    assert len(open_data(str(tmp_path / "@eaDir" / "*" / "*_M.png")).train) == 6
    assert len(open_data(str(tmp_path / "**" / "*_M.png")).train) == 6  # there is nothing else


def test_classes_are_not_the_folders_of_other_programs(tmp_path):
    for word in ("cat", "dog"):
        photographs(tmp_path, word)
    (tmp_path / "@eaDir" / "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "@eaDir" / "cat" / "SYNOINDEX.png")
    train = open_data(tmp_path).train
    assert train.classes == ("cat", "dog") and len(train) == 12


def test_held_out_images_have_no_thumbnail_in_training(tmp_path):
    for i in range(60):
        photograph = np.random.default_rng(i).integers(0, 255, (24, 24, 3), np.uint8)
        Image.fromarray(photograph).save(tmp_path / f"{i}.png")
        (tmp_path / "@eaDir" / f"{i}.png").mkdir(parents=True)
        for size in (8, 16):
            Image.fromarray(photograph).resize((size, size)).save(tmp_path / "@eaDir" / f"{i}.png" / f"{size}.jpg")
    data = open_data(tmp_path)
    training, held = hold_out(data.train, 0.2)[:2]
    stems = [{name.rpartition("/")[2] for name in names_of(some)} for some in (training, held)]
    assert (len(training), len(held), stems[0] & stems[1], len(data.notes)) == (48, 12, set(), 1)


def test_members_of_an_archive_in_folders_of_other_programs_are_left_out(tmp_path):
    photographs(tmp_path / "photos")
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(tmp_path / "photos", "./photos")
    assert len(open_data(str(tmp_path / "photos.tar")).train) == 6
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "photos").rename(tmp_path / "lost+found" / "photos")
    assert len(open_data(tmp_path).train) == 6  # tar files beside such a folder are shards
