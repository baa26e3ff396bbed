"""Equal models are rarely called different by the new rule, and often were by the earlier one."""

import effects
import numpy as np
import pytest

from patchloom.results.intervals import accuracy_interval
from patchloom.results.shares import share_of_way


def wrong(two, *given, times: int) -> np.ndarray:
    """Return the shares of false claims by the new and the earlier rule, for comparisons of equal models."""
    rng = np.random.default_rng(0)
    return np.sum([two(*given, rng) for _ in range(times)], 0)


@pytest.mark.parametrize(("two", "times"), [(effects.two_of_segmentation, 300), (effects.two_of_detection, 80)])
def test_over_ten_test_images(two, times):
    now, before = wrong(two, 10, times=times)
    assert now <= 0.08 * times < before


def test_over_trainings_whose_spreads_differ():
    now, before = wrong(effects.arms_of_accuracy, 5000, 2, effects.SPREADS["unequal"], times=300)
    assert now <= 0.07 * 300 and before > now


def test_over_trainings_with_different_splits():
    now = wrong(effects.arms_over_splits, 300, 3, effects.SPREADS["equal"], times=300)
    assert 0 < now <= 0.08 * 300


@pytest.mark.parametrize(("groups", "each", "correlation"), effects.GROUPS)
def test_over_images_in_groups(groups, each, correlation):
    now, before = wrong(effects.two_in_groups, groups, each, correlation, times=400)
    assert now <= 0.09 * 400 and (before > 2 * now or each == 1)
    rng, names, covered, moved = np.random.default_rng(1), np.repeat(np.arange(groups), each), 0, 0
    for right in effects.grouped_answers(groups, each, correlation, 400, rng):
        low, high = accuracy_interval(right, names)
        share = share_of_way(right.tolist(), [0.6] * len(right), 1.0, names)
        covered, moved = covered + (low <= 0.6 <= high), moved + (share.low > 0 or share.high < 0)
    assert covered >= 0.91 * 400 and moved <= 0.09 * 400
