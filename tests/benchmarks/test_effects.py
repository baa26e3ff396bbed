"""Equal models are rarely called different by the new rule, and often were by the earlier one."""

import effects
import numpy as np
import pytest


def wrong(two, *given, times: int) -> np.ndarray:
    """Return the shares of false claims by the new and the earlier rule, for comparisons of equal models."""
    rng = np.random.default_rng(0)
    return np.sum([two(*given, rng) for _ in range(times)], 0)


@pytest.mark.parametrize(("two", "times"), [(effects.two_of_segmentation, 300), (effects.two_of_detection, 150)])
def test_over_ten_test_images(two, times):
    now, before = wrong(two, 10, times=times)
    assert now <= 0.08 * times < before


def test_below_ten_test_images_nothing_is_claimed():
    now, before = wrong(effects.two_of_segmentation, 5, times=60)
    assert now == 0 and before > 0.08 * 60
    assert not wrong(effects.two_of_accuracy, 9, times=60).any()


def test_over_trainings_whose_spreads_differ():
    now, before = wrong(effects.arms_of_accuracy, 5000, 2, effects.SPREADS["unequal"], times=300)
    assert now <= 0.07 * 300 and before > now


def test_over_trainings_with_different_splits():
    now = wrong(effects.arms_over_splits, 300, 3, effects.SPREADS["equal"], times=300)
    assert 0 < now <= 0.08 * 300
