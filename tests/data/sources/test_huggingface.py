"""Data sets of Hugging Face give the same images and messages as files."""

import pickle
import sys

import numpy as np
import pytest
import torch
from encoding import encoded
from refusing import refused

from patchloom.data.augment import RandomCrop
from patchloom.data.decode import Unreadable
from patchloom.data.loader import training_batches
from patchloom.data.sources.open import open_data

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("hub_cache")

CROP = RandomCrop((8, 8))
PIXELS = np.random.default_rng(0).integers(0, 256, (12, 9, 11, 3), dtype=np.uint8)


def made(numbers, labels=None, names=("cat", "dog"), **columns):
    """Data set of PIXELS[number] for each number, or of None; labels alternate."""
    images = [None if one is None else {"bytes": encoded(PIXELS[one]), "path": None} for one in numbers]
    features = {"picture": datasets.Image(), "kind": datasets.ClassLabel(names=list(names))}
    values = {"picture": images, "kind": [i % 2 for i in range(len(images))] if labels is None else labels}
    for name, (feature, value) in columns.items():
        features[name], values[name] = feature, [value] * len(images)
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


def parquet(folder, **splits):
    folder.mkdir(exist_ok=True)
    for split, dataset in splits.items():
        dataset.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return f"hf:{folder}"


def saved(folder, **splits):
    datasets.DatasetDict(splits).save_to_disk(folder)
    return f"hf:{folder}"


def assert_holds(source, numbers):
    assert len(source) == len(numbers) and source.classes == ("cat", "dog")
    for i, number in enumerate(numbers):
        assert source.read(i).dtype == torch.uint8
        np.testing.assert_array_equal(source.read(i).permute(1, 2, 0).numpy(), PIXELS[number])


@pytest.mark.parametrize("store", [parquet, saved])
def test_samples_are_the_stored_images(tmp_path, store):
    name = store(tmp_path / "set", train=made(range(8), [0, 1, None, -1, 1, 1, 0, 0]), validation=made([9, 8]))
    data = open_data(name)
    assert_holds(data.train, range(8))
    assert data.train.labels.tolist() == [0, 1, -1, -1, 1, 1, 0, 0] and data.train.labels.dtype == np.int64
    assert_holds(data.test, [9, 8])
    assert data.test.labels.tolist() == [0, 1]
    assert data.train.describe(3) == f"{name} train #3" and data.test.describe(1) == f"{name} validation #1"
    assert_holds(pickle.loads(pickle.dumps(data.train)), range(8))
    again = open_data(name)
    assert (again.train.fingerprint(), again.train.stamp()) == (data.train.fingerprint(), data.train.stamp())
    assert data.train.stamp() is not None and data.train.fingerprint() != data.test.fingerprint()


@pytest.mark.parametrize("store", [parquet, saved])
def test_changed_content_is_read_and_has_another_fingerprint(tmp_path, store):
    name = store(tmp_path / "set", train=made(range(4)))
    before = open_data(name).train
    told = before.fingerprint(), before.stamp()
    if store is saved:
        import shutil

        shutil.rmtree(tmp_path / "set")
    store(tmp_path / "set", train=made(range(4, 8)))
    after = open_data(name).train
    assert_holds(after, range(4, 8))
    assert after.fingerprint() != told[0] and after.stamp() != told[1]


def test_further_splits_are_left_out_and_counted(tmp_path):
    strange = datasets.Dataset.from_dict({"text": ["a"]})
    splits = {"train": made(range(5)), "validation": made([5, 6]), "test": made([7]), "extra": strange}
    data = open_data(saved(tmp_path / "four", **splits))
    assert (len(data.train), len(data.test)) == (5, 1)
    (note,) = data.notes
    assert all(one in note for one in ("train (5) is trained on", "test (1) is the test", "validation (2)"))
    assert data.others.keys() == {"validation"}
    assert_holds(data.others["validation"], [5, 6])
    (note,) = open_data(saved(tmp_path / "two", train=made(range(5)), more=made([5, 6]))).notes
    assert "more (2) is not" in note


@pytest.mark.parametrize("store", [parquet, saved])
def test_batches_and_contents_are_those_of_files(tmp_path, store):
    (tmp_path / "files").mkdir()
    for i in range(12):
        (tmp_path / "files" / f"{i:02}.png").write_bytes(encoded(PIXELS[i]))
    source = open_data(store(tmp_path / "set", train=made([*range(12), 1, None, None]))).train
    files, found = open_data(tmp_path / "files").train, source.contents()
    assert (found[:13] == files.contents()[[*range(12), 1]]).all()
    assert len(np.unique(found)) == 14, "no image is no copy of another"
    full = training_batches(files, CROP, 3, 7, 2, 7)
    tail = list(training_batches(source.subset(range(12)), CROP, 3, 7, 2, 7, workers=2))
    assert len(tail) == 5
    for ours, theirs in zip(tail, full, strict=True):
        assert torch.equal(ours.indices, theirs.indices) and torch.equal(ours.views[0], theirs.views[0])


def test_one_split_is_the_training_data(tmp_path):
    made(range(3)).save_to_disk(tmp_path / "alone")
    for name, count in ((f"hf:{tmp_path / 'alone'}", 3), (parquet(tmp_path / "set", test=made(range(4))), 4)):
        data = open_data(name)
        assert_holds(data.train, range(count))
        assert data.test is None
    (tmp_path / "arrow").mkdir()
    (tmp_path / "alone" / "data-00000-of-00001.arrow").rename(tmp_path / "arrow" / "train.arrow")
    assert_holds(open_data(f"hf:{tmp_path / 'arrow'}").train, range(3))


def test_columns_are_found_by_their_type(tmp_path):
    other = (datasets.Image(), {"bytes": encoded(PIXELS[0]), "path": None})
    refused(saved(tmp_path / "masks", train=made([1, 2], mask=other)), "kind, mask, but no single column of images")
    data = open_data(saved(tmp_path / "both", train=made([1, 2], image=other)))
    assert torch.equal(data.train.read(1), torch.from_numpy(PIXELS[0]).permute(2, 0, 1))
    fine = (datasets.ClassLabel(names=["a", "b", "c"]), 2)
    assert open_data(saved(tmp_path / "fine", train=made([1, 2], fine=fine))).train.labels is None
    data = open_data(saved(tmp_path / "label", train=made([1, 2], label=fine)))
    assert data.train.classes == ("a", "b", "c") and data.train.labels.tolist() == [2, 2]


def test_images_that_lie_beside_the_table_and_broken_ones(tmp_path):
    (tmp_path / "set").mkdir()
    for name in ("a.png", "gone.png"):
        (tmp_path / name).write_bytes(encoded(PIXELS[0]))
    paths = [{"bytes": None, "path": str(tmp_path / name)} for name in ("a.png", "gone.png")]
    images = [*paths, None, {"bytes": encoded(PIXELS[1])[:70], "path": None}]
    features = datasets.Features({"image": datasets.Image(decode=False)})
    datasets.Dataset.from_dict({"image": images}, features=features).to_parquet(tmp_path / "set" / "train.parquet")
    (tmp_path / "gone.png").unlink()
    source = open_data(f"hf:{tmp_path / 'set'}").train
    np.testing.assert_array_equal(source.read(0).permute(1, 2, 0).numpy(), PIXELS[0])
    for i, reason in ((1, "gone.png cannot be read"), (2, "#2 has no image"), (3, "train #3 cannot be read")):
        with pytest.raises(Unreadable, match=reason):
            source.read(i)
    assert source.stamp() is None and source.labels is None  # the files may change without the table


def test_other_columns_are_read_and_name_groups(tmp_path):
    rows = made(range(8), age=(datasets.Value("float64"), 3.5), plate=(datasets.Value("string"), "a"))
    rows = rows.map(lambda row, i: {"age": None if i == 2 else i / 2, "plate": f"p{i // 2}"}, with_indices=True)
    name = parquet(tmp_path / "set", train=rows, test=rows)
    train = open_data(name).train
    assert train.column_names() == ["age", "plate"] and train.column("picture") is None is train.column("kind")
    assert train.column("age") == ["0.0", "0.5", "", *(str(i / 2) for i in range(3, 8))]
    assert train.subset([1, 4]).column("plate") == ["p0", "p2"]
    grouped = open_data(name, group="plate")
    assert grouped.train.groups.tolist() == grouped.test.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    refused(name, "needs names of files", group="patient")


def test_errors_say_what_to_do(tmp_path, monkeypatch):
    refused("hf:", "names no data set")
    refused(f"hf:{tmp_path}", "holds no .parquet or .arrow files")
    refused(saved(tmp_path / "x", train=made(range(4))), "--group patient needs names of files", group="patient")
    refused(saved(tmp_path / "two", a=made([1]), b=made([2])), "splits a, b, and none is called train")
    refused(saved(tmp_path / "none", train=made([1]).remove_columns("picture")), "no single column of images")
    strange = made([1], names=("x", "y"))
    refused(saved(tmp_path / "names", train=made([1]), test=strange), "the class x in test but not in train")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.parquet").write_bytes(b"PAR1" + bytes(50))
    refused(f"hf:{tmp_path}/broken", "cannot be opened: .*[Pp]arquet")
    monkeypatch.setattr(datasets, "load_dataset", lambda *what: (_ for _ in ()).throw(ConnectionError(f"no\n{what}")))
    refused("hf:name/of@part", r"^hf:name/of@part cannot be opened: no \('name/of', 'part'\)$")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("hf:beans", "pip install 'datasets")
