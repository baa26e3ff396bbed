"""Ranking of encoders, its error rate, and the budget that would separate them."""

import re
from dataclasses import replace

import pytest
import torch

from patchloom.claims import Claim, Difference, difference
from patchloom.compare.outcome import rank_encoders, sufficient_budget


def drawn(
    share: float, seeds: int, n: int, rng: torch.Generator, hard: torch.Tensor | None = None, moved: float = 0.0
) -> torch.Tensor:
    """Draw correctness [seeds n] with an accuracy of ``share``.

    Args:
        hard: [n] shift of each image's probability.
        moved: standard deviation over seeds of a shift of all images.
    """
    chance = share + moved * torch.randn(seeds, 1, generator=rng) + (torch.zeros(n) if hard is None else hard)
    return torch.rand(seeds, n, generator=rng) < chance.clamp(0, 1)


def winners(tasks: dict[str, tuple[float, float]], seeds: int, n: int, times: int, rng: torch.Generator) -> int:
    """Count the comparisons with a winner; tasks by accuracy and spread, well above the controls."""
    named = 0
    for _ in range(times):
        found = {name: drawn(share, seeds, n, rng, moved=moved) for name, (share, moved) in tasks.items()}
        pixels, untrained = drawn(0.2, 1, n, rng), drawn(0.2, seeds, n, rng)
        named += bool(rank_encoders(found, {"raw pixels": pixels, "untrained": untrained}).winner)
    return named


def test_variance_over_seeds_widens_the_interval():
    same = torch.tensor([[1] * 60 + [0] * 40] * 2).bool()
    moved = torch.stack([same[0], torch.cat([torch.ones(30), torch.zeros(70)]).bool()])
    low = torch.zeros(2, 100).bool()
    tight, wide = difference(same, low), difference(moved, low)
    assert tight.over_seeds == 0 < wide.over_seeds
    assert wide.high - wide.low > tight.high - tight.low


@pytest.mark.parametrize("seeds", [2, 3])
def test_the_interval_covers_the_true_difference(seeds):
    rng = torch.Generator().manual_seed(1)
    hit, alone = 0, 0
    for _ in range(300):
        hard = 0.2 * torch.randn(500, generator=rng)
        one, other = (drawn(share, seeds, 500, rng, hard, moved=0.03) for share in (0.56, 0.5))
        truth = ((0.56 + hard).clamp(0, 1) - (0.5 + hard).clamp(0, 1)).mean().item()
        found = difference(one, other)
        hit += found.low <= truth <= found.high
        alone += abs(found.value - truth) <= found.over_images
    assert hit >= 285  # 95 % or slightly more
    assert alone < 270, "the interval over images alone must cover too rarely, or the test would not depend on seeds"


def test_winners_are_rare_if_nothing_is_learnt():
    rng, named = torch.Generator().manual_seed(2), 0
    for _ in range(400):
        tasks = {name: drawn(0.1, 2, 300, rng) for name in ("mae", "droppos", "mp3")}
        controls = {"untrained": drawn(0.1, 2, 300, rng), "raw pixels": drawn(0.1, 1, 300, rng)}
        named += bool(rank_encoders(tasks, controls).winner)
    assert named <= 2


@pytest.mark.parametrize("stable", [0, 4])
def test_winners_are_rare_among_equal_tasks(stable):
    # also beside tasks at chance level, whose seeds hardly vary and tell nothing about the others
    tasks = {f"moving {i}": (0.5, 0.03) for i in range(2)} | {f"still {i}": (0.35, 0.0) for i in range(stable)}
    assert winners(tasks, 2, 1000, 300, torch.Generator().manual_seed(5)) <= 15  # 5 %


def test_one_seed_names_no_winner():
    tasks = {"mae": (0.9, 0.0), "droppos": (0.5, 0.0)}
    assert winners(tasks, 1, 500, 5, torch.Generator().manual_seed(6)) == 0
    assert winners(tasks, 2, 500, 5, torch.Generator().manual_seed(6)) == 5


def test_a_control_without_seeds_adds_no_variance():
    rng = torch.Generator().manual_seed(7)
    tasks = {"mae": drawn(0.6, 2, 500, rng, moved=0.05), "droppos": drawn(0.6, 2, 500, rng, moved=0.05)}
    pixels = drawn(0.5, 1, 500, rng)
    found = rank_encoders(tasks, {"raw pixels": pixels, "untrained": pixels.expand(2, -1)}).against
    assert found["raw pixels"].over_seeds == found["untrained"].over_seeds > 0


def test_a_clear_winner_is_named():
    rng = torch.Generator().manual_seed(3)
    tasks = {"mae": drawn(0.4, 2, 4000, rng), "droppos": drawn(0.6, 2, 4000, rng)}
    controls = {"untrained": drawn(0.2, 2, 4000, rng), "raw pixels": drawn(0.2, 1, 4000, rng)}
    found = rank_encoders(tasks, controls)
    assert found.winner == "droppos" and found.order == ("droppos", "mae")
    assert not found.level_with and not found.unbeaten


def test_a_task_that_does_not_beat_its_controls_is_no_winner():
    rng = torch.Generator().manual_seed(4)
    tasks = {"mae": drawn(0.3, 2, 400, rng), "droppos": drawn(0.5, 2, 400, rng)}
    found = rank_encoders(tasks, {"raw pixels": drawn(0.9, 1, 400, rng)})
    assert not found.winner and found.unbeaten == ("raw pixels",)


def test_two_images_make_no_winner():
    right, wrong = torch.ones(1, 2).bool(), torch.zeros(1, 2).bool()
    assert not rank_encoders({"mae": right, "droppos": wrong}, {"raw pixels": wrong}).winner


def test_the_sufficient_number_of_seeds():
    # significant over images, but not yet over seeds
    one = torch.stack([torch.arange(2000) < 1300, torch.arange(2000) < 1100])
    other = torch.stack([torch.arange(2000) < 1100, torch.arange(2000) < 900])
    found = difference(one, other)
    assert found.claim is Claim.NONE
    more = sufficient_budget(found, 2, 2000)
    assert more.endswith("seeds of each task")
    # with that many seeds of the same spread it is significant
    many = torch.arange(int(more.split()[0])) % 2
    one, other = (torch.stack([rows[i] for i in many.tolist()]) for rows in (one, other))
    assert difference(one, other).claim is Claim.BETTER


@pytest.mark.parametrize("n", [10, 18, 100, 1000])
def test_the_sufficient_budget_exceeds_the_present_one(n):
    right = torch.arange(n)
    one, other = (right < 0.55 * n).expand(2, -1), (right >= 0.5 * n).expand(2, -1)
    found = difference(one, other)
    if found.claim is Claim.NONE:
        said = sufficient_budget(found, 2, n)
        assert said.endswith("labelled test images") and int(said.split()[1].replace(",", "")) > n
    assert sufficient_budget(replace(found, value=0.0), 2, n) == ""
    assert sufficient_budget(replace(found, value=1e-4), 2, n) == ""


def test_images_are_advised_instead_of_many_seeds():
    wide = Difference("", 0.05, -0.1, 0.2, 500, 2, True, over_images=0.06, over_seeds=0.2, freedom=2)
    said = sufficient_budget(wide, 2, 500)
    assert re.fullmatch(r"about [\d,]+ labelled test images and \d+ seeds of each task", said)


def test_images_in_few_groups_name_a_winner_less_easily():
    rng = torch.Generator().manual_seed(0)
    tasks = {"mae": drawn(0.8, 3, 400, rng), "droppos": drawn(0.6, 3, 400, rng)}
    controls = {"raw pixels": drawn(0.4, 1, 400, rng)}
    alone, over = (rank_encoders(tasks, controls, groups=groups) for groups in (None, torch.arange(400) % 2))
    assert alone.winner == "mae" and not over.winner  # Student's quantile of two groups is 12.7
    assert all(over.against[name].over_images > 4 * alone.against[name].over_images for name in over.against)
