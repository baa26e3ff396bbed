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
MOST_SEEDS = 20  # beyond which more seeds are no advice
_MOST_STEPS = 73  # of a tenth more images each: beyond a thousand times as many, they are none either


class Spread(NamedTuple):
    """How far seeds move an accuracy: its variance, pooled over tasks, and the degrees of freedom of that."""

    variance: float
    freedom: int


class Difference(NamedTuple):
    """How much higher one accuracy is than another on the same images.

    Attributes:
        points: the difference of the means over seeds, in [-1, 1].
        low, high: its 95 % interval over images and, where it is known, over seeds.
        images, seeds: half of the interval that comes from each; the second is 0 where there is one seed.
        spread: of the seeds, from which the second one is.
    """

    points: float
    low: float
    high: float
    images: float
    seeds: float
    spread: Spread

    @property
    def apart(self) -> bool:
        """Whether the two are told apart: the interval excludes zero."""
        return self.low > 0 or self.high < 0

    def text(self) -> str:
        """Formatted as "+2.1 points [+0.4, +3.8]"."""
        points, low, high = (100 * one for one in (self.points, self.low, self.high))
        return f"{points:+.1f} points [{low:+.1f}, {high:+.1f}]"


def spread_of(scores: Sequence[Tensor]) -> Spread:
    """The variance over seeds that tasks have in common, as in Student's test of two samples.

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
    part over seeds is Student's interval with the pooled variance; what was not trained, and has one row, has no part
    in it. Both are added as squares, which counts the chance of an image in a seed in both, and makes the interval
    rather too wide than too narrow.

    Args:
        one, other: [s n] whether each image was classified rightly, with as many seeds as each has.
        spread: of the seeds.
    """
    gains = one.double().mean(0) - other.double().mean(0)
    n = len(gains)
    total, middle = n + 2, gains.sum().item() / (n + 2)
    variance = (gains.square().sum().item() + 1) / total - middle * middle
    images = _Z * math.sqrt(variance / total)
    seeds = _over_seeds(spread, sum(1 / len(right) for right in (one, other) if len(right) > 1))
    reach = math.hypot(images, seeds)
    return Difference(gains.mean().item(), middle - reach, middle + reach, images, seeds, spread)


def _over_seeds(spread: Spread, shares: float) -> float:
    """Half of Student's interval of a difference, with the sum of one over the seeds of each side."""
    if not spread.freedom:
        return 0.0
    return float(stats.t.ppf(0.975, spread.freedom)) * math.sqrt(spread.variance * shares)


@dataclass(frozen=True)
class Standing:
    """Who is ahead.

    Attributes:
        order: tasks from best to worst by their means over seeds.
        means: of each task and control, in [0, 1].
        against: by task, how far the first one is ahead of it; and of each control, and of all else.
        winner: the first one, if it is told apart from all other tasks and is better than every control, over images
            and seeds; else "".
        level_with: tasks from which the first one is not told apart.
        unbeaten: controls from which the first one is not told apart, or which are better.
        seeds: of each task.
    """

    order: tuple[str, ...]
    means: dict[str, float]
    against: dict[str, Difference]
    winner: str
    level_with: tuple[str, ...]
    unbeaten: tuple[str, ...]
    seeds: int


def standing(
    tasks: Mapping[str, Tensor], controls: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None
) -> Standing:
    """Who is ahead, and whether it may be called the winner.

    A winner has to be told apart from every other task, and from what needs no training, each by its own 95 %
    interval: where nothing could be learnt, all of these would have to be wrong at once. How far seeds move a
    difference of two tasks is told by the seeds of these two alone, since tasks that stand still at chance would say
    too little of one that does not; of anything else, by those of the two best tasks. One seed of each says nothing of
    that, so that it names no winner.

    Args:
        tasks: [s n] by name, whether each test image was classified rightly by the encoder of each seed.
        controls: likewise what needs no training; with one seed or several.
        others: likewise what stands beside them, and is no bar.
    """
    everyone = {**controls, **tasks}
    means = {name: right.double().mean().item() for name, right in everyone.items()}
    order = tuple(sorted(tasks, key=lambda name: -means[name]))
    first = tasks[order[0]]
    spread = spread_of([tasks[name] for name in order[:2]])
    against = {name: difference(first, tasks[name], spread_of([first, tasks[name]])) for name in order[1:]}
    against |= {name: difference(first, right, spread) for name, right in {**controls, **(others or {})}.items()}
    level = tuple(name for name in order[1:] if not against[name].low > 0)
    unbeaten = tuple(name for name in controls if not against[name].low > 0)
    winner = "" if level or unbeaten or len(first) == 1 else order[0]
    return Standing(order, means, against, winner, level, unbeaten, len(first))


def enough(found: Difference, seeds: int, images: int) -> str:
    """What budget would tell two encoders apart, if both stay as far apart as they are: a clause, "" where none would.

    More seeds are asked for first, since they cost no labels, where they could suffice; else more test images, with
    as many seeds as leave them half of the interval.

    Args:
        found: their difference.
        seeds: of each; two or more.
        images: of the test.
    """
    gap = abs(found.points)
    budgets = range(seeds, MOST_SEEDS + 1)
    parts = {more: _over_seeds(found.spread._replace(freedom=2 * (more - 1)), 2 / more) for more in budgets}

    def apart(more: int, n: int) -> bool:
        """As `difference` has it, with its centre that a few images draw towards zero."""
        return gap * n / (n + 2) > math.hypot(found.images * math.sqrt(images / n), parts[more])

    more = next((more for more in budgets if apart(more, images)), 0)
    if more > seeds:
        return f"{more} seeds of each task"
    more = next((more for more in budgets if parts[more] <= gap / math.sqrt(2)), 0)
    sizes = (math.ceil(images * 1.1**step) for step in range(1, _MOST_STEPS))
    needed = next((n for n in sizes if more and apart(more, n)), 0)
    if not needed:
        return ""
    return f"some {_two_digits(needed):,} labelled test images" + (f" and {more} seeds of each task" * (more > seeds))


def _two_digits(number: int) -> int:
    """Rounded up, to two digits."""
    unit = 10 ** max(0, len(str(number)) - 2)
    return -(-number // unit) * unit
