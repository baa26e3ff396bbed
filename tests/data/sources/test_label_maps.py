"""Label maps are left out by the names of files and folders, and a line says so."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from patchloom.data.sources import label_maps
from patchloom.data.sources.glob import matches
from patchloom.data.sources.open import open_data

SIDE = 48


def photo(path: Path, side: int = SIDE, grey: bool = False) -> None:
    rng = np.random.default_rng(list(path.name.encode()))
    array = rng.integers(0, 256, (side, side) if grey else (side, side, 3), dtype=np.uint8)
    write(path, Image.fromarray(array), quality=95)


def write(path: Path, image: Image.Image, **how: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **how)


def blobs(path: Path, values: tuple[int, ...] = (0, 3, 7, 11), side: int = SIDE) -> np.ndarray:
    """Rectangles of few values."""
    rng = np.random.default_rng(list(path.name.encode()))
    array = np.full((side, side), values[0], np.uint8)
    for value in values[1:]:
        top, left = rng.integers(0, side // 2, 2)
        array[top : top + side // 3, left : left + side // 3] = value
    return array


def codes(path: Path) -> None:
    write(path, Image.fromarray(blobs(path)))


def palette(path: Path) -> None:
    image = Image.fromarray(blobs(path))
    image.putpalette(np.random.default_rng(0).integers(0, 256, 768).tolist())
    write(path, image)


def black_and_white(path: Path) -> None:
    write(path, Image.fromarray(blobs(path, (0, 255))))


def lossy(path: Path) -> None:
    write(path, Image.fromarray(blobs(path, (0, 255))).convert("RGB"), quality=75)


def colours(path: Path) -> None:
    table = np.random.default_rng(1).integers(0, 256, (256, 3), dtype=np.uint8)
    write(path, Image.fromarray(table[blobs(path)]))


def empty(path: Path) -> None:
    write(path, Image.fromarray(np.zeros((SIDE, SIDE), np.uint8)))


LAYOUTS = {
    "images/{}.jpg masks/{}.png": black_and_white,
    "images/{}.jpg labels/{}.png": codes,
    "JPEGImages/{}.jpg SegmentationClass/{}.png": palette,
    "image/{}.png gt/{}.png": colours,
    "images/{}.jpg masks/{}.jpg": lossy,
    "images/{}.jpg annotations/trimaps/{}.png": codes,
    "frames/clip/{}.jpg ground_truth/clip/{}_mask.png": black_and_white,
    "rgb/{}_rgb.png seg/{}_seg.png": codes,
    "stills/{}.png semantic/{}_L.png": codes,
    "train/{}.jpg trainannot/{}.png": codes,
    "left/a_images/{}.jpg left/a_masks/{}.png": codes,
    "imagesTr/{}_0000.png labelsTr/{}.png": codes,
    "seg_data/images/{}.png seg_data/masks/{}.png": codes,
    "images/frame_1/{}.png masks/frame_1/{}.png": codes,
    "leftImg8bit/{}_leftImg8bit.png gtFine/{}_gtFine_labelIds.png": codes,
    "{}.png masks/{}.png": black_and_white,
    "slide/{}.jpg slide/labels/{}_label.png": codes,
    "{}.jpg {}_mask.png": black_and_white,
    "{}_sat.jpg {}_mask.png": black_and_white,
    "tumour/{}.png tumour/{}_mask.png": black_and_white,
    "{}.png {}_mask_1.png": empty,
    "image_{}.png mask_{}.png": black_and_white,
    "img{}.png gt-{}.png": codes,
    "{}.png label_{}.png": black_and_white,
    "cells/image_{}.png cells/{}_seg.png": codes,
    "images/{}.png binary_masks/{}_L.png": codes,
    "images/gt_{}.png labels/gt_{}.png": codes,
    "seg_{}.png masks/seg_{}.png": codes,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_beside_their_label_maps(tmp_path: Path, layout: str) -> None:
    images, maps = (tmp_path / one for one in layout.split())
    for i in range(8):
        photo(Path(str(images).format(f"{i}b")))
        LAYOUTS[layout](Path(str(maps).format(f"{i}b")))
    photo(Path(str(images).format("9more")))  # has no label map
    data = open_data(tmp_path)
    expected = {str(images).format(name) for name in [*(f"{i}b" for i in range(8)), "9more"]}
    assert {data.train.describe(i) for i in range(len(data.train))} == expected
    assert data.train.labels is None and data.test is None
    (note,) = data.notes
    assert note.startswith("8 files were left out as label maps of the images beside them")
    first = Path(str(maps).format("0b")).relative_to(tmp_path)
    assert f"({first}," in note and ", ...)" in note
    pattern = re.search("'(.*)'", note)
    assert pattern is not None and len(open_data(pattern[1]).train) == 17  # how to keep them, and the images


def test_names_alone_decide(tmp_path: Path) -> None:
    for i in range(8):
        photo(tmp_path / "masks" / f"{i}.jpg")
        photo(tmp_path / "faces" / f"{i}.jpg")
    data = open_data(tmp_path)
    assert len(data.train) == 8 and "8 files were left out as label maps" in data.notes[0]
    assert data.train.describe(0).endswith("faces/0.jpg")


@pytest.mark.parametrize(
    "classes",
    [
        "mask/a{}.jpg face/b{}.jpg",
        "mask/{}.jpg cat/{}.jpg dog/{}.jpg",
        "images/{}.jpg nuclei/{}.png",
        "StillsRaw/{}.png LabeledApproved/{}_L.png",
    ],
)
def test_possible_label_maps_stay_with_a_note(tmp_path: Path, classes: str) -> None:
    """A class called mask stays, and a folder of label maps without a word for them is trained on with a note."""
    for i in range(4):
        for form in classes.split():
            photo(tmp_path / form.format(i))
    data = open_data(tmp_path)
    assert len(data.train) == 4 * len(classes.split()) and len(data.train.classes) == len(classes.split())
    (note,) = data.notes
    assert note.startswith("4 files are used as images and may be label maps (") and "masks/" in note
    assert Path(classes.split()["mask" not in classes].format(0)).parts[0] in note


@pytest.mark.parametrize(
    "classes",
    [
        "circle/{}.png square/{}.png",
        "drawing/{}.png painting/{}.png nothing/{}.png",
        "with_mask/{}.png without_mask/{}.png",
        "labelled/{}.png unlabelled/{}.png",
        "gas/gas_mask_{}.png cat/cat_{}.png",
        "photo/{}.png sketch/{}.png cartoon/{}.png",
    ],
)
def test_classes_without_a_word_or_with_nothing_else_stay(tmp_path: Path, classes: str) -> None:
    for i in range(4):
        for form in classes.split(" "):
            black_and_white(tmp_path / form.format(i))
    data = open_data(tmp_path)
    assert data.notes == () and len(data.train.classes) == len(classes.split(" "))


@pytest.mark.parametrize("folder", ["masks", "."])
def test_label_maps_alone_are_images(tmp_path: Path, folder: str) -> None:
    for i in range(8):
        black_and_white(tmp_path / folder / f"{i}_mask.png")
    data = open_data(tmp_path)
    assert len(data.train) == 8 and not data.notes


def test_a_class_beside_images_with_label_maps_by_name(tmp_path: Path) -> None:
    for i in range(4):
        photo(tmp_path / "photos" / f"p{i}.png")
        photo(tmp_path / "tumour" / f"{i}.png")
        black_and_white(tmp_path / "tumour" / f"{i}_mask.png")
    data = open_data(tmp_path)
    assert data.train.classes == ("photos", "tumour") and len(data.train) == 8 and len(data.notes) == 1


def test_label_maps_without_images_are_left_out_with_their_folder(tmp_path: Path) -> None:
    for i in range(6):
        photo(tmp_path / f"{i}.jpg")
        codes(tmp_path / "masks" / f"{i + 3}.png")
    data = open_data(tmp_path)
    assert len(data.train) == 6 and data.notes[0].startswith("6 files were left out as label maps")


def test_classes_within_the_images_are_found(tmp_path: Path) -> None:
    for i in range(4):
        for kind in "cat", "dog":
            photo(tmp_path / "images" / kind / f"{kind}{i}.jpg")
            codes(tmp_path / "masks" / kind / f"{kind}{i}.png")
    train = open_data(tmp_path).train
    assert train.classes == ("cat", "dog") and train.labels is not None and train.labels.tolist() == [0] * 4 + [1] * 4


def test_one_file_per_object(tmp_path: Path) -> None:
    """The layout of cells in the Data Science Bowl: ID/images/ID.png and ID/masks/ANY.png."""
    for i in range(12):
        photo(tmp_path / f"cell{i}" / "images" / f"cell{i}.png")
        for part in range(3):
            black_and_white(tmp_path / f"cell{i}" / "masks" / f"{i * 77 + part * 5:x}.png")
    assert len(open_data(tmp_path).train) == 12


def test_splits_inside_and_outside(tmp_path: Path) -> None:
    for split, count in {"train": 5, "val": 3, "test": 4}.items():
        for i in range(count):
            photo(tmp_path / "a" / "images" / split / f"{split}{i}.jpg")
            codes(tmp_path / "a" / "labels" / split / f"{split}{i}.png")
            photo(tmp_path / "b" / split / "images" / f"{split}{i}.jpg")
            codes(tmp_path / "b" / split / "masks" / f"{split}{i}.png")
    for root, before in (("a", "images/"), ("b", "")):
        data = open_data(tmp_path / root)
        assert len(data.train) == 5 and data.test is not None and len(data.test) == 4
        assert data.train.labels is None and data.test.labels is None
        assert len({os.path.dirname(data.train.describe(i)) for i in range(5)}) == 1
        within = "" if before else "/images"
        assert data.notes[0] == (
            f"Of 12 images, {before}train{within} (5) is trained on, {before}test{within} (4) is the test, and "
            f"{before}val{within} (3) is neither: choose between runs by it, or move it into train to train on it"
        )
        told = sum(int(count) for note in data.notes for count in re.findall(r"(\d+) files were left out as", note))
        assert len(data.notes) == 2 and told == 12


def test_label_maps_in_train_alone(tmp_path: Path) -> None:
    for i in range(4):
        photo(tmp_path / "train" / "images" / f"{i}.jpg")
        codes(tmp_path / "train" / "masks" / f"{i}.png")
        photo(tmp_path / "test" / "images" / f"t{i}.jpg")
    data = open_data(tmp_path)
    assert data.train.labels is None and data.test is not None and len(data.train) == len(data.test) == 4
    assert data.test.describe(0).endswith("test/images/t0.jpg")


def test_folders_of_label_maps_beside_the_splits(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        for i in range(3):
            photo(tmp_path / split / f"{split}{i}.png")
            codes(tmp_path / f"{split}annot" / f"{split}{i}.png")
    data = open_data(tmp_path)
    assert data.test is not None and len(data.train) == len(data.test) == 3
    assert data.notes[0].startswith("Of 9 images, train (3) is trained on") and "annot" not in data.notes[0]
    assert data.notes[1].startswith("9 files were left out as label maps") and len(data.notes) == 2


def test_no_file_is_read(tmp_path: Path) -> None:
    for name in ("labels/a.png", "images/a.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"no image")
    assert len(open_data(tmp_path).train) == 1


# Label maps by their values: NAME.png beside NAME.jpg.


def scene(i: int, side: int = 96) -> tuple[np.ndarray, np.ndarray]:
    """Return a grey photograph with a dark defect, and its mask of 0 and 255; every fourth has none."""
    rng = np.random.default_rng(i)
    y, x = np.mgrid[:side, :side]
    defect = ((y - rng.integers(20, 70)) ** 2 + (x - rng.integers(20, 70)) ** 2 < 100) & (i % 4 > 0)
    grey = 120 + 30 * np.sin(x / 9) + rng.normal(0, 12, (side, side)) - 60 * defect
    return grey.clip(0, 255).astype(np.uint8), 255 * defect.astype(np.uint8)


def soft(mask: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(mask).filter(ImageFilter.GaussianBlur(1.5)))


MAPS = {
    "0 and 255": lambda mask: mask,
    "numbers": lambda mask: mask // 255 * 3,
    "soft": soft,
    "objects": lambda mask: np.where(mask > 0, 7, np.arange(96)[:, None] // 8).astype(np.uint8),
    "16 bits": lambda mask: mask.astype(np.uint16) * 100,
    "colours": lambda mask: np.stack([mask, 255 - mask, mask // 2], 2),
    "bits": lambda mask: mask > 0,
}


@pytest.mark.parametrize("layout", ["{i}", "MT_{c}/Imgs/{i}", "{split}/{i}"])
@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("suffixes", [(".jpg", ".png"), (".png", ".TIF")])
def test_one_name_in_two_formats_of_which_one_has_few_values(
    tmp_path: Path, layout: str, kind: str, suffixes: tuple[str, str]
) -> None:
    for i in range(16):
        grey, mask = scene(i)
        path = tmp_path / layout.format(i=i, c=i % 3, split="test" if i % 3 else "train")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(grey).save(path.with_suffix(suffixes[0]))
        Image.fromarray(MAPS[kind](mask)).save(path.with_suffix(suffixes[1]))
    data = open_data(tmp_path)
    names = [source.describe(i) for source in (data.train, data.test) if source for i in range(len(source))]
    assert len(names) == 16 and {Path(name).suffix for name in names} == {suffixes[0]}
    (note,) = data.notes
    assert note.startswith("16 files were left out as label maps, since they have few values")
    assert open_data(tmp_path).train.fingerprint() == data.train.fingerprint()
    pattern = re.search("'(.*)'", note)
    assert pattern is not None
    assert {*suffixes} <= {Path(name).suffix for name in matches(pattern[1])}, "the photographs, too"


@pytest.mark.parametrize(
    "kind", ["copy", "drawing", "cut out", "depth", "size", "one colour", "plain", "broken", "another format"]
)
def test_other_pairs_of_two_formats_are_images(tmp_path: Path, kind: str) -> None:
    for i in range(8):
        grey, mask = scene(i)
        other = Image.fromarray({"copy": grey, "drawing": mask}.get(kind, mask))
        if kind in ("drawing", "plain"):
            grey = mask if kind == "drawing" else mask * 0
        if kind == "cut out":
            other = Image.merge("RGBA", [Image.fromarray(grey)] * 3 + [Image.fromarray(mask)])
        elif kind == "depth":
            other = Image.fromarray(np.sort(grey.ravel()).reshape(grey.shape))
        elif kind == "size":
            other = other.resize((48, 48))
        elif kind in ("one colour", "plain"):
            other = Image.new("L", grey.shape, 9)
        elif kind == "another format":
            other = Image.fromarray(grey).quantize(256)
        Image.fromarray(grey).save(tmp_path / f"{i}.jpg")
        other.save(tmp_path / f"{i}.png")
        if kind == "broken":
            (tmp_path / f"{i}.png").write_bytes(b"no image")
    data = open_data(tmp_path)
    assert len(data.train) == 16 and data.notes == ()


def test_few_pairs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(100):
        for suffix, pixels in zip((".jpg", ".png"), scene(i, 80), strict=True):
            Image.fromarray(pixels).save(tmp_path / f"{i}{suffix}")
    opened = []
    monkeypatch.setattr(label_maps, "open_pillow", lambda path: opened.append(path) or Image.open(path))
    assert len(open_data(tmp_path).train) == 100 and len(opened) <= 40
