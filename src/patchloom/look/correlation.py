"""Similarity of patch features: of all pairs of positions (MP3, Zhai et al. 2022, Fig. 10), and of one patch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.source import Source
from patchloom.data.sources.in_memory import evenly_spaced
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.look.charts import write_table
from patchloom.look.context import (
    LookRequest,
    NamedEncoder,
    full_caption,
    mark_of,
    orient_rows,
    output_of,
    patch_at,
    patch_box,
    to_pictures,
)
from patchloom.look.sheet import MARK, Caption, Page, Scale, Tile, draw_tiles
from patchloom.nets.encode import grid_size, patch_count
from patchloom.results.claims import UNTRAINED

CORRELATION_IMAGES = 1000  # largest number of images for the correlation of positions
_PATCHES = 4096  # largest number of patches: a matrix of all pairs of more is too large to draw
_SIDE, _PIXELS = 480, 640  # pixels of a map of all pairs as it is drawn and, about, as it is computed
_STRETCHED = 4  # grids with a larger aspect ratio are drawn as the plain matrix


class Correlation(NamedTuple):
    """Cosine similarity of one patch of each image to all patches.

    Attributes:
        within: [b rows columns] similarity to patches of the same image; 1 at the patch itself.
        across: [b rows columns] similarity to patches of the next image; the last image is followed by the first.
    """

    within: Tensor
    across: Tensor


def centred(features: Tensor) -> Tensor:
    """Subtract the mean over all patches of all images from patch features [b rows columns d].

    A common component makes every cosine large and hides the differences.
    """
    return features - features.mean((0, 1, 2))


def correlation(features: Tensor, queries: Tensor) -> Correlation:
    """Return the cosines between the feature of one patch of each image and those of all patches.

    Args:
        features: patch features [b rows columns d].
        queries: number [b] of the patch of each image, row by row.
    """
    unit = F.normalize(features.float(), dim=-1)
    asked = unit.flatten(1, 2)[torch.arange(len(unit)), queries]
    others = unit.roll(-1, 0)
    return Correlation(*(torch.einsum("bd,brcd->brc", asked, one) for one in (unit, others)))


def salient_patches(features: Tensor) -> Tensor:
    """Return the patch [b] of each image whose feature [b rows columns d] is farthest from the image's mean."""
    flat = features.flatten(1, 2)
    return (flat - flat.mean(1, keepdim=True)).square().sum(-1).argmax(1)


class PositionCorrelation(NamedTuple):
    """Pearson correlation of the features of every pair of positions, averaged over images.

    Attributes:
        within: [n n] correlation of two positions of the same image; 1 on the diagonal.
        across: [n n] correlation of positions of two images; NaN for a single image.
        images: number of images.
    """

    within: Tensor
    across: Tensor
    images: int

    def means(self) -> dict[str, tuple[float, float]]:
        """Return the means over pairs of different and of equal positions, "within" and "across" images."""
        apart = ~torch.eye(len(self.within), dtype=torch.bool)
        each = {"within": self.within, "across": self.across}
        return {name: (float(one[apart].mean()), float(one.diagonal().mean())) for name, one in each.items()}


def position_correlation(
    one: NamedEncoder, source: Source, device: torch.device | str = "cpu", seed: int = 0
) -> PositionCorrelation:
    """Correlate the last layer's features of every pair of positions, within images and across (MP3, Fig. 10).

    Correlations are over the d features of a patch after the last norm. Images are paired at random: in a random
    order, each with the next one, and the last with the first.
    """
    n = patch_count(one.vit)
    if n > _PATCHES:
        raise PatchloomError(
            f"{one.name} has {n:,} patches, and correlations of all pairs are drawn for at most {_PATCHES:,}: give a "
            "smaller --img_size"
        )
    order = np.random.default_rng(seed).permutation(len(source))
    within, across, count = torch.zeros(n, n), torch.zeros(n, n), 0
    first, last = torch.empty(0), torch.empty(0)
    with StatusMessage(f"correlating the features of {one.name}", len(source)) as waiting:
        for indices, images in one.batches(source.subset(order), device):
            features = output_of(one, images).flatten(1, 2)
            unit = F.normalize(features - features.mean(-1, keepdim=True), dim=-1)
            within += torch.einsum("bid,bjd->ij", unit, unit)
            follows = torch.cat([last, unit]) if count else unit
            across += torch.einsum("bid,bjd->ij", follows[:-1], follows[1:])
            first, last, count = first if count else unit[:1], unit[-1:], count + len(unit)
            waiting.advance(len(indices))
    across = across + last[0] @ first[0].T if count > 1 else torch.full_like(across, torch.nan)
    return PositionCorrelation(within / count, across / count, count)


def draw_correlation(asked: LookRequest) -> list[Path]:
    """Draw the similarity of one patch of each image to all of this image and the next, and of all pairs of positions.

    The files are ``correlation-positions.png`` with a CSV file, and ``correlation.png``.
    """
    one, images = asked.encoder, asked.pictures()
    features = centred(output_of(one, images))
    queries = salient_patches(features)
    if asked.queries:
        queries = torch.full((len(images),), patch_at(one, asked.queries[0]))
    shown = to_pictures(one, images)
    scale = Scale("correlation with the marked patch", -1.0, 1.0, "RdBu_r")
    several = len(images) > 1
    found = [(one.name, correlation(features, queries))]
    for other in asked.beside[:1]:
        its = centred(output_of(other, asked.pictures(of=other)))
        rows, columns = its.shape[1:3]
        same = []  # the patches of its grid at the centres of the queries
        for query in queries.tolist():
            top, left, tall, wide = patch_box(grid_size(one.vit), query)
            same.append(int((top + tall / 2) * rows) * columns + int((left + wide / 2) * columns))
        found.append((other.name, correlation(its, torch.tensor(same))))
    item = one.modality.item
    headings = [item, *[f"next {item}"] * several, *[f"within the {item}", *["in the next"] * several] * len(found)]
    groups = [("", 1 + several), *((name, 1 + several) for name, _ in found)]
    maps = [[orient_rows(one, part) for part in each] for _, each in found]
    tiles = []
    for i, query in enumerate(queries.tolist()):
        marks = [(mark_of(one, query), MARK)]
        row = [Tile(shown[i], marks=marks), *[Tile(shown[(i + 1) % len(images)])] * several]
        for within, across in maps:
            row += [Tile(scale.shade(within[i]), marks=marks), *[Tile(scale.shade(across[i]))] * several]
        tiles.append(row)
    title, caption = asked.title("one patch and all others"), full_caption(one, _caption(asked, several), images)
    page_caption = Caption(
        "Similarity to one patch",
        f"The similarity of the marked patch to all patches of its own {item} and of the next. Look whether similar "
        "patches show the same kind of thing, or only the same brightness.",
        130,
    )
    page = Page(tiles, headings, title, caption, groups, scales=[scale])
    picture = draw_tiles(page, shown.shape[1:3], asked.folder / "correlation.png", page_caption)
    return [picture, *_draw_positions(asked)]


def _draw_positions(asked: LookRequest) -> list[Path]:
    """Draw a map for each position, within images and across, also for the untrained encoder; write means as CSV."""
    one = asked.encoder
    source = asked.source.subset(evenly_spaced(len(asked.source), CORRELATION_IMAGES))
    encoders = (one, *asked.beside[:1])
    found = [(each, position_correlation(each, source, asked.device, asked.seed)) for each in encoders]
    several = found[0][1].images > 1
    where = ["within", *(["across"] if several else [])]
    scales = []
    for name in where:
        values = torch.cat([getattr(each, name).flatten() for _, each in found])
        if name == "within":  # without the correlations of a position with itself
            values = torch.cat([each.within[~torch.eye(len(each.within), dtype=torch.bool)] for _, each in found])
        ends = (float(values.min()), float(values.max())) if len(values) else (-1.0, 1.0)
        scales.append(Scale(f"Pearson correlation, {name} {one.modality.noun}", *ends))
    rows = [
        [
            Tile(_map_of_pairs(each, getattr(matrices, name), scale), each.name)
            for name, scale in zip(where, scales, strict=True)
        ]
        for each, matrices in found
    ]
    headings = [f"{name} {one.modality.noun}" for name in where]
    grid = grid_size(one.vit)
    size = (grid[0] ** 2, grid[1] ** 2) if _in_cells(grid) else (1, 1)
    count = found[0][1].images
    item, noun = one.modality.item, one.modality.noun
    many = f"{count:,} {noun} and as many random pairs of them" if several else f"a single {item}"
    text = f"Pearson correlation of the last layer's features at every pair of positions, averaged over {many}."
    if _in_cells(grid):
        text += " Each small map belongs to one position and shows its correlation with all positions."
    else:
        text += " Rows and columns are positions."
    for each, matrices in found:
        means = matrices.means()
        text += f" {each.name}: on average {means['within'][0]:.2f} within {one.modality.an_item}"
        if several:
            text += f", {means['across'][0]:.2f} across, {means['across'][1]:.2f} across at the same position"
        text += "."
    text += (
        f" Maps that are bright around their own position, also across {noun}, show that features encode position; "
        "larger correlations within than across show that they encode content (MP3, Zhai et al. 2022, Fig. 10)."
    )
    title, out = asked.title("every pair of positions"), asked.folder / "correlation-positions.png"
    page = Page(rows, headings, title, text, scales=scales)
    page_caption = Caption(
        "Similarity between positions",
        f"The mean similarity of the features at each pair of positions, within {one.modality.an_item} and between "
        "two. Maps that are bright around their own position show that features encode position; higher values within "
        f"than between {one.modality.noun} show that they encode content.",
        131,
    )
    draw_tiles(page, size, out, page_caption, _SIDE)
    table = [
        (each.name, name, which, f"{mean:.6g}", matrices.images)
        for each, matrices in found
        for name, means in matrices.means().items()
        if name in where
        for which, mean in zip(("different positions", "the same position"), means, strict=True)
    ]
    heading = ("encoder", "where", "pairs", "mean", "images")
    return [out, write_table(heading, table, out.with_suffix(".csv"))]


def _in_cells(grid: tuple[int, int]) -> bool:
    """Return whether positions are drawn as a grid of maps; a row of patches is drawn as the plain matrix."""
    return min(grid) > 1 and max(grid) ** 2 <= _STRETCHED * min(grid) ** 2


def _map_of_pairs(one: NamedEncoder, matrix: Tensor, scale: Scale) -> np.ndarray:
    """Return colours [h w 3] for a matrix [n n]: a grid with a map of all positions for each position."""
    rows, columns = grid = grid_size(one.vit)
    if not _in_cells(grid):
        return scale.shade(matrix.numpy())
    maps = orient_rows(one, matrix.unflatten(1, grid)).reshape(rows, columns, rows, columns)
    maps = maps if one.card.modality.top_down else maps[::-1]
    enlarged = max(1, round(_PIXELS / max(rows, columns) ** 2))
    gap = max(1, round(0.06 * enlarged * min(grid)))
    lines = []
    for line in maps:
        cells = [scale.shade(cell).repeat(enlarged, 0).repeat(enlarged, 1) for cell in line]
        edge = np.full((len(cells[0]), gap, 3), 255, np.uint8)
        joined = np.concatenate([part for cell in cells for part in (cell, edge)][:-1], axis=1)
        lines += [joined, np.full((gap, joined.shape[1], 3), 255, np.uint8)]
    return np.concatenate(lines[:-1])


def _caption(asked: LookRequest, several: bool) -> str:
    item = asked.encoder.modality.item
    how = "as requested" if asked.queries else f"the one whose feature is farthest from its {item}'s mean"
    said = [
        f"Cosine similarity of each patch to the marked patch ({how}), after subtracting the mean feature of all "
        "patches drawn. Red: similar. White: unrelated. Blue: opposite."
    ]
    said += [f"The next {item} is that of the row below, and for the last row that of the first."] * several
    said += [f"There is only one {item}, so there is no next one."] * (not several)
    if asked.beside:
        other = asked.beside[0].name
        said.append(f"Right: the same for {'the untrained encoder' if other == UNTRAINED else other}.")
    said.append(
        "Look whether red patches show the same kind of thing, also elsewhere"
        f"{f' in the next {item}' if several else ''}; red only around the mark"
        f"{', or at the same place in both,' if several else ''} means position, not content."
    )
    return " ".join(said)
