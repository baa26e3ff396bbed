"""Prediction of positions: weights of patches, accuracy, and the exact chance level."""

import pytest
import torch
from answering import Answers, encoded_of, geometry_of, masking

from patchloom.patches.partition import random_partition
from patchloom.patches.tokens import patchify
from patchloom.questions.positions import (
    PositionPrediction,
    Positions,
    affinity,
    chance_accuracy,
    loss_weights,
    weighted_mean,
)
from patchloom.withhold.encoder_input import blank_patches, drop_positions


def test_affinity_prefers_patches_like_the_class_token():
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


def test_chance_excludes_known_positions():
    n, known, trials = 9, 3, 40_000
    generator = torch.Generator().manual_seed(0)
    (taken,) = random_partition(trials, n, (n,), generator)
    true, free = taken[:, known], taken[:, known:]  # a random guess among the remaining positions
    guess = free.gather(1, torch.randint(0, n - known, (trials, 1), generator=generator))[:, 0]
    assert (guess == true).float().mean().item() == pytest.approx(chance_accuracy(n, known), abs=0.01)


def test_accuracy_counts_only_dropped_positions():
    logits = torch.eye(4)[torch.tensor([[3, 0, 0], [1, 1, 2]])]
    predicted = PositionPrediction(
        torch.tensor([[3, 1, 0], [0, 1, 2]]), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool(), logits
    )
    assert predicted.places().tolist() == [[3, 0, 0], [1, 1, 2]]
    assert predicted.accuracy().tolist() == pytest.approx([1 / 2, 2 / 3]) and predicted.known().tolist() == [1, 0]
    assert chance_accuracy(4, predicted.known()).tolist() == pytest.approx([1 / 3, 1 / 4])


def test_the_picture_hides_masked_and_blank_patches():
    """One of four patches is masked and one blank; one of the others has its position, and one is misplaced."""
    images = torch.rand(1, 3, 4, 4)
    given = masking(images, 2, torch.tensor([[0, 1, 2]]), torch.tensor([[3]]))
    given = drop_positions(blank_patches(given, torch.tensor([[1]])), torch.tensor([[2]]))
    logits = torch.zeros(1, 3, 4)
    logits[..., 0] = 1
    question = Positions(geometry_of(images, 2), Answers(logits), {})
    (sheet,) = question.sheets(encoded_of(images, given))
    shown, placed = (patchify(sheet.columns[name], (2, 2))[0] for name in ("given", "placed"))
    truth = patchify(images, (2, 2))[0]
    assert torch.equal(shown[[0, 2]], truth[[0, 2]]) and shown[[1, 3]].isnan().all()
    assert (
        torch.equal(placed[0], truth[0])
        and placed[1].isnan().all()
        and (placed[2] == float("inf")).all()
        and placed[3].isnan().all()
    )
