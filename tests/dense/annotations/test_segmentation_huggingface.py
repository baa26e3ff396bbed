from __future__ import annotations

import io

import numpy as np
import pytest
from labelled import ids, image
from PIL import Image

from patchloom.data.sources.open import open_data
from patchloom.dense.annotations.base import IGNORED
from patchloom.dense.annotations.segmentation import open_label_maps
from patchloom.errors import PatchloomError

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("hub_cache")


def png(array):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "png")
    return {"bytes": file.getvalue(), "path": None}


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
    name = saved(
        tmp_path / "set",
        train=made(ids(0, 1), None, ids(1, 255, 0)),
        validation=made(ids(1, 0)),
        test=made(ids(0, 1)),
        extra=made(ids(0)),
    )
    (tmp_path / "set/classes.txt").write_text("sky\nroad")
    data = open_label_maps(name)
    assert data.train.classes == ("sky", "road") and len(data.train) == 2 and len(data.validation) == 1
    assert data.train.truth(1)[0].tolist() == [1] * 4 + [IGNORED] * 3 + [0] * 3
    assert np.array_equal(data.train.images.read(1).permute(1, 2, 0), image(seed=2))
    assert data.notes == (
        f"1 of 3 rows of train have no label map: left out ({name} train #1)",
        "The split extra is left out: only train, validation and test are taken",
    )
    read = []
    monkeypatch.setattr("patchloom.dense.annotations.segmentation.read_ids", lambda *given: read.append(given))
    assert open_label_maps(name).train.fingerprint() == data.train.fingerprint() and not read
    monkeypatch.undo()
    assert open_data(name).train.image_column == "image"  # as images alone


@pytest.mark.parametrize("names", [("image", "label"), ("img", "mask"), ("image", "segmentation_map")])
def test_names_of_columns(tmp_path, names):
    data = open_label_maps(
        saved(tmp_path / "set", train=made(ids(0, 1), ids(1), names=names), val=made(ids(1), names=names))
    )
    assert data.train.truth(1).unique().tolist() == [1] and data.validation is None and len(data.test) == 1
    assert data.notes == ("The validation part (1 image) is the test, as there is no other",)


def test_what_is_wrong_with_a_column(tmp_path):
    with pytest.raises(PatchloomError, match="has the columns image and depth of datasets.Image.*label maps label"):
        open_label_maps(saved(tmp_path / "a", train=made(ids(0, 1), names=("image", "depth"))))
    with pytest.raises(PatchloomError, match="train has no label map in the column annotation: fill it"):
        open_label_maps(saved(tmp_path / "b", train=made(None, None)))
    with pytest.raises(
        PatchloomError, match=r"annotation of hf:.*/c train #1 has 8 x 9 pixels and its image .* 8 x 10"
    ):
        open_label_maps(saved(tmp_path / "c", train=made(ids(0, 1), ids(0, 1, width=9))))


def test_pairs_given_in_python(tmp_path):
    Image.fromarray(ids(0, 1)).save(tmp_path / "a.png")
    pairs = [
        (image(seed=0), ids(2, 1)),
        (image(seed=1), tmp_path / "a.png"),
        (image(seed=2), Image.fromarray(ids(0, 255))),
    ]
    data = open_label_maps(pairs)
    assert data.train.classes == ("0", "1", "2") and data.test is None
    assert [data.train.truth(i)[0, 0].item() for i in range(3)] == [2, 0, 0]
    assert np.array_equal(data.train.images.read(1).permute(1, 2, 0), image(seed=1))
    parts = open_label_maps({"train": pairs, "val": pairs[:1], "test": pairs[1:]})
    assert (len(parts.train), len(parts.validation), len(parts.test)) == (3, 1, 2)
    assert parts.train.fingerprint() == data.train.fingerprint() != parts.test.fingerprint()
    with pytest.raises(
        PatchloomError, match=r"the label map of list\[0\] has 8 x 9 pixels and its image list\[0\] 8 x 10"
    ):
        open_label_maps([(image(), ids(0, 1, width=9))])
    with pytest.raises(PatchloomError, match="has the key train"):
        open_label_maps({"test": pairs})
    with pytest.raises(PatchloomError, match=r"the label map of list\[0\] has values that are no whole numbers"):
        open_label_maps([(image(), ids(0, 1) / 2)])
