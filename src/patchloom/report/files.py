"""Sentences on a run's files: what could not be read, and what is there more than once."""

from __future__ import annotations

from patchloom.data.near import near_copies
from patchloom.data.sources.base import Source
from patchloom.errors import PatchloomError
from patchloom.report.gather import Gathered
from patchloom.runs.folder import line_of
from patchloom.sound import in_words
from patchloom.waiting import Waiting

_NAMED = 10  # of files that cannot be read


def files_of(run: Gathered, own: Source | None = None) -> list[str]:
    """What is to be said of the run's files.

    Args:
        run: whose.
        own: its data, to look at a few pairs of neighbours in name; without it near copies are not spoken of.
    """
    return [*_broken(run), *(in_words(one, run.sound) for one in [*_copies(run), *_near(own)])]


def _broken(run: Gathered) -> list[str]:
    try:
        names = run.folder.unreadable_names()
    except OSError as problem:
        return [f"{run.folder.unreadable.name} cannot be read ({problem.strerror})."]
    if not names:
        return ["All files that were met could be read."]
    more = f", and {len(names) - _NAMED:,} more: {run.folder.unreadable}" if len(names) > _NAMED else ""
    files = "file" if len(names) == 1 else "files"
    # names need not be UTF-8, and what cannot be written is shown as the bytes that it is
    some = ", ".join(name.encode("utf-8", "backslashreplace").decode() for name in map(line_of, names[:_NAMED]))
    return [f"{len(names):,} {files} could not be read, and left out: {some}{more}."]


def _copies(run: Gathered) -> list[str]:
    if "held_out_copies" not in run.data:
        return []
    if not run.data.get("held_out_looked", True):
        return ["Exact copies of the held-out images were not looked for."]
    count = len(run.data["held_out_copies"])
    if not count:
        return ["No image that was trained on is an exact copy of a held-out one."]
    copies, are = ("copy", "is") if count == 1 else ("copies", "are")
    return [f"{count:,} exact {copies} of held-out images {are} in the data, and not trained on."]


def _near(own: Source | None) -> list[str]:
    if own is None or not _may_be_near(own):
        return []
    try:
        with Waiting(f"looking for near copies in {own.name}"):
            found = near_copies(own)
    except PatchloomError as problem:
        return [f"Near copies could not be looked for: {problem}."]
    if found is None:
        return ["Images whose names are neighbours show no sign of being near copies of each other."]
    said = found.sentence()
    return [f"{said[0].upper()}{said[1:]}"]


def _may_be_near(own: Source) -> bool:
    """Whether `near_copies` looks at a source at all."""
    return len(own) > 0 and own.sound is None and own.groups is None and own.place(0) is not None
