"""The verdict on a run, so far or at its end, as it is kept in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from patchloom.errors import PatchloomError
from patchloom.runs.checksummed import read_checksummed, write_checksummed

_FILE = "verdict.yaml"

HEALTHY, WEAK, COLLAPSED = "healthy", "learning but weak", "collapsed"
NOT_LEARNING, EARLY, UNKNOWN = "not learning", "too early to tell", "nothing can be told"
VERDICTS = (HEALTHY, WEAK, COLLAPSED, NOT_LEARNING, EARLY, UNKNOWN)


def no_labels(noun: str = "images") -> str:
    """What the closing sentence of a run without labels ends with."""
    return (
        f"The {noun} have no labels, so this says how well the pretext task is done, and not what the features are "
        "good for."
    )


class Health(NamedTuple):
    """What can be said of a run in a few words.

    Attributes:
        verdict: one of `VERDICTS`; the last of them where the images are too few, or nearly all the same.
        why: the figure that says so, in words.
        then: what to try next; "" where there is nothing to do.
        epoch: when it was found, in epochs.
        ended: whether that was the end.
    """

    verdict: str
    why: str
    then: str
    epoch: float
    ended: bool

    def __str__(self) -> str:
        return f"{self.verdict}: {self.why}." + (f" Next: {self.then}." if self.then else "")


def write_health(folder: Path, health: Health) -> None:
    """Keep a verdict in a run's folder; it replaces the one before."""
    write_checksummed(folder / _FILE, health._asdict())


def read_health(folder: Path) -> Health | None:
    """The last verdict on a run; None where there is none yet, or a damaged one."""
    try:
        return Health(**read_checksummed(folder / _FILE))
    except (PatchloomError, TypeError, OSError):
        return None
