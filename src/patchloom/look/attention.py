"""Attention maps of a patch and of the class token (ExtreMA Figs. 1 and 9; LUT Figs. A-B)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.look.context import (
    ImagePoint,
    LookRequest,
    NamedEncoder,
    check_finite,
    chosen_layers,
    full_caption,
    mark_of,
    orient_rows,
    patch_at,
    to_pictures,
)
from patchloom.look.sheet import MARK, Caption, Page, Scale, Tile, Title, draw_tiles
from patchloom.nets.attention import attention_each, class_attention_each
from patchloom.nets.encode import embed, encode, grid_size, has_class_token, patch_count, prefix_count, rotations
from patchloom.nets.heads import InstanceHead
from patchloom.nets.swin import Encoder, refuse_hierarchical
from patchloom.withhold.encoder_input import all_patches

INSTEAD = "choose another picture"  # of a Swin
_BLOCKS = 3  # default number of blocks
_SIDE = 256  # approximate size in pixels to which small images are enlarged
_GREY = 0.5  # weight of the image in the brightness of a map
_TINY = 1e-12
_QUERIES = 6  # of an attentive probe
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")  # of query patches (Okabe and Ito 2008)
ATTENTION_SCALE = Scale("attention to a patch", 0.0, 1.0, "OrRd", ("none", "maximum, written above"))


@torch.no_grad()
def each_block(encoder: Encoder, images: Tensor) -> Iterator[Tensor]:
    """Yield the attention [b heads t t] of each block, as in `attention_maps`."""
    vit = refuse_hierarchical(encoder, "attention", INSTEAD)
    given = all_patches(images, patch_count(vit))
    for weights, _ in attention_each(vit, embed(vit, given), rotations(vit, given)):
        yield weights


def attention_maps(encoder: Encoder, images: Tensor, blocks: Iterable[int] | None = None) -> Tensor:
    """Return attention weights [b blocks heads t t] (ExtreMA Figs. 1 and 9; LUT Figs. A-B).

    Args:
        encoder: ViT in eval mode; it is not changed.
        images: normalised images [b c h w] of the encoder's size.
        blocks: numbers of blocks, from 1; None: all.
    """
    wanted = None if blocks is None else set(blocks)
    found = {i: weights for i, weights in enumerate(each_block(encoder, images), 1) if wanted is None or i in wanted}
    if wanted is not None and wanted - found.keys():
        raise PatchloomError(f"there is no block {min(wanted - found.keys())}: give numbers of blocks, from 1")
    if not found:
        raise PatchloomError("no block is given: give numbers of blocks, from 1")
    return torch.stack([*found.values()], dim=1)


@torch.no_grad()
def class_attention(encoder: Encoder, head: InstanceHead, images: Tensor) -> Tensor:
    """Return the attention of ExtreMA's class token in each of its blocks, which follow the encoder (ExtreMA Fig. 1).

    Args:
        encoder: ViT in eval mode.
        head: class attention (CaiT).
        images: normalised images [b c h w] of the encoder's size.
    """
    refuse_hierarchical(encoder, "attention", INSTEAD)
    last = encode(encoder, all_patches(images, patch_count(encoder)), norm=False)
    return torch.stack([*class_attention_each(head, last[:, prefix_count(encoder) :])], dim=1)


def rollout(maps: Tensor) -> Tensor:
    """Return the attention rollout up to each block (Abnar and Zuidema 2020, section 3, eq. 1).

    Each block contributes half its mean attention over heads and half the identity, for the residual connection.
    """
    rolled: list[Tensor] = []
    for mean in maps.mean(2).unbind(1):
        passed = (mean + torch.eye(mean.shape[-1], device=mean.device)) / 2
        rolled.append(passed @ rolled[-1] if rolled else passed)
    return torch.stack(rolled, dim=1)


class AttentionSheet(NamedTuple):
    """Attention maps of one query token for one image.

    Attributes:
        asking: name of the query, a patch or a class token.
        names: names of the blocks.
        heads: [blocks heads rows columns] attention to each patch.
        rolled: [blocks rows columns] attention rollout up to each block, without the query patch itself; None if
            unknown.
    """

    asking: str
    names: list[str]
    heads: Tensor
    rolled: Tensor | None


def draw_attention(asked: LookRequest) -> list[Path]:
    """Draw the attention of a patch and the class token, one sheet per image: ``attention.png`` or ``attention-1.png``.

    Columns are blocks, rows are heads, and the last row is the rollout. The mean over heads is one sheet for all
    images, ``attention-mean.png``.
    """
    refuse_hierarchical(asked.encoder.vit, "attention", INSTEAD)
    if asked.heads == "mean":
        return [_draw_means(asked)]
    one, images, blocks = asked.encoder, asked.pictures(), chosen_layers(asked, _BLOCKS)
    shown, files, name, which = to_pictures(one, images), [], "attention", ""
    with StatusMessage(f"reading the attention of {one.name}", len(images)) as waiting:
        for i, image in enumerate(images.split(1)):
            patch, drawn = _ask(asked, image, blocks)
            if len(images) > 1:
                name, which = f"attention-{i + 1}", f", {one.modality.item} {i + 1} of {len(images)}"
            page_caption = Caption(
                f"Attention of single patches{which}",
                "One map per block and head: the redder a patch, the more the marked patch attends to it. Look for "
                "heads that follow an object or a part of it; a uniform map has no preference.",
                110,
            )
            page = Page(
                _tiles(one, shown[i], patch, drawn),
                [one.modality.item, *(block for part in drawn for block in part.names)],
                asked.title(f"attention{which}"),
                full_caption(one, _caption(asked, drawn), images),
                [("", 1), *((part.asking, len(part.names)) for part in drawn)],
                scales=[ATTENTION_SCALE],
            )
            files.append(draw_tiles(page, shown.shape[1:3], asked.folder / f"{name}.png", page_caption))
            waiting.advance()
    return files


def _draw_means(asked: LookRequest) -> Path:
    """Draw the mean attention over heads for several patches of each image and the class token (ExtreMA Figs. 1, 9)."""
    one, images = asked.encoder, asked.pictures()
    n, grid = patch_count(one.vit), grid_size(one.vit)
    number = chosen_layers(asked, 1)[-1]
    *_, h, w = images.shape
    quadrants = [ImagePoint(along * w, down * h) for down in (0.25, 0.75) for along in (0.25, 0.75)]
    queries = list(dict.fromkeys(patch_at(one, place) for place in asked.queries or quadrants))
    shown, rows = to_pictures(one, images), []
    headings = [one.modality.item, *(f"patch {i}" for i in range(1, len(queries) + 1))]
    headings += ["class token"] * (has_class_token(one.vit) or one.head is not None)
    with StatusMessage(f"reading the attention of {one.name}", len(images)) as waiting:
        for i, image in enumerate(images.split(1)):
            weights = next(found for k, found in enumerate(each_block(one.vit, image), 1) if k == number)
            mean = check_finite(one, weights.mean(1))[0]
            maps = [mean[query - n, -n:] for query in queries]
            if one.head is not None:
                maps.append(class_attention(one.vit, one.head, image)[0, -1, :, -n:].mean(0))
            elif has_class_token(one.vit):
                maps.append(mean[0, -n:])
            marks = [(mark_of(one, query), colour) for query, colour in zip(queries, _COLOURS, strict=False)]
            row = [Tile(shown[i], marks=marks)]
            for k, values in enumerate(maps):
                picture = overlay(shown[i], orient_rows(one, values.unflatten(0, grid)[None])[0])
                frame = _COLOURS[k] if k < len(queries) else None
                row.append(Tile(picture, _percent(float(values.max())), frame=frame))
            rows.append(row)
            waiting.advance()
    chosen = "as requested" if asked.queries else f"in the middle of each quarter of the {one.modality.item}"
    text = (
        f"Attention of several patches ({chosen}) in block {number}, averaged over heads. The frame of a map has the "
        f"colour of its patch in the {one.modality.item}. Each map has its own scale, from white (no attention) to the "
        "maximum, which is written above it. "
    )
    if one.head is not None:
        text += "The class token's map is that of the last class-attention block, after the encoder (CaiT). "
    text += "Look whether the attention stays on the object of the patch (ExtreMA, Wu et al. 2022, Figs. 1 and 9)."
    title = asked.title("attention, mean of heads")
    page = Page(rows, headings, title, full_caption(one, text, images), scales=[ATTENTION_SCALE])
    page_caption = Caption(
        "Attention of single patches, averaged over heads",
        "One map per marked patch, framed in its colour. Look whether the attention stays on the object that the patch "
        "belongs to.",
        111,
    )
    return draw_tiles(page, shown.shape[1:3], asked.folder / "attention-mean.png", page_caption)


def _ask(asked: LookRequest, image: Tensor, blocks: list[int]) -> tuple[int, list[AttentionSheet]]:
    """Return the number of the query patch of an image [1 c h w], and the attention of it and of the class token."""
    one, kept, means = asked.encoder, [], []
    n, grid = patch_count(one.vit), grid_size(one.vit)
    for number, weights in enumerate(each_block(one.vit, image), 1):
        means.append(weights.mean(1, keepdim=True))
        if number in blocks:
            kept.append(weights[0])
    if asked.queries:
        patch = patch_at(one, asked.queries[0])
    else:  # the patch that the others attend to most in the last block
        among = weights[0, :, -n:, -n:].mean(0)
        patch = int((among - among.diagonal().diag()).sum(0).argmax())
    rolled = check_finite(one, rollout(torch.stack(means, dim=1)))[0, [number - 1 for number in blocks]]
    names = [f"block {number}" for number in blocks]

    def of(asking: str, token: int) -> AttentionSheet:
        heads = torch.stack([weights[:, token, -n:] for weights in kept])
        return AttentionSheet(asking, names, heads.unflatten(-1, grid), rolled[:, token, -n:].unflatten(-1, grid))

    rolled[:, patch - n, patch - n] = 0  # the residual connection would dominate the map
    drawn = [of("the marked patch", token=patch - n)]
    if has_class_token(one.vit):
        drawn.append(of("the class token", token=0))
    if one.head is not None:
        heads = class_attention(one.vit, one.head, image)[0, ..., -n:].unflatten(-1, grid)
        own = [f"own block {number}" for number in range(1, len(heads) + 1)]
        drawn.append(AttentionSheet("the class token", own, heads, None))
    return patch, drawn


def _tiles(one: NamedEncoder, picture: np.ndarray, patch: int, drawn: list[AttentionSheet]) -> list[list[Tile | None]]:
    """Return rows of tiles: the image and its heads, then rollouts."""
    marks, rows = [(mark_of(one, patch), MARK)], list[list[Tile | None]]()
    most = max(part.heads.shape[1] for part in drawn)
    for head in range(most + 1):
        row: list[Tile | None] = [Tile(picture, marks=marks) if head == 0 else None]
        for part in drawn:
            values = part.rolled if head == most else part.heads[:, head] if head < part.heads.shape[1] else None
            if values is None:
                row += [None] * len(part.names)
                continue
            for own, shown in zip(values, orient_rows(one, values), strict=True):
                name = "rollout" if head == most else f"head {head + 1}"
                words = f"{name}: {_percent(float(own.max()))}"
                row.append(Tile(overlay(picture, shown), words, marks if part is drawn[0] else ()))
        rows.append(row)
    return rows


def overlay(picture: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Overlay attention [rows columns] as colour on a grey picture [h w 3], enlarged if it is small."""
    h, w = picture.shape[:2]
    enlarged = max(1, round(_SIDE / max(h, w)))
    down, along = (np.arange(side * enlarged) for side in (h, w))
    rows, columns = weights.shape
    patches = weights[down[:, None] * rows // (h * enlarged), along * columns // (w * enlarged)]
    heat = ATTENTION_SCALE.shade(patches / max(float(weights.max()), _TINY)) / 255
    grey = picture.mean(-1, keepdims=True)[down[:, None] // enlarged, along // enlarged] / 255
    return (255 * heat * (1 - _GREY + _GREY * grey)).round().astype(np.uint8)


def _caption(asked: LookRequest, drawn: list[AttentionSheet]) -> str:
    chosen = "as requested" if asked.queries else "the most attended patch in the last block"
    tokens = prefix_count(asked.encoder.vit) + patch_count(asked.encoder.vit)
    said = [
        f"Attention of the marked patch ({chosen}){' and of the class token' if len(drawn) > 1 else ''}: columns are "
        f"blocks, rows are heads. The colour of each patch lies over the {asked.encoder.modality.item} in grey. Each "
        "map has its own scale, from white (no attention) to the maximum, which is written above it; uniform attention "
        f"would give each patch {_percent(1 / tokens)}."
    ]
    if prefix_count(asked.encoder.vit) or asked.encoder.head is not None:
        said.append("Attention to class and register tokens is not shown, so a map may sum to less than 100 %.")
    said.append(
        "The last row is the attention rollout through all blocks up to that one (Abnar and Zuidema 2020), averaged "
        "over heads, without the marked patch itself."
    )
    if drawn[-1].rolled is None:
        said.append("The class token has separate blocks after the encoder (CaiT), and no rollout.")
    said.append(
        "Look whether some heads follow the object of the patch, similar patches, or a fixed direction "
        "(ExtreMA, Wu et al. 2022, Figs. 1 and 9; LUT, Figs. A and B)."
    )
    return " ".join(said)


def draw_queries(pictures: np.ndarray, maps: np.ndarray, title: str, out: Path) -> Path:
    """Draw where the queries of an attentive probe look: a row per image, with the mean of all and the narrowest ones.

    Args:
        pictures: images uint8 [k h w 3].
        maps: attention [k m rows columns] of each of m queries, which sums to 1 over the patches.
        title: title of the page.
        out: PNG file.
    """
    spread = np.exp(-(maps * np.log(np.maximum(maps, _TINY))).sum((2, 3))).mean(0)  # patches that a query looks at
    chosen = spread.argsort(kind="stable")[:_QUERIES]
    rows = []
    for picture, its in zip(pictures, maps, strict=True):
        shown = [its.mean(0), *its[chosen]]
        rows.append([Tile(picture), *(Tile(overlay(picture, one), f"{one.max():.1%}") for one in shown)])
    headings = ["image", f"mean of {maps.shape[1]}", *(f"query {i + 1}: {spread[i]:.1f} patches" for i in chosen)]
    caption = (
        "Attention of the queries of an attentive probe to the patches of test images. Each map has its own scale, "
        "from white (no attention) to its maximum, which is written above it. A heading says at how many patches a "
        "query looks (exponential of the entropy, mean over the images shown); the narrowest queries are shown."
    )
    page_caption = Caption(
        "Where the queries of the attentive probe look",
        "Each column is a learned query. Queries that follow parts of objects show that the patch tokens tell them "
        "apart; equal maps in all columns show that one query would do.",
        210,
    )
    page = Page(rows, headings, Title(title), caption, scales=[ATTENTION_SCALE])
    return draw_tiles(page, pictures.shape[1:3], out, page_caption)


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.0995 else f"{share:.0%}"
