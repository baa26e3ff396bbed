"""Position embeddings, distances and smoothing."""

import math

import pytest
import torch

from patchloom.patches.positions import distances, program_smoothed_positions, sincos_1d, sincos_2d, smoothed_positions


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


def test_one_row_or_column_has_the_whole_width():
    table = sincos_2d(16, (1, 5))
    assert torch.equal(table, sincos_1d(16, torch.arange(5))) and torch.equal(table, sincos_2d(16, (5, 1)))
    assert torch.equal(sincos_2d(16, (1, 1))[0], torch.tensor([0.0] * 4 + [1.0] * 4).repeat(2))
    with pytest.raises(ValueError, match="divisible by 4, not 6"):
        sincos_2d(6, (2, 2))
    with pytest.raises(ValueError, match="even width"):
        sincos_1d(3, torch.arange(2))


def test_smoothing_falls_with_the_distance():
    apart = distances((2, 3))
    assert apart[0, 5].item() == pytest.approx(math.sqrt(1 + 4)) and torch.equal(apart, apart.T)
    assert (apart.diagonal() == 0).all()
    assert torch.equal(smoothed_positions((3, 4), 0), torch.eye(12))
    soft = smoothed_positions((3, 4), 0.8)
    assert torch.allclose(soft.sum(1), torch.ones(12))
    assert (soft[0, 1] / soft[0, 0]).item() == pytest.approx(math.exp(-1 / 0.64), rel=1e-5)


def test_the_program_smooths_along_a_grid_of_16():
    """Its map has 16x16 places for 14x14 patches: the label of patch (7, 7) goes to the 16th next, not the 14th."""
    labels, patch = program_smoothed_positions(196, 16, 1.0), 7 * 14 + 7
    right, wrong = math.exp(-1) / math.pi, math.exp(-5) / math.pi  # the sum of a column is almost π
    assert labels.shape == (196, 196)
    assert labels[patch, patch + 16].item() == pytest.approx(right, abs=1e-4)
    assert labels[patch, patch + 14].item() == pytest.approx(wrong, abs=1e-4)
    assert labels[:, 195].sum().item() < 0.8  # places 196 to 255 are cut
    assert labels[1, 0] > labels[0, 1]  # a column is divided by the sum of its place, which is less at the border
    assert torch.equal(program_smoothed_positions(12, 4, 0), torch.eye(12))
