from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchloom.data import cache
from patchloom.data.augment import RandomCrop, resize_part
from patchloom.data.cache import cache_images
from patchloom.data.decode import Unreadable
from patchloom.data.loader import training_batches
from patchloom.data.source import Source
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes
from patchloom.errors import PatchloomError
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
    """An empty cache, and parts of four images."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_MAX_IMAGES", 4)
    monkeypatch.setattr(cache, "_SAMPLE", 2)
    return cache_root() / "images"


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log"
    path.touch()
    return path


def quiet(line):
    pass


def reads(log: Path) -> list[int]:
    found = sorted(map(int, log.read_text().split()))
    log.write_text("")
    return found


def is_whole(cached: Source, source: Rolls) -> bool:
    return len(cached) == len(source) and all(torch.equal(cached.read(i), source.image(i)) for i in range(len(source)))


@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_every_kind_come_back(root, tmp_path, draw, workers):
    for i in range(9):
        draw(f"in/{'cat' if i % 2 else 'dog'}/{i}.png", height=5 + i, width=12 - i, grey=i == 3)
    broken = draw("in/cat/broken.png")
    broken.write_bytes(broken.read_bytes()[:60])
    deep = np.random.default_rng(0).integers(0, 2**16, (6, 6), dtype=np.uint16)
    np.save(tmp_path / "in" / "dog" / "deep.npy", deep)
    source = open_data(tmp_path / "in").train
    cached = cache_images(source, "whole", workers, quiet)
    assert len(cached) == len(source) == 11 and len(list(root.glob("*/*.part"))) == 3
    for i in range(len(source)):
        assert cached.describe(i) == source.describe(i)
        if source.describe(i) == str(broken):
            told = []
            for one in (source, cached):
                with pytest.raises(Unreadable) as caught:
                    one.read(i)
                told.append(str(caught.value))
            assert told[0] == told[1]
        else:
            assert torch.equal(cached.read(i), source.read(i)) and cached.read(i).dtype == source.read(i).dtype
    assert cached.fingerprint() == source.fingerprint() and cached.stamp() == source.stamp()
    assert cached.name == source.name and cached.classes == source.classes and (cached.labels == source.labels).all()


def test_batches_are_those_of_the_files(root, log):
    source = Rolls(log, 30)
    cached = cache_images(source, "whole", 0, quiet)
    reads(log)
    for workers in (0, 2):
        batches = [
            list(training_batches(one, RandomCrop((4, 4)), 8, 0, 0, 5, workers))
            for one in (source.subset(range(30)), cached)
        ]
        for a, b in zip(*batches, strict=True):
            assert torch.equal(a.views[0], b.views[0]) and torch.equal(a.indices, b.indices)
        assert len(reads(log)) == 40


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=6), st.integers(2, 30))
def test_longer_sides_are_reduced(root, tmp_path, sizes, side):
    class Sized(Rolls):
        def image(self, i):
            return torch.randint(0, 256, (3, *sizes[i]), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))

    source = Sized(tmp_path / "log", len(sizes), version=f"{sizes} {side}")
    cached = cache_images(source, side, 0, quiet)
    for i, (h, w) in enumerate(sizes):
        image, small = source.image(i), cached.read(i)
        if min(h, w) <= side:
            assert torch.equal(small, image)
        else:
            assert min(small.shape[1:]) == side
            assert (
                abs(small.shape[1] - h * side / min(h, w)) <= 0.5 and abs(small.shape[2] - w * side / min(h, w)) <= 0.5
            )
            assert torch.equal(small, resize_part(image, 0, 0, h, w, tuple(small.shape[1:])))
    assert cached.fingerprint() == source.fingerprint() and cached.stamp() != source.stamp()


def test_everything_is_decoded_once(root, log):
    source = Rolls(log)
    said = []
    first = cache_images(source, "whole", 0, said.append)
    assert set(reads(log)) == set(range(12)) and is_whole(first, source)
    assert (
        said[0].startswith("Decoding 12 images, to be cached in ") and "are free" in said[0] and "12 of 12" in said[-1]
    )
    said.clear()
    assert is_whole(cache_images(source, "whole", 0, said.append), source) and not reads(log) and not said


def test_changed_data_and_other_settings_have_separate_folders(root, log):
    for version, how in (("1", "whole"), ("2", "whole"), ("1", 6), ("1", 5)):
        source = Rolls(log, version=version)
        cached = cache_images(source, how, 0, quiet)
        assert set(reads(log)) == set(range(12))
        assert how != "whole" or is_whole(cached, source)
    assert len(list(root.iterdir())) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_a_killed_build_continues_with_finished_parts(root, log, workers):
    slow = FORK.Process(target=cache_images, args=(Rolls(log, 40, seconds=0.03), "whole", workers, quiet))
    slow.start()
    for _ in range(1000):
        time.sleep(0.01)
        if len(list(root.glob("*/*.part"))) >= 2:
            break
    slow.kill()
    slow.join()
    time.sleep(
        0.3 * workers
    )  # a worker finishes the part that it has begun, and then notices that its parent has ended
    finished = {int(path.name[:9]) + i for path in root.glob("*/*.part") for i in range(4)}
    assert 8 <= len(finished) < 40
    reads(log)
    source = Rolls(log, 40)
    assert is_whole(cache_images(source, "whole", 0, quiet), source)
    assert not finished & set(reads(log))


@pytest.mark.parametrize("damage", ["gone", "short", "long", "pixels", "index", "empty"])
def test_a_damaged_part_is_made_again(root, log, damage):
    source = Rolls(log)
    cache_images(source, "whole", 0, quiet)
    parts = sorted(root.glob("*/*.part"))
    content = parts[1].read_bytes()
    if damage == "gone":
        parts[1].unlink()
    else:
        index = len(content) - 4 * 32
        new = {"short": content[:-40], "long": content + b"0" * 8, "empty": b""}
        new["pixels"] = content[:index] + b"0" * 8 + content[index:]
        new["index"] = content[:index] + np.array(7).tobytes() + content[index + 8 :]
        parts[1].write_bytes(new[damage])
    reads(log)
    assert is_whole(cache_images(source, "whole", 0, quiet), source)
    assert reads(log) == [4, 5, 6, 7] and parts[1].read_bytes() == content


def test_two_processes_at_once(root, log):
    others = [
        FORK.Process(target=cache_images, args=(Rolls(log, 40, seconds=0.005), "whole", 0, quiet)) for _ in range(3)
    ]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0, 0]
    source = Rolls(log, 40)
    reads(log)
    assert is_whole(cache_images(source, "whole", 0, quiet), source) and not reads(log)
    assert len(list(root.glob("*/*"))) == 11 and not list(root.glob("*/.*"))


def test_only_old_unfinished_parts_are_removed(root, log):
    cache_images(Rolls(log), "whole", 0, quiet)
    (folder,) = root.iterdir()
    next(folder.glob("*.part")).unlink()
    old, new = folder / ".old", folder / ".new"
    old.touch(), new.touch()
    os.utime(old, (1, 1))
    cache_images(Rolls(log), "whole", 0, quiet)
    assert new.exists() and not old.exists()


def refused(match, source, how="whole", workers=0):
    with pytest.raises(PatchloomError, match=match) as caught:
        cache_images(source, how, workers, quiet)
    assert "\n" not in str(caught.value) and not isinstance(caught.value, Unreadable)


def test_too_little_space_is_refused_before_decoding(root, log, monkeypatch):
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(500))
    refused(r"^--cache whole needs about .* has 0\.0 MB free: make room", Rolls(log))
    assert len(reads(log)) == 2 and not list(root.glob("*/*.part"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_full_disc_is_one_sentence(root, log, monkeypatch, workers):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "write_whole", lambda path, content: None)  # or the disc were full before a part
    monkeypatch.setattr(cache.os, "fsync", full)
    refused(r"could not be written \(No space left on device\): make room", Rolls(log), workers=workers)
    assert not list(root.glob("*/.*"))


def test_a_folder_that_cannot_be_made(root, log, tmp_path):
    (tmp_path / "cache").write_text("a file in its place")
    refused(r"images/\w{16} could not be written \(Not a directory\)", Rolls(log))


def test_sources_that_cannot_be_cached(root, log, tmp_path):
    refused("^the images of shapes are in memory already", Shapes(20, size=16))
    refused("^the images of digits are in memory already", open_data("digits").train)
    refused("^changes of the images of rolls cannot be detected", Rolls(log, version=None))
    np.save(tmp_path / "deep.npy", np.zeros((4, 4), np.uint16))
    refused("more than 8 bits and are not cached", open_data(tmp_path).train)


def test_another_process_opens_the_maps_anew(root, log):
    source = Rolls(log, 40)
    cached = cache_images(source, "whole", 0, quiet)
    assert is_whole(pickle.loads(pickle.dumps(cached)), source) and len(pickle.dumps(cached.subset([1, 2]))) < 5000
    next(root.glob("*/*.part")).unlink()
    with pytest.raises(PatchloomError, match="run the same command again"):
        pickle.loads(pickle.dumps(cached))


def test_no_image_can_be_written_through(root, log):
    source = Rolls(log, 3)
    cache_images(source, "whole", 0, quiet).read(0).zero_()
    assert is_whole(cache_images(source, "whole", 0, quiet), source)


def test_recordings_are_cached_at_their_rate(tmp_path, record):
    for i in range(5):
        record(f"r/{i}.wav", rate=8_000, seconds=0.05 + i / 100)
    (tmp_path / "r" / "broken.wav").write_text("no sound")
    source = open_data(tmp_path / "r").train
    said: list[str] = []
    cached = cache_images(source, "whole", say=said.append)
    assert said[0].startswith("Decoding 6 recordings, to be cached in") and said[1] == "  6 of 6 recordings are cached"
    for one in (cached, pickle.loads(pickle.dumps(cached)), cached.heard_as(replace(source.sound, seconds=0.5))):
        assert all(torch.equal(one.read(i), source.read(i)) and one.read(i).dtype == torch.int16 for i in range(5))
    with pytest.raises(Unreadable, match="broken.wav"):
        cached.read(5)
    said.clear()
    other = cache_images(source.heard_as(replace(source.sound, rate=4_000)), "whole", say=said.append)
    assert said and other.read(4).shape[-1] * 4 == cached.read(4).shape[-1]
    with pytest.raises(PatchloomError, match="cached at 16,000 samples a second, not at 4,000"):
        cached.heard_as(replace(source.sound, rate=4_000))
    with pytest.raises(
        PatchloomError, match="--cache 64 is a size of images, and .* holds recordings: .*--cache whole"
    ):
        cache_images(source, 64)
