from __future__ import annotations

import hashlib
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchloom.data.decode import Unreadable, read_image
from patchloom.data.sources.files import PackedStrings
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes
from patchloom.errors import PatchloomError


def names(source, root):
    return [os.path.relpath(source.describe(i), root) for i in range(len(source))]


def test_a_flat_folder_has_no_labels(tmp_path, draw):
    for name in ("b.png", "a.PNG", ".hidden.png", ".cache/c.png", "deep/er/d.png"):
        draw(name)
    (tmp_path / "notes.md").write_text("x")
    data = open_data(str(tmp_path))
    assert names(data.train, tmp_path) == ["a.PNG", "b.png", "deep/er/d.png"]
    assert data.test is None and data.train.labels is None and data.train.classes == ()
    assert data.train.name == str(tmp_path)
    assert torch.equal(data.train.read(1), read_image(tmp_path / "b.png"))


def test_sub_folders_are_classes(tmp_path, draw):
    for name in ("dog/1.png", "cat/x/2.png", "cat/3.png"):
        draw(name)
    (tmp_path / "empty").mkdir()
    train = open_data(tmp_path).train
    assert train.classes == ("cat", "dog") and train.labels.tolist() == [0, 0, 1] and train.labels.dtype == np.int64


@pytest.mark.parametrize("also", ["beside.png", None])
def test_one_sub_folder_or_images_beside_them_make_no_classes(tmp_path, draw, also):
    draw("cat/1.png")
    if also:
        draw("dog/1.png")
        draw(also)
    assert open_data(tmp_path).train.labels is None


@pytest.mark.parametrize("split", ["test", "val", "validation"])
def test_splits(tmp_path, draw, split):
    for name in ("train/a/1.png", "train/b/1.png", "train/c/1.png", f"{split}/c/2.png"):
        draw(name)
    data = open_data(tmp_path)
    assert len(data.train) == 3 and len(data.test) == 1
    assert data.test.classes == data.train.classes == ("a", "b", "c") and data.test.labels.tolist() == [2]
    draw(f"{split}/z/1.png")
    with pytest.raises(PatchloomError, match=f"class z in {split} but not in train"):
        open_data(tmp_path)


def test_splits_without_labels(tmp_path, draw):
    draw("train/1.png")
    draw("test/a/1.png")
    draw("test/b/1.png")
    data = open_data(tmp_path)
    assert data.train.labels is None and data.test.labels is None and len(data.test) == 2


def test_train_alone_is_an_ordinary_folder(tmp_path, draw):
    draw("train/1.png")
    data = open_data(tmp_path)
    assert len(data.train) == 1 and data.test is None


def test_symlink_loops_end(tmp_path, draw):
    draw("a/1.png")
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    (tmp_path / "a" / "self").symlink_to(tmp_path / "a")
    assert names(open_data(tmp_path).train, tmp_path) == ["a/1.png"]


def test_list_file(tmp_path, draw):
    a, b = draw("in/a.png"), draw("b.png")
    (tmp_path / "list.txt").write_text(f"# mine\n\nin/a.png\tcat\n{b}\tdog\ngone.png\n")
    train = open_data(tmp_path / "list.txt").train
    assert train.classes == ("cat", "dog") and train.labels.tolist() == [0, 1, -1]
    assert torch.equal(train.read(0), read_image(a)) and torch.equal(train.read(1), read_image(b))
    with pytest.raises(Unreadable, match="gone.png"):
        train.read(2)
    (tmp_path / "list.txt").write_text("b.png\n")
    assert open_data(tmp_path / "list.txt").train.labels is None


def test_errors_say_what_to_do(tmp_path, draw):
    def refused(data, match):
        with pytest.raises(PatchloomError, match=match) as caught:
            open_data(data)
        assert "\n" not in str(caught.value)

    refused(tmp_path, "empty folder")
    (tmp_path / "a.mp4").touch()
    (tmp_path / "README").touch()
    refused(tmp_path, r"no images.*\.mp4.*no suffix.*\.jpg")
    refused(tmp_path / "gone", "does not exist: give a folder")
    refused("cifar-10", "did you mean the built-in data cifar10")
    refused("shape:200", "did you mean the built-in data shapes")
    refused(draw("one.png"), "single image")
    (tmp_path / "list.txt").write_text("x.png\ny.png\n")
    refused(tmp_path / "list.txt", "none of the 2 files.*x.png")
    (tmp_path / "list.txt").write_text("# nothing\n")
    refused(tmp_path / "list.txt", "lists no images")
    (tmp_path / "list.bin").write_bytes(b"\xff\xfe\x00\xd8")
    refused(tmp_path / "list.bin", "not text")
    refused("shapes:many", "whole number")
    refused("shapes:0", "at least 1")


def test_a_name_wins_over_a_folder_unless_it_is_a_path(tmp_path, draw, monkeypatch):
    draw("digits/1.png")
    monkeypatch.chdir(tmp_path)
    assert len(open_data("digits").train) == 1437
    assert len(open_data("./digits").train) == 1


def test_fingerprint_follows_the_content(tmp_path, draw):
    path = draw("a/1.png")
    draw("a/2.png")
    first = open_data(tmp_path).train.fingerprint()
    assert open_data(tmp_path).train.fingerprint() == first
    os.utime(path, (1, 1))
    second = open_data(tmp_path).train.fingerprint()
    path.rename(tmp_path / "a/3.png")
    third = open_data(tmp_path).train.fingerprint()
    assert len({first, second, third}) == 3
    shutil.copytree(tmp_path / "a", tmp_path / "moved" / "a")
    shutil.rmtree(tmp_path / "a")
    assert open_data(tmp_path / "moved").train.fingerprint() == third
    prints = [Shapes(*args).fingerprint() for args in ((5, 0, 64), (6, 0, 64), (5, 1, 64), (5, 0, 32), (5, 0, 64, 9))]
    assert len(set(prints)) == 5
    assert Shapes(5).subset([0, 1]).fingerprint() != Shapes(5).subset([1, 0]).fingerprint()


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


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)))
def test_packed_strings(names):
    kept = pickle.loads(pickle.dumps(PackedStrings(names)))
    assert list(kept) == names == [kept[i] for i in range(len(kept))]
    with pytest.raises(IndexError):
        kept[len(names)]


def test_subset_and_pickling():
    shapes = Shapes(20)
    part = pickle.loads(pickle.dumps(shapes.subset([5, 2]).subset([1])))
    assert len(part) == 1 and part.describe(0) == "shapes #2" and part.labels.tolist() == [shapes.labels[2]]
    assert torch.equal(part.read(0), shapes.read(2))
