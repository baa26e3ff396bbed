"""Near copies, outliers and images to label, by the vectors of images. Letters: n images, d width."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.display import track_progress
from patchloom.options.verbs import LabelChoice

NEIGHBOURS = 20  # as TypiClust takes
HERDED = 10_000  # images among which MaxHerding chooses: its memory grows with their square
_ROWS = 2048  # images compared with all others at once


@dataclass(frozen=True)
class Neighbours:
    """The nearest other images of each, the nearest first.

    Attributes:
        rows: int64 [n k].
        distances: of the vectors, float32 [n k].
    """

    rows: Tensor
    distances: Tensor

    def isolation(self) -> np.ndarray:
        """Return the mean distance of each image from its neighbours, in medians over all images, float64 [n]."""
        mean = self.distances.double().mean(1).numpy()
        return mean / max(float(np.median(mean)), 1e-12)


def find_neighbours(vectors: Tensor, device: torch.device | str = "cpu") -> Neighbours:
    """Return the 20 nearest other rows of vectors [n d], by Euclidean distance; fewer if there are not as many.

    Vectors keep their length: by it, images of one colour differ from others (benchmarks/curation.py, ``plant``).
    """
    n, centred = len(vectors), (vectors - vectors.mean(0)).to(device)
    squares = centred.square().sum(1)
    rows, distances = list[Tensor](), list[Tensor]()
    for start in track_progress(range(0, n, _ROWS), -(-n // _ROWS), f"comparing {n:,} images with each other"):
        some = slice(start, start + _ROWS)
        apart = squares[some, None] + squares - 2 * centred[some] @ centred.T
        apart.diagonal(start).fill_(math.inf)  # each from itself
        best = apart.topk(min(NEIGHBOURS, n - 1), dim=1, largest=False)
        rows.append(best.indices.cpu())
        distances.append(best.values.clamp_min(0).sqrt().cpu())
    return Neighbours(torch.cat(rows), torch.cat(distances))


def near_pairs(near: Neighbours, small: Tensor, least: float) -> list[tuple[int, int]]:
    """Return pairs of neighbours whose `thumbnails` ``small`` [n p] have a correlation of ``least`` or more."""
    alike = torch.stack([(small * small[rows]).sum(1) for rows in near.rows.T], 1)
    first, place = (alike >= least).nonzero(as_tuple=True)
    return [*zip(first.tolist(), near.rows[first, place].tolist(), strict=True)]


def find_copies(near: Neighbours, small: Tensor, least: float) -> dict[int, int]:
    """Return the image that stays, by its near copy, of `near_pairs`.

    An image is a copy only of one that stays, the earliest. So of a film, whose neighbouring frames are alike, more
    than one frame stays if its scene changes.
    """
    earlier: dict[int, set[int]] = {}
    for one, other in near_pairs(near, small, least):
        earlier.setdefault(max(one, other), set()).add(min(one, other))
    found: dict[int, int] = {}
    for image in sorted(earlier):
        if staying := earlier[image] - found.keys():
            found[image] = min(staying)
    return found


def unit_vectors(vectors: Tensor) -> Tensor:
    """Return vectors [n d] minus their mean, of length 1."""
    return F.normalize(vectors - vectors.mean(0), dim=1)


def herding(units: Tensor, count: int) -> list[int]:
    """Return ``count`` rows of `unit_vectors` [n d] by MaxHerding (Bae et al., 2407.12212), in order.

    Each choice maximises the mean over all images of the similarity to the most similar chosen one, by a Gaussian of
    width 1.
    """
    kernel = (units @ units.T - 1).exp()  # the squared distance is 2 - 2 cos
    best, chosen = torch.zeros(len(units)), list[int]()
    for _ in range(count):
        gains = (kernel - best).clamp_min(0).mean(1)
        gains[chosen] = -1
        chosen.append(int(gains.argmax()))
        best = torch.maximum(best, kernel[chosen[-1]])
    return chosen


def choose_images(how: LabelChoice, units: Tensor, candidates: np.ndarray, count: int, seed: int) -> list[int]:
    """Return ``count`` of the ``candidates`` [m], rows of `unit_vectors` [n d]; a larger count begins with the same.

    MaxHerding chooses among at most 10,000 of them, drawn at random.
    """
    order = np.random.default_rng(seed).permutation(candidates)
    if how == "random":
        return order[:count].tolist()
    some = order[: max(HERDED, count)]
    return some[herding(units[some], count)].tolist()
