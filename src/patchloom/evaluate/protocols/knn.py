"""kNN on frozen features."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from patchloom.data import DataLike
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import ImageFeatures, Pooling
from patchloom.evaluate.frozen import FrozenProtocol, Score, measure_run
from patchloom.evaluate.neighbours import TEMPERATURE, knn_right
from patchloom.evaluate.report import Report, Row
from patchloom.evaluate.settings import EvalSettings

_USUAL_K = 20
_KS = (1, 5, 20, 100)


def knn(
    run: str | Path,
    data: DataLike,
    settings: EvalSettings,
    *,
    pooling: Pooling | Literal["all"] = "all",
    ks: Sequence[int] = _KS,
    gallery: float = 1.0,
) -> Report:
    """Classify by the nearest neighbours among training images, by cosine similarity of frozen features.

    Args:
        run, data, settings: as in `patchloom.evaluate.evaluate`.
        pooling: "class", "mean", "prefix" (mean of class token and registers), "instance" (with an instance head),
            "both" class and mean, or "all" that exist.
        ks: numbers of neighbours.
        gallery: share of the training images that is searched, stratified.

    Raises:
        PatchloomError: no such encoder or data; data without labels; or a pooling that the encoder lacks.
    """
    if any(k < 1 for k in ks):
        raise PatchloomError(f"--ks must be 1 or more, not {min(ks)}")
    if not 0 < gallery <= 1:
        raise PatchloomError(f"--gallery must be a share above 0 and up to 1, such as 0.1, not {gallery:g}")
    return measure_run(knn_with(tuple(ks), gallery), run, data, settings, pooling, gallery)


def knn_with(ks: Sequence[int], gallery: float = 1.0) -> FrozenProtocol:
    """The protocol for these k; quoted is the row of the mean patch token whose k is nearest to 20.

    Rows name the share of the training images that is searched where it is not all of them.
    """
    return FrozenProtocol("knn", partial(_fit, ks=ks, gallery=gallery), _quoted, _title, partial(_sentence, ks=ks))


def _fit(
    train: ImageFeatures, pooling: str, settings: EvalSettings, *, ks: Sequence[int], gallery: float = 1.0
) -> Score:
    searched = {"gallery": gallery} if gallery < 1 else {}

    def score(test: ImageFeatures) -> list[tuple[dict[str, float], Tensor]]:
        found = knn_right(train.pooled(pooling), train.labels, test.pooled(pooling), test.labels, ks)
        return [({"k": k, "temperature": TEMPERATURE, **searched}, right) for k, right in found.items()]

    return score


def _quoted(rows: Sequence[Row]) -> Row:
    first = [row for row in rows if row.pooling == "mean"] or rows
    return min(first, key=lambda row: abs(row.settings["k"] - _USUAL_K))


def _title(row: Row) -> str:
    return f"kNN (k={row.settings['k']}, {row.pooling})"


def _sentence(train: ImageFeatures, test: ImageFeatures, *, ks: Sequence[int]) -> str:
    n, m = len(train.labels), len(test.labels)
    large = ", ".join(f"k = {k}" for k in ks if k > n)
    return (
        f"kNN: for each of {m:,} test {test.noun} the k most similar of {n:,} training {train.noun} vote (cosine "
        f"similarity of frozen features, votes weighted by exp(similarity / {TEMPERATURE})); nothing was trained or "
        "chosen." + (f" Left out, since more than there are: {large}." if large else "")
    )


KNN = knn_with(_KS)
