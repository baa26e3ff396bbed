"""Sentences on files: how many are left out, and a few of their names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice

MAX_EXAMPLES = 3  # files that a sentence names


def limit_examples(examples: Iterable[object], of: int = 0, most: int = MAX_EXAMPLES) -> str:
    """Join the first names, with an ellipsis if there are more, here or ``of`` all; other bytes than UTF-8 are escaped.

    Args:
        examples: names.
        of: number of all names, if these are the first ones only.
        most: most names to show.
    """
    found = [str(name).encode("utf-8", "backslashreplace").decode() for name in islice(examples, most + 1)]
    shown = found[:most]
    return ", ".join([*shown, "..."] if max(of, len(found)) > len(shown) else shown)


def count_of(count: int, what: str, verb: str = "") -> str:
    """Return a number of things, such as "1 file" or "1,200 files", and "was" or "were" if ``verb`` is "were"."""
    singular = {"were": "was", "are": "is", "have": "has"}
    words = [what, singular.get(verb, verb)] if count == 1 else [f"{what}s", verb]
    return " ".join([f"{count:,}", *filter(None, words)])


def left_out(names: Collection[str], why: str, what: str = "file", remedy: str = "") -> list[str]:
    """Return a sentence on files that are left out, ``why`` and how to use them; none if there are none."""
    return [f"{count_of(len(names), what, 'were')} left out{why} ({limit_examples(names)}){remedy}"] if names else []


def note_on_splits(train: str, test: str, left: Mapping[str, str], move: str) -> str:
    """Return a sentence on splits of a data set that are used neither for training nor as the test."""
    places = " and ".join(f"{name} ({size})" for name, size in left.items())
    are, them = ("is", "it") if len(left) == 1 else ("are", "them")
    taken = f"{train} is trained on, {test} is the test, and" if test else f"{train} is trained on, and"
    choice = f"choose between runs by {them}, or {move.format(them)} to train on {them}"
    return f"{taken} {places} {are} {'neither' if test else 'not'}: {choice}"
