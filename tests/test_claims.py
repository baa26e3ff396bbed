"""Claims depend on both the size of an effect and its interval."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from patchloom.questions.question import Measure
from patchloom.results.claims import (
    Claim,
    Difference,
    Effect,
    MeasureResult,
    constant_remark,
    difference,
    difference_over_splits,
    effect_between,
    effect_of,
    raw_remark,
    result_or_none,
    telling_remark,
)
from patchloom.results.intervals import Z, accuracy_interval, is_wide, mean_interval, student, wilson
from patchloom.results.result import count_of, number_of, text_of
from patchloom.results.shares import CLEAR, SMALL, Level


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
        (0.9, 0.8, 1.0, 9, Level.UNKNOWN),
        (-0.9, -1.0, -0.8, 9, Level.UNKNOWN),
        (-math.inf, -math.inf, -math.inf, 250, Level.WORSE),  # a perfect baseline is missed
        (math.nan, math.nan, math.nan, 250, Level.UNKNOWN),
    ],
)
def test_levels(share, low, high, n, level):
    """The documentation has the thresholds 2 % and 10 %."""
    assert (SMALL, CLEAR) == (0.02, 0.10)
    assert Effect(share, low, high, n).level is level
    assert level.better == (level in (Level.UNSURE, Level.HARDLY, Level.WEAK, Level.CLEAR))


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
    assert [effect.level for effect in effects.values()] == [Level.UNKNOWN, Level.UNKNOWN, Level.CLEAR, Level.CLEAR]
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


def test_an_effect_is_written_with_its_interval():
    texts = {
        Effect(0.462, 0.44, 0.48, 250): "46 % [44, 48]",
        Effect(0.0131, 0.0121, 0.0142, 250): "1.3 % [1.2, 1.4]",
        Effect(0.00077, 0.00073, 0.00081, 10**6): "0.08 % [0.07, 0.08]",
        Effect(-0.001, -0.04, 0.04, 90): "0 % [-4, 4]",
        Effect(0.5, 0.4875, 0.5125, 90): "50 % [49, 51]",
        Effect(0.9, -math.inf, math.inf, 3): "90 %",
    }
    assert {effect: effect.text() for effect in texts} == texts


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


def test_a_difference_of_one_training_has_the_paired_interval_of_scipy():
    draw = np.random.default_rng(0)
    one = draw.random(40)
    other = one - 0.1 + 0.1 * draw.normal(size=40)
    found = difference(one, other, ([0.7], [0.4]), trained=False, control="untrained", noun="recordings")
    reach = stats.ttest_rel(one, other).confidence_interval()
    assert found.value == pytest.approx(0.3), "of the results, which are no means"
    assert found.over_images == pytest.approx((reach.high - reach.low) / 2)
    assert (found.low, found.high) == pytest.approx((0.3 - found.over_images, 0.3 + found.over_images))
    assert (found.control, found.n, found.noun, found.trainings, found.over_seeds) == (
        "untrained",
        40,
        "recordings",
        1,
        0,
    )


def test_a_difference_of_accuracies_adds_half_a_case_to_each_outcome():
    """Agresti and Min 2005: of 50 images, 12 are right only with one side, and 4 only with the other."""
    one, other = np.ones(50), np.ones(50)
    other[:12], one[12:16] = 0, 0
    found = difference(one, other, trained=False)
    right, wrong, n = 12.5, 4.5, 52
    middle, reach = (right - wrong) / n, Z * math.sqrt((right + wrong) - (right - wrong) ** 2 / n) / n
    assert found.value == pytest.approx(8 / 50)
    assert (found.low, found.high) == pytest.approx((middle - reach, middle + reach))
    with pytest.raises(ValueError, match="50 and 49"):
        difference(one, other[1:])


def test_a_difference_over_seeds_has_welchs_interval_of_scipy():
    draw = np.random.default_rng(1)
    scores = (draw.normal(0.6, 0.02, 4), draw.normal(0.5, 0.05, 3))
    one, other = (np.repeat(values[:, None], 30, 1) for values in scores)  # nothing differs between images
    found = difference(one, other, scores)
    welch = stats.ttest_ind(*scores, equal_var=False)
    reach = welch.confidence_interval()
    assert found.freedom == pytest.approx(welch.df) and found.trainings == 4 and found.over_images == 0
    assert (found.low, found.high) == pytest.approx((reach.low, reach.high))


def test_the_part_over_images_leaves_out_what_seeds_and_images_share():
    draw = np.random.default_rng(2)
    hard = draw.random(25)  # images differ, so that something is left
    one, other = 0.6 * hard + 0.2 * draw.random((3, 25)), 0.2 * draw.random((2, 25))
    found = difference(one, other, (one.mean(1), other.mean(1)))
    variance = (one.mean(0) - other.mean(0)).var(ddof=1) / 25
    for side in (one, other):
        seeds, n = side.shape
        rest = sum(
            (side[s, i] - side[:, i].mean() - side[s].mean() + side.mean()) ** 2 for s in range(seeds) for i in range(n)
        )
        variance -= rest / ((seeds - 1) * (n - 1) * seeds * n)
    assert found.over_images == pytest.approx(student(24) * math.sqrt(max(0, variance)))
    assert found.high - found.low == pytest.approx(2 * math.hypot(found.over_images, found.over_seeds))


def test_a_difference_over_groups_is_one_over_their_sums():
    draw = np.random.default_rng(3)
    group_of, one = np.arange(60) // 6, np.repeat(draw.integers(0, 2, 10), 6)  # 10 groups of 6 equal images
    found = difference(one, np.zeros(60), trained=False, groups=group_of)
    sums = np.array([(one[group_of == g] - one.mean()).sum() for g in range(10)])
    assert found.over_images == pytest.approx(student(9) * math.sqrt((sums**2).sum() * 10 / 9) / 60)
    one = np.arange(60) % 2  # the sums are equal, so the images decide
    found = difference(one, np.zeros(60), trained=False, groups=np.arange(60) // 2)
    variance = ((30 + 1) / 62 - (30 / 62) ** 2) / 62
    assert found.over_images == pytest.approx(student(29) * math.sqrt(variance))


def test_a_difference_over_splits_is_widened_by_their_overlap():
    one, other = np.array([0.7, 0.72, 0.69]), np.array([0.6, 0.65, 0.62])
    found = difference_over_splits(one, other, 80, control="untrained")
    reach = student(2) * math.sqrt((one - other).var(ddof=1) * (1 / 3 + 1 / 4))
    assert (found.low, found.high) == pytest.approx(((one - other).mean() - reach, (one - other).mean() + reach))
    assert (found.n, found.trainings, found.trained, found.noun) == (80, 3, True, "images")
    found = difference_over_splits([0.9, 0.2], [0.0, 0.1], 80)
    assert (found.low, found.high) == (-1, 1)


@pytest.mark.parametrize(
    ("value", "low", "high", "n", "trainings", "trained", "claim", "exceeds", "ahead"),
    [
        (0.1, 0.05, 0.15, 0, 1, False, Claim.APART, True, False),
        (0.1, 0.05, 0.15, 9, 1, False, Claim.FEW, True, False),
        (0.1, 0.05, 0.15, 10, 1, False, Claim.BETTER, True, True),
        (0.1, 0.0, 0.2, 50, 1, False, Claim.NONE, False, False),
        (-0.1, -0.2, 0.0, 50, 1, False, Claim.NONE, False, False),
        (0.1, -0.1, 0.3, 10, 1, False, Claim.NONE, False, False),
        (-0.1, -0.2, -0.01, 50, 1, False, Claim.WORSE, False, False),
        (0.1, 0.05, 0.15, 50, 1, True, Claim.ONCE, True, True),
        (-0.1, -0.15, -0.05, 50, 1, True, Claim.ONCE, False, False),
        (0.1, 0.05, 0.15, 50, 2, True, Claim.BETTER, True, True),
    ],
)
def test_the_claim_of_a_difference(value, low, high, n, trainings, trained, claim, exceeds, ahead):
    found = Difference("untrained", value, low, high, n, trainings, trained)
    assert (found.claim, found.exceeds, found.ahead) == (claim, exceeds, ahead)
    assert Difference.of(found.plain()) == found
    assert found.text() == f"{100 * value:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"


def test_remarks_on_controls_need_a_clear_difference():
    far = Difference("raw pixels", -0.10, -0.2, -0.01, 50)
    assert "10.0 points better" in raw_remark(far.__class__("raw pixels", -0.1001, -0.2, -0.01, 50))
    for other in (
        replace(far, value=-0.09),
        replace(far, high=0.0),
        replace(far, n=9),
        replace(far, control="untrained"),
    ):
        assert raw_remark(other) == ""
    better = Difference("constant", 0.2, 0.1, 0.3, 50)
    assert "20.0 points better" in telling_remark("a", "balanced accuracy", "accuracy", better)
    assert telling_remark("a", "balanced accuracy", "accuracy", replace(better, low=0.0)) == ""
    assert better.effect(0.5) == Effect(0.4, 0.2, 0.6, 50) and better.effect(1.0) is None


def test_an_interval_is_wide_and_a_measure_falls_by_its_larger_half():
    assert is_wide(0.5, 0.42, 0.52) and is_wide(0.5, 0.48, 0.58)
    assert not is_wide(0.5, 0.44, 0.56) and not is_wide(0.5, 0.5, 0.5)
    assert Effect(-0.2, -0.3, -0.1, 50).fell(0.1) and not Effect(-0.2, -0.3, -0.1, 50).fell(0.21)
    assert not Effect(-0.2, -0.35, -0.05, 50).fell(0.1), "the interval is √2 times as wide"


def test_a_sentence_says_over_how_many_trainings():
    none, better = Difference("untrained", 0.0, -0.1, 0.1, 50), Difference("untrained", 0.2, 0.1, 0.3, 50)
    for found, words in (
        (none, "is indistinguishable from the untrained one ("),
        (replace(none, trained=True), "in this one training"),
        (replace(none, trainings=3), "over 3 seeds"),
        (
            replace(better, trained=True, trainings=3),
            "20.0 points better than the untrained one over 3 trainings of each",
        ),
        (replace(better, trained=True), "20.0 points ahead of the untrained one in this one training"),
        (replace(better, value=-0.2, low=-0.3, high=-0.1), "20.0 points worse than"),
        (replace(better, control="start"), "Adaptation helped"),
        (replace(better, control="start", value=-0.2, low=-0.3, high=-0.1), "Adaptation harmed"),
        (replace(better, n=1), "1 test image is too few"),
        (replace(better, n=0), "different images"),
    ):
        assert words in found.sentence()
    assert "a is no better" in constant_remark(["a"], "cat", "50 %")
    assert "a and b are no better" in constant_remark(["a", "b"], "cat", "50 %")


def test_the_interval_of_a_mean_is_that_of_scipy():
    values = [0.1, 0.5, 0.4, 0.9]
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert mean_interval(values) == pytest.approx(expected)
    assert mean_interval([1.0], accuracy=True) == (-math.inf, math.inf)
    assert mean_interval([1.0, 1.0], accuracy=True) == wilson(1, 2) != mean_interval([1.0, 1.0]) == (1, 1)


def test_a_result_is_written_in_its_unit_and_read_back():
    effects = {"chance": Effect(0.4, 0.3, 0.5, 50)}
    found = MeasureResult("accuracy", 0.46, 0.4, 0.5, {"chance": 0.1}, effects, "chance", ("chance",), True)
    assert (found.unit, found.show(), found.show(0.1), found.n) == ("%", "46.0%", "10.0%", 50)
    assert found.with_baseline("chance") == "accuracy 46.0%, chance 10.0%"
    error = replace(found, form=".3f", value=math.inf)
    assert (error.unit, error.show(0.5)) == ("", "0.500") and math.isnan(MeasureResult.of(error.plain()).value)
    assert MeasureResult.of(found.plain()) == found and result_or_none(found.plain() | {"form": "999999999f"}) is None
    assert (number_of(None, 1.0), number_of(2, 0.0), count_of(0), text_of("a" * 200)) == (1.0, 2.0, 0, "a" * 200)
    for read, wrong in ((count_of, -1), (count_of, 1.5), (text_of, "a" * 201), (text_of, "a\n"), (text_of, 1)):
        with pytest.raises(ValueError):
            read(wrong)
    for wrong in ("2", True, 10**400):
        with pytest.raises(ValueError, match="not a number"):
            number_of(wrong, 0.0)
