"""The verdict on a run, so far or at its end, as it is kept in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from patchloom.errors import PatchloomError
from patchloom.runs.sealed import read_sealed, write_sealed

_FILE = "verdict.yaml"


class Health(NamedTuple):
    """What can be said of a run in a few words.

    Attributes:
        verdict: "healthy", "learning but weak", "collapsed", "not learning", or "too early to tell".
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


def write_health(folder: Path, health: Health) -> None:
    """Keep a verdict in a run's folder; it replaces the one before.

    Raises:
        PatchloomError: it cannot be written.
    """
    write_sealed(folder / _FILE, health._asdict())


def read_health(folder: Path) -> Health | None:
    """The last verdict on a run; None where there is none yet, or a damaged one."""
    try:
        return Health(**read_sealed(folder / _FILE))
    except (PatchloomError, TypeError, OSError):
        return None
