"""Regression of a number on frozen features: ridge and nearest neighbours, beside a predictor of the mean."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from patchloom.data.source import Data, Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import track_progress
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.features import FeatureOptions, ImageFeatures
from patchloom.evaluate.frozen import chosen_poolings, circumstances, extractors, plan_frozen
from patchloom.evaluate.logistic import CHOICE_VALIDATION_SHARE, hold_out_for_choice
from patchloom.evaluate.protocols.knn import TEMPERATURE
from patchloom.evaluate.regression import (
    RIDGE_STRENGTHS,
    choose_ridge,
    fit_ridge,
    held_out_score,
    knn_predictions,
    targets_of,
    with_targets,
)
from patchloom.evaluate.settings import EvalSettings, Parts, parts_of, place_in_run
from patchloom.evaluate.subjects import open_probed
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

    subjects = open_probed(run, settings, pooling)
    parts = parts_of(data, settings, card=subjects.ours.card, run=run, prepare=prepare)
    assert column is not None  # by with_targets
    extraction.check(parts.test)
    if k > len(parts.train):
        n = len(parts.train)
        raise PatchloomError(f"--k {k} is more than the {n} training {parts.train.noun}: choose 1 to {n}")
    plan_frozen("regress", subjects, parts, settings)

    # ---- features and predictions of each encoder
    rows, quoted, drawn, cached = list[Result](), list[Result](), dict[str, np.ndarray](), list[str]()
    for one in extractors(subjects, settings, options=extraction):
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
        cached += [one.name] * (train.cached or test.cached)
    mean = float(targets.mean())
    guess = Predictions(truth, np.full(len(truth), mean), groups)
    guessed = regression_results(MEAN, "regress", {"column": column, "answer": f"{mean:.{digits}f}"}, guess, digits)
    rows += guessed
    quoted.append(guessed[0])

    # ---- the report
    around = circumstances(
        subjects, parts, train, test, cached, extraction, "instance" in {row.pooling for row in rows}
    )
    report = Evaluation.of_test(
        parts.test,
        settings.seed,
        len(truth),
        results=rows,
        method=" ".join([_method(column, train, test, k), around, *left_out]),
        headline=_headline(column, rows, quoted, parts, train, test),
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


def _headline(
    column: str,
    rows: Sequence[Result],
    quoted: Sequence[Result],
    parts: Parts[Source],
    train: ImageFeatures,
    test: ImageFeatures,
) -> str:
    """Return the headline: R² of all, and MAE of the encoder and of the mean."""
    ours, *controls = quoted
    error, of_mean = (_beside(rows, one, MAE) for one in (ours, controls[-1]))
    against = listing([as_control(one) for one in controls], "and")
    origin = f"; test: {parts.origin}" if parts.origin else ""
    return (
        f"Regression of {column} (ridge, {ours.pooling}): {R2} {ours.text()} against {against}; {MAE} {error.text()}, "
        f"{of_mean.number()} by the mean; on {len(test.indices):,} test {test.noun}. Fitted on: "
        f"{len(train.indices):,} training {train.noun}{origin}."
    )


def _method(column: str, train: ImageFeatures, test: ImageFeatures, k: int) -> str:
    """Describe the regression."""
    n, m, strengths = len(train.indices), len(test.indices), RIDGE_STRENGTHS
    return (
        f"Regression: {column} of {m:,} test {test.noun} was predicted from frozen features, by ridge regression on "
        f"standardised features of {n:,} training {train.noun}, and by the mean of the {k} most similar of these "
        f"(cosine similarity, weights exp(similarity / {TEMPERATURE})). The strength of the penalty (of "
        f"{len(strengths)} from {min(strengths):g} to {max(strengths):g}) and the quoted pooling were chosen on a "
        f"stratified {100 * CHOICE_VALIDATION_SHARE:.0f} % of the training {train.noun}; the final fit used all of "
        f"them. {R2} is 1 for perfect predictions and 0 for the mean of the test {test.noun}; the mean predictor "
        f"answers the mean of the training {train.noun}. MAE is in the unit of {column}."
    )


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
    """Return the picture of predicted against true numbers, of the encoder and its controls."""
    label = re.sub(r"[^\w.-]+", "-", column)
    place = place_in_run(run, data, label, settings.seed, "pictures", ".png", "regress-")
    if place is None or not Path(run).is_dir():
        return ()
    panels = {one.encoder: f"{R2} {one.number()}, {MAE} {_beside(rows, one, MAE).number()}" for one in quoted}
    content = {"column": column, "truth": truth, "predicted": drawn, "notes": panels, "noun": quoted[0].noun}
    return (Drawing(draw_regression, place, content),)
