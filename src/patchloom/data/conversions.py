"""Conversions of images and recordings when they are read, with names and missing pixels of their channels.

`read_image` records them while a caller collects them. So any code that reads images can report their conversions, for
every kind of source, without opening a file twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np

from patchloom.data.notes import MAX_EXAMPLES, limit_examples

# text after "12 of 300 images"; for a single one, "have" becomes "has", and "are" becomes "is"
CONVERSIONS = {
    "alpha": "have an alpha channel, composited over white",
    "doubtful alpha": "have an alpha channel, composited over white, that varies like a picture: if it is a band of "
    "data, write it as no alpha channel (tifffile: extrasamples=['unspecified'], GDAL: ALPHA=NO), or as .npy",
    "bands": "have four bands, read as data",
    "channel pages": "have several pages, read as channels",
    "many channels": "have at least as many channels as rows or columns: arrays are read as [h w c], so transpose them "
    "if the channels come first",
    "colours": "are in CMYK or another colour space, and converted to RGB",
    "palette": "have a palette, and are converted to its colours",
    "turned": "are rotated or mirrored according to EXIF",
    "deep": "have more than 8 bits: 16-bit values are divided by 65,535",
    "bits": "are DICOM, or TIFF of 9 to 15 bits: values are divided by the largest that their bits can hold",
    "missing": "have missing pixels (no-data or NaN), which take the mean of their channel's other pixels",
    "no values": "have a channel without any value, read as 0",
    "CT": "are CT: -1,024 to 3,071 Hounsfield units become 0 to 1",
    "inverted": "are stored with white as 0, and inverted",
    "frames": "have several frames: only the first is read",
    "pages": "have several pages: only the first is read",
    "mixed": "have several channels, mixed to one by their mean",
    "resampled": "have another rate, and are resampled",
    "clipped": "have floating-point samples beyond +-1, which are clipped",
}


@dataclass
class Noticed:
    """Facts on an item that were noticed while it was read.

    Attributes:
        words: keywords of `CONVERSIONS` that apply to it.
        names: names of its channels; () without.
        missing: pixels that were missing and have been filled, bool [h w c]; None without.
    """

    words: set[str] = field(default_factory=set)
    names: tuple[str, ...] = ()
    missing: np.ndarray | None = None


_watched: ContextVar[Noticed | None] = ContextVar("watched", default=None)


@contextmanager
def collect_conversions() -> Iterator[Noticed]:
    """Collect facts on an item that is read inside this block, or the conversions of several."""
    before = _watched.set(found := Noticed())
    try:
        yield found
    finally:
        _watched.reset(before)


def is_collecting() -> bool:
    """Return whether conversions are collected, for checks that take time."""
    return _watched.get() is not None


def record_conversion(word: str) -> None:
    """Record a keyword of `CONVERSIONS` for the item that is being read."""
    if (found := _watched.get()) is not None:
        found.words.add(word)


def record_names(names: Callable[[], tuple[str, ...]]) -> None:
    """Record the names of the channels of the item that is being read, which are only found if they are collected."""
    if (found := _watched.get()) is not None:
        found.names = names()


def record_missing(missing: np.ndarray) -> None:
    """Record which pixels of the item that is being read are missing, bool [h w c]."""
    if (found := _watched.get()) is not None:
        found.missing = missing


class ConversionCounts:
    """Counts of what was noticed in many items, with the first ones of each kind.

    Attributes:
        counts: number of items by keyword.
        first: indices of the first items by keyword.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.first: dict[str, list[int]] = {}
        self._named: dict[tuple[str, ...], int] = {}  # by names of channels, the first item with these
        self._missing: dict[int, np.ndarray] = {}  # by number of channels, sums of the fractions

    def add(self, i: int, words: Iterable[str], names: tuple[str, ...] = (), missing: np.ndarray | None = None) -> None:
        """Add the conversions of item i, the names of its channels, and the fraction of missing pixels in each."""
        for word in words:
            self.counts[word] = self.counts.get(word, 0) + 1
            self.first[word] = sorted([*self.first.get(word, []), i])[:MAX_EXAMPLES]
        self._named.setdefault(names, i)
        if missing is not None:
            self._missing[len(missing)] = self._missing.get(len(missing), 0) + missing

    def names(self, count: int) -> tuple[str, ...]:
        """Return the names of the first item that has ``count`` channels with names, or empty ones."""
        return next((names for names in self._named if len(names) == count), ("",) * count)

    def missing(self, count: int) -> np.ndarray:
        """Return the sums over items of the fractions of missing pixels, float64 [count]."""
        return self._missing.get(count, np.zeros(count))

    def sentences(self, name: Callable[[int], str], of: int, images: str = "images") -> list[str]:
        """Return a sentence for each keyword, the most frequent first, and one on channels that differ."""
        said = []
        for word, count in sorted(self.counts.items(), key=lambda one: (-one[1], one[0])):
            verb, _, rest = CONVERSIONS[word].partition(" ")
            verb = {"have": "has", "are": "is"}[verb] if count == 1 else verb
            said.append(
                f"{count:,} of {of:,} {images} {verb} {rest} ({limit_examples(map(name, self.first[word]), count)})"
            )
        if len(self._named) > 1:
            (names, i), (other, k), *_ = self._named.items()
            if {*other} > {*names}:  # the first one lacks something
                (names, i), (other, k) = (other, k), (names, i)
            lacks = [name for name in names if name not in other]
            what = f"lacks {limit_examples(lacks)} of" if lacks else "has in another order the channels of"
            shared = "+".join(name for name in names if name in other) or "NAME+NAME"
            said.append(f"{name(k)} {what} {name(i)}: @bands={shared} takes channels by name from each file")
        return said
