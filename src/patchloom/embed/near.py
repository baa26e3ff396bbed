"""Search for the nearest vectors to that of an image in a file or in several parts, and a picture of the result."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from patchloom.data.decode import Unreadable
from patchloom.data.source import Data, Source
from patchloom.data.sources.glob import is_single, open_images
from patchloom.embed.formats import iterate_rows
from patchloom.embed.parts import path_of
from patchloom.errors import PatchloomError
from patchloom.look.context import NamedEncoder, full_caption, to_pictures
from patchloom.look.sheet import Page, Tile, Title, draw_tiles

DRAWN = 20  # largest number of neighbours in a picture
_LEAST = 1e-12  # smallest norm, as in torch's normalize
_ROUNDED = 1e-6  # tolerance for rounding of cosines
_SAMPLED, _SAMPLED_BYTES = 1000, 2**26  # limits of the sample of rows for the distribution of cosines


class Neighbour(NamedTuple):
    """Row of a file near to an image.

    Attributes:
        path, split, label: fields of the row; label is None if unlabelled.
        cosine: cosine similarity after subtracting the mean of all rows.
        itself: whether it is the row of the query image.
        rank: 1 for the nearest; 0 for the query image.
        as_near: fraction of pairs of rows with at least this cosine, in a sample of rows; NaN without any.
    """

    path: str
    split: str
    label: str | None
    cosine: float
    itself: bool
    rank: int = 0
    as_near: float = math.nan


def open_one(image: str | Path) -> Data:
    """Open a single image or recording as a source."""
    path = Path(image).expanduser()
    if not path.is_file():
        raise PatchloomError(f"--near {image}: there is no such file; give the path of one image")
    if not is_single(str(path)):
        raise PatchloomError(f"--near {image} is not an image or recording by its suffix: give another file")
    opened = open_images([str(path)], str(image))
    try:
        opened.train.read(0)
    except Unreadable as problem:
        raise PatchloomError(f"--near {image} cannot be read ({problem}): give another file") from problem
    return opened


def matching_rows(image: str | Path, sources: Mapping[str, Source]) -> set[tuple[str, str]]:
    """Return split and path of the rows for the file ``image`` itself, in sources by split."""
    asked = Path(image).expanduser()
    found = set()
    for split, source in sources.items():
        for i in range(len(source)):
            place = source.place(i)  # cheaper than the whole path for a million images
            if place and place.rpartition("/")[2] == asked.name and _same(source.describe(i), asked):
                found.add((split, path_of(source, i)))
    return found


def _same(path: str, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):  # such as a path inside a shard
        return False


def nearest_rows(
    files: Sequence[Path], vector: np.ndarray, top: int, own: Collection[tuple[str, str]] = ()
) -> list[Neighbour]:
    """Return the rows of files with the largest cosine similarity to ``vector``, the nearest first; ties in file order.

    The mean of all vectors is subtracted first, because a common component brings all cosines close to 1. Centred
    cosines of the nearest may still be close to each other, so each has the fraction of pairs of rows that are as near.

    Patch tokens are concatenated, so each is compared with the one at the same position.
    """
    total, count = np.zeros(vector.size), 0
    for some in iterate_rows(files):
        total += some.vectors.reshape(len(some.vectors), -1).sum(0, dtype=np.float64)
        count += len(some.vectors)
    mean = total / max(1, count)
    if count < 2:  # a single vector is not centred
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
    units = np.concatenate([np.empty((0, mean.size), np.float32), *sample])
    pairs = (units @ units.T)[np.triu_indices(len(units), 1)]  # the cosine of each
    as_near = [float(np.mean(pairs >= one.cosine - _ROUNDED)) if len(pairs) else math.nan for one in found]
    return [one._replace(rank=r, as_near=a) for one, r, a in zip(found, ranks, as_near, strict=True)]


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Normalise vectors [m d] to unit length, float32."""
    wide = vectors.astype(np.float32)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), _LEAST)


def check_picture(out: Path, near: str | Path, sources: Mapping[str, Source]) -> None:
    """Raise an error if a picture would replace the query image or an image of a source."""
    if out.exists() and (_same(str(Path(near).expanduser()), out) or matching_rows(out, sources)):
        raise PatchloomError(f"--picture {out} is one of the images, and would replace it: choose another name")


def draw_nearest(
    one: NamedEncoder, near: str, image: Source, found: Sequence[Neighbour], sources: Mapping[str, Source], out: Path
) -> Path:
    """Draw the only image of the source ``image`` and its neighbours as a PNG file."""
    others = [each for each in found if not each.itself]
    each_source = [image]
    for row in others:
        source = sources[row.split] if row.split in sources else next(iter(sources.values()))
        place = next((i for i in range(len(source)) if path_of(source, i) == row.path), None)
        if place is None:
            raise PatchloomError(f"{row.path} is no longer among the images of {source.name}: leave out --picture")
        each_source.append(source.subset([place]))
    images = torch.cat([images.cpu() for source in each_source for _, images in one.batches(source)])
    pictures = to_pictures(one, images)
    words = ["", *(f"{each.cosine:.3f}" for each in others)]
    tiles = [Tile(picture, word) for picture, word in zip(pictures, words, strict=True)]
    text = (
        f"The nearest {one.modality.noun} of all rows. Above each is the cosine of the vectors minus their mean. "
        f"{'; '.join(f'{each.rank}: {each.path}' for each in others)}."
    )
    headings = [one.modality.item, *(f"{each.rank}. {each.label or ''}".strip() for each in others)]
    title = Title(f"{one.name}: nearest to {Path(near).name}")
    h, w = pictures.shape[1:3]
    return draw_tiles(Page([tiles], headings, title, full_caption(one, text, images)), (h, w), out)
