"""Position embeddings, distances and smoothing."""

import pytest
import torch

from patchloom.patches.positions import program_smoothed_positions, sincos_1d, sincos_2d


def test_one_row_or_column_has_the_whole_width():
    table = sincos_2d(16, (1, 5))
    assert torch.equal(table, sincos_1d(16, torch.arange(5))) and torch.equal(table, sincos_2d(16, (5, 1)))
    assert torch.equal(sincos_2d(16, (1, 1))[0], torch.tensor([0.0] * 4 + [1.0] * 4).repeat(2))
    with pytest.raises(ValueError, match="divisible by 4, not 6"):
        sincos_2d(6, (2, 2))
    with pytest.raises(ValueError, match="even width"):
        sincos_1d(3, torch.arange(2))
    assert torch.equal(program_smoothed_positions(12, 4, 0), torch.eye(12))
