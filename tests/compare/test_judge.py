"""Who is ahead, and by what that is told."""

import math

import pytest
import torch

from patchloom.compare.judge import difference, enough, spread_of, standing
from patchloom.evaluate.report import paired_difference


def drawn(share: float, seeds: int, n: int, rng: torch.Generator, hard: torch.Tensor | None = None) -> torch.Tensor:
    """[seeds n] right answers of which a ``share`` is right; ``hard`` [n] moves each image's chance."""
    chance = torch.full((seeds, n), share) if hard is None else (share + hard).clamp(0, 1).expand(seeds, n)
    return torch.rand(seeds, n, generator=rng) < chance


def test_of_one_seed_it_is_the_paired_difference():
    rng = torch.Generator().manual_seed(0)
    one, other = drawn(0.7, 1, 300, rng), drawn(0.6, 1, 300, rng)
    found = difference(one, other, spread_of([one, other]))
    assert (found.points, found.low, found.high) == pytest.approx(paired_difference(one[0], other[0]), abs=1e-7)
    assert found.seeds == 0


def test_the_spread_is_that_of_an_analysis_of_variance():
    # accuracies 0.5, 0.7 and 0.2, 0.4: each seed is 0.1 from its task's mean
    one = torch.tensor([[1] * 5 + [0] * 5, [1] * 7 + [0] * 3]).bool()
    other = torch.tensor([[1] * 2 + [0] * 8, [1] * 4 + [0] * 6]).bool()
    found = spread_of([one, other])
    assert found.freedom == 2
    assert found.variance == pytest.approx(4 * 0.1**2 / 2)


def test_seeds_that_differ_widen_the_interval():
    same = torch.tensor([[1] * 60 + [0] * 40] * 2).bool()
    moved = torch.stack([same[0], torch.cat([torch.ones(30), torch.zeros(70)]).bool()])
    low = torch.zeros(2, 100).bool()
    tight = difference(same, low, spread_of([same, low]))
    wide = difference(moved, low, spread_of([moved, low]))
    assert tight.seeds == 0 < wide.seeds
    assert wide.high - wide.low > tight.high - tight.low


def test_the_interval_covers_the_true_difference():
    rng = torch.Generator().manual_seed(1)
    hit = 0
    for _ in range(300):
        hard = 0.2 * torch.randn(200, generator=rng)
        tasks = [drawn(share, 2, 200, rng, hard) for share in (0.5, 0.56, 0.5)]
        truth = ((0.56 + hard).clamp(0, 1) - (0.5 + hard).clamp(0, 1)).mean().item()
        found = difference(tasks[1], tasks[0], spread_of(tasks))
        hit += found.low <= truth <= found.high
    assert hit >= 285  # 95 %, and rather more


def test_where_nothing_is_learnt_hardly_any_winner_is_named():
    rng, winners = torch.Generator().manual_seed(2), 0
    for _ in range(400):
        tasks = {name: drawn(0.1, 2, 300, rng) for name in ("mae", "droppos", "mp3")}
        controls = {"untrained": drawn(0.1, 2, 300, rng), "raw pixels": drawn(0.1, 1, 300, rng)}
        winners += bool(standing(tasks, controls).winner)
    assert winners <= 2


def test_a_clear_winner_is_named():
    rng = torch.Generator().manual_seed(3)
    tasks = {"mae": drawn(0.4, 2, 4000, rng), "droppos": drawn(0.6, 2, 4000, rng)}
    controls = {"untrained": drawn(0.2, 2, 4000, rng), "raw pixels": drawn(0.2, 1, 4000, rng)}
    found = standing(tasks, controls)
    assert found.winner == "droppos" and found.order == ("droppos", "mae")
    assert not found.level_with and not found.unbeaten


def test_what_does_not_beat_its_controls_is_no_winner():
    rng = torch.Generator().manual_seed(4)
    tasks = {"mae": drawn(0.3, 2, 400, rng), "droppos": drawn(0.5, 2, 400, rng)}
    found = standing(tasks, {"raw pixels": drawn(0.9, 1, 400, rng)})
    assert not found.winner and found.unbeaten == ("raw pixels",)


def test_two_images_make_no_winner():
    right, wrong = torch.ones(1, 2).bool(), torch.zeros(1, 2).bool()
    assert not standing({"mae": right, "droppos": wrong}, {"raw pixels": wrong}).winner


def test_what_would_be_enough():
    # images say it, seeds do not yet
    one = torch.stack([torch.arange(2000) < 1300, torch.arange(2000) < 1100])
    other = torch.stack([torch.arange(2000) < 1100, torch.arange(2000) < 900])
    tasks = [one, other]
    found = difference(one, other, spread_of(tasks))
    assert not found.apart
    assert enough(found, spread_of(tasks), 2, 2, 2000).endswith("seeds of each task")
    # one seed, and few images
    one, other = torch.arange(100)[None] < 55, torch.arange(100)[None] >= 50
    found = difference(one, other, spread_of([one, other]))
    assert not found.apart
    assert enough(found, spread_of([one, other]), 2, 1, 100).endswith("labelled test images")
    assert enough(found._replace(points=0.0), spread_of([one, other]), 2, 1, 100) == ""


def test_a_difference_in_words():
    right, wrong = torch.ones(1, 50).bool(), torch.zeros(1, 50).bool()
    found = difference(right, wrong, spread_of([right, wrong]))
    assert found.text().startswith("+100.0 points [") and math.isclose(found.points, 1)
