"""Media type of files: images or recordings, and the choice between them in folders with both."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice

from patchloom.audio.config import Sound
from patchloom.audio.decode import soundfile
from patchloom.data.conversions import MAX_EXAMPLES, limit_examples
from patchloom.data.decode import IMAGE_SUFFIXES, SOUND
from patchloom.data.sources.files import PackedStrings
from patchloom.data.sources.scandir import Listing
from patchloom.errors import PatchloomError

_BESIDE = 0.01  # share of the files below which those of the other kind are left out, such as a cover picture


def select_kind(listings: Mapping[str, Listing], name: str) -> tuple[dict[str, Listing], Sound | None, list[str]]:
    """Select one kind of files in some folders; return their listings, settings for recordings, and notes."""
    images = {before: listed.paths for before, listed in listings.items()}
    recordings = {before: listed.recordings for before, listed in listings.items()}
    counts = [sum(map(len, kind.values())) for kind in (images, recordings)]
    if min(counts) >= _BESIDE * sum(counts) and min(counts):
        raise _both(name, counts, images, recordings)
    hears = counts[1] > counts[0]
    beside = images if hears else recordings
    kept = {
        before: replace(listed, paths=listed.recordings if hears else listed.paths, recordings=PackedStrings([]))
        for before, listed in listings.items()
    }
    notes = []
    if count := min(counts):
        kinds = ("image", "recordings") if hears else ("recording", "images")
        were = f"1 {kinds[0]} was" if count == 1 else f"{count:,} {kinds[0]}s were"
        notes.append(f"{were} left out, beside {max(counts):,} {kinds[1]} ({limit_examples(_first(beside), count)})")
    return kept, Sound() if hears else None, notes


def detect_sound(paths: Iterable[str], name: str) -> Sound | None:
    """Return settings for recordings if the listed files are such, by their suffixes; None for images."""
    kinds: list[list[str]] = [[], []]
    for path in paths:
        suffix = os.path.splitext(path)[1].lower()
        if suffix in SOUND or suffix in IMAGE_SUFFIXES:
            kinds[suffix in SOUND].append(path)
    images, recordings = kinds
    if images and recordings:
        raise _both(name, [len(images), len(recordings)], {"": images}, {"": recordings})
    if not recordings:
        return None
    soundfile()
    return Sound()


def _first(paths: Mapping[str, Iterable[str]]) -> list[str]:
    return [*islice((before + path for before, some in paths.items() for path in some), MAX_EXAMPLES)]


def _both(
    name: str, counts: list[int], images: Mapping[str, Iterable[str]], recordings: Mapping[str, Iterable[str]]
) -> PatchloomError:
    pictures, sounds = (
        limit_examples(_first(kind), count) for kind, count in zip((images, recordings), counts, strict=True)
    )
    numbers = [
        f"{count:,} {kind}{'s'[: count != 1]}" for count, kind in zip(counts, ("image", "recording"), strict=True)
    ]
    return PatchloomError(
        f"{name} holds {numbers[0]} ({pictures}) and {numbers[1]} ({sounds}): an encoder learns from one kind: put the "
        "two into separate folders, and give one of them"
    )
