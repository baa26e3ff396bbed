"""Notes on files and splits of a folder that a run does not read, or reads in an unexpected way."""

import pytest
from refusing import refused

from patchloom.data import decode
from patchloom.data.sources import scandir
from patchloom.data.sources.open import open_data
from patchloom.data.sources.scandir import list_files, some_images


@pytest.fixture
def without_extras(monkeypatch):
    monkeypatch.setattr(scandir, "IMAGE_SUFFIXES", decode.IMAGE_SUFFIXES - set(decode.EXTRAS))


def holding(draw, **counts):
    for folder, count in counts.items():
        for i in range(count):
            draw(f"{folder}/{folder}{i}.png")


@pytest.mark.parametrize("case", [str.lower, str.title, str.upper])
def test_further_splits_are_left_out_and_counted(tmp_path, draw, case):
    holding(draw, **{case(name): count for name, count in {"train": 5, "val": 3, "test": 2}.items()})
    (tmp_path / "README.md").touch()
    data = open_data(tmp_path)
    assert (len(data.train), len(data.test)) == (5, 2) and data.train.labels is None
    train, val, test = map(case, ("train", "val", "test"))
    (note,) = data.notes
    assert note.startswith(f"Of 10 images, {train} (5) is trained on, {test} (2) is the test, and {val} (3) is neither")
    holding(draw, extra=3)
    draw("beside.png")
    (tmp_path / "clip.mp4").touch()
    note, other = open_data(tmp_path).notes
    assert "extra (3)" in note and "the folder itself (1)" in note
    assert other.startswith("1 file was left out") and "1 .mp4 (@fps=1 after the name reads frames) (clip.mp4)" in other


def test_splits_in_another_folder(tmp_path, draw):
    for folder, count in {"train": 5, "valid": 3}.items():
        for kind in "ab":
            for i in range(count):
                draw(f"images/{folder}/{kind}/{i}.png")
    data = open_data(tmp_path)
    assert data.train.classes == data.test.classes == ("a", "b") and (len(data.train), len(data.test)) == (10, 6)
    (note,) = data.notes
    assert note.startswith("images/valid (6) is the test")
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
    (note,) = data.notes
    assert "not used as splits" in note and "(bottle, cable)" in note


def test_formats_that_are_not_read_are_counted(tmp_path, draw, without_extras):
    draw("a/1.png")
    names = (
        "a/1.HEIC",
        "a/2.heic",
        "b/3.heic",
        "b/1.dcm",
        "film.mp4",
        "more.zip",
        "notes.txt",
        ".hidden.heic",
        "x.xml",
    )
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    data = open_data(tmp_path)
    assert len(data.train) == 1
    (note,) = data.notes
    assert note.startswith("6 files were left out") and "1 .mp4" in note and "1 .zip (unpack to read)" in note
    assert "3 .heic (pip install 'pillow-heif" in note and "1 .dcm (pip install 'pydicom" in note
    (tmp_path / "train").mkdir()
    (tmp_path / "a").rename(tmp_path / "train" / "a")
    draw("test/2.png")
    (tmp_path / "test" / "one.svg").touch()
    notes = open_data(tmp_path).notes
    assert any("1 .svg" in note and "3 .heic" in note and "1 .mp4" in note for note in notes)
    for name, word in (("1.dcm", r"\.dcm \(pip install 'pydicom"), ("1.zip", r"\.zip \(unpack to read\)")):
        (tmp_path / name[2:]).mkdir()
        (tmp_path / name[2:] / name).touch()
        refused(tmp_path / name[2:], f"holds no images.*{word}")


# Listing: hidden files, and the folders of runs and of other programs are left out.


def test_hidden_files_are_skipped_and_names_need_not_be_text(tmp_path):
    for name in ("b/c/2.png", "b/c/\udcff.png", "b/text.txt", "a/ü.jpg", "a/1.png", ".hidden/3.png", "a/.4.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert list(some_images(list_files(tmp_path), "photos").paths) == [
        "a/1.png",
        "a/ü.jpg",
        "b/c/2.png",
        "b/c/\udcff.png",
    ]


@pytest.mark.parametrize("split", ["", "train/"])
@pytest.mark.parametrize("files", [("requested.yaml", "config.yaml"), ("compare.yaml", "summary.txt")])
def test_pictures_of_a_run_are_not_data(tmp_path, draw, split, files):
    for path in ("a.png", f"{split}b.png", "test/c.png" if split else "c.png", "runs/own/pictures/1.png"):
        draw(path)
    before = open_data(tmp_path)
    for file in files:
        assert open_data(tmp_path).notes == before.notes  # one of the two files alone does not make a run
        (tmp_path / "runs" / "own" / file).write_text("")
    after = open_data(tmp_path)
    assert len(after.train) == (1 if split else 3)
    assert any("run" in note and "runs/own" in note and note.startswith("1 file") for note in after.notes)
    assert not any(name.endswith("1.png") for name in names_of(after.train))
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


def names_of(source):
    return [source.describe(i) for i in range(len(source))]


@pytest.mark.parametrize("path", FOREIGN)
def test_folders_of_other_programs_are_left_out_with_one_note(tmp_path, draw, path):
    for file in ("0.png", f"a/{path}", "a/1.png"):
        draw(file)
    data = open_data(tmp_path)
    assert names_of(data.train) == [str(tmp_path / "0.png"), str(tmp_path / "a/1.png")]
    (note,) = data.notes
    assert note.startswith("1 file") and f"a/{path}" in note
    outer = tmp_path / "a" / path.partition("/")[0]
    if "photoslibrary" not in path:  # named itself, it is data
        assert len(open_data(outer).train) == 1 and not open_data(outer).notes


@pytest.mark.parametrize("data", ["", "*", "**/*.png", "train"])
def test_thumbnails_of_a_store_are_no_photographs(tmp_path, draw, data):
    for folder in ("", "train/", "test/"):
        for i in range(6):
            for path in (f"{i}.png", f"@eaDir/{i}.png/SYNOPHOTO_THUMB_M.png", f"@eaDir/{i}.png/SYNOPHOTO_THUMB_XL.png"):
                draw(folder + path)
    opened = open_data(str(tmp_path / data))
    splits = [opened.train] if opened.test is None else [opened.train, opened.test]
    assert not any("@eaDir" in name for source in splits for name in names_of(source))
    assert sum(map(len, splits)) == {"": 12, "*": 6, "**/*.png": 18, "train": 6}[data]
    assert sum("other programs" in note for note in opened.notes) == (data != "*")  # which matches no thumbnail
    for path in tmp_path.glob("train/*.png"):
        path.unlink()
    refused(tmp_path / "train", "of its own.*@eaDir")
    for pattern in ("@eaDir/*/*_M.png", "**/*_M.png"):  # there is nothing else
        assert len(open_data(str(tmp_path / "train" / pattern)).train) == 6
