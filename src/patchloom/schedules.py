"""Learning-rate schedules as pure functions of the step, so that resuming needs only the step."""

from __future__ import annotations

import math

_LOW = 0.1  # share of the peak during a constant warm-up; MP3's value is not in the available text


def cosine_rate(step: float, steps: int, warmup: int, peak: float, least: float = 0.0) -> float:
    """Return the rate at ``step`` in [0, steps): a linear rise to ``peak`` in ``warmup`` steps, a cosine to ``least``.

    ``least`` is ``min_lr`` of MAE's program (util/lr_sched.py), whose warm-up begins at 0, too.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    return cosine_between(peak, least, (step - warmup) / max(1, steps - warmup))


def cosine_between(first: float, last: float, progress: float) -> float:
    """Return the value of half a cosine from ``first`` to ``last`` at a ``progress`` in [0, 1].

    It is the weight-decay schedule of DINO (``cosine_scheduler``) and I-JEPA (``CosineWDSchedule``).
    """
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * progress))


def warmup_again(began: int, steps: int, warmup: int) -> int:
    """Return the warm-up steps of a schedule that begins at step ``began`` of a run that is extended.

    They are a tenth of the added steps, and at most the first warm-up. A run that has not ended before keeps its own.
    """
    return min(warmup, round((steps - began) / 10)) if began else warmup


def halving_rate(step: int, warmup: int, peak: float, every: int) -> float:
    """Return the rate at ``step``: a tenth of ``peak`` for ``warmup`` steps, then ``peak`` halved each ``every`` steps.

    MP3 trains its speech models this way (section 4.3). Steps are counted from the first of the training.
    """
    return peak * _LOW if step < warmup else peak * 0.5 ** (step // every)
