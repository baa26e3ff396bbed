from pathlib import Path

import pytest
import torch
from labelled import picture
from refusing import refusal

from patchloom.dense.annotations.detection import open_boxes

BOX = (3, 2, 12, 9)  # x0 y0 x1 y1, exclusive


def xml(path: Path, *objects: str, more: str = "") -> None:
    """An annotation with a box for each class, as VOC counts: from 1, the last pixel included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    x0, y0, x1, y1 = BOX
    inside = "".join(
        f"<object><name>{name}</name>{more}<bndbox><xmin>{x0 + 1}</xmin><ymin>{y0 + 1}</ymin>"
        f"<xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
        for name in objects
    )
    path.write_text(
        f"<annotation><filename>{path.stem}.png</filename><size><width>20</width><height>16</height>"
        f"<depth>3</depth></size>{inside}</annotation>"
    )


def some(root: Path, pattern: str, stems: str = "ab") -> None:
    images, annotations = pattern.split()
    for stem in stems:
        picture(root / f"{images}/{stem}.png")
        xml(root / f"{annotations}/{stem}.xml", f"class {stem}")


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
    for said in ("validation part (1 image)", "none of its 2", "1 image was left out (of 7)", "2 images were left out"):
        assert said in notes
    (main / "test.txt").write_text("e\nf -1\n")
    data = open_boxes(tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (3, 1, 2)
    (main / "test.txt").write_text("a\n")
    assert "test.txt lists a, and" in refusal(open_boxes, tmp_path)
    (main / "test.txt").write_text("e\nq\n")
    assert "test.txt lists q, which has no image" in refusal(open_boxes, tmp_path)
    for name in ("test", "train", "val"):
        (main / f"{name}.txt").unlink()
    assert len(open_boxes(tmp_path).train) == 4  # trainval


def test_difficult_objects_are_crowd_and_empty_images_stay(tmp_path):
    some(tmp_path, "images annotations")
    xml(tmp_path / "annotations" / "a.xml", "class b", more="<difficult>1</difficult>")
    xml(tmp_path / "annotations" / "c.xml")
    picture(tmp_path / "images" / "c.png")
    data = open_boxes(tmp_path)
    assert data.train.truth(0).crowd.tolist() == [True] and data.train.truth(1).crowd.tolist() == [False]
    nothing = data.train.truth(2)
    assert nothing.boxes.shape == (0, 4) and nothing.labels.dtype == torch.int64
    (note,) = data.notes
    assert note.startswith("1 of 3 images are without objects") and note.endswith("c.png)")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "it is empty"),
        ("<annotation><object>", "no element found"),
        ("<html/>", "it begins with <html>"),
        ('<!DOCTYPE x [<!ENTITY a "b">]><annotation/>', "document type"),
        ('<!DOCTYPE x [<!ENTITY a "ä">]><annotation/>', "document type"),
        ("<annotation><object/></annotation>", "an object without a name"),
        ("<annotation><object><name>x</name></object></annotation>", "bndbox/xmin: '' is no number"),
        ("<annotation><size><width>wide</width></size></annotation>", "size/width: 'wide' is no number"),
    ],
)
def test_broken_files_are_named(tmp_path, content, said):
    some(tmp_path, "images annotations")
    file = tmp_path / "annotations" / "a.xml"
    file.write_text(content, encoding="utf-16" if "ä" in content else "utf-8")
    found = refusal(open_boxes, tmp_path)
    assert said in found and str(file) in found


def test_an_annotation_has_one_image_and_an_image_one_annotation(tmp_path):
    some(tmp_path, "images annotations")
    (tmp_path / "annotations" / "b.xml").rename(tmp_path / "annotations" / "0007.xml")  # which says b.png
    assert [open_boxes(tmp_path).train.truth(i).labels.item() for i in (0, 1)] == [0, 1]
    (tmp_path / "images" / "a.png").rename(tmp_path / "images" / "a.bmp")
    assert len(open_boxes(tmp_path).train) == 2
    picture(tmp_path / "images" / "a.jpg")
    found = refusal(open_boxes, tmp_path)
    assert all(one in found for one in ("a.xml may be of", "a.bmp", "a.jpg"))
    (tmp_path / "images" / "a.jpg").unlink()
    xml(tmp_path / "other" / "a.xml", "class a")
    assert "a.bmp has two annotations" in refusal(open_boxes, tmp_path)


def test_images_without_annotations_and_the_other_way_round(tmp_path):
    some(tmp_path, "images annotations", "abcdefghijklmnopqrstuvwxyz")
    picture(tmp_path / "images" / "more.png")
    (tmp_path / "images" / "z.png").unlink()
    notes = " | ".join(open_boxes(tmp_path).notes)
    assert "1 image was left out (of 26)" in notes and "more.png" in notes
    assert "1 of 26 XML files" in notes and "z.xml" in notes
    for stem in "uvwxy":
        (tmp_path / "images" / f"{stem}.png").unlink()
    assert "u.xml has no image of its name (6 of 26" in refusal(open_boxes, tmp_path)


def test_several_sets_and_parts_beside_others(tmp_path):
    for year in ("VOC2007", "VOC2012"):
        some(tmp_path / year, "JPEGImages Annotations")
    assert "several sets of Pascal VOC (VOC2007/, VOC2012/)" in refusal(open_boxes, tmp_path)
    other = tmp_path / "other"
    some(other, "images/train annotations/train")
    some(other, "images annotations", "x")
    data = open_boxes(other)
    assert len(data.train) == 2 and "1 image was left out, in no folder such as train" in data.notes[0]
    some(tmp_path / "empty", "images/test annotations/test")
    assert "no part to train on, only test (2 images)" in refusal(open_boxes, tmp_path / "empty")
