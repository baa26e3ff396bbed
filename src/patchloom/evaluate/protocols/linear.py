"""Linear probe: a logistic regression on frozen features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from patchloom.data import DataLike
from patchloom.evaluate.features import ImageFeatures, Pooling
from patchloom.evaluate.frozen import FrozenProtocol, Score, measure_run
from patchloom.evaluate.logistic import CHOICE_VALIDATION_SHARE, STRENGTHS, linear_probe
from patchloom.evaluate.report import Report, Row
from patchloom.evaluate.settings import EvalSettings


def linear(
    run: str | Path, data: DataLike, settings: EvalSettings, *, pooling: Pooling | Literal["all"] = "all"
) -> Report:
    """Train a linear classifier on frozen features.

    Args:
        run, data, settings: as in `patchloom.evaluate.evaluate`.
        pooling: "class", "mean", "instance" (with an instance head), "both" class and mean, or "all" that exist.

    Raises:
        PatchloomError: no such encoder or data; data without labels; or a pooling that the encoder lacks.
    """
    return measure_run(LINEAR, run, data, settings, pooling)


def _fit(train: ImageFeatures, pooling: str, settings: EvalSettings) -> Score:
    features, seed = train.pooled(pooling), settings.seed
    probe, choice = linear_probe(features, train.labels, seed=seed, device=settings.at, groups=train.groups)
    row_settings = {"l2": choice.strength, "held_out_accuracy": choice.accuracy, "held_out": choice.held_out}
    return lambda test: [(row_settings, probe.right(test.pooled(pooling), test.labels))]


def _quoted(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: row.settings["held_out_accuracy"])


def _title(row: Row) -> str:
    return f"Linear probe ({row.pooling})"


def _sentence(train: ImageFeatures, test: ImageFeatures) -> str:
    return (
        f"Linear probe: a logistic regression on the frozen, standardised features of {len(train.labels):,} training "
        f"images, tested on {len(test.labels):,} others; its L2 strength (of {len(STRENGTHS)} from "
        f"{min(STRENGTHS):g} to {max(STRENGTHS):g}) and the pooling that is quoted were chosen on a stratified "
        f"{100 * CHOICE_VALIDATION_SHARE:.0f} % of the training images, then all of them were fitted again."
    )


LINEAR = FrozenProtocol("linear", _fit, _quoted, _title, _sentence)
