"""Label maps and boxes of Hugging Face data sets, and label maps given in Python."""

import numpy as np
import pytest
from encoding import encoded
from labelled import ids, image
from PIL import Image
from refusing import refusal

from patchloom.data.sources.open import open_data
from patchloom.dense.annotations.base import IGNORED
from patchloom.dense.annotations.detection import open_boxes
from patchloom.dense.annotations.segmentation import open_label_maps

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("hub_cache")


def png(array):
    return {"bytes": encoded(array), "path": None}


def made(*maps, names=("image", "annotation")):
    values = {
        names[0]: [png(image(seed=i)) for i in range(len(maps))],
        names[1]: [one if one is None else png(one) for one in maps],
        "scene": [f"street {i}" for i in range(len(maps))],
    }
    features = {names[0]: datasets.Image(), names[1]: datasets.Image(), "scene": datasets.Value("string")}
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


def saved(folder, **splits):
    datasets.DatasetDict(splits).save_to_disk(folder)
    return f"hf:{folder}"


def test_two_columns_of_images(tmp_path, monkeypatch):
    train = made(ids(0, 1), None, ids(1, 255, 0))
    others = {"validation": made(ids(1, 0)), "test": made(ids(0, 1)), "extra": made(ids(0))}
    name = saved(tmp_path / "set", train=train, **others)
    (tmp_path / "set/classes.txt").write_text("sky\nroad")
    data = open_label_maps(name)
    assert data.train.classes == ("sky", "road") and len(data.train) == 2 and len(data.validation) == 1
    assert data.train.truth(1)[0].tolist() == [1] * 4 + [IGNORED] * 3 + [0] * 3
    assert np.array_equal(data.train.images.read(1).permute(1, 2, 0), image(seed=2))
    assert "The split extra is left out" in data.notes[0] and len(data.notes) == 2
    assert "1 of 3 rows of train" in data.notes[1] and f"({name} train #1)" in data.notes[1]
    read = []
    monkeypatch.setattr("patchloom.dense.annotations.segmentation.read_ids", lambda *given: read.append(given))
    assert open_label_maps(name).train.fingerprint() == data.train.fingerprint() and not read
    monkeypatch.undo()
    assert open_data(name).train.image_column == "image"  # as images alone


@pytest.mark.parametrize("names", [("image", "label"), ("img", "mask"), ("image", "segmentation_map")])
def test_names_of_columns(tmp_path, names):
    splits = {"train": made(ids(0, 1), ids(1), names=names), "val": made(ids(1), names=names)}
    data = open_label_maps(saved(tmp_path / "set", **splits))
    assert data.train.truth(1).unique().tolist() == [1] and data.validation is None and len(data.test) == 1
    (note,) = data.notes
    assert "validation part (1 image) is the test" in note


def test_columns_without_fitting_label_maps(tmp_path):
    for rows, said in (
        (made(ids(0, 1), names=("image", "depth")), "the columns image and depth"),
        (made(None, None), "no label map in the column annotation"),
        (made(ids(0, 1), ids(0, 1, width=9)), "train #1 has 8 x 9 pixels"),
    ):
        assert said in refusal(open_label_maps, saved(tmp_path / said.replace(" ", "-"), train=rows))


def test_pairs_given_in_python(tmp_path):
    Image.fromarray(ids(0, 1)).save(tmp_path / "a.png")
    maps = (ids(2, 1), tmp_path / "a.png", Image.fromarray(ids(0, 255)))
    pairs = [(image(seed=i), one) for i, one in enumerate(maps)]
    data = open_label_maps(pairs)
    assert data.train.classes == ("0", "1", "2") and data.test is None
    assert [data.train.truth(i)[0, 0].item() for i in range(3)] == [2, 0, 0]
    assert np.array_equal(data.train.images.read(1).permute(1, 2, 0), image(seed=1))
    parts = open_label_maps({"train": pairs, "val": pairs[:1], "test": pairs[1:]})
    assert (len(parts.train), len(parts.validation), len(parts.test)) == (3, 1, 2)
    assert parts.train.fingerprint() == data.train.fingerprint() != parts.test.fingerprint()
    said = refusal(open_label_maps, [(image(), ids(0, 1, width=9))])
    assert "label map of list[0] has 8 x 9 pixels" in said and "list[0] 8 x 10" in said
    assert "the key train" in refusal(open_label_maps, {"test": pairs})
    assert "label map of list[0] has values" in refusal(open_label_maps, [(image(), ids(0, 1) / 2)])


def boxed(kind: str, count: int) -> datasets.Dataset:
    """A split of images with one object each, but the last, which has none; classes 0 and 1 in turn."""
    from datasets import ClassLabel, Dataset, Features, Value

    label = Value("int64") if kind == "numbers" else ClassLabel(names=["dog", "cat"])
    key = "label" if kind == "dict" else "category"
    objects = [{"bbox": [[3.0, 2.0, 9.0, 7.0]], key: [i % 2]} for i in range(count - 1)] + [{"bbox": [], key: []}]
    feature = {"bbox": [[Value("float32")]], key: [label]}
    if kind == "list":
        objects = [[{"bbox": one["bbox"][0], key: one[key][0]}] if one[key] else [] for one in objects]
        feature = [{"bbox": [Value("float32")], key: label}]
    images = [Image.fromarray(np.full((16, 20, 3), 9 * i, np.uint8)) for i in range(count)]
    features = Features(image=datasets.Image(), objects=feature)
    return Dataset.from_dict({"image": images, "objects": objects}, features)


@pytest.mark.parametrize("kind", ["dict", "list", "numbers"])
def test_boxes_of_every_split(tmp_path, kind):
    splits = {"train": boxed(kind, 4), "validation": boxed(kind, 3), "test": boxed(kind, 2), "extra": boxed(kind, 2)}
    data = open_boxes(saved(tmp_path / "set", **splits))
    assert (len(data.train), len(data.validation), len(data.test)) == (4, 3, 2)
    assert data.train.classes == (("0", "1") if kind == "numbers" else ("dog", "cat"))
    truth = data.train.truth(1)
    assert truth.boxes.tolist() == [[3, 2, 12, 9]] and truth.labels.tolist() == [1] and truth.masks is None
    assert not len(data.test.truth(1).labels) and data.test.size(0) == (16, 20)
    assert data.test.images.read(0).shape == (3, 16, 20)
    assert any("The split extra is left out" in note for note in data.notes)


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        (None, "no column objects in train, but image"),
        ({"bbox": [[1, 2, 3]], "category": [0]}, "train #0 has an object whose bbox is not x y w h: [1"),
        ({"bbox": [[1, 2, 3, 4]]}, "train #0 has an object without a class"),
        ({"bbox": [[1, 2, 3, 4]], "category": [0, 1]}, "train #0 has lists of 1 and 2"),
        ({"bbox": [[1, 2, 30, 4]], "category": [0]}, "train #0 has a box that reaches out of its image"),
    ],
)
def test_bad_objects_are_named_with_their_row(tmp_path, objects, said):
    kinds = {"bbox": [[datasets.Value("float32")]], "category": [datasets.Value("int64")]}
    values = {"image": [Image.new("L", (20, 16))]} | ({} if objects is None else {"objects": [objects]})
    features = {"image": datasets.Image(), "objects": {key: kinds[key] for key in objects or ()}}
    rows = datasets.Dataset.from_dict(values, datasets.Features({name: features[name] for name in values}))
    assert said in refusal(open_boxes, saved(tmp_path / "set", train=rows))
