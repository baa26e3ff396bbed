"""Estimates of time and memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from patchloom import estimate
from patchloom.estimate import Estimate, count_step, scaled_seconds, seconds_of, time_steps, typical_seconds


@pytest.fixture
def clock(monkeypatch):
    """Clock that only advances when work does."""
    clock = SimpleNamespace(now=0.0)
    clock.work = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: clock.now)
    return clock


def test_seconds_are_scaled_by_the_images():
    """A step of n images takes 1 + n/100 seconds; the second does not depend on the number."""
    few, some = (32, 1.32), (320, 4.2)
    assert scaled_seconds(10_000, few, some) == pytest.approx(101)
    assert scaled_seconds(320, few, some) == scaled_seconds(320, (0, 0.0), some) == 4.2
    assert scaled_seconds(1000, few, (64, 1.3)) == 1.3, "more images never take less time"


def test_timing_is_interleaved_after_a_warm_up_round(clock):
    order = []
    ways = {"one": lambda: order.append("one"), "two": lambda: (order.append("two"), clock.work(0.01))}
    assert seconds_of(ways, rounds=3) == {"one": [0.0] * 3, "two": [pytest.approx(0.01)] * 3}
    assert order == ["one", "two"] * 4


def test_more_steps_are_timed_while_there_is_time(clock):
    lasting = iter([9.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert time_steps(lambda: clock.work(next(lasting)), least=3) == [1, 2, 3], "the first does not count"
    lasting = iter([9.0])
    assert time_steps(lambda: clock.work(next(lasting)), least=1, warm_up=False) == [9]
    for options, count in (
        ({"least": 2, "seconds": 1.0}, 4),
        ({"least": 2, "seconds": 1.0, "most": 3}, 3),
        ({"least": 2, "seconds": 1.0, "most": 1}, 2),  # as few as are needed
        ({"least": 9, "slow": 0.5}, 2),
        ({"least": 9, "slow": 0.1}, 1),
    ):
        assert len(time_steps(lambda: clock.work(0.25), **options)) == count


def test_one_slow_step_does_not_count_and_a_quota_does():
    assert typical_seconds([1.0, 1.0, 9.0]) == 1
    held_back = [0.01] * 5 + [0.05]  # every sixth step waits for the next period
    assert typical_seconds(held_back * 10) == pytest.approx(sum(held_back) / 6)
    assert typical_seconds([0.001, 0.003]) == pytest.approx(0.002)


def test_reading_is_beside_or_before_a_step():
    both = {"steps": 10, "step": 2.0, "reading": 1.0}
    assert Estimate(**both).total == 30
    assert Estimate(**both, apart=True).total == 20
    assert Estimate(**both, apart=True, shared=2.5).total == 25
    assert Estimate(steps=10, step=None).total is None


def test_a_step_is_counted_with_fake_tensors():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    found = count_step(model, "cpu", lambda: model(torch.zeros(32, 8)).sum())
    assert found is not None
    # images, and the ReLU's answer; both weights, twice forward and backward, but for the gradient of images
    assert found.kept == 4 * 32 * (8 + 16)
    assert found.flops == 2 * 32 * (2 * 8 * 16 + 3 * 16 * 4)
    weights = 4 * sum(weight.numel() for weight in model.parameters())
    assert 2 * weights + found.kept <= found.peak + 4 * 32 * 16 <= 4 * (weights + found.kept)


def test_a_model_that_needs_real_tensors_is_not_counted():
    model = nn.Linear(2, 2)
    assert count_step(model, "cpu", lambda: model(torch.zeros(1, 2)).sum() * model.weight.sum().item()) is None
