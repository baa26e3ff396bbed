"""Baselines and weights of the questions."""

import pytest
import torch
from patchloom.objectives.pixels import guessed_statistics, recovered_images, spread, trivial_errors
from patchloom.objectives.positions import affinity, foreign_places, loss_weights, weighted_mean

from patchloom.patches.partition import random_partition
from patchloom.patches.tokens import normalize_patches, patch_statistics, patchify


def test_trivial_answers_are_what_they_say():
    images = torch.randn(3, 3, 16, 24)
    visible, masked = random_partition(3, 24, (6, 18))
    plain = trivial_errors(images, 4, visible, masked, normalized=False)
    truth = patchify(images, 4, masked).unflatten(-1, (3, 16))
    torch.testing.assert_close(plain["mean colour"], truth.var(-1, correction=0).mean((1, 2)))
    flat = torch.ones(2, 3, 16, 24) * torch.tensor([1.0, -2.0, 0.5]).view(3, 1, 1)
    for error in trivial_errors(flat, 4, visible[:2], masked[:2], normalized=False).values():
        assert error.max() < 1e-8
    normalized = trivial_errors(images, 4, visible, masked, normalized=True)
    assert (
        0.85 < normalized["mean colour"].mean() < 1.0
    )  # a patch of noise has unit deviation, less its channels' means


def test_the_blur_never_looks_at_masked_patches():
    images = torch.randn(2, 1, 16, 16)
    visible, masked = random_partition(2, 16, (4, 12))
    other = recovered_images(torch.randn(2, 12, 16), images, 4, masked)
    assert not torch.equal(other, images)
    torch.testing.assert_close(spread(images, 4, visible), spread(other, 4, visible))
    for one, two in zip(*(guessed_statistics(x, 4, visible, masked) for x in (images, other)), strict=True):
        torch.testing.assert_close(one, two)


def test_right_predictions_recover_the_image():
    images = torch.randn(2, 3, 16, 16)
    _, masked = random_partition(2, 16, (4, 12))
    truth = patchify(images, 4, masked)
    torch.testing.assert_close(recovered_images(truth, images, 4, masked), images)
    back = recovered_images(normalize_patches(truth), images, 4, masked, patch_statistics(truth))
    torch.testing.assert_close(back, images, rtol=1e-4, atol=1e-4)


def test_affinity_prefers_what_resembles_the_class_token():
    features = torch.randn(2, 1 + 5, 8)
    features[:, 3] = features[:, 0] * 2
    weights = affinity(features, prefix=1, temperature=0.1)
    assert torch.allclose(weights.sum(1), torch.ones(2))
    assert (weights.argmax(1) == 2).all()
    alone = affinity(features[:, 1:], prefix=0, temperature=0.1, has_class_token=False)
    registers = affinity(features, prefix=1, temperature=0.1, has_class_token=False)
    torch.testing.assert_close(alone, registers)
    assert not torch.allclose(alone, weights)


def test_only_dropped_positions_count():
    visible = torch.tensor([[3, 1, 0]])
    dropped = torch.tensor([[True, False, True]])
    affinities = torch.tensor([[0.4, 0.1, 0.3, 0.2]])
    weights = loss_weights(dropped, visible, affinities)
    torch.testing.assert_close(weights, torch.tensor([[0.2, 0.0, 0.4]]) / 0.7)
    assert weighted_mean(torch.tensor([[1.0, 100.0, 4.0]]), weights).item() == pytest.approx((0.2 + 1.6) / 0.6)
    assert loss_weights(dropped, visible).tolist() == [[1.0, 0.0, 1.0]]


def test_foreign_places_are_never_ones_own():
    visible = torch.arange(7).expand(1000, 7)
    foreign = foreign_places(visible, 7, torch.Generator().manual_seed(0))
    assert not (foreign == visible).any() and foreign.min() == 0 and foreign.max() == 6
    counts = torch.bincount(foreign[:, 0], minlength=7)
    assert counts[0] == 0 and (counts[1:] - 1000 / 6).abs().max() < 60
