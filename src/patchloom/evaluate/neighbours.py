"""Nearest neighbours: what the encoder's similarities say by themselves, with nothing trained on top."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.errors import PatchloomError

TEMPERATURE = 0.07
_SIMILARITIES = 2**24  # how many are in memory at once


@torch.no_grad()
def knn_accuracies(
    gallery: Tensor,
    gallery_labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    ks: Sequence[int] = (1, 5, 20, 100),
    *,
    weighted: bool = True,
    temperature: float = TEMPERATURE,
    chunk: int | None = None,
) -> dict[int, float]:
    """Share of queries whose label the k most similar images of the gallery vote for, by cosine similarity.

    A neighbour's vote weighs exp(similarity / temperature), as in instance discrimination (Wu et al. 2018, section 3.4)
    and in DINO (Caron et al. 2021, section 4.1; facebookresearch/dino ``eval_knn.py``), both with 0.07. A tie goes to
    the lower label. All k are served by one search.

    Args:
        gallery: [n d] features, on any device.
        gallery_labels: [n] int64, at least 0.
        queries: [m d].
        query_labels: [m]; only compared with the outcome. One that the gallery lacks counts as missed.
        ks: how many neighbours vote; those larger than the gallery are dropped.
        weighted: False counts every vote as one.
        temperature: the smaller, the more the nearest count.
        chunk: queries at once; by default as many as keep the memory near 100 MB.

    Returns:
        Accuracy in [0, 1] for each k, in rising order.

    Raises:
        PatchloomError: a k below 1, or every k is larger than the gallery.
    """
    n = len(gallery)
    served = sorted({k for k in ks if k <= n})
    if not served or served[0] < 1:
        raise PatchloomError(f"k = {', '.join(map(str, ks))} does not fit a gallery of {n} images: choose 1 to {n}")
    gallery = F.normalize(gallery.float(), dim=1)
    classes = int(gallery_labels.max()) + 1
    chunk = chunk or max(1, _SIMILARITIES // n)
    right = dict.fromkeys(served, 0)
    for part, truth in zip(queries.split(chunk), query_labels.split(chunk), strict=True):
        similarities, nearest = (F.normalize(part.float(), dim=1) @ gallery.T).topk(served[-1], dim=1)
        voices = gallery_labels[nearest]
        weights = (similarities / temperature).exp() if weighted else torch.ones_like(similarities)
        votes = weights.new_zeros(len(part), classes)
        heard = 0
        for k in served:
            votes.scatter_add_(1, voices[:, heard:k], weights[:, heard:k])
            heard = k
            right[k] += int((votes.argmax(1) == truth).sum())
    return {k: hits / len(queries) for k, hits in right.items()}
