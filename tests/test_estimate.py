"""Estimates of time and memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from patchloom import estimate
from patchloom.estimate import Estimate, count_step, scaled_seconds, time_steps, typical_seconds


@pytest.fixture
def clock(monkeypatch):
    """Clock that only advances when work does."""
    clock = SimpleNamespace(now=0.0)
    clock.work = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: clock.now)
    return clock


def test_seconds_are_scaled_by_the_images(clock):
    done, sizes = [], {"few": 32, "some": 320, "slow": 6.0}

    def work(count: int) -> None:
        done.append(count)
        clock.work(1 + 0.01 * count)  # a second whatever the number

    for n, seconds, counts in ((10_000, 101, [32, 32, 320]), (100, 2, [32, 32, 100]), (20, 1.2, [20])):
        done.clear()
        assert scaled_seconds(work, n, **sizes) == pytest.approx(seconds) and done == counts
    done.clear()
    slow = scaled_seconds(lambda count: work(100 * count), 10_000, **sizes)  # twice as many are enough
    assert slow == pytest.approx(10_001) and done == [3200, 3200, 6400]


def test_more_steps_are_timed_while_there_is_time(clock):
    lasting = iter([9.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert time_steps(lambda: clock.work(next(lasting)), least=3) == [1, 2, 3], "the first does not count"
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


def test_parts_add_up_and_reading_is_beside_or_before():
    both = {"steps": 10, "step": 2.0, "reading": 1.0}
    assert Estimate(**both).total == 30
    assert Estimate(**both, apart=True).total == 20
    assert Estimate(**both, apart=True, shared=2.5).total == 25
    assert Estimate(**both, start=1, validation=2, end=3).total == 36
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
