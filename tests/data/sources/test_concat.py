import os
import pickle
import shutil

import pytest
import torch
from refusing import refused

from patchloom.data.decode import read_image
from patchloom.data.sources.concat import split_commas
from patchloom.data.sources.open import absolute_name, open_data
from patchloom.data.splits import hold_out


@pytest.fixture
def folders(draw, tmp_path, monkeypatch):
    """Two folders with equal file names: one has a test split and classes, the other has other classes."""
    for name in ("train/cat/1.png", "train/dog/1.png", "train/dog/2.png", "test/dog/1.png"):
        draw(f"a/{name}")
    for name in ("dog/1.png", "owl/1.png"):
        draw(f"b/{name}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_several_folders_are_one_source(folders, draw):
    data = open_data(["a", "b"])
    train, parts = data.train, [open_data(name).train for name in "ab"]
    assert len(train) == 5 and train.classes == ("cat", "dog", "owl") and train.labels.tolist() == [0, 1, 1, 1, 2]
    assert [train.describe(i) for i in range(5)] == [part.describe(i) for part in parts for i in range(len(part))]
    for i in range(5):
        assert torch.equal(train.read(i), read_image(train.describe(i)))
    assert len(data.test) == 1 and data.test.classes == train.classes and data.test.labels.tolist() == [1]
    (note,) = data.notes
    assert note.startswith("b: no test images")
    assert train.name == "a,b" and pickle.loads(pickle.dumps(train)).labels.tolist() == train.labels.tolist()
    draw("c/1.png")
    data = open_data(["c", "b"])
    assert data.train.labels.tolist() == [-1, 0, 1] and data.notes[0].startswith("c: images without labels")
    assert open_data(["c", "a/test"]).train.labels is None


def test_splits_for_validation_are_one_source_too(folders, draw):
    for name in ("a/val/dog/3.png", "c/train/owl/1.png", "c/train/cat/1.png", "c/test/owl/2.png", "c/val/owl/3.png"):
        draw(name)
    val = open_data(["a", "b", "c"]).others["val"]
    assert [os.path.relpath(val.describe(i)) for i in range(2)] == ["a/val/dog/3.png", "c/val/owl/3.png"]
    assert [val.classes[label] for label in val.labels] == ["dog", "owl"]


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (["a", "./a"], "./a and a are the same"),
        (["a", "a/train"], "a/train lies within a"),
        ("a,gone", "gone does not exist"),
        (["a", "\0"], "does not exist"),
        *((nothing, "the data has no name") for nothing in ("", " ", [""], ["a", " "])),
    ],
)
def test_the_same_images_twice_and_no_name_are_refused(folders, names, word):
    refused(names, word)


def test_commas_split_a_text_but_no_path_address_or_pattern(folders, draw, monkeypatch):
    assert len(open_data("a,b").train) == 5 and len(open_data("a/, shapes:3 ").train) == 6
    draw("x,y/1.png")
    assert len(open_data("x,y").train) == 1 and len(open_data(["x,y", "b"]).train) == 3
    assert absolute_name("x,y") == str(folders / "x,y")
    assert absolute_name(["x,y", "b"]) == [str(folders / "x,y"), str(folders / "b")]
    for address in ("s3://bucket/a,b.tar", "pipe:cat a,b"):
        assert absolute_name(address) == address
    assert split_commas("a,b-{0,1}.tar,c") == ["a", "b-{0,1}.tar", "c"] and split_commas("{a,b}") == ["{a,b}"]
    kept = absolute_name("a,shapes:3,b")
    assert kept == [str(folders / "a"), "shapes:3", str(folders / "b")] and absolute_name(["a"]) == str(folders / "a")
    monkeypatch.chdir("/")
    assert len(open_data(kept).train) == 8 and absolute_name(kept) == kept


def test_groups_of_the_sources_are_distinct(folders, tmp_path):
    (tmp_path / "m.csv").write_text("path,group\na/train/cat/1.png,x\na/train/dog/1.png,x\n")
    groups = open_data(["m.csv", "b"]).train.groups
    assert groups[0] == groups[1] and len(set(groups.tolist())) == 3
    held = hold_out(open_data(["m.csv", "b"]).train, 0.5)[1]
    assert len(held) == 2
    assert open_data(["a", "b"], group="parent").train.groups.tolist() == [0, 1, 1, 2, 3]


@pytest.fixture
def cells(draw, tmp_path, monkeypatch):
    """A folder of ten images, and a table with labels of nine of them: six train, two test, one val."""
    for i in range(10):
        draw(f"cells/{i}.png")
    splits = ["train"] * 6 + ["test"] * 2 + ["val"]
    rows = [f"cells/{i}.png,{'bad' if i % 2 else 'good'},{split}" for i, split in enumerate(splits)]
    (tmp_path / "cells.csv").write_text("\n".join(["file,label,split", *rows]) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stems(source):
    return sorted(os.path.basename(source.describe(i))[:-4] for i in range(len(source)))


@pytest.mark.parametrize("order", [["cells", "cells.csv"], ["cells.csv", "cells"], ["cells.csv", "cells/*.png"]])
def test_a_folder_and_a_table_of_the_same_images(cells, order):
    data = open_data(order)
    assert stems(data.train) == [*"0123459"] and stems(data.test) == ["6", "7"] and stems(data.others["val"]) == ["8"]
    assert sorted(data.train.labels.tolist()) == [-1, 0, 0, 0, 1, 1, 1]  # those of the table stay
    notes = " | ".join(data.notes)
    assert "3 of 10 images of cells" in notes and "split of cells.csv (" in notes and "6.png" in notes
    assert "6 images are given by several of the sources" in notes
    (cells / "cells" / "9.png").unlink()  # nothing new is left in the folder
    data = open_data(order)
    assert stems(data.train) == [*"012345"] and data.train.labels.min() == 0
    assert not any("without labels" in note for note in data.notes)


def test_links_are_the_same_file_and_copies_are_not(cells):
    os.makedirs("linked")
    os.symlink("../cells/0.png", "linked/a.png")
    os.link("cells/6.png", "linked/b.png")
    shutil.copy("cells/1.png", "linked/c.png")
    assert stems(open_data(["cells.csv", "linked"]).train) == [*"012345", "c"]  # copies are found by holding out
    os.link("linked/c.png", "linked/d.png")  # both are of one source, as without the table
    assert stems(open_data(["cells.csv", "linked"]).train)[-2:] == ["c", "d"]
    (cells / "only.csv").write_text("file,split\ncells/6.png,train\n")
    (cells / "others.csv").write_text("file,split\ncells/7.png,train\ncells/6.png,test\n")
    (cells / "third.csv").write_text("file,split\ncells/6.png,train\ncells/7.png,test\n")
    refused(["only.csv", "others.csv", "third.csv"], "leaves no images to train on")
    assert open_data(["shapes:3", "cells.csv"]).train.subset([0, 3]).describe(0) == "shapes:3 #0"
