"""Intervals of means and shares."""

import math

import numpy as np
import pytest
from scipy import stats

from patchloom.results.claims import Claim, difference
from patchloom.results.intervals import accuracy_interval, mean_interval, wilson


def test_one_group_shows_nothing_about_others():
    right, of = np.ones(20), np.zeros(20)
    assert accuracy_interval(np.arange(20) % 2, of) == (0.0, 1.0)
    assert accuracy_interval(right, of) == wilson(1, 1) and accuracy_interval(right, np.arange(20) // 4) == wilson(1, 5)
    assert all(wilson(share, n)[share] == share for share in (0, 1) for n in range(1, 500))
    assert difference(right, np.zeros(20), trained=False, groups=of).claim is Claim.NONE
    assert mean_interval(np.arange(20.0), groups=of) == (-math.inf, math.inf)


def test_the_interval_of_a_mean_is_that_of_scipy():
    values = [0.1, 0.5, 0.4, 0.9]
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert mean_interval(values) == pytest.approx(expected)
    assert mean_interval([1.0], accuracy=True) == (-math.inf, math.inf)
    assert mean_interval([1.0, 1.0], accuracy=True) == wilson(1, 2) != mean_interval([1.0, 1.0]) == (1, 1)


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [(81 / 263, 263, 0.2553, 0.3662), (15 / 148, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.8830, 1)],
)
def test_wilsons_interval_is_newcombes(share, n, low, high):
    """Newcombe 1998, table I (method 3)."""
    assert wilson(share, n) == pytest.approx((low, high), abs=5e-5)
