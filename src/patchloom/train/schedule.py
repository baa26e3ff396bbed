"""Schedules are functions of the step: resuming restores a number and nothing else."""

import math


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """The learning rate of ``step`` in [0, steps): rising linearly to ``peak`` over ``warmup``, then a cosine to 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def points(steps: int, share: float) -> set[int]:
    """Steps after which something happens that is to happen every ``share`` of the training; the last always is one."""
    wanted = max(1, round(1 / share))
    return {round(steps * i / wanted) for i in range(1, wanted + 1)}
