"""Regression of a number on frozen features: ridge and nearest neighbours, beside a predictor of the mean."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.data.source import Data, Source, Subset, digest
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import track_progress
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.features import FeatureOptions, ImageFeatures
from patchloom.evaluate.frozen import chosen_poolings, open_frozen
from patchloom.evaluate.logistic import CHOICE_VALIDATION_SHARE, hold_out_for_choice, standardization
from patchloom.evaluate.protocols.knn import TEMPERATURE, nearest_images
from patchloom.evaluate.settings import EvalSettings, place_in_run
from patchloom.look.charts import draw_regression
from patchloom.options.protocols import Regress
from patchloom.results.claims import MEAN
from patchloom.results.evaluation import Drawing, Evaluation, as_control
from patchloom.results.regression import MAE, R2, Predictions, decimals_of, regression_results
from patchloom.results.result import Result

_RIDGE, _KNN = "ridge", "knn"


def regress(run: str | Path, data: DataLike, settings: EvalSettings, options: Regress) -> Evaluation:
    """Predict the numbers in a column of the data from frozen features, by ridge regression and nearest neighbours.

    Args:
        run, settings: as in `patchloom.evaluate.protocols.evaluate`.
        data: images with a table (CSV, TSV) or a Hugging Face data set that has a column of numbers; labels are not
            needed.
        options: options of the protocol.

    Raises:
        PatchloomError: unknown encoder or data, a column that is missing, constant or not of finite numbers, too few
            images, or a pooling that the encoder lacks.
    """
    column, pooling, k = options.column, options.pooling, options.k
    extraction, left_out = FeatureOptions(options.test_crop, options.last_norm), list[str]()

    def prepare(opened: Data) -> Data:
        numbered, said = with_targets(opened, column)
        left_out.extend([said] * bool(said))
        return numbered

    study = open_frozen("regress", run, data, settings, extraction, pooling=pooling, prepare=prepare)
    parts = study.parts
    assert column is not None  # by with_targets
    if k > len(parts.train):
        n = len(parts.train)
        raise PatchloomError(f"--k {k} is more than the {n} training {parts.train.noun}: choose 1 to {n}")

    # ---- features and predictions of each encoder
    rows, quoted, drawn = list[Result](), list[Result](), dict[str, np.ndarray]()
    for one in study.each():
        train = one.features_of(parts.train)
        targets = targets_of(parts.train, column, train.indices, "training")
        digits = decimals_of(targets.numpy())
        fits = _fit(one.name, train, targets, chosen_poolings(train, pooling), k, settings)
        best = max((fit for fit in fits if fit.about["regressor"] == _RIDGE), key=lambda fit: fit.score)
        # all choices are made: read the test images
        test = one.features_of(parts.test)
        truth = targets_of(parts.test, column, test.indices, "test").numpy()
        groups = None if test.groups is None else test.groups.numpy()
        for fit in fits:
            about = {"column": column, **fit.about, "held_out_score": fit.score, **extraction.plain()}
            predicted = fit.predict(train, targets, test, settings).numpy()
            found = regression_results(one.name, "regress", about, Predictions(truth, predicted, groups), digits)
            rows += found
            if fit is best:
                quoted.append(found[0])
                drawn[one.name] = predicted
    mean = float(targets.mean())
    guess = Predictions(truth, np.full(len(truth), mean), groups)
    guessed = regression_results(MEAN, "regress", {"column": column, "answer": f"{mean:.{digits}f}"}, guess, digits)
    rows += guessed
    quoted.append(guessed[0])

    # ---- the report
    around = study.around(train, test, any(row.pooling == "instance" for row in rows))
    ours, *controls = quoted
    error, of_mean = (_beside(rows, one, MAE) for one in (ours, controls[-1]))
    against = listing([as_control(one) for one in controls], "and")
    origin = f"; test: {parts.origin}" if parts.origin else ""
    n, m, strengths = len(train.indices), len(test.indices), RIDGE_STRENGTHS
    headline = (
        f"Regression of {column} (ridge, {ours.pooling}): {R2} {ours.text()} against {against}; {MAE} {error.text()}, "
        f"{of_mean.number()} by the mean; on {m:,} test {test.noun}. Fitted on: {n:,} training {train.noun}{origin}."
    )
    method = (
        f"Regression: {column} of {m:,} test {test.noun} was predicted from frozen features, by ridge regression on "
        f"standardised features of {n:,} training {train.noun}, and by the mean of the {k} most similar of these "
        f"(cosine similarity, weights exp(similarity / {TEMPERATURE})). The strength of the penalty (of "
        f"{len(strengths)} from {min(strengths):g} to {max(strengths):g}) and the quoted pooling were chosen on a "
        f"stratified {100 * CHOICE_VALIDATION_SHARE:.0f} % of the training {train.noun}; the final fit used all of "
        f"them. {R2} is 1 for perfect predictions and 0 for the mean of the test {test.noun}; the mean predictor "
        f"answers the mean of the training {train.noun}. MAE is in the unit of {column}."
    )
    report = Evaluation.of_test(
        parts.test,
        settings.seed,
        len(truth),
        results=rows,
        method=" ".join([method, around, *left_out]),
        headline=headline,
        quoted=tuple(quoted),
        across="measure",
        beside=(MAE,),
        drawings=_drawings(run, data, column, settings, truth, drawn, quoted, rows),
    )
    return report.with_differences(False)


class _Fit(NamedTuple):
    """A regression on the features of one pooling, with everything chosen.

    Attributes:
        about: its settings.
        score: its `held_out_score`.
    """

    about: Mapping[str, Any]
    score: float

    def predict(self, train: ImageFeatures, targets: Tensor, test: ImageFeatures, settings: EvalSettings) -> Tensor:
        """Return the predictions [m] for the test images, after a fit to all training images."""
        features, queries = (images.pooled(self.about["pooling"]) for images in (train, test))
        if self.about["regressor"] == _RIDGE:
            return fit_ridge(features, targets, [self.about["l2"]]).predict(queries)[:, 0]
        return knn_predictions(features, targets, queries, self.about["k"], device=settings.torch_device)


def _fit(
    name: str, train: ImageFeatures, targets: Tensor, poolings: Sequence[str], k: int, settings: EvalSettings
) -> list[_Fit]:
    """Choose the strength of ridge regression for each pooling, and score it and kNN on held-out training images."""
    rest, held = hold_out_for_choice(train.labels, settings.seed, train.groups)
    found = list[_Fit]()
    for pooling in track_progress(poolings, len(poolings), f"{name}: regress"):
        features, held_out = train.pooled(pooling), {"held_out": len(held)}
        strength, score = choose_ridge(features, targets, rest, held)
        found.append(_Fit({"regressor": _RIDGE, "pooling": pooling, "l2": strength, **held_out}, score))
        near = knn_predictions(
            features[rest], targets[rest], features[held], min(k, len(rest)), device=settings.torch_device
        )
        score = float(held_out_score(near, targets[held], targets[rest]))
        about = {"regressor": _KNN, "pooling": pooling, "k": k, "temperature": TEMPERATURE, **held_out}
        found.append(_Fit(about, score))
    return found


def _beside(rows: Sequence[Result], one: Result, measure: str) -> Result:
    alike = (one.encoder, one.settings, measure)
    return next(row for row in rows if (row.encoder, row.settings, row.measure) == alike)


def _drawings(
    run: str | Path,
    data: DataLike,
    column: str,
    settings: EvalSettings,
    truth: np.ndarray,
    drawn: Mapping[str, np.ndarray],
    quoted: Sequence[Result],
    rows: Sequence[Result],
) -> tuple[Drawing, ...]:
    label = re.sub(r"[^\w.-]+", "-", column)
    place = place_in_run(run, data, label, settings.seed, "pictures", ".png", "regress-")
    if place is None or not Path(run).is_dir():
        return ()
    panels = {one.encoder: f"{R2} {one.number()}, {MAE} {_beside(rows, one, MAE).number()}" for one in quoted}
    content = {"column": column, "truth": truth, "predicted": drawn, "notes": panels, "noun": quoted[0].noun}
    return (Drawing(draw_regression, place, content),)


# Regression on frozen features: ridge and nearest neighbours, and the numbers in a column that they predict.

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
        return torch.cat([self.centre + self.standard(part) @ self.weights for part in features.split(_ROWS)])

    def standard(self, features: Tensor) -> Tensor:
        return (features.double() - self.mean) / self.scale


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
            rows = ridge.standard(part)
            moments += rows.T @ rows / n
            slopes += rows.T @ its / n
        values, axes = torch.linalg.eigh(moments)
        weights = axes @ ((axes.T @ slopes)[:, None] / (values.clamp(min=0)[:, None] + added))
    else:
        rows = ridge.standard(features)
        values, axes = torch.linalg.eigh(rows @ rows.T / n)
        weights = rows.T @ (axes @ ((axes.T @ y / n)[:, None] / (values.clamp(min=0)[:, None] + added)))
    return Ridge(ridge.mean, ridge.scale, weights, ridge.centre)


def held_out_score(predicted: Tensor, targets: Tensor, rest: Tensor) -> Tensor:
    """Return 1 - mean squared error over the variance of the other targets ``rest`` [m], of predictions [n ...]."""
    wrong = (predicted - targets.view(-1, *[1] * (predicted.dim() - 1))).square().mean(0)
    return 1 - wrong / rest.double().var(correction=0)


def choose_ridge(features: Tensor, targets: Tensor, rest: Tensor, held: Tensor) -> tuple[float, float]:
    """Return the strength with the lowest error on held-out training images, and its `held_out_score`.

    Ties go to the strongest.

    Args:
        features: [n d] features of training images only.
        targets: [n].
        rest, held: indices of the images to fit on and to choose by.
    """
    fitted = fit_ridge(features[rest], targets[rest], RIDGE_STRENGTHS)
    scores = held_out_score(fitted.predict(features[held]), targets[held], targets[rest])
    best = int(scores.argmax())
    return RIDGE_STRENGTHS[best], float(scores[best])


# Nearest neighbours.


def knn_predictions(
    gallery: Tensor,
    targets: Tensor,
    queries: Tensor,
    k: int,
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the weighted mean target [m] float64 of the k nearest images by cosine similarity.

    Weights are exp(similarity / `TEMPERATURE`), as the votes of `knn_answers`.

    Args:
        gallery: [n d] features.
        targets: [n] float64.
        queries: [m d] features.
        k: number of neighbours, at most n.
        device: device of the search.
    """
    similarities, nearest = nearest_images(gallery, queries, k, None, torch.device(device))
    weights = (similarities.double() / TEMPERATURE).softmax(1)
    return (weights * targets[nearest]).sum(1)
