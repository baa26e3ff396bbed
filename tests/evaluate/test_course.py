"""Course of a training: learning rates equal to timm's to the bit, and its length in words."""

from typing import Any

import pytest
import torch
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler

from patchloom.evaluate.course import Course
from patchloom.schedules import halving_rate

LENGTHS = [(1, 0), (2, 1), (7, 3), (20, 0), (30, 29), (100, 10), (1000, 333)]
PEAK = 0.1 / 3


def course(steps: int, **changes: Any) -> Course:
    own = {"per_epoch": 4, "unit": "epoch", "batch": 16, "peak": PEAK, "rate_option": "--blr (now 0.1)"}
    return Course(**{"steps": steps, **own, **changes})


def rates_of(scheduler: Scheduler, steps: int) -> list[float]:
    """Return timm's rate of each update, which counts from 1."""
    found = []
    for step in range(steps):
        scheduler.step_update(step + 1)
        found.append(scheduler.optimizer.param_groups[0]["lr"])
    return found


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)


@pytest.mark.parametrize(("steps", "warmup"), LENGTHS)
def test_rates_are_timms_to_the_bit(steps: int, warmup: int) -> None:
    # one more than the number of steps, so that the last rate is above 0
    rest, shared = steps - warmup + 1, {"warmup_t": warmup, "t_in_epochs": False}
    drops = (0.6, 0.85)
    expected = {
        "cosine": CosineLRScheduler(optimizer(), rest, warmup_prefix=True, **shared),
        "linear": PolyLRScheduler(optimizer(), rest, power=1.0, warmup_prefix=True, **shared),
        # timm lowers the rate at the number before a drop, and its updates count from 1
        "steps": MultiStepLRScheduler(
            optimizer(), [round(share * steps) + 2 for share in drops], 0.1, warmup_prefix=False, **shared
        ),
    }
    for decay, scheduler in expected.items():
        ours = course(steps, warmup=warmup, decay=decay, drops=drops)
        assert [ours.rate(step) for step in range(steps)] == rates_of(scheduler, steps), decay
        assert ours.rate(steps - 1) > 0


def test_a_halving_course_has_the_rates_of_speech() -> None:
    ours = course(30, warmup=5, decay="halving", halve_every=10)
    assert [ours.rate(step) for step in range(30)] == [halving_rate(step, 5, PEAK, 10) for step in range(30)]


@pytest.mark.parametrize(
    ("unit", "steps", "length", "position"),
    [
        ("epoch", 40, "10 epochs", "epoch 1.5 of 10"),
        ("epoch", 4, "1 epoch", "epoch 1.5 of 1"),
        ("update", 30_000, "30,000 updates", "update 6 of 30,000"),
        ("step", 1, "1 step", "step 6 of 1"),
    ],
)
def test_lengths_and_positions_are_in_the_unit(unit: str, steps: int, length: str, position: str) -> None:
    ours = course(steps, unit=unit)
    assert (ours.length, ours.position(6)) == (length, position)
