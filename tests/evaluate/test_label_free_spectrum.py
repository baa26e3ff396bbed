"""Ranks and exponents of features whose spectrum is known."""

import math

import pytest
import torch

from patchloom.evaluate.label_free import alpha_req, eigenvalues, rankme
from patchloom.questions.collapse import effective_rank


def orthonormal(n: int, d: int, seed: int = 0) -> torch.Tensor:
    """[n d] whose columns are orthonormal and have the mean 0, in float64."""
    noise = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(noise - noise.mean(0))[0]


@pytest.mark.parametrize("rank", [1, 5, 24])
def test_rankme_counts_even_directions(rank: int) -> None:
    values = torch.zeros(24, dtype=torch.float64)
    values[:rank] = 1.0
    features = orthonormal(300, 24) * values.sqrt()
    assert rankme(features) == pytest.approx(rank, abs=1e-6)
    assert rankme(7.0 * features) == pytest.approx(rank, abs=1e-6)


def test_rankme_of_two_uneven_directions_is_exp_of_their_entropy() -> None:
    features = torch.zeros(4, 3)
    features[0, 0], features[1, 1] = 3.0, 1.0  # singular values 3 and 1: shares 3/4 and 1/4
    assert rankme(features) == pytest.approx(math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))))
    assert rankme(features) == effective_rank(features)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.5])
def test_alpha_is_the_exponent_of_a_power_law(alpha: float) -> None:
    j = torch.arange(1, 65, dtype=torch.float64)
    features = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0]
    features = orthonormal(300, 64) * (300 * j**-alpha).sqrt() @ features
    assert torch.allclose(eigenvalues(features), j**-alpha)
    assert alpha_req(features) == pytest.approx(alpha, abs=1e-8)
    assert alpha_req(5 * features + 100) == pytest.approx(alpha, abs=1e-6)  # neither scale nor mean matter


def test_alpha_looks_at_its_range_alone() -> None:
    j = torch.arange(1, 65, dtype=torch.float64)
    values = 1 / j
    values[:4], values[32:] = 50.0, 1e-4
    assert alpha_req(orthonormal(300, 64) * (300 * values).sqrt()) == pytest.approx(1.0, abs=1e-8)
    values[4] *= 2  # the first one within it
    assert alpha_req(orthonormal(300, 64) * (300 * values).sqrt()) > 1.1


def test_alpha_of_few_directions_is_infinite_and_of_few_numbers_refused() -> None:
    few = torch.zeros(40, dtype=torch.float64)
    few[:6] = 1.0
    assert alpha_req(orthonormal(300, 40) * few) == math.inf
    assert alpha_req(torch.ones(50, 20)) == math.inf
    assert math.isfinite(alpha_req(torch.randn(17, 16)))
    for n, d in ((300, 15), (16, 300)):
        with pytest.raises(ValueError, match="to 15 eigenvalues"):
            alpha_req(torch.randn(n, d))
