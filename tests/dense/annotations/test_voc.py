from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.dense.annotations.detection import open_boxes
from patchloom.errors import PatchloomError

BOX = (3, 2, 12, 9)  # x0 y0 x1 y1, exclusive


def picture(path: Path, size: tuple[int, int] = (20, 16)) -> None:
    """An image of (w, h) pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0], 3), 90, np.uint8)).save(path)


def xml(path: Path, *objects: tuple[str, tuple[float, ...]], size: tuple[int, int] = (20, 16), more: str = "") -> None:
    """An annotation with boxes as VOC counts: from 1, the last pixel included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    inside = "".join(
        f"<object><name>{name}</name>{more}<bndbox><xmin>{x0 + 1}</xmin><ymin>{y0 + 1}</ymin>"
        f"<xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
        for name, (x0, y0, x1, y1) in objects
    )
    path.write_text(
        f"<annotation><filename>{path.stem}.png</filename><size><width>{size[0]}</width><height>{size[1]}</height>"
        f"<depth>3</depth></size>{inside}</annotation>"
    )


def some(root: Path, pattern: str, stems: str = "ab") -> None:
    """Images and annotations, whose paths the pattern says: {kind} is images or annotations."""
    images, annotations = pattern.split()
    for stem in stems:
        picture(root / f"{images}/{stem}.png")
        xml(root / f"{annotations}/{stem}.xml", (f"class {stem}", BOX))


@pytest.mark.parametrize(
    "pattern", ["images annotations", "JPEGImages Annotations", ". .", "inner/img inner/xmls", "images elsewhere/deep"]
)
def test_layouts_without_parts(tmp_path, pattern):
    some(tmp_path, pattern)
    data = open_boxes(tmp_path)
    assert len(data.train) == 2 and data.validation is None and data.test is None and not data.notes
    assert data.train.classes == ("class a", "class b")
    assert data.train.truth(1).boxes.tolist() == [[3, 2, 12, 9]] and data.train.truth(1).labels.tolist() == [1]
    assert data.train.truth(0).masks is None and data.train.size(0) == (16, 20)


@pytest.mark.parametrize("pattern", ["images/{} annotations/{}", "{}/images {}/annotations", "{} {}", "images/{} xml"])
def test_layouts_with_parts(tmp_path, pattern):
    for part, stems in {"train": "abc", "valid": "ef", "test": "g"}.items():
        some(tmp_path, pattern.replace("{}", part), stems)
    data = open_boxes(str(tmp_path))
    assert (len(data.train), len(data.validation), len(data.test)) == (3, 2, 1)
    assert data.test.images.place(0).endswith("g.png") and data.test.truth(0).labels.tolist() == [5]
    assert data.notes == ("3 classes have no object to train on (class e, class f, class g)",)


def test_voc_s_own_layout_with_its_lists(tmp_path):
    kit = tmp_path / "VOCdevkit" / "VOC2012"
    some(kit, "JPEGImages Annotations", "abcdef")
    picture(kit / "SegmentationClass" / "a.png")  # not an image of this set
    picture(kit / "JPEGImages" / "zz.png")
    main = kit / "ImageSets" / "Main"
    main.mkdir(parents=True)
    for name, stems in {"train": "abc", "val": "d", "trainval": "abcd", "test": "yz"}.items():
        (main / f"{name}.txt").write_text("\n".join(stems))
    data = open_boxes(tmp_path)
    assert len(data.train) == 3 and data.validation is None and len(data.test) == 1
    notes = " | ".join(data.notes)
    assert "validation part (1 image) is the test" in notes and "test is left out, as none of its 2" in notes
    assert "1 image is left out (of 7)" in notes and "2 images are left out, as no list" in notes
    (main / "test.txt").write_text("e\nf -1\n")
    data = open_boxes(tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (3, 1, 2)
    (main / "test.txt").write_text("a\n")
    with pytest.raises(PatchloomError, match=r"test.txt lists a, and .*train.txt does, too"):
        open_boxes(tmp_path)
    (main / "test.txt").unlink()
    (main / "train.txt").unlink()
    (main / "val.txt").unlink()
    assert len(open_boxes(tmp_path).train) == 4  # trainval


def test_difficult_objects_are_crowd_and_empty_images_stay(tmp_path):
    some(tmp_path, "images annotations")
    xml(tmp_path / "annotations" / "a.xml", ("class b", BOX), more="<difficult>1</difficult>")
    xml(tmp_path / "annotations" / "c.xml")
    picture(tmp_path / "images" / "c.png")
    data = open_boxes(tmp_path)
    assert data.train.truth(0).crowd.tolist() == [True] and data.train.truth(1).crowd.tolist() == [False]
    nothing = data.train.truth(2)
    assert nothing.boxes.shape == (0, 4) and nothing.labels.dtype == torch.int64
    (note,) = data.notes
    assert note.startswith("1 of 3 images are without objects") and note.endswith("c.png)")


def test_the_name_that_a_file_says_counts_where_its_own_leads_nowhere(tmp_path):
    some(tmp_path, "images annotations")
    (tmp_path / "annotations" / "b.xml").rename(tmp_path / "annotations" / "0007.xml")
    assert [open_boxes(tmp_path).train.truth(i).labels.item() for i in (0, 1)] == [0, 1]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "a.xml cannot be read as XML: it is empty"),
        ("<annotation><object>", "a.xml cannot be read as XML: no element found"),
        ("<html/>", "a.xml is no annotation of Pascal VOC: it begins with <html>"),
        ('<!DOCTYPE x [<!ENTITY a "b">]><annotation/>', "a.xml cannot be read as XML: it declares a document type"),
        ('<!DOCTYPE x [<!ENTITY a "ä">]><annotation/>', "a.xml cannot be read as XML: it declares a document type"),
        ("<annotation><object/></annotation>", "a.xml has an object without a name"),
        (
            "<annotation><object><name>x</name></object></annotation>",
            "a.xml has no number in bndbox/xmin: '' is no number",
        ),
        ("<annotation><size><width>wide</width></size></annotation>", "no number in size/width: 'wide' is no number"),
    ],
)
def test_broken_files_are_named(tmp_path, content, sentence):
    some(tmp_path, "images annotations")
    (tmp_path / "annotations" / "a.xml").write_text(content, encoding="utf-16" if "ä" in content else "utf-8")
    with pytest.raises(PatchloomError, match=sentence.replace("(", r"\(")) as error:
        open_boxes(tmp_path)
    assert str(tmp_path / "annotations" / "a.xml") in str(error.value)


def test_which_image_is_meant_must_be_clear(tmp_path):
    some(tmp_path, "images annotations")
    (tmp_path / "images" / "a.png").rename(tmp_path / "images" / "a.bmp")
    assert len(open_boxes(tmp_path).train) == 2
    picture(tmp_path / "images" / "a.jpg")
    with pytest.raises(PatchloomError, match=r"a.xml may be of .*a.bmp or of .*a.jpg: give each image a unique name"):
        open_boxes(tmp_path)
    (tmp_path / "images" / "a.jpg").unlink()
    xml(tmp_path / "other" / "a.xml", ("class a", BOX))
    with pytest.raises(PatchloomError, match=r"a.bmp has two annotations, .*a.xml and .*a.xml"):
        open_boxes(tmp_path)


def test_images_without_annotations_and_the_other_way_round(tmp_path):
    some(tmp_path, "images annotations", "abcdefghijklmnopqrstuvwxyz")
    picture(tmp_path / "images" / "more.png")
    (tmp_path / "images" / "z.png").unlink()
    notes = " | ".join(open_boxes(tmp_path).notes)
    assert "1 image is left out (of 26), as no annotation" in notes and "more.png" in notes
    assert "1 of 26 XML files are left out, as they have no image" in notes and "z.xml" in notes
    for stem in "uvwxy":
        (tmp_path / "images" / f"{stem}.png").unlink()
    with pytest.raises(PatchloomError, match=r"u.xml has no image of its name \(6 of 26 XML files have none\)"):
        open_boxes(tmp_path)


def test_several_sets_and_parts_beside_others(tmp_path):
    for year in ("VOC2007", "VOC2012"):
        some(tmp_path / year, "JPEGImages Annotations")
    with pytest.raises(PatchloomError, match="several sets of Pascal VOC .VOC2007/, VOC2012/.: give the folder of one"):
        open_boxes(tmp_path)
    other = tmp_path / "other"
    some(other, "images/train annotations/train")
    some(other, "images annotations", "x")
    data = open_boxes(other)
    assert len(data.train) == 2 and "1 image is left out, in no folder such as train" in data.notes[0]
    empty = tmp_path / "empty"
    some(empty, "images/test annotations/test")
    with pytest.raises(PatchloomError, match=r"no part to train on, only test \(2 images\)"):
        open_boxes(empty)


def test_the_built_in_shapes():
    data = open_boxes("shapes:30", seed=3)
    assert len(data.train) == 30 and data.validation is None and len(data.test) == 2000
    truth = data.test.truth(5)
    x0, y0, x1, y1 = truth.boxes[0].int().tolist()
    assert truth.masks.shape == (1, 64, 64) and truth.masks[0, y0:y1, x0:x1].sum() == truth.masks.sum() > 0
    assert truth.labels.tolist() == [data.test.images.labels[5]] and data.test.size(5) == (64, 64)
    assert data.train.fingerprint() != open_boxes("shapes:30").train.fingerprint()
    some_of_them = data.train.subset([7, 2])
    assert torch.equal(some_of_them.truth(0).boxes, data.train.truth(7).boxes) and some_of_them.size(1) == (64, 64)


def test_what_holds_no_boxes(tmp_path):
    for data, sentence in [
        ("digits", "digits has no boxes"),
        (str(tmp_path), "holds no annotations that are known: give a folder with COCO JSON"),
        (str(tmp_path / "none"), "none does not exist"),
        ([np.zeros((8, 8), np.uint8)], "boxes are read from one place"),
    ]:
        with pytest.raises(PatchloomError, match=sentence):
            open_boxes(data)
