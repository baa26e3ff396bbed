"""Tests of similarities: of one patch to all others, and of every pair of positions."""

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from attending import random_vit
from PIL import Image
from seeing import asked_of, asked_of_sound, named
from swins import swin

from patchloom.data.loader import plain_batches
from patchloom.data.sources.synthetic import Shapes
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.look import correlation as module
from patchloom.look.context import ImagePoint, mark_of, output_of, patch_at
from patchloom.look.correlation import (
    _map_of_pairs,
    centred,
    correlation,
    draw_correlation,
    position_correlation,
    salient_patches,
)
from patchloom.look.image_grid import Scale


def test_cosines_of_a_case_by_hand():
    features = torch.tensor([[[[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]], [[[-1.0, 0.0], [0.0, -1.0], [5.0, 0.0]]]])
    found = correlation(features, torch.tensor([0, 1]))
    half = 0.5**0.5
    torch.testing.assert_close(found.within, torch.tensor([[[1.0, 0.0, half]], [[0.0, 1.0, 0.0]]]))
    torch.testing.assert_close(found.across, torch.tensor([[[-1.0, 0.0, 1.0]], [[0.0, -1.0, -half]]]))


def test_what_all_have_in_common_is_taken_away():
    features = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(centred(features + 100), centred(features), rtol=1e-3, atol=1e-3)
    assert centred(features).mean((0, 1, 2)).abs().max() < 1e-6


def test_the_salient_patch_is_the_one_that_is_unlike_the_rest():
    features = 0.01 * torch.randn(2, 3, 4, 5)
    features[0, 1, 2] += 1
    features[1, 2, 3] -= 1
    assert salient_patches(features).tolist() == [6, 11]


def test_a_point_is_in_its_patch():
    one = named(random_vit())  # 3 rows of 4 patches of 8 pixels
    assert [patch_at(one, ImagePoint(*at)) for at in ((0, 0), (7.9, 0), (8, 0), (31.5, 23.5), (0, 8))] == [
        0,
        0,
        1,
        11,
        4,
    ]
    assert mark_of(one, 6) == pytest.approx((1 / 3, 0.5, 1 / 3, 0.25))
    for outside in ((32, 0), (0, 24), (-1, 0)):
        with pytest.raises(PatchloomError, match="outside the image: the input of mine is 32 pixels"):
            patch_at(one, ImagePoint(*outside))


@pytest.mark.parametrize("query", [None, ImagePoint(20, 3)])
@pytest.mark.parametrize("options", [{}, {"class_token": False, "positions": "none"}, {"size": (12, 30), "p": (12, 3)}])
def test_every_kind_of_encoder_is_drawn(options, query, tmp_path):
    others = (named(random_vit((32, 32), 4), "untrained"),)  # of another grid
    path, *_ = draw_correlation(asked_of(named(random_vit(**options)), tmp_path, query=query, beside=others))
    assert path == tmp_path / "correlation.png" and min(Image.open(path).size) > 300


def test_another_encoder_of_the_same_name_stands_beside_it(tmp_path):
    alone, both = (
        draw_correlation(asked_of(named(random_vit()), tmp_path / folder, beside=beside))[0]
        for folder, beside in {"alone": (), "both": (named(random_vit(depth=1)),)}.items()
    )
    assert Image.open(alone).width < Image.open(both).width


def test_swin_sound_and_a_single_image(tmp_path):
    draw_correlation(asked_of(named(swin()), tmp_path / "swin"))
    draw_correlation(asked_of_sound(tmp_path / "sound", query=ImagePoint(3, 1)))
    single, *_ = draw_correlation(asked_of(named(random_vit()), tmp_path / "single", images=1))
    several, *_ = draw_correlation(asked_of(named(random_vit()), tmp_path / "several", images=2))
    assert Image.open(single).height < Image.open(several).height


@pytest.mark.parametrize("images", [1, 2])
def test_a_caption_speaks_of_the_next_image_only_where_there_is_one(images, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        module, "draw_tiles", lambda rows, headings, size, title, caption, *_, **__: said.append(caption)
    )
    draw_correlation(asked_of(named(random_vit()), tmp_path, images=images))
    assert ("elsewhere in the next image" in said[0]) == ("same place in both" in said[0]) == (images == 2)


def test_every_pair_of_positions_is_correlated_as_numpy_does_it():
    """MP3 Fig. 10: Pearson correlation of every pair of positions, within images and across, averaged over images."""
    one, source = named(random_vit((24, 32), 8)), Shapes(40)
    found = position_correlation(one, source, seed=3)
    order = np.random.default_rng(3).permutation(40)
    (batch,) = plain_batches(source.subset(order), (24, 32), 40)
    features = output_of(one, normalize(batch.views[0], one.card.mean, one.card.std)).flatten(1, 2).double().numpy()
    n = features.shape[1]
    within = np.mean([np.corrcoef(image) for image in features], 0)
    across = np.mean([np.corrcoef(features[i], features[(i + 1) % 40])[:n, n:] for i in range(40)], 0)
    np.testing.assert_allclose(found.within, within, atol=1e-5)
    np.testing.assert_allclose(found.across, across, atol=1e-5)
    assert found.images == 40 and n == 12
    means = found.means()
    assert means["within"][1] == pytest.approx(1) and means["across"][1] == pytest.approx(
        np.diag(across).mean(), abs=1e-5
    )
    assert means["across"][0] == pytest.approx((across.sum() - np.trace(across)) / (n * n - n), abs=1e-5)


def test_a_map_of_pairs_has_the_map_of_each_position_at_its_place():
    one, scale = named(random_vit((24, 32), 8)), Scale("", 0.0, 11.0)  # 3 rows of 4 patches
    own = torch.arange(12.0)[:, None].expand(12, 12)  # whatever the other position, the number of one's own
    shown = _map_of_pairs(one, own, scale)
    down, along = (shown.shape[0] + 0.0) / 3, (shown.shape[1] + 0.0) / 4
    for position in range(12):
        row, column = divmod(position, 4)
        cell = shown[int((row + 0.5) * down), int((column + 0.5) * along)]
        assert (cell == scale.shade(np.array([[float(position)]]))[0, 0]).all()
    others = scale.shade(np.tile(np.arange(12.0), (12, 1)))
    assert (_map_of_pairs(named(random_vit((8, 96), 8)), torch.arange(12.0).expand(12, 12), scale) == others).all()


def test_pairs_are_drawn_of_one_image_of_sound_and_of_a_swin(tmp_path):
    asked = [
        asked_of(named(random_vit()), tmp_path / "several", beside=(named(random_vit((32, 32), 4), "untrained"),)),
        replace(asked_of(named(random_vit()), tmp_path / "single"), source=Shapes(1)),
        asked_of_sound(tmp_path / "sound"),
        asked_of(named(swin()), tmp_path / "swin"),
    ]
    for each in asked:
        *_, path, table = draw_correlation(each)
        assert path.name == "correlation-positions.png" and min(Image.open(path).size) > 300
        rows = list(csv.DictReader(table.open()))
        assert {row["where"] for row in rows} == ({"within"} if len(each.source) == 1 else {"within", "across"})
        assert all(-1 <= float(row["mean"]) <= 1 + 1e-5 for row in rows)


def test_too_many_patches_for_all_pairs_are_refused():
    with pytest.raises(PatchloomError, match="has 4,225 patches.* at most 4,096: give a smaller --img_size"):
        position_correlation(named(random_vit((130, 130), 2)), Shapes(2))
