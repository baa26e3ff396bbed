"""Making the file: what is missing is computed, the parts are joined, and what is there already is not made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from patchloom.data import Source
from patchloom.embed.card import Card, differences, fingerprints
from patchloom.embed.files import format_of, read_card
from patchloom.embed.parts import Parts, PartWriter, narrowed
from patchloom.embed.plan import check_room, file_bytes, seconds_for
from patchloom.embed.rows import Rows
from patchloom.embed.told import Embedded, planned
from patchloom.embed.vectors import Encoding
from patchloom.errors import PatchloomError
from patchloom.evaluate.report import lost_images
from patchloom.files import move_whole, write_whole
from patchloom.hints import listing
from patchloom.waiting import Waiting


def there(file: Path, card: Card, parts: Parts) -> Embedded | None:
    """The file, if it is there already; None if it is not.

    Args:
        file: where it may be.
        card: what the command would make, without the counts.
        parts: are removed if the file was whole when their removal was interrupted.

    Raises:
        PatchloomError: it is of another card, or another program's.
    """
    if not file.exists():
        return None
    found = read_card(file)
    if other := differences(card, found):
        raise PatchloomError(
            f"{file} is there already, and was made with another {listing(other[:3], 'and')}: choose another --to, or "
            "remove it"
        )
    if parts.are_of(card):
        parts.remove()
    lost, noun = found["unreadable"], parts.noun
    notes = (f"{lost:,} {noun} could not be read when it was made, and were left out.",) if lost else ()
    return Embedded(file, found, file.stat().st_size, False, notes)


def make(file: Path, card: Card, parts: Parts, encoding: Encoding) -> Embedded:
    """Compute what is missing of the parts, and join them to the file. What is planned is printed first.

    Raises:
        PatchloomError: no image of a split can be read; images that changed meanwhile; another process is at it; or a
            folder without room, or that cannot be written.
    """
    with parts.locked():
        if done := there(file, card, parts):  # of another process, for which this one waited
            return done
        parts.begin(card)
        _tell(file, card, parts, encoding)
        _compute(card, parts, encoding)
        if fingerprints(parts.sources) != card["data"]["fingerprint"]:
            raise PatchloomError(
                f"{card['data']['name']} has changed while its {parts.noun} were read: remove {parts.folder}, and give "
                "the same command again"
            )
        with Waiting(f"writing {file}"):
            rows = Rows.of(parts, card)
            whole = parts.folder / f"whole{file.suffix}"
            write_whole(whole, lambda path: format_of(file).write(path, rows))
            move_whole(whole, file)
    parts.remove()
    return Embedded(file, rows.card, file.stat().st_size, True, tuple(lost_images(rows.unreadable, parts.noun)))


def _tell(file: Path, card: Card, parts: Parts, encoding: Encoding) -> None:
    """Print what is planned.

    Raises:
        PatchloomError: there is no room for it.
    """
    size, done = file_bytes(parts, file.suffix.lower()), sum(p.stop - p.start for p in parts.all[: parts.there()])
    check_room(parts, size)
    with Waiting("taking the time of a few"):
        seconds = seconds_for(encoding, parts.sources, parts.images - done)
    readers = any(encoding.settings.reading(source)["workers"] for source in parts.sources.values())
    print(planned(card, file, parts.noun, size, seconds, readers), flush=True)
    if done:
        print(f"{done:,} of them are done already, by this command when it was stopped.", flush=True)


def _compute(card: Card, parts: Parts, encoding: Encoding) -> None:
    """Write the parts that are missing, in one pass over the rest of each split."""
    missing = parts.all[parts.there() :]
    for split, source in parts.sources.items():
        own = [part for part in missing if part.split == split]
        if own:
            writer, first = PartWriter(parts, own), own[0].start // parts.batch_size
            workers = encoding.settings.workers_for(source, encoding.settings.batches(source) - first)
            what = f"{card['encoder']['name']}: vectors of {len(source) - own[0].start:,} {source.noun}"
            encoding.each(source, writer.add, workers, what, first)
            writer.finish()


def vector_of(image: Source, encoding: Encoding, dtype: str) -> np.ndarray:
    """The vector of a source's only image, as it is in a file of ``dtype``; float32.

    Raises:
        PatchloomError: the encoder does not take it, or float16 cannot hold it.
    """
    found: list[np.ndarray] = []
    encoding.each(image, lambda _, vectors: found.append(narrowed(vectors, dtype).astype(np.float32)))
    return found[0][0]
