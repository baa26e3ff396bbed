"""Principal components of patch features as colours, shared by several images (Oquab et al. 2023, Fig. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.data.modality import Modality
from patchloom.look.context import (
    LookRequest,
    check_finite,
    chosen_layers,
    full_caption,
    orient_rows,
    output_of,
    to_pictures,
)
from patchloom.look.sheet import EMPTY_MARK, TILE_SIDE, Caption, Page, Scale, Tile, draw_tiles, resize, tile_size
from patchloom.nets.encode import layer_names, patch_layers
from patchloom.patches.pictures import principal

SEVERAL = 3  # smallest number of images for subtracting the mean of each position: two would be each other's opposite
_BLOCKS = 3  # default number of blocks
_COLOURS = 3


class Components(NamedTuple):
    """Principal components of the patch features [b rows columns d] of some images.

    Attributes:
        first: [b rows columns] the first component, with the sign for which the foreground is above 0.
        colours: [b rows columns 3] the first three components as red, green and blue in [0, 1].
        foreground: [b rows columns] True where the first component is above 0.
        within: [b rows columns 3] the first three components of the foreground's patches; NaN elsewhere.
        variance: [3] fractions of the variance explained by the first three components.
    """

    first: Tensor
    colours: Tensor
    foreground: Tensor
    within: Tensor
    variance: Tensor


def components(features: Tensor) -> Components:
    """Return the first three principal components of patch features [b rows columns d] of all images together.

    A colour has the same meaning in all images of one call. As in DINOv2, the foreground is where the first component
    is above its mean, and a second PCA of the foreground's patches gives their colours. The sign of a component is
    arbitrary: the foreground is the side with the smaller fraction of patches along the edges of the images.
    """
    rows, columns = features.shape[1:3]
    axes = principal(features.flatten(0, 2), _COLOURS)
    first, colours = axes.project(features)[..., 0], _three(axes.colours(features))
    edge = edge_of((rows, columns)).expand_as(first)
    above = first > 0
    if above.any() and not above.all() and _share(edge, above) > _share(edge, ~above):
        first, above = -first, first < 0
    within = torch.full_like(colours, torch.nan)
    if above.sum() > 1:
        inside = features.detach().cpu()[above]
        within[above] = _three(principal(inside, _COLOURS).colours(inside))
    return Components(first.float(), colours, above, within, axes.variance)


def edge_of(grid: tuple[int, int]) -> Tensor:
    """Return a mask of the patches [rows columns] along the edges; sides of one or two patches are ignored."""
    edge = torch.zeros(grid, dtype=torch.bool)
    for axis, side in enumerate(grid):
        if side > 2:
            edge.index_fill_(axis, torch.tensor([0, side - 1]), True)
    return edge


def _share(edge: Tensor, side: Tensor) -> float:
    return float((edge & side).sum() / side.sum())


def _three(colours: Tensor) -> Tensor:
    """Pad components [... k] with zeros to three colours [... 3]."""
    missing = _COLOURS - colours.shape[-1]
    return colours if not missing else torch.cat([colours, torch.zeros(*colours.shape[:-1], missing)], dim=-1)


def draw_features(asked: LookRequest) -> list[Path]:
    """Draw the principal components of the encoder's output and of some blocks as ``components.png``."""
    one, images = asked.encoder, asked.pictures()
    names, numbers = layer_names(one.vit), chosen_layers(asked, _BLOCKS)
    last = len(names) - 2
    with torch.inference_mode():
        layers = [check_finite(one, layer.float().cpu()) for layer in patch_layers(one.vit, images)]
    found = components(layers[-1])
    shown = to_pictures(one, images)
    reach = float(found.first.abs().quantile(0.98)) or 1.0
    scale = Scale("first component", -reach, reach, "PuOr_r", ("background", "foreground"))
    first = [scale.shade(values) for values in orient_rows(one, found.first)]
    within = orient_rows(one, found.within)
    marks = EMPTY_MARK * np.isnan(within).any(-1).astype(np.uint8)
    h, w = tile_size(1000 * shown.shape[1], 1000 * shown.shape[2], TILE_SIDE)
    inside = _bytes(np.nan_to_num(within))
    columns: dict[str, Sequence[np.ndarray] | np.ndarray] = {
        one.modality.item: shown,
        "first component": first,
        "first three, all patches": _bytes(orient_rows(one, found.colours)),
        "first three, foreground": [resize(tile, h, w, its) for tile, its in zip(inside, marks, strict=True)],
    }
    if len(images) >= SEVERAL:
        # features that mainly encode position have a different colour at every place for the same thing
        content = layers[-1] - layers[-1].mean(0)
        columns["all, minus position mean"] = _bytes(orient_rows(one, components(content).colours))
    for other in asked.beside[:1]:
        features = output_of(other, asked.pictures(of=other))
        columns[f"first three, {other.name}"] = _bytes(orient_rows(other, components(features).colours))
    # the output of the last block is drawn already, after the norm
    between = [i for i in numbers if asked.blocks is not None or i < last]
    for i in between:
        columns[f"after {names[i]}"] = _bytes(orient_rows(one, components(layers[i]).colours))
    rows = [[Tile(column[i]) for column in columns.values()] for i in range(len(images))]
    title = asked.title("principal components of its patch features")
    caption = full_caption(one, _caption(found, len(images), bool(between), one.modality), images)
    page_caption = Caption(
        "Three principal components of the patch features",
        "Patches of the same colour have similar features. It is a good sign if the same kind of object has the same "
        f"colour in different {one.modality.noun}, and a bad one if the colours depend mainly on position.",
        100,
    )
    page = Page(rows, list(columns), title, caption, scales=[scale])
    return [draw_tiles(page, shown.shape[1:3], asked.folder / "components.png", page_caption)]


def _bytes(colours: np.ndarray) -> np.ndarray:
    return (255 * colours).round().astype(np.uint8)


def _caption(found: Components, images: int, between: bool, modality: Modality) -> str:
    shares = ", ".join(f"{share:.0%}" for share in found.variance.tolist())
    inside = float(found.foreground.float().mean())
    noun = modality.noun
    together = f"this {modality.item}" if images == 1 else f"these {images} {noun} together"
    said = [
        "Patches of the same colour have similar features. All patches: red, green and blue are the first three "
        f"principal components of the patch features of {together}, with {shares} of the variance.",
        f"Foreground: the {inside:.0%} of the patches whose first component is above its mean, coloured by a separate "
        "PCA; the rest is hatched. The foreground is taken to be the side with fewer patches at the edges, which may "
        "be wrong.",
    ]
    if images >= SEVERAL:
        said.append(
            f"Minus position mean: the same after subtracting the mean over the {noun} at each position. If all {noun} "
            "look the same without this, the features mainly encode position."
        )
    if between:
        said.append("After a block: a separate PCA of that block, so colours of different blocks are unrelated.")
    said.append(
        f"Look whether the same kind of thing has the same colour in all {noun}, and whether colours follow objects "
        "rather than position or brightness (DINOv2, Oquab et al. 2023, Fig. 1)."
    )
    return " ".join(said)
