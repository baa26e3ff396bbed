"""Shares of the way from a baseline to perfect, and the claims about them."""

import math
import random
from dataclasses import replace

import pytest
import torch

from patchloom.questions.question import Measure
from patchloom.results.claims import Difference
from patchloom.results.intervals import Z, mean_interval
from patchloom.results.result import SHARE, Result
from patchloom.results.shares import CLEAR, SMALL, Level, fell, level_of, share_of_way, share_over

UNKNOWN = Difference("", 0.0, -1.0, 1.0, 0)


def between(value, control, n):
    """Return the share between two accuracies of unknown images."""
    return share_over(*(Result.of_share("", "", {}, one, n) for one in (value, control)), UNKNOWN)


@pytest.mark.parametrize(
    ("share", "low", "high", "n", "level"),
    [
        (0.31, 0.30, 0.32, 250, Level.CLEAR),
        (0.11, 0.10, 0.12, 250, Level.CLEAR),
        (0.11, 0.09, 0.13, 250, Level.WEAK),  # it may well be below 10 %
        (0.02, 0.015, 0.025, 250, Level.WEAK),
        (0.06, 0.01, 0.09, 250, Level.WEAK),
        (0.0008, 0.0007, 0.0009, 10**6, Level.HARDLY),  # 1.294 against 1.295, whatever the number of images
        (0.013, 0.012, 0.014, 250, Level.HARDLY),
        (0.30, 0.01, 0.59, 12, Level.UNSURE),
        (0.0008, -0.002, 0.003, 250, Level.NONE),
        (0.05, -0.01, 0.09, 30, Level.NONE),  # nothing is shown, and a clear share is ruled out
        (0.05, -0.10, 0.20, 12, Level.UNKNOWN),
        (-0.05, -0.06, -0.04, 250, Level.WORSE),
        (0.9, 0.8, 1.0, 9, Level.UNKNOWN),
        (-0.9, -1.0, -0.8, 9, Level.UNKNOWN),
        (-math.inf, -math.inf, -math.inf, 250, Level.WORSE),  # a perfect baseline is missed
        (math.nan, math.nan, math.nan, 250, Level.UNKNOWN),
    ],
)
def test_levels(share, low, high, n, level):
    """The documentation has the thresholds 2 % and 10 %."""
    assert (SMALL, CLEAR) == (0.02, 0.10)
    assert level_of(Result(SHARE, share, low, high, n)) is level
    assert level.better == (level in (Level.UNSURE, Level.HARDLY, Level.WEAK, Level.CLEAR))


def test_the_share_of_the_way_and_its_interval_are_those_of_a_ratio():
    """Over 2,000 draws of 40 images, the interval covers the true share in about 95 of 100."""
    draw, covered, shares = random.Random(1), 0, []
    for _ in range(2000):
        hard = [draw.uniform(0.5, 1.5) for _ in range(40)]  # images differ, for baseline and network alike
        share = share_of_way([0.8 * one + draw.gauss(0, 0.1) for one in hard], hard, 0.0)
        shares.append(share.value)
        covered += share.low <= 0.2 <= share.high
    assert sum(shares) / len(shares) == pytest.approx(0.2, abs=0.002)
    assert 0.935 < covered / 2000 < 0.965


def test_few_images_have_a_wide_interval_or_none():
    values, baseline = [0.4, 0.6] * 30, [0.1] * 60
    found = {n: share_of_way(values[:n], baseline[:n], 1.0) for n in (2, 9, 10, 60)}
    assert list(map(level_of, found.values())) == [Level.UNKNOWN, Level.UNKNOWN, Level.CLEAR, Level.CLEAR]
    reach = {n: share.high - share.value for n, share in found.items()}
    assert reach[2] == reach[9] == math.inf
    # Student's 2.262 and 2.001 for 9 and 59 degrees of freedom
    for n, quantile in ((10, 2.2622), (60, 2.0010)):
        deviation = 0.1 / 0.9 * math.sqrt(n / (n - 1))
        assert reach[n] == pytest.approx(quantile * deviation / math.sqrt(n), rel=1e-4)


def test_accuracies_without_spread_have_wilsons_interval():
    """100 of 100 images right is no proof that all images are: Wilson's interval begins at 96.3 %."""
    low = 100 / (100 + Z * Z)
    right, wrong = (share_of_way([value] * 100, [0.25] * 100, 1.0) for value in (1.0, 0.0))
    assert (right.value, right.low, right.high) == pytest.approx((1.0, (low - 0.25) / 0.75, 1.0))
    assert (wrong.value, wrong.low, wrong.high) == pytest.approx((-1 / 3, -1 / 3, (1 - low - 0.25) / 0.75))
    assert level_of(wrong) is Level.WORSE
    # an error of 0 has no such bound, and values between 0 and 1 keep Student's interval
    assert share_of_way([0.0] * 100, [0.5] * 100, 0.0).low == 1.0
    assert mean_interval([0.5] * 100, accuracy=True) == (0.5, 0.5)


def test_a_baseline_that_is_perfect_can_be_met_or_missed():
    assert level_of(share_of_way([0.0] * 19, [0.0] * 19, 0.0)) is Level.NONE
    assert level_of(share_of_way([0.1] * 19, [0.0] * 19, 0.0)) is Level.WORSE
    assert level_of(between(1.0, 1.0, 19)) is Level.NONE and level_of(between(0.5, 1.0, 19)) is Level.WORSE


def test_newcombes_interval_of_his_own_example():
    """Newcombe 1998, table II, (a): 56/70 against 48/80 by method 10 is 0.0524 to 0.3339."""
    share = share_over(Result.of_share("", "", {}, 56 / 70, 70), Result.of_share("", "", {}, 48 / 80, 80), UNKNOWN)
    assert (0.4 * share.low, 0.4 * share.high) == (pytest.approx(0.0524, abs=1e-4), pytest.approx(0.3339, abs=1e-4))


def test_a_share_is_written_with_its_interval():
    texts = {
        (0.462, 0.44, 0.48, 250): "46 % [44, 48]",
        (0.0131, 0.0121, 0.0142, 250): "1.3 % [1.2, 1.4]",
        (0.00077, 0.00073, 0.00081, 10**6): "0.08 % [0.07, 0.08]",
        (-0.001, -0.04, 0.04, 90): "0 % [-4, 4]",
        (0.5, 0.4875, 0.5125, 90): "50 % [49, 51]",
        (0.9, -math.inf, math.inf, 3): "90 %",
    }
    base = Result.exact("", "", "", {}, 0.0)
    assert {ends: share_over(base, base, Difference("", *ends)).text() for ends in texts} == texts


def test_a_measure_of_a_task_is_over_its_groups():
    values, bases = torch.linspace(0.4, 0.6, 40), torch.linspace(0.5, 0.7, 40)
    plain = Measure("error", values, {"flat": bases}, "flat", False)
    grouped = replace(plain, groups=torch.arange(40) // 10)
    assert grouped.value == plain.value
    assert grouped.result.to_beat.share.value == plain.result.to_beat.share.value
    for one in (lambda measure: measure.result, lambda measure: measure.result.to_beat.share):
        assert one(grouped).high - one(grouped).low > 2 * (one(plain).high - one(plain).low)


def test_a_difference_is_a_share_of_the_way_from_the_control():
    half, better = Result.exact("", "", "", {}, 0.5), Difference("constant", 0.2, 0.1, 0.3, 50)
    assert share_over(half, half, better).text() == "40 % [20, 60]"


def test_a_measure_falls_by_its_larger_half():
    def share(low, high):
        return Result(SHARE, -0.2, low, high, 50)

    assert fell(share(-0.3, -0.1), 0.1) and not fell(share(-0.3, -0.1), 0.21)
    assert not fell(share(-0.35, -0.05), 0.1), "the interval is √2 times as wide"
