"""What ends a run from outside, in one sentence: too little memory, a full disc, a process that died."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from patchloom.data.workers import lost_worker
from patchloom.errors import PatchloomError
from patchloom.files import mendable
from patchloom.memory import memory_shortage
from patchloom.processes import world
from patchloom.runs.settings import Settings
from patchloom.tasks import images_needed

_LOST = re.compile(r"connection|gloo|nccl|socket|timed? ?out|broken pipe|store", re.IGNORECASE)
LOST = (
    "another process of this training has died, so this one stops, too: see what was printed before this, then run the "
    "same command again, which goes on from the last checkpoint"
)


@contextmanager
def explained(settings: Settings) -> Iterator[None]:
    """While entered, what the user can mend is raised as a `PatchloomError` that says how."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as problem:
        sentence = lost_worker(problem) or mendable(problem)
        if sentence is None and died(problem):
            sentence = PatchloomError(LOST)
        if sentence is None and (need := memory_shortage(problem)):
            sentence = PatchloomError(too_little_memory(need, settings))
        if sentence is None:
            raise
        raise sentence from problem


def too_little_memory(need: str, settings: Settings) -> str:
    """Which setting to lower; ``need`` says what was needed, and what there is."""
    less = smaller_steps(settings)
    if not settings.checkpointing:
        less += ", or try --checkpointing true"
    return f"steps of {settings.batch_size} images need more memory than there is ({need}): {less}, with another --out"


def smaller_steps(settings: Settings) -> str:
    """What to do where steps of resolved ``settings`` need too much memory; nothing that would be refused."""
    if halvable(settings):
        return "halve --batch_size and double --accumulate, which keeps the size of an update"
    return "use smaller images or a smaller --model"


def halvable(settings: Settings) -> bool:
    """Whether half as many images a step, of resolved ``settings``, are enough for the task and for all processes."""
    return settings.batch_size // 2 >= max(images_needed(settings.task)[0], world())


def died(problem: BaseException) -> bool:
    """Whether ``problem`` means that another process has died."""
    return world() > 1 and isinstance(problem, RuntimeError) and bool(_LOST.search(str(problem)))
