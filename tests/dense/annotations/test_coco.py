import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from labelled import picture
from PIL import Image
from pycocotools import mask as coco_masks
from refusing import refusal

from patchloom.dense.annotations.detection import open_boxes

SQUARE = [3, 2, 12, 2, 12, 9, 3, 9]  # x y x y ...
CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]


def content(names: list[str], categories: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    """A COCO JSON with one object an image, a cat."""
    return {
        "images": [{"id": 10 + k, "file_name": name, "width": 20, "height": 16} for k, name in enumerate(names)],
        "annotations": [
            {"id": k + 1, "image_id": 10 + k, "category_id": 3, "bbox": [3, 2, 9, 7], **more} for k in range(len(names))
        ],
        "categories": [dict(one) for one in categories or CATEGORIES],
    }


def write(path: Path, what: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(what if isinstance(what, str) else json.dumps(what))


@pytest.fixture
def two(tmp_path: Path) -> dict[str, Any]:
    """Two images in the folder of the test, and the COCO JSON of both."""
    for name in ("a.jpg", "b.jpg"):
        picture(tmp_path / name)
    return content(["a.jpg", "b.jpg"])


LAYOUTS = {  # the JSON of a part, and the folder of its images
    "COCO's own": ("annotations/instances_{}2017.json", "{}2017"),
    "Roboflow's": ("{}/_annotations.coco.json", "{}"),
    "JSON beside images": ("{}.json", "images"),
    "JSON beside images of parts": ("{}.json", "images/{}"),
    "annotations of parts": ("annotations/{}/instances.json", "images/{}"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_with_parts(tmp_path, layout):
    file, folder = LAYOUTS[layout]
    for part, names in {"train": ["a.jpg", "b.jpg"], "val": ["c.jpg"], "test": ["d.jpg"]}.items():
        for name in names:
            picture(tmp_path / folder.format(part) / name)
        write(tmp_path / file.format(part), content(names))
    data = open_boxes(tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (2, 1, 1)
    assert data.train.classes == ("cat", "dog")
    truth = data.test.truth(0)
    assert truth.boxes.tolist() == [[3, 2, 12, 9]] and truth.labels.tolist() == [0] and truth.masks is None
    assert data.test.images.place(0).endswith("d.jpg") and data.test.images.read(0).shape == (3, 16, 20)
    assert data.notes == ("1 class has no object to train on (dog)",)


def test_coco_s_own_validation_part_is_the_test(tmp_path):
    for part in ("train2017", "val2017", "test2017"):
        picture(tmp_path / part / f"{part}.jpg")
        write(tmp_path / f"annotations/instances_{part}.json", content([f"{part}.jpg"]))
        write(tmp_path / f"annotations/captions_{part}.json", {"images": [], "annotations": []})
    (tmp_path / "annotations" / "instances_test2017.json").unlink()
    write(tmp_path / "annotations" / "image_info_test2017.json", {"images": [], "categories": CATEGORIES})
    data = open_boxes(tmp_path)
    assert len(data.train) == 1 and data.validation is None
    assert data.test.images.place(0) == "val2017/val2017.jpg"
    assert len(open_boxes(tmp_path / "annotations" / "instances_val2017.json").train) == 1  # a given file
    notes = " | ".join(data.notes)
    assert "The validation part (1 image) is the test" in notes and "1 image was left out (of 3)" in notes
    (tmp_path / "annotations" / "instances_train2017.json").unlink()
    assert "no part to train on, only validation (1 image)" in refusal(open_boxes, tmp_path)


def test_a_part_without_annotations_is_left_out(tmp_path):
    for part in ("train", "test"):
        picture(tmp_path / f"images/{part}.jpg")
        write(tmp_path / f"{part}.json", content([f"{part}.jpg"]))
    listed = content(["test.jpg"])
    del listed["annotations"]
    write(tmp_path / "test.json", listed)
    data = open_boxes(tmp_path)
    assert data.test is None and any("test.json is left out" in note for note in data.notes)
    write(tmp_path / "test.json", content([]))
    assert "test.json has no annotations" in refusal(open_boxes, tmp_path)


@pytest.mark.parametrize("prefix", ["", "images/", "./images/", "/home/me/data/", "C:\\data\\"])
def test_one_file_whose_names_lead_to_images(tmp_path, prefix):
    for name in ("a.jpg", "b.jpg"):
        picture(tmp_path / "images" / name)
    write(tmp_path / "annotations.json", content([f"{prefix}{name}" for name in ("a.jpg", "b.jpg")]))
    for data in (open_boxes(tmp_path), open_boxes(tmp_path / "annotations.json")):
        assert len(data.train) == 2 and data.test is None
        assert data.train.images.place(1).endswith("images/b.jpg")


def test_one_file_for_images_in_folders_of_parts(tmp_path):
    names = ["train/a.jpg", "train/b.jpg", "val/c.jpg", "test/d.jpg"]
    for name in (*names, "@eaDir/a.jpg/SYNOPHOTO_THUMB_M.jpg"):  # a thumbnail of a store
        picture(tmp_path / name)
    write(tmp_path / "annotations.json", content(names))
    data = open_boxes(tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (2, 1, 1)
    assert sum("@eaDir" in note for note in data.notes) == 1


def test_crowds_and_masks_and_none_where_an_object_lacks_one(tmp_path, two):
    square = np.zeros((16, 20), np.uint8)
    square[2:9, 3:12] = 1
    lengths = {"size": [16, 20], "counts": coco_masks.encode(np.asfortranarray(square))["counts"].decode()}
    two["annotations"][0].update(segmentation=[SQUARE], iscrowd=1)
    two["annotations"][1].update(segmentation=lengths, image_id=10)
    write(tmp_path / "train.json", two)
    truth = open_boxes(tmp_path).train.truth(0)
    assert truth.crowd.tolist() == [True, False] and truth.masks.dtype == torch.bool
    assert all(np.array_equal(mask.numpy(), square) for mask in truth.masks)
    two["annotations"][1]["segmentation"] = []
    write(tmp_path / "train.json", two)
    data = open_boxes(tmp_path)
    assert data.train.truth(0).masks is None
    assert data.notes[0].startswith("Masks are left out") and "1 of 2 objects have no segmentation" in data.notes[0]
    assert "image a.jpg" in data.notes[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("what.pop('categories')", "has no categories"),
        ("what.update(categories={})", "its categories are no list"),
        ("what.update(annotations=[])", "has no annotations"),
        ("what['images'][0].pop('file_name')", "images (id 10) has file_name null"),
        ("what['images'][1].update(id=10)", "several images with the id 10"),
        ("what['images'][1].update(file_name='a.jpg')", "a.jpg more than once"),
        ("what['annotations'][1].update(id=1)", "several annotations with the id 1"),
        ("what['categories'][1].update(id=7)", "several categories with the id 7"),
        ("what['categories'][1].update(name='dog')", "several categories with the name dog"),
        ("what['annotations'][0].update(image_id=99)", "(id 1) of image 99"),
        ("what['annotations'][0].update(category_id=0)", "(id 1) of category 0"),
        ("what['annotations'][0].pop('bbox')", "annotations (id 1) has bbox null"),
        ("what['annotations'][0].update(bbox=[1, 2, 3])", "bbox [1, 2, 3] is not four numbers"),
        ("what['annotations'][0].update(bbox=[1, 2, inf, 3])", "image a.jpg, has a box with a number that is not fin"),
        ("what['annotations'][1].update(bbox=[3, 2, 0, 7])", "b.jpg, has a box of no area (x0 y0 x1 y1 [3, 2, 3"),
        ("what['annotations'][1].update(bbox=[3, 2, -4, 7])", "a box of no area"),
        ("what['annotations'][1].update(bbox=[13, 2, 10, 7])", "image b.jpg, has a box that reaches out"),
        ("what['annotations'][1].update(bbox=[-3, 2, 10, 7])", "in an image of 20 x 16 pixels"),
        ("what['images'][1].update(width=16, height=20)", "b.jpg has 16 x 20 pixels, but it has 20 x 16"),
        ("what['images'][1].update(file_name='c.jpg')", "1 of 2 images are missing"),
        ("[one.update(segmentation=[[1, 2, 3, 4]]) for one in what['annotations']]", "no list of polygons"),
        ("[one.update(segmentation=[[1, 2, 3, 4, 5, inf]]) for one in what['annotations']]", "no list of polygons"),
        (
            "[one.update(segmentation={'size': [20, 16], 'counts': [320]}) for one in what['annotations']]",
            "size is [20, 16] [h, w], in an image of [16, 20]",
        ),
    ],
)
def test_bad_values_are_named_with_their_file(tmp_path, two, change, said):
    exec(change, {"what": two, "inf": float("inf")})
    write(tmp_path / "train.json", two)
    found = refusal(open_boxes, tmp_path)
    assert said in found and str(tmp_path) in found


def test_files_that_are_no_coco_json(tmp_path):
    picture(tmp_path / "a.jpg")
    for what, said in (("", "it is empty"), ("{", "Expecting property name"), ("[]", "is no COCO JSON")):
        write(tmp_path / "train.json", what)
        found = refusal(open_boxes, tmp_path)
        assert said in found and "train.json" in found
    assert "train.json is no COCO JSON" in refusal(open_boxes, tmp_path / "train.json")
    assert "a.jpg is no JSON" in refusal(open_boxes, tmp_path / "a.jpg")


def test_parts_must_be_clear_and_alike_and_apart(tmp_path, two):
    write(tmp_path / "one.json", content(["a.jpg"]))
    write(tmp_path / "two.json", content(["b.jpg"]))
    assert "one.json and two.json, and it is not clear" in refusal(open_boxes, tmp_path)
    (tmp_path / "one.json").rename(tmp_path / "train.json")
    (tmp_path / "two.json").rename(tmp_path / "test.json")
    assert len(open_boxes(tmp_path).test) == 1
    write(tmp_path / "test.json", content(["a.jpg"]))
    assert "a.jpg is in two parts, train and test" in refusal(open_boxes, tmp_path)
    write(tmp_path / "test.json", content(["b.jpg"], [{"id": 3, "name": "lynx"}]))
    assert "has other categories than" in refusal(open_boxes, tmp_path)


def test_boxes_within_two_pixels_are_clipped_and_few_bad_ones_left_out(tmp_path, two, monkeypatch):
    two["annotations"][1]["bbox"] = [-1, 2, 22, 7]
    write(tmp_path / "train.json", two)
    data = open_boxes(tmp_path)
    assert data.train.truth(1).boxes.tolist() == [[0, 2, 20, 9]]
    assert "1 of 2 boxes reach out of their image by up to 2 pixels" in data.notes[0]
    two["annotations"].append({"id": 9, "image_id": 10, "category_id": 7, "bbox": [1, 1, 0, 5]})
    write(tmp_path / "train.json", two)
    monkeypatch.setattr("patchloom.dense.annotations.detection._FEW_BAD", 0.5)
    data = open_boxes(tmp_path)
    assert len(data.train.truth(0).labels) == 1 and data.train.truth(1).boxes.tolist() == [[0, 2, 20, 9]]
    assert any("1 of 3 boxes are of no area or outside, and left out" in note for note in data.notes)


def test_a_few_missing_and_broken_images_are_left_out(tmp_path):
    names = [f"{k:02}.jpg" for k in range(40)]
    for name in names:
        picture(tmp_path / name)
    what = content(names)
    for k, one in enumerate(what["annotations"]):
        one["bbox"] = [1, 1, 2 + k % 5, 3]
    write(tmp_path / "train.json", what)
    (tmp_path / "05.jpg").unlink()
    (tmp_path / "07.jpg").write_bytes(b"no image")
    data = open_boxes(tmp_path)
    assert len(data.train) == 38
    for i, name, x1 in ((5, "06.jpg", 4), (6, "08.jpg", 6)):
        assert data.train.images.place(i) == name and data.train.truth(i).boxes.tolist() == [[1, 1, x1, 4]]
    notes = " | ".join(data.notes)
    assert "1 of 40 images are not there" in notes and "1 of 40 images cannot be read" in notes
    for name in names[10:14]:
        (tmp_path / name).write_bytes(b"no image")
    found = refusal(open_boxes, tmp_path)
    assert "07.jpg cannot be read" in found and "(5 of 40 images)" in found


def test_the_orientation_of_exif(tmp_path):
    exif = Image.Exif()
    exif[274] = 6  # read upright, this one has the size 16 x 20
    picture(tmp_path / "a.jpg", exif=exif)
    what = content(["a.jpg"])
    write(tmp_path / "train.json", what)
    assert "as stored (20 x 16), but its EXIF orientation makes it 16 x 20" in refusal(open_boxes, tmp_path)
    what["images"][0].update(width=16, height=20)
    write(tmp_path / "train.json", what)
    data = open_boxes(tmp_path)
    assert data.train.size(0) == (20, 16) and "1 of 1 images is turned by EXIF" in data.notes[0]


def test_the_fingerprint_follows_the_annotations(tmp_path):
    picture(tmp_path / "a.jpg")
    seen = []
    for more in ({}, {"iscrowd": 1}, {"segmentation": [SQUARE]}, {"segmentation": [SQUARE[2:]]}, {"category_id": 7}):
        write(tmp_path / "train.json", content(["a.jpg"], **more))
        seen.append(open_boxes(tmp_path).train.fingerprint())
    assert len(set(seen)) == 5
    assert open_boxes(tmp_path).train.fingerprint() == seen[-1]
