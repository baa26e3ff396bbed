"""k-nearest-neighbour classification by cosine similarity, for several k at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.errors import PatchloomError

TEMPERATURE = 0.07
_SIMILARITIES = 2**24  # in memory at once


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
    """Top-1 accuracy of weighted k-nearest-neighbour classification by cosine similarity.

    A neighbour's vote has the weight exp(similarity / temperature), as in instance discrimination (Wu et al. 2018,
    section 3.4) and DINO (Caron et al. 2021, section 4.1; facebookresearch/dino ``eval_knn.py``), both with 0.07. A tie
    goes to the lower label. One search serves all k.

    Args:
        gallery: [n d] features, on any device.
        gallery_labels: [n] int64, at least 0.
        queries: [m d].
        query_labels: [m]; a label that is not in the gallery counts as an error.
        ks: numbers of neighbours; those larger than the gallery are dropped.
        weighted: False gives every vote the weight 1.
        temperature: of the weights.
        chunk: queries per block; by default so many that about 100 MB are needed.

    Returns:
        Accuracy in [0, 1] by k, in ascending order.

    Raises:
        PatchloomError: a k below 1, or every k is larger than the gallery.
    """
    options = {"weighted": weighted, "temperature": temperature, "chunk": chunk}
    found = knn_right(gallery, gallery_labels, queries, query_labels, ks, **options)
    return {k: right.double().mean().item() for k, right in found.items()}


@torch.no_grad()
def knn_right(
    gallery: Tensor,
    gallery_labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    ks: Sequence[int] = (1, 5, 20, 100),
    *,
    weighted: bool = True,
    temperature: float = TEMPERATURE,
    chunk: int | None = None,
) -> dict[int, Tensor]:
    """Which queries are classified rightly [m], by k in ascending order; all else as for `knn_accuracies`."""
    n = len(gallery)
    counts = sorted({k for k in ks if k <= n})
    if not counts or counts[0] < 1:
        raise PatchloomError(f"k = {', '.join(map(str, ks))} does not fit a gallery of {n} images: choose 1 to {n}")
    gallery = F.normalize(gallery.float(), dim=1)
    classes = int(gallery_labels.max()) + 1
    chunk = chunk or max(1, _SIMILARITIES // n)
    right: dict[int, list[Tensor]] = {k: [] for k in counts}
    for part, truth in zip(queries.split(chunk), query_labels.split(chunk), strict=True):
        similarities, nearest = (F.normalize(part.float(), dim=1) @ gallery.T).topk(counts[-1], dim=1)
        labels = gallery_labels[nearest]
        weights = (similarities / temperature).exp() if weighted else torch.ones_like(similarities)
        votes = weights.new_zeros(len(part), classes)
        counted = 0
        for k in counts:
            votes.scatter_add_(1, labels[:, counted:k], weights[:, counted:k])
            counted = k
            right[k].append((votes.argmax(1) == truth).cpu())
    return {k: torch.cat(hits) for k, hits in right.items()}
