"""Honest measurements of an encoder: every one beside its controls, and with what was done."""

from patchloom.evaluate.features import Features, Pooling, classes_of, extract, has_labels, labelled, pixel_features
from patchloom.evaluate.frozen import compare
from patchloom.evaluate.how import How, Parts, parts_of
from patchloom.evaluate.knn import knn_accuracies
from patchloom.evaluate.linear import Choice, Probe, choose_strength, linear_probe
from patchloom.evaluate.protocols import PROTOCOLS, evaluate
from patchloom.evaluate.report import Report, Row, wilson
from patchloom.evaluate.rows import append_rows

__all__ = [
    "Choice",
    "Features",
    "How",
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
