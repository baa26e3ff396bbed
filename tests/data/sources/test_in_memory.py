"""Images given as Python objects: the same pixels and labels as from files, for every type of container."""

import multiprocessing
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusing import refusal, refused
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder

from patchloom.data.augment import RandomCrop
from patchloom.data.loader import training_batches
from patchloom.data.sources.in_memory import is_object_name, object_name
from patchloom.data.sources.open import absolute_name, open_data
from patchloom.errors import PatchloomError

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 9, 11, 3), dtype=np.uint8)
LABELS = [i % 3 for i in range(12)]


class Drawn(Dataset):
    """Images by number, converted by ``form`` from uint8 [h w c]."""

    def __init__(self, form=lambda pixels, i: pixels, n=12):
        self.form, self.n = form, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.form(PIXELS[i], i)


class Endless(IterableDataset):
    def __iter__(self):
        yield PIXELS[0]


class NoLength(Drawn):
    def __len__(self):
        raise NotImplementedError


def drawn_floats(pixels, i):
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


FORMS = {
    "array": PIXELS,
    "channels first": PIXELS.transpose(0, 3, 1, 2),
    "tensor": torch.from_numpy(PIXELS).permute(0, 3, 1, 2),
    "tensor, channels last": torch.from_numpy(PIXELS),
    "list of arrays": list(PIXELS),
    "tuple of tensors": tuple(torch.from_numpy(PIXELS).permute(0, 3, 1, 2)),
    "list of images": [Image.fromarray(one) for one in PIXELS],
    "pairs": list(zip(PIXELS, LABELS, strict=True)),
    "dicts": [{"label": label, "image": one} for one, label in zip(PIXELS, LABELS, strict=True)],
    "dataset": Drawn(),
    "dataset of images": Drawn(lambda pixels, i: (Image.fromarray(pixels), LABELS[i])),
    "dataset of dicts": Drawn(lambda pixels, i: {"pixels": pixels}),
    "TensorDataset": TensorDataset(torch.from_numpy(PIXELS).permute(0, 3, 1, 2), torch.tensor(LABELS)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_images(form):
    data = open_data(FORMS[form])
    assert data.test is None and len(data.train) == 12
    for i in range(12):
        assert data.train.read(i).dtype == torch.uint8
        assert torch.equal(data.train.read(i), torch.from_numpy(PIXELS[i]).permute(2, 0, 1))
    labelled = form in ("pairs", "dicts", "dataset of images", "TensorDataset")
    assert (data.train.labels is not None) == labelled
    if labelled:
        assert data.train.labels.tolist() == LABELS and data.train.classes == ("0", "1", "2")
    assert data.train.name == absolute_name(FORMS[form]) == "12 images given in Python"


def test_floats_grey_images_and_deep_ones():
    floats = PIXELS.astype(np.float32) / 255
    for data in (floats, list(floats.transpose(0, 3, 1, 2)), Drawn(drawn_floats), torch.from_numpy(floats).double()):
        image = open_data(data).train.read(3)
        assert image.dtype == torch.float32
        torch.testing.assert_close(image, torch.from_numpy(floats[3]).permute(2, 0, 1))
    grey = PIXELS[..., 0]
    for data in (grey, list(grey), [Image.fromarray(one) for one in grey], torch.from_numpy(grey)):
        assert torch.equal(open_data(data).train.read(5), torch.from_numpy(grey[5])[None])
    deep = grey.astype(np.uint16) * 257
    for data in (deep, [Image.fromarray(one) for one in deep]):
        torch.testing.assert_close(open_data(data).train.read(5), torch.from_numpy(grey[5] / np.float32(255))[None])
    assert open_data(grey > 100).train.read(0).unique().tolist() == [0, 255]
    turned = Image.fromarray(PIXELS[0])
    turned.getexif()[274] = 6
    expected = torch.from_numpy(np.rot90(PIXELS[0], -1).copy()).permute(2, 0, 1)
    assert torch.equal(open_data([turned, turned]).train.read(0), expected)
    assert turned.size == (11, 9) and turned.getexif()[274] == 6, "the image that was given stays as it is"


def test_words_are_labels_and_some_images_have_none():
    data = open_data([(PIXELS[0], "cat"), (PIXELS[1], "ant"), PIXELS[2], (PIXELS[3], "cat")]).train
    assert data.classes == ("ant", "cat") and data.labels.tolist() == [1, 0, -1, 1]
    for labels in ((True, False), (1.0, 0.0), (np.float64(1), np.bool_(False))):
        assert open_data(list(zip(PIXELS, labels, strict=False))).train.labels.tolist() == [1, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of two classes in the layout of torchvision's ImageFolder."""
    root = tmp_path_factory.mktemp("folder")
    for i, pixels in enumerate(PIXELS):
        path = root / ("dog" if i % 2 else "cat") / f"{i:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


def test_labels_and_contents_of_a_dataset_of_files(folder, monkeypatch):
    monkeypatch.setattr("patchloom.data.sources.in_memory._SAMPLED_ITEMS", 4)
    images = ImageFolder(folder)
    for data, labels in (
        (images, [0] * 6 + [1] * 6),
        (Subset(images, [11, 0, 7]), [1, 0, 1]),
        (ConcatDataset([images, Subset(images, [6])]), [0] * 6 + [1] * 7),
    ):
        found = open_data(data).train
        assert found.classes == ("cat", "dog") and found.labels.tolist() == labels
    found = open_data(images).train
    assert np.array_equal(found.contents(), open_data(folder).train.contents()), "copies of files are known as such"


def test_paths_of_files(folder, monkeypatch):
    monkeypatch.chdir(folder)
    paths = sorted(folder.rglob("*.png"))
    for data in (paths, [str(path.relative_to(folder)) for path in paths], np.array([str(path) for path in paths])):
        found = open_data(data).train
        assert len(found) == 12 and torch.equal(found.read(0), torch.from_numpy(PIXELS[0]).permute(2, 0, 1))
        assert Path(found.describe(0)) == paths[0]
    labelled = open_data([(path, path.parent.name) for path in paths]).train
    assert labelled.classes == ("cat", "dog") and labelled.labels.tolist() == [0] * 6 + [1] * 6
    refused([*paths[:2], PIXELS[0]], r"list\[0\] is a path and list\[2\] is not")
    refused([(folder / "nowhere.png", 1)], "none of the 1 files of the list exists")
    refused([(paths[0], 1), (folder, 0)], "is a folder among image files")


def test_splits():
    labelled = list(zip(PIXELS, "abc" * 4, strict=True))
    splits = {"train": labelled, "test": [(PIXELS[0], "c"), (PIXELS[1], "a")], "val": [(PIXELS[2], "c")]}
    data = open_data({**splits, "validation": [(PIXELS[3], "z")]})
    assert data.test.classes == data.train.classes == ("a", "b", "c") and data.test.labels.tolist() == [2, 0]
    assert absolute_name({"train": PIXELS, "test": PIXELS[:3]}) == "12 images given in Python"
    assert data.others.keys() == {"val", "validation"} and torch.equal(data.others["val"].read(0), data.train.read(2))
    assert data.others["val"].labels.tolist() == [2]
    assert data.others["validation"].labels.tolist() == [-1]  # a class that is not trained on
    assert open_data(data) is data and open_data(data.train).train is data.train
    assert object_name(data.train.subset([3, 4])) == "2 images given in Python"
    assert open_data({"train": labelled, "test": PIXELS[:3]}).test.labels is None
    refused({"images": PIXELS}, "has the key train")
    assert len(open_data({"training": PIXELS, "extra": PIXELS[:2]}).train) == 12
    refused({"train": labelled, "test": [(PIXELS[0], "d")]}, "the class d in test but not in train")


def test_the_fingerprint_follows_the_contents():
    marks = {form: open_data(data).train.fingerprint() for form, data in FORMS.items()}
    same = [marks[form] for form in ("array", "channels first", "tensor", "list of arrays", "list of images")]
    assert len(set(same)) == 1, "a run goes on with the same images in another array"
    other = PIXELS.copy()
    other[7, 3, 3, 0] ^= 1
    assert open_data(other).train.fingerprint() != same[0] != open_data(PIXELS[::-1]).train.fingerprint()
    assert marks["pairs"] == marks["dicts"] != same[0], "labels count"
    assert marks["dataset"] != open_data(Drawn(n=11)).train.fingerprint()
    changed = Drawn(lambda pixels, i: pixels ^ (i == 5))
    assert marks["dataset"] != open_data(changed).train.fingerprint()


def test_objects_that_cannot_be_sent_to_workers_are_refused(monkeypatch):
    source = open_data(Drawn(lambda pixels, i: pixels)).train  # a lambda
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(source)
    monkeypatch.setattr("patchloom.data.workers.worker_context", lambda: multiprocessing.get_context("spawn"))
    with pytest.raises(PatchloomError, match="cannot be sent to worker processes.*--workers 0"):
        next(training_batches(source, RandomCrop((8, 8)), 4, 0, 0, 3, 1))


def test_a_broken_item_is_skipped_like_a_broken_file():
    def some(pixels, i):
        if i == 5:
            raise OSError("truncated")
        return pixels

    source = open_data(Drawn(some)).train
    batch = next(training_batches(source, RandomCrop((8, 8)), 11, 0, 0, 1, 0))
    assert len(batch.indices) == 11 and set(batch.unreadable) <= {"Drawn[5]"}
    assert "Drawn[5] cannot be read as an image: truncated" in refusal(source.read, 5)


REFUSED = {
    "nothing": ([], "is empty"),
    "a number": (5, "type int"),
    "a generator": ((one for one in PIXELS), "generator come in one order"),
    "a stream": (Endless(), "Endless come in one order"),
    "a loader": (DataLoader(Drawn()), "loader.dataset"),
    "one image": (Image.fromarray(PIXELS[0]), "a single image"),
    "one array": (PIXELS[0], "an array [9 11 3] looks like one image"),
    "two dimensions": (np.zeros((64, 64), np.uint8), "[64 64] is not a set of images"),
    "no length": (Dataset(), "type Dataset"),
    "a length that fails": (NoLength(), "has no length"),
    "words": (["a.png", 5], "list[0] is a path and list[1] is not"),
    "none inside": ([PIXELS[0], None], "list[1] is of type NoneType"),
    "vectors": ([np.zeros(7), np.zeros(7)], "is an array [7]"),
    "a cube": (np.zeros((2, 8, 8, 8), np.uint8), "channels cannot be distinguished"),
    "a flat one": ([np.zeros((3, 64, 3), np.uint8)], "channels cannot be distinguished"),
    "both": ([np.zeros((3, 8, 8)), np.zeros((8, 8, 3))], "[3 8 8] with channels first and [8 8 3]"),
    "large floats": (PIXELS.astype(np.float32), "from 0 to 255"),
    "normalised": (Drawn(lambda pixels, i: drawn_floats(pixels, i) * 4 - 2), "Drawn[0] cannot be read"),
    "large numbers": (PIXELS.astype(np.int64), "type int64"),
    "mixed labels": ([(PIXELS[0], 1), (PIXELS[1], "cat")], "some are words, such as cat"),
    "chance": (Drawn(lambda pixels, i: np.random.permutation(pixels.ravel()).reshape(9, 11, 3)), "random"),
    "all broken": (Drawn(lambda pixels, i: 1 / 0), "Drawn[11] cannot be read as an image: division by zero"),
    "batches": (Drawn(lambda pixels, i: PIXELS[:4]), "is an array [4 9 11 3]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_objects_are_refused_in_one_sentence(case):
    data, word = REFUSED[case]
    refused(data, re.escape(word))


def test_objects_cannot_be_opened_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = absolute_name(PIXELS)
    assert all(map(is_object_name, (name, "1,234 images given in Python", "1 image given in Python")))
    refused(name, "give the same object in Python again")
    (tmp_path / name).mkdir()
    assert absolute_name(f"./{name}") == absolute_name(name) == str(tmp_path / name)
    assert not is_object_name(absolute_name(name))
