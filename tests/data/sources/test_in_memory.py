"""Images given as Python objects: the same pixels and labels as from files, for every type of container."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder

from patchloom.data.augment import RandomCrop
from patchloom.data.decode import read_image
from patchloom.data.loader import training_batches
from patchloom.data.sources.in_memory import is_object_name, object_name
from patchloom.data.sources.open import absolute_name, open_data
from patchloom.data.splits import hold_out
from patchloom.errors import PatchloomError
from patchloom.evaluate import features

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


def test_a_rotated_image_is_not_modified(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(PIXELS[0]).save(tmp_path / "turned.png", exif=exif)
    image, expected = Image.open(tmp_path / "turned.png"), read_image(tmp_path / "turned.png")
    assert torch.equal(open_data([image, image]).train.read(0), expected) and expected.shape == (3, 11, 9)
    assert image.size == (11, 9) and image.getexif()[274] == 6


def test_words_are_labels_and_some_images_have_none():
    data = open_data([(PIXELS[0], "cat"), (PIXELS[1], "ant"), PIXELS[2], (PIXELS[3], "cat")]).train
    assert data.classes == ("ant", "cat") and data.labels.tolist() == [1, 0, -1, 1]


@pytest.mark.parametrize("labels", [(True, False), (1.0, 0.0), (np.float64(1), np.bool_(False))])
def test_whole_numbers_of_other_types_are_labels(labels):
    data = open_data([(pixels, label) for pixels, label in zip(PIXELS, labels, strict=False)]).train
    assert data.labels.tolist() == [1, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of two classes in the layout of torchvision's ImageFolder."""
    root = tmp_path_factory.mktemp("folder")
    for i, pixels in enumerate(PIXELS):
        path = root / ("dog" if i % 2 else "cat") / f"{i:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


def test_labels_of_a_dataset_without_reading_items(folder, monkeypatch):
    read = []
    plain = ImageFolder.__getitem__
    monkeypatch.setattr(ImageFolder, "__getitem__", lambda self, i: read.append(i) or plain(self, i))
    monkeypatch.setattr("patchloom.data.sources.in_memory._SAMPLED_ITEMS", 4)
    images = ImageFolder(folder)
    for data, labels in (
        (images, [0] * 6 + [1] * 6),
        (Subset(images, [11, 0, 7]), [1, 0, 1]),
        (ConcatDataset([images, Subset(images, [6])]), [0] * 6 + [1] * 7),
    ):
        found = open_data(data).train
        assert found.classes == ("cat", "dog") and found.labels.tolist() == labels
    assert len(set(read)) < 9
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
    refuse([*paths[:2], PIXELS[0]], "list[0] is a path and list[2] is not")
    refuse([(folder / "nowhere.png", 1)], "none of the 1 files of the list exists")
    refuse([(paths[0], 1), (folder, 0)], "is a folder among image files")


def test_splits():
    data = open_data({"train": list(zip(PIXELS, "abc" * 4, strict=True)), "test": [(PIXELS[0], "c"), (PIXELS[1], "a")]})
    assert data.test.classes == data.train.classes == ("a", "b", "c") and data.test.labels.tolist() == [2, 0]
    assert absolute_name({"train": PIXELS, "test": PIXELS[:3]}) == "12 images given in Python"
    refuse({"training": PIXELS}, "has the key train")
    refuse(
        {"train": [(PIXELS[0], "a"), (PIXELS[1], "b")], "test": [(PIXELS[0], "d")]},
        "the class d, which the training images lack",
    )


def test_a_split_for_validation():
    splits = {"train": list(zip(PIXELS, "abc" * 4, strict=True)), "test": [PIXELS[0]], "val": [(PIXELS[2], "c")]}
    data = open_data({**splits, "validation": [(PIXELS[3], "z")]})
    assert len(data.test) == 1 and data.others.keys() == {"val", "validation"}
    assert torch.equal(data.others["val"].read(0), data.train.read(2)) and data.others["val"].labels.tolist() == [2]
    assert data.others["validation"].labels.tolist() == [-1]  # a class that is not trained on


def test_sources_that_are_open_already():
    first = open_data(PIXELS)
    assert open_data(first) is first and open_data(first.train).train is first.train
    part = first.train.subset([3, 4])
    assert object_name(part) == "2 images given in Python"


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


def test_copies_are_found_in_memory():
    source = open_data([*PIXELS, PIXELS[4], PIXELS[4]]).train
    rest, held = hold_out(source, 0.5, seed=0)
    inside = [{source.read(int(i)).numpy().tobytes() for i in part.indices} for part in (rest, held)]
    assert not inside[0] & inside[1] and len(rest) + len(held) < 14


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", ["list of images", "dataset"])
def test_processes_read_them(form, workers):
    source = open_data(FORMS[form]).train
    batches = list(training_batches(source, RandomCrop((8, 8)), 4, 0, 0, 3, workers))
    expected = list(training_batches(open_data(PIXELS).train, RandomCrop((8, 8)), 4, 0, 0, 3, 0))
    assert all(torch.equal(a.views[0], b.views[0]) for a, b in zip(batches, expected, strict=True))


def test_objects_that_cannot_be_sent_to_workers_are_refused():
    source = open_data(Drawn(lambda pixels, i: pixels)).train  # a lambda
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(source)
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        with pytest.raises(PatchloomError, match="cannot be sent to worker processes.*give --workers 0"):
            next(training_batches(source, RandomCrop((8, 8)), 4, 0, 0, 3, 1))
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_a_broken_item_is_skipped_like_a_broken_file():
    def some(pixels, i):
        if i == 5:
            raise OSError("truncated")
        return pixels

    source = open_data(Drawn(some)).train
    batch = next(training_batches(source, RandomCrop((8, 8)), 11, 0, 0, 1, 0))
    assert len(batch.indices) == 11 and set(batch.unreadable) <= {"Drawn[5]"}
    with pytest.raises(PatchloomError, match=r"Drawn\[5\] cannot be read as an image: truncated"):
        source.read(5)


def refuse(data, said: str) -> None:
    with pytest.raises(PatchloomError) as refused:
        open_data(data)
    assert said in str(refused.value) and "\n" not in str(refused.value), refused.value


REFUSED = {
    "nothing": ([], "the list of images is empty"),
    "a number": (5, "an object of type int is not a set of images: give a folder"),
    "none": (None, "an object of type NoneType is not a set of images"),
    "bytes": (b"abc", "an object of type bytes is not a set of images"),
    "a generator": ((one for one in PIXELS), "the images of a generator come in one order"),
    "a stream": (Endless(), "the images of a Endless come in one order"),
    "a loader": (DataLoader(Drawn()), "give its dataset, as loader.dataset"),
    "one image": (Image.fromarray(PIXELS[0]), "that is a single image"),
    "one array": (PIXELS[0], "an array [9 11 3] looks like one image"),
    "one tensor": (torch.zeros(3, 64, 64), "an array [3 64 64] looks like one image"),
    "two dimensions": (np.zeros((64, 64), np.uint8), "an array [64 64] is not a set of images"),
    "no length": (Dataset(), "an object of type Dataset is not a set of images"),
    "a length that fails": (NoLength(), "this NoLength has no length"),
    "five dimensions": (np.zeros((2, 3, 4, 5, 6), np.uint8), "is not a set of images"),
    "words": (["a.png", 5], "list[0] is a path and list[1] is not"),
    "numbers": ([1, 2, 3], "list[0] is of type int, not an image"),
    "none inside": ([PIXELS[0], None], "list[1] is of type NoneType, not an image"),
    "vectors": ([np.zeros(7), np.zeros(7)], "is an array [7]: give [h w], [h w c] or [c h w]"),
    "a cube": (np.zeros((2, 8, 8, 8), np.uint8), "channels cannot be distinguished from rows and columns"),
    "a flat one": ([np.zeros((3, 64, 3), np.uint8)], "channels cannot be distinguished from rows and columns"),
    "both": ([np.zeros((3, 8, 8)), np.zeros((8, 8, 3))], "[3 8 8] with channels first and [8 8 3] with channels last"),
    "large floats": (PIXELS.astype(np.float32), "its values run from 0 to 255; scale"),
    "normalised": (
        Drawn(lambda pixels, i: drawn_floats(pixels, i) * 4 - 2),
        "Drawn[0] cannot be read as an image: its",
    ),
    "large numbers": (PIXELS.astype(np.int64), "values of type int64 are not supported"),
    "mixed labels": ([(PIXELS[0], 1), (PIXELS[1], "cat")], "some labels are numbers and some are words, such as cat"),
    "chance": (Drawn(lambda pixels, i: np.random.permutation(pixels.ravel()).reshape(9, 11, 3)), "remove random"),
    "all broken": (Drawn(lambda pixels, i: 1 / 0), "Drawn[11] cannot be read as an image: division by zero"),
    "batches": (Drawn(lambda pixels, i: PIXELS[:4]), "an image of this Drawn is an array [4 9 11 3]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_objects_are_refused_in_one_sentence(case):
    refuse(*REFUSED[case])


def test_objects_cannot_be_opened_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = absolute_name(PIXELS)
    assert (
        is_object_name(name)
        and is_object_name("1,234 images given in Python")
        and is_object_name("1 image given in Python")
    )
    (tmp_path / name).mkdir()
    assert absolute_name(f"./{name}") == absolute_name(name) == str(tmp_path / name) and not is_object_name(
        absolute_name(name)
    )
    refuse(name, "cannot be found by that name: give the same object in Python again")


@pytest.mark.parametrize("given", [list(PIXELS), Drawn()])
def test_advice_on_labels(given):
    with pytest.raises(PatchloomError, match="has no labels: give tuples of an image and its label, or dicts"):
        features.only_labelled(open_data(given).train.subset([0, 1]))
