"""Temperatures by hand, the calibration error of a small case, and calibrations in files."""

import math

import pytest
import torch

from patchloom.evaluate.calibration import calibrate, calibration_error, calibration_from


def test_the_temperature_of_two_confidences_by_hand():
    """Of n images with the logits (a, 0), a share p is right: the best a / T is log(p / (1 - p))."""
    logits = torch.tensor([[4.0, 0.0]]).expand(8, 2)
    labels = torch.tensor([0] * 6 + [1] * 2)
    found = calibrate(logits, labels)
    assert found.temperature == pytest.approx(4 / math.log(3), rel=1e-4) and found.images == 8
    assert found.nll == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert found.nll_before == pytest.approx(math.log(1 + math.exp(-4)) + 1)
    assert found.ece == pytest.approx(0, abs=1e-4)
    assert found.ece_before == pytest.approx(1 / (1 + math.exp(-4)) - 0.75)
    assert "NLL 1.018 before, 0.562 after; ECE 23.2 % before, 0.0 % after" in found.sentence()


def test_labels_that_are_all_right_stay_within_the_bounds():
    found = calibrate(torch.eye(3), torch.arange(3))
    assert 0.02 <= found.temperature < 0.05 and found.nll < 1e-6


def test_bins_are_weighted_and_have_their_upper_ends():
    probabilities = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 1])
    # of 5 bins, 0.6 ends the third: accuracy 0.5 of two; the fifth has accuracy 1 and confidence 0.9
    assert calibration_error(probabilities, labels, bins=5) == pytest.approx(0.5 * 0.1 + 0.5 * 0.1)


def test_a_calibration_of_a_file_is_checked():
    found = calibrate(torch.eye(3), torch.tensor([0, 1, 1]))
    assert calibration_from(found.plain()) == found and calibration_from({}) is None
    for wrong in ({"temperature": 0.0}, {"ece": "high"}, {"images": math.nan}, {"more": 1}):
        with pytest.raises(ValueError):
            calibration_from(found.plain() | wrong)
    with pytest.raises(ValueError, match="lacks"):
        calibration_from({"temperature": 1.0})
