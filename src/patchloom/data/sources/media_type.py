"""Media type of files: images or recordings, and the choice between them in folders with both."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import replace

from patchloom.audio.config import Sound
from patchloom.audio.decode import soundfile
from patchloom.data.decode import IMAGE_SUFFIXES, SOUND
from patchloom.data.notes import count_of, left_out, limit_examples
from patchloom.data.sources.files import PackedStrings
from patchloom.data.sources.scandir import Listing
from patchloom.errors import PatchloomError

_BESIDE = 0.01  # share of the files below which those of the other kind are left out, such as a cover picture


def select_kind(listed: Listing, name: str) -> tuple[Listing, Sound | None, list[str]]:
    """Select one kind of the files in a folder; return their listing, settings for recordings, and notes."""
    images, recordings = listed.paths, listed.recordings
    hears = len(recordings) > len(images)
    kept, beside = (recordings, images) if hears else (images, recordings)
    if len(beside) and len(beside) >= _BESIDE * (len(kept) + len(beside)):
        raise _both(name, images, recordings)
    kinds = ("image", "recordings") if hears else ("recording", "images")
    notes = left_out(beside, f", beside {len(kept):,} {kinds[1]}", kinds[0])
    return replace(listed, paths=kept, recordings=PackedStrings([])), Sound() if hears else None, notes


def detect_sound(paths: Iterable[str], name: str) -> Sound | None:
    """Return settings for recordings if the listed files are such, by their suffixes; None for images."""
    images, recordings = list[str](), list[str]()
    for path in paths:
        suffix = os.path.splitext(path)[1].lower()
        if suffix in SOUND:
            recordings.append(path)
        elif suffix in IMAGE_SUFFIXES:
            images.append(path)
    if images and recordings:
        raise _both(name, images, recordings)
    if not recordings:
        return None
    soundfile()
    return Sound()


def _both(name: str, images: Collection[str], recordings: Collection[str]) -> PatchloomError:
    pictures, sounds = (
        f"{count_of(len(paths), kind)} ({limit_examples(paths)})"
        for paths, kind in ((images, "image"), (recordings, "recording"))
    )
    return PatchloomError(
        f"{name} holds {pictures} and {sounds}: an encoder learns from one kind: put the two into separate folders, "
        "and give one of them"
    )
