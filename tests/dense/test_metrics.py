"""Scores of segmentation are those of scikit-learn on all pixels together."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score

from patchloom.dense.annotations.base import IGNORED
from patchloom.dense.metrics import class_ious, confusion, mean_iou, overlaps, pixel_accuracy

K = 5


def some_maps(n: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers and truths [n h w] of four classes of five, a tenth of the pixels ignored."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 3, (n, 9, 7))
    predicted = np.where(rng.random(truth.shape) < 0.6, truth, rng.integers(0, 4, truth.shape))
    truth[rng.random(truth.shape) < 0.1] = IGNORED
    return torch.from_numpy(predicted).short(), torch.from_numpy(truth).short()


def test_scores_are_those_of_scikit_learn():
    predicted, truth = some_maps()
    matrices = torch.stack([confusion(p, t, K) for p, t in zip(predicted, truth, strict=True)])
    counted = (truth != IGNORED).numpy()
    t, p = truth.numpy()[counted], predicted.numpy()[counted]
    assert matrices.dtype == torch.int64
    assert np.array_equal(matrices.sum(0), confusion_matrix(t, p, labels=range(K)))
    found = overlaps(matrices).sum(0)
    assert class_ious(found)[:4].tolist() == pytest.approx(jaccard_score(t, p, labels=range(4), average=None))
    assert class_ious(found)[4].isnan()  # neither asked nor answered
    # class 3 is answered and never asked: it counts as 0
    assert float(mean_iou(found)) == pytest.approx(jaccard_score(t, p, labels=range(4), average="macro"))
    assert float(pixel_accuracy(found)) == pytest.approx(accuracy_score(t, p))


def test_it_is_one_sum_and_no_mean_over_images():
    large, small = torch.zeros(8, 8), torch.ones(1, 1)
    found = overlaps(confusion(large, large, 2)) + overlaps(confusion(1 - small, small, 2))
    assert class_ious(found).tolist() == [64 / 65, 0]


def test_nothing_counts_where_all_is_ignored():
    found = overlaps(confusion(torch.full((2, 2), 7), torch.full((2, 2), IGNORED), K))
    assert not found.any() and mean_iou(found).isnan()


def test_maps_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="is no answer to"):
        confusion(torch.zeros(2, 2), torch.zeros(2, 3), 2)
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match="from 0 to 1"):
            confusion(torch.full((2, 2), wrong), torch.zeros(2, 2), 2)
