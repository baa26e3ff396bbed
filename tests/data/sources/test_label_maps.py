"""Label maps are left out by the names of files and folders, and a line says so."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from patchloom.data.sources.glob import matches
from patchloom.data.sources.open import open_data


def write(root: Path, forms: str, count: int = 8) -> set[str]:
    """Write files that are no images, by the forms of their paths, and return their paths: only names are read."""
    paths = {root / form.format(f"{i}b", f"{i}b") for form in forms.split() for i in range(count)}
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no image")
    return set(map(str, paths))


def described(data) -> set[str]:
    return {part.describe(i) for part in (data.train, data.test) if part is not None for i in range(len(part))}


LAYOUTS = (
    "images/{}.jpg masks/{}.png",
    "JPEGImages/{}.jpg SegmentationClass/{}.png",
    "images/{}.jpg annotations/trimaps/{}.png",
    "frames/clip/{}.jpg ground_truth/clip/{}_mask.png",
    "rgb/{}_rgb.png seg/{}_seg.png",
    "stills/{}.png semantic/{}_L.png",
    "train/{}.jpg trainannot/{}.png",
    "left/a_images/{}.jpg left/a_masks/{}.png",
    "imagesTr/{}_0000.png labelsTr/{}.png",
    "leftImg8bit/{}_leftImg8bit.png gtFine/{}_gtFine_labelIds.png",
    "{}.png masks/{}.png",
    "{}.jpg {}_mask.png",
    "{}_sat.jpg {}_mask.png",
    "{}.png {}_mask_1.png",
    "image_{}.png mask_{}.png",
    "cells/image_{}.png cells/{}_seg.png",
    "images/{}.png binary_masks/{}_L.png",
    "images/gt_{}.png labels/gt_{}.png",
    "seg_{}.png masks/seg_{}.png",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_beside_their_label_maps(tmp_path: Path, layout: str) -> None:
    images, maps = layout.split()
    expected, others = write(tmp_path, images), write(tmp_path, maps)
    expected |= write(tmp_path, images.replace("{}", "more{}"), 1)  # has no label map
    data = open_data(tmp_path)
    assert described(data) == expected
    assert data.train.labels is None and data.test is None
    (note,) = data.notes
    assert note.startswith("8 files were left out as label maps of the images beside them")
    assert f"({Path(min(others)).relative_to(tmp_path)}," in note and ", ...)" in note
    pattern = re.search("'(.*)'", note)
    assert pattern is not None and len(open_data(pattern[1]).train) == 17  # how to keep them, and the images


TREES = {
    "names alone decide": ("faces/{}.jpg", "masks/{}.jpg", ()),
    "label maps alone are images": ("masks/{}_mask.png", "", ()),
    "also in the folder itself": ("{}_mask.png", "", ()),
    "a class beside": ("photos/p{}.png tumour/{}.png", "tumour/{}_mask.png", ("photos", "tumour")),
    "label maps without images": ("{}.jpg", "masks/{}.png masks/more{}.png", ()),
    "classes within": ("images/cat/c{}.jpg images/dog/d{}.jpg", "masks/cat/c{}.png masks/dog/d{}.png", ("cat", "dog")),
    # the Data Science Bowl: ID/images/ID.png and ID/masks/ANY.png
    "a file per object": (
        "c{}/images/c{}.png",
        "c{}/masks/{}f7.png c{}/masks/a{}8.png",
        tuple(f"c{i}b" for i in range(8)),
    ),
    "maps of the training images alone": ("train/images/{}.jpg test/images/t{}.jpg", "train/masks/{}.png", ()),
    "two classes": ("circle/{}.png square/{}.png", "", ("circle", "square")),
    "three classes": ("drawing/{}.png nothing/{}.png painting/{}.png", "", ("drawing", "nothing", "painting")),
    "with and without": ("with_mask/{}.png without_mask/{}.png", "", ("with_mask", "without_mask")),
    "labelled or not": ("labelled/{}.png unlabelled/{}.png", "", ("labelled", "unlabelled")),
    "masks of gas": ("gas/gas_mask_{}.png cat/cat_{}.png", "", ("cat", "gas")),
    "photographs": ("photo/{}.png sketch/{}.png cartoon/{}.png", "", ("cartoon", "photo", "sketch")),
}


@pytest.mark.parametrize("tree", TREES)
def test_label_maps_are_left_out_of_any_tree(tmp_path: Path, tree: str) -> None:
    images, maps, classes = TREES[tree]
    expected, others = write(tmp_path, images), write(tmp_path, maps)
    data = open_data(tmp_path)
    assert described(data) == expected and data.train.classes == classes
    assert ("left out as label maps" in " ".join(data.notes)) == bool(others) and (others or not data.notes)


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
    write(tmp_path, classes, 4)
    data = open_data(tmp_path)
    assert len(data.train) == 4 * len(classes.split()) and len(data.train.classes) == len(classes.split())
    (note,) = data.notes
    assert note.startswith("4 files are used as images and may be label maps (")
    assert Path(classes.split()["mask" not in classes].format(0)).parts[0] in note


@pytest.mark.parametrize(
    ("images", "maps", "train"),
    [
        ("images/{split}/{split}{{}}.jpg", "labels/{split}/{split}{{}}.png", "images/train"),
        ("{split}/images/{split}{{}}.jpg", "{split}/masks/{split}{{}}.png", "train/images"),
        ("{split}/{split}{{}}.png", "{split}annot/{split}{{}}.png", "train"),
    ],
)
def test_splits_inside_and_outside(tmp_path: Path, images: str, maps: str, train: str) -> None:
    for split, count in {"train": 5, "val": 3, "test": 4}.items():
        for form in (images, maps):
            write(tmp_path, form.format(split=split), count)
    data = open_data(tmp_path)
    assert len(data.train) == 5 and data.test is not None and len(data.test) == 4
    assert data.train.labels is None and data.test.labels is None
    assert {os.path.dirname(data.train.describe(i)) for i in range(5)} == {str(tmp_path / train)}
    assert data.notes[0].startswith(f"Of 12 images, {train} (5) is trained on") and "annot" not in data.notes[0]
    told = sum(int(count) for note in data.notes for count in re.findall(r"(\d+) files were left out as", note))
    assert len(data.notes) == 2 and told == 12


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


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *(("{i}", kind) for kind in MAPS),
        ("MT_{c}/Imgs/{i}", "0 and 255"),
        ("{split}/{i}", "soft"),
        ("{split}/{i}", "bits"),
    ],
)
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
