"""Nearest neighbours of images by the features of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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


def draw_neighbours(asked: LookRequest) -> list[Path]:
    """Draw some images with their nearest neighbours as ``nearest.png``; ``nearest.csv`` has all names."""
    source = asked.source.subset(evenly_spaced(len(asked.source), GALLERY))
    columns: list[tuple[str, Tensor, Tensor]] = []
    takes: dict[tuple[tuple[int, int], int], list[NamedEncoder]] = {}  # encoders that are shown the same images
    for one in (asked.encoder, *asked.beside[:1]):
        takes.setdefault((input_size(one.vit), input_channels(one.vit)), []).append(one)
    for (size, channels), some in takes.items():
        numbers, vectors, names = list[Tensor](), [list[Tensor]() for _ in some], " and ".join(one.name for one in some)
        with torch.inference_mode(), StatusMessage(f"encoding {source.noun} with {names}", len(source)) as waiting:
            for batch in plain_batches(source, size, _BATCH, channels=channels, device=asked.device):
                for one, its in zip(some, vectors, strict=True):
                    pooled = pooled_tokens(one.vit, normalize(batch.views[0], one.card.mean, one.card.std))[_POOLING]
                    its.append(check_finite(one, pooled.float().cpu()))
                numbers.append(batch.indices)
                waiting.advance(len(batch.indices))
        indices = torch.cat(numbers)
        if len(indices) < 2:
            raise PatchloomError(f"{asked.source.name} has fewer than two readable images: give several")
        own = torch.linspace(0, len(indices) - 1, min(asked.images, len(indices))).round().long()
        for one, features in zip(some, map(torch.cat, vectors), strict=True):
            found, cosines = nearest_by_cosine(features[own], features, own, NEAREST)
            columns.append((one.name, indices[found], cosines))
    queries, unreadable = indices[own], len(source) - len(indices)
    needed = torch.cat([queries, *(found.flatten() for _, found, _ in columns)]).unique()
    images = replace(asked, source=source.subset(needed.numpy())).pictures(len(needed))
    shown = dict(zip(needed.tolist(), to_pictures(asked.encoder, images), strict=True))
    rows = []
    for i, query in enumerate(queries.tolist()):
        name = _class(source, query)
        row = [Tile(shown[query], name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…")]
        for _, found, cosines in columns:
            for other, cosine in zip(found[i].tolist(), cosines[i].tolist(), strict=True):
                row.append(Tile(shown[other], f"{cosine:.3f}", frame=_frame(source, query, other)))
        rows.append(row)
    count = columns[0][1].shape[1]
    headings = [asked.encoder.modality.item, *([f"{place}." for place in range(1, count + 1)] * len(columns))]
    groups = [("", 1), *((name, count) for name, *_ in columns)]
    caption = full_caption(asked.encoder, _caption(asked, source, unreadable, queries, columns), images)
    item, noun, out = asked.encoder.modality.item, asked.encoder.modality.noun, asked.folder / "nearest.png"
    page = Page(rows, headings, asked.title(f"the nearest {noun}"), caption, groups)
    page_caption = Caption(
        f"Nearest {noun}",
        f"Each {item} with its nearest neighbours. Look whether they show the same kind of thing, or share only colour "
        "and brightness, which the untrained encoder finds as well.",
        150,
    )
    draw_tiles(page, rows[0][0].picture.shape[:2], out, page_caption, _SIDE)
    table = [
        (name, _name(source, query), _class(source, query), rank, _name(source, other), _class(source, other),
         f"{cosine:.6f}")
        for name, found, cosines in columns
        for query, others, near in zip(queries.tolist(), found.tolist(), cosines.tolist(), strict=True)
        for rank, (other, cosine) in enumerate(zip(others, near, strict=True), start=1)
    ]  # fmt: skip
    heading = ("encoder", "image", "class", "rank", "neighbour", "neighbour_class", "cosine")
    return [out, write_table(heading, table, out.with_suffix(".csv"))]


def _label(source: Source, i: int) -> int:
    return -1 if source.labels is None else int(source.labels[i])


def _class(source: Source, i: int) -> str:
    label = _label(source, i)
    return "" if label < 0 else source.classes[label]


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
    shares, labelled = list[str](), False
    for name, found, _ in columns:
        pairs = zip(queries.tolist(), found.tolist(), strict=True)
        frames = [_frame(source, query, other) for query, others in pairs for other in others]
        shares.append(f"{frames.count(_SAME)} of {len(frames) - frames.count(None)} by {name}")
        labelled = labelled or any(frames)
    if labelled:
        said.append(f"Blue frames: the same class as the {item}. Orange: another class. Blue are {', '.join(shares)}.")
    said.append(
        "Look whether neighbours show the same kind of thing, or share only colour, brightness and composition. If all "
        f"rows show the same {noun}, the features have collapsed."
    )
    if any(name == UNTRAINED for name, *_ in columns):
        said.append("Similarities that the untrained encoder finds as well were not learnt.")
    return " ".join(said)


def _name(source: Source, i: int) -> str:
    return source.place(i) or source.describe(i)
