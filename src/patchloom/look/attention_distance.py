"""Attention by relative position, and mean attention distances (MP3 Figs. 8 and 11)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.display import StatusMessage
from patchloom.errors import listing
from patchloom.look.attention import INSTEAD, each_block
from patchloom.look.charts import (
    Line,
    Panel,
    draw_panel,
    layer_ticks,
    line_colours,
    styled_figure,
    write_figure,
    write_table,
)
from patchloom.look.context import LookRequest, check_finite, chosen_layers
from patchloom.look.position_map import cell_height
from patchloom.look.sheet import Caption, Page, Scale, Tile, draw_tiles
from patchloom.nets.encode import grid_size, layer_names, patch_count, prefix_count
from patchloom.nets.swin import Encoder, is_hierarchical, refuse_hierarchical
from patchloom.sizes import Sides, in_pixels

MAX_TIMES_UNIFORM = 16.0  # end of the scale: ratio to uniform attention, and its inverse
_MAP = 112  # pixels of a map


class ByOffset(NamedTuple):
    """Attention between patches by offset, the position of the key relative to the query.

    Attributes:
        maps: [blocks heads 2r-1 2c-1], for r rows and c columns of patches: mean over all images and all pairs of
            patches with that offset; offset 0 is in the middle. Uniform attention is 1/t everywhere.
        distances: [blocks heads] mean distance from query to key in patches, weighted by attention without class and
            register tokens; the smaller, the more local is a head.
    """

    maps: Tensor
    distances: Tensor


class _Measured(NamedTuple):
    """Result for one encoder: its name, attention by offset, grid of patches, and number of images."""

    name: str
    by_offset: ByOffset
    grid: Sides
    images: int


def relative_attention(encoder: Encoder, images: Tensor) -> ByOffset:
    """Return attention by the offset between patches, averaged over images and queries (MP3 Figs. 8 and 11).

    Args:
        encoder: ViT in eval mode.
        images: normalised images [b c h w] of the encoder's size; they are processed one by one.
    """
    grid = grid_size(encoder)
    row, column = (one.flatten() for one in torch.meshgrid(*map(torch.arange, grid), indexing="ij"))
    down, right = row[None] - row[:, None] + grid[0] - 1, column[None] - column[:, None] + grid[1] - 1
    offsets = down * (2 * grid[1] - 1) + right  # [n n], the index of each in a flattened map
    bins, pairs, far = (one.to(images.device) for one in (offsets, pairs_of(grid), distances_of(grid)))
    n, total = len(bins), torch.zeros(())
    for image in images.split(1):
        sums = []
        for weights in each_block(encoder, image):
            flat = weights[0, :, -n:, -n:].flatten(1)
            sums.append(flat.new_zeros(len(flat), pairs.numel()).index_add_(1, bins.flatten(), flat))
        total = torch.stack(sums) + total.to(images.device)
    total = total.unflatten(-1, tuple(pairs.shape))
    return ByOffset((total / (len(images) * pairs)).cpu(), ((total * far).sum((-2, -1)) / total.sum((-2, -1))).cpu())


def pairs_of(grid: Sides) -> Tensor:
    """Return the number of pairs of patches [2r-1 2c-1] with each offset."""
    rows, columns = (torch.tensor([*range(1, side), *range(side, 0, -1)]) for side in grid)
    return rows[:, None] * columns


def distances_of(grid: Sides) -> Tensor:
    """Return the length [2r-1 2c-1] of each offset in patches."""
    rows, columns = (torch.arange(1.0 - side, side) for side in grid)
    return (rows[:, None].square() + columns.square()).sqrt()


def uniform_distance(grid: Sides) -> float:
    """Return the mean distance of uniform attention in patches."""
    pairs = pairs_of(grid)
    return float((pairs * distances_of(grid)).sum() / pairs.sum())


def draw_relative(asked: LookRequest) -> list[Path]:
    """Draw attention by offset, ``relative.png``, and mean distances, ``distances.png`` and ``relative.csv``.

    Distances cover the encoder and those for comparison, except for Swins, which the caption lists.
    """
    refuse_hierarchical(asked.encoder.vit, "attention by offset", INSTEAD)
    numbers = chosen_layers(asked, len(layer_names(asked.encoder.vit)))
    found, left = list[_Measured](), list[str]()
    for other in (asked.encoder, *asked.beside):
        if is_hierarchical(other.vit):
            left.append(other.name)
            continue
        images = asked.pictures(of=other)
        with StatusMessage(f"measuring the attention of {other.name}"):
            by_offset = relative_attention(other.vit, images)
        check_finite(other, by_offset.maps)
        found.append(_Measured(other.name, by_offset, grid_size(other.vit), len(images)))
    table = [
        (measured.name, block, head, f"{distance:.6g}")
        for measured in found
        for block, heads in enumerate(measured.by_offset.distances.tolist(), 1)
        for head, distance in enumerate(heads, 1)
    ]
    return [
        _draw_maps(asked, numbers, found[0]),
        _draw_distances(asked, found, left),
        write_table(("encoder", "block", "head", "distance"), table, asked.folder / "relative.csv"),
    ]


def _draw_maps(asked: LookRequest, numbers: list[int], measured: _Measured) -> Path:
    """Draw a row of small maps for each block, the most local head first."""
    one, (maps, distances) = asked.encoder, measured.by_offset
    times = (prefix_count(one.vit) + patch_count(one.vit)) * maps
    times = times.clamp(1 / MAX_TIMES_UNIFORM, MAX_TIMES_UNIFORM)
    times = times if one.card.modality.top_down else times.flip(-2)
    end = math.log2(MAX_TIMES_UNIFORM)
    ends = f"{MAX_TIMES_UNIFORM:g}× less", f"{MAX_TIMES_UNIFORM:g}× more"
    scale = Scale("compared with uniform attention (white)", -end, end, "RdBu_r", ends)
    rows = []
    for number in numbers:
        near, shown = distances[number - 1], times[number - 1].log2().numpy()
        order = near.argsort().tolist()
        rows.append([Tile(scale.shade(shown[head]), f"{head + 1}: {near[head]:.1f}") for head in order])
    (height, width), images = measured.grid, one.modality.counted(measured.images)
    edges = f"{height - 1} patches up and down and {width - 1} to each side"
    if 1 in measured.grid:
        edges = f"{width - 1} patches to each side" if height == 1 else f"{height - 1} patches up and down"
    text = (
        f"Attention of a patch to the patch at each offset, averaged over {images} and all pairs of patches with that "
        f"offset. Offset 0 is in the middle; the edges are {edges}. Above each map are the number of the head and its "
        "mean attention distance in patches; the heads of a block are sorted by it, the most local first. A red dot is "
        "a head that attends to a fixed offset, stripes are one that attends along rows or columns, and a white map is "
        "one that ignores position (MP3, Zhai et al. 2022, Figs. 8 and 11)."
    )
    page = Page(
        rows,
        [""] * maps.shape[1],
        asked.title("attention by offset"),
        text,
        above=[f"block {number}" for number in numbers],
        scales=[scale],
    )
    page_caption = Caption(
        "Attention by relative position",
        "One map per head of the attention that patches pay to others at each offset. A red dot near the middle is a "
        "local head; a uniform map is a global one.",
        120,
    )
    tall, wide = maps.shape[-2:]
    size = round(100 * tall * cell_height((tall, wide))), 100 * wide
    return draw_tiles(page, size, asked.folder / "relative.png", page_caption, _MAP)


def _draw_distances(asked: LookRequest, found: list[_Measured], left: list[str]) -> Path:
    """Draw mean distances by block: dots for heads, a line for their mean, and a dashed line for uniform attention."""
    grids = dict.fromkeys(measured.grid for measured in found)
    caption = (
        "Mean distance between a patch and the patches it attends to, weighted by attention (Dosovitskiy et al. 2021, "
        f"Fig. 7), over all {asked.encoder.modality.noun} and patches together. Low dots are local heads; dots near "
        "the dashed line attend everywhere. Look in which blocks training has made heads local or global."
    )
    uniform = {"uniform": uniform_distance(found[0].grid)}
    if len(grids) > 1:
        caption += " Distances depend on the grid of patches: compare each encoder with its own dashed line."
        uniform = {f"uniform, {in_pixels(grid)} patches": uniform_distance(grid) for grid in grids}
    if left:
        caption += f" Left out: {listing(left, 'and')}, a Swin, which has no global attention."
    title = asked.title("attention distance").name
    with styled_figure((6.2, 4.6), {"w_pad": 0.12, "h_pad": 0.08}, title, caption) as figure:
        axes, lines = figure.subplots(), []
        for i, (measured, colour) in enumerate(zip(found, line_colours(len(found)), strict=True)):
            distances = measured.by_offset.distances.numpy()
            aside = (i - (len(found) - 1) / 2) * min(0.12, 0.5 / len(found))
            places = np.arange(1, len(distances) + 1) + aside
            lines.append(Line(measured.name, places, distances.mean(1)))
            axes.plot(places, distances, "o", color=colour, alpha=0.55, markersize=3.5, markeredgewidth=0)
        panel = Panel(
            "mean attention distance",
            "in patches; dots: heads, line: their mean",
            lines,
            show="{:.2f}".format,
            baselines=uniform,
            ticks=layer_ticks(1, max(len(measured.by_offset.distances) for measured in found)),
            from_zero=True,
            markers=False,
            axis="block",
        )
        draw_panel(axes, panel)
        page_caption = Caption(
            "Mean attention distance",
            "The mean distance between a patch and the patches it attends to, for each block, compared with the "
            "untrained encoder.",
            121,
        )
        return write_figure(figure, asked.folder / "distances.png", page_caption)
