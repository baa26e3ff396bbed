"""Which classes the pixels of label maps are taken for, and the scores of segmentation that follow from it.

All scores come from one sum over the test images, as the papers' do, and not from a mean over images: an image in which
a class fills ten pixels would count as much for that class as one that it fills. Letters: k classes, h w height and
width of an image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchloom.data.annotated.base import IGNORED


def confusion(predicted: Tensor, truth: Tensor, classes: int) -> Tensor:
    """How many pixels of each class (rows) are taken for each class (columns), int64 [k k].

    Args:
        predicted: [h w], a class from 0 to k - 1 for each pixel; what it says where the truth is `IGNORED` has no say.
        truth: [h w], likewise, or `IGNORED`.
        classes: their number k.

    Raises:
        ValueError: maps of different sizes, or a class that there is not.
    """
    if predicted.shape != truth.shape:
        raise ValueError(f"a prediction of {tuple(predicted.shape)} is no answer to {tuple(truth.shape)}")
    counted = truth != IGNORED
    rows, columns = truth[counted].long(), predicted[counted].long()
    if len(rows) and not 0 <= min(rows.min(), columns.min()) <= max(rows.max(), columns.max()) < classes:
        raise ValueError(f"classes go from 0 to {classes - 1}")
    return torch.bincount(rows * classes + columns, minlength=classes**2).view(classes, classes)


def overlaps(matrix: Tensor) -> Tensor:
    """What the scores need of a confusion matrix: pixels in common, in either, and in the truth.

    They add up over images, and are few enough to be kept for each: so intervals over images are cheap.

    Args:
        matrix: [... k k], as `confusion` has it.

    Returns:
        [... 3 k]: of each class the pixels rightly found, those that truth or answer has, and those that the truth has.
    """
    common, truth = matrix.diagonal(dim1=-2, dim2=-1), matrix.sum(-1)
    return torch.stack([common, truth + matrix.sum(-2) - common, truth], -2)


def class_ious(found: Tensor) -> Tensor:
    """Intersection over union of each class, float64 [... k]; nan for what is neither in truth nor answers.

    Args:
        found: [... 3 k], a sum of `overlaps` over images.
    """
    common, either, _ = found.double().unbind(-2)
    return common / either


def mean_iou(found: Tensor) -> Tensor:
    """Mean intersection over union, float64 [...], over the classes that occur in truth or answers, as mmseg has it.

    A class of which the test images have no pixel thus counts as 0 if a single pixel is taken for it, and not at all
    otherwise; nan where no pixel counts.

    Args:
        found: as for `class_ious`.
    """
    return class_ious(found).nanmean(-1)


def pixel_accuracy(found: Tensor) -> Tensor:
    """Share of the pixels that are taken for what they are (aAcc), float64 [...].

    Args:
        found: as for `class_ious`.
    """
    common, _, truth = found.double().unbind(-2)
    return common.sum(-1) / truth.sum(-1)
