"""Survey of a source: sizes, formats, statistics, broken files and copies, from reading every item once.

About forty bytes are stored per image, so that a source of a million images needs little memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.decode import head_of
from patchloom.data.conversions import ConversionCounts
from patchloom.data.decode import open_pillow, silence_decoders
from patchloom.data.reading import Pass, sample_indices
from patchloom.data.source import Source
from patchloom.data.stats import Moments, Stats

_SILENT = 2**15 // 1000  # largest deviation of the samples of a silent recording from their middle
_ROW = np.dtype(
    [
        ("index", np.int64),
        ("height", np.int32),
        ("width", np.int32),
        ("channels", np.int32),
        ("deep", np.bool_),
        ("flat", np.bool_),
        ("digest", "V16"),
    ]
)


@dataclass(frozen=True, eq=False)
class Survey:
    """Results of reading the images or recordings of a source.

    Attributes:
        source: source of the images.
        rows: one for each image that could be read, in the order of the source: its index, height, width and channels,
            whether it is deep (more than 8 bits) and flat (of one colour), and the digest of its pixels. For a
            recording, the width is its number of samples at the rate at which it is read, and flat means silent.
        moments: moments of the pixels, by number of channels.
        kinds: number of readable files by PIL's format and mode, such as "PNG RGB", or by suffix if PIL knows neither;
            of sound files by kind, rate and channels.
        broken: index and reason of the images that could not be read.
        noticed: conversions of images when they were read, such as compositing an alpha channel over white, and names
            and missing pixels of their channels.
    """

    source: Source
    rows: np.ndarray
    moments: dict[int, Moments]
    kinds: dict[Any, int]
    broken: tuple[tuple[int, str], ...]
    noticed: ConversionCounts

    @property
    def tried(self) -> int:
        """Number of images tried: all of them, or a sample."""
        return len(self.rows) + len(self.broken)

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """Groups of images with the same size, depth and pixels, by index."""
        _, group, count = np.unique(self.rows["digest"], return_inverse=True, return_counts=True)
        places = np.flatnonzero(count[group] > 1)
        order = places[np.argsort(group[places], kind="stable")]
        ends = np.flatnonzero(np.diff(group[order])) + 1
        groups = np.split(self.rows["index"][order], ends) if len(order) else []
        return tuple(sorted(tuple(group.tolist()) for group in groups))

    def name(self, i: int) -> str:
        """Return the name of image i, with bytes that are not UTF-8 escaped for the terminal."""
        return self.source.describe(i).encode("utf-8", "backslashreplace").decode()

    @property
    def repeated(self) -> int:
        """Number of images that are copies of an earlier one."""
        return sum(map(len, self.copies)) - len(self.copies)

    @property
    def flat(self) -> list[int]:
        """Indices of the images in which all pixels are equal, or of the recordings that are silent."""
        return self.rows["index"][self.rows["flat"]].tolist()

    def shared_with(self, other: Survey) -> list[tuple[int, int]]:
        """Find images with the same pixels in another survey: pairs of an index here, and the first such one there."""
        there, first = np.unique(other.rows["digest"], return_index=True)
        mine = self.rows[np.isin(self.rows["digest"], there)]
        place: np.ndarray | list[int] = first[np.searchsorted(there, mine["digest"])] if len(mine) else []
        return list(zip(mine["index"].tolist(), other.rows["index"][place].tolist(), strict=True))

    def smaller_than(self, height: float, width: float) -> int:
        """Return the number of images with fewer pixels in height or in width."""
        return int(((self.rows["height"] < height) | (self.rows["width"] < width)).sum())

    def examples(self) -> dict[int, str]:
        """Return by number of channels the name of the first image, and the number of others."""
        found = {}
        for channels in sorted(self.moments):
            those = self.rows["index"][self.rows["channels"] == channels]
            others = f" and {len(those) - 1:,} more" if len(those) > 1 else ""
            found[channels] = self.name(int(those[0])) + others
        return found

    def stats(self, channels: int) -> Stats:
        """Return the statistics of `statistics_of` for all images that were read; grey counts for each channel."""
        moments = Moments(channels)
        for part in self.moments.values():
            moments.join(part)
        height, width = (round(float(np.median(self.rows[side]))) for side in ("height", "width"))
        names = [self.source.describe(i) for i, _ in self.broken]
        channels_of_all = moments.channels(self.noticed)
        return Stats(*moments.mean_and_std(), height, width, len(self.rows), names, channels=channels_of_all)


def survey(source: Source, max_images: int | None = None, workers: int | None = None) -> Survey:
    """Read and decode the images or recordings of a source, and record their properties."""
    indices, what = sample_indices(len(source), max_images), f"reading the {source.noun} of"
    made = Pass(source, indices, partial(_properties, source), "auto" if workers is None else workers, what)
    rows = np.empty(len(indices), _ROW)
    read = 0
    moments: dict[int, Moments] = {}
    kinds: Counter[Any] = Counter()
    for _, (row, parts, kind) in made:
        rows[read] = row
        read += 1
        for part in parts:
            moments.setdefault(len(part.total), Moments(len(part.total))).join(part)
        if kind is not None:
            kinds[kind] += 1
    return Survey(source, rows[:read], moments, dict(kinds.most_common()), tuple(made.broken), made.noticed)


def _properties(
    source: Source, i: int, image: Tensor
) -> tuple[tuple[int | bool | bytes, ...], list[Moments], str | tuple[str, int, int] | None]:
    """Return the row of an item, its moments, and the kind of its file; none for something in a container."""
    path, (c, h, w) = Path(source.describe(i)), image.shape
    pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    digest = hashlib.blake2b(f"{pixels.shape} {pixels.dtype}".encode(), digest_size=16)
    digest.update(pixels.data)
    if source.sound is not None:
        samples = pixels.astype(np.int32)  # a constant offset (DC) is silent
        silent = bool(samples.max() - samples.min() <= 2 * _SILENT)
        row = i, h, w, c, False, silent, digest.digest()
        return row, [], head_of(path)[:3] if path.is_file() else None
    flat = bool((pixels[0] == pixels[0, 0]).all() and (pixels == pixels[0, 0]).all())
    row = i, h, w, c, image.dtype != torch.uint8, flat, digest.digest()
    kind = path.suffix[1:].upper() if path.is_file() else None
    if kind is not None:
        with suppress(Exception), silence_decoders(), open_pillow(path) as opened:  # PIL may not read this file
            kind = f"{opened.format} {opened.mode}"
    return row, Moments.of_parts(image), kind
