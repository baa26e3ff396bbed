import os
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
import torch
from labelled import ids, image, labelled, write
from PIL import Image, ImageDraw, ImageFilter
from refusing import refusal

from patchloom.data.decode import Unreadable, read_image
from patchloom.data.source import Data
from patchloom.data.sources.in_memory import open_objects
from patchloom.data.sources.synthetic import Shapes
from patchloom.dense.annotations import segmentation
from patchloom.dense.annotations.base import IGNORED, header_of
from patchloom.dense.annotations.segmentation import (
    GivenLabels,
    StoredMaps,
    class_ids,
    class_pixels,
    ids_of,
    layout_of,
    open_label_maps,
    read_ids,
)

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


def test_pixels_on_slopes_are_counted_where_maps_are_read():
    """By hand: a soft edge from 0 to 90 over two columns of five rows, beside a class of 40."""
    one = np.tile(np.uint8([0, 0, 30, 60, 90, 90, 40, 40]), (5, 1))
    images = open_objects([np.zeros((5, 8, 3), np.uint8)]).train
    rows = ids_of(StoredMaps(images, GivenLabels(images, [one])), "these")
    counts = ((0, 10, 0), (30, 5, 5), (40, 10, 0), (60, 5, 5), (90, 10, 0))  # number, pixels, on slopes
    assert rows.tolist() == [[0, number, pixels, 0, slopes] for number, pixels, slopes in counts]


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


IDS = (np.arange(30).reshape(5, 6) // 4 % 4).astype(np.uint8)


def read(path, colours=None):
    return read_ids(Path(path), str(path), colours)


def palette(ids):
    image = Image.fromarray(ids).convert("P")
    image.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
    return image


def png(path, ids, bits):
    """A grey PNG of few bits a pixel, which PIL does not write."""
    packed = np.packbits(np.unpackbits(ids[..., None], axis=2)[..., 8 - bits :].reshape(len(ids), -1), axis=1)
    rows = b"".join(b"\0" + row.tobytes() for row in packed)
    head = struct.pack(">IIBBBBB", ids.shape[1], ids.shape[0], bits, 0, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        content += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    path.write_bytes(content)


@pytest.mark.parametrize("suffix", ["png", "tif", "bmp", "gif"])
@pytest.mark.parametrize("kind", [Image.fromarray, palette])
def test_numbers_come_back_and_no_palette_is_looked_up(tmp_path, suffix, kind):
    kind(IDS).save(tmp_path / f"a.{suffix}")
    assert np.array_equal(read(tmp_path / f"a.{suffix}"), IDS)
    assert np.array_equal(read_ids((tmp_path / f"a.{suffix}").read_bytes(), "a"), IDS)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_png_of_few_bits(tmp_path, bits):
    ids = IDS % np.uint8(min(2**bits, 255))
    png(tmp_path / "a.png", ids, bits)
    assert np.array_equal(read(tmp_path / "a.png"), ids)


def test_more_than_255_numbers(tmp_path):
    ids = IDS.astype(np.uint16) * 1000
    Image.fromarray(ids).save(tmp_path / "a.png")
    tifffile.imwrite(tmp_path / "a.tif", ids)
    tifffile.imwrite(tmp_path / "b.tif", ids.astype(np.int32), compression="zlib")
    np.save(tmp_path / "a.npy", ids.astype(np.int64)[..., None])
    for name in ("a.png", "a.tif", "b.tif", "a.npy"):
        assert np.array_equal(read(tmp_path / name), ids)


def test_colours_become_their_places(tmp_path):
    colours = np.array([[128, 0, 0], [0, 0, 0], [0, 128, 255], [0, 0, 128]], np.uint8)
    Image.fromarray(colours[IDS]).save(tmp_path / "a.png")
    assert np.array_equal(read(tmp_path / "a.png", colours), IDS)
    Image.fromarray(IDS).save(tmp_path / "b.png")  # numbers stay numbers
    assert np.array_equal(read(tmp_path / "b.png", colours), IDS)
    assert "a.png has the colour (0, 0, 128)" in refusal(read, tmp_path / "a.png", colours[:3])
    assert "a.png shows classes by colours" in refusal(read, tmp_path / "a.png")


def test_colours_that_were_saved_as_a_palette_in_another_order(tmp_path):
    """Programs that make PNGs smaller do so; with the colours at their places, or others, the indices count."""
    colours = np.array([[200, 0, 0], [0, 200, 0], [0, 0, 200], [9, 9, 9]], np.uint8)
    for name, order in (("same", [0, 1, 2, 3]), ("other", [2, 0, 3, 1])):
        image = Image.fromarray(np.argsort(order).astype(np.uint8)[IDS]).convert("P")
        image.putpalette(colours[order].tobytes())
        image.save(tmp_path / f"{name}.png")
        assert np.array_equal(read(tmp_path / f"{name}.png", colours), IDS)
    palette(IDS).save(tmp_path / "strange.png")
    assert np.array_equal(read(tmp_path / "strange.png", colours), IDS)


def size(stored):
    source = SimpleNamespace(
        stored=lambda _: stored, describe=lambda _: "missing.jpg", read=lambda _: read_image(stored)
    )
    return header_of(source, 0).size


def test_orientation_counts_for_maps_and_sizes(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(IDS).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(read(tmp_path / "a.png"), read_image(tmp_path / "a.png")[0])
    for name in ("a.jpg", "b.png", "c.tif"):
        Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / name, exif=exif)
        assert size(tmp_path / name) == (30, 20) == size((tmp_path / name).read_bytes())
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / "d.jpg")
    assert size(tmp_path / "d.jpg") == (20, 30)
    with pytest.raises(Unreadable, match="missing.jpg is not there"):
        size(tmp_path / "missing.jpg")


def test_files_that_are_no_label_maps(tmp_path):
    Image.fromarray(IDS).save(tmp_path / "jpeg.png", "jpeg")
    Image.fromarray(np.stack([IDS, IDS], 2), "LA").save(tmp_path / "two.png")
    np.save(tmp_path / "float.npy", IDS / 2)
    np.save(tmp_path / "minus.npy", IDS.astype(int) - 1)
    for name, said in (
        ("jpeg.png", "changes numbers"),
        ("two.png", "2 channels"),
        ("float.npy", "no whole numbers"),
        ("minus.npy", "the number -1"),
    ):
        found = refusal(read, tmp_path / name)
        assert name in found and said in found
    Image.fromarray(IDS).save(tmp_path / "short.png")
    (tmp_path / "short.png").write_bytes((tmp_path / "short.png").read_bytes()[:50])
    for name in ("short.png", "missing.png"):
        with pytest.raises(Unreadable, match=f"{name} cannot be read as a label map: ."):
            read(tmp_path / name)


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
