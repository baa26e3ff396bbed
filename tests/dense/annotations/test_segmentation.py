from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from labelled import ids, image, labelled, write
from PIL import Image, ImageDraw, ImageFilter

from patchloom.data.source import Data
from patchloom.data.sources.in_memory import open_objects
from patchloom.data.sources.synthetic import Shapes
from patchloom.dense.annotations import segmentation
from patchloom.dense.annotations.base import IGNORED
from patchloom.dense.annotations.segmentation import GivenMaps, class_ids, class_pixels, ids_of, open_label_maps
from patchloom.errors import PatchloomError

PARTS = {"train/a": ids(0, 1, 255), "train/b": ids(1, 2), "val/c": ids(0, 1), "test/d": ids(2, 0), "test/e": ids(1)}


def test_a_folder_with_parts_and_names(tmp_path):
    data = open_label_maps(labelled(tmp_path, PARTS, **{"classes.txt": "sky\nroad\ncar"}))
    assert (len(data.train), len(data.validation), len(data.test)) == (2, 1, 2) and data.notes == ()
    assert data.train.classes == data.test.classes == ("sky", "road", "car") and class_ids(data.train) == (0, 1, 2)
    truth = data.train.truth(0)
    assert truth.dtype == torch.int16 and truth.shape == data.train.images.read(0).shape[1:]
    assert torch.equal(truth[0], torch.tensor([0, 0, 0, 0, 1, 1, 1, IGNORED, IGNORED, IGNORED], dtype=torch.int16))
    assert data.train.images.place(1) == "images/train/b.jpg" and data.train.truth(1).unique().tolist() == [1, 2]
    assert class_pixels(data.train).tolist() == [32, 24 + 40, 40]
    assert class_pixels(data.train.subset([1]).subset([0, 0])).tolist() == [0, 80, 80]
    assert data.train.images.labels is None


def test_without_a_list_classes_are_numbers(tmp_path):
    data = open_label_maps(labelled(tmp_path, {"a": ids(0, 3), "b": ids(3, 255)}))
    assert data.train.classes == ("0", "1", "2", "3") and data.validation is None is data.test
    assert data.notes == ("2 of 4 classes have no pixel to train on (1, 2)",)


@pytest.mark.parametrize(
    ("listed", "maps", "classes"),
    [
        ({"classes.txt": "0 ground\n255 cell"}, (ids(0, 255), ids(255, 0)), ("ground", "cell")),
        ({}, (ids(0, 0, 255), ids(255, 0, 0)), ("background", "foreground")),
        ({}, (ids(0, 255, 255), ids(255, 255, 0)), ("0", "255")),  # 0 may be the structure
        ({}, (ids(0, 255), ids(255, 0)), ("0", "255")),
    ],
)
def test_masks_of_0_and_255_are_two_classes(tmp_path, listed, maps, classes):
    data = open_label_maps(labelled(tmp_path, dict(zip("ab", maps, strict=True)), **listed))
    assert data.train.classes == classes
    assert class_ids(data.train) == (0, 255) and data.train.truth(0).unique().tolist() == [0, 1]
    assert data.notes == (f"{tmp_path} holds 0 and 255 alone: both are classes, and all pixels count",)


def test_a_number_that_does_not_count(tmp_path):
    folder = labelled(tmp_path, {"a": ids(0, 1, 2), "b": ids(2, 0)})
    data = open_label_maps(folder, ignore=0)
    assert data.train.classes == ("1", "2") and class_ids(data.train) == (1, 2) == class_ids(data.train.subset([0]))
    assert data.train.truth(1).unique().tolist() == [IGNORED, 1]
    write(folder, {"labels/classes.txt": "sky\nvoid\nroad"})
    data = open_label_maps(folder, ignore=1)
    assert data.train.classes == ("sky", "road") and data.train.truth(0).unique().tolist() == [IGNORED, 0, 1]
    assert data.notes == ("void (1) does not count, as it is ignored",)
    assert open_label_maps(folder).train.classes == ("sky", "void", "road")  # no name is taken to mean that


def test_numbers_of_classes_may_be_any(tmp_path):
    maps = {"a": ids(7, 300), "b": ids(300, 255)}
    data = open_label_maps(labelled(tmp_path, maps, **{"classes.txt": "300 car\n255 road\n7 sky"}), ignore=-1)
    assert data.train.classes == ("car", "road", "sky") and class_ids(data.train) == (300, 255, 7)
    assert data.train.truth(0)[0].tolist() == [2] * 5 + [0] * 5 and data.train.truth(1)[0].tolist() == [0] * 5 + [1] * 5


def test_val_is_the_test_where_there_is_no_other(tmp_path):
    data = open_label_maps(labelled(tmp_path, {"train/a": ids(0, 1), "val/b": ids(1, 0)}))
    assert data.validation is None and data.test.images.place(0) == "images/val/b.jpg"
    assert data.notes == ("The validation part (1 image) is the test, as there is no other",)


def test_colours(tmp_path):
    colours = np.array([[0, 0, 0], [0, 0, 255], [128, 64, 0]], np.uint8)
    folder = labelled(tmp_path, {"a": colours[ids(0, 1, 2)], "b": colours[ids(2, 1)]})
    with pytest.raises(PatchloomError, match=r"labels/a.png shows classes by colours.*\(1 more of 2 cannot be used\)"):
        open_label_maps(folder)
    write(folder, {"classes.txt": "0 0 0 void\n0 0 255 car\n128 64 0 road"})
    data = open_label_maps(folder, ignore=0)
    assert data.train.classes == ("car", "road") and data.train.truth(0).unique().tolist() == [IGNORED, 0, 1]


def ade(folder, maps, **others):
    files = {}
    for name, content in maps.items():
        files |= {f"images/{name}.jpg": None, f"annotations/{name}.png": content}
    return write(folder, files | others)


ADE = {"training/a": ids(0, 1, 2), "training/b": ids(150, 2, 0), "validation/c": ids(2, 150)}
INFO = "\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *(f"{i}\t0\t0\t0\t0\tthing {i}" for i in range(1, 151))])


@pytest.mark.parametrize(
    "others, second",
    [
        ({"objectInfo150.txt": INFO}, "thing 2"),
        ({}, "2"),
        ({"classes.txt": "\n".join(f"thing {i}" for i in range(1, 151))}, "thing 2"),
    ],
)
def test_ade20k(tmp_path, others, second):
    data = open_label_maps(ade(tmp_path, ADE, **others))
    assert len(data.train.classes) == 150 and data.train.classes[1] == second and class_ids(data.train)[0] == 1
    assert data.train.truth(0).unique().tolist() == [IGNORED, 0, 1]
    assert data.validation is None and data.test.truth(0).unique().tolist() == [1, 149]
    assert "is taken for ADE20K: 0 does not count, and 1 to 150 are the classes" in data.notes[0]
    assert data.notes[-1] == "The validation part (1 image) is the test, as there is no other"


def test_what_is_called_like_ade20k_and_is_not(tmp_path):
    data = open_label_maps(ade(tmp_path, {"training/a": ids(0, 1, 2), "validation/c": ids(2, 1)}))
    assert data.train.classes == ("0", "1", "2") and not any("ADE" in note for note in data.notes)
    data = open_label_maps(
        ade(tmp_path / "more", ADE | {"training/d": ids(0, 151)}, **{"classes.txt": "\n".join(map(str, range(152)))})
    )
    assert len(data.train.classes) == 152


def test_label_maps_without_a_pixel_that_counts_are_left_out(tmp_path):
    folder = labelled(tmp_path, PARTS | {"train/f": ids(255)})
    data = open_label_maps(folder)
    assert len(data.train) == 2 and class_ids(data.train) == (0, 1, 2) and class_pixels(data.train)[0] == 32
    assert data.notes == (f"1 of 3 label maps have no pixel that counts: left out ({folder}/labels/train/f.png)",)


def test_classes_that_training_lacks_are_said(tmp_path):
    maps = {"train/a": ids(0, 1), "test/b": ids(2, 3)}
    data = open_label_maps(labelled(tmp_path, maps, **{"classes.txt": "sky\nroad\ncar\ntree\nbus"}))
    assert data.notes == (
        "3 of 5 classes have no pixel to train on (car, tree, bus)",
        "test has pixels of car, tree, which no image to train on has",
    )


def test_sizes_have_to_agree_as_images_are_turned(tmp_path):
    folder = labelled(tmp_path, {"a": ids(0, 1), "b": ids(0, 1, height=10, width=8), "c": ids(1, 0, width=9)})
    said = r"labels/b.png has 10 x 8 pixels and its image .*images/b.jpg 8 x 10: .* \(1 more of 3 cannot be used\)"
    with pytest.raises(PatchloomError, match=said):
        open_label_maps(folder)
    (folder / "labels/c.png").unlink()
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(image()).save(folder / "images/b.jpg", exif=exif)
    assert open_label_maps(folder).train.truth(1).shape == (10, 8)


def turned(path, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    Image.fromarray(np.asarray(Image.open(path))).save(path, exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_that_exif_turns_and_their_label_maps_as_stored(tmp_path, orientation):
    folder = labelled(tmp_path, {"a": ids(0, 1), "b": ids(0, 1), "c": ids(1, 0)})
    turned(folder / "images/b.jpg", orientation)
    if orientation > 4:
        with pytest.raises(PatchloomError, match=r"b.png is the label map .* as stored \(10 x 8\), but its EXIF"):
            open_label_maps(folder)
    else:
        for _ in range(2):  # from the files, and from the cache
            told = [note for note in open_label_maps(folder).notes if "EXIF" in note]
            assert len(told) == (orientation > 1) and all("1 of 3" in note and "b.jpg" in note for note in told)
    turned(folder / "labels/b.png", orientation)  # turned as its image is
    data = open_label_maps(folder)
    assert not any("EXIF" in note for note in data.notes)
    assert data.train.truth(1).shape == data.train.images.read(1).shape[1:]


@pytest.mark.parametrize(
    "maps, others, said",
    [
        (
            {"a": ids(0, 3), "b": ids(0, 7)},
            {"classes.txt": "sky\nroad\ncar"},
            "labels/a.png holds the number 3, which is none of the 3 classes of .*classes.txt (1 more hold such "
            "numbers): add it there, or give --ignore 3",
        ),
        (
            {"a": ids(255), "b": ids(255)},
            {},
            "no label map of .* has a pixel that counts .*: 255 does not count, so give another --ignore",
        ),
        (
            {"a": ids(1, 255), "b": ids(1)},
            {},
            "has pixels of 1 alone to train on, and none of another class: 255 does not count, so give another "
            "--ignore, or -1 if all do",
        ),
        (
            {"a": ids(0)},
            {"classes.txt": "sky\nroad"},
            "has pixels of sky alone to train on, and none of another class: label maps of at least two classes are "
            "needed",
        ),
        ({"a": ids(0, 1)}, {"images/a.jpg": "no image"}, "images/a.jpg cannot be read as an image"),
        ({"a": ids(0, 1)}, {"labels/a.png": "no label map"}, "labels/a.png cannot be read as a label map"),
    ],
)
def test_bad_label_maps_name_the_file(tmp_path, maps, others, said):
    with pytest.raises(PatchloomError, match=said.replace("(", r"\(").replace(")", r"\)")) as caught:
        open_label_maps(labelled(tmp_path, maps, **others))
    assert "\n" not in str(caught.value)


def test_a_second_look_is_cached_until_a_file_changes(tmp_path, monkeypatch):
    folder = labelled(tmp_path, PARTS)
    first, read = open_label_maps(folder), []
    before = first.train.fingerprint()
    monkeypatch.setattr(segmentation, "read_ids", lambda path, *_: read.append(path))
    again = open_label_maps(folder)
    assert not read and np.array_equal(again.train.counts, first.train.counts)
    assert again.train.fingerprint() == before != first.test.fingerprint()
    monkeypatch.undo()
    Image.fromarray(ids(2, 2, 2, 1)).save(folder / "labels/train/b.png")
    changed = open_label_maps(folder)
    assert class_pixels(changed.train)[2] > class_pixels(first.train)[2]
    assert changed.train.fingerprint() != before


def test_a_map_that_changes_later_is_refused(tmp_path):
    folder = labelled(tmp_path, PARTS)
    data = open_label_maps(folder)
    for number in (9, 70000):
        Image.fromarray(np.full((8, 10), number, np.int32)).save(folder / "labels/train/b.tif")
        os.replace(folder / "labels/train/b.tif", folder / "labels/train/b.png")
        with pytest.raises(PatchloomError, match=f"b.png holds the number {number}, which is none of the 3 classes"):
            data.train.truth(1)


@pytest.mark.parametrize("data", ["shapes:30", Shapes(30, size=24), Data(Shapes(30, size=24), Shapes(5, size=24))])
def test_drawn_shapes(data):
    opened = open_label_maps(data)
    assert len(opened.train) == 30 and opened.validation is None and len(opened.train.classes) == 11
    truth, drawn = opened.train.truth(4), opened.train.images.annotation(4)
    assert truth.dtype == torch.int16 and torch.equal(truth > 0, torch.from_numpy(drawn.mask))
    assert opened.train.classes[int(truth.max())] == opened.train.images.classes[drawn.label]
    counts = class_pixels(opened.train)
    assert counts.sum() == 30 * truth.numel() and (counts > 0).all()
    assert (opened.test is None) == isinstance(data, Shapes)
    assert opened.train.fingerprint() != opened.train.images.fingerprint()


def test_what_has_no_label_maps(tmp_path):
    for data, said in (
        ("digits", "digits has no label maps: give a folder"),
        (str(tmp_path / "nowhere"), "nowhere is no folder: give a folder"),
        ([np.zeros((4, 4))], "these images have no label maps"),
    ):
        with pytest.raises(PatchloomError, match=said):
            open_label_maps(data)
    write(tmp_path / "frames", {"a.png": None})
    with pytest.raises(PatchloomError, match=re.escape(f"did you mean {tmp_path}/frames?")):
        open_label_maps(tmp_path / "frame")
    with pytest.raises(PatchloomError, match="frames holds no label maps: put them into labels/"):
        open_label_maps(tmp_path / "frames")


def test_label_maps_beside_images_as_they_lie(tmp_path):
    """The layout of a public set of tiles: CLASS/Imgs/NAME.jpg with CLASS/Imgs/NAME.png."""
    rng = np.random.default_rng(0)
    for i in range(8):
        place = tmp_path / f"MT_{'ab'[i % 2]}" / "Imgs"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (32, 40), np.uint8)).save(place / f"{i}.jpg")
        mask = np.zeros((32, 40), np.uint8)
        mask[4 : 4 + i] = 255
        Image.fromarray(mask).save(place / f"{i}.png")
    data = open_label_maps(tmp_path)
    train = data.train
    assert train.classes == ("background", "foreground") and len(train) == 8
    for i in range(8):
        image = Path(train.images.describe(i))
        assert image.suffix == ".jpg" and int(train.truth(i).sum()) == 40 * int(image.stem)
    assert sum("few values" in note and "0.png" in note for note in data.notes) == 1


def masks(folder, smoothed=1.5, suffix="png", mode="L", high=255):
    """Draw images with masks of a disc; every third mask is empty."""
    y, x = np.mgrid[:48, :40]
    for i in range(9):
        disc = 255 * ((y - 20) ** 2 + (x - 15) ** 2 < (i % 3 * 50)).astype(np.uint8)
        for place in ("images", "labels"):
            (folder / place).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 255, disc.shape, np.uint8)).save(
            folder / f"images/{i}.jpg"
        )
        soft = Image.fromarray(disc).filter(ImageFilter.GaussianBlur(smoothed)).point(lambda v: v * high // 255)
        soft.convert(mode).save(folder / f"labels/{i}.{suffix}")
    return folder


@pytest.mark.parametrize("high, threshold", [(255, 128), (250, 125), (100, 50)])
def test_masks_with_soft_edges_are_refused_with_the_remedy(tmp_path, high, threshold):
    with pytest.raises(PatchloomError, match=f"two values, smoothed: --threshold {threshold} ") as refused:
        open_label_maps(masks(tmp_path, high=high))
    data = open_label_maps(tmp_path, threshold=int(re.search(r"threshold (\d+)", str(refused.value))[1]))
    assert data.train.classes == ("background", "foreground") and class_ids(data.train) == (0, 255)
    assert len(data.train) == 9 and class_pixels(data.train).sum() == 9 * 48 * 40
    assert any(f"from {threshold} on" in note for note in data.notes)
    expected = np.asarray(Image.open(tmp_path / "labels" / "2.png")) >= threshold
    assert torch.equal(data.train.truth(2), torch.from_numpy(expected).to(torch.int16))
    assert open_label_maps(tmp_path, threshold=threshold + 30).train.fingerprint() != data.train.fingerprint()


def drawn(shape, radius, size=96):
    """Draw twelve smoothed masks, of which a shape other than a line is in every fourth only."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(12):
        picture = Image.new("L", (size, size))
        draw, (x, y) = ImageDraw.Draw(picture), rng.integers(10, size - 30, 2).tolist()
        if isinstance(shape, int):
            draw.line(rng.integers(0, size, 6).tolist(), fill=255, width=shape)
        elif i % 4 == 0 or shape == "disc":
            {"disc": draw.ellipse, "defect": draw.rectangle}[shape](
                (x, y, *(n + SIDES[shape] for n in (x, y))), fill=255
            )
        found.append(np.asarray(picture.filter(ImageFilter.GaussianBlur(radius))))
    return found


SIDES = {"disc": 20, "defect": 5}


@pytest.mark.parametrize("radius", [1, 2])
@pytest.mark.parametrize("shape", [1, 2, 3, "disc", "defect"])
def test_thin_and_small_masks_with_soft_edges_are_refused(shape, radius):
    masks = drawn(shape, radius)
    middle = (max(int(one.max()) for one in masks) + 1) // 2
    pairs = [(np.zeros((*one.shape, 3), np.uint8), one) for one in masks]
    with pytest.raises(PatchloomError, match=f"two values, smoothed: --threshold {middle} "):
        open_label_maps(pairs)
    assert open_label_maps(pairs, threshold=middle).train.classes == ("background", "foreground")


def test_areas_and_gradients_are_no_smoothed_masks():
    """Neither areas of many classes before a background, thin ones among them, nor a ramp, nor contours."""
    rng, (y, x) = np.random.default_rng(0), np.mgrid[:96, :96]
    maps = {"areas": [], "ramp": [], "contours": []}
    for _ in range(6):
        points = rng.integers(0, 96, (60, 2))
        area = ((y[..., None] - points[:, 0]) ** 2 + (x[..., None] - points[:, 1]) ** 2).argmin(-1)
        areas = Image.fromarray(np.where(area % 3 == 0, area, 0).astype(np.uint8))
        ImageDraw.Draw(areas).line(rng.integers(0, 96, 6).tolist(), fill=60, width=2)
        maps["areas"].append(np.asarray(areas))
        maps["ramp"].append((x * 63 // 95).astype(np.uint8))
        disc = Image.fromarray(np.where((y - 40) ** 2 + (x - 40) ** 2 < 400, np.uint8(40), np.uint8(0)))
        ImageDraw.Draw(disc).ellipse((20, 20, 60, 60), outline=20)
        maps["contours"].append(np.asarray(disc))
    for name, those in maps.items():
        pairs = [(np.zeros((96, 96, 3), np.uint8), one) for one in those]
        if name == "contours":
            with pytest.raises(PatchloomError, match=r"hold 3 numbers up to 40: say .* by --threshold 20"):
                open_label_maps(pairs)
        else:
            assert len(open_label_maps(pairs).train.classes) == max(int(one.max()) for one in those) + 1


def test_pixels_on_slopes_are_counted_where_maps_are_read(tmp_path):
    """By hand: a soft edge from 0 to 90 over two columns of five rows, beside a class of 40."""
    one = np.tile(np.uint8([0, 0, 30, 60, 90, 90, 40, 40]), (5, 1))
    rows = ids_of(GivenMaps(open_objects([np.zeros((5, 8, 3), np.uint8)]).train, [one]), "these")
    assert rows.tolist() == [
        [0, n, p, 0, s] for n, p, s in ((0, 10, 0), (30, 5, 5), (40, 10, 0), (60, 5, 5), (90, 10, 0))
    ]


def test_label_maps_of_many_classes_are_no_smoothed_masks(tmp_path):
    rng = np.random.default_rng(0)
    maps = {
        f"train/{i}": rng.choice(np.uint8([*range(19), 255]), (8, 10), p=[0.4, *[0.03] * 18, 0.06]) for i in range(6)
    }
    assert len(open_label_maps(labelled(tmp_path / "a", maps)).train.classes) == 19  # Cityscapes' trainIds
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "classes.txt").write_text("\n".join(map(str, range(256))))
    assert len(open_label_maps(masks(tmp_path / "b"), ignore=-1).train.classes) == 256  # named, they are classes


def test_a_threshold_reads_jpeg_and_three_grey_channels(tmp_path):
    with pytest.raises(PatchloomError, match="JPEG|as PNG, or .*--threshold 128"):
        open_label_maps(masks(tmp_path / "jpg", suffix="jpg"))
    plain = open_label_maps(masks(tmp_path / "png"), threshold=128)
    lossy = open_label_maps(tmp_path / "jpg", threshold=128)
    colour = open_label_maps(masks(tmp_path / "rgb", mode="RGB"), threshold=128)
    given = [(Image.new("L", (40, 48)), Image.open(tmp_path / f"png/labels/{i}.png")) for i in range(9)]
    for i in range(9):
        assert (lossy.train.truth(i) != plain.train.truth(i)).float().mean() < 0.01
        assert torch.equal(colour.train.truth(i), plain.train.truth(i))
        assert torch.equal(open_label_maps(given, threshold=128).train.truth(i), plain.train.truth(i))


@pytest.mark.parametrize(
    "classes, options, said",
    [
        ("", {"threshold": 300}, "--threshold 300 makes one class"),
        ("good\nbad\nugly", {"threshold": 128}, "names 3"),
        ("", {"threshold": 128, "ignore": 3}, "--ignore 3 has no effect"),
    ],
)
def test_thresholds_that_do_not_fit(tmp_path, classes, options, said):
    masks(tmp_path)
    if classes:
        (tmp_path / "classes.txt").write_text(classes)
    with pytest.raises(PatchloomError, match=said):
        open_label_maps(tmp_path, **options)
    (tmp_path / "classes.txt").write_text("good\nbad")
    assert open_label_maps(tmp_path, threshold=128).train.classes == ("good", "bad")


def test_thumbnails_of_a_store_have_no_label_maps(tmp_path):
    folder = labelled(tmp_path, {"a": ids(0, 1), "b": ids(1, 0)})
    for place in ("images", "labels"):
        write(folder / place / "@eaDir" / "a.png", {"SYNOPHOTO_THUMB_M.png": None})
    data = open_label_maps(folder)
    assert len(data.train) == 2 and sum("@eaDir" in note for note in data.notes) == len(data.notes) == 1
