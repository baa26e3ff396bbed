"""Scores of segmentation are those of scikit-learn on all pixels together, with intervals over images."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score

from patchloom.dense.annotations.base import IGNORED
from patchloom.dense.metrics import class_ious, confusion, interval, mean_iou, overlaps, pixel_accuracy, pseudo_values

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


def test_maps_that_do_not_fit_are_rejected():
    with pytest.raises(ValueError, match="is no answer to"):
        confusion(torch.zeros(2, 2), torch.zeros(2, 3), 2)
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match="from 0 to 1"):
            confusion(torch.full((2, 2), wrong), torch.zeros(2, 2), 2)


def share(sums: torch.Tensor) -> torch.Tensor:
    """Of sums [... 2], the first over the second."""
    return sums[..., 0] / sums[..., 1]


def test_the_interval_of_a_mean_is_the_one_of_textbooks_also_over_groups():
    rng = np.random.default_rng(0)
    values = torch.from_numpy(np.stack([rng.random(30), np.ones(30)], 1))
    pseudo = pseudo_values(share, values)
    assert pseudo.tolist() == pytest.approx(values[:, 0].tolist())  # of a mean they are the values themselves
    low, high = interval(values[:, 0].mean(), pseudo)
    mean, reach = values[:, 0].mean().item(), 2.0452 * values[:, 0].std().item() / math.sqrt(30)
    assert (low.item(), high.item()) == pytest.approx((mean - reach, mean + reach), abs=1e-4)
    groups = rng.permutation(np.repeat([7, 3, 9, 4, 1], 6))
    pseudo = pseudo_values(share, values, groups)
    means = [values[groups == name, 0].mean().item() for name in (1, 3, 4, 7, 9)]
    assert pseudo.tolist() == pytest.approx(means)  # of groups of one size they are the means of the groups
    low, high = interval(values[:, 0].mean(), pseudo_values(share, values, np.zeros(30)))
    assert (low, high) == (0, 1)


def test_an_image_that_alone_has_a_class_leaves_its_interval_open():
    per_image = torch.tensor([[[1, 0], [3, 0], [1, 0]], [[4, 2], [4, 2], [4, 2]], [[0, 0], [2, 0], [1, 0]]])
    low, high = interval(class_ious(per_image.sum(0)), pseudo_values(class_ious, per_image))
    assert (low[1].item(), high[1].item()) == (0, 1) and high[0] - low[0] <= 1
    one = per_image[:1]
    assert [end.tolist() for end in interval(class_ious(one.sum(0)), pseudo_values(class_ious, one))] == [
        [0, 0],
        [1, 1],
    ]
