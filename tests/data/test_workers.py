"""Worker processes of repeated passes live on; all others end with their pass."""

import os
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from killing import SMALL
from labelled import write_noise
from refusing import refusal
from torch.utils.data import Dataset

from patchloom.data import workers
from patchloom.data.augment import CentreCrop, RandomCrop, TwoViews
from patchloom.data.loader import batch_bytes, stack
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes
from patchloom.data.workers import SHARED, Readers, fitting_readers, in_workers, living_workers
from patchloom.errors import PatchloomError, TemporaryError
from patchloom.system import distributed
from patchloom.train.loop import pretrain


@dataclass
class Places(Dataset):
    """The number asked for with the process that gives it; ``bad`` is an error, and ``last`` ends the process."""

    name: str
    bad: int = -1
    last: int = -1

    def __getitem__(self, number):
        if number == self.last:
            os._exit(1)
        return PatchloomError("bad") if number == self.bad else (self.name, number, os.getpid())


def children(before=()) -> set[int]:
    return {process.pid for process in active_children()} - {*before}


def read(name, count=6, workers=2, repeated=True, **more) -> set[int]:
    found = list(in_workers(Places(name, **more), range(count), workers, repeated=repeated))
    assert [one[:2] for one in found] == [(name, number) for number in range(count)]
    return {process for *_, process in found}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # of machines with fewer cores
def test_processes_of_a_repeated_pass_live_on():
    before = children()
    with living_workers():
        first = read("a")
        assert len(first) == 2 and os.getpid() not in first
        assert read("a", 9) == first and read("a", 1) < first
        both = read("b")  # which the first ones do not know
        assert not both & first and read("a") == both and read("b") == both
        more = read("a", workers=3)
        assert len(more) == 3 and read("b", workers=1) == more == children(before)
        assert read("a", workers=0) == {os.getpid()} and not read("a", repeated=False) & more
    assert not children(before) and not read("a") & more and not children(before)


def test_a_pass_within_another():
    with living_workers():
        outer = in_workers(Places("a"), range(6), 2, repeated=True)
        first = next(outer)[2]
        inner = read("b")
        rest = [one[2] for one in outer]
        assert first in rest and not inner & {*rest} and read("a") == {*rest}


def test_a_pass_that_ends_early_leaves_nothing_behind():
    before = children()
    with living_workers():
        started = in_workers(Places("a"), range(50), 2, repeated=True)
        next(started)
        started.close()
        assert "bad" in refusal(read, "a", bad=3)
        with pytest.raises(TemporaryError, match="has died"):
            read("a", last=3)
        assert len(read("a")) == 2
    assert not children(before)


# Workers whose batches fit into shared memory, which a container may have little of.


def leave_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let so many bytes of shared memory be free; the disc is as it is."""
    usage = workers.shutil.disk_usage
    monkeypatch.setattr(
        workers.shutil, "disk_usage", lambda path: usage(path)._replace(free=free) if path == SHARED else usage(path)
    )


@pytest.mark.parametrize(
    ("asked", "free", "found"),
    [
        (15, 64_000, Readers(15, 2)),  # 30 batches ahead, and 2 that are in use
        (15, 31_999, Readers(15, 1)),
        (15, 17_000, Readers(15, 1)),
        (15, 16_999, Readers(14, 1)),
        (15, 3_000, Readers(1, 1)),
        (15, 2_999, Readers(0, 1)),
        (0, 0, Readers(0, 2)),
    ],
)
def test_workers_whose_batches_fit_into_shared_memory(asked, free, found, monkeypatch) -> None:
    leave_free(monkeypatch, free)
    assert fitting_readers(asked, 1000) == (found, free)


def test_processes_of_a_machine_share_its_memory(monkeypatch) -> None:
    leave_free(monkeypatch, 64_000)
    monkeypatch.setattr(workers, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "processes_here", lambda: 4)
    assert fitting_readers(7, 1000)[0] == Readers(7, 2) and fitting_readers(8, 1000)[0] == Readers(8, 1)


def test_a_system_without_limits_has_all_workers(monkeypatch) -> None:
    monkeypatch.setattr(workers, "SHARED", Path("/no/such/place"))
    assert fitting_readers(15, 2**40) == (Readers(15, 2), 0)


def test_bytes_of_a_batch_are_those_that_workers_send() -> None:
    images, sounds = Shapes(12, size=40), open_data("tones").train
    for augment in (RandomCrop((16, 24)), TwoViews((16, 24), color="own"), CentreCrop((8, 8))):
        views = stack([augment(images.read(i), np.random.default_rng(0)) for i in range(6)]).views
        assert batch_bytes(augment, 6, 3) == sum(view.nbytes for view in views)
    excerpt = sounds.cut(RandomCrop(sounds.modality.own_size[0]))
    assert batch_bytes(excerpt, 6, 1) == 6 * excerpt(sounds.read(0), np.random.default_rng(0))[0].nbytes
    assert batch_bytes(lambda image, rng: (image,), 6, 3) == 0
    crop = RandomCrop((16, 16)).without_resizing()
    for side in (16, 24, 31, 33, 60):
        image = torch.zeros(3, side, side, dtype=torch.uint8)
        (parts,) = stack([crop(image, np.random.default_rng(i)) for i in range(300)]).parts
        assert parts.pixels.numel() < 1.02 * batch_bytes(crop, 300, 3)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_run_says_that_fewer_workers_fit_and_ends_the_same(tmp_path: Path, monkeypatch, capfd) -> None:
    images, each = write_noise(tmp_path / "images"), 16 * 3 * 32 * 32
    for name, free, said in (
        ("plain", 10**9, ""),
        ("one", 3 * each, "1 of 2 workers"),
        ("none", each, "0 of 2 workers"),
    ):
        leave_free(monkeypatch, free)
        given = SMALL | {"workers": 2, "held_out": 0.0, "epochs": 1}
        pretrain(images, "mae", out=tmp_path / name / "run", **given)
        printed = " ".join(capfd.readouterr().out.split())
        assert ("shared memory: " in printed) == bool(said) and said in printed
    encoders = {(tmp_path / name / "run" / "encoder.safetensors").read_bytes() for name in ("plain", "one", "none")}
    assert len(encoders) == 1
