"""Regression on frozen features: ridge and nearest neighbours, and the numbers in a column that they predict.

Test images take no part in any choice: `choose_ridge` and `held_out_score` never receive them.
Letters: n images, d feature width, s strengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from patchloom.data.source import Data, Source, Subset, digest
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.logistic import standardization
from patchloom.evaluate.protocols.knn import TEMPERATURE, nearest_images

RIDGE_STRENGTHS = tuple(10 ** (half / 2) for half in range(8, -13, -1))  # from 1e4 to 1e-6
_FEWEST = 10  # images with a value
_STRATA = 5
_NAMED = 8  # columns in a message
_ABSENT = {"", "nan", "<na>", "na", "n/a", "null", "none"}  # cells without a value
_ROWS = 4096  # features in float64 at once

# Numbers in a column of the data.


def numbers_of(source: Source, column: str) -> np.ndarray:
    """Return the numbers [n] in a column of a source, float64, nan where the cell is empty.

    Raises:
        PatchloomError: no such column, or one of words; the message has the columns of numbers.
    """
    cells = source.column(column)
    if cells is None:
        raise PatchloomError(f"{source.name} has no column {column}: {_choices(source)}")
    values = [_number(cell) for cell in cells]
    wrong = next((i for i, value in enumerate(values) if value is None), None)
    if wrong is not None:
        raise PatchloomError(
            f"--column {column} has {cells[wrong]!r} for {source.describe(wrong)}, which is not a number: "
            f"{_choices(source)}"
        )
    found = np.array(values, np.float64)
    infinite = np.flatnonzero(np.isinf(found))
    if len(infinite):
        raise PatchloomError(
            f"--column {column} has {cells[infinite[0]]!r} for {source.describe(int(infinite[0]))}, which is not "
            "finite: correct it, or leave the cell empty"
        )
    return found


def _number(cell: str) -> float | None:
    """Return the number in a cell, nan if it is empty; None for a word."""
    word = cell.strip()
    if word.lower() in _ABSENT:
        return math.nan
    try:
        return float(word)
    except ValueError:
        return None


def _choices(source: Source) -> str:
    """Return the advice to choose one of the columns of numbers."""
    if not source.column_names():
        return "give a table (CSV, TSV) with a header, or hf:NAME, with a column of numbers"
    found = []
    for name in source.column_names():
        values = {_number(cell) for cell in source.column(name) or ()}
        if not {None, math.inf, -math.inf} & values and len({one for one in values if one == one}) > 1:
            found.append(name)
    if not found:
        return f"none of its columns ({', '.join(source.column_names()[:_NAMED])}) has different numbers"
    more = [f"{len(found) - _NAMED:,} more"] * (len(found) > _NAMED)
    return f"choose {listing([*found[:_NAMED], *more])}"


class WithTargets(Subset):
    """The images of a source that have a number in a column, with labels by which splits are stratified.

    A label is the fifth of the images, by their numbers, to which an image belongs.
    """

    def __init__(self, source: Source, column: str, numbers: np.ndarray) -> None:
        super().__init__(source, np.flatnonzero(~np.isnan(numbers)))
        self.target, self.numbers = column, numbers[self.indices]
        bounds = np.quantile(self.numbers, np.arange(1, _STRATA) / _STRATA)
        self.classes = tuple(f"{column}, fifth {number + 1}" for number in range(_STRATA))
        self.labels = np.searchsorted(bounds, self.numbers, side="right").astype(np.int64)

    def fingerprint(self) -> str:
        return digest([super().fingerprint(), self.target, *map(repr, self.numbers.tolist())])

    def stamp(self) -> str | None:
        # features do not depend on the numbers: those of all images are in the cache of other protocols
        return self.source.stamp() if len(self) == len(self.source) else super().stamp()


def with_targets(opened: Data, column: str | None) -> tuple[Data, str]:
    """Return opened data with the images that have a number in a column, and a sentence on the others.

    Test images without any numbers are dropped, so that some of the others are split off.

    Raises:
        PatchloomError: no column, a wrong one (`numbers_of`), too few images with a number, or equal numbers.
    """
    if column is None:
        raise PatchloomError(f"regress needs --column: {_choices(opened.train)}")
    train, said, noun = numbers_of(opened.train, column), "", opened.train.noun
    test = None if opened.test is None else numbers_of(opened.test, column)
    each = [train] if test is None else [train, test]
    known, lacking = (int(sum(np.sum(np.isnan(one) == absent) for one in each)) for absent in (False, True))
    if lacking:
        said = f"{lacking:,} of {known + lacking:,} {noun} have no value of {column} and are left out."
    there = train[~np.isnan(train)]
    if len(there) < _FEWEST:
        raise PatchloomError(
            f"--column {column} has a value for {len(there)} of {len(train):,} {noun}: a regression needs "
            f"{_FEWEST} or more"
        )
    if np.ptp(there) == 0:
        raise PatchloomError(
            f"--column {column} has the same value, {there[0]:g}, for all {noun}, so there is nothing to predict: "
            f"{_choices(opened.train)}"
        )
    tested = None
    if opened.test is not None and test is not None and not np.isnan(test).all():
        tested = WithTargets(opened.test, column, test)
    return Data(WithTargets(opened.train, column, train), tested, opened.notes), said


def targets_of(source: Source, column: str, indices: Tensor, part: str) -> Tensor:
    """Return the numbers [m] float64 of the images ``indices`` of a source; ``part`` is its name in a message.

    Raises:
        PatchloomError: if they are equal.
    """
    found = torch.from_numpy(numbers_of(source, column))[indices]
    if len(found) < 2 or found.min() == found.max():
        raise PatchloomError(
            f"--column {column} does not differ among the {len(found):,} {part} {source.noun}: give more, or another "
            "--group or --seed"
        )
    return found


# Ridge regression.


@dataclass(frozen=True)
class Ridge:
    """Ridge regressions on standardised features, one per strength.

    Attributes:
        mean, scale: [d] float32, standardisation of the features.
        weights: [d s] float64, for standardised features.
        centre: mean of the targets.
    """

    mean: Tensor
    scale: Tensor
    weights: Tensor
    centre: float

    def predict(self, features: Tensor) -> Tensor:
        """Return predictions [m s] float64 of features [m d]."""
        parts = [self.centre + _standard(part, self) @ self.weights for part in features.split(_ROWS)]
        return torch.cat(parts)


def _standard(features: Tensor, ridge: Ridge) -> Tensor:
    return (features.double() - ridge.mean) / ridge.scale


def fit_ridge(features: Tensor, targets: Tensor, strengths: Sequence[float]) -> Ridge:
    """Fit a ridge regression for each strength: mean squared error + strength · ‖weights‖², with a free intercept.

    scikit-learn's ``alpha`` is n · strength. One eigendecomposition, of the smaller of both Gram matrices, serves all
    strengths; it is computed in float64, on the CPU.

    Args:
        features: [n d] float32.
        targets: [n].
        strengths: [s], positive.
    """
    n, d = features.shape
    centre = targets.double().mean()
    ridge = Ridge(*standardization(features), features.new_zeros(d, 0).double(), float(centre))
    y, added = targets.double() - centre, torch.tensor(strengths, dtype=torch.float64)
    if d <= n:
        moments, slopes = torch.zeros(d, d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
        for part, its in zip(features.split(_ROWS), y.split(_ROWS), strict=True):
            rows = _standard(part, ridge)
            moments += rows.T @ rows / n
            slopes += rows.T @ its / n
        values, axes = torch.linalg.eigh(moments)
        weights = axes @ ((axes.T @ slopes)[:, None] / (values.clamp(min=0)[:, None] + added))
    else:
        rows = _standard(features, ridge)
        values, axes = torch.linalg.eigh(rows @ rows.T / n)
        weights = rows.T @ (axes @ ((axes.T @ y / n)[:, None] / (values.clamp(min=0)[:, None] + added)))
    return Ridge(ridge.mean, ridge.scale, weights, ridge.centre)


def held_out_score(predicted: Tensor, targets: Tensor, rest: Tensor) -> Tensor:
    """Return 1 - mean squared error over the variance of the other targets ``rest`` [m], of predictions [n ...]."""
    wrong = (predicted - targets.view(-1, *[1] * (predicted.dim() - 1))).square().mean(0)
    return 1 - wrong / rest.double().var(correction=0)


def choose_ridge(
    features: Tensor, targets: Tensor, rest: Tensor, held: Tensor, strengths: Sequence[float] = RIDGE_STRENGTHS
) -> tuple[float, float]:
    """Return the strength with the lowest error on held-out training images, and its `held_out_score`.

    Args:
        features: [n d] features of training images only.
        targets: [n].
        rest, held: indices of the images to fit on and to choose by.
        strengths: in descending order; ties go to the strongest.
    """
    fitted = fit_ridge(features[rest], targets[rest], strengths)
    scores = held_out_score(fitted.predict(features[held]), targets[held], targets[rest])
    best = int(scores.argmax())
    return strengths[best], float(scores[best])


# Nearest neighbours.


def knn_predictions(
    gallery: Tensor,
    targets: Tensor,
    queries: Tensor,
    k: int,
    *,
    temperature: float = TEMPERATURE,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the weighted mean target [m] float64 of the k nearest images by cosine similarity.

    Weights are exp(similarity / temperature), as the votes of `knn_answers`.

    Args:
        gallery: [n d] features.
        targets: [n] float64.
        queries: [m d] features.
        k: number of neighbours, at most n.
        temperature: temperature of the weights.
        device: device of the search.
    """
    similarities, nearest = nearest_images(gallery, queries, k, None, torch.device(device))
    weights = (similarities.double() / temperature).softmax(1)
    return (weights * targets[nearest]).sum(1)
