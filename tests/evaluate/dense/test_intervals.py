"""Intervals over images: of known width, the same again, and narrower for differences on the same images."""

import math
import time

import numpy as np
import pytest
import torch

from patchloom.evaluate.dense.confusion import mean_iou
from patchloom.evaluate.dense.intervals import bootstrap, draws, middle, paired_bootstrap, resampled
from patchloom.evaluate.report import difference_in_words


def share(sums: torch.Tensor) -> torch.Tensor:
    """Of sums [... 2], the first over the second."""
    return sums[..., 0] / sums[..., 1]


def test_the_interval_of_a_mean_is_the_one_of_textbooks():
    rng = np.random.default_rng(0)
    values = torch.from_numpy(np.stack([rng.random(300), np.ones(300)], 1))
    low, high = bootstrap(share, values, seed=1, times=4000)
    mean, reach = values[:, 0].mean().item(), 1.96 * values[:, 0].std().item() / math.sqrt(300)
    assert low == pytest.approx(mean - reach, abs=0.1 * reach) and high == pytest.approx(mean + reach, abs=0.1 * reach)
    assert bootstrap(share, values, seed=1, times=4000) == (low, high)


def test_a_draw_is_of_whole_images():
    per_image = torch.tensor([[[1, 0], [3, 5], [1, 5]], [[4, 2], [4, 2], [4, 2]], [[0, 3], [2, 6], [1, 4]]])
    times, scores = draws(3, 7, 50), resampled(mean_iou, per_image, 7, 50)
    assert times.sum(1).tolist() == [3] * 50
    for drawn, score in zip(times.long(), scores, strict=True):
        assert float(mean_iou(per_image.repeat_interleave(drawn, 0).sum(0))) == pytest.approx(float(score))


def test_draws_without_a_score_are_left_out():
    low, high = middle(torch.tensor([[0.1, math.nan], [0.3, math.nan], [math.nan, 1.0]]).double())
    assert (low[0] > 0.1 - 1e-9 and high[0] < 0.3 + 1e-9) and (low[1], high[1]) == (1, 1)


def test_what_is_hard_for_both_does_not_widen_the_difference():
    rng = np.random.default_rng(0)
    hard = rng.random(100)
    one, other = (torch.from_numpy(np.stack([hard + gain, np.ones(100)], 1)) for gain in (0.05, 0.0))
    difference, low, high = paired_bootstrap(share, one, other, seed=0)
    assert difference == pytest.approx(0.05) and low == pytest.approx(0.05) and high == pytest.approx(0.05)
    assert difference_in_words((difference, low, high), "training from scratch") == (
        "The encoder is 5.0 points better than training from scratch [+5.0, +5.0]."
    )
    with pytest.raises(ValueError, match="not the same"):
        paired_bootstrap(share, one, other[1:], seed=0)


def test_a_single_image_tells_no_interval():
    one = torch.tensor([[1.0, 2.0]])
    assert bootstrap(share, one, seed=0) == (0, 1)
    assert paired_bootstrap(share, one, one, seed=0) == (0, -1, 1)
    assert "not told apart from it (+0.0 points [-100.0, +100.0])" in difference_in_words((0, -1, 1), "it")


def test_ade20k_takes_no_time():
    per_image = torch.randint(0, 100, (2000, 3, 150))
    begun = time.perf_counter()
    bootstrap(mean_iou, per_image, seed=0)
    assert time.perf_counter() - begun < 5
