"""Learning rates as functions of the step, which remember nothing: resuming restores a number and nothing else."""

from __future__ import annotations

import math

_LOW = 0.1  # share of the peak at which a constant warm-up goes; MP3's number is not in the text at hand


def cosine_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """The rate of ``step`` in [0, steps): rising linearly to ``peak`` over ``warmup`` steps, then a cosine to 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def warmup_again(began: int, steps: int, warmup: int) -> int:
    """Return the warm-up steps of a schedule that begins at step ``began`` of a run that is trained on.

    It is a tenth of the steps that are added, and no longer than the first warm-up. A run that has not ended before
    keeps its own.
    """
    return min(warmup, round((steps - began) / 10)) if began else warmup


def halving_rate(step: int, warmup: int, peak: float, every: int) -> float:
    """The rate of ``step``: a tenth of ``peak`` over ``warmup`` steps, then ``peak``, halved every so many steps.

    MP3 trains its speech models so (section 4.3). Steps are counted from the first of the training.
    """
    return peak * _LOW if step < warmup else peak * 0.5 ** (step // every)
