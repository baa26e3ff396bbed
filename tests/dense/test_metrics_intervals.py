"""Intervals over images: of known width, narrower for differences on the same images, and right in 95 of 100 cases."""

import math
import time

import numpy as np
import pytest
import torch

from patchloom.claims import Claim, difference
from patchloom.dense.metrics import class_ious, interval, mean_iou, pseudo_values


def share(sums: torch.Tensor) -> torch.Tensor:
    """Of sums [... 2], the first over the second."""
    return sums[..., 0] / sums[..., 1]


def test_the_interval_of_a_mean_is_the_one_of_textbooks():
    rng = np.random.default_rng(0)
    values = torch.from_numpy(np.stack([rng.random(30), np.ones(30)], 1))
    pseudo = pseudo_values(share, values)
    assert pseudo.tolist() == pytest.approx(values[:, 0].tolist())  # of a mean they are the values themselves
    low, high = interval(values[:, 0].mean(), pseudo)
    mean, reach = values[:, 0].mean().item(), 2.0452 * values[:, 0].std().item() / math.sqrt(30)
    assert (low.item(), high.item()) == pytest.approx((mean - reach, mean + reach), abs=1e-4)


def test_groups_are_left_out_as_a_whole():
    rng = np.random.default_rng(0)
    values = torch.from_numpy(np.stack([rng.random(30), np.ones(30)], 1))
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


def test_what_is_hard_for_both_does_not_widen_the_difference():
    rng = np.random.default_rng(0)
    hard = rng.random(100)
    sides = [torch.from_numpy(np.stack([hard + gain, np.ones(100)], 1)) for gain in (0.05, 0.0)]
    values = tuple([share(side.sum(0)).item()] for side in sides)
    found = difference(*(pseudo_values(share, side)[None] for side in sides), values, trained=False)
    assert (found.value, found.low, found.high) == pytest.approx((0.05, 0.05, 0.05)) and found.claim is Claim.BETTER
    with pytest.raises(ValueError, match="not the same"):
        difference(torch.ones(1, 5), torch.ones(1, 6))


def test_ade20k_takes_no_time():
    per_image = torch.randint(0, 100, (2000, 3, 150))
    begun = time.perf_counter()
    interval(mean_iou(per_image.sum(0)), pseudo_values(mean_iou, per_image))
    assert time.perf_counter() - begun < 5
