"""LiDAR of crops that spread in known directions."""

import pytest
import torch

from patchloom.evaluate.label_free import DELTA, lidar, rankme


def crops(between: list[float], within: list[float], n: int = 400, q: int = 40) -> torch.Tensor:
    """[n q d] whose images and whose crops of one image have these deviations along the axes."""
    lots = torch.Generator().manual_seed(0)
    d = len(between)
    images = torch.randn(n, 1, d, generator=lots, dtype=torch.float64) * torch.tensor(between, dtype=torch.float64)
    return images + torch.randn(n, q, d, generator=lots, dtype=torch.float64) * torch.tensor(within)


def test_counts_the_directions_in_which_images_differ_more_than_crops() -> None:
    # all of eight directions vary alike; in three of them it is the images that do
    mixed = crops([1.0] * 3 + [0.01] * 5, [0.01] * 3 + [1.0] * 5)
    assert lidar(mixed) == pytest.approx(3, abs=0.15)
    assert rankme(mixed.flatten(0, 1)) == pytest.approx(8, abs=0.1)  # which does not see that
    assert lidar(crops([1.0] * 8, [0.01] * 8)) == pytest.approx(8, abs=0.15)


def test_as_the_paper_writes_it() -> None:
    features = crops([1.0, 0.5, 2.0, 0.1], [0.3, 0.5, 0.1, 0.2], n=30, q=5)
    n, q, d = features.shape
    means = features.mean(1)
    between, within = torch.zeros(2, d, d, dtype=torch.float64)
    for i in range(n):
        apart = means[i] - features.flatten(0, 1).mean(0)
        between += torch.outer(apart, apart) / n
        for crop in features[i]:
            within += torch.outer(crop - means[i], crop - means[i]) / (n * q)
    values, vectors = torch.linalg.eigh(within + DELTA * torch.eye(d))
    root = vectors @ torch.diag(values**-0.5) @ vectors.T
    share = torch.linalg.eigvalsh(root @ between @ root)
    share = share / share.sum()
    assert lidar(features) == pytest.approx((-(share * share.log()).sum()).exp().item(), rel=1e-9)


def test_crops_that_do_not_differ_and_features_that_collapsed() -> None:
    one = torch.randn(50, 1, 6, generator=torch.Generator().manual_seed(0)).expand(50, 4, 6)
    assert lidar(one) == pytest.approx(6, abs=0.6)  # δ alone is in the way
    line = torch.randn(50, 4, 1) * torch.tensor([1.0, 2.0, 3.0])
    assert lidar(line) == pytest.approx(1, abs=1e-6)
    assert lidar(torch.ones(50, 4, 6)) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("shape", [(1, 5, 3), (5, 1, 3)])
def test_needs_several_images_and_crops(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="two crops or more of two images or more"):
        lidar(torch.randn(shape))
