import errno
import json
import multiprocessing
import os
import pickle
import re
import shutil
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from refusing import refusal

from patchloom.data import cache
from patchloom.data.augment import RandomCrop, resize_part
from patchloom.data.cache import CachedImages, cache_images, choose_cache
from patchloom.data.decode import Unreadable
from patchloom.data.loader import training_batches
from patchloom.data.source import Source
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes
from patchloom.system.files import cache_root

FORK = multiprocessing.get_context("fork")


class Rolls(Source):
    """Random images whose sides depend on their index; each reading adds a line to the file `log`."""

    name = "rolls"

    def __init__(self, log: Path, n: int = 12, version: str = "1", seconds: float = 0.0):
        self.log, self.n, self.version, self.seconds = log, n, version, seconds
        self.labels, self.classes = np.arange(n) % 2, ("a", "b")

    def __len__(self):
        return self.n

    def image(self, i):
        rng = np.random.default_rng((i, *self.version.encode()))
        array = rng.integers(0, 256, (5 + i % 4, 6 + i % 3, 1 if i % 5 == 2 else 3), dtype=np.uint8)
        return torch.from_numpy(array).permute(2, 0, 1)

    def read(self, i):
        time.sleep(self.seconds)
        with open(self.log, "a") as file:
            file.write(f"{i}\n")
        return self.image(i)

    def fingerprint(self):
        return "rolls"

    def stamp(self):
        return self.version


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_PARTS", 3)
    monkeypatch.setattr(cache, "_SAMPLE", 2)
    return cache_root() / "images"


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log"
    path.touch()
    return path


def reads(log: Path) -> list[int]:
    found = sorted(map(int, log.read_text().split()))
    log.write_text("")
    return found


def fill(source: Source, how="whole", auto=False) -> CachedImages:
    cached = cache_images(source, how, auto)
    for i in range(len(source)):
        try:
            cached.read(i)
        except Unreadable:
            continue
    cached.close()
    return cache_images(source, how, auto)


def is_whole(cached: Source, source: Rolls) -> bool:
    return len(cached) == len(source) and all(torch.equal(cached.read(i), source.image(i)) for i in range(len(source)))


def test_images_of_every_kind_come_back(root, tmp_path, draw):
    for i in range(9):
        draw(f"in/{'cat' if i % 2 else 'dog'}/{i}.png", height=5 + i, width=12 - i, grey=i == 3)
    broken = draw("in/cat/broken.png")
    broken.write_bytes(broken.read_bytes()[:60])
    deep = np.random.default_rng(0).integers(0, 2**16, (6, 6), dtype=np.uint16)
    np.save(tmp_path / "in" / "dog" / "deep.npy", deep)
    source = open_data(tmp_path / "in").train
    cached = fill(source)
    assert len(cached) == len(source) == 11 and cached.missing() == 2 and len(list(root.glob("*/*.part"))) == 3
    for i in range(len(source)):
        assert cached.describe(i) == source.describe(i)
        if source.describe(i) == str(broken):
            assert all("broken.png" in refusal(one.read, i) for one in (source, cached))
        else:
            assert torch.equal(cached.read(i), source.read(i)) and cached.read(i).dtype == source.read(i).dtype
    assert cached.fingerprint() == source.fingerprint() and cached.stamp() == source.stamp()
    assert cached.name == source.name and cached.classes == source.classes and (cached.labels == source.labels).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_files_and_the_second_epoch_is_stored(root, log, workers):
    source = Rolls(log, 30)
    files = list(training_batches(source, RandomCrop((4, 4)), 8, 0, 0, 12, workers))
    reads(log)
    cached = cache_images(source, "whole")
    assert len(reads(log)) == 2  # a sample, for the disc space
    batches = training_batches(cached, RandomCrop((4, 4)), 8, 0, 0, 12, workers)
    for a, b in zip(files, batches, strict=True):
        assert torch.equal(a.views[0], b.views[0]) and torch.equal(a.indices, b.indices)
    cached.close()
    decoded = reads(log)
    assert set(decoded) == set(range(30)) and len(decoded) <= 60  # of 96: those of parts that were not finished yet
    again = cache_images(source, "whole")
    assert is_whole(again, source) and not reads(log)  # the workers have finished their parts


@pytest.mark.parametrize("side", [2, 7, 20])
def test_longer_sides_are_reduced(root, tmp_path, side):
    """Also before they are stored, so that training does not depend on whether they are."""
    sizes = [(30, 1), (7, 7), (29, 30), (20, 13), (8, 21), (25, 60)]

    class Sized(Rolls):
        def image(self, i):
            return torch.randint(0, 256, (3, *sizes[i]), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))

    source = Sized(tmp_path / "log", len(sizes))
    before = cache_images(source, side)
    first = [before.read(i) for i in range(len(sizes))]
    before.close()
    cached = cache_images(source, side)
    assert cached.missing() == 0
    for i, (h, w) in enumerate(sizes):
        image, small = source.image(i), cached.read(i)
        assert torch.equal(first[i], small)
        share = min(1, side / min(h, w))
        assert tuple(small.shape[1:]) == (round(h * share), round(w * share))
        assert torch.equal(small, resize_part(image, 0, 0, h, w, small.shape[1:]) if share < 1 else image)
    assert cached.fingerprint() == source.fingerprint() and cached.stamp() != source.stamp()


def test_the_last_images_are_stored_although_no_more_come(root, log, monkeypatch):
    monkeypatch.setattr(cache, "_IDLE", 0.05)
    first, second = (cache_images(Rolls(log), "whole") for _ in range(2))
    first.read(0), first.read(1)  # half of a part
    for _ in range(500):
        if list(root.glob("*/*.part")):
            break
        time.sleep(0.01)
    reads(log)
    assert torch.equal(second.read(1), Rolls(log).image(1)) and not reads(log)
    first.close()


def test_changed_data_and_other_settings_have_separate_folders(root, log):
    for version, how in (("1", "whole"), ("2", "whole"), ("1", 6), ("1", 5)):
        source = Rolls(log, version=version)
        cached = fill(source, how)
        assert set(reads(log)) == set(range(12))
        assert how != "whole" or is_whole(cached, source)
    assert len(list(root.iterdir())) == 4


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_after_a_kill_finished_parts_are_used(root, log, workers):
    source = Rolls(log, 40)

    def train():
        slow = cache_images(Rolls(log, 40, seconds=0.03), "whole")
        list(training_batches(slow, RandomCrop((4, 4)), 4, 0, 0, 10, workers))

    process = FORK.Process(target=train)
    process.start()
    for _ in range(1000):
        time.sleep(0.01)
        if list(root.glob("*/*.part")):
            break
    process.kill()
    process.join()
    time.sleep(0.5 * workers)  # a worker finishes its batch, and then notices that its parent has ended
    cached = cache_images(source, "whole")
    missing = cached.missing()
    assert 0 < missing <= 26
    reads(log)
    assert is_whole(cached, source) and len(reads(log)) <= missing


@pytest.mark.parametrize("damage", ["gone", "short", "long", "pixels", "index", "huge", "count", "empty"])
def test_a_damaged_part_is_made_again(root, log, damage):
    source = Rolls(log)
    fill(source)
    part = sorted(root.glob("*/*.part"))[1]
    content = part.read_bytes()
    if damage == "gone":
        part.unlink()
    else:
        index, huge = len(content) - 8 - 4 * 40, np.array([2**32, 2**32, 1]).tobytes()
        new = {"short": content[:-40], "long": content + b"0" * 8, "empty": b"", "count": content[:-8] + b"\xff" * 8}
        new["pixels"] = content[:index] + b"0" * 8 + content[index:]
        new["index"] = content[: index + 8] + np.array(7).tobytes() + content[index + 16 :]
        new["huge"] = content[: index + 16] + huge + content[index + 40 :]  # whose product is 0 as int64
        part.write_bytes(new[damage])
    reads(log)
    assert is_whole(fill(source), source)
    assert len(reads(log)) == 4 and len(list(root.glob("*/*.part"))) == 3 and not part.exists()


def test_changes_of_an_image_and_a_deleted_folder_change_no_image(root, log):
    source = Rolls(log, 40)
    cached = fill(source)
    cached.read(0).zero_()
    assert len(pickle.dumps(cached.subset([1, 2]))) < 5000
    for one in (cache_images(source, "whole"), pickle.loads(pickle.dumps(cached))):
        assert is_whole(one, source)
    late = cache_images(source, "whole")
    for path in root.glob("*/*"):
        path.unlink()
    assert is_whole(late, source)


def test_images_of_a_deleted_part_are_missing_and_no_others(root, log):
    cached, path = fill(Rolls(log)), min(root.glob("*/*.part"))
    index = cache._index(path, 12)[:, 0]
    path.unlink()
    assert cached.missing() == 0 and len(index) == 4
    cached.read(index[-1])
    cached.close()
    assert cached.missing() == 4


def test_processes_at_once(root, log):
    others = [FORK.Process(target=fill, args=(Rolls(log, 40, seconds=0.005),)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0, 0]
    source = Rolls(log, 40)
    reads(log)
    assert is_whole(cache_images(source, "whole"), source) and not reads(log)
    assert not list(root.glob("*/.*"))
    stored = sum(len(cache._index(part, 40)) for part in root.glob("*/*.part"))
    assert stored < 60, "three processes with one order read everything, and store it about once"


def test_only_old_unfinished_parts_are_removed(root, log):
    fill(Rolls(log))
    (folder,) = root.iterdir()
    old, new = (folder / f".part.{digit * 32}" for digit in "01")
    old.touch(), new.touch()
    os.utime(old, (1, 1))
    cache_images(Rolls(log), "whole")
    assert new.exists() and not old.exists()


def refused(match, source, how="whole"):
    assert re.search(match, refusal(cache_images, source, how))


def disc_of(monkeypatch, *free: float) -> None:
    """Let so many bytes be free, one number after the other."""
    first = iter(free[:-1])
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(next(first, free[-1])))


def test_too_little_space_is_refused_before_training(root, log, monkeypatch):
    disc_of(monkeypatch, cache._SPARE + 500)
    refused(r"0\.0 MB free, besides 1\.1 GB for checkpoints", Rolls(log))
    assert len(reads(log)) == 2 and not list(root.glob("*/*.part"))


@pytest.mark.parametrize("fault", ["full", "filling", "gone"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_disc_that_fills_up_stops_the_storing_and_not_the_training(root, log, monkeypatch, fault, workers):
    source = Rolls(log, 30)
    files = list(training_batches(source, RandomCrop((4, 4)), 8, 0, 0, 6, workers))
    cached = cache_images(source, "whole")

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    if fault == "full":
        monkeypatch.setattr(cache.os, "fsync", full)
    elif fault == "filling":  # while a part is written
        disc_of(monkeypatch, 2**40, 2**40, 2**40, cache._SPARE)
    else:
        for path in (*cached.folder.iterdir(), cached.folder):
            path.unlink() if path.is_file() else path.rmdir()
    batches = training_batches(cached.subset(range(30)), RandomCrop((4, 4)), 8, 0, 0, 6, workers)
    for a, b in zip(files, batches, strict=True):
        assert torch.equal(a.views[0], b.views[0])
    cached.close()
    said = cached.subset([0]).problem()
    assert "no longer stored" in said and ("No space left" in said) == (fault != "gone")
    assert not cached.problem() and not list(root.glob("*/.*"))
    if (fault, workers) != ("filling", 2):  # there, one process may have finished a part while there was room
        assert not list(root.glob("*/*.part"))


@pytest.mark.parametrize(("limit", "value"), [("_WAITING", 1), ("_MAX_BYTES", 10)])
def test_a_disc_that_is_behind_delays_no_image(root, log, monkeypatch, limit, value):
    """What it cannot take is stored in a later epoch, and does not fill the memory."""
    source = Rolls(log, 100)
    monkeypatch.setattr(cache, limit, value)
    add = cache._Part.add
    monkeypatch.setattr(cache._Part, "add", lambda part, i, image: (time.sleep(0.05), add(part, i, image)))
    cached = cache_images(source, "whole")
    assert is_whole(cached, source)
    cached.close()
    assert 85 < cache_images(source, "whole").missing() < 100
    assert is_whole(cached, source) and not cached.problem()


def test_a_folder_that_cannot_be_made(root, log, tmp_path):
    (tmp_path / "cache").write_text("a file in its place")
    refused(r"images/\w{16} could not be written \(Not a directory\)", Rolls(log))
    assert choose_cache(Rolls(log), 0)[0] == "none"
    cached = cache_images(Rolls(log), "whole", auto=True)  # as on another machine than the plan's
    assert is_whole(cached, Rolls(log))
    cached.close()
    assert "no longer stored" in cached.problem()


def test_sources_that_cannot_be_cached(root, log, tmp_path):
    refused("in memory already", Shapes(20, size=16))
    refused("in memory already", open_data("digits").train)
    refused("cannot be detected", Rolls(log, version=None))
    np.save(tmp_path / "deep.npy", np.zeros((4, 4), np.uint16))
    deep = open_data(tmp_path).train
    refused("more than 8 bits and are not cached", deep)
    assert choose_cache(deep, 0)[0] == choose_cache(Rolls(log, version=None), 0)[0] == "none"


# `--cache auto`: half of the free memory, and a quarter of the disc that is free or holds such images.


def machine(monkeypatch, memory: float, disc: float) -> None:
    monkeypatch.setattr(cache, "_SPARE", 0)
    monkeypatch.setattr(cache, "_MAX_BYTES", 10**4)
    monkeypatch.setattr(cache, "free_memory", lambda device: memory / 2**30)
    disc_of(monkeypatch, disc)


@pytest.fixture
def large(log) -> Callable[[str], Source]:
    class Large(Rolls):
        def image(self, i):
            return torch.full((1, 10, 100), i, dtype=torch.uint8)

    return lambda version: Large(log, version=version)


@pytest.mark.parametrize(
    ("memory", "disc", "value", "word"),
    [(25_000, 49_000, "whole", "12 decoded images need 0.0 MB; "), (23_000, 49_000, "none", "more than half of the")]
    + [(25_000, 47_000, "none", "of disc are left for such images")],
)
def test_what_fits_is_cached(root, large, monkeypatch, memory, disc, value, word):
    machine(monkeypatch, memory, disc)
    found, why = choose_cache(large("1"), 0)
    assert found == value and word in why
    if "half" in word:
        monkeypatch.setattr(Rolls, "stamp", lambda self: pytest.fail("its files were looked at"))
        assert choose_cache(large("1"), 1000)[0] == "none"


def test_unused_folders_make_room_the_oldest_first(root, large, monkeypatch):
    machine(monkeypatch, 10**6, 10**6)
    first, second = fill(large("1"), auto=True), fill(large("2"), auto=True)
    os.utime(first.folder / "about.json", (2, 2))
    os.utime(second.folder / "about.json", (1, 1))
    disc_of(monkeypatch, 100_000)  # a quarter, with what is there: two folders, and no third
    assert choose_cache(large("3"), 0)[0] == "none"  # both are used
    second._lock.close()
    assert choose_cache(large("3"), 0)[0] == "whole" and second.folder.exists()  # a plan removes nothing
    assert cache_images(large("3"), "whole", auto=True).folder.exists()
    assert first.folder.exists() and not second.folder.exists()


def test_a_folder_that_is_removed_before_it_is_held_is_made_again(root, large, monkeypatch):
    machine(monkeypatch, 10**6, 10**6)
    with monkeypatch.context() as meanwhile:  # another process needs its room
        meanwhile.setattr(cache, "_lock", lambda folder: shutil.rmtree(folder))
        cached = cache_images(large("1"), "whole", auto=True)
    assert is_whole(cached, large("1"))
    cached.close()
    assert not cached.problem() and list(root.glob("*/*.part"))


def test_folders_that_were_asked_for_are_counted_and_stay(root, large, monkeypatch):
    machine(monkeypatch, 10**6, 10**6)
    asked = fill(large("1"), auto=True)
    assert json.loads((asked.folder / "about.json").read_text())["auto"] is True
    asked = fill(large("1"))
    assert json.loads((asked.folder / "about.json").read_text())["auto"] is False
    asked._lock.close()
    disc_of(monkeypatch, 40_000)
    assert choose_cache(large("2"), 0)[0] == "none"
    assert choose_cache(large("1"), 0)[0] == "whole"  # it is there already
    cache_images(large("2"), "whole", auto=True)
    assert asked.folder.exists()


def test_recordings_are_cached_at_their_rate(tmp_path, record):
    for i in range(5):
        record(f"r/{i}.wav", rate=8_000, seconds=0.05 + i / 100)
    (tmp_path / "r" / "broken.wav").write_text("no sound")
    source = open_data(tmp_path / "r").train
    cached = fill(source)
    assert cached.missing() == 1
    for one in (cached, pickle.loads(pickle.dumps(cached)), cached.heard_as(replace(source.sound, seconds=0.5))):
        assert all(torch.equal(one.read(i), source.read(i)) and one.read(i).dtype == torch.int16 for i in range(5))
    assert "broken.wav" in refusal(cached.read, 5)
    other = fill(source.heard_as(replace(source.sound, rate=4_000)))
    assert other.missing() == 1 and other.read(4).shape[-1] * 4 == cached.read(4).shape[-1]
    assert "16,000 samples a second, not at 4,000" in refusal(cached.heard_as, replace(source.sound, rate=4_000))
    refused("--cache 64 .*recordings", source, 64)
