import os
from pathlib import Path

import numpy as np
import pytest
import torch
from labelled import ids, image, labelled, write
from PIL import Image, ImageDraw, ImageFilter
from refusing import refusal

from patchloom.data.source import Data
from patchloom.data.sources.synthetic import Shapes
from patchloom.dense.annotations import segmentation
from patchloom.dense.annotations.base import IGNORED
from patchloom.dense.annotations.segmentation import class_ids, class_pixels, open_label_maps

PARTS = {"train/a": ids(0, 1, 255), "train/b": ids(1, 2), "val/c": ids(0, 1), "test/d": ids(2, 0), "test/e": ids(1)}


def test_a_folder_with_parts_and_names(tmp_path):
    data = open_label_maps(labelled(tmp_path, PARTS, **{"classes.txt": "sky\nroad\ncar"}))
    assert (len(data.train), len(data.validation), len(data.test)) == (2, 1, 2) and data.notes == ()
    assert data.train.classes == data.test.classes == ("sky", "road", "car") and class_ids(data.train) == (0, 1, 2)
    truth = data.train.truth(0)
    assert truth.dtype == torch.int16 and truth.shape == data.train.images.read(0).shape[1:] == data.train.size(0)
    assert truth[0].tolist() == [0, 0, 0, 0, 1, 1, 1, IGNORED, IGNORED, IGNORED]
    assert data.train.images.place(1) == "images/train/b.jpg" and data.train.truth(1).unique().tolist() == [1, 2]
    assert class_pixels(data.train).tolist() == [32, 24 + 40, 40]
    assert class_pixels(data.train.subset([1]).subset([0, 0])).tolist() == [0, 80, 80]
    assert data.train.images.labels is None


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
    (note,) = data.notes
    assert "0 and 255 alone" in note


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
    maps, listed = {"a": ids(7, 300), "b": ids(300, 255)}, {"classes.txt": "300 car\n255 road\n7 sky"}
    train = open_label_maps(labelled(tmp_path / "any", maps, **listed), ignore=-1).train
    assert train.classes == ("car", "road", "sky") and class_ids(train) == (300, 255, 7)
    assert train.truth(0)[0].tolist() == [2] * 5 + [0] * 5 and train.truth(1)[0].tolist() == [0] * 5 + [1] * 5


def test_colours(tmp_path):
    colours = np.array([[0, 0, 0], [0, 0, 255], [128, 64, 0]], np.uint8)
    folder = labelled(tmp_path, {"a": colours[ids(0, 1, 2)], "b": colours[ids(2, 1)]})
    said = refusal(open_label_maps, folder)
    assert "labels/a.png shows classes by colours" in said and "(1 more of 2 cannot be used)" in said
    write(folder, {"classes.txt": "0 0 0 void\n0 0 255 car\n128 64 0 road"})
    data = open_label_maps(folder, ignore=0)
    assert data.train.classes == ("car", "road") and data.train.truth(0).unique().tolist() == [IGNORED, 0, 1]


ADE = {"training/a": ids(0, 1, 2), "training/b": ids(150, 2, 0), "validation/c": ids(2, 150)}
INFO = "\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *(f"{i}\t0\t0\t0\t0\tthing {i}" for i in range(1, 151))])


def ade(folder, maps, **others):
    files = {f"images/{name}.jpg": None for name in maps}
    return write(folder, files | {f"annotations/{name}.png": content for name, content in maps.items()} | others)


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
    assert "is taken for ADE20K" in data.notes[0] and "validation part (1 image) is the test" in data.notes[-1]


def test_other_data_with_the_folders_of_ade20k(tmp_path):
    data = open_label_maps(ade(tmp_path, {"training/a": ids(0, 1, 2), "validation/c": ids(2, 1)}))
    assert data.train.classes == ("0", "1", "2") and not any("ADE" in note for note in data.notes)
    listed = {"classes.txt": "\n".join(map(str, range(152)))}
    assert (
        len(open_label_maps(ade(tmp_path / "more", ADE | {"training/d": ids(0, 151)}, **listed)).train.classes) == 152
    )


def test_maps_and_classes_without_a_pixel_that_counts_are_noted(tmp_path):
    data = open_label_maps(labelled(tmp_path / "a", {"a": ids(0, 3), "b": ids(3, 255)}))
    assert data.train.classes == ("0", "1", "2", "3") and data.validation is None is data.test
    assert data.notes == ("2 of 4 classes have no pixel to train on (1, 2)",)
    data = open_label_maps(labelled(tmp_path / "b", PARTS | {"train/f": ids(255)}))
    assert len(data.train) == 2 and class_ids(data.train) == (0, 1, 2) and class_pixels(data.train)[0] == 32
    (note,) = data.notes
    assert "1 of 3 label maps have no pixel that counts" in note and "labels/train/f.png" in note
    maps = {"train/a": ids(0, 1), "test/b": ids(2, 3)}
    data = open_label_maps(labelled(tmp_path / "c", maps, **{"classes.txt": "sky\nroad\ncar\ntree\nbus"}))
    assert data.notes[0] == "3 of 5 classes have no pixel to train on (car, tree, bus)"
    assert "test has pixels of car, tree" in data.notes[1]


def test_maps_have_the_sizes_of_their_images(tmp_path):
    folder = labelled(tmp_path, {"a": ids(0, 1), "b": ids(0, 1, height=10, width=8), "c": ids(1, 0, width=9)})
    said = refusal(open_label_maps, folder)
    assert "labels/b.png has 10 x 8 pixels" in said and "images/b.jpg 8 x 10" in said and "(1 more of 3" in said


def turn(path, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    Image.fromarray(np.asarray(Image.open(path))).save(path, exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_that_exif_turns_and_their_label_maps_as_stored(tmp_path, orientation):
    folder = labelled(tmp_path, {"a": ids(0, 1), "b": ids(0, 1), "c": ids(1, 0)})
    turn(folder / "images/b.jpg", orientation)
    if orientation > 4:
        assert "as stored (10 x 8), but its EXIF" in refusal(open_label_maps, folder)
    else:
        for _ in range(2):  # from the files, and from the cache
            told = [note for note in open_label_maps(folder).notes if "EXIF" in note]
            assert len(told) == (orientation > 1) and all("1 of 3" in note and "b.jpg" in note for note in told)
    turn(folder / "labels/b.png", orientation)  # as its image
    data = open_label_maps(folder)
    assert not any("EXIF" in note for note in data.notes)
    assert data.train.truth(1).shape == data.train.images.read(1).shape[1:]


@pytest.mark.parametrize(
    "maps, others, said",
    [
        (
            {"a": ids(0, 3), "b": ids(0, 7)},
            {"classes.txt": "sky\nroad\ncar"},
            "labels/a.png holds the number 3; 3 classes; classes.txt; (1 more; --ignore 3",
        ),
        ({"a": ids(255), "b": ids(255)}, {}, "has a pixel that counts; 255 does not count; --ignore"),
        ({"a": ids(1, 255), "b": ids(1)}, {}, "pixels of 1 alone; 255 does not count; or -1"),
        ({"a": ids(0)}, {"classes.txt": "sky\nroad"}, "pixels of sky alone; at least two classes"),
        ({"a": ids(0, 1)}, {"images/a.jpg": "no image"}, "images/a.jpg cannot be read as an image"),
        ({"a": ids(0, 1)}, {"labels/a.png": "no label map"}, "labels/a.png cannot be read as a label map"),
    ],
)
def test_bad_label_maps_name_the_file(tmp_path, maps, others, said):
    found = refusal(open_label_maps, labelled(tmp_path, maps, **others))
    assert all(one in found for one in said.split("; "))


def test_a_second_look_is_cached_until_a_file_changes(tmp_path, monkeypatch):
    folder = labelled(tmp_path, PARTS)
    first, read = open_label_maps(folder), []
    before = first.train.fingerprint()
    monkeypatch.setattr(segmentation, "read_ids", lambda path, *_: read.append(path))
    again = open_label_maps(folder)
    assert not read and np.array_equal(again.train.pixels, first.train.pixels)
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
        assert f"b.png holds the number {number}" in refusal(data.train.truth, 1)


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
    assert "leave out --threshold" in refusal(open_label_maps, data, threshold=9)


def test_data_without_label_maps(tmp_path):
    assert "digits has no label maps" in refusal(open_label_maps, "digits")
    assert "nowhere does not exist" in refusal(open_label_maps, str(tmp_path / "nowhere"))
    assert "these images have no label maps" in refusal(open_label_maps, [np.zeros((4, 4))])
    write(tmp_path / "frames", {"a.png": None})
    assert f"did you mean {tmp_path}/frames?" in refusal(open_label_maps, tmp_path / "frame")
    assert "frames holds no label maps" in refusal(open_label_maps, tmp_path / "frames")


def test_label_maps_beside_images_as_they_lie(tmp_path):
    """The layout of a public set of tiles: CLASS/Imgs/NAME.jpg with CLASS/Imgs/NAME.png; and thumbnails of a store."""
    write(tmp_path / "MT_a" / "Imgs" / "@eaDir" / "0.jpg", {"SYNOPHOTO_THUMB_M.png": None})
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
        path = Path(train.images.describe(i))
        assert path.suffix == ".jpg" and int(train.truth(i).sum()) == 40 * int(path.stem)
    assert sum("few values" in note and "0.png" in note for note in data.notes) == 1
    assert sum("@eaDir" in note for note in data.notes) == 1


def smoothed_masks(folder, suffix="png", mode="L", high=255):
    """Draw images with smoothed masks of a disc; every third mask is empty."""
    y, x = np.mgrid[:48, :40]
    for i in range(9):
        disc = 255 * ((y - 20) ** 2 + (x - 15) ** 2 < (i % 3 * 50)).astype(np.uint8)
        for place in ("images", "labels"):
            (folder / place).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image(48, 40, i)).save(folder / f"images/{i}.jpg")
        soft = Image.fromarray(disc).filter(ImageFilter.GaussianBlur(1.5)).point(lambda v: v * high // 255)
        soft.convert(mode).save(folder / f"labels/{i}.{suffix}")
    return folder


@pytest.mark.parametrize("high, threshold", [(255, 128), (250, 125), (100, 50)])
def test_masks_with_soft_edges_are_refused_with_the_remedy(tmp_path, high, threshold):
    assert f"two values, smoothed: --threshold {threshold} " in refusal(
        open_label_maps, smoothed_masks(tmp_path, high=high)
    )
    data = open_label_maps(tmp_path, threshold=threshold)
    assert data.train.classes == ("background", "foreground") and class_ids(data.train) == (0, 255)
    assert len(data.train) == 9 and class_pixels(data.train).sum() == 9 * 48 * 40
    assert any(f"from {threshold} on" in note for note in data.notes)
    expected = np.asarray(Image.open(tmp_path / "labels" / "2.png")) >= threshold
    assert torch.equal(data.train.truth(2), torch.from_numpy(expected).to(torch.int16))
    assert open_label_maps(tmp_path, threshold=threshold + 30).train.fingerprint() != data.train.fingerprint()


def pairs(masks):
    return [(np.zeros((*one.shape, 3), np.uint8), one) for one in masks]


def drawn(shape, radius, size=96):
    """Draw twelve smoothed masks, of which a defect is in every fourth only."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(12):
        picture = Image.new("L", (size, size))
        draw, (x, y) = ImageDraw.Draw(picture), rng.integers(10, size - 30, 2).tolist()
        if isinstance(shape, int):
            draw.line(rng.integers(0, size, 6).tolist(), fill=255, width=shape)
        elif shape == "disc":
            draw.ellipse((x, y, x + 20, y + 20), fill=255)
        elif shape == "large":
            draw.rectangle((0, 0, size, size // 2 - 8), fill=255)
        elif i % 4 == 0:
            draw.rectangle((x, y, x + 5, y + 5), fill=255)
        found.append(np.asarray(picture.filter(ImageFilter.GaussianBlur(radius))))
    return found


@pytest.mark.parametrize("radius", [1, 2])
@pytest.mark.parametrize("shape", [1, 2, 3, "disc", "large", "defect"])
def test_masks_of_any_shape_with_soft_edges_are_refused(shape, radius):
    masks = drawn(shape, radius)
    middle = (max(int(one.max()) for one in masks) + 1) // 2
    assert f"two values, smoothed: --threshold {middle} " in refusal(open_label_maps, pairs(masks))
    assert open_label_maps(pairs(masks), threshold=middle).train.classes == ("background", "foreground")


def test_areas_and_gradients_are_no_smoothed_masks(tmp_path):
    """Neither many classes, nor areas before a background, thin ones among them, nor a ramp, nor contours."""
    rng, (y, x) = np.random.default_rng(0), np.mgrid[:96, :96]
    maps = {"areas": [], "ramp": [], "contours": [], "Cityscapes": []}
    train_ids, shares = np.uint8([*range(19), 255]), [0.4, *[0.03] * 18, 0.06]
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
        maps["Cityscapes"].append(rng.choice(train_ids, (96, 96), p=shares))
    for name in ("areas", "ramp", "Cityscapes"):
        largest = max(int(one[one < 255].max()) for one in maps[name])
        assert len(open_label_maps(pairs(maps[name])).train.classes) == largest + 1
    said = refusal(open_label_maps, pairs(maps["contours"]))
    assert "hold 3 numbers up to 40" in said and "--threshold 20" in said
    write(smoothed_masks(tmp_path), {"classes.txt": "\n".join(map(str, range(256)))})
    assert len(open_label_maps(tmp_path, ignore=-1).train.classes) == 256  # named, they are classes


def test_a_threshold_reads_jpeg_and_three_grey_channels(tmp_path):
    assert "--threshold 128" in refusal(open_label_maps, smoothed_masks(tmp_path / "jpg", suffix="jpg"))
    plain = open_label_maps(smoothed_masks(tmp_path / "png"), threshold=128)
    lossy = open_label_maps(tmp_path / "jpg", threshold=128)
    colour = open_label_maps(smoothed_masks(tmp_path / "rgb", mode="RGB"), threshold=128)
    paths = [tmp_path / f"png/labels/{i}.png" for i in range(9)]
    given = open_label_maps([(Image.new("L", (40, 48)), Image.open(path)) for path in paths], threshold=128)
    for i in range(9):
        assert (lossy.train.truth(i) != plain.train.truth(i)).float().mean() < 0.01
        assert torch.equal(colour.train.truth(i), plain.train.truth(i))
        assert torch.equal(given.train.truth(i), plain.train.truth(i))


def test_thresholds_that_do_not_fit(tmp_path):
    smoothed_masks(tmp_path)
    for number in (300, 0):
        assert f"--threshold {number} makes one class" in refusal(open_label_maps, tmp_path, threshold=number)
    assert "--ignore 3 has no effect" in refusal(open_label_maps, tmp_path, threshold=128, ignore=3)
    (tmp_path / "classes.txt").write_text("good\nbad\nugly")
    assert "names 3" in refusal(open_label_maps, tmp_path, threshold=128)
    (tmp_path / "classes.txt").write_text("good\nbad")
    assert open_label_maps(tmp_path, threshold=128).train.classes == ("good", "bad")
