"""Nearest vectors of a file, or of several parts, to that of one image."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from patchloom.data.decode import Unreadable
from patchloom.data.source import Data, Source
from patchloom.data.sources.glob import is_single, open_images
from patchloom.embed.formats import iterate_rows
from patchloom.embed.parts import path_of
from patchloom.errors import PatchloomError

_LEAST = 1e-12  # the length of a vector, as torch's normalize has it
_ROUNDED = 1e-6  # between the cosines of one pair in two products
_SAMPLED, _SAMPLED_BYTES = 1000, 2**26  # most rows whose pairs are the scale, and most bytes of them


class Neighbour(NamedTuple):
    """Row of a file near to an image.

    Attributes:
        path, split, label: of the row; no label is None.
        cosine: of the vectors without the mean of the file's rows.
        itself: whether it is the row of the image itself.
        rank: 1 for the nearest; 0 for the image itself.
        as_near: fraction of the pairs of rows with this cosine or a larger one, from a sample of rows; nan if there are
            none.
    """

    path: str
    split: str
    label: str | None
    cosine: float
    itself: bool
    rank: int = 0
    as_near: float = math.nan


def open_one(image: str | Path) -> Data:
    """A single image, or recording, as a source."""
    path = Path(image).expanduser()
    if not path.is_file():
        raise PatchloomError(f"--near cannot be {image}: there is no such file; give the path of one image")
    if not is_single(str(path)):
        raise PatchloomError(f"--near cannot be {image}: it is neither an image nor a recording by its ending")
    opened = open_images([str(path)], str(image))
    try:
        opened.train.read(0)
    except Unreadable as problem:
        raise PatchloomError(f"--near cannot be {image}, which cannot be read ({problem}): give another") from problem
    return opened


def matching_rows(image: str | Path, sources: Mapping[str, Source]) -> set[tuple[str, str]]:
    """Split and path of the rows that are the very file ``image``, of sources by their split."""
    asked = Path(image).expanduser()
    found = set()
    for split, source in sources.items():
        for i in range(len(source)):
            place = source.place(i)  # cheaper than the whole path, of a million images
            if place and place.rpartition("/")[2] == asked.name and _same(source.describe(i), asked):
                found.add((split, path_of(source, i)))
    return found


def _same(path: str, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):  # inside of a shard, for example
        return False


def nearest_rows(
    files: Sequence[Path], vector: np.ndarray, top: int, own: Collection[tuple[str, str]] = ()
) -> list[Neighbour]:
    """Return the rows of files whose cosine to ``vector`` is largest, the nearest first; equal ones in file order.

    The mean of the files' vectors is taken from all first: encoders give all images much in common, which crowds plain
    cosines near 1. Vectors in the file stay as they are. Centred cosines of the nearest may still be crowded, so each
    comes with the fraction of pairs of rows that are as near.

    Of patch tokens all stand in a row, so that each is compared with that at the same place.
    """
    total, count = np.zeros(vector.size), 0
    for some in iterate_rows(files):
        total += some.vectors.reshape(len(some.vectors), -1).sum(0, dtype=np.float64)
        count += len(some.vectors)
    mean = total / max(1, count)
    if count < 2:  # nothing to centre by
        mean[:] = 0
    query = _unit(vector.reshape(1, -1) - mean)[0]
    sampled = np.sort(
        np.random.default_rng(0).permutation(count)[: max(2, min(_SAMPLED, _SAMPLED_BYTES // mean.nbytes))]
    )
    sample, start = list[np.ndarray](), 0
    best: list[Neighbour] = []
    for some in iterate_rows(files):
        units = _unit(some.vectors.reshape(len(some.vectors), -1) - mean)
        sample.append(units[sampled[(sampled >= start) & (sampled < start + len(units))] - start])
        start += len(units)
        cosines = units @ query
        for i in np.argsort(-cosines, kind="stable")[: top + len(own)]:
            place = (some.splits[i], some.paths[i])
            best.append(Neighbour(place[1], place[0], some.labels[i], float(cosines[i]), place in own))
        best = sorted(best, key=lambda one: -one.cosine)[: top + len(own)]
    others = [one for one in best if not one.itself][:top]
    found = [one for one in best if one.itself or one in others]
    ranks = [0 if one.itself else others.index(one) + 1 for one in found]
    pairs = _pairs(np.concatenate(sample)) if sample else np.empty(0, np.float32)
    as_near = [float(np.mean(pairs >= one.cosine - _ROUNDED)) if len(pairs) else math.nan for one in found]
    return [one._replace(rank=r, as_near=a) for one, r, a in zip(found, ranks, as_near, strict=True)]


def _pairs(units: np.ndarray) -> np.ndarray:
    """Cosines [m (m - 1) / 2] of all pairs of vectors [m d] of length 1."""
    return (units @ units.T)[np.triu_indices(len(units), 1)]


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors [m d] of length 1, float32."""
    wide = vectors.astype(np.float32)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), _LEAST)
