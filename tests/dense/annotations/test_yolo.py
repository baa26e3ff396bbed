from pathlib import Path

import numpy as np
import pytest
from labelled import picture
from refusing import refusal

from patchloom.dense.annotations.detection import open_boxes
from patchloom.dense.annotations.yolo import read_yolo

LINE = "1 0.375 0.34375 0.45 0.4375\n"  # 3 2 12 9 of 20 x 16 pixels


def text(path: Path, content: str = LINE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def some(root: Path, images: str = "images", labels: str = "labels", stems: str = "ab") -> None:
    for stem in stems:
        picture(root / images / f"{stem}.jpg")
        text(root / labels / f"{stem}.txt")
    text(root / "classes.txt", "cat\ndog\n")


@pytest.mark.parametrize("where", [("images", "labels"), (".", "."), ("inner/images", "inner/labels"), (".", "labels")])
def test_layouts_without_parts(tmp_path, where):
    some(tmp_path, *where)
    data = open_boxes(tmp_path)
    assert len(data.train) == 2 and data.test is None and data.train.classes == ("cat", "dog")
    truth = data.train.truth(1)
    np.testing.assert_allclose(truth.boxes.numpy(), [[3, 2, 12, 9]], atol=1e-5)
    assert truth.labels.tolist() == [1] and truth.masks is None and truth.crowd.tolist() == [False]
    assert data.notes == ("1 class has no object to train on (cat)",)


@pytest.mark.parametrize("where", ["images/{} labels/{}", "{}/images {}/labels"])
@pytest.mark.parametrize("named", ["no yaml", "folders", "from its own folder", "with a path", "lists", "several"])
def test_layouts_with_parts(tmp_path, where, named):
    root, folder = tmp_path / "set", where.split()[0]
    for part, stems in {"train": "abc", "val": "de", "test": "f"}.items():
        some(root, *where.format(part, part).split(), stems)
        images = sorted((root / folder.format(part)).iterdir())
        text(root / f"{part}.txt", "".join(f"./{image.relative_to(root)}\n" for image in images))
    at = {part: folder.format(part) for part in ("train", "val", "test")}
    places = {
        "folders": at,
        "from its own folder": {part: f"../{place}" for part, place in at.items()},
        "with a path": at | {"path": "../set"},
        "lists": {part: f"{part}.txt" for part in at},
        "several": at | {"train": [at["train"]]},
    }
    if named != "no yaml":
        (root / "classes.txt").unlink()
        lines = "".join(f"{key}: {place}\n" for key, place in places[named].items())
        text(root / "data.yaml", f"names: {{0: cat, 1: dog}}\nnc: 2\n{lines}")
    data = open_boxes(root)
    assert (len(data.train), len(data.validation), len(data.test)) == (3, 2, 1)
    assert data.test.images.place(0) == f"{at['test']}/f.jpg" and data.test.truth(0).labels.tolist() == [1]
    assert data.train.classes == ("cat", "dog") and len(data.notes) == 1


def test_a_yaml_leads_to_images_elsewhere_and_a_missing_part_is_left_out(tmp_path):
    some(tmp_path / "there" / "images" / "..", stems="ab")
    (tmp_path / "there" / "classes.txt").unlink()
    text(tmp_path / "here" / "mine.yaml", "names: [cat, dog]\npath: ../there\ntrain: images\nval: valid/images\n")
    for place in (tmp_path / "here", tmp_path / "here" / "mine.yaml"):
        data = open_boxes(place)
        assert len(data.train) == 2 and data.train.truth(0).labels.tolist() == [1] and data.validation is None
        assert "The part validation is left out" in data.notes[0]


def test_outlines_become_masks_and_boxes(tmp_path):
    some(tmp_path)
    for stem in "ab":
        text(tmp_path / "labels" / f"{stem}.txt", "0 0.15 0.125 0.6 0.125 0.6 0.5625 0.15 0.5625\n")
    truth = open_boxes(tmp_path).train.truth(0)
    np.testing.assert_allclose(truth.boxes.numpy(), [[3, 2, 12, 9]], atol=1e-5)
    assert truth.masks[0, 2:9, 3:12].all() and truth.masks.sum() == 63
    text(tmp_path / "labels" / "b.txt")
    data = open_boxes(tmp_path)
    assert data.train.truth(0).masks is None and "Masks are left out" in data.notes[0]


def test_images_without_text_and_with_an_empty_one_have_no_objects(tmp_path):
    some(tmp_path, stems="abc")
    text(tmp_path / "labels" / "b.txt", "\n")
    (tmp_path / "labels" / "c.txt").unlink()
    data = open_boxes(tmp_path)
    assert [len(data.train.truth(i).labels) for i in range(3)] == [1, 0, 0]
    notes = " | ".join(data.notes)
    assert "1 of 3 images have no text file" in notes and "c.jpg" in notes
    assert "2 of 3 images are without objects" in notes
    for stem in "ab":
        text(tmp_path / "labels" / f"{stem}.txt", "")
    assert "hold no objects" in refusal(open_boxes, tmp_path)


def test_unnamed_classes_are_called_by_their_numbers(tmp_path):
    some(tmp_path)
    (tmp_path / "classes.txt").unlink()
    data = open_boxes(tmp_path)
    assert data.train.classes == ("0", "1") and "has no classes.txt" in data.notes[0]
    text(tmp_path / "a.txt", "2000000 0.5 0.5 0.2 0.2\n")
    assert "line 1, is of class 2000000" in refusal(read_yolo, tmp_path / "a.txt", None)
    (tmp_path / "a.txt").write_bytes(b"\xff")
    assert "cannot be read as text" in refusal(read_yolo, tmp_path / "a.txt", None)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1 0.5 0.5 0.2", "line 2, has 4 numbers"),
        ("1 0.5 0.5 0.2 0.2 0.9", "line 2, has 6 numbers"),
        ("cat 0.5 0.5 0.2 0.2", "line 2, cannot be read: 'cat'"),
        ("2 0.5 0.5 0.2 0.2", "line 2, is of class 2"),
        ("-1 0.5 0.5 0.2 0.2", "line 2, is of class -1"),
        ("0.5 0.5 0.5 0.2 0.2", "line 2, is of class 0.5"),
        ("nan 0.5 0.5 0.2 0.2", "line 2, cannot be read: 'nan'"),
        ("1 0.5 0.5 nan 0.2", "line 2, cannot be read: 'nan'"),
        ("1 10 8 4 4", "line 2, has pixels"),
        ("1 0.5 0.5 0 0.2", "has a box of no area"),
        ("1 0.95 0.5 0.4 0.2", "reaches out of its image"),
    ],
)
def test_bad_lines_are_named_with_their_file(tmp_path, line, said):
    some(tmp_path)
    text(tmp_path / "labels" / "b.txt", f"{LINE}{line}\n")
    found = refusal(open_boxes, tmp_path)
    assert said in found and str(tmp_path / "labels" / "b.txt") in found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("names: [a, b", "cannot be read as YAML"),
        ("names: [a]\n", "it needs names"),
        ("names: [a, a]\ntrain: images", "several classes with the name a"),
        ("names: []\ntrain: images", "no names of classes"),
        ("names: {1: a, 2: b}\ntrain: images", "numbers its names 1, 2"),
        ("names: cat\ntrain: images", "names that are no list"),
        ("nc: 3\nnames: [a, b]\ntrain: images", "nc: 3, and has 2 names"),
        ("names: [a, b]\ntrain: nowhere", "nowhere for train"),
        ("names: [a, b]\ntrain: {a: b}", "no list of folders"),
        ("names: [a, b]\ntrain: images\nval: images", "a.jpg is in two parts, train and validation"),
    ],
)
def test_a_wrong_yaml(tmp_path, content, said):
    some(tmp_path)
    text(tmp_path / "data.yaml", content)
    assert said in refusal(open_boxes, tmp_path / "data.yaml")


def test_names_that_do_not_fit(tmp_path):
    some(tmp_path, stems="abcdefghijklmnopqrstuvwxyz")
    text(tmp_path / "labels" / "alone.txt")
    assert any("1 of 27 text files are left out" in one for one in open_boxes(tmp_path).notes)
    for k in range(3):
        text(tmp_path / "labels" / f"alone{k}.txt")
    assert "alone.txt has no image of its name (4 of 30" in refusal(open_boxes, tmp_path)
    picture(tmp_path / "images" / "a.png")
    assert "a.txt may be of" in refusal(open_boxes, tmp_path)
