"""Collapse: spread, effective rank, and distance of images from their mean."""

import math

import pytest
import torch
from answering import noise

from patchloom.questions.collapse import centred_rank, deviation, distance_from_mean, effective_rank, output_spread


def test_spread_is_0_for_one_direction_and_1_for_all():
    assert output_spread(noise(8) * torch.rand(50, 1).add(0.1)) == pytest.approx(0, abs=1e-3)
    outputs = noise(30, 8) + 2
    unit = outputs / outputs.norm(dim=1, keepdim=True)
    apart = (unit - unit.mean(0)).square().sum(1).mean().sqrt().item()
    assert output_spread(outputs) == pytest.approx(apart, rel=1e-4) and 0.2 < apart < 0.8


def test_effective_rank_by_its_formula():
    outputs = noise(20, 6)
    squares = torch.linalg.eigvalsh(outputs.double().T @ outputs.double())  # of the singular values
    share = squares.sqrt() / squares.sqrt().sum()
    expected = math.exp(-sum(p * math.log(p) for p in share.tolist()))
    assert effective_rank(outputs) == pytest.approx(expected, rel=1e-6) and 1 < expected < 6
    assert effective_rank(outputs.bfloat16()) == pytest.approx(expected, rel=1e-2)
    assert effective_rank(torch.zeros(4, 8)) == pytest.approx(1)


@pytest.mark.parametrize("offset", [0, 1, 20])
def test_a_common_part_changes_neither_deviation_nor_centred_rank(offset):
    """A common part changes spread and effective rank, but neither deviation nor centred rank."""
    features = noise(500, 64)
    moved = features + offset
    assert deviation(moved) == pytest.approx(deviation(features), rel=1e-3) == pytest.approx(1, rel=0.01)
    assert centred_rank(moved) == pytest.approx(centred_rank(features), rel=1e-3) and centred_rank(features) > 60
    if offset >= 20:
        assert output_spread(moved) < 0.1 and effective_rank(moved) < 10
    line = offset + noise(1, 16) * noise(50, 1)  # need not pass through the origin
    assert centred_rank(line) == pytest.approx(1, abs=1e-3) and deviation(noise(1, 16).expand(50, 16)) < 1e-7


def test_equal_rows_have_no_distance_from_their_mean():
    image = noise(1, 48)
    assert distance_from_mean(image.expand(20, 48)) == pytest.approx(0, abs=1e-7)
    assert distance_from_mean(torch.zeros(20, 48)) == 0
    grain = 0.05 * noise(4000, 48)
    assert distance_from_mean(image + grain) == pytest.approx(0.05 / image.std().item(), rel=0.05)
    assert distance_from_mean(noise(4000, 48)) == pytest.approx(1, abs=1e-3)
    assert distance_from_mean(torch.tensor([[1.0, 2.0], [3.0, 4.0]])) == pytest.approx((1 / 1.25) ** 0.5)
