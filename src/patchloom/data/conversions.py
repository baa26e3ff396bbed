"""Conversions of images and recordings when they are read: a keyword for each kind, and its sentence.

`read_image` records the keywords while a caller collects them. So any code that reads images can report their
conversions, for every kind of source, without opening a file twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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

_watched: ContextVar[set[str] | None] = ContextVar("watched", default=None)


@contextmanager
def collect_conversions() -> Iterator[set[str]]:
    """Collect the keywords of `CONVERSIONS` that apply to items read inside this block."""
    found: set[str] = set()
    before = _watched.set(found)
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
        found.add(word)


class ConversionCounts:
    """Counts of conversions, with the first images of each kind.

    Attributes:
        counts: number of images by keyword.
        first: indices of the first images by keyword.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.first: dict[str, list[int]] = {}

    def add(self, i: int, words: Iterable[str]) -> None:
        """Add the conversions of image i."""
        for word in words:
            self.counts[word] = self.counts.get(word, 0) + 1
            self.first[word] = sorted([*self.first.get(word, []), i])[:MAX_EXAMPLES]

    def sentences(self, name: Callable[[int], str], of: int, images: str = "images") -> list[str]:
        """Return a sentence for each keyword, the most frequent first."""
        said = []
        for word, count in sorted(self.counts.items(), key=lambda one: (-one[1], one[0])):
            verb, _, rest = CONVERSIONS[word].partition(" ")
            verb = {"have": "has", "are": "is"}[verb] if count == 1 else verb
            said.append(
                f"{count:,} of {of:,} {images} {verb} {rest} ({limit_examples(map(name, self.first[word]), count)})"
            )
        return said
