"""Claims about differences depend on their size and interval."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from patchloom.results.claims import Claim, Difference, constant_remark, difference, difference_over_splits, raw_remark
from patchloom.results.intervals import Z, student


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
    far = Difference("raw pixels", -0.10, -0.2, -0.01, 10)
    assert "10.0 points better" in raw_remark(replace(far, value=-0.1001))
    for change in ({"value": -0.09}, {"high": 0.0}, {"n": 9}, {"control": "untrained"}):
        assert raw_remark(replace(far, **change)) == ""


def test_a_sentence_says_over_how_many_trainings():
    none, better = Difference("untrained", 0.0, -0.1, 0.1, 50), Difference("untrained", 0.2, 0.1, 0.3, 50)
    for found, words in (
        (none, "is indistinguishable from the untrained one ("),
        (replace(none, trained=True), "in this one training"),
        (replace(none, trainings=3), "over 3 seeds"),
        (replace(better, trained=True, trainings=3), "20.0 points better than the untrained one over 3 trainings of"),
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
