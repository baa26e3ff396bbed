"""``embed``: the features of every image as a file, made a part at a time, and the nearest images in it."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from patchloom.arguments import PathLike, validate_arguments
from patchloom.audio.requirements import with_encoder_sound
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike, evenly_spaced
from patchloom.display import Displayable, StatusMessage, TextTable, Verbatim, duration
from patchloom.embed.chunks import (
    Card,
    PartWriter,
    Rows,
    VectorParts,
    card_of,
    cast_vectors,
    differing_fields,
    fingerprints,
    path_of,
)
from patchloom.embed.formats import format_of, read_card
from patchloom.embed.near import Neighbour, matching_rows, nearest_rows, open_one
from patchloom.embed.vectors import LAST, Encoding, Tokens, resolve_layer, vector_extractor, vector_shape
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.results import note_unreadable
from patchloom.evaluate.settings import EvalSettings, open_with_notes, print_notes_once, tell_colours
from patchloom.nets.heads import POOLED
from patchloom.runs.encoder import check_model, load_encoder, load_extra_module
from patchloom.system.files import move_whole, size_in_words, write_whole

# What ``embed`` says: before it starts, and of what it made.


_SCALE = "and how many pairs of rows are as near"
_WHICH = POOLED | {"patches": "the patch tokens"}


def describe_plan(card: Card, file: Path, noun: str, size: int, seconds: float | None, at_most: bool) -> str:
    """How many images there are, what becomes of each, how large the file will be, and how long it takes."""
    n = sum(card["data"]["splits"].values())
    layer = "" if card["layer"] == "norm" else f" after {card['layer']}"
    takes = "" if seconds is None else f", and it takes {'at most ' * at_most}about {duration(seconds)}"
    return (
        f"{n:,} {noun}: of each, {_WHICH[card['pooling']]}{layer} by {card['encoder']['name']}, "
        f"{describe_vector(card)}. "
        f"{file} will have about {size_in_words(size)}{takes}."
    )


def describe_vector(card: Card) -> str:
    """The size of a vector, such as "128 numbers in float32"."""
    *patches, width = card["shape"]
    return f"{f'{math.prod(patches):,} times ' if patches else ''}{width:,} numbers in {card['dtype']}"


@dataclass(frozen=True, repr=False)
class EmbeddingsFile(Displayable):
    """A file of vectors.

    Attributes:
        file: where it is.
        card: how they were made, and how many there are.
        size: of the file, in bytes.
        made: this call made it; else it was there already.
        notes: sentences on the encoder, and on what was left out.
        near: the image to which the nearest were asked for; "" for none.
        neighbours: the nearest, the nearest first.
    """

    file: Path
    card: Card
    size: int
    made: bool
    notes: tuple[str, ...] = ()
    near: str = ""
    neighbours: tuple[Neighbour, ...] = ()

    def parts(self, width: int) -> Sequence[str | TextTable]:
        """See `Displayable`."""
        shown: list[str | TextTable] = [*self.notes, *map(Verbatim, self.sentences())]
        return [*shown, TextTable.of(self.table())] if self.neighbours else shown

    def sentences(self) -> list[str]:
        """What is in the file; and to which image the nearest are."""
        holds = f"{self.card['rows']:,} vectors of {describe_vector(self.card)} ({size_in_words(self.size)})"
        said = [
            f"{self.file} has {holds}."
            if self.made
            else f"{self.file} is there already, made in this very way: {holds}. Nothing was computed again."
        ]
        if not self.neighbours:
            return said
        return [*said, f"Nearest to {self.near}, by the cosine of the vectors without their mean, {_SCALE}:"]

    def table(self) -> list[tuple[str, ...]]:
        """The nearest below a heading; without splits or labels where there are none."""
        columns = {
            "rank": [str(one.rank or "") for one in self.neighbours],
            "cosine": [f"{one.cosine:.4f}" for one in self.neighbours],
            "as near": ["" if one.itself else _one_in(one.as_near) for one in self.neighbours],
            "split": [one.split for one in self.neighbours],
            "label": [one.label or "" for one in self.neighbours],
            "path": [f"{one.path}{' (the image itself)' if one.itself else ''}" for one in self.neighbours],
        }
        if len(self.card["data"]["splits"]) == 1:
            del columns["split"]
        for name in ("as near", "label"):
            if not any(columns[name]):
                del columns[name]
        return [tuple(columns), *zip(*columns.values(), strict=True)]


def _one_in(share: float) -> str:
    """A fraction of pairs, such as "1 pair in 120"; "" if it is not known."""
    if math.isnan(share):
        return ""
    if not share:
        return "no pair"
    count = 1 / share
    return f"1 pair in {count:.1f}" if count < 10 else f"1 pair in {float(f'{count:.2g}'):,.0f}"


# Before it starts: how large the file will be, whether the disc has room for it, and how long it takes.


_FIRST, _TIMED = 8, 64  # images: of the first few much of the time is a beginning, so it is not that which is told
_SLOW = 1.0  # seconds, above which the next few are as few
_PATHS = 100  # are looked at
_BESIDE = 10  # bytes of a row for its split and label


def file_bytes(parts: VectorParts, suffix: str) -> int:
    """About how large the file will be, in bytes."""
    vector = int(np.prod(parts.shape)) * parts.dtype.itemsize
    total = 0.0
    for source in parts.sources.values():
        lengths = [len(path_of(source, i)) for i in evenly_spaced(len(source), _PATHS)]
        # text of a fixed width has 4 bytes a letter, as many as the longest needs
        path = 4 * max(lengths) if suffix == ".npz" else sum(lengths) / len(lengths) + 8
        total += len(source) * (vector + path + _BESIDE)
    return round(total)


def check_disk_space(parts: VectorParts, size: int) -> None:
    """Refuse to begin where the disc has no room for the parts and the file, which are there together at the end."""
    folder = next(one for one in parts.folder.absolute().parents if one.is_dir())
    need = 2 * size - sum(part.path.stat().st_size for part in parts.all[: parts.there()])
    free = shutil.disk_usage(folder).free
    if need > free:
        raise PatchloomError(
            f"{parts.folder.name.removesuffix('.parts')} needs about {size_in_words(need)} while it is made, and "
            f"{folder} has {size_in_words(free)} free: make room, choose a --to on a larger disc, or take --dtype "
            "float16"
        )


def seconds_for(encoding: Encoding, sources: Mapping[str, Source], images: int) -> float | None:
    """About how long so many ``images`` take, by a few of them in this process; None where these tell nothing."""
    source = max(sources.values(), key=len)
    if images <= 2 * _TIMED:
        return None
    try:
        seconds = _seconds(encoding, source, _FIRST)
        count = _FIRST if seconds > _SLOW else _TIMED
        return _seconds(encoding, source, count) / count * images
    except PatchloomError:  # none of the few can be read: the pass itself tells what is wrong
        return None


def _seconds(encoding: Encoding, source: Source, count: int) -> float:
    begun = time.perf_counter()
    encoding.each(source.subset(evenly_spaced(len(source), count)), lambda *_: None)
    return time.perf_counter() - begun


# Making the file: what is missing is computed, the parts are joined, and what is there already is not made again.


def find_existing(file: Path, card: Card, parts: VectorParts) -> EmbeddingsFile | None:
    """The file, if it is there already; None if it is not."""
    if not file.exists():
        return None
    found = read_card(file)
    if other := differing_fields(card, found):
        raise PatchloomError(
            f"{file} is there already, and was made with another {listing(other[:3], 'and')}: choose another --to, or "
            "remove it"
        )
    if parts.are_of(card):
        parts.remove()
    lost, noun = found["unreadable"], parts.noun
    notes = (f"{lost:,} {noun} could not be read when it was made, and were left out.",) if lost else ()
    return EmbeddingsFile(file, found, file.stat().st_size, False, notes)


def make(file: Path, card: Card, parts: VectorParts, encoding: Encoding) -> EmbeddingsFile:
    """Compute what is missing of the parts, and join them to the file. What is planned is printed first."""
    with parts.locked():
        if done := find_existing(file, card, parts):  # of another process, for which this one waited
            return done
        parts.begin(card)
        _tell(file, card, parts, encoding)
        _compute(card, parts, encoding)
        if fingerprints(parts.sources) != card["data"]["fingerprint"]:
            raise PatchloomError(
                f"{card['data']['name']} has changed while its {parts.noun} were read: remove {parts.folder}, and give "
                "the same command again"
            )
        with StatusMessage(f"writing {file}"):
            rows = Rows.of(parts, card)
            whole = parts.folder / f"whole{file.suffix}"
            write_whole(whole, lambda path: format_of(file).write(path, rows))
            move_whole(whole, file)
    parts.remove()
    return EmbeddingsFile(
        file, rows.card, file.stat().st_size, True, tuple(note_unreadable(rows.unreadable, parts.noun))
    )


def _tell(file: Path, card: Card, parts: VectorParts, encoding: Encoding) -> None:
    """Print what is planned."""
    size, done = file_bytes(parts, file.suffix.lower()), sum(p.stop - p.start for p in parts.all[: parts.there()])
    check_disk_space(parts, size)
    with StatusMessage("taking the time of a few"):
        seconds = seconds_for(encoding, parts.sources, parts.images - done)
    readers = any(encoding.settings.reading(source)["workers"] for source in parts.sources.values())
    print(describe_plan(card, file, parts.noun, size, seconds, readers), flush=True)
    if done:
        print(f"{done:,} of them are done already, by this command when it was stopped.", flush=True)


def _compute(card: Card, parts: VectorParts, encoding: Encoding) -> None:
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
    """The vector of a source's only image, as it is in a file of ``dtype``; float32."""
    found: list[np.ndarray] = []
    encoding.each(image, lambda _, vectors: found.append(cast_vectors(vectors, dtype).astype(np.float32)))
    return found[0][0]


@validate_arguments
def embed(
    run: PathLike,
    data: DataLike,
    *,
    to: str | Path | None = None,
    pooling: Tokens = "mean",
    layer: int | str = LAST,
    dtype: Literal["float32", "float16"] = "float32",
    near: str | Path | None = None,
    top: int = 10,
    device: str = "auto",
    batch_size: int | Literal["auto"] = "auto",
    workers: int | Literal["auto"] = "auto",
    model: str | None = None,
) -> EmbeddingsFile:
    """Write the features of every image to a file that other programs read, with how they were made inside.

    They are what the evaluations are given. A part at a time reaches the disc; the same command goes on after a kill,
    and ends with the same bytes.

    Args:
        run: a run's folder, an encoder's ``.safetensors`` file, or ``timm:NAME``.
        data: images of any source, all of its splits, with or without labels.
        to: the file; its ending says how it is written: .parquet (by pyarrow, an extra), .npz or .safetensors.
        pooling: mean of the patch tokens, class token, prefix (mean of class token and registers), both mean and class
            token, instance (of an encoder with such a head), or all patches.
        layer: number of a block, from 1, or embedding; norm is what the encoder gives at its end.
        dtype: of the numbers that are written.
        near: an image, whose nearest in the file are printed.
        top: how many of them.
        device: what computes: auto (a GPU where there is one), cpu, cuda, or another name that torch has for it.
        batch_size: images at once; auto is 256.
        workers: processes that read images; auto depends on the device, and is 0 where starting them does not pay.
        model: timm's name of the model, where the encoder is a file of weights alone.

    Returns:
        What is in the file, and the nearest.

    Raises:
        PatchloomError: no such encoder, images or layer; a file that is taken or cannot be written; or no room for it.
    """
    if to is None:
        raise PatchloomError("say with --to where the vectors go: FILE.parquet, FILE.npz or FILE.safetensors")
    if top < 1:
        raise PatchloomError(f"--top must be 1 or more, not {top}")
    settings = EvalSettings(device=device, batch_size=batch_size, workers=workers, model=model)
    settings.check()
    check_model(run, model)
    file = Path(to).expanduser()
    format_of(file)
    asked = None if near is None else open_one(near)
    vit, about = load_encoder(run, model)
    head = load_extra_module(run, "pooling") if pooling == "instance" else None
    named = resolve_layer(vit, layer)
    encoding = Encoding(vit, about, vector_extractor(vit, head, pooling, named), settings)
    one = None if asked is None else with_encoder_sound(asked, about.sound, about.name).train
    with print_notes_once():
        opened = with_encoder_sound(open_with_notes(data), about.sound, about.name)
        tell_colours(opened.train, about)
    parts = {"train": opened.train} if opened.test is None else {"train": opened.train, "test": opened.test}
    parts |= {name: source for name, source in opened.others.items() if name not in parts}
    sources = parts if len(parts) > 1 else {"all": opened.train}
    shape = vector_shape(vit, about, encoding.take)
    if head is not None:
        head.to(settings.at)
    with StatusMessage("looking at the encoder and the images"):
        how = {"pooling": pooling, "layer": named, "shape": shape, "dtype": dtype}
        card = card_of(vit, about, head, sources, settings, **how)
    written = VectorParts(file, sources, shape, np.dtype(dtype), settings.at_once)
    done = find_existing(file, card, written) or make(file, card, written, encoding)
    done = replace(done, notes=(about.note, *done.notes) if about.note else done.notes)
    if one is None or near is None:
        return done
    with StatusMessage(f"looking for the nearest in {file}"):
        found = nearest_rows(file, vector_of(one, encoding, dtype), top, matching_rows(near, sources))
    return replace(done, near=str(near), neighbours=tuple(found))
