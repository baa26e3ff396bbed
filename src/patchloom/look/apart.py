"""Truth and answer of an image as files of one size, so that a page can lay one over the other."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from patchloom.files import write_whole

INDEX = "apart.json"
_QUALITY = 90


class Pair(NamedTuple):
    """Words on an image; and its truth and the answer, drawn on it at one size."""

    title: str
    truth: Image.Image
    answer: Image.Image


class PairFiles(NamedTuple):
    """Words on an image; and the files of its truth and of the answer."""

    title: str
    truth: Path
    answer: Path


def keep_apart(pairs: Sequence[Pair], folder: Path) -> None:
    """Write pairs as JPEG files, and then, in ``apart.json``, which they are; nothing, if there are none.

    Raises:
        PatchloomError: the folder cannot be written.
    """
    index = []
    for number, pair in enumerate(pairs, start=1):
        names = {kind: f"{number}-{kind}.jpg" for kind in ("truth", "answer")}
        for image, name in zip((pair.truth, pair.answer), names.values(), strict=True):
            buffer = io.BytesIO()
            image.convert("RGB").save(buffer, "JPEG", quality=_QUALITY)
            write_whole(folder / name, buffer.getvalue())
        index.append({"title": pair.title, **names})
    if index:
        write_whole(folder / INDEX, json.dumps(index, indent=1) + "\n")


def kept_apart(folder: Path) -> list[PairFiles]:
    """The pairs that `keep_apart` wrote into a folder; [] where there are none, or what says which is damaged.

    What is named there outside of the folder is left out: a run may come from a stranger.
    """
    try:
        found = json.loads((folder / INDEX).read_text("utf-8"))
        each = [PairFiles(str(one["title"]), folder / one["truth"], folder / one["answer"]) for one in found]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return [one for one in each if one.truth.parent == folder == one.answer.parent]
