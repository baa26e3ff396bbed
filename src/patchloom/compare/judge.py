"""What may be said of encoders that were scored on the same images: who is ahead, and by what that is told.

Letters: s seeds, n test images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from patchloom.verdict import Claim, Difference, difference, student

MOST_SEEDS = 20  # beyond which more seeds are no advice
_MOST_STEPS = 73  # of a tenth more images each: beyond a thousand times as many, they are none either


@dataclass(frozen=True)
class Standing:
    """Who is ahead.

    Attributes:
        order: tasks from best to worst by their means over seeds.
        means: of each task and control, in [0, 1].
        against: by task, how far the first one is ahead of it; and of each control, and of all else.
        winner: the first one, if it is better than all other tasks and every control, by `Difference.claim`; else "".
        level_with: tasks than which the first one is not better, nor ahead with its one seed.
        unbeaten: controls than which the first one is not better, nor ahead with its one seed.
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

    A winner has to be better than every other task, and than what needs no training, each by its own 95 % interval:
    where nothing could be learnt, all of these would have to be wrong at once. How far seeds move a task is told by its
    own seeds alone, since tasks that stand still at chance would say too little of one that does not. One seed of each
    says nothing of that, so that it names no winner.

    Args:
        tasks: [s n] by name, whether each test image was classified rightly by the encoder of each seed.
        controls: likewise what needs no training; with one seed or several.
        others: likewise what stands beside them, and is no bar.
    """
    everyone = {**controls, **tasks}
    means = {name: right.double().mean().item() for name, right in everyone.items()}
    order = tuple(sorted(tasks, key=lambda name: -means[name]))
    first = tasks[order[0]]
    against = {
        name: difference(first, right, control=name)
        for name, right in {**{name: tasks[name] for name in order[1:]}, **controls, **(others or {})}.items()
    }
    level = tuple(name for name in order[1:] if not _ahead(against[name]))
    unbeaten = tuple(name for name in controls if not _ahead(against[name]))
    compared = [one.claim for name, one in against.items() if name in everyone]
    winner = order[0] if all(claim is Claim.BETTER for claim in compared) else ""
    return Standing(order, means, against, winner, level, unbeaten, len(first))


def _ahead(found: Difference) -> bool:
    """Whether the first one is better, or would be if its one seed were all."""
    return found.claim is Claim.BETTER or (found.claim is Claim.ONCE and found.value > 0)


def enough(found: Difference, seeds: int, images: int) -> str:
    """What budget would tell two encoders apart, if both stay as far apart as they are: a clause, "" where none would.

    More seeds are asked for first, since they cost no labels, where they could suffice; else more test images, with
    as many seeds as leave them half of the interval.

    Args:
        found: their difference.
        seeds: of each; two or more.
        images: of the test.
    """
    gap = abs(found.value)
    budgets = range(seeds, MOST_SEEDS + 1)
    deviation = found.over_seeds / student(found.freedom) * math.sqrt(seeds) if found.freedom else 0.0
    parts = {
        more: student(found.freedom * (more - 1) / (seeds - 1)) * deviation / math.sqrt(more) if deviation else 0.0
        for more in budgets
    }

    def apart(more: int, n: int) -> bool:
        """As `difference` has it, with its centre that a few images draw towards zero."""
        return gap * n / (n + 2) > math.hypot(found.over_images * math.sqrt(images / n), parts[more])

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
