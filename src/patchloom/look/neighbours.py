"""Nearest neighbours of images by the features of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from patchloom.data.loader import plain_batches
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import evenly_spaced
from patchloom.data.stats import normalize
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.look.charts import write_table
from patchloom.look.context import LookRequest, NamedEncoder, check_finite, full_caption, to_pictures
from patchloom.look.sheet import Caption, Page, Tile, draw_tiles
from patchloom.nets.encode import input_channels, input_size
from patchloom.nets.heads import pooled_tokens
from patchloom.questions.agreement import nearest_by_cosine
from patchloom.results.claims import UNTRAINED

NEAREST = 5
GALLERY = 2000  # largest number of images, evenly spread
_POOLING = "mean"  # the pooling of the quoted kNN accuracy, available for every encoder
_BATCH = 32
_SIDE = 135  # pixels of a tile
_LONGEST = 14  # characters of a class's name
_SAME, _OTHER = "#0072b2", "#d55e00"


class Gallery(NamedTuple):
    """Features of images.

    Attributes:
        features: [g d] float32 on the CPU, by name of the pooling.
        indices: [g] of the images in their source; unreadable images are left out.
    """

    features: dict[str, Tensor]
    indices: Tensor


def galleries_of(encoders: Sequence[NamedEncoder], source: Source, device: torch.device | str = "cpu") -> list[Gallery]:
    """Compute features of all images of a source with several encoders.

    Images are read once for all encoders of the same input size.
    """
    takes = [(input_size(one.vit), input_channels(one.vit)) for one in encoders]
    found: dict[int, Gallery] = {}
    for size, channels in dict.fromkeys(takes):
        some = [i for i, each in enumerate(takes) if each == (size, channels)]
        parts: dict[tuple[int, str], list[Tensor]] = {}
        indices = []
        names = " and ".join(encoders[i].name for i in some)
        batches = plain_batches(source, size, _BATCH, channels=channels, device=device)
        with torch.inference_mode(), StatusMessage(f"encoding {source.noun} with {names}", len(source)) as waiting:
            for batch in batches:
                for i in some:
                    one = encoders[i]
                    images = normalize(batch.views[0], one.card.mean, one.card.std)
                    for name, pooled in pooled_tokens(one.vit, images, one.head).items():
                        parts.setdefault((i, name), []).append(check_finite(one, pooled.float().cpu()))
                indices.append(batch.indices)
                waiting.advance(len(batch.indices))
        for i in some:
            features = {name: torch.cat(each) for (which, name), each in parts.items() if which == i}
            found[i] = Gallery(features, torch.cat(indices))
    return [found[i] for i in range(len(encoders))]


def draw_neighbours(asked: LookRequest) -> list[Path]:
    """Draw some images with their nearest neighbours as ``nearest.png``; ``nearest.csv`` has all names."""
    source = asked.source.subset(evenly_spaced(len(asked.source), GALLERY))
    columns: list[tuple[str, Tensor, Tensor]] = []
    encoders = (asked.encoder, *asked.beside[:1])
    queries, unreadable = torch.empty(0, dtype=torch.int64), 0
    for one, gallery in zip(encoders, galleries_of(encoders, source, asked.device), strict=True):
        if len(gallery.indices) < 2:
            raise PatchloomError(f"{asked.source.name} has fewer than two readable images: give several")
        features = gallery.features[_POOLING]
        own = torch.linspace(0, len(features) - 1, min(asked.images, len(features))).round().long()
        found, cosines = nearest_by_cosine(features[own], features, own, NEAREST)
        queries, unreadable = gallery.indices[own], len(source) - len(features)
        columns.append((one.name, gallery.indices[found], cosines))
    needed = torch.cat([queries, *(found.flatten() for _, found, _ in columns)]).unique()
    images = replace(asked, source=source.subset(needed.numpy())).pictures(len(needed))
    shown = dict(zip(needed.tolist(), to_pictures(asked.encoder, images), strict=True))
    rows = []
    for i, query in enumerate(queries.tolist()):
        row = [Tile(shown[query], _shortened(_class(source, query)))]
        for _, found, cosines in columns:
            for other, cosine in zip(found[i].tolist(), cosines[i].tolist(), strict=True):
                row.append(Tile(shown[other], f"{cosine:.3f}", frame=_frame(source, query, other)))
        rows.append(row)
    count = columns[0][1].shape[1]
    headings = [asked.encoder.modality.item, *([f"{place}." for place in range(1, count + 1)] * len(columns))]
    groups = [("", 1), *((name, count) for name, *_ in columns)]
    caption = full_caption(asked.encoder, _caption(asked, source, unreadable, queries, columns), images)
    item, noun = asked.encoder.modality.item, asked.encoder.modality.noun
    page, out = Page(rows, headings, asked.title(f"the nearest {noun}"), caption, groups), asked.folder / "nearest.png"
    page_caption = Caption(
        f"Nearest {noun}",
        f"Each {item} with its nearest neighbours. Look whether they show the same kind of thing, or share only colour "
        "and brightness, which the untrained encoder finds as well.",
        150,
    )
    picture = draw_tiles(page, rows[0][0].picture.shape[:2], out, page_caption, _SIDE)
    return [picture, _write(source, queries, columns, out.with_suffix(".csv"))]


def _label(source: Source, i: int) -> int:
    return -1 if source.labels is None else int(source.labels[i])


def _class(source: Source, i: int) -> str:
    label = _label(source, i)
    return "" if label < 0 else source.classes[label]


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _frame(source: Source, query: int, other: int) -> str | None:
    labels = _label(source, query), _label(source, other)
    return None if min(labels) < 0 else _SAME if labels[0] == labels[1] else _OTHER


def _caption(
    asked: LookRequest, source: Source, unreadable: int, queries: Tensor, columns: Sequence[tuple[str, Tensor, Tensor]]
) -> str:
    left = len(asked.source) - len(source)
    item, noun = asked.encoder.modality.item, asked.encoder.modality.noun
    chosen = f"{len(source):,} of {len(asked.source):,} {noun}, evenly spread" if left else f"{len(source):,} {noun}"
    said = [
        f"The nearest neighbours among {chosen}, by the cosine similarity of their mean patch tokens after the last "
        "norm, which is written above each. All names are in nearest.csv.",
    ]
    if unreadable:
        said.append(f"Unreadable and skipped: {unreadable:,}.")
    frames = [
        [
            frame
            for query, others in zip(queries.tolist(), found.tolist(), strict=True)
            for other in others
            if (frame := _frame(source, query, other))
        ]
        for _, found, _ in columns
    ]
    if any(frames):
        counted = zip(columns, frames, strict=True)
        shares = ", ".join(f"{each.count(_SAME)} of {len(each)} by {name}" for (name, *_), each in counted)
        said.append(f"Blue frames: the same class as the {item}. Orange: another class. Blue are {shares}.")
    said.append(
        "Look whether neighbours show the same kind of thing, or share only colour, brightness and composition. If all "
        f"rows show the same {noun}, the features have collapsed."
    )
    if any(name == UNTRAINED for name, *_ in columns):
        said.append("Similarities that the untrained encoder finds as well were not learnt.")
    return " ".join(said)


def _write(source: Source, queries: Tensor, columns: Sequence[tuple[str, Tensor, Tensor]], out: Path) -> Path:
    rows = [
        (name, _name(source, query), _class(source, query), rank, _name(source, other), _class(source, other),
         f"{cosine:.6f}")
        for name, found, cosines in columns
        for query, others, near in zip(queries.tolist(), found.tolist(), cosines.tolist(), strict=True)
        for rank, (other, cosine) in enumerate(zip(others, near, strict=True), start=1)
    ]  # fmt: skip
    heading = ("encoder", "image", "class", "rank", "neighbour", "neighbour_class", "cosine")
    return write_table(heading, rows, out)


def _name(source: Source, i: int) -> str:
    return source.place(i) or source.describe(i)
