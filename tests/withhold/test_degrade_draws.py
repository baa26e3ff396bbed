"""Random draws: uniform places, sizes and strengths, normal kernels, and errors."""

import pytest
import torch
from small import seeded

from patchloom.withhold.degrade import (
    draw_from,
    draw_index,
    draw_uniform,
    random_corners,
    random_kernels,
    random_places,
)


def test_places_are_uniform_and_fit():
    sizes, size = [(2, 5), (4, 3)], (4, 6)
    which = draw_index(2, 40_000, seeded(0))
    top, left = random_places(sizes, which, size, seeded(1))
    places = torch.bincount(top[which == 0] * 2 + left[which == 0]) / (which == 0).sum()
    assert len(places) == 6 and (places - 1 / 6).abs().max() < 0.01  # rows 0-2, columns 0-1
    assert (top[which == 1] == 0).all()
    columns = torch.bincount(left[which == 1]) / (which == 1).sum()
    assert len(columns) == 4 and (columns - 1 / 4).abs().max() < 0.01


def test_kernels_are_normal_around_the_mean_inside_and_zero_outside():
    sizes, b = [5, 7, 11], 6000
    which = draw_index(3, b, seeded(0))
    kernels = random_kernels(sizes, which, seeded(1), channels=2)
    assert kernels.shape == (b, 2, 11, 11) and kernels.dtype == torch.float32
    apart = torch.corrcoef(kernels[which == 2].flatten(2).transpose(0, 1).flatten(1))[0, 1]
    assert apart.abs() < 0.01  # channels are independent
    kernels, which = kernels.flatten(0, 1), which.repeat_interleave(2)
    for i, k in enumerate(sizes):
        own, edge = kernels[which == i], (11 - k) // 2
        inside = own[:, edge : 11 - edge, edge : 11 - edge]
        assert inside.shape[1:] == (k, k) and (inside != 0).all()
        assert own.abs().sum() == pytest.approx(inside.abs().sum().item(), rel=1e-5)
        assert inside.mean().item() == pytest.approx(1 / k**2, abs=5e-4)
        assert inside.std().item() == pytest.approx(0.02, rel=0.02)
        assert (inside.mean(0) - 1 / k**2).abs().max() < 2.5e-3  # uniform over the kernel
        assert (inside.std(0) - 0.02).abs().max() < 2e-3


@pytest.mark.parametrize(("init", "deviation"), [("kaiming", 2**0.5), ("xavier", 1.0)])
def test_kernels_as_convolutions_are_initialised_lie_around_zero(init, deviation):
    """The deviation is sqrt(2 / side²) and sqrt(2 / (2 side²)), with fan-in and fan-out of side²."""
    sizes, b = [5, 11], 4000
    which = draw_index(2, b, seeded(0))
    kernels = random_kernels(sizes, which, seeded(1), init=init)[:, 0]
    for i, k in enumerate(sizes):
        own, edge = kernels[which == i], (11 - k) // 2
        inside = own[:, edge : 11 - edge, edge : 11 - edge]
        assert own.abs().sum() == pytest.approx(inside.abs().sum().item(), rel=1e-5)
        assert inside.mean().abs() < 5e-3 and inside.std().item() == pytest.approx(deviation / k, rel=0.02)
    usual = random_kernels(sizes, which, seeded(1))[:, 0]  # with the same draws
    centre = (slice(None), 5, 5)
    side = torch.tensor(sizes)[which]
    torch.testing.assert_close((usual[centre] - 1 / side**2) / 0.02, kernels[centre] * side / deviation)


def test_draws_are_uniform():
    corners = random_corners(torch.tensor([[2.0, 3.0]]).expand(60_000, 2), seeded())
    places = (corners[:, 0] * 4 + corners[:, 1]).bincount() / 60_000
    assert len(places) == 12 and (places - 1 / 12).abs().max() < 0.01  # rows 0-2, columns 0-3
    which = draw_index(4, 40_000, seeded())
    assert which.dtype == torch.int64
    assert (torch.bincount(which) / 40_000 - 0.25).abs().max() < 0.01
    values, counts = draw_from([0, 0.3, 0.6], 30_000, seeded()).unique(return_counts=True)
    assert values.tolist() == pytest.approx([0, 0.3, 0.6]) and (counts / 30_000 - 1 / 3).abs().max() < 0.01
    twist = draw_uniform(0.2, 0.25, (30_000, 2), seeded())
    assert twist.shape == (30_000, 2) and twist.min() >= 0.2 and twist.max() <= 0.25
    assert (torch.histc(twist, 5, 0.2, 0.25) / 60_000 - 0.2).abs().max() < 0.01
