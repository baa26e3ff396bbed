from __future__ import annotations

from pathlib import Path

import pytest

from patchloom.dense.annotations.segmentation import layout_of
from patchloom.errors import PatchloomError


def laid_out(*paths):
    return layout_of(Path("frames"), sorted(paths), "frames")


@pytest.mark.parametrize(
    "folder", ["labels", "masks", "annotations", "gt", "SegmentationClass", "label_maps", "GroundTruth", "semantic"]
)
@pytest.mark.parametrize("suffix", [".png", ".tif", ".bmp", ".gif", ".npy"])
def test_a_folder_of_images_and_one_of_labels(folder, suffix):
    layout = laid_out("images/a.jpg", "images/b.jpg", f"{folder}/a{suffix}", f"{folder}/b{suffix}")
    assert layout.parts == {"train": (["images/a.jpg", "images/b.jpg"], [f"{folder}/a{suffix}", f"{folder}/b{suffix}"])}
    assert layout.words == {"train": ""} and layout.folders == ("", folder) and layout.notes == ()


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
    words = ("train", "Val", "TEST")
    layout = laid_out(*(form.format(word) for form in (image, label) for word in words))
    assert layout.parts == {
        part: ([image.format(word)], [label.format(word)])
        for part, word in zip(("train", "validation", "test"), words, strict=True)
    }
    assert layout.notes == ()


@pytest.mark.parametrize("words", [("training", "validation"), ("train2017", "valid"), ("trainval", "dev")])
def test_other_words_for_parts(words):
    layout = laid_out(*(f"{kind}/{word}/a.png" for kind in ("images", "labels") for word in words))
    assert (
        layout.words == dict(zip(("train", "validation"), words, strict=True))
        and layout.parts.keys() == layout.words.keys()
    )


@pytest.mark.parametrize(
    "ending", ["_mask", "_gt", "_labelIds", "_L", "-label", ".seg", "_ground_truth", "_gtFine_labelTrainIds"]
)
def test_endings_of_label_maps(ending):
    layout = laid_out("images/a.jpg", "images/ab.jpg", f"labels/a{ending}.png", f"labels/ab{ending}.png")
    assert layout.parts["train"] == (
        ["images/a.jpg", "images/ab.jpg"],
        [f"labels/a{ending}.png", f"labels/ab{ending}.png"],
    )


@pytest.mark.parametrize(
    "image, label",
    [
        ("image_{}.png", "mask_{}.png"),
        ("{}_sat.jpg", "{}_mask.png"),
        ("{}/image.png", "{}/label.png"),
        ("stills/{}.jpg", "labels/{}.png"),
        ("seg_data/images/{}.jpg", "seg_data/masks/{}.png"),
        ("images/frame_1/{}.jpg", "masks/frame_1/{}.png"),
        ("VOCdevkit/VOC2012/JPEGImages/{}.jpg", "VOCdevkit/VOC2012/SegmentationClass/{}.png"),
    ],
)
def test_one_rule_pairs_what_pre_training_leaves_out(image, label):
    layout = laid_out(*(form.format(name) for form in (image, label) for name in "ab"))
    assert layout.parts == {"train": tuple([form.format(name) for name in "ab"] for form in (image, label))}
    assert layout.notes == ()


@pytest.mark.parametrize("words", [("training", "validation"), ("train", "valid"), ("trainval", "testing")])
def test_a_part_and_a_word_in_one_name(words):
    layout = laid_out(*(f"{word}{joined}/a.png" for word in words for joined in ("", "annot")))
    assert set(layout.words.values()) == set(words)
    assert layout.notes == () and all(len(images) == 1 for images, _ in layout.parts.values())


def test_label_maps_of_another_part_are_no_partners():
    layout = laid_out("train/1.jpg", "train/2.jpg", "train_labels/1.png", "val_labels/1.png", "val_labels/2.png")
    assert layout.parts == {"train": (["train/1.jpg"], ["train_labels/1.png"])} and len(layout.notes) == 2
    layout = laid_out("rgb/1.jpg", "depth/1.jpg", "depth/2.jpg", "labels/1.png", "labels/2.png")
    assert layout.parts == {"train": (["rgb/1.jpg"], ["labels/1.png"])} and len(layout.notes) == 2
    with pytest.raises(PatchloomError, match="labels/1.png may be the label map of depth/1.jpg and of left/1.jpg"):
        laid_out("left/1.jpg", "depth/1.jpg", "labels/1.png")


def test_labels_of_all_parts_in_one_folder():
    layout = laid_out("images/train/a.jpg", "images/test/b.jpg", "labels/a.png", "labels/b.png")
    assert layout.parts == {
        "train": (["images/train/a.jpg"], ["labels/a.png"]),
        "test": (["images/test/b.jpg"], ["labels/b.png"]),
    }


def test_the_same_name_in_other_sub_folders_is_another_image():
    layout = laid_out(*(f"{kind}/{place}/1.png" for kind in ("images", "labels") for place in ("day", "night")))
    assert layout.parts["train"] == (
        ["images/day/1.png", "images/night/1.png"],
        ["labels/day/1.png", "labels/night/1.png"],
    )


def test_of_several_maps_those_of_classes_are_taken():
    cityscapes = [f"gtFine/a_gtFine_{kind}.png" for kind in ("color", "instanceIds", "labelIds")]
    assert laid_out("leftImg8bit/a_leftImg8bit.png", *cityscapes).parts["train"][1] == [cityscapes[2]]
    assert laid_out("leftImg8bit/a_leftImg8bit.png", *cityscapes, "gtFine/a_gtFine_labelTrainIds.png").parts["train"][
        1
    ] == ["gtFine/a_gtFine_labelTrainIds.png"]
    voc = ("JPEGImages/a.jpg", "SegmentationClass/a.png", "SegmentationObject/a.png")
    assert laid_out(*voc).parts["train"][1] == ["SegmentationClass/a.png"]


def test_what_has_no_partner_is_left_out_and_said():
    layout = laid_out("images/a.png", "images/b.png", "images/c.png", "labels/a.png", "labels/x.png", "labels/y.png")
    assert layout.parts["train"] == (["images/a.png"], ["labels/a.png"])
    assert layout.notes == (
        "2 images were left out, without a label map (images/b.png, images/c.png)",
        "2 label maps were left out, without an image (labels/x.png, labels/y.png)",
    )
    layout = laid_out("images/train/a.png", "images/b.png", "labels/train/a.png", "labels/b.png")
    assert layout.parts == {"train": (["images/train/a.png"], ["labels/train/a.png"])}
    assert layout.notes == ("1 image was left out, in none of the parts (images/b.png)",)


@pytest.mark.parametrize(
    "paths, said",
    [
        (["images/a.png", "b.png"], "frames holds no label maps: put them into labels/ beside images/"),
        (["labels/a.png"], r"frames holds label maps and no images \(labels/a.png\)"),
        (
            ["images/a.png", "labels/x.png"],
            "none of the 1 label maps of frames has the name of an image: call labels/x.png",
        ),
        (
            ["images/a.jpg", "images/a.png", "labels/a.png"],
            "labels/a.png may be the label map of images/a.jpg and of images/a.png",
        ),
        (
            ["images/a.jpg", "labels/a.png", "labels/a_mask.png"],
            "labels/a.png and labels/a_mask.png may both be the label map of",
        ),
        (["images/a.jpg", "labels/a.jpg"], "labels/a.jpg is of a format that changes numbers.* save label maps as PNG"),
        (
            ["train/images/a.jpg", "train/labels/a.png", "trainval/images/b.jpg", "trainval/labels/b.png"],
            "frames has train and trainval for the same part: leave one of them",
        ),
        (["val/images/a.jpg", "val/labels/a.png"], "frames has val and no train: name a folder so"),
    ],
)
def test_what_is_unclear_is_one_sentence(paths, said):
    with pytest.raises(PatchloomError, match=f"^{said}"):
        laid_out(*paths)
