"""Exact copies among images, found by a hash of their content; file names do not matter.

An image's content is 16 bytes: a letter for what was hashed (`FILE_KIND`, `PIXEL_KIND`, `DRAWN_KIND`), and 15 bytes of
its SHA-256. The bytes of files are hashed, which is much faster than decoding them, so the same picture in another
encoding has another content. Hashes of files are cached in ``cache_root()/contents`` under a digest of the state of the
files, and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np

from patchloom.data.decode import Unreadable
from patchloom.data.source import CONTENT, Source, digest
from patchloom.data.workers import in_threads
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.system.files import cache_root, open_regular, read_cached, write_sealed

# the bytes of files, pixels in memory, and the seed and number of synthetic images
FILE_KIND, PIXEL_KIND, DRAWN_KIND = b"f", b"p", b"d"

_FORMAT = "contents 1"
_EACH = 64  # files that a thread reads in one task
_BLOCK = 2**20
_PAUSE = 10  # seconds between two saves of an unfinished pass


def contents_of(kind: bytes, parts: Iterable[Iterable[bytes | memoryview | np.ndarray]]) -> np.ndarray:
    """Hash images: return contents [n] of ``kind`` from each image's bytes, given in pieces."""
    digests = bytearray()
    for pieces in parts:
        total = hashlib.sha256()
        for piece in pieces:
            total.update(piece.data if isinstance(piece, np.ndarray) else piece)
        digests += kind + total.digest()[: CONTENT.itemsize - 1]
    return np.frombuffer(bytes(digests), CONTENT)


def contents_on_disc(
    source: Source,
    stored: Callable[[int], Path | str | bytes],
    chosen: np.ndarray | None = None,
) -> np.ndarray:
    """Return the contents of a source's images [n], or of the ``chosen`` ones, for `Source.contents`.

    ``stored`` returns the path of the file of an image, or the bytes of that file. All files are read once, and their
    hashes are cached until a file changes. With ``chosen``, only those files are read, unless the hashes of all are
    cached already.
    """
    known = source._contents
    if known is None:
        stamp = source.known_stamp()
        place = None if stamp is None else cache_root() / "contents" / digest([_FORMAT, stamp])
        known = None if place is None else _read(place)
        known = known if known is not None and len(known) == len(source) else None
    if known is None:
        indices = np.arange(len(source)) if chosen is None else chosen
        part = None if place is None or chosen is not None else place.with_suffix(".part")
        known = _digested(source, stored, indices, part)
        if chosen is not None:
            return known
        if place is not None and source.known_stamp() == stamp:  # otherwise files changed during the pass
            with suppress(PatchloomError):  # a full or read-only disc only costs another pass
                write_sealed(place, known.tobytes())
        if part is not None:
            with suppress(OSError):  # there is none, or it may not be removed
                part.unlink()
    source._contents = known
    return known if chosen is None else known[chosen]


def pieces_of_file(path: str | Path) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces of 1 MiB: a whole-slide image may be larger than memory."""
    with open_regular(path, follow=True) as file:
        while piece := file.read(_BLOCK):
            yield piece


def comparable(some: np.ndarray, others: np.ndarray) -> bool:
    """Return whether copies of images with ``some`` contents [n] can be found among ``others`` [m].

    Hashes of files cannot be compared with hashes of pixels. Synthetic images have no copies elsewhere.
    """
    kinds, others_kinds = ({*contents.view(np.uint8)[:: CONTENT.itemsize].tolist()} for contents in (some, others))
    return all(a == b or DRAWN_KIND[0] in (a, b) for a in kinds for b in others_kinds)


def copies_among(source: Source, contents: np.ndarray) -> int | None:
    """Return the number of images of ``source`` that have one of ``contents`` [n]; None if not comparable."""
    own = source.contents()
    return None if own is None or not comparable(own, contents) else int(np.isin(own, contents).sum())


def copies_sentence(test: Source, contents: np.ndarray) -> str:
    """Return a sentence on test images that are copies of training images, after a space; "" if there are none."""
    copies = copies_among(test, contents)
    if not copies:
        return ""
    return (
        f" {copies:,} of {len(test):,} test images are exact copies of training images: scores say less about new "
        "images until the copies are removed."
    )


def _digested(
    source: Source,
    stored: Callable[[int], Path | str | bytes],
    indices: np.ndarray,
    part: Path | None,
) -> np.ndarray:
    """Hash the images ``indices``; an unfinished pass is saved to ``part`` and continued from there."""

    def content(i: int) -> np.ndarray:
        try:
            file = stored(i)
            return contents_of(FILE_KIND, [[file] if isinstance(file, bytes) else pieces_of_file(file)])
        except (OSError, ValueError, Unreadable):  # ValueError: a path with a zero byte
            name = f"{i} {source.describe(i)} cannot be read"
            return contents_of(FILE_KIND, [[name.encode("utf-8", "surrogateescape")]])

    begun = None if part is None else _read(part)
    found = [np.empty(0, CONTENT) if begun is None else begun]
    saved = time.monotonic()
    left = indices[len(found[0]) :]
    blocks = np.array_split(left, -(-len(left) // _EACH)) if len(left) else []
    waiting = StatusMessage(f"looking for exact copies among the files of {source.name}", len(indices))
    waiting.advance(len(found[0]))
    with waiting, closing(in_threads(lambda block: np.concatenate([*map(content, block.tolist())]), blocks)) as made:
        for contents in made:
            found.append(contents)
            waiting.advance(len(contents))
            if part is not None and time.monotonic() - saved > _PAUSE:
                with suppress(PatchloomError):
                    write_sealed(part, np.concatenate(found).tobytes())
                saved = time.monotonic()
    return np.concatenate(found)


def _read(place: Path) -> np.ndarray | None:
    """Return the contents in a cached file; None if it is missing or damaged."""
    content = read_cached(place)
    return None if content is None or len(content) % CONTENT.itemsize else np.frombuffer(content, CONTENT)
