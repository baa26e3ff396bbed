"""Calibration of a classifier's probabilities by one temperature (Guo et al., ICML 2017, arXiv 1706.04599).

Letters: n images, c classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.errors import typed_fields

_COLDEST, _HOTTEST = 0.02, 50.0
_BINS = 15  # of confidence, as in the paper


@dataclass(frozen=True)
class Calibration:
    """Temperature that was fitted to validation images, and the errors of their probabilities.

    Both errors are those of the same images that the temperature was fitted to: on new images they are larger.

    Attributes:
        temperature: divisor of the logits.
        images: number of images.
        nll_before, nll: mean negative log-likelihood in nats, of the uncalibrated and the calibrated probabilities.
        ece_before, ece: expected calibration error in [0, 1], of the same.
    """

    temperature: float
    images: int
    nll_before: float
    nll: float
    ece_before: float
    ece: float

    def plain(self) -> dict[str, Any]:
        """Return values for JSON."""
        return asdict(self)

    def sentence(self, noun: str = "images") -> str:
        """Return a sentence on the temperature, and on the errors before and after."""
        return (
            f"calibrated by the temperature {self.temperature:.3g} on {self.images:,} validation {noun}: NLL "
            f"{self.nll_before:.3f} before, {self.nll:.3f} after; ECE {100 * self.ece_before:.1f} % before, "
            f"{100 * self.ece:.1f} % after (on the same {noun}, so new ones have larger errors)"
        )


def describe_calibration(known: Calibration | None) -> str:
    """Return how probabilities are calibrated, for the end of a sentence."""
    if known is None:
        return "not calibrated, as no validation images were held out when the classifier was trained"
    return f"calibrated by the temperature {known.temperature:.3g}, fitted to {known.images:,} validation images"


def calibration_from(given: Mapping[str, Any]) -> Calibration | None:
    """Validate the values of `Calibration.plain` from a file; None without any."""
    if not given:
        return None
    ranges = {"temperature": (_COLDEST, _HOTTEST), "images": (1, 2**62), "ece_before": (0, 1), "ece": (0, 1)}
    found = typed_fields(Calibration, given, ranges)
    if len(found) < len(Calibration.__dataclass_fields__):
        raise ValueError("its calibration lacks a value")
    return Calibration(**found)


def calibrate(logits: Tensor, labels: Tensor) -> Calibration:
    """Fit the temperature that minimises the negative log-likelihood of labels.

    The temperature is sought from 0.02 to 50: without a bound, it would fall to 0 if every label is predicted right.

    Args:
        logits: [n c] of images that the classifier was not trained on.
        labels: [n] int64.
    """
    from scipy.optimize import minimize_scalar  # takes 0.1 s to import

    logits = logits.double()

    def loss(log_temperature: float) -> float:
        return negative_log_likelihood(logits / math.exp(log_temperature), labels)

    # the loss is convex in 1 / temperature, so it has a single minimum along the logarithm as well
    bounds = math.log(_COLDEST), math.log(_HOTTEST)
    found = math.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-5}).x)
    found = min(max(found, _COLDEST), _HOTTEST)
    before, after = logits.softmax(1), (logits / found).softmax(1)
    return Calibration(
        found,
        len(labels),
        negative_log_likelihood(logits, labels),
        negative_log_likelihood(logits / found, labels),
        calibration_error(before, labels),
        calibration_error(after, labels),
    )


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> float:
    """Return the mean negative log-likelihood in nats of labels [n] under logits [n c]."""
    return F.cross_entropy(logits, labels).item()


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = _BINS) -> float:
    """Return the expected calibration error in [0, 1]: mean distance of accuracy and confidence in bins of confidence.

    The bins have equal widths, each with its upper end, and are weighted by their numbers of images (Guo et al. 2017,
    equation 3). The error is biased upwards where bins hold few images.

    Args:
        probabilities: [n c].
        labels: [n] int64.
        bins: number of bins.
    """
    confidence, predicted = (values.numpy() for values in probabilities.double().max(1))
    right = predicted == labels.numpy()
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gap = np.bincount(place, right, bins) - np.bincount(place, confidence, bins)
    return float(np.abs(gap).sum() / len(right))


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Return probabilities [n c] of logits [n c], in float64."""
    return torch.softmax(logits.double() / temperature, dim=1)
