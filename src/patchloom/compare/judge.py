"""What may be said of encoders that were scored on the same images: who is ahead, and by what that is told.

Letters: s seeds, n test images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy import stats
from torch import Tensor

_Z = 1.959963984540054  # standard normal quantile of a 95 % interval
_MOST_SEEDS = 20  # beyond which more seeds are no advice


class Difference(NamedTuple):
    """How much higher one accuracy is than another on the same images.

    Attributes:
        points: the difference of the means over seeds, in [-1, 1].
        low, high: its 95 % interval over images and, where it is known, over seeds.
        images, seeds: half of the interval that comes from each; the second is 0 where there is one seed.
    """

    points: float
    low: float
    high: float
    images: float
    seeds: float

    @property
    def apart(self) -> bool:
        """Whether the two are told apart: the interval excludes zero."""
        return self.low > 0 or self.high < 0

    def text(self) -> str:
        """Formatted as "+2.1 points [+0.4, +3.8]"."""
        points, low, high = (100 * one for one in (self.points, self.low, self.high))
        return f"{points:+.1f} points [{low:+.1f}, {high:+.1f}]"


class Spread(NamedTuple):
    """How far seeds move an accuracy: its variance, pooled over tasks, and the degrees of freedom of that."""

    variance: float
    freedom: int


def spread_of(scores: Sequence[Tensor]) -> Spread:
    """The variance over seeds that tasks have in common, as in an analysis of variance.

    Two or three seeds of one task say next to nothing of it; those of all tasks together say something.

    Args:
        scores: [s n] whether each image was classified rightly, of each task.
    """
    squares, freedom = 0.0, 0
    for right in scores:
        means = right.double().mean(1)
        squares += (means - means.mean()).square().sum().item()
        freedom += len(means) - 1
    return Spread(squares / freedom if freedom else 0.0, freedom)


def difference(one: Tensor, other: Tensor, spread: Spread) -> Difference:
    """How much more images of the same test are classified rightly by one, with an interval over images and seeds.

    The part over images is that of the paired difference of each image's mean over seeds, with half a case added to
    each outcome (Agresti and Min 2005), so that it is `patchloom.evaluate.report.paired_difference` for one seed. The
    part over seeds is Student's interval with the pooled variance. Both are added as squares, which counts the chance
    of an image in a seed in both, and makes the interval rather too wide than too narrow.

    Args:
        one, other: [s n] whether each image was classified rightly, with as many seeds as each has.
        spread: of the seeds.
    """
    gains = one.double().mean(0) - other.double().mean(0)
    n = len(gains)
    total, middle = n + 2, gains.sum().item() / (n + 2)
    variance = (gains.square().sum().item() + 1) / total - middle * middle
    images = _Z * math.sqrt(variance / total)
    seeds = 0.0
    if spread.freedom:
        seeds = _student(spread.freedom) * math.sqrt(spread.variance * (1 / len(one) + 1 / len(other)))
    reach = math.hypot(images, seeds)
    return Difference(gains.mean().item(), middle - reach, middle + reach, images, seeds)


def _student(freedom: int) -> float:
    return float(stats.t.ppf(0.975, freedom))


@dataclass(frozen=True)
class Standing:
    """Who is ahead.

    Attributes:
        order: tasks from best to worst by their means over seeds.
        means: of each task and control, in [0, 1].
        against: by task, how far the first one is ahead of it; and of each control.
        winner: the first one, if it is told apart from all other tasks and is better than every control; else "".
        level_with: tasks from which the first one is not told apart.
        unbeaten: controls from which the first one is not told apart, or which are better.
    """

    order: tuple[str, ...]
    means: dict[str, float]
    against: dict[str, Difference]
    winner: str
    level_with: tuple[str, ...]
    unbeaten: tuple[str, ...]
    spread: Spread
    seeds: int


def standing(tasks: Mapping[str, Tensor], controls: Mapping[str, Tensor]) -> Standing:
    """Who is ahead, and whether it may be called the winner.

    A winner has to be told apart from every other task, and from what needs no training, each by its own 95 %
    interval: where nothing could be learnt, all of these would have to be wrong at once.

    Args:
        tasks: [s n] by name, whether each test image was classified rightly by the encoder of each seed.
        controls: likewise what needs no training; with one seed or several.
    """
    everyone = {**controls, **tasks}
    means = {name: right.double().mean().item() for name, right in everyone.items()}
    order = tuple(sorted(tasks, key=lambda name: -means[name]))
    first, spread = order[0], spread_of([*tasks.values()])
    against = {name: difference(tasks[first], right, spread) for name, right in everyone.items() if name != first}
    level = tuple(name for name in order[1:] if not against[name].low > 0)
    unbeaten = tuple(name for name in controls if not against[name].low > 0)
    winner = "" if level or unbeaten else first
    return Standing(order, means, against, winner, level, unbeaten, spread, len(tasks[first]))


def enough(found: Difference, spread: Spread, tasks: int, seeds: int, images: int) -> str:
    """What budget would tell two tasks apart, if both stay as far apart as they are: a clause, "" where none would.

    Args:
        found: their difference.
        spread: of the seeds.
        tasks: that were trained, whose seeds are pooled.
        seeds: of each.
        images: of the test.
    """
    gap = abs(found.points)
    if not gap:
        return ""
    if found.images < gap and spread.freedom:
        for more in range(seeds + 1, _MOST_SEEDS + 1):
            part = _student(tasks * (more - 1)) * math.sqrt(2 * spread.variance / more)
            if math.hypot(found.images, part) < gap:
                return f"{more} seeds of each task"
        return ""
    rest = math.sqrt(max(0.0, gap * gap - found.seeds * found.seeds))
    if rest <= 0:
        rest = gap / math.sqrt(2)  # half for the images, half for the seeds
    needed = math.ceil(images * (found.images / rest) ** 2)
    also = " and several times as many seeds" if found.seeds >= gap else ""
    return f"some {_two_digits(needed):,} labelled test images{also}" if needed <= 1000 * images else ""


def _two_digits(number: int) -> int:
    return int(float(f"{number:.2g}"))
