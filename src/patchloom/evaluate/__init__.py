"""Evaluation protocols: every number beside its controls, with a sentence on what was done."""

from patchloom.evaluate.features import (
    ImageFeatures,
    Pooling,
    classes_of,
    extract,
    has_labels,
    labelled,
    pixel_features,
)
from patchloom.evaluate.frozen import compare
from patchloom.evaluate.logistic import Choice, Probe, choose_strength, linear_probe
from patchloom.evaluate.neighbours import knn_accuracies
from patchloom.evaluate.protocols import PROTOCOLS, evaluate
from patchloom.evaluate.protocols.knn import KNN
from patchloom.evaluate.protocols.linear import LINEAR
from patchloom.evaluate.report import Report, Row, wilson
from patchloom.evaluate.rows import append_rows
from patchloom.evaluate.settings import EvalSettings, Parts, parts_of

__all__ = [
    "Choice",
    "ImageFeatures",
    "EvalSettings",
    "KNN",
    "LINEAR",
    "Parts",
    "Pooling",
    "Probe",
    "PROTOCOLS",
    "Report",
    "Row",
    "append_rows",
    "choose_strength",
    "classes_of",
    "compare",
    "evaluate",
    "extract",
    "knn_accuracies",
    "has_labels",
    "labelled",
    "linear_probe",
    "parts_of",
    "pixel_features",
    "wilson",
]
