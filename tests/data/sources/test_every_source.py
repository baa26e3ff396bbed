"""Properties of all kinds of sources."""

import io
import os
import pickle
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from refusing import refusal

from patchloom.data.decode import Unreadable
from patchloom.data.source import Data
from patchloom.data.sources.open import absolute_name, open_data
from patchloom.data.splits import hold_out
from patchloom.evaluate.features import only_labelled

PER_CLASS = 5


class Kind(NamedTuple):
    """Kind of source with the ten images in ``images/cat`` and ``images/dog``.

    ``make`` writes the data and returns its name; ``file`` is one of its images, unless it reads containers of them.
    """

    make: Callable[[], str | list[str]]
    labels: bool = True
    file: str | None = "images/cat/2.png"


def images(pattern: str = "images/*/*.png") -> list[str]:
    return sorted(map(str, Path().glob(pattern)))


def written(name: str, lines: list[str]) -> str:
    Path(name).write_text("\n".join(lines) + "\n")
    return name


def shard() -> str:
    with tarfile.open("images.tar", "w") as tar:
        for path in images():
            tar.add(path, f"{path.replace('/', '-').removesuffix('.png')}.png")
            label = tarfile.TarInfo(f"{path.replace('/', '-').removesuffix('.png')}.cls")
            content = Path(path).parent.name.encode()
            label.size = len(content)
            tar.addfile(label, io.BytesIO(content))
    return "images.tar"


def halves() -> list[str]:
    for name, numbers in (("one", "01"), ("two", "234")):
        for number in numbers:
            for kind in ("cat", "dog"):
                Path(name, kind).mkdir(parents=True, exist_ok=True)
                shutil.copy2(f"images/{kind}/{number}.png", f"{name}/{kind}")
    return ["one", "two"]


def saved() -> str:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    content = [{"bytes": Path(path).read_bytes(), "path": None} for path in images()]
    table = datasets.Dataset.from_dict({"image": content, "label": [0] * 5 + [1] * 5}, features=features)
    datasets.DatasetDict(train=table).save_to_disk("saved")
    return "hf:saved"


KINDS = {
    "folder": Kind(lambda: "images"),
    "list": Kind(lambda: written("list.txt", [f"{path}\t{Path(path).parent.name}" for path in images()])),
    "table": Kind(lambda: written("m.csv", ["file,class", *(f"{path},{Path(path).parent.name}" for path in images())])),
    "chosen columns": Kind(
        lambda: (
            written("m.csv", ["a,b", *(f"{path},{Path(path).parent.name}" for path in images())]) + "@path=a,label=b"
        )
    ),
    "pattern": Kind(lambda: "images/**/*.png", labels=False),
    "files": Kind(images, labels=False),
    "divided": Kind(lambda: "images@level=0"),
    "several": Kind(halves, file="two/cat/2.png"),
    "shard": Kind(shard, file=None),
    "hub": Kind(saved, file=None),
}


@pytest.fixture
def folder(draw, tmp_path, monkeypatch):
    for kind in ("cat", "dog"):
        for number in range(PER_CLASS):
            draw(f"images/{kind}/{number}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=KINDS)
def kind(request, folder):
    return KINDS[request.param]


def pixels(data: Data) -> set[bytes]:
    return {data.train.read(i).numpy().tobytes() for i in range(len(data.train))}


def test_length_images_and_labels(kind):
    data = open_data(kind.make())
    assert len(data.train) == 10 and len(pixels(data)) == 10 and pixels(data) == pixels(open_data("images"))
    assert data.test is None and all(re.search("columns used|planes", note) for note in data.notes)
    if kind.labels:
        assert data.train.classes == ("cat", "dog") and np.bincount(data.train.labels).tolist() == [5, 5]
        first = open_data("images").train
        cats = {first.read(i).numpy().tobytes() for i in range(5)}
        assert {data.train.read(i).numpy().tobytes() for i in np.flatnonzero(data.train.labels == 0)} == cats
    else:
        assert data.train.labels is None and data.train.classes == ()


def test_names_and_parts(kind):
    source = open_data(kind.make()).train
    assert len({source.describe(i) for i in range(10)}) == 10
    part = pickle.loads(pickle.dumps(source.subset([7, 1])))
    assert [part.describe(i) for i in (0, 1)] == [source.describe(i) for i in (7, 1)]
    assert torch.equal(part.read(0), source.read(7))
    if kind.labels:
        assert part.labels.tolist() == source.labels[[7, 1]].tolist() and len(only_labelled(part)) == 2
    places = {source.place(i) for i in range(10)}
    assert places == {None} or (len(places) == 10 and part.place(0) == source.place(7))


def test_the_fingerprint_follows_the_content(kind):
    typed = kind.make()
    first, same = (open_data(typed).train for _ in range(2))
    assert first.fingerprint() == same.fingerprint() and len(first.fingerprint()) == 16
    assert first.stamp() == same.stamp() is not None
    assert first.subset([1, 2]).fingerprint() != first.subset([2, 1]).fingerprint()
    if kind.file is None:
        return
    before = first.fingerprint(), first.stamp()
    shutil.copy("images/dog/0.png", kind.file)
    os.utime(kind.file, (1, 1))
    changed = open_data(typed).train
    assert changed.fingerprint() != before[0] and changed.stamp() != before[1]


def test_a_missing_file_costs_only_its_image(kind):
    source = open_data(kind.make()).train
    if kind.file is None:
        return
    os.remove(kind.file)
    place = next(
        i for i in range(10) if source.describe(i).endswith(os.path.basename(kind.file)) and "cat" in source.describe(i)
    )
    with pytest.raises(Unreadable, match="2.png cannot be read"):
        source.read(place)
    assert source.read((place + 1) % 10) is not None
    source.fingerprint()
    assert len(np.unique(source.contents())) == 10


def test_missing_data_is_an_error_of_one_sentence(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # without a network, the Hub is asked five times
    typed = kind.make()
    for one in [typed] if isinstance(typed, str) else typed:
        place = one.partition("@")[0].removeprefix("hf:").partition("/")[0]
        shutil.rmtree(place) if os.path.isdir(place) else os.remove(place) if os.path.exists(place) else None
    assert ":" in refusal(open_data, typed)


def test_the_absolute_name_works_from_any_folder(kind, monkeypatch, tmp_path):
    kept = absolute_name(kind.make())
    before = open_data(kept).train
    elsewhere = tmp_path / "else" / "where"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    again = open_data(kept).train
    assert absolute_name(kept) == kept and again.fingerprint() == before.fingerprint() and again.name == before.name


def test_contents_identify_copies_and_splits_avoid_them(kind, folder):
    shutil.copy("images/dog/0.png", "images/dog/1.png")
    source = open_data(kind.make()).train
    contents = source.contents()
    assert len(contents) == 10 and len(np.unique(contents)) == 9
    assert (source.contents(np.array([3, 8])) == contents[[3, 8]]).all()
    for seed in range(5):
        first, second = hold_out(source, 0.4, seed=seed)
        assert not np.isin(first.contents(), second.contents()).any()


def test_the_order_is_a_permutation_drawn_by_the_generator(kind):
    source = open_data(kind.make()).train
    orders = [source.order(np.random.default_rng(seed)).tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == list(range(10))
    assert sorted(source.order(np.random.default_rng(0), np.array([9, 2, 4])).tolist()) == [0, 1, 2]
