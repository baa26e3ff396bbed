"""Sentences of a comparison's verdict, case by case."""

import pytest
import torch

from patchloom.compare.outcome import describe_ranking, rank_encoders

N = 2000


def rows(share: float, seeds: int = 2, seed: int = 0) -> torch.Tensor:
    """Draw correctness [seeds N] with an accuracy of ``share`` from a seed."""
    return torch.rand(seeds, N, generator=torch.Generator().manual_seed(seed)) < share


def said(tasks: dict[str, float], untrained: float, pixels: float, seeds: int = 2, **others: float) -> str:
    found = rank_encoders(
        {name: rows(share, seeds, seed) for seed, (name, share) in enumerate(tasks.items())},
        {"untrained": rows(untrained, seeds, 10), "raw pixels": rows(pixels, 1, 11)},
        {name: rows(share, 1, 12) for name, share in others.items()},
    )
    return " ".join(describe_ranking(found, "linear", N))


def test_the_winner():
    text = said({"mae": 0.7, "mp3": 0.5}, 0.3, 0.3)
    assert text.startswith("mae suits these images best of all compared: by linear probe mae 7")
    assert "ahead of mp3, the second" in text and "better than untrained (" in text and "But" not in text


def test_an_encoder_of_beside_may_beat_the_winner():
    text = said({"mae": 0.7, "mp3": 0.5}, 0.3, 0.3, dino=0.95)
    assert "But dino, given by --beside, is better: mae minus dino is -2" in text


@pytest.mark.parametrize(
    ("untrained", "pixels", "wanted"),
    [
        (0.3, 0.69, "mae did learn features that help with these labels: +"),
        (0.69, 0.3, "It remains open whether pre-training learnt anything"),
    ],
)
def test_a_control_that_cannot_be_distinguished(untrained, pixels, wanted):
    text = said({"mae": 0.7, "mp3": 0.5}, untrained, pixels)
    assert text.startswith("No winner: the best task by linear probe, mae ")
    assert wanted in text and ("would separate mae from " in text or "separating mae from " in text)
    assert text.endswith("mae is better than mp3.")


def test_a_better_control_is_reported():
    text = said({"mae": 0.5, "mp3": 0.4}, 0.2, 0.8)
    assert "is worse than controls without training: raw pixels (" in text and "distinguished" not in text
    assert "mae did learn" in text


def test_labels_that_are_too_easy():
    text = said({"mae": 0.99, "mp3": 0.99}, 0.99, 0.99)
    assert "too easy to compare encoders by" in text and "remains open" not in text


def test_one_seed_claims_nothing():
    ahead = said({"mae": 0.7, "mp3": 0.5}, 0.3, 0.3, seeds=1)
    behind = said({"mae": 0.5, "mp3": 0.3}, 0.3, 0.8, seeds=1)
    level = said({"mae": 0.7, "mp3": 0.7}, 0.3, 0.3, seeds=1)
    assert all("--seeds 3" in text and text.startswith("No winner") for text in (ahead, behind, level))
    assert "is behind raw pixels (" in behind and "did learn" not in behind
    assert not any(word in text for word in ("better", "distinguished") for text in (ahead, behind))
    assert "is indistinguishable from mae (" in level or "from mp3 (" in level


def test_few_test_images_claim_nothing():
    rows = torch.ones(2, 8).bool()
    found = rank_encoders({"mae": rows, "mp3": ~rows}, {"raw pixels": ~rows[:1]})
    assert not found.winner and describe_ranking(found, "linear", 8)[0].startswith(
        "No winner: 8 test images are too few"
    )
