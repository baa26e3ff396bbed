from pathlib import Path

import pytest
from refusing import refusal

from patchloom.dense.annotations.segmentation import layout_of


def laid_out(*paths):
    return layout_of(Path("frames"), sorted(paths), "frames")


def paired(*forms, names):
    """The images and label maps of a layout without notes, whose paths are ``forms`` with the names filled in."""
    layout = laid_out(*(form.format(name) for form in forms for name in names))
    assert layout.notes == ()
    return layout


FOLDERS = ("labels", "masks", "annotations", "gt", "SegmentationClass", "label_maps", "GroundTruth", "semantic")
ENDINGS = ("_mask", "_gt", "_labelIds", "_L", "-label", ".seg", "_ground_truth", "_gtFine_labelTrainIds")
SUFFIXES = (".tif", ".bmp", ".gif", ".npy")


@pytest.mark.parametrize(
    "image, label",
    [
        *(("images/{}.jpg", f"{folder}/{{}}.png") for folder in FOLDERS),
        *(("images/{}.jpg", f"labels/{{}}{ending}.png") for ending in ENDINGS),
        *(("images/{}.jpg", f"labels/{{}}{suffix}") for suffix in SUFFIXES),
        ("image_{}.png", "mask_{}.png"),
        ("{}_sat.jpg", "{}_mask.png"),
        ("{}/image.png", "{}/label.png"),
        ("stills/{}.jpg", "labels/{}.png"),
        ("images/{}/1.png", "labels/{}/1.png"),
        ("seg_data/images/{}.jpg", "seg_data/masks/{}.png"),
        ("images/frame_1/{}.jpg", "masks/frame_1/{}.png"),
        ("VOCdevkit/VOC2012/JPEGImages/{}.jpg", "VOCdevkit/VOC2012/SegmentationClass/{}.png"),
    ],
)
def test_one_rule_pairs_what_pre_training_leaves_out(image, label):
    layout = paired(image, label, names=("a", "ab"))
    assert layout.parts == {"train": tuple([form.format(name) for name in ("a", "ab")] for form in (image, label))}
    assert layout.words == {"train": ""}
    if image == "images/{}.jpg":
        assert layout.folders == ("", label.partition("/")[0])


@pytest.mark.parametrize(
    "image, label",
    [
        ("images/{}/a.jpg", "labels/{}/a.png"),
        ("{}/images/a.jpg", "{}/labels/a.png"),
        ("{}/a.jpg", "{}_labels/a.png"),
        ("{}/a.jpg", "{}annot/a.png"),
        ("{}_images/a.jpg", "{}_masks/a.png"),
        ("{}/a.jpg", "{}/masks/a.png"),
        ("{}/a.jpg", "{}/a_mask.png"),
        ("images/{}/city/a.jpg", "labels/{}/city/a.png"),
        ("archive/images/{}/a.jpg", "archive/labels/{}/a.png"),
        ("leftImg8bit/{}/aachen/a_leftImg8bit.png", "gtFine/{}/aachen/a_gtFine_labelIds.png"),
        ("JPEGImages/{}/a.jpg", "SegmentationClass/{}/a.png"),
    ],
)
def test_parts_lie_either_way_round(image, label):
    words = {"train": "train", "validation": "Val", "test": "TEST"}
    layout = paired(image, label, names=words.values())
    assert layout.parts == {part: ([image.format(word)], [label.format(word)]) for part, word in words.items()}


@pytest.mark.parametrize("words", ["training validation", "train2017 valid", "trainval dev", "train testing"])
def test_other_words_for_parts(words):
    layout = paired("images/{}/a.png", "labels/{}/a.png", names=words.split())
    second = "test" if "testing" in words else "validation"
    assert layout.words == dict(zip(("train", second), words.split(), strict=True))
    assert layout.parts.keys() == layout.words.keys()
    joined = paired("{}/a.png", "{}annot/a.png", names=words.split())  # a part and a word in one name
    assert joined.words == layout.words and all(len(images) == 1 for images, _ in joined.parts.values())


def test_label_maps_of_another_part_are_no_partners():
    layout = laid_out("train/1.jpg", "train/2.jpg", "train_labels/1.png", "val_labels/1.png", "val_labels/2.png")
    assert layout.parts == {"train": (["train/1.jpg"], ["train_labels/1.png"])} and len(layout.notes) == 2
    layout = laid_out("rgb/1.jpg", "depth/1.jpg", "depth/2.jpg", "labels/1.png", "labels/2.png")
    assert layout.parts == {"train": (["rgb/1.jpg"], ["labels/1.png"])} and len(layout.notes) == 2
    layout = laid_out("images/train/a.jpg", "images/test/b.jpg", "labels/a.png", "labels/b.png")  # of all parts
    assert layout.parts["train"] == (["images/train/a.jpg"], ["labels/a.png"])
    assert layout.parts["test"] == (["images/test/b.jpg"], ["labels/b.png"])


def test_maps_of_classes_are_chosen_among_several():
    cityscapes = [f"gtFine/a_gtFine_{kind}.png" for kind in ("color", "instanceIds", "labelIds")]
    train_ids = "gtFine/a_gtFine_labelTrainIds.png"
    voc = ("JPEGImages/a.jpg", "SegmentationClass/a.png", "SegmentationObject/a.png")
    for paths, taken in (
        (("leftImg8bit/a_leftImg8bit.png", *cityscapes), cityscapes[2]),
        (("leftImg8bit/a_leftImg8bit.png", *cityscapes, train_ids), train_ids),
        (voc, "SegmentationClass/a.png"),
    ):
        assert laid_out(*paths).parts["train"][1] == [taken]


def test_files_without_a_partner_are_left_out_and_noted():
    layout = laid_out("images/a.png", "images/b.png", "images/c.png", "labels/a.png", "labels/x.png", "labels/y.png")
    assert layout.parts["train"] == (["images/a.png"], ["labels/a.png"])
    assert "2 images" in layout.notes[0] and "(images/b.png, images/c.png)" in layout.notes[0]
    assert "2 label maps" in layout.notes[1] and "(labels/x.png, labels/y.png)" in layout.notes[1]
    layout = laid_out("images/train/a.png", "images/b.png", "labels/train/a.png", "labels/b.png")
    assert layout.parts == {"train": (["images/train/a.png"], ["labels/train/a.png"])}
    (note,) = layout.notes
    assert "1 image was" in note and "(images/b.png)" in note


@pytest.mark.parametrize(
    "paths, said",
    [
        ("images/a.png b.png", "frames holds no label maps"),
        ("labels/a.png", "label maps and no images (labels/a.png)"),
        ("images/a.png labels/x.png", "none of the 1 label maps of frames"),
        ("images/a.jpg images/a.png labels/a.png", "the label map of images/a.jpg and of images/a.png"),
        ("left/1.jpg depth/1.jpg labels/1.png", "the label map of depth/1.jpg and of left/1.jpg"),
        ("images/a.jpg labels/a.png labels/a_mask.png", "labels/a.png and labels/a_mask.png may both"),
        ("images/a.jpg labels/a.jpg", "labels/a.jpg is of a format that changes numbers"),
        (
            "train/images/a.jpg train/labels/a.png trainval/images/b.jpg trainval/labels/b.png",
            "train and trainval for the same part",
        ),
        ("val/images/a.jpg val/labels/a.png", "has val and no train"),
    ],
)
def test_unclear_layouts_are_refused(paths, said):
    assert said in refusal(laid_out, *paths.split())
