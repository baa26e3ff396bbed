"""How alike features of patches are: of every pair of positions (MP3, Zhai et al. 2022, Fig. 10), and of one patch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.loader import plain_batches
from patchloom.data.source import Source
from patchloom.data.stats import normalize
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.look.charts import write_table
from patchloom.look.context import (
    UNTRAINED,
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
from patchloom.look.image_grid import Scale, Tile, draw_tiles
from patchloom.nets.encode import grid_size, input_channels, input_size, patch_count

CORRELATION_IMAGES = 1000  # at most, evenly spread, of which the mean over pairs of positions is taken
_PATCHES = 4096  # at most: of more, a matrix of all pairs is too large to be drawn
_BATCH = 32
_SIDE, _PIXELS = 3.2, 640  # inches of a map of all pairs, and its pixels, about
_STRETCHED = 4  # maps of longer shape are drawn as the plain matrix


class Correlation(NamedTuple):
    """Cosines of one patch's feature of each image with those of all patches.

    Attributes:
        within: [b rows columns] of its own image; 1 at the patch itself.
        across: [b rows columns] of the next image, the first being next to the last.
    """

    within: Tensor
    across: Tensor


def centred(features: Tensor) -> Tensor:
    """Patch features [b rows columns d] less their mean over all patches of all images.

    What all patches have in common makes every cosine large, and hides what tells them apart.
    """
    return features - features.mean((0, 1, 2))


def correlation(features: Tensor, queries: Tensor) -> Correlation:
    """Cosines between the features of one patch of each image and those of all patches.

    Args:
        features: [b rows columns d].
        queries: [b] number of the patch of each image, row by row.
    """
    unit = F.normalize(features.float(), dim=-1)
    asked = unit.flatten(1, 2)[torch.arange(len(unit)), queries]
    others = unit.roll(-1, 0)
    return Correlation(*(torch.einsum("bd,brcd->brc", asked, one) for one in (unit, others)))


def salient_patches(features: Tensor) -> Tensor:
    """Of each image the patch [b] whose feature, of [b rows columns d], is farthest from the image's mean."""
    flat = features.flatten(1, 2)
    return (flat - flat.mean(1, keepdim=True)).square().sum(-1).argmax(1)


class PositionCorrelation(NamedTuple):
    """Pearson correlation of the features of every pair of positions, averaged over images.

    Attributes:
        within: [n n] of two positions of one image; 1 on the diagonal.
        across: [n n] of a position of an image and one of another image; nan if there is one image.
        images: number of images.
    """

    within: Tensor
    across: Tensor
    images: int

    def means(self) -> dict[str, tuple[float, float]]:
        """Return the means over pairs of different positions, and of equal ones, "within" and "across" images."""
        apart = ~torch.eye(len(self.within), dtype=torch.bool)
        each = {"within": self.within, "across": self.across}
        return {name: (float(one[apart].mean()), float(one.diagonal().mean())) for name, one in each.items()}


def position_correlation(
    one: NamedEncoder, source: Source, device: torch.device | str = "cpu", seed: int = 0
) -> PositionCorrelation:
    """Correlate the last layer's features of every pair of positions, within images and across (MP3, Fig. 10).

    The features of a patch are its numbers after the last norm; a correlation is over these d numbers. Images are
    paired at random: in a random order, each with the next one, and the last with the first.
    """
    n = patch_count(one.vit)
    if n > _PATCHES:
        raise PatchloomError(
            f"{one.name} has {n:,} patches, and correlations of all pairs are drawn of at most {_PATCHES:,}: give a "
            "smaller --img_size"
        )
    order = np.random.default_rng(seed).permutation(len(source))
    batches = plain_batches(
        source.subset(order), input_size(one.vit), _BATCH, channels=input_channels(one.vit), device=device
    )
    within, across, count = torch.zeros(n, n), torch.zeros(n, n), 0
    first, last = torch.empty(0), torch.empty(0)
    with StatusMessage(f"correlating the features of {one.name}", len(source)) as waiting:
        for batch in batches:
            features = output_of(one, normalize(batch.views[0], one.card.mean, one.card.std)).flatten(1, 2)
            unit = F.normalize(features - features.mean(-1, keepdim=True), dim=-1)
            within += torch.einsum("bid,bjd->ij", unit, unit)
            follows = torch.cat([last, unit]) if count else unit
            across += torch.einsum("bid,bjd->ij", follows[:-1], follows[1:])
            first, last, count = first if count else unit[:1], unit[-1:], count + len(unit)
            waiting.advance(len(batch.indices))
    across = across + last[0] @ first[0].T if count > 1 else torch.full_like(across, torch.nan)
    return PositionCorrelation(within / count, across / count, count)


def draw_correlation(asked: LookRequest) -> list[Path]:
    """Draw correlations of all pairs of positions, ``correlation-positions.png``, and of one patch of each image.

    The second is ``correlation.png``: a patch of each image, and how alike all others are to it there and in the next.
    """
    return [*_draw_patches(asked), *_draw_positions(asked)]


def _draw_positions(asked: LookRequest) -> list[Path]:
    """Draw a map for each position, within images and across, beside the untrained encoder; with means as CSV."""
    one = asked.encoder
    places = np.unique(
        np.linspace(0, len(asked.source) - 1, min(CORRELATION_IMAGES, len(asked.source))).round().astype(int)
    )
    source = asked.source.subset(places)
    encoders = (one, *asked.beside[:1])
    found = [(each, position_correlation(each, source, asked.device, asked.seed)) for each in encoders]
    several = found[0][1].images > 1
    where = ["within", *(["across"] if several else [])]
    scales = [Scale(f"Pearson correlation, {name} {one.modality.noun}", *_range(found, name)) for name in where]
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
    title, out = asked.title("every pair of positions").name, asked.folder / "correlation-positions.png"
    caption = _caption_of_pairs(asked, found, several)
    draw_tiles(rows, headings, size, title, caption, out, scales, side=_SIDE)
    table = [
        (each.name, name, which, f"{mean:.6g}", matrices.images)
        for each, matrices in found
        for name, means in matrices.means().items()
        if name in where
        for which, mean in zip(("different positions", "the same position"), means, strict=True)
    ]
    heading = ("encoder", "where", "pairs", "mean", "images")
    return [out, write_table(heading, table, out.with_suffix(".csv"))]


def _range(found: list[tuple[NamedEncoder, PositionCorrelation]], name: str) -> tuple[float, float]:
    """Return the smallest and the largest correlation; of a position with itself it is known, and left out."""
    matrices = [getattr(each, name) for _, each in found]
    if name == "within":
        matrices = [one[~torch.eye(len(one), dtype=torch.bool)] for one in matrices]
    values = torch.cat([one.flatten() for one in matrices])
    return (float(values.min()), float(values.max())) if len(values) else (-1.0, 1.0)


def _in_cells(grid: tuple[int, int]) -> bool:
    """Tell whether positions are drawn as a grid of maps; a row of patches is drawn as the plain matrix."""
    return min(grid) > 1 and max(grid) ** 2 <= _STRETCHED * min(grid) ** 2


def _map_of_pairs(one: NamedEncoder, matrix: Tensor, scale: Scale) -> np.ndarray:
    """Return colours [h w 3] of a matrix [n n]: at the place of each position, its map of all positions."""
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


def _caption_of_pairs(asked: LookRequest, found: list[tuple[NamedEncoder, PositionCorrelation]], several: bool) -> str:
    cells = _in_cells(grid_size(asked.encoder.vit))
    count = found[0][1].images
    item, noun = asked.encoder.modality.item, asked.encoder.modality.noun
    many = f"{count:,} {noun}" if several else f"a single {item}"
    said = [
        "Pearson correlation of the last layer's features of every pair of positions, averaged over "
        f"{many}{' and as many random pairs of them' if several else ''}.",
        "Each small map belongs to the position where it stands, and shows how alike all positions are to it."
        if cells
        else "A row is a position, a column another one.",
    ]
    for each, matrices in found:
        means = matrices.means()
        text = f"{each.name}: on average {means['within'][0]:.2f} within {asked.encoder.modality.an_item}"
        if several:
            text += f", {means['across'][0]:.2f} across, {means['across'][1]:.2f} across at the same position"
        said.append(f"{text}.")
    said.append(
        f"Maps that are bright around their own position tell of position, also across {noun}; larger correlations "
        "within than across tell of content (MP3, Zhai et al. 2022, Fig. 10)."
    )
    return " ".join(said)


def _draw_patches(asked: LookRequest) -> list[Path]:
    """Draw a patch of each image, and how alike all others are to it there and in the next, as ``correlation.png``."""
    one, images = asked.encoder, asked.pictures()
    features = centred(output_of(one, images))
    if asked.query is None:
        queries = salient_patches(features)
    else:
        queries = torch.full((len(images),), patch_at(one, asked.query))
    shown = to_pictures(one, images)
    scale = Scale("correlation with the marked patch", -1.0, 1.0, "RdBu_r")
    several = len(images) > 1
    found = [(one.name, correlation(features, queries))]
    for other in asked.beside[:1]:
        its = centred(output_of(other, asked.pictures(of=other)))
        found.append((other.name, correlation(its, _same_places(one, queries, its))))
    item = one.modality.item
    headings = [item, *([f"next {item}"] if several else [])]
    groups = [("", len(headings))]
    for name, _ in found:
        headings += [f"within the {item}", *(["in the next"] if several else [])]
        groups.append((name, 2 if several else 1))
    maps = [[orient_rows(one, part) for part in each] for _, each in found]
    rows = []
    for i, query in enumerate(queries.tolist()):
        row = [Tile(shown[i], mark=mark_of(one, query))]
        row += [Tile(shown[(i + 1) % len(images)])] if several else []
        for within, across in maps:
            row.append(Tile(scale.shade(within[i]), mark=mark_of(one, query)))
            row += [Tile(scale.shade(across[i]))] if several else []
        rows.append(row)
    title, caption = asked.title("one patch and all others").name, full_caption(one, _caption(asked, several), images)
    out = asked.folder / "correlation.png"
    return [draw_tiles(rows, headings, shown.shape[1:3], title, caption, out, [scale], groups)]


def _same_places(one: NamedEncoder, queries: Tensor, features: Tensor) -> Tensor:
    """Where the middles of patches [b] lie in the grid of another encoder's features [b rows columns d]."""
    rows, columns = features.shape[1:3]
    found = []
    for query in queries.tolist():
        top, left, tall, wide = patch_box(grid_size(one.vit), query)
        found.append(int((top + tall / 2) * rows) * columns + int((left + wide / 2) * columns))
    return torch.tensor(found)


def _caption(asked: LookRequest, several: bool) -> str:
    item = asked.encoder.modality.item
    how = f"the one whose feature is farthest from its {item}'s mean" if asked.query is None else "as was asked for"
    said = [
        f"How alike the features of patches are to that of the marked patch ({how}): their cosine, less what all "
        "patches have in common (the mean feature of all that is drawn). Red: alike. White: no more than any two. "
        "Blue: opposite."
    ]
    if several:
        said.append(f"The next {item} is that of the row beneath; of the last row, that of the first.")
    else:
        said.append(f"Of a single {item} there is no next one to be compared with.")
    if asked.beside:
        other = asked.beside[0].name
        said.append(f"At the right the same by {'the untrained encoder' if other == UNTRAINED else other}.")
    said.append(
        "Look whether red keeps to the parts of one kind, also where they lie elsewhere"
        f"{f' in the next {item}' if several else ''}; red around the mark alone"
        f"{', or at the same place in both,' if several else ''} is position and not content."
    )
    return " ".join(said)
