"""Measures of predicted numbers: against scikit-learn and scipy, a jackknife, and at the ends of their scales."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import mean_absolute_error, r2_score

from patchloom.results.claims import MEAN, Claim, Difference
from patchloom.results.evaluation import compare_results
from patchloom.results.regression import (
    MAE,
    MEASURES,
    R2,
    SPEARMAN,
    Predictions,
    decimals_of,
    interval,
    pseudo_values,
    regression_results,
)
from patchloom.results.result import Result


def drawn(n: int = 80, rounded: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    targets = 30 + 8 * rng.normal(size=n)
    found = targets + 6 * rng.normal(size=n)
    return (np.round(targets / 5), np.round(found / 5)) if rounded else (targets, found)


@pytest.mark.parametrize("rounded", [False, True])
def test_measures_are_those_of_other_libraries(rounded: bool) -> None:
    targets, found = drawn(rounded=rounded)
    theirs = {
        R2: r2_score(targets, found),
        SPEARMAN: spearmanr(targets, found).statistic,
        MAE: mean_absolute_error(targets, found),
    }
    assert {name: measure(targets, found)[0] for name, measure in MEASURES.items()} == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("name", MEASURES)
def test_terms_are_those_of_a_jackknife(name: str, rounded: bool) -> None:
    targets, found = drawn(rounded=rounded)
    value, terms = MEASURES[name](targets, found)
    n = len(targets)
    without = [MEASURES[name](np.delete(targets, i), np.delete(found, i))[0] for i in range(n)]
    left_out = (n - 1) * (value - np.array(without))
    left_out -= left_out.mean()
    # ranks to first order
    assert terms == pytest.approx(left_out, abs=0.05 if name == SPEARMAN else 1e-9)
    assert pseudo_values(value, terms).mean() == pytest.approx(value)


def test_groups_widen_the_interval_and_have_pseudo_values_of_their_own() -> None:
    rng, names = np.random.default_rng(0), np.repeat(np.arange(20), 10)
    targets = rng.normal(size=200) + rng.normal(size=20)[names]
    found = targets + 2 * rng.normal(size=20)[names] + 0.3 * rng.normal(size=200)
    for name, measure in MEASURES.items():
        value, terms = measure(targets, found)
        (low, high), (least, most) = interval(name, value, terms), interval(name, value, terms, names)
        assert most - least > 1.5 * (high - low) and least < value < most
        values = pseudo_values(value, terms, names)
        assert len(values) == 20 and values.mean() == pytest.approx(value)


def test_the_ends_of_the_scales() -> None:
    targets, found = drawn()
    perfect = regression_results("", "", {}, Predictions(targets, targets), 1)
    assert [(one.value, one.low, one.high) for one in perfect] == [(1, 1, 1)] * 2 + [(0, 0, 0)]
    one_group = regression_results("", "", {}, Predictions(targets, found, np.zeros(80)), 1)
    assert [(one.low, one.high) for one in one_group] == [(-math.inf, 1), (-1, 1), (0, math.inf)]
    assert [one.interval() for one in one_group] == ["", "[-1.00, 1.00]", ""]
    # without one image all targets are equal
    rare = regression_results("", "", {}, Predictions(np.eye(40)[0], np.linspace(0, 1, 40)), 1)
    assert rare[0].low == -math.inf and math.isfinite(rare[1].low)
    rng = np.random.default_rng(0)
    for scale in (0.01, 0.5, 3):
        wild = targets + scale * 8 * rng.standard_cauchy(80)
        for one in regression_results("", "", {}, Predictions(targets, wild), 1):
            assert one.low <= one.value <= one.high and one.high <= (math.inf if one.measure == MAE else 1)


def test_a_constant_has_no_ranks_and_errors_have_three_figures() -> None:
    targets, _ = drawn()
    rows = regression_results(MEAN, "regress", {}, Predictions(targets, np.full(80, targets.mean())), 1)
    assert [one.measure for one in rows] == [R2, MAE] and rows[0].value == pytest.approx(0)
    assert [decimals_of(targets * scale) for scale in (1e-9, 1e-2, 1, 10, 1000)] == [6, 4, 2, 1, 0]


def results(
    targets: np.ndarray, found: np.ndarray, name: str = "ours", groups: np.ndarray | None = None
) -> list[Result]:
    rows = regression_results(name, "regress", {}, Predictions(targets, found, groups), 1)
    return [replace(row, fingerprint="0" * 16) for row in rows]


@pytest.mark.parametrize("groups", [None, np.arange(80) // 4])
def test_the_better_encoder_has_the_higher_r2_and_the_lower_error(groups: np.ndarray | None) -> None:
    targets, found = drawn()
    ours, theirs = results(targets, found, groups=groups), results(targets, found[::-1].copy(), "untrained", groups)
    for one, other in zip(ours, theirs, strict=True):
        better, worse = compare_results([one], [other], False), compare_results([other], [one], False)
        assert (better.claim, worse.claim) == (Claim.BETTER, Claim.WORSE)
        assert better.exceeds and better.ahead and not worse.exceeds and not worse.ahead
        assert better.value == pytest.approx(one.value - other.value) and better.low < better.value < better.high
        assert (better.high < 0) == (one.measure == MAE) and Difference.of(better.plain()) == better
    scores, _, errors = (compare_results([one], [other], False) for one, other in zip(ours, theirs, strict=True))
    assert scores.value > 1  # no percentage
    gain = f"{scores.value:.2f}"
    assert scores.sentence() == f"The encoder is {gain} better than the untrained one {scores.interval()}."
    fall = f"{-errors.value:.1f}"
    said = errors.sentence(error="MAE")
    assert said == f"The encoder's MAE is {fall} lower than that of the untrained one {errors.interval()}."
    assert "error is indistinguishable from that of" in compare_results(ours[2:], ours[2:], False).sentence()


def test_a_difference_over_one_group_is_unknown() -> None:
    targets, found = drawn()
    ours, theirs = (results(targets, each, groups=np.zeros(80))[0] for each in (found, found[::-1].copy()))
    apart = compare_results([ours], [theirs], False)
    assert (apart.low, apart.high, apart.interval(), apart.claim) == (-math.inf, math.inf, "", Claim.NONE)
    assert Difference.of(apart.plain()) == apart and apart.plain()["low"] is None


def test_an_error_over_seeds_and_splits() -> None:
    about = {"control": "untrained", "trained": False, "unit": "", "digits": 1, "higher_is_better": False}
    found = Difference("untrained", -2.0, -3.0, -1.0, 50, 3, True, unit="", higher_is_better=False)
    assert (
        "error is 2.00 lower than that of the untrained one over 3 trainings of each [-3.00, -1.00]" in found.sentence()
    )
    once = replace(found, trainings=1)
    assert once.claim is Claim.ONCE and "error is 2.00 below that of the untrained one" in once.sentence()
    start = replace(found, control="start", value=2.0, low=1.0, high=3.0)
    assert "Adaptation harmed: the encoder's error is 2.00 higher than that of its start" in start.sentence()
    each = [[replace(one, value=one.value + seed, fingerprint=str(seed), **{"seed": seed})
             for one in results(*drawn())[2:]] for seed in range(2)]  # fmt: skip
    ours, theirs = [one for (one,) in each], [replace(one, encoder="untrained", value=one.value + 5) for (one,) in each]
    apart = compare_results(ours, theirs, False)
    assert apart.value == pytest.approx(-5) and apart.claim is Claim.BETTER and about.items() <= vars(apart).items()
