"""Unique names of the images of several sources, for files that are written about each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from patchloom.data.source import Source


@dataclass(frozen=True)
class NamedImage:
    """An image of a source.

    Attributes:
        source, index: where it is.
        place: its path within what was given, or a number. Different for different images.
        out: the same without suffix, below which its files are written. Different for different images.
    """

    source: Source
    index: int
    place: str
    out: str


def name_images(sources: Sequence[Source]) -> list[NamedImage]:
    """Give every image of several sources a unique path below the folder of the predictions.

    Images of several folders, such as train and test, keep their paths below the common parent folder.
    """
    found = [(source, i) for source in sources for i in range(len(source))]
    places = [source.place(i) or f"{number:06}" for number, (source, i) in enumerate(found)]
    roots = []  # the folders to which places are relative; "" for an image that is no such file
    for (source, i), place in zip(found, places, strict=True):
        described = source.describe(i).replace(os.sep, "/")
        roots.append(described[: -len(place) - 1] or "/" if described.endswith(f"/{place}") else "")
    folders = {root: os.path.abspath(root) for root in {*roots} if os.path.isdir(root)}
    starts = dict.fromkeys(roots, "")  # path of each below the folder that all of them share
    if 1 < len(folders) == len(starts):
        shared = os.path.commonpath(folders.values())
        starts = {root: os.path.relpath(path, shared).replace(os.sep, "/") for root, path in folders.items()}
    below = ["" if starts[root] == "." else starts[root] for root in roots]
    # nothing is written outside of the folder, whatever a list of paths says
    paths = [
        PurePosixPath(*(part for part in PurePosixPath(start, place.lstrip("/")).parts if part not in ("..", ".")))
        for start, place in zip(below, places, strict=True)
    ]
    # without regard to case, which many file systems do not tell apart
    plain = Counter(str(path.with_suffix("")).casefold() for path in paths)
    seen: set[str] = set()
    used: set[str] = set()
    named = []
    for (source, i), start, place, path in zip(found, below, places, paths, strict=True):
        short = path.with_suffix("")  # a.jpg and a.png beside each other keep their suffixes
        out = _unique(str(short if plain[str(short).casefold()] == 1 else path), used)
        named.append(NamedImage(source, i, _unique(str(path) if start else place, seen), out))
    return named


def _unique(name: str, used: set[str]) -> str:
    """Add a number to a name that is used already, and note that it is used now."""
    one, number = name, 1
    while one.casefold() in used:
        number += 1
        one = f"{name}-{number}"
    used.add(one.casefold())
    return one
