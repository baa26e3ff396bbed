"""Captions of pictures for report pages, in a file beside each: ``recovered.caption.json`` beside ``recovered.png``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from patchloom.system.files import read_text, write_whole

_LONGEST = 2000  # bytes of a text
_MOST_BYTES = 2**15
_LAST = 1000  # order of pictures without a caption


class Caption(NamedTuple):
    """Caption of a picture.

    Attributes:
        title: a few words.
        text: one or two sentences on what the picture shows and what to look for.
        order: pictures of a run are sorted by it. The pictures of a task begin at 0, those of its encoder at 100, and
            those of evaluations at 200.
        pairs: titles of the images whose truth and answer are in separate files, too.
    """

    title: str
    text: str
    order: int
    pairs: tuple[str, ...] = ()


def write_picture(out: Path, png: bytes, caption: Caption | None) -> Path:
    """Write a PNG file ``out``, and its caption beside it; None for pictures that no report page shows."""
    write_whole(out, png)
    if caption is not None:
        write_whole(_beside(out), json.dumps(caption._asdict(), indent=1) + "\n")
    return out


def read_caption(picture: Path) -> Caption:
    """Return the caption of a picture, whose title is the file's name if there is no valid one.

    A stranger may have written the file.
    """
    try:
        caption = Caption(**json.loads(read_text(_beside(picture), most=_MOST_BYTES)))
        texts = [caption.title, caption.text, *caption.pairs]
        # encode refuses halves of surrogate pairs, which no page can hold
        plain = all(isinstance(text, str) and len(text.encode()) <= _LONGEST for text in texts)
        if plain and caption.title and type(caption.order) is int:
            return caption._replace(pairs=tuple(caption.pairs))
    except (OSError, ValueError, TypeError, RecursionError):
        pass
    return Caption(picture.stem, "", _LAST)


def _beside(picture: Path) -> Path:
    return picture.with_suffix(".caption.json")
