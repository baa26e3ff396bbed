"""Tests of nearest neighbours: copies, names and classes, and unreadable images."""

import csv

import numpy as np
import pytest
import torch
from attending import random_vit
from PIL import Image
from seeing import asked_of_sound, named
from swins import swin

from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.look import neighbours
from patchloom.look.context import LookRequest
from patchloom.look.neighbours import draw_neighbours, galleries_of


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


@pytest.mark.parametrize("options", [{}, {"class_token": False, "positions": "none"}, {"reg_tokens": 2}])
def test_a_copy_is_found_first(options, folder, tmp_path):
    asked = LookRequest(named(random_vit(**options)), open_data(str(folder)).train, tmp_path / "out")
    picture, table = draw_neighbours(asked)
    rows = list(csv.DictReader(table.open()))
    first = {row["image"]: row for row in rows if row["rank"] == "1"}
    assert first["a/0.png"]["neighbour"] == "b/5.png" and first["b/5.png"]["neighbour"] == "a/0.png"
    assert float(first["a/0.png"]["cosine"]) == pytest.approx(1, abs=1e-5)
    assert (first["a/0.png"]["class"], first["a/0.png"]["neighbour_class"]) == ("a", "b")
    assert all(row["image"] != row["neighbour"] for row in rows) and len(rows) == 6 * 5  # none is its own neighbour
    assert not any("zz" in row["neighbour"] for row in rows)
    cosines = [float(row["cosine"]) for row in rows if row["image"] == "a/0.png"]
    assert cosines == sorted(cosines, reverse=True)
    assert picture == tmp_path / "out" / "nearest.png"


def test_encoders_of_one_size_are_shown_images_once(folder, monkeypatch):
    source = open_data(str(folder)).train
    read = []
    plain = type(source).read
    monkeypatch.setattr(type(source), "read", lambda self, i: read.append(i) or plain(self, i))
    encoders = [named(random_vit()), named(random_vit((32, 32), 4)), named(random_vit(depth=1))]
    found = galleries_of(encoders, source)
    assert sorted(read) == sorted([*range(7)] * 2)  # for two sizes
    for one, gallery in zip(encoders, found, strict=True):
        (alone,) = galleries_of([one], source)
        assert gallery.indices.tolist() == alone.indices.tolist() == [0, 1, 2, 4, 5, 6]
        for name in ("class", "mean"):
            torch.testing.assert_close(gallery.features[name], alone.features[name], rtol=1e-5, atol=1e-5)


def test_a_large_folder_is_thinned_out_and_that_is_said(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "GALLERY", 4)
    said = []
    monkeypatch.setattr(neighbours, "full_caption", lambda one, text, images: said.append(text) or text)
    _, table = draw_neighbours(LookRequest(named(random_vit()), open_data(str(folder)).train, tmp_path / "out"))
    assert "Unreadable" not in said[0]  # it is none of the four
    assert "The nearest neighbours among 4 of 7 images, evenly spread, by the cosine" in said[0]
    assert {row["rank"] for row in csv.DictReader(table.open())} == {"1", "2", "3"}


def test_beside_the_untrained_encoder_and_by_classes(folder, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(neighbours, "full_caption", lambda one, text, images: said.append(text) or text)
    beside = (named(random_vit(depth=1), "untrained"),)
    _, table = draw_neighbours(LookRequest(named(random_vit()), open_data(str(folder)).train, tmp_path / "out", beside))
    assert {row["encoder"] for row in csv.DictReader(table.open())} == {"mine", "untrained"}
    # each of six has all five others beside it, two of them of its own class
    assert "Blue are 12 of 30 by mine, 12 of 30 by untrained." in said[0]
    assert "Unreadable and skipped: 1." in said[0]
    assert said[0].endswith("the untrained encoder finds as well were not learnt.")


def test_swin_sound_and_a_single_image(folder, tmp_path):
    source = open_data(str(folder)).train
    draw_neighbours(LookRequest(named(swin()), source, tmp_path / "swin", images=2))
    picture, _ = draw_neighbours(asked_of_sound(tmp_path / "sound"))
    assert picture.stat().st_size > 5000
    with pytest.raises(PatchloomError, match="fewer than two readable images"):
        draw_neighbours(LookRequest(named(random_vit()), source.subset([1]), tmp_path / "one"))
