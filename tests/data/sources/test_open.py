import hashlib
import os
import pickle
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused

from patchloom.data.decode import read_image
from patchloom.data.sources.files import PackedStrings
from patchloom.data.sources.open import open_data


def names(source, root):
    return [os.path.relpath(source.describe(i), root) for i in range(len(source))]


LAYOUTS = {  # files of a folder, with the numbers of their classes; those of the test
    "flat": ({"a.PNG": None, "b.png": None, "deep/er/d.png": None}, {}),
    "classes": ({"cat/3.png": 0, "cat/x/2.png": 0, "dog/1.png": 1}, {}),
    "one sub-folder": ({"cat/1.png": None}, {}),
    "one beside": ({"beside.png": None, "cat/1.png": None, "dog/1.png": None}, {}),
    "train alone": ({"train/1.png": None}, {}),
    **{
        split: ({"train/a/1.png": 0, "train/b/1.png": 1, "train/c/1.png": 2}, {f"{split}/c/2.png": 2})
        for split in ("test", "val", "validation")
    },
    "COCO": ({"train2017/a/1.png": 0, "train2017/b/1.png": 1}, {"val2017/b/2.png": 1}),
    "classes of the test alone": ({"train/1.png": None}, {"test/a/1.png": None, "test/b/1.png": None}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_and_classes_of_a_folder(tmp_path, draw, layout):
    train, test = LAYOUTS[layout]
    for name in (*train, *test, ".hidden.png", ".cache/c.png", "@eaDir/cat/INDEX.png"):
        draw(name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "empty" / "back").symlink_to(tmp_path)
    data = open_data(str(tmp_path))
    assert (data.test is not None) == bool(test) and data.train.name == str(tmp_path)
    for source, expected in ((data.train, train), (data.test, test)):
        if expected:
            assert names(source, tmp_path) == [*expected]
            labels = None if source.labels is None else source.labels.tolist()
            assert labels == (None if None in expected.values() else [*expected.values()])
            assert torch.equal(source.read(0), read_image(tmp_path / [*expected][0]))
    kinds = {name.split("/")[-2] for name in train if None not in train.values() and "/x/" not in name}
    assert data.train.classes == tuple(sorted(kinds))


def test_errors_say_what_to_do(tmp_path, draw, monkeypatch):
    refused(tmp_path, "empty folder")
    (tmp_path / "a.mp4").touch()
    (tmp_path / "README").touch()
    refused(tmp_path, r"no images.*\.mp4.*no suffix.*\.jpg")
    refused(tmp_path / "gone", "does not exist")
    refused("cifar-10", "did you mean the built-in data cifar10")
    refused("shape:200", "did you mean the built-in data shapes")
    refused(draw("digits/one.png"), "single image")
    for content, word in ((b"x.png\ny.png\n", "none of the 2 files.*x.png"), (b"# nothing\n", "lists no images")):
        (tmp_path / "list.txt").write_bytes(content)
        refused(tmp_path / "list.txt", word)
    (tmp_path / "list.bin").write_bytes(b"\xff\xfe\x00\xd8")
    refused(tmp_path / "list.bin", "not text")
    refused("shapes:many", "whole number")
    refused("shapes:0", "at least 1")
    for name in ("train/a/1.png", "train/b/1.png", "val/a/1.png", "val/z/1.png"):
        draw(f"split/{name}")
    refused(tmp_path / "split", "class z in val but not in train")
    monkeypatch.chdir(tmp_path)  # a name wins over a folder unless it is a path
    assert len(open_data("digits").train) == 1437 and len(open_data("./digits").train) == 1


def test_the_fingerprint_of_files_is_made_of_these_parts(tmp_path, draw):
    """Runs are resumed by the fingerprint, so it must never change."""
    for name in ("b/2.png", "a/é.png", "a/1.JPG", "b/c/1.png"):
        draw(name.replace("JPG", "png")).rename(tmp_path / name)
    strange = os.fsdecode(b"a/\xff.png")
    shutil.copy(tmp_path / "b/2.png", tmp_path / strange)
    (tmp_path / "list.txt").write_text(f"b/2.png\tx\n{tmp_path / 'a/1.JPG'}\ty\ngone.png\n")
    expected = {}
    for data, labels in {
        tmp_path: {"a/1.JPG": 0, "a/é.png": 0, strange: 0, "b/2.png": 1, "b/c/1.png": 1},
        tmp_path / "list.txt": {"b/2.png": 0, str(tmp_path / "a/1.JPG"): 1, "gone.png": -1},
    }.items():
        known = {path: os.stat(tmp_path / path) for path in labels if path != "gone.png"}
        told = {path: f"{stat.st_size}\t{stat.st_mtime_ns}" for path, stat in known.items()}
        paths = sorted(labels) if data == tmp_path else labels
        rows = [f"{path}\t{told.get(path, '-1' + chr(9) + '-1')}\t{labels[path]}" for path in paths]
        classes = ["a", "b"] if data == tmp_path else ["x", "y"]
        content = b"".join(part.encode("utf-8", "surrogateescape") + b"\0" for part in [*classes, *rows])
        expected[data] = hashlib.sha256(content).hexdigest()[:16]
    assert {data: open_data(data).train.fingerprint() for data in expected} == expected


@pytest.mark.parametrize("folder", [".", "./", "in", "in/", "in/../in"])
def test_paths_are_relative_to_the_folder_however_it_is_written(tmp_path, draw, monkeypatch, folder):
    draw("in/a/1.png")
    draw("in/2.png")
    root = tmp_path / "in"
    monkeypatch.chdir(root if folder.startswith(".") else tmp_path)
    source = open_data(f"./{folder}").train
    assert list(source.paths) == ["2.png", "a/1.png"]
    assert torch.equal(source.read(1), read_image(root / "a" / "1.png"))


@settings(max_examples=40)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)))
def test_packed_strings(names):
    kept = pickle.loads(pickle.dumps(PackedStrings(names)))
    assert list(kept) == names == [kept[i] for i in range(len(kept))]
    with pytest.raises(IndexError):
        kept[len(names)]
