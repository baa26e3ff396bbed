"""Channels of images: their names in files, a choice of them, missing pixels, and the statistics of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from patchloom.data.notes import limit_examples
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


# What is known of the channels of an item while it is read, as the conversions of `patchloom.data.conversions`.


@dataclass
class _Seen:
    """Facts on the channels of an item.

    Attributes:
        names: names of its channels; empty without.
        missing: pixels that were missing and have been filled, bool [h w c]; None without.
    """

    names: tuple[str, ...] = ()
    missing: np.ndarray | None = None

    def shares(self) -> np.ndarray | None:
        """Return the fraction of missing pixels in each channel, float64 [c]; None without."""
        return None if self.missing is None else self.missing.mean((0, 1))


_watched: ContextVar[_Seen | None] = ContextVar("watched", default=None)


@contextmanager
def collect_channels() -> Iterator[_Seen]:
    """Collect facts on the channels of an item that is read inside this block."""
    before = _watched.set(found := _Seen())
    try:
        yield found
    finally:
        _watched.reset(before)


def record_names(names: Callable[[], tuple[str, ...]]) -> None:
    """Record the names of the channels of the item that is being read, which are only found if they are collected."""
    if (found := _watched.get()) is not None:
        found.names = names()


def record_missing(missing: np.ndarray) -> None:
    """Record which pixels of the item that is being read are missing, bool [h w c]."""
    if (found := _watched.get()) is not None:
        found.missing = missing


class ChannelCounts:
    """Names and missing pixels of the channels of many items."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, ...], int] = {}  # by names, the first item with these
        self._missing: dict[int, np.ndarray] = {}  # by number of channels, sums of the fractions

    def add(self, i: int, names: tuple[str, ...], missing: np.ndarray | None) -> None:
        """Add the names of item i, and the fractions of missing pixels."""
        self._first.setdefault(names, i)
        if missing is not None:
            self._missing[len(missing)] = self._missing.get(len(missing), 0) + missing

    def names(self, count: int) -> tuple[str, ...]:
        """Return the names of the first item that has ``count`` of them, or empty ones."""
        return next((names for names in self._first if len(names) == count), ("",) * count)

    def missing(self, count: int) -> np.ndarray:
        """Return the sums over items of the fractions of missing pixels, float64 [count]."""
        return self._missing.get(count, np.zeros(count))

    def sentences(self, describe: Callable[[int], str]) -> list[str]:
        """Return a sentence if names or their order differ between items."""
        if len(self._first) < 2:
            return []
        (names, i), (other, k), *_ = self._first.items()
        if {*other} > {*names}:  # the first one lacks something
            (names, i), (other, k) = (other, k), (names, i)
        lacks = [name for name in names if name not in other]
        what = f"lacks {limit_examples(lacks)} of" if lacks else "has in another order the channels of"
        shared = "+".join(name for name in names if name in other) or "NAME+NAME"
        return [f"{describe(k)} {what} {describe(i)}: @bands={shared} takes channels by name from each file"]
