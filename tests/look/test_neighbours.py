"""Tests of nearest neighbours: copies, names and classes, and unreadable images."""

import numpy as np
import pytest
from attending import random_vit
from PIL import Image
from running import csv_rows
from seeing import named

from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.look import neighbours
from patchloom.look.context import LookRequest
from patchloom.look.neighbours import draw_neighbours


@pytest.fixture
def folder(tmp_path):
    """Write six images of two classes: the last of b is a copy of the first of a, and one is unreadable."""
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
    for i in range(6):
        pixels = np.random.default_rng(i % 5).integers(0, 256, (24, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / "ab"[i // 3] / f"{i}.png")
    (tmp_path / "images" / "a" / "zz.png").write_bytes((tmp_path / "images" / "a" / "2.png").read_bytes()[:200])
    return tmp_path / "images"


def test_a_copy_is_found_first(folder, tmp_path, pages):
    asked = LookRequest(named(random_vit()), open_data(str(folder)).train, tmp_path / "out")
    picture, table = draw_neighbours(asked)
    rows = csv_rows(table)
    first = {row["image"]: row for row in rows if row["rank"] == "1"}
    assert first["a/0.png"]["neighbour"] == "b/5.png" and first["b/5.png"]["neighbour"] == "a/0.png"
    assert float(first["a/0.png"]["cosine"]) == pytest.approx(1, abs=1e-5)
    assert (first["a/0.png"]["class"], first["a/0.png"]["neighbour_class"]) == ("a", "b")
    assert all(row["image"] != row["neighbour"] for row in rows) and len(rows) == 6 * 5  # none is its own neighbour
    assert not any("zz" in row["neighbour"] for row in rows)
    cosines = [float(row["cosine"]) for row in rows if row["image"] == "a/0.png"]
    assert cosines == sorted(cosines, reverse=True)
    assert picture == tmp_path / "out" / "nearest.png"


@pytest.mark.parametrize(("other", "times"), [({"depth": 1}, 1), ({"size": (32, 32), "p": 4}, 2)])
def test_encoders_of_one_size_are_shown_images_once(folder, tmp_path, pages, monkeypatch, other, times):
    source = open_data(str(folder)).train
    read = []
    plain = type(source).read
    monkeypatch.setattr(type(source), "read", lambda self, i: read.append(i) or plain(self, i))
    draw_neighbours(LookRequest(named(random_vit()), source, tmp_path / "out", (named(random_vit(**other)),)))
    assert sorted(read) == sorted([*[*range(7)] * times, *[0, 1, 2, 4, 5, 6]])  # at last those that are drawn


def test_a_large_folder_is_thinned_out(folder, tmp_path, pages, monkeypatch):
    monkeypatch.setattr(neighbours, "GALLERY", 4)
    _, table = draw_neighbours(LookRequest(named(random_vit()), open_data(str(folder)).train, tmp_path / "out"))
    assert "Unreadable" not in pages[0].caption  # it is none of the four
    assert "4 of 7 images" in pages[0].caption
    assert {row["rank"] for row in csv_rows(table)} == {"1", "2", "3"}


def test_frames_and_counts_are_by_class_also_of_the_untrained_encoder(folder, tmp_path, pages):
    beside = (named(random_vit(depth=1), "untrained"),)
    _, table = draw_neighbours(LookRequest(named(random_vit()), open_data(str(folder)).train, tmp_path / "out", beside))
    assert {row["encoder"] for row in csv_rows(table)} == {"mine", "untrained"}
    (page,) = pages
    rows, headings, caption, groups = page.rows, page.headings, page.caption, page.groups
    assert headings == ["image", *(f"{place}." for place in (1, 2, 3, 4, 5) * 2)] and groups[1:] == [
        ("mine", 5),
        ("untrained", 5),
    ]
    # each of six has all five others beside it, two of them of its own class
    for query, *others in rows:
        assert query.words in "ab" and [tile.frame for tile in others].count("#0072b2") == 2 * 2
    assert "12 of 30 by mine, 12 of 30 by untrained" in caption and "skipped: 1." in caption
    assert "untrained encoder finds as well" in caption


def test_one_readable_image_is_refused(folder, tmp_path):
    source = open_data(str(folder)).train
    with pytest.raises(PatchloomError, match="fewer than two readable images"):
        draw_neighbours(LookRequest(named(random_vit()), source.subset([1, 3]), tmp_path / "one"))
