"""Which runs are meant by the folders that somebody gives: that of a comparison stands for all runs that are in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from patchloom.errors import PatchloomError
from patchloom.runs.folder import RunFolder
from patchloom.runs.sealed import read_sealed

COMPARISON = "compare.yaml"  # which every comparison has, and no run
_PAGE = "report.html"  # which a comparison writes when it ends


class Places(NamedTuple):
    """What is on a page.

    Attributes:
        runs: folders of runs, in the order of what was given.
        said: a sentence on each comparison.
    """

    runs: list[Path]
    said: list[str]


def is_comparison(folder: Path) -> bool:
    """Whether a comparison was begun in a folder."""
    return (folder / COMPARISON).is_file()


def places_of(given: Sequence[Path]) -> Places:
    """The runs of folders of runs and of comparisons.

    Args:
        given: the folders; one that is no comparison's is taken as a run's, and not looked at.

    Raises:
        PatchloomError: a comparison has no run yet, or its plan cannot be read.
    """
    runs, said = list[Path](), list[str]()
    for folder in given:
        if not is_comparison(folder):
            runs.append(folder)
            continue
        its = [run for run in sorted(folder.iterdir()) if RunFolder(run).config.is_file()]
        if not its:
            raise PatchloomError(f"{folder} is a comparison in which no run has begun: wait until one trains")
        runs += its
        said.append(_said(folder, its))
    return Places(runs, said)


def _said(folder: Path, its: Sequence[Path]) -> str:
    """How many of a comparison's runs there are, and where it tells what it found."""
    there, finished = len(its), sum(RunFolder(run).read_summary() is not None for run in its)
    ended = finished if finished < there else "all of them"
    told = f"{there} of {max(there, _planned(folder))} runs are there, {ended} finished"
    where = f"; what it found is in {_PAGE}" if (folder / _PAGE).is_file() else ""
    return f"Comparison {folder.absolute().name}: {told}{where}."


def _planned(folder: Path) -> int:
    """How many runs a comparison has when it ends.

    Raises:
        PatchloomError: its plan cannot be read.
    """
    path = folder / COMPARISON
    plan = read_sealed(path)
    try:
        return len(plan["epochs"]) * int(plan["asked"]["seeds"])
    except (KeyError, TypeError, ValueError) as problem:
        raise PatchloomError(f"{path} is not the plan of a comparison: give the folders of its runs") from problem
