"""Measures of predicted numbers, beside those of a control that predicts the mean: R², Spearman's ρ and MAE.

Each measure comes with a term for each image: by how much it moves the measure, times their number (jackknife, or its
first order for ranks). Terms give intervals over images or groups, and the pseudo-values by which two encoders are
compared image by image. benchmarks/effects.py measures the coverage of the intervals.

Letters: n test images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from patchloom.results.intervals import over_groups
from patchloom.results.result import Outcomes, Result

R2, SPEARMAN, MAE = "R²", "Spearman's ρ", "MAE"
_MOST_DIGITS = 6


@dataclass(frozen=True)
class Predictions:
    """Predicted numbers of test images.

    Attributes:
        targets: [n] float64, true numbers; at least two different ones.
        predicted: [n] float64.
        groups: [n] groups of the images; None: no groups.
    """

    targets: np.ndarray
    predicted: np.ndarray
    groups: np.ndarray | None = None


def r_squared(targets: np.ndarray, predicted: np.ndarray) -> tuple[float, np.ndarray]:
    """Return R², one less the squared errors over those of the mean of the targets, and its terms [n].

    The terms are nan if all targets but one are equal: without that image there is no R².
    """
    n, apart, wrong = len(targets), (targets - targets.mean()) ** 2, (targets - predicted) ** 2
    value, rest = 1 - float(wrong.sum() / apart.sum()), apart.sum() - n / (n - 1) * apart
    if not rest.min() > 1e-9 * apart.sum():
        return value, np.full(n, math.nan)
    terms = (n - 1) * (value - 1 + (wrong.sum() - wrong) / rest)
    return value, terms - terms.mean()


def spearman(targets: np.ndarray, predicted: np.ndarray) -> tuple[float, np.ndarray]:
    """Return Spearman's rank correlation and its terms [n]; nan if all predictions are equal."""
    (own, its_terms), (both, terms), (other, their_terms) = (
        _rank_covariance(*pair) for pair in ((targets, targets), (targets, predicted), (predicted, predicted))
    )
    if not own * other > 0:
        return math.nan, np.full(len(targets), math.nan)
    value = both / math.sqrt(own * other)
    return value, terms / math.sqrt(own * other) - value / 2 * (its_terms / own + their_terms / other)


def _rank_covariance(one: np.ndarray, other: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the covariance of the shares of images below each value, and its terms [n]; equal values share places."""
    a, b = (_below(values, np.ones(len(values))) for values in (one, other))
    a, b = a - a.mean(), b - b.mean()
    # an image also moves the shares of those above it; these sums are 0 over all images
    terms = a * b - _below(one, b) - _below(other, a)
    return float((a * b).mean()), terms - terms.mean()


def _below(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mean over images [n] of the weights of those with lower values, and half of those with equal ones."""
    _, places = np.unique(values, return_inverse=True)
    sums = np.bincount(places, weights)
    return ((np.cumsum(sums) - sums / 2) / len(values))[places]


def mean_absolute_error(targets: np.ndarray, predicted: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean absolute error and its terms [n]."""
    wrong = np.abs(targets - predicted)
    return float(wrong.mean()), wrong - wrong.mean()


MEASURES = {R2: r_squared, SPEARMAN: spearman, MAE: mean_absolute_error}


def interval(measure: str, value: float, terms: np.ndarray, groups: np.ndarray | None = None) -> tuple[float, float]:
    """Return the 95 % interval of a measure over images or groups, from its terms [n].

    It is symmetric on a scale without ends: the logarithm of MAE, Fisher's z of a correlation. Each end of R² is the
    farther one of its own scale and of the logarithm of 1 - R²: either alone covers too little for some errors.
    Quantile and variance are those of `over_groups`.
    """
    n, slope = len(terms), {R2: 1 - value, SPEARMAN: 1 - value**2, MAE: value}[measure]
    if not np.any(terms) or not slope > 0:  # no image differs from another
        return value, value
    quantile, variance = over_groups(terms, float(terms @ terms) * n / (n - 1), groups)
    reach = quantile * math.sqrt(variance) / n
    if not math.isfinite(reach):
        return {R2: (-math.inf, 1.0), SPEARMAN: (-1.0, 1.0), MAE: (0.0, math.inf)}[measure]
    if measure == SPEARMAN:
        return math.tanh(math.atanh(value) - reach / slope), math.tanh(math.atanh(value) + reach / slope)
    up = math.exp(min(reach / slope, 700))
    if measure == MAE:
        return slope / up, slope * up
    return min(1 - slope * up, value - reach), min(1.0, max(1 - slope / up, value + reach))


def pseudo_values(value: float, terms: np.ndarray, groups: np.ndarray | None = None) -> np.ndarray:
    """Return the pseudo-values of images or groups, whose mean is the value."""
    if groups is None:
        return value + terms
    sums = np.bincount(np.unique(groups, return_inverse=True)[1], terms)
    return value + sums * len(sums) / len(terms)


def decimals_of(targets: np.ndarray) -> int:
    """Return the decimals of errors: three figures of the standard deviation of the targets."""
    return min(max(2 - math.floor(math.log10(targets.std())), 0), _MOST_DIGITS)


def regression_results(
    encoder: str, protocol: str, settings: Mapping[str, Any], found: Predictions, digits: int
) -> list[Result]:
    """Return R², Spearman's ρ and MAE of the predictions of one encoder or control.

    Spearman's ρ is left out if all predictions are equal, as the mean's are.

    Args:
        encoder: name of the encoder or control.
        protocol: name of the protocol.
        settings: settings of the protocol.
        found: its predictions.
        digits: decimals of MAE, which is in the unit of the targets (`decimals_of`).
    """
    n, groups, rows = len(found.targets), found.groups, list[Result]()
    for measure, function in MEASURES.items():
        value, terms = function(found.targets, found.predicted)
        if math.isnan(value):
            continue
        rows.append(
            Result(
                measure, value, *interval(measure, value, terms, groups), n, encoder, protocol, settings,
                unit="", digits=digits if measure == MAE else None, higher_is_better=measure != MAE,
                groups=0 if groups is None else len(np.unique(groups)),
                outcomes=Outcomes(pseudo_values(value, terms, groups), pseudo=True),
            )
        )  # fmt: skip
    return rows
