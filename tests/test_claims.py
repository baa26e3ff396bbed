"""Claims depend on both the size of an effect and its interval."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from patchloom.claims import (
    CLEAR,
    MIN_VERDICT_IMAGES,
    SMALL,
    Claim,
    Effect,
    Level,
    Z,
    accuracy_interval,
    difference,
    effect_between,
    effect_of,
    mean_interval,
    student,
    wilson,
)
from patchloom.questions.question import Measure


@pytest.mark.parametrize(
    ("share", "low", "high", "n", "level"),
    [
        (0.31, 0.30, 0.32, 250, Level.CLEAR),
        (0.11, 0.10, 0.12, 250, Level.CLEAR),
        (0.11, 0.09, 0.13, 250, Level.WEAK),  # it may well be below 10 %
        (0.06, 0.05, 0.07, 250, Level.WEAK),
        (0.06, 0.01, 0.09, 250, Level.WEAK),
        (0.0008, 0.0007, 0.0009, 10**6, Level.HARDLY),  # 1.294 against 1.295, whatever the number of images
        (0.013, 0.012, 0.014, 250, Level.HARDLY),
        (0.30, 0.01, 0.59, 12, Level.UNSURE),
        (0.64, 0.08, 0.99, 12, Level.UNSURE),
        (0.0008, -0.002, 0.003, 250, Level.NONE),
        (0.05, -0.01, 0.09, 30, Level.NONE),  # nothing is shown, and a clear effect is ruled out
        (0.05, -0.10, 0.20, 12, Level.UNKNOWN),
        (-0.05, -0.30, 0.20, 12, Level.UNKNOWN),
        (-0.05, -0.06, -0.04, 250, Level.WORSE),
        (-8.0, -9.0, -7.0, 250, Level.WORSE),
        (0.9, 0.8, 1.0, MIN_VERDICT_IMAGES - 1, Level.UNKNOWN),
        (-0.9, -1.0, -0.8, MIN_VERDICT_IMAGES - 1, Level.UNKNOWN),
        (-math.inf, -math.inf, -math.inf, 250, Level.WORSE),  # a perfect baseline is missed
        (math.nan, math.nan, math.nan, 250, Level.UNKNOWN),
    ],
)
def test_levels(share, low, high, n, level):
    assert Effect(share, low, high, n).level is level


def test_only_what_beats_the_baseline_is_better():
    assert [level for level in Level if level.better] == [Level.UNSURE, Level.HARDLY, Level.WEAK, Level.CLEAR]


# The held-out measures in benchmarks/README.md: value, baseline, perfect.
CLEARLY = {
    "droppos, shapes, seed 0": (0.507, 0.083, 1),
    "droppos, shapes, seed 2": (0.492, 0.083, 1),
    "mae, shapes": (0.230, 0.342, 0),
    "droppos, CIFAR-10, 36 minutes": (0.154, 0.017, 1),
    "mae, CIFAR-10, 30 minutes": (0.499, 0.727, 0),
}
WEAKLY = {
    "mae, CIFAR-10, 4 minutes": (0.660, 0.722, 0),
    "simmim, CIFAR-10, 4 minutes": (0.530, 0.568, 0),
    "mp3, CIFAR-10, 4 minutes": (0.042, 0.016, 1),
    "restore, CIFAR-10, 4 minutes": (1.189, 1.263, 0),
    "droppos, CamVid, 60 epochs": (0.038, 0.007, 1),
}
HARDLY = {"droppos, CIFAR-10, 4 minutes": (0.030, 0.017, 1), "issue 15": (1.294, 1.295, 0)}


@pytest.mark.parametrize(
    ("name", "level"),
    [(name, level) for found, level in ((CLEARLY, "CLEAR"), (WEAKLY, "WEAK"), (HARDLY, "HARDLY")) for name in found],
)
def test_the_thresholds_on_runs_that_were_made(name, level):
    """With enough images, only the size of the effect decides."""
    value, baseline, perfect = (CLEARLY | WEAKLY | HARDLY)[name]
    draw = random.Random(0)
    noise = [draw.gauss(0, 0.01 * baseline) for _ in range(5000)]
    effect = effect_of([value + one for one in noise], [baseline + one for one in noise], perfect)
    assert effect.level is Level[level] and effect.high - effect.low < 0.01
    assert effect.share == pytest.approx((value - baseline) / (perfect - baseline), rel=0.02)


def test_the_share_of_the_way_and_its_interval_are_those_of_a_ratio():
    """Over 2,000 draws of 40 images, the interval covers the true share in about 95 of 100."""
    draw, covered, shares = random.Random(1), 0, []
    for _ in range(2000):
        hard = [draw.uniform(0.5, 1.5) for _ in range(40)]  # images differ, for baseline and network alike
        effect = effect_of([0.8 * one + draw.gauss(0, 0.1) for one in hard], hard, 0.0)
        shares.append(effect.share)
        covered += effect.low <= 0.2 <= effect.high
    assert sum(shares) / len(shares) == pytest.approx(0.2, abs=0.002)
    assert 0.935 < covered / 2000 < 0.965


def test_few_images_have_a_wide_interval_or_none():
    values, baseline = [0.4, 0.6] * 30, [0.1] * 60
    effects = {n: effect_of(values[:n], baseline[:n], 1.0) for n in (2, 9, 10, 60)}
    assert {n: effect.level for n, effect in effects.items()} == {
        2: Level.UNKNOWN, 9: Level.UNKNOWN, 10: Level.CLEAR, 60: Level.CLEAR,
    }  # fmt: skip
    reach = {n: effect.high - effect.share for n, effect in effects.items()}
    assert reach[2] == reach[9] == math.inf
    # Student's 2.262 and 2.001 for 9 and 59 degrees of freedom
    for n, quantile in ((10, 2.2622), (60, 2.0010)):
        deviation = 0.1 / 0.9 * math.sqrt(n / (n - 1))
        assert reach[n] == pytest.approx(quantile * deviation / math.sqrt(n), rel=1e-4)


def test_accuracies_without_spread_have_wilsons_interval():
    """100 of 100 images right is no proof that all images are: Wilson's interval begins at 96.3 %."""
    low = 100 / (100 + Z * Z)
    assert mean_interval([1.0] * 100, accuracy=True) == pytest.approx((low, 1.0))
    assert mean_interval([0.0] * 100, accuracy=True) == pytest.approx((0.0, 1 - low))
    right, wrong = (effect_of([value] * 100, [0.25] * 100, 1.0) for value in (1.0, 0.0))
    assert tuple(right[:3]) == pytest.approx((1.0, (low - 0.25) / 0.75, 1.0))
    assert tuple(wrong[:3]) == pytest.approx((-1 / 3, -1 / 3, (1 - low - 0.25) / 0.75))
    assert wrong.level is Level.WORSE
    # an error of 0 has no such bound, and values between 0 and 1 keep Student's interval
    assert effect_of([0.0] * 100, [0.5] * 100, 0.0).low == 1.0
    assert mean_interval([0.5] * 100, accuracy=True) == (0.5, 0.5)


def test_a_baseline_that_is_perfect_can_be_met_or_missed():
    assert effect_of([0.0] * 19, [0.0] * 19, 0.0).level is Level.NONE
    assert effect_of([0.1] * 19, [0.0] * 19, 0.0).level is Level.WORSE
    assert effect_between((1.0, 0.7, 1.0), (1.0, 0.7, 1.0), 19).level is Level.NONE
    assert effect_between((0.5, 0.2, 0.8), (1.0, 0.7, 1.0), 19).level is Level.WORSE


@pytest.mark.parametrize(
    ("value", "baseline", "n", "level"),
    [
        (0.299, 0.175, 2000, Level.CLEAR),  # shapes, seed 0, beside raw pixels
        (0.420, 0.371, 10_000, Level.WEAK),  # CIFAR-10, 36 minutes of droppos
        (0.345, 0.367, 10_000, Level.WORSE),  # CIFAR-10, 4 minutes of mae
        (0.375, 0.371, 10_000, Level.NONE),
        (0.375, 0.371, 10**6, Level.HARDLY),
        (0.583, 0.500, 12, Level.UNKNOWN),
        (0.9, 0.3, 12, Level.CLEAR),
        (0.75, 0.30, 12, Level.UNSURE),
    ],
)
def test_effect_between_accuracies(value, baseline, n, level):
    effect = effect_between((value, *wilson(value, n)), (baseline, *wilson(baseline, n)), n)
    assert effect.level is level, effect
    assert effect.share == pytest.approx((value - baseline) / (1 - baseline))


def test_newcombes_interval_of_his_own_example():
    """Newcombe 1998, table II, (a): 56/70 against 48/80 by method 10 is 0.0524 to 0.3339."""
    (one, n), (other, m) = (56 / 70, 70), (48 / 80, 80)
    effect = effect_between((one, *wilson(one, n)), (other, *wilson(other, m)), n, perfect=1 + other)
    assert (effect.low, effect.high) == (pytest.approx(0.0524, abs=1e-4), pytest.approx(0.3339, abs=1e-4))


@pytest.mark.parametrize(
    ("effect", "text"),
    [
        (Effect(0.462, 0.44, 0.48, 250), "46 % [44, 48]"),
        (Effect(0.0131, 0.0121, 0.0142, 250), "1.3 % [1.2, 1.4]"),
        (Effect(0.00077, 0.00073, 0.00081, 10**6), "0.08 % [0.07, 0.08]"),
        (Effect(-0.001, -0.04, 0.04, 90), "0 % [-4, 4]"),
        (Effect(0.9, -math.inf, math.inf, 3), "90 %"),
    ],
)
def test_an_effect_is_written_with_its_interval(effect, text):
    assert effect.text() == text


def test_the_documentation_has_the_thresholds():
    assert (SMALL, CLEAR) == (0.02, 0.10)


def test_students_quantile_is_that_of_the_closed_forms():
    """Exact for 1, 2 and 4 degrees of freedom, and the normal quantile in the limit."""
    p = 0.975
    a = 4 * p * (1 - p)
    four = 2 * math.sqrt(math.cos(math.acos(math.sqrt(a)) / 3) / math.sqrt(a) - 1)
    exact = {1: math.tan(math.pi * (p - 0.5)), 2: (2 * p - 1) / math.sqrt(2 * p * (1 - p)), 4: four}
    assert {freedom: student(freedom) for freedom in exact} == pytest.approx(exact, abs=1e-9)
    assert student(1e12) == pytest.approx(1.959963984540054, abs=1e-9)


def test_a_measure_of_a_task_is_over_its_groups():
    values, bases = torch.linspace(0.4, 0.6, 40), torch.linspace(0.5, 0.7, 40)
    plain = Measure("error", values, {"flat": bases}, "flat", False)
    grouped = replace(plain, groups=torch.arange(40) // 10)
    assert grouped.value == plain.value and grouped.effect().share == plain.effect().share
    for one in (lambda measure: measure.effect(), lambda measure: measure.result):
        assert one(grouped).high - one(grouped).low > 2 * (one(plain).high - one(plain).low)


def test_one_group_shows_nothing_about_others():
    right, of = np.ones(20), np.zeros(20)
    assert accuracy_interval(np.arange(20) % 2, of) == (0.0, 1.0)
    assert accuracy_interval(right, of) == wilson(1, 1) and accuracy_interval(right, np.arange(20) // 4) == wilson(1, 5)
    assert difference(right, np.zeros(20), trained=False, groups=of).claim is Claim.NONE
    assert mean_interval(np.arange(20.0), groups=of) == (-math.inf, math.inf)


def test_pseudo_values_that_are_not_numbers_claim_nothing():
    """If all objects are in one test image, there is no score without it."""
    one, two = np.full(12, 0.9), np.full(12, 0.5)
    one[0] = two[0] = math.nan
    found = difference(one, two, ([0.9], [0.5]), trained=False)
    assert (found.low, found.high) == (-1, 1) and found.claim is Claim.NONE
