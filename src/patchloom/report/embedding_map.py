"""Maps of image embeddings: two projections, thumbnails and nearest neighbours."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.manifold import TSNE
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.source import Source
from patchloom.data.sources.in_memory import evenly_spaced
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.look.context import NamedEncoder, check_finite, to_pictures
from patchloom.nets.heads import pooled_tokens
from patchloom.questions.agreement import nearest_by_cosine
from patchloom.report.page import Cloud
from patchloom.report.pictures import webp
from patchloom.runs.encoder import load_encoder
from patchloom.system.device import usable_device

MAX_MAP_IMAGES, MIN_MAP_IMAGES = 1000, 5  # images
_NEAREST = 8
_SIDE = 40  # pixels of a thumbnail
_QUALITY = 60
_SECONDS = 30.0  # after which no further batch is encoded
_PERPLEXITY = 30.0  # the usual value; reduced for few images, because it has to be below their number
_COMPONENTS = 50  # to which features are reduced before t-SNE, as in its paper (van der Maaten and Hinton 2008)
_DIGITS = 4


def make_embedding_map(run: str | Path, source: Source, what: str, most: int = MAX_MAP_IMAGES) -> Cloud:
    """Return the embedding map of a run's encoder; the run need not be finished.

    Features are the means of the patch tokens after the last norm, as in the quoted kNN accuracy. PCA is applied to the
    features, t-SNE to the normalised features, because neighbours are ranked by cosine.
    """
    some = source.subset(np.random.default_rng(0).permutation(evenly_spaced(len(source), most)))
    if len(some) < MIN_MAP_IMAGES:
        raise PatchloomError(
            f"a map of embeddings needs {MIN_MAP_IMAGES} {source.noun} or more, and there are {len(some)}"
        )
    vit, card = load_encoder(run)  # without further modules, which would build the task of a run that is not finished
    device = usable_device("auto")
    features, pictures, indices = collect_thumbnails(NamedEncoder(card.name, vit.to(device), card), some, device)
    if len(indices) < MIN_MAP_IMAGES:
        raise PatchloomError(
            f"a map of embeddings needs {MIN_MAP_IMAGES} {source.noun} or more, and of {len(some)} only {len(indices)} "
            "could be read"
        )
    order = torch.arange(len(indices))
    found, cosines = nearest_by_cosine(features, features, order, min(_NEAREST, len(order) - 1))
    given = [-1 if some.labels is None else int(some.labels[i]) for i in indices]
    there = sorted({label for label in given if label >= 0})  # only these classes are named
    number = {label: i for i, label in enumerate(there)} | {-1: -1}
    columns = math.ceil(math.sqrt(len(order)))
    with StatusMessage("drawing a map of embeddings"):
        projections = projections_of(features.double().numpy())
        rows = math.ceil(len(order) / columns)
        sheet = np.full((rows * columns, _SIDE, _SIDE, 3), 255, np.uint8)
        sheet[: len(order)] = pictures
        page = sheet.reshape(rows, columns, _SIDE, _SIDE, 3).swapaxes(1, 2).reshape(rows * _SIDE, columns * _SIDE, 3)
        sprite, *_ = webp(Image.fromarray(page), max(page.shape), _QUALITY)
    count = f"{len(order):,} of {len(source):,}" if len(order) < len(source) else f"{len(order):,}"
    perplexity = min(_PERPLEXITY, (len(order) - 1) / 3)
    return Cloud(
        projections=projections,
        names=[some.place(i) or some.describe(i) for i in indices],
        labels=[number[label] for label in given],
        classes=[some.classes[label] for label in there],
        neighbours=found.tolist(),
        similarities=[[round(round(value, _DIGITS), 3) for value in row] for row in cosines.tolist()],
        sprite=sprite,
        columns=columns,
        side=_SIDE,
        note=(
            f"{what[0].upper()}{what[1:]} ({count}), placed by the mean of their patch tokens in {card.name}. PCA "
            f"shows the two directions of largest variance. t-SNE (perplexity {perplexity:.0f}) preserves "
            "neighbourhoods; sizes of groups and distances between them have no meaning there. The neighbours listed "
            "are the nearest by cosine similarity of the features, not by distance on the map."
        ),
    )


def collect_thumbnails(one: NamedEncoder, source: Source, device: torch.device) -> tuple[Tensor, np.ndarray, list[int]]:
    """Encode the readable images of a source and draw their thumbnails, until `_SECONDS` are over.

    Returns:
        The mean of the patch tokens float32 [n d], uint8 squares of `_SIDE` with white margins [n side side 3], and
        the indices [n] of the images.
    """
    features, thumbnails, indices = list[Tensor](), list[np.ndarray](), list[int]()
    begun = time.monotonic()
    with torch.inference_mode(), StatusMessage(f"encoding {source.noun} with {one.name}", len(source)) as waiting:
        for some, images in one.batches(source, device):
            features.append(check_finite(one, pooled_tokens(one.vit, images, None)["mean"].float().cpu()))
            pictures = to_pictures(one, images.cpu())
            h, w = pictures.shape[1:3]
            tall, wide = (max(1, round(_SIDE * side / max(h, w))) for side in (h, w))
            colours = torch.from_numpy(pictures).permute(0, 3, 1, 2).float()
            small = F.interpolate(colours, (tall, wide), mode="bilinear", antialias=True).permute(0, 2, 3, 1)
            squares = np.full((len(pictures), _SIDE, _SIDE, 3), 255, np.uint8)
            top, left = (_SIDE - tall) // 2, (_SIDE - wide) // 2
            squares[:, top : top + tall, left : left + wide] = small.round().clamp(0, 255).byte().numpy()
            thumbnails.append(squares)
            indices += some.tolist()
            waiting.advance(len(some))
            if len(indices) >= MIN_MAP_IMAGES and time.monotonic() - begun > _SECONDS:
                break
    return torch.cat(features), np.concatenate(thumbnails), indices


def projections_of(features: np.ndarray) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Project features [n d] by PCA and t-SNE; return x and y [n], each in [0, 1], by the name of the projection."""
    if not np.isfinite(features).all() or np.ptp(features, axis=0).max() < 1e-9:
        raise PatchloomError("no map can be drawn: the encoder gives all images the same features")
    directions = features / np.linalg.norm(features, axis=1, keepdims=True).clip(1e-12)
    kept = min(_COMPONENTS, *features.shape)
    reduced = PCA(kept, random_state=0).fit_transform(directions)
    flat = PCA(min(2, *features.shape), random_state=0).fit_transform(features)
    if flat.shape[1] == 1:
        flat = np.pad(flat, ((0, 0), (0, 1)))
    perplexity = min(_PERPLEXITY, (len(features) - 1) / 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        # random if the features have only one dimension
        init = "pca" if kept > 1 and np.ptp(reduced[:, 0]) > 0 else "random"
        placed = TSNE(perplexity=perplexity, init=init, random_state=0).fit_transform(reduced.astype(np.float32))
    return {"PCA": _unit(flat), "t-SNE": _unit(placed)}


def _unit(points: np.ndarray) -> tuple[list[float], list[float]]:
    """Shift and scale points [n 2] into the unit square with the same scale for both axes."""
    low, reach = points.min(0), float(np.ptp(points, axis=0).max()) or 1.0
    middle = (1 - np.ptp(points, axis=0) / reach) / 2
    x, y = ((points - low) / reach + middle).clip(0, 1).round(_DIGITS).T.tolist()
    return [round(value, _DIGITS) for value in x], [round(value, _DIGITS) for value in y]  # of float32, too
