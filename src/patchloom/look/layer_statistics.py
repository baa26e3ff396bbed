"""Statistics of features by block: frequency content, effective rank and similarity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import SubFigure
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from torch.nn import functional as F

from patchloom.display import StatusMessage
from patchloom.look.charts import (
    INK,
    Line,
    Panel,
    draw_panel,
    layer_ticks,
    short_name,
    styled_figure,
    write_figure,
    write_table,
)
from patchloom.look.context import LookRequest, NamedEncoder, check_finite
from patchloom.look.sheet import DPI, Caption, font, wrap
from patchloom.nets.encode import grid_size, layer_names, patch_count, patch_layers
from patchloom.nets.swin import is_hierarchical
from patchloom.questions.collapse import effective_rank

IMAGES, _FEWEST = 64, 8  # number of images, and its minimum for images with many patches
_PATCHES = 2048  # patches of all images, drawn at random, for rank and similarity
_ENOUGH = 16384  # sufficient number of patches of all images
_BATCH = 8
_LEAST = 1e-6  # added to amplitudes before the logarithm
_MAPS = 3  # in a row
_WIDTH = 9.6  # inches


class Depth(NamedTuple):
    """Statistics of the patch features before the first block and after each block, l in total.

    Attributes:
        layers: names [l], as in `layer_names` without the last norm.
        fourier: [l] log-amplitude of the highest frequency minus that of frequency 0; NaN for a single patch.
        rank: [l] effective rank.
        similarity: [l l] linear centred kernel alignment ‖bᵀa‖² / (‖aᵀa‖ ‖bᵀb‖) of centred features, in [0, 1]
            (Kornblith et al. 2019): 1 if one is a rotation, translation and scaling of the other.
        patches: number of patches for rank and similarity.
    """

    layers: tuple[str, ...]
    fourier: Tensor
    rank: Tensor
    similarity: Tensor
    patches: int


def relative_log_amplitude(maps: Tensor) -> Tensor:
    """Return the log-amplitude by frequency [f] of feature maps [b rows columns d], minus that of frequency 0.

    As in Park & Kim ("How do vision transformers work?", 2022) and their code: natural logarithms of the amplitudes of
    the two-dimensional Fourier transform, averaged over images and channels, along the half diagonal, from frequency 0
    to π, or as near to it as an odd side allows. A side of one patch has only frequency 0.
    """
    rows, columns = maps.shape[1:3]
    amplitude = torch.fft.fft2(maps.float(), dim=(1, 2), norm="forward").abs()
    steps = max(rows, columns) // 2
    at = torch.linspace(0, 1, steps + 1, device=maps.device)
    down, along = ((at * (side // 2)).round().long() for side in (rows, columns))
    found = (amplitude[:, down, along] + _LEAST).log().mean((0, 2))
    return found - found[0]


def measure_depth(one: NamedEncoder, images: Tensor, seed: int = 0) -> Depth:
    """Measure an encoder's patch features of images [b c h w] in all layers.

    Rank and similarity use the same `_PATCHES` patches in all layers. The maps of a Swin are averaged to its last grid.
    """
    vit, layers = one.vit, layer_names(one.vit)[:-1]
    many = len(images) * patch_count(vit)
    chosen = torch.randperm(many, generator=torch.Generator().manual_seed(seed))[:_PATCHES].sort().values
    fourier, kept = torch.zeros(len(layers)), [list[Tensor]() for _ in layers]
    parts = images.split(_BATCH)
    with torch.inference_mode(), StatusMessage(f"measuring the layers of {one.name}", len(parts)) as waiting:
        for start, some in zip(range(0, len(images), _BATCH), parts, strict=True):
            mine = chosen - start * patch_count(vit)
            mine = mine[(mine >= 0) & (mine < len(some) * patch_count(vit))]
            for i, maps in zip(range(len(layers)), patch_layers(vit, some), strict=False):  # the last norm is left out
                maps = check_finite(one, maps.float().cpu())
                spectrum = relative_log_amplitude(maps)
                fourier[i] += (spectrum[-1] if len(spectrum) > 1 else math.nan) * len(some) / len(images)
                if maps.shape[1:3] != grid_size(vit):  # of a Swin
                    maps = F.adaptive_avg_pool2d(maps.permute(0, 3, 1, 2), grid_size(vit)).permute(0, 2, 3, 1)
                kept[i].append(maps.flatten(0, 2)[mine])
            waiting.advance()
        features = [torch.cat(each) for each in kept]
        rank = torch.tensor([effective_rank(each) for each in features])
        scaled = [_scaled(each) for each in features]
        similarity = torch.eye(len(layers))
        for i, a in enumerate(scaled):
            for j in range(i + 1):
                similarity[i, j] = similarity[j, i] = _shared(a, scaled[j])
    return Depth(layers, fourier, rank, similarity, len(chosen))


def draw_depth(asked: LookRequest) -> list[Path]:
    """Draw the layer statistics of the encoder and those for comparison as ``depth.png`` and ``depth.csv``."""
    found, counts = list[tuple[str, Depth]](), list[int]()
    for one in (asked.encoder, *asked.beside):
        most = min(IMAGES, max(_FEWEST, -(-_ENOUGH // patch_count(one.vit))))
        images = asked.pictures(most, of=one)
        counts.append(len(images))
        found.append((one.name, measure_depth(one, images, asked.seed)))
    out = asked.folder / "depth.png"
    lines, title = -(-len(found) // _MAPS), asked.title("its features from block to block").name
    # matplotlib does not wrap what stands below parts of a figure
    caption = "\n".join(wrap(_caption(asked, found, counts), font(round(8 * DPI / 72)), round((_WIDTH - 0.3) * DPI)))
    size = _WIDTH, 4.2 + 3.3 * lines
    with styled_figure(size, {"w_pad": 0.1, "h_pad": 0.08}, title, caption) as figure:
        above, beneath = figure.subfigures(2, 1, squeeze=False, height_ratios=[3.2, 3.3 * lines])[:, 0]
        depths = {len(depth.layers) for _, depth in found}
        kinds = {depth.layers[-1].split()[0] for _, depth in found}
        ticks, axis = {0.0: "0", 0.5: "0.5", 1.0: "1"}, "fraction of the depth"
        if alike := len(depths) == len(kinds) == 1:
            ticks, axis = layer_ticks(0, max(depths)), f"after {min(kinds)} (0: input of the first)"
        curves = (
            ("relative log-amplitude", "of the highest frequency, less frequency 0", "fourier"),
            ("effective rank", "of patch features (RankMe)", "rank"),
        )
        for axes, (name, note, measure) in zip(above.subplots(1, 2), curves, strict=True):
            drawn = []
            for encoder, depth in found:
                values = getattr(depth, measure).numpy()
                drawn.append(Line(encoder, np.arange(len(values)) / (1 if alike else max(1, len(values) - 1)), values))
            draw_panel(axes, Panel(name, note, drawn, ticks=ticks, axis=axis))
        _draw_maps(beneath, found)
        page_caption = Caption(
            "Features by block",
            "Frequency content, effective rank and similarity of the features after each block, compared with the "
            "untrained encoder. A rank that falls towards 1 is a collapse.",
            140,
        )
        write_figure(figure, out, page_caption)
    rows = []
    for name, depth in found:
        named = {"relative log-amplitude": depth.fourier, "effective rank": depth.rank}
        named |= {f"linear CKA with block {j}": row for j, row in enumerate(depth.similarity)}
        for measure, values in named.items():
            texts = [f"{value:.6g}" if math.isfinite(value) else "" for value in values.tolist()]
            rows += [(name, number, measure, text) for number, text in enumerate(texts)]
    return [out, write_table(("encoder", "block", "measure", "value"), rows, out.with_suffix(".csv"))]


def _scaled(features: Tensor) -> Tensor:
    """Centre features [m d] and scale them so that ‖xᵀx‖ is 1."""
    x = features.float() - features.float().mean(0)
    x = x / x.square().mean().sqrt()  # prevents overflow
    return x / _shared(x, x) ** 0.25


def _shared(x: Tensor, y: Tensor) -> float:
    """Return ‖yᵀx‖² of features [m d] and [m e], computed with the smaller matrices."""
    if len(x) < min(x.shape[1], y.shape[1]):
        return float(((x @ x.T) * (y @ y.T)).sum(dtype=torch.float64))
    return float((y.T @ x).square().sum(dtype=torch.float64))


def _draw_maps(figure: SubFigure, found: Sequence[tuple[str, Depth]]) -> None:
    """Draw a heat map of similarity for each encoder."""
    rows = -(-len(found) // _MAPS)
    places = figure.subplots(rows, _MAPS, squeeze=False).flatten()
    for axes in places[len(found) :]:
        axes.set_visible(False)
    for axes, (name, depth) in zip(places, found, strict=False):
        shown = axes.imshow(depth.similarity.numpy(), cmap="magma", vmin=0, vmax=1, origin="lower")
        axes.set_title(f"linear CKA: {short_name(name)}", fontsize=9, color=INK)
        axes.set_xlabel(depth.layers[-1].split()[0])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[:].set_visible(False)
    bar = figure.colorbar(shown, ax=places[: len(found)].tolist(), shrink=0.7, aspect=18)
    bar.set_label("0: unrelated, 1: equal up to a rotation", fontsize=8)
    bar.outline.set_visible(False)


def _caption(asked: LookRequest, found: Sequence[tuple[str, Depth]], counts: Sequence[int]) -> str:
    patches = min(depth.patches for _, depth in found)
    lot = ", drawn at random" if patches == _PATCHES else ""
    item, noun = asked.encoder.modality.item, asked.encoder.modality.noun
    many = f"{min(counts)} {noun}" if min(counts) > 1 else f"a single {item}"
    said = [
        f"Measured on {many}; rank and similarity on {patches:,} patches of {'them' if min(counts) > 1 else 'it'}"
        f"{lot}.",
        f"Left: amplitude of the highest frequency of the features relative to their mean over the {item} (natural "
        "logarithm); a falling curve means that blocks average fine detail away (Park & Kim 2022).",
        "Right: effective rank of the features (RankMe, Garrido et al. 2023), which are not centred: it is low if all "
        "patches are similar, or share a large vector.",
        "Bottom: similarity of blocks (linear CKA, Kornblith et al. 2019). Bright squares are groups of blocks that "
        "change little; look where they end.",
    ]
    if patches < _PATCHES:
        said.append(f"With only {patches:,} patches, rank is lower and similarity higher than with many.")
    if any(is_hierarchical(one.vit) for one in (asked.encoder, *asked.beside)):
        said.append(
            "For a Swin each stage is a point: rank and similarity are of maps averaged to the last grid, and "
            "the highest frequency is that of the stage's own grid."
        )
    grids = {grid_size(one.vit) for one in (asked.encoder, *asked.beside)}
    if any(rows * columns == 1 for rows, columns in grids):
        said.append("A single patch has no frequencies.")
    elif any(1 in grid for grid in grids):
        said.append("For a single row of patches, the frequencies are those along it.")
    return " ".join(said)
