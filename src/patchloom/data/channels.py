"""Channels of images: a choice of them by name or number, and the statistics of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from patchloom.errors import PatchloomError

_LISTED = 64  # names that a message lists


class Channel(NamedTuple):
    """Statistics of a channel over the images that were read.

    Attributes:
        name: name in the files; "" if they have none.
        mean, std: over all pixels, in [0, 1] units.
        least, most: range of the values.
        missing: mean fraction of missing pixels in an image, which are filled.
        constant: fraction of the images in which the channel is constant.
    """

    name: str
    mean: float
    std: float
    least: float
    most: float
    missing: float
    constant: float


def is_listed(channels: Sequence[Channel]) -> bool:
    """Return whether channels deserve a line each: those of plain photographs, grey or RGB, do not."""
    return len(channels) not in (1, 3) or any(one.name or one.missing for one in channels)


def channel_rows(channels: Sequence[Channel]) -> list[tuple[str, ...]]:
    """Return a heading, and a row for each channel."""
    rows: list[tuple[str, ...]] = [("channel", "name", "mean", "std", "least", "most", "missing", "constant")]
    for number, (name, *values, missing, constant) in enumerate(channels, 1):
        rows.append((str(number), name, *(f"{one:.4f}" for one in values), f"{missing:.1%}", f"{constant:.1%}"))
    return rows


def choose_channels(words: Sequence[str], names: Sequence[str], count: int, file: str) -> tuple[int, ...]:
    """Return the places of the channels, from 0, that a user asked for by numbers, from 1, or by names.

    Args:
        words: numbers or names.
        names: names of all channels of the file; empty without.
        count: number of its channels.
        file: name of the file, for messages.

    Raises:
        PatchloomError: the file has no such channel, or two of that name.
    """
    plain, found = [name.strip().casefold() for name in names], list[int]()
    there = f"it has {count} channel{'s' * (count > 1)}"
    if names:
        listed = ", ".join(f"{number} {name}" for number, name in enumerate(names[:_LISTED], 1))
        there += f" ({listed}{', ...' * (count > _LISTED)})"
    for word in words:
        if word.isdecimal():
            if not 1 <= int(word) <= count:
                raise PatchloomError(f"{file} has no channel {word}: {there}, and their numbers begin with 1")
            found.append(int(word) - 1)
        elif plain.count(word.casefold()) == 1:
            found.append(plain.index(word.casefold()))
        else:
            twice = "has several channels of the name" if word.casefold() in plain else "has no channel"
            remedy = "give numbers" if word.casefold() in plain or not names else "give a name or a number of these"
            raise PatchloomError(f"{file} {twice} {word}: {there}{'' if names else ' without names'}; {remedy}")
    return tuple(found)
