"""What a patch, or the class token, attends to, in every head of some blocks (ExtreMA Figs. 1 and 9; LUT Figs. A-B)."""

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
    refuse_swin,
    to_pictures,
)
from patchloom.look.image_grid import Scale, Tile, draw_tiles
from patchloom.nets.attention import attention_each, class_attention_each
from patchloom.nets.encode import embed, encode, grid_size, has_class_token, patch_count, prefix_count
from patchloom.nets.heads import InstanceHead
from patchloom.nets.swin import Encoder
from patchloom.withhold.encoder_input import all_patches

_BLOCKS = 3  # as many are drawn, where nobody asks for any
_SIDE = 256  # pixels to which small images are enlarged, about
_GREY = 0.5  # of the brightness of a map is the image's
_TINY = 1e-12
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")  # of patches that ask (Okabe and Ito 2008)
_SCALE = Scale("attention to a patch", 0.0, 1.0, "OrRd", ("none", "the most: written above"))


@torch.no_grad()
def each_block(encoder: Encoder, images: Tensor) -> Iterator[Tensor]:
    """Attention [b heads t t] of one block after the other, as `attention_maps` describes it."""
    vit = refuse_swin(encoder, "attention")
    tokens = embed(vit, all_patches(images, patch_count(vit)))
    for weights, _ in attention_each(vit, tokens):
        yield weights


def attention_maps(encoder: Encoder, images: Tensor, blocks: Iterable[int] | None = None) -> Tensor:
    """What each token attends to, in each head (ExtreMA Figs. 1 and 9; LUT Figs. A-B).

    Args:
        encoder: a ViT in eval mode. It stays as it is, and so does what it gives.
        images: [b c h w], normalised, of the encoder's size.
        blocks: their numbers, from 1; None: all.
    """
    wanted = None if blocks is None else set(blocks)
    found = {i: weights for i, weights in enumerate(each_block(encoder, images), 1) if wanted is None or i in wanted}
    if wanted is not None and wanted - found.keys():
        raise PatchloomError(f"there is no block {min(wanted - found.keys())}: give numbers of blocks, from 1")
    if not found:
        raise PatchloomError("no block was asked for: give numbers of blocks, from 1")
    return torch.stack([*found.values()], dim=1)


@torch.no_grad()
def class_attention(encoder: Encoder, head: InstanceHead, images: Tensor) -> Tensor:
    """What ExtreMA's class token attends to in each of its own blocks, after those of the encoder (ExtreMA Fig. 1).

    Args:
        encoder: a ViT in eval mode.
        head: the class attention beside it (CaiT).
        images: [b c h w], normalised, of the encoder's size.
    """
    refuse_swin(encoder, "attention")
    last = encode(encoder, all_patches(images, patch_count(encoder)), norm=False)
    return torch.stack([*class_attention_each(head, last[:, prefix_count(encoder) :])], dim=1)


def rollout(maps: Tensor) -> Tensor:
    """Attention through all blocks up to each (Abnar and Zuidema 2020, section 3, eq. 1).

    A block passes on half of what its tokens attend to, as the mean of its heads, and half of what they are, which is
    its residual connection.
    """
    rolled: list[Tensor] = []
    for mean in maps.mean(2).unbind(1):
        passed = (mean + torch.eye(mean.shape[-1], device=mean.device)) / 2
        rolled.append(passed @ rolled[-1] if rolled else passed)
    return torch.stack(rolled, dim=1)


def most_attended(weights: Tensor, n: int) -> Tensor:
    """The patch [b] that the other patches attend to most."""
    among = weights[:, :, -n:, -n:].mean(1)
    among = among - torch.diag_embed(among.diagonal(dim1=-2, dim2=-1))
    return among.sum(1).argmax(-1)


class AttentionSheet(NamedTuple):
    """What one image's sheet shows of one that asks, a patch or a class token.

    Attributes:
        asking: who asks.
        names: of the blocks.
        heads: [blocks heads rows columns] attention to each patch.
        rolled: [blocks rows columns] the same rolled out through all blocks up to that one, but for what a patch keeps
            of itself; None where it is not known.
    """

    asking: str
    names: list[str]
    heads: Tensor
    rolled: Tensor | None


def draw_attention(asked: LookRequest) -> list[Path]:
    """Draw what a patch and the class token attend to, a sheet an image: ``attention.png``, or ``attention-1.png``, ...

    A column is a block, a row a head, and the last row the rollout. The mean of all heads is one sheet for all images,
    ``attention-mean.png``.
    """
    refuse_swin(asked.encoder.vit, "attention")
    if asked.heads == "mean":
        return [_draw_means(asked)]
    one, images, blocks = asked.encoder, asked.pictures(), chosen_layers(asked, _BLOCKS)
    shown, files = to_pictures(one, images), []
    with StatusMessage(f"reading the attention of {one.name}", len(images)) as waiting:
        for i, image in enumerate(images.split(1)):
            patch, drawn = _ask(asked, image, blocks)
            name = "attention" if len(images) == 1 else f"attention-{i + 1}"
            which = "" if len(images) == 1 else f", {one.card.modality.item} {i + 1} of {len(images)}"
            sheet = draw_tiles(
                _tiles(one, shown[i], patch, drawn),
                [one.modality.item, *(block for part in drawn for block in part.names)],
                shown.shape[1:3],
                asked.title(f"attention{which}").name,
                full_caption(one, _caption(asked, drawn), images),
                asked.folder / f"{name}.png",
                [_SCALE],
                [("", 1), *((part.asking, len(part.names)) for part in drawn)],
            )
            files.append(sheet)
            waiting.advance()
    return files


def _draw_means(asked: LookRequest) -> Path:
    """Draw the mean of all heads for several patches of each image, and for the class token (ExtreMA Figs. 1, 9)."""
    one, images = asked.encoder, asked.pictures()
    n, grid = patch_count(one.vit), grid_size(one.vit)
    number = chosen_layers(asked, 1)[-1]
    *_, h, w = images.shape
    places = asked.queries or _spread((h, w))
    queries = list(dict.fromkeys(patch_at(one, place) for place in places))
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
            marks = tuple((mark_of(one, query), colour) for query, colour in zip(queries, _COLOURS, strict=False))
            row = [Tile(shown[i], coloured=marks)]
            for k, values in enumerate(maps):
                picture = _over(shown[i], orient_rows(one, values.unflatten(0, grid)[None])[0])
                frame = _COLOURS[k] if k < len(queries) else None
                row.append(Tile(picture, _percent(float(values.max())), frame=frame))
            rows.append(row)
            waiting.advance()
    chosen = (
        "those that were asked for" if asked.queries else f"in the middle of each quarter of the {one.modality.item}"
    )
    text = (
        f"What patches ({chosen}) attend to in block {number}, the mean of its heads. A map has the colour of its "
        f"patch's frame in the {one.modality.item}. Each map has a scale of its own, from white, no attention, to the "
        "largest share that any patch gets, written above it. "
    )
    if one.head is not None:
        text += "The class token is asked in the last of its own blocks, after those of the encoder (CaiT). "
    text += "Look whether each map keeps to the thing on which its patch lies (ExtreMA, Wu et al. 2022, Figs. 1 and 9)."
    title, out = asked.title("attention, mean of heads").name, asked.folder / "attention-mean.png"
    return draw_tiles(rows, headings, shown.shape[1:3], title, full_caption(one, text, images), out, [_SCALE])


def _spread(size: tuple[int, int]) -> tuple[ImagePoint, ...]:
    """Return the middles of the quarters of an image of ``size`` (h, w); a narrow one may have fewer patches."""
    h, w = size
    return tuple(ImagePoint(along * w, down * h) for down in (0.25, 0.75) for along in (0.25, 0.75))


def _ask(asked: LookRequest, image: Tensor, blocks: list[int]) -> tuple[int, list[AttentionSheet]]:
    """Of an image [1 c h w], the number of the patch that asks, and what it and the class token attend to."""
    one, kept, means = asked.encoder, [], []
    n, grid = patch_count(one.vit), grid_size(one.vit)
    for number, weights in enumerate(each_block(one.vit, image), 1):
        means.append(weights.mean(1, keepdim=True))
        if number in blocks:
            kept.append(weights[0])
    patch = int(most_attended(weights, n)) if asked.query is None else patch_at(one, asked.query)
    rolled = check_finite(one, rollout(torch.stack(means, dim=1)))[0, [number - 1 for number in blocks]]
    names = [f"block {number}" for number in blocks]

    def of(asking: str, token: int) -> AttentionSheet:
        heads = torch.stack([weights[:, token, -n:] for weights in kept])
        return AttentionSheet(asking, names, heads.unflatten(-1, grid), rolled[:, token, -n:].unflatten(-1, grid))

    rolled[:, patch - n, patch - n] = 0  # its residual connection would be all that is seen
    drawn = [of("the marked patch", token=patch - n)]
    if has_class_token(one.vit):
        drawn.append(of("the class token", token=0))
    if one.head is not None:
        heads = class_attention(one.vit, one.head, image)[0, ..., -n:].unflatten(-1, grid)
        own = [f"own block {number}" for number in range(1, len(heads) + 1)]
        drawn.append(AttentionSheet("the class token", own, heads, None))
    return patch, drawn


def _tiles(one: NamedEncoder, picture: np.ndarray, patch: int, drawn: list[AttentionSheet]) -> list[list[Tile]]:
    """Rows of tiles: the image and heads, the image alone being marked; then rollouts."""
    nothing = Tile(np.full((1, 1, 3), 255, np.uint8), frame="#ffffff")
    rows = []
    most = max(part.heads.shape[1] for part in drawn)
    for head in range(most + 1):
        row = [Tile(picture, "", mark_of(one, patch)) if head == 0 else nothing]
        for i, part in enumerate(drawn):
            mark = mark_of(one, patch) if i == 0 else None
            for k in range(len(part.names)):
                values = part.rolled if head == most else part.heads[:, head] if head < part.heads.shape[1] else None
                if values is None:
                    row.append(nothing)
                    continue
                largest = float(values[k].max())
                said = "rollout" if head == most else f"head {head + 1}"
                row.append(
                    Tile(_over(picture, orient_rows(one, values[k][None])[0]), f"{said}: {_percent(largest)}", mark)
                )
        rows.append(row)
    return rows


def _over(picture: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Attention [rows columns] as the colour of a picture [h w 3] in grey, at least as large as it was."""
    h, w = picture.shape[:2]
    enlarged = max(1, round(_SIDE / max(h, w)))
    down, along = (np.arange(side * enlarged) for side in (h, w))
    rows, columns = weights.shape
    patches = weights[down[:, None] * rows // (h * enlarged), along * columns // (w * enlarged)]
    heat = _SCALE.shade(patches / max(float(weights.max()), _TINY)) / 255
    grey = picture.mean(-1, keepdims=True)[down[:, None] // enlarged, along // enlarged] / 255
    return (255 * heat * (1 - _GREY + _GREY * grey)).round().astype(np.uint8)


def _caption(asked: LookRequest, drawn: list[AttentionSheet]) -> str:
    who = "the one that was asked for" if asked.query else "the one to which the others attend most in the last block"
    tokens = prefix_count(asked.encoder.vit) + patch_count(asked.encoder.vit)
    said = [
        f"What the marked patch ({who}){' and the class token' if len(drawn) > 1 else ''} attend"
        f"{'' if len(drawn) > 1 else 's'} to: a column is a block, a row a head. Each colour is of a whole patch, over "
        f"the {asked.encoder.modality.item} in grey. Each map has a scale of its own, from white, no attention, to "
        "the largest share that any "
        f"patch gets, written above it; uniform attention would give each {_percent(1 / tokens)}."
    ]
    if prefix_count(asked.encoder.vit) or asked.encoder.head is not None:
        said.append("What goes to class and register tokens is not shown, so that the shares of a map may sum to less.")
    said.append(
        "The last row is the rollout (Abnar and Zuidema 2020): the mean of the heads, through all blocks up to that "
        "one; what the marked patch keeps of itself is left out of it."
    )
    if drawn[-1].rolled is None:
        said.append("The class token has blocks of its own after those of the encoder (CaiT), and no rollout.")
    said.append(
        "Look whether some heads keep to the object under the patch, to what looks alike, or to a fixed direction "
        "(ExtreMA, Wu et al. 2022, Figs. 1 and 9; LUT, Figs. A and B)."
    )
    return " ".join(said)


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.0995 else f"{share:.0%}"
