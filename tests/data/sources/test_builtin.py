import inspect

import numpy as np
import torch
import torchvision
from refusing import refused

from patchloom.data.sources.builtin import FETCHED
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes


def test_shapes_by_name():
    data = open_data("shapes:120", seed=3)
    assert len(data.train) == 120 and len(data.test) == 2000 and data.train.describe(12) == "shapes:120 #12"
    assert torch.equal(data.train.read(7), Shapes(8, seed=3).read(7))
    assert torch.equal(data.test.read(7), open_data("shapes", seed=3).test.read(7))
    assert len(open_data("shapes").train) == 5000
    train = {data.train.read(i).numpy().tobytes() for i in range(120)}
    assert not train & {data.test.read(i).numpy().tobytes() for i in range(120)}


def test_digits():
    data = open_data("digits", seed=0)
    assert len(data.train) == 1437 and len(data.test) == 360
    image = data.train.read(0)
    assert image.shape == (1, 8, 8) and image.dtype == torch.uint8
    assert max(int(data.train.read(i).max()) for i in range(50)) == 255
    assert np.ptp(np.bincount(data.test.labels)) <= 2
    assert (open_data("digits", seed=5).test.labels == data.test.labels).all()
    both = [data.train.read(i).numpy().tobytes() for i in range(1437)]
    assert len({*both, *(data.test.read(i).numpy().tobytes() for i in range(360))}) == 1797


class FakeSet(torchvision.datasets.FakeData):
    def __init__(self, root, split="train", download=False):
        assert download
        super().__init__(size={"train": 6, "test": 4}[split], image_size=(3, 5, 7), num_classes=3)
        self.root, self.labels = root, np.arange(self.size) % 3


def test_torchvision_sets(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision.datasets, "SVHN", FakeSet)
    data = open_data(f"svhn@{tmp_path}")
    assert len(data.train) == 6 and len(data.test) == 4 and str(data.train.dataset.root) == str(tmp_path)
    assert data.train.classes == ("0", "1", "2") and data.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.train.read(0).shape == (3, 5, 7) and data.train.read(0).dtype == torch.uint8
    assert data.train.fingerprint() != data.test.fingerprint()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_data("svhn").train.dataset.root == tmp_path / "patchloom"


def test_a_failed_download_says_where_the_files_go(tmp_path, monkeypatch):
    def fail(root, train, download):
        raise RuntimeError("no\nnetwork")

    monkeypatch.setattr(torchvision.datasets, "MNIST", fail)
    refused(f"mnist@{tmp_path / 'here'}", r"\(no network\).*datasets\.MNIST into .*here.*mnist@FOLDER")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    refused("mnist", f"into {tmp_path}/patchloom")


def test_torchvision_names_and_arguments_exist():
    for dataset, train, test in FETCHED.values():
        known = inspect.signature(getattr(torchvision.datasets, dataset)).parameters
        assert {"root", "download", *train, *(test or {})} <= set(known)
