"""Tests of crop retrieval: the crops, the nearest ones, and chance."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attending import random_vit
from PIL import Image
from refusing import refusal
from running import csv_rows
from seeing import asked_of, asked_of_sound, named

from patchloom.data.sources.open import open_data
from patchloom.data.sources.synthetic import Shapes
from patchloom.look.context import LookRequest
from patchloom.look.retrieval import (
    CROP_COUNT,
    PLACES,
    SCALES,
    Retrieval,
    chances,
    crop_of,
    draw_retrieval,
    locality_retrieval,
    mark_of_crop,
)
from patchloom.nets.encode import encode
from patchloom.nets.heads import InstanceHead
from patchloom.withhold.encoder_input import all_patches


def noise(b=3, c=3, h=48, w=64) -> torch.Tensor:
    return torch.randn(b, c, h, w, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("place", range(5))
def test_a_crop_shows_its_part_of_the_image(place):
    rows, columns = torch.meshgrid(torch.arange(40.0), torch.arange(80.0), indexing="ij")
    images = torch.stack([rows, columns])[None]
    down, along = [*PLACES.values()][place]
    for scale, side in enumerate(SCALES):
        crop = place * 5 + scale
        found = crop_of(images, crop, (10, 20))
        assert found.shape == (1, 2, 10, 20)
        middle = found.mean((0, 2, 3))
        wanted = [(whole - 1) / 2 + (at - 0.5) * whole * (1 - side) for whole, at in ((40, down), (80, along))]
        torch.testing.assert_close(middle, torch.tensor(wanted), atol=0.51, rtol=0)
        top, left, tall, wide = mark_of_crop(crop)
        marked = (top + tall / 2) * 40 - 0.5, (left + wide / 2) * 80 - 0.5
        assert marked == pytest.approx(wanted)
        assert found[0, 1].max() - found[0, 1].min() == pytest.approx(80 * side - 4 * side, abs=1.6)


def test_nearest_is_the_largest_cosine_of_all_tokens():
    vit, images, head = random_vit(reg_tokens=2), noise(), InstanceHead(32, 2)
    found = locality_retrieval(named(vit, head=head), images)
    assert set(found) == {"class", "mean", "prefix", "instance", "patches"}
    crops = torch.cat([crop_of(images, crop, (24, 32)) for crop in range(25)])  # crop by crop
    with torch.no_grad():
        tokens = vit.forward_features(crops)
        instance = vit.norm(head(encode(vit, all_patches(crops, 12), norm=False)[:, 3:]))
    parts = {"class": tokens[:, 0], "mean": tokens[:, 3:].mean(1), "patches": tokens[:, 3:].flatten(1)}
    parts |= {"prefix": tokens[:, :3].mean(1), "instance": instance}
    for name, features in parts.items():
        for picture, crop in ((0, 3), (2, 24)):
            alike = torch.cosine_similarity(features, features[crop * 3 + picture], dim=1).view(25, 3)
            own = alike[:, picture].clone()
            own[crop] = -2
            alike[:, picture] = -2
            best = int(alike.argmax())
            assert found[name].own[picture, crop] == own.argmax()
            assert (found[name].other[picture, crop], found[name].picture[picture, crop]) == divmod(best, 3)


def test_hits_and_chance():
    crops = torch.arange(25)[None]
    same = Retrieval(crops, crops, crops).hits(False)
    assert {name: share.tolist() for name, share in same.items()} == {"place": [1], "scale": [1], "both": [1]}
    next_scale = crops // 5 * 5 + torch.tensor([1, 2, 3, 4, 3]).repeat(5)
    beside = Retrieval(next_scale, crops, (crops + 5) % 25)
    assert [one.item() for one in beside.hits(True).values()] == [1, 0, 1]
    assert [one.item() for one in beside.hits(False).values()] == [0, 1, 0]
    lots = torch.Generator().manual_seed(0)
    other = torch.randint(25, (4000, 25), generator=lots)
    own = (crops + 1 + torch.randint(24, (4000, 25), generator=lots)) % 25
    drawn = Retrieval(own, other, other)
    for within in (True, False):
        means = {name: share.mean().item() for name, share in drawn.hits(within).items()}
        assert means == pytest.approx(chances(within), abs=0.005)


def test_the_table_has_every_encoder_and_representation(tmp_path, pages):
    one, twin = named(random_vit()), named(random_vit(class_token=False), "untrained")
    rows = csv_rows(draw_retrieval(replace(asked_of(one, tmp_path, beside=(twin,)), source=Shapes(6)))[1])
    assert {(row["encoder"], row["representation"]) for row in rows} == {
        *(("mine", one) for one in ("class", "mean", "patches")),
        *(("untrained", one) for one in ("mean", "patches")),
    }
    assert len(rows) == 5 * 6 and {(row["images"], row["crops"]) for row in rows} == {("6", "150")}
    for row in rows:
        assert 0 <= float(row["low"]) <= float(row["share"]) <= float(row["high"]) <= 1
        measure = "both" if " " in row["alike"] else row["alike"]
        assert float(row["chance"]) == pytest.approx(chances(row["within"] == "the same image")[measure], abs=1e-4)


def test_two_images_tell_nothing_of_others(tmp_path, pages):
    rows = csv_rows(draw_retrieval(replace(asked_of(named(random_vit()), tmp_path), source=Shapes(2)))[1])
    assert {(row["low"], row["high"], row["images"]) for row in rows} == {("0.0000", "1.0000", "2")}


def test_one_image_and_recordings_are_refused(tmp_path):
    assert "only one" in refusal(locality_retrieval, named(random_vit()), noise(1))
    assert "only for images" in refusal(draw_retrieval, asked_of_sound(tmp_path))


def test_crops_of_dark_images_are_as_bright_as_these(tmp_path, pages):
    (tmp_path / "images").mkdir()
    for i in range(2):
        night = np.full((48, 64, 3), 10, np.uint8)
        night[16:19, :3] = 60  # seen in a few crops at most
        Image.fromarray(night).save(tmp_path / "images" / f"{i}.png")
    source = open_data(tmp_path / "images").train
    draw_retrieval(LookRequest(named(random_vit()), source, tmp_path / "out"))
    medians = [int(np.median(tile.picture)) for row in pages[0].rows for tile in row]
    assert len(set(medians)) == 1


def test_an_exemplar_is_found_where_it_was_cut(tmp_path, pages):
    """ExtreMA Fig. 3: a user's query among 25 crops of each image."""
    one, source = named(random_vit((32, 32), 8)), Shapes(6, size=64)
    asked = LookRequest(one, source, tmp_path, images=3)
    whole = asked.pictures(of=one, times=2)
    crop = 2 * len(SCALES) + 3  # the centre, of the scale before the last
    pixels = crop_of(whole, crop, (32, 32))[1] * 0.2 + 0.5
    file = tmp_path / "mine.png"
    Image.fromarray((255 * pixels).round().clamp(0, 255).byte().permute(1, 2, 0).numpy()).save(file)
    picture, table = draw_retrieval(replace(asked, exemplar=file))
    assert (picture.name, table.name) == ("exemplar.png", "exemplar.csv")
    rows = [row for row in csv_rows(table) if row["representation"] == "patches"]
    assert len(rows) == 3 * CROP_COUNT
    best = max(rows, key=lambda row: float(row["cosine"]))
    assert (best["image"], best["place"], best["scale"]) == ("2", "centre", "0.6") and float(best["cosine"]) > 0.99
    assert "none.png" in refusal(draw_retrieval, replace(asked, exemplar=tmp_path / "none.png"))
