"""Position tables, distances and smoothing."""

import math

import pytest
import torch

from patchloom.patches.partition import random_dropped, random_partition
from patchloom.patches.positions import distances, sincos_1d, sincos_2d, smoothed_positions
from patchloom.questions.positions import PositionPrediction, chance_accuracy


def test_sincos_follows_its_formula():
    d, (rows, columns) = 16, (3, 5)
    table = sincos_2d(d, (rows, columns))
    assert table.shape == (15, d)
    row, column = 2, 4
    patch = row * columns + column
    for i in range(d // 4):
        angle = 10000 ** (-i / (d / 4))
        assert table[patch, i].item() == pytest.approx(math.sin(column * angle), abs=1e-6)
        assert table[patch, d // 4 + i].item() == pytest.approx(math.cos(column * angle), abs=1e-6)
        assert table[patch, d // 2 + i].item() == pytest.approx(math.sin(row * angle), abs=1e-6)
        assert table[patch, 3 * d // 4 + i].item() == pytest.approx(math.cos(row * angle), abs=1e-6)


def test_widths_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="4 divides, not 6"):
        sincos_2d(6, (2, 2))
    with pytest.raises(ValueError, match="even width"):
        sincos_1d(3, torch.arange(2))


def test_distances():
    apart = distances((2, 3))
    assert apart[0, 5].item() == pytest.approx(math.sqrt(1 + 4))
    assert torch.equal(apart, apart.T)
    assert (apart.diagonal() == 0).all()


def test_smoothing():
    assert torch.equal(smoothed_positions((3, 4), 0), torch.eye(12))
    soft = smoothed_positions((3, 4), 0.8)
    assert torch.allclose(soft.sum(1), torch.ones(12))
    assert (soft[0, 1] / soft[0, 0]).item() == pytest.approx(math.exp(-1 / 0.64), rel=1e-5)
    released = smoothed_positions((3, 4), 0.8, squared=True)
    assert torch.allclose(released.sum(0), torch.ones(12))
    assert (released[6, 4] / released[4, 4]).item() == pytest.approx(
        math.exp(-4 / 0.64) * 1.0, rel=1e-5
    )  # one column, so one divisor


def test_blind_guess_is_the_chance_of_a_guesser_who_knows_what_is_taken():
    n, told, trials = 9, 3, 40_000
    generator = torch.Generator().manual_seed(0)
    (taken,) = random_partition(trials, n, (n,), generator)
    true, free = taken[:, told], taken[:, told:]  # a random guess among the positions that are not taken
    guess = free.gather(1, torch.randint(0, n - told, (trials, 1), generator=generator))[:, 0]
    assert (guess == true).float().mean().item() == pytest.approx(chance_accuracy(n, told), abs=0.01)


@pytest.mark.parametrize(("ratio", "dropped"), [(0.75, 12), (0.95, 16), (1.0, 16), (0.01, 1), (0.0, 1)])
def test_a_share_of_the_positions_is_dropped_and_at_least_one(ratio, dropped):
    drawn = random_dropped(3, 16, ratio, torch.Generator().manual_seed(0), "cpu")
    assert drawn.shape == (3, dropped) and all(len(set(row)) == dropped for row in drawn.tolist())


def test_placed_counts_what_was_asked_and_leaves_what_was_told():
    logits = torch.eye(4)[torch.tensor([[3, 0, 0], [1, 1, 2]])]
    placed = PositionPrediction(
        torch.tensor([[3, 1, 0], [0, 1, 2]]), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool(), logits
    )
    assert placed.places().tolist() == [[3, 0, 0], [1, 1, 2]]
    assert placed.found().tolist() == pytest.approx([1 / 2, 2 / 3]) and placed.told().tolist() == [1, 0]
    assert chance_accuracy(4, placed.told()).tolist() == pytest.approx([1 / 3, 1 / 4])
