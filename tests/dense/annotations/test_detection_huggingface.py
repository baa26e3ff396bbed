from __future__ import annotations

import numpy as np
import pytest
from PIL import Image as PILImage

from patchloom.dense.annotations.detection import open_boxes
from patchloom.errors import PatchloomError

datasets = pytest.importorskip("datasets")
NAMES = ["dog", "cat"]


def rows(kind: str, count: int) -> datasets.Dataset:
    """A split of images with one object each, but the last, which has none; classes 0 and 1 in turn."""
    from datasets import ClassLabel, Dataset, Features, Image, Value

    label = ClassLabel(names=NAMES) if kind != "numbers" else Value("string" if kind == "text" else "int64")
    objects = []
    for i in range(count):
        there = i < count - 1
        labels, boxes = ([i % 2], [[3.0, 2.0, 9.0, 7.0]]) if there else ([], [])
        if kind == "list":
            objects.append([{"bbox": box, "category": one} for box, one in zip(boxes, labels, strict=True)])
        else:
            objects.append({"bbox": boxes, "label" if kind == "dict" else "category": labels})
    images = [PILImage.fromarray(np.full((16, 20, 3), 9 * i, np.uint8)) for i in range(count)]
    if kind == "list":
        feature = [{"bbox": [Value("float32")], "category": label}]
    else:
        feature = {"bbox": [[Value("float32")]], "label" if kind == "dict" else "category": [label]}
    return Dataset.from_dict({"image": images, "objects": objects}, Features(image=Image(), objects=feature))


@pytest.mark.parametrize("kind", ["dict", "list", "numbers"])
def test_boxes_of_every_split(tmp_path, kind):
    from datasets import DatasetDict

    splits = {"train": rows(kind, 4), "validation": rows(kind, 3), "test": rows(kind, 2), "extra": rows(kind, 2)}
    DatasetDict(splits).save_to_disk(tmp_path / "set")
    data = open_boxes(f"hf:{tmp_path / 'set'}")
    assert (len(data.train), len(data.validation), len(data.test)) == (4, 3, 2)
    assert data.train.classes == (("0", "1") if kind == "numbers" else ("dog", "cat"))
    truth = data.train.truth(1)
    assert truth.boxes.tolist() == [[3, 2, 12, 9]] and truth.labels.tolist() == [1] and truth.masks is None
    assert not len(data.test.truth(1).labels) and data.test.size(0) == (16, 20)
    assert data.test.images.read(0).shape == (3, 16, 20)
    assert any("The split extra is left out" in note for note in data.notes)


def test_a_set_without_objects_or_with_strange_ones(tmp_path):
    one = rows("dict", 3)
    one.remove_columns("objects").save_to_disk(tmp_path / "none")
    with pytest.raises(PatchloomError, match=r"none has no column objects in train, but image"):
        open_boxes(f"hf:{tmp_path / 'none'}")

    def broken(name: str, objects: dict) -> str:
        from datasets import Dataset

        images = {"image": [PILImage.new("L", (20, 16))], "objects": [objects]}
        Dataset.from_dict(images, datasets.Features(image=datasets.Image(), objects=kinds(objects))).save_to_disk(
            tmp_path / name
        )
        return f"hf:{tmp_path / name}"

    def kinds(objects: dict) -> dict:
        number = datasets.Value("float32")
        return {key: [[number]] if key == "bbox" else [datasets.Value("int64")] for key in objects}

    for objects, sentence in (
        ({"bbox": [[1, 2, 3]], "category": [0]}, r"train #0 has an object whose bbox is not x y w h: \[1"),
        ({"bbox": [[1, 2, 3, 4]]}, "train #0 has an object without a class"),
        ({"bbox": [[1, 2, 3, 4]], "category": [0, 1]}, "train #0 has lists of 1 and 2 in its objects"),
        ({"bbox": [[1, 2, 30, 4]], "category": [0]}, "train #0 has a box that reaches out of its image"),
    ):
        with pytest.raises(PatchloomError, match=sentence):
            open_boxes(broken(str(abs(hash(sentence))), objects))
