"""Ranking of encoders: its error rate, the budget that would separate them, its sentences, and none without labels."""

import re
from dataclasses import replace

import pytest
import torch

from patchloom.compare.outcome import (
    Ranking,
    describe_ranking,
    note_unequal,
    rank_encoders,
    sufficient_budget,
    tables_of,
    training_table,
)
from patchloom.compare.runner import TrainedRun
from patchloom.compare.unlabelled import rank_by_rankme
from patchloom.results.claims import Claim, Difference, difference
from patchloom.results.result import Result


def drawn(share: float, seeds: int, n: int, rng: torch.Generator, moved: float = 0.0) -> torch.Tensor:
    """Draw correctness [seeds n] with an accuracy of ``share``, whose standard deviation over seeds is ``moved``."""
    chance = share + moved * torch.randn(seeds, 1, generator=rng)
    return torch.rand(seeds, n, generator=rng) < chance.expand(seeds, n)


def results(right: torch.Tensor) -> list[Result]:
    return [Result.of_images("", "linear", {}, its) for its in right]


def ranked(tasks: dict, controls: dict, others: dict | None = None) -> Ranking:
    return rank_encoders(
        *({name: results(its) for name, its in one.items()} for one in (tasks, controls, others or {}))
    )


def test_winners_are_rare_among_equal_tasks():
    # also beside tasks at chance level, whose seeds hardly vary and tell nothing about the others
    tasks = {f"moving {i}": (0.5, 0.03) for i in range(2)} | {f"still {i}": (0.35, 0.0) for i in range(4)}
    rng, named = torch.Generator().manual_seed(5), 0
    for _ in range(300):
        found = {name: drawn(share, 2, 1000, rng, moved=moved) for name, (share, moved) in tasks.items()}
        controls = {"raw pixels": drawn(0.2, 1, 1000, rng), "untrained": drawn(0.2, 2, 1000, rng)}
        named += bool(ranked(found, controls).winner)
    assert named <= 15  # 5 %


def test_a_control_without_seeds_adds_no_variance():
    rng = torch.Generator().manual_seed(7)
    tasks = {"mae": drawn(0.6, 2, 500, rng, moved=0.05), "droppos": drawn(0.6, 2, 500, rng, moved=0.05)}
    pixels = drawn(0.5, 1, 500, rng)
    found = ranked(tasks, {"raw pixels": pixels, "untrained": pixels.expand(2, -1)}).against
    assert found["raw pixels"].over_seeds == found["untrained"].over_seeds > 0


@pytest.mark.parametrize("n", [10, 18, 100, 1000])
def test_the_sufficient_budget_exceeds_the_present_one(n):
    right = torch.arange(n)
    one, other = (right < 0.55 * n).expand(2, -1), (right >= 0.5 * n).expand(2, -1)
    found = difference(one, other)
    if found.claim is Claim.NONE:
        said = sufficient_budget(found, n)
        assert said.endswith("labelled test images") and int(said.split()[1].replace(",", "")) > n
    assert sufficient_budget(replace(found, value=0.0), n) == ""
    assert sufficient_budget(replace(found, value=1e-4), n) == ""


def test_the_sufficient_number_of_seeds_and_images():
    # significant over images, but not yet over seeds
    one = torch.stack([torch.arange(2000) < 1300, torch.arange(2000) < 1100])
    other = torch.stack([torch.arange(2000) < 1100, torch.arange(2000) < 900])
    found = difference(one, other)
    assert found.claim is Claim.NONE
    more = sufficient_budget(found, 2000)
    assert more.endswith("seeds of each task")
    # with that many seeds of the same spread it is significant
    many = torch.arange(int(more.split()[0])) % 2
    one, other = (torch.stack([rows[i] for i in many.tolist()]) for rows in (one, other))
    assert difference(one, other).claim is Claim.BETTER
    wide = Difference("", 0.05, -0.1, 0.2, 500, 2, True, over_images=0.06, over_seeds=0.2, freedom=2)
    said = sufficient_budget(wide, 500)
    assert re.fullmatch(r"about [\d,]+ labelled test images and \d+ seeds of each task", said)


def said(tasks: dict[str, float], untrained: float, pixels: float, seeds: int = 2, **others: float) -> str:
    def rows(share: float, seeds: int, seed: int) -> torch.Tensor:
        return drawn(share, seeds, 2000, torch.Generator().manual_seed(seed))

    found = ranked(
        {name: rows(share, seeds, seed) for seed, (name, share) in enumerate(tasks.items())},
        {"untrained": rows(untrained, seeds, 10), "raw pixels": rows(pixels, 1, 11)},
        {name: rows(share, 1, 12) for name, share in others.items()},
    )
    return " ".join(describe_ranking(found, "linear", 2000))


NO_WINNER = ("No winner", "separat", "mae is better than mp3.")
CASES = {
    "winner": ((0.7, 0.5, 0.3, 0.3), ("mae suits these images best", "by linear probe mae 7", "ahead of mp3"), "But"),
    "open control": ((0.7, 0.5, 0.69, 0.3), (*NO_WINNER, "remains open whether"), "did learn"),
    "open pixels": ((0.7, 0.5, 0.3, 0.69), (*NO_WINNER, "mae did learn features"), "remains open"),
    "better control": ((0.5, 0.4, 0.2, 0.8), ("worse than controls", "raw pixels (", "mae did learn"), "distinguished"),
    "too easy": ((0.99, 0.99, 0.99, 0.99), ("too easy to compare encoders by",), "remains open"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_in_words(case):
    (mae, mp3, untrained, pixels), words, without = CASES[case]
    text = said({"mae": mae, "mp3": mp3}, untrained, pixels)
    assert all(one in text for one in words) and without not in text


def test_an_encoder_of_beside_may_beat_the_winner():
    text = said({"mae": 0.7, "mp3": 0.5}, 0.3, 0.3, dino=0.95)
    assert "dino, given by --beside, is better: mae minus dino is -2" in text


def test_one_seed_and_few_test_images_claim_nothing():
    for (mae, mp3, pixels), words in (
        ((0.7, 0.5, 0.3), "leads"), ((0.5, 0.3, 0.8), "is behind raw pixels ("), ((0.7, 0.7, 0.3), "indistinguishable"),
    ):  # fmt: skip
        text = said({"mae": mae, "mp3": mp3}, 0.3, pixels, seeds=1)
        assert text.startswith("No winner") and "--seeds 3" in text and words in text
        assert words == "indistinguishable" or "better" not in text
    right = torch.ones(2, 8).bool()
    found = ranked({"mae": right, "mp3": ~right}, {"raw pixels": ~right[:1]})
    assert not found.winner and "8 test images are too few" in describe_ranking(found, "linear", 8)[0]


def measured(value: float, low: float, high: float, measure: str = "own crop 90 %", seed: int = 0) -> Result:
    return Result(measure, value, low, high, 100, "mae", "label-free", seed=seed)


def test_seeds_have_rows_of_their_own():
    grid = {
        "own crop": {"mae": [measured(0.2, 0.1, 0.3), measured(0.4, 0.3, 0.5, seed=1)]},
        "RankMe": {"mae": [measured(0.5, 0.5, 0.5)], "mp3": [measured(0.3, 0.2, 0.4)]},
    }
    (_, whole, _), (_, by_seed, _) = tables_of("Measures", "measure", grid, "")
    assert whole.heading == ("measure", "mae", "mp3")
    assert whole.rows[1] == ("RankMe", "50.0", "30.0\n[20.0, 40.0]")
    assert whole.rows[0][1:] == ("30.0 ± 14.1\n[0.0, 100.0]", "")
    assert by_seed.heading == ("measure", "seed", "mae", "mp3")
    assert by_seed.rows == (("own crop", "0", "20.0\n[10.0, 30.0]", ""), ("own crop", "1", "40.0\n[30.0, 50.0]", ""))
    del grid["own crop"]
    assert len(tables_of("Measures", "measure", grid, "")) == 1


def test_the_hint_has_the_order_by_rankme():
    def rank(*values: float) -> list[Result]:
        return [Result.exact("RankMe", "", "label-free", {}, value, "dimensions") for value in values]

    (said,) = rank_by_rankme({"mae": rank(3.0, 4.0), "mp3": rank(9.0, 10.0)})
    assert "by RankMe the order is mp3 (9.5) and mae (3.5)" in said
    assert rank_by_rankme({"mae": rank(3.0)}) == []


def test_a_run_that_misses_the_time_by_more_than_5_per_cent_is_named():
    fits, late = TrainedRun("mae", 0, 62.9, 200, 3200), TrainedRun("mae:blr=1e-3", 1, 63.1, 210, 3360)
    assert not note_unequal([fits], 1.0) and not note_unequal([fits, late], None)
    (said,) = note_unequal([fits, late, late._replace(seconds=56.9)], 1.0)
    assert "mae:blr=1e-3, seed 1 (63.1 s of training, 210 updates) and" in said and "56.9 s" in said and "60 s" in said
    assert "mae, seed 0" not in said
    assert training_table([fits])[1].rows == (("mae", "0", "62.9 s", "200", "3,200"),)
