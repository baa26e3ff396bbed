"""Exact copies are recognised by their contents, and a split keeps them on one side."""

import os
import re
import shutil

import numpy as np
import pytest
from refusing import refusal

from patchloom import display
from patchloom.data import duplicates
from patchloom.data.duplicates import comparable, copies_among
from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes
from patchloom.data.splits import choose_indices, hold_out, split_for_test


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "patchloom" / "contents"


@pytest.fixture
def reads(monkeypatch):
    read, found = duplicates.pieces_of_file, []
    name = "patchloom.data.duplicates.pieces_of_file"
    monkeypatch.setattr(name, lambda path: found.append(str(path)) or read(path))
    return found


@pytest.fixture
def twelve(draw, tmp_path):
    """Images 0 ... 7; a copy, a link and a hard link of 0 with other names; and a copy of 1."""
    for i in range(8):
        draw(f"set/{i}.png")
    folder = tmp_path / "set"
    shutil.copy(folder / "0.png", folder / "copy of 0.png")
    (folder / "link to 0.png").symlink_to("0.png")
    os.link(folder / "0.png", folder / "hard 0.png")
    shutil.copy(folder / "1.png", folder / "more.png")
    return folder


def test_an_interrupted_pass_continues(twelve, reads, cache, monkeypatch):
    monkeypatch.setattr(duplicates, "_EACH", 1)
    monkeypatch.setattr(duplicates, "_PAUSE", -1.0)
    monkeypatch.setattr("patchloom.data.workers._THREADS", 1)

    class Interrupted(display.StatusMessage):
        def advance(self, by=1):
            super().advance(by)
            if self.done == 7:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(duplicates, "StatusMessage", Interrupted)
        open_data(twelve).train.contents()
    assert [path.suffix for path in cache.iterdir()] == [".part"]
    reads.clear()
    found = open_data(twelve).train.contents()
    assert len(reads) == 6, "the seventh was not kept yet"
    assert [path.suffix for path in cache.iterdir()] == [""]
    shutil.rmtree(cache)
    assert (open_data(twelve).train.contents() == found).all()


def names(source, indices):
    return [os.path.basename(source.describe(int(i))) for i in indices]


def test_copies_and_links_are_equal_and_nothing_else(twelve):
    source = open_data(twelve).train
    found = source.contents()
    assert found.dtype.itemsize == 16 and len(found) == len(source) == 12
    groups = {}
    for name, content in zip(names(source, range(12)), found, strict=True):
        groups.setdefault(content.tobytes(), set()).add(name)
    several = sorted(map(sorted, (group for group in groups.values() if len(group) > 1)))
    assert several == [["0.png", "copy of 0.png", "hard 0.png", "link to 0.png"], ["1.png", "more.png"]]
    some = np.array([5, 0])
    assert (source.subset([3, 5, 0]).contents() == found[[3, 5, 0]]).all()
    assert (open_data(twelve).train.contents(some) == found[some]).all()


def test_copies_are_on_one_side(twelve):
    source, seen = open_data(twelve).train, set()
    for seed in range(20):
        for split in (hold_out, split_for_test):
            training, held = split(source, 0.4, seed=seed)
            assert not np.isin(training.contents(), held.contents()).any()
            assert len(np.unique(held.contents())) == len(held) == 5, "as many as were asked for, each once"
            left = len(source) - len(training) - len(held)
            assert left == 3 * ("0.png" in names(held, range(5))) + ("1.png" in names(held, range(5)))
            seen.add(left)
    assert len(seen) > 1
    assert len(hold_out(source, 0.99)[0]) >= 1
    training, held = hold_out(source, 0.4, seed=1, exact=False)
    assert len(training) + len(held) == 12


def test_without_copies_the_split_is_unchanged(draw, tmp_path):
    for i in range(30):
        draw(f"{'ab'[i % 3 == 0]}/{i}.png")
    for source in (open_data(tmp_path).train, Shapes(300), open_data("digits").train):
        for seed in range(3):
            exactly, plainly = (hold_out(source, 0.2, seed=seed, exact=exact) for exact in (True, False))
            assert [one.indices.tolist() for one in exactly] == [one.indices.tolist() for one in plainly]


def test_known_contents_are_drawn_only_if_there_are_no_others(twelve):
    source = open_data(twelve).train
    known = np.unique(source.contents()[[i for i in range(12) if names(source, [i])[0] not in ("2.png", "more.png")]])
    held, copies = choose_indices(source, 5, 0, known)
    assert names(source, held) == ["2.png"] and not len(copies), "1.png, which more.png is a copy of, is known"
    assert len(choose_indices(source, 5, 0, np.unique(source.contents()))[0]) == 5
    nothing, plain = choose_indices(source, 5, 0, known[:0]), choose_indices(source, 5, 0)
    assert (np.concatenate(nothing) == np.concatenate(plain)).all()


def test_a_folder_of_copies_of_one_image_cannot_be_split(draw, tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(draw("a.png").read_bytes())
    assert re.search("the 3 files of .* are copies of one image", refusal(hold_out, open_data(tmp_path).train))


def test_files_are_read_once_until_one_changes(twelve, reads, cache):
    some = open_data(twelve).train.contents(np.array([3, 4]))
    assert len(reads) == 2 and not cache.exists(), "only the chosen files are read"
    first = open_data(twelve).train.contents()
    assert len(reads) == 14 and (some == first[[3, 4]]).all()
    source = open_data(twelve).train
    assert (source.contents() == first).all() and (source.contents(np.array([2])) == first[[2]]).all()
    assert len(reads) == 14
    (kept,) = cache.iterdir()
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes(content)
    assert (open_data(twelve).train.contents() == first).all() and len(reads) == 26, "what is damaged is made again"
    shutil.copy(twelve / "1.png", twelve / "2.png")
    assert (open_data(twelve).train.contents() == first).sum() == 11 and len(reads) == 38


def test_unreadable_files_and_an_unwritable_cache_are_tolerated(draw, tmp_path, cache, monkeypatch):
    listed = [draw(f"{i}.png").name for i in range(4)] + ["gone.png", "pipe.png"]
    os.mkfifo(tmp_path / "pipe.png")  # nothing ever writes into it
    shutil.copy(tmp_path / "0.png", tmp_path / "again.png")
    (tmp_path / "list.txt").write_text("\n".join([*listed, "again.png"]))
    cache.parent.mkdir(parents=True)
    cache.write_text("no folder")
    found = open_data(tmp_path / "list.txt").train.contents()
    assert len(np.unique(found)) == 6 and found[0] == found[6]


def test_pixels_in_memory_and_drawings(twelve):
    digits, shapes, files = open_data("digits"), Shapes(50), open_data(twelve).train.contents()
    pixels = digits.train.contents()
    assert len(np.unique(pixels)) == len(digits.train)
    assert (digits.train.subset([7, 3]).contents() == pixels[[7, 3]]).all()
    assert (Shapes(80).contents()[:50] == shapes.contents()).all()
    assert (Shapes(30, first=20).contents() == shapes.contents(np.arange(20, 50))).all()
    assert not np.isin(Shapes(50, seed=1).contents(), shapes.contents()).any() and not shapes._drawn
    assert comparable(pixels, pixels) and not comparable(pixels, files) and comparable(shapes.contents(), files)
    assert comparable(files, files[:0])
    assert copies_among(digits.test, pixels) == 0 and copies_among(digits.train, pixels[:9]) == 9
    assert copies_among(digits.test, files) is None
