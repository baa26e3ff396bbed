"""Tests of similarities: of one patch to all others, and of every pair of positions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attending import random_vit
from running import csv_rows
from seeing import asked_of, named

from patchloom.data.loader import plain_batches
from patchloom.data.sources.synthetic import Shapes
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.look.context import ImagePoint, mark_of, output_of, patch_at
from patchloom.look.correlation import (
    _map_of_pairs,
    centred,
    correlation,
    draw_correlation,
    position_correlation,
    salient_patches,
)
from patchloom.look.look import parse_points
from patchloom.look.sheet import Scale
from patchloom.nets.encode import input_size
from patchloom.results.claims import UNTRAINED


def test_cosines_means_and_salient_patches_by_hand():
    features = torch.tensor([[[[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]], [[[-1.0, 0.0], [0.0, -1.0], [5.0, 0.0]]]])
    found = correlation(features, torch.tensor([0, 1]))
    half = 0.5**0.5
    torch.testing.assert_close(found.within, torch.tensor([[[1.0, 0.0, half]], [[0.0, 1.0, 0.0]]]))
    torch.testing.assert_close(found.across, torch.tensor([[[-1.0, 0.0, 1.0]], [[0.0, -1.0, -half]]]))
    features = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(centred(features + 100), centred(features), rtol=1e-3, atol=1e-3)
    assert centred(features).mean((0, 1, 2)).abs().max() < 1e-6
    features = 0.01 * torch.randn(2, 3, 4, 5)
    features[0, 1, 2] += 1
    features[1, 2, 3] -= 1
    assert salient_patches(features).tolist() == [6, 11]


def test_a_point_is_in_its_patch():
    one = named(random_vit())  # 3 rows of 4 patches of 8 pixels
    patches = {(0, 0): 0, (7.9, 0): 0, (8, 0): 1, (31.5, 23.5): 11, (0, 8): 4}
    assert {at: patch_at(one, ImagePoint(*at)) for at in patches} == patches
    assert mark_of(one, 6) == pytest.approx((1 / 3, 0.5, 1 / 3, 0.25))
    for outside in ((32, 0), (0, 24), (-1, 0)):
        with pytest.raises(PatchloomError, match="is not a point"):
            parse_points(outside, input_size(one.vit))


def test_the_same_place_is_marked_and_compared_in_another_grid(pages, tmp_path):
    one, other = named(random_vit()), named(random_vit((32, 32), 4), UNTRAINED)  # 3 x 4 and 8 x 8 patches
    asked = asked_of(one, tmp_path, images=2, queries=(ImagePoint(20, 3),), beside=(other,))
    draw_correlation(asked)
    page = pages[0]
    assert page.headings == ["image", "next image", *("within the image", "in the next") * 2]
    assert [name for name, _ in page.groups] == ["", "mine", UNTRAINED]
    marks = [[box for box, _ in tile.marks] for row in page.rows for tile in row]
    assert marks == [*[[(0, 1 / 2, 1 / 3, 1 / 4)], []] * 6]
    shade = Scale("", -1.0, 1.0, "RdBu_r").shade
    for each, (row, column), tiles in ((one, (0, 2), slice(2, 4)), (other, (1, 5), slice(4, 6))):
        features = centred(output_of(each, asked.pictures(of=each)))
        queries = torch.full((2,), row * features.shape[2] + column)
        for shown, part in zip(page.rows[0][tiles], correlation(features, queries), strict=True):
            assert (shown.picture == shade(part[0].numpy())).all()
    draw_correlation(asked_of(one, tmp_path, images=1))
    assert pages[2].headings == ["image", "within the image"] and "next" not in pages[2].caption.split("so there")[0]


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


def test_the_table_of_pairs_has_the_means_of_each_encoder(pages, tmp_path):
    one, other = named(random_vit()), named(random_vit((32, 32), 4), UNTRAINED)
    asked = asked_of(one, tmp_path, beside=(other,))
    rows = csv_rows(draw_correlation(asked)[-1])
    expected = [
        (each.name, where, mean, "3")
        for each in (one, other)
        for where, means in position_correlation(each, asked.source).means().items()
        for mean in means
    ]
    for row, (name, where, mean, images) in zip(rows, expected, strict=True):
        assert (row["encoder"], row["where"], row["images"]) == (name, where, images)
        assert float(row["mean"]) == pytest.approx(mean, rel=1e-4)
    *_, table = draw_correlation(replace(asked, source=Shapes(1)))
    assert {row["where"] for row in csv_rows(table)} == {"within"}


def test_too_many_patches_for_all_pairs_are_refused():
    with pytest.raises(PatchloomError, match="4,225 patches.*4,096.*--img_size"):
        position_correlation(named(random_vit((130, 130), 2)), Shapes(2))
