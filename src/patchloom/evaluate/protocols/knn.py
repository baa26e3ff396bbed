"""k-nearest-neighbour classification of frozen features by cosine similarity, for several k at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.sources.in_memory import DataLike
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import FeatureOptions, ImageFeatures, Pooling
from patchloom.evaluate.frozen import FrozenProtocol, ScoreFunction, measure_run
from patchloom.evaluate.logistic import hold_out_for_choice
from patchloom.evaluate.settings import EvalSettings
from patchloom.results.evaluation import Evaluation
from patchloom.results.result import Result

TEMPERATURE = 0.07
_SIMILARITIES = 2**24  # in memory at once
_GALLERY = 2**28  # numbers of the gallery that are searched at once: 1 GiB of a GPU's memory


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
    device: torch.device | str = "cpu",
) -> dict[int, float]:
    """Return top-1 accuracy of weighted k-nearest-neighbour classification by cosine similarity.

    A neighbour's vote has the weight exp(similarity / temperature), as in instance discrimination (Wu et al. 2018,
    section 3.4) and DINO (Caron et al. 2021, section 4.1; facebookresearch/dino ``eval_knn.py``), both with 0.07. A tie
    goes to the lower label. One search serves all k.

    Args:
        gallery: [n d] features.
        gallery_labels: [n] int64, at least 0.
        queries: [m d] features.
        query_labels: [m] int64; labels missing in the gallery count as errors.
        ks: numbers of neighbours; those above the gallery's size are dropped.
        weighted: False gives every vote weight 1.
        temperature: temperature of the weights.
        chunk: queries per block; by default about 100 MB.
        device: device of the search.
    """
    options: dict[str, Any] = {"weighted": weighted, "temperature": temperature, "chunk": chunk, "device": device}
    found = knn_right(gallery, gallery_labels, queries, query_labels, ks, **options)
    return {k: correct.double().mean().item() for k, correct in found.items()}


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
    device: torch.device | str = "cpu",
) -> dict[int, Tensor]:
    """Return which queries are classified correctly [m], by k in ascending order; arguments as in `knn_accuracies`."""
    n = len(gallery)
    counts = sorted({k for k in ks if k <= n})
    if not counts or counts[0] < 1:
        raise PatchloomError(f"k = {', '.join(map(str, ks))} does not fit a gallery of {n} images: choose 1 to {n}")
    similarities, nearest = _nearest(gallery, queries, counts[-1], chunk, torch.device(device))
    weights = (similarities / temperature).exp() if weighted else torch.ones_like(similarities)
    classes = int(gallery_labels.max()) + 1
    correct: dict[int, list[Tensor]] = {k: [] for k in counts}
    parts = (each.split(max(1, _SIMILARITIES // classes)) for each in (gallery_labels[nearest], weights, query_labels))
    for labels, votes_of, truth in zip(*parts, strict=True):
        votes = weights.new_zeros(len(truth), classes)
        counted = 0
        for k in counts:
            votes.scatter_add_(1, labels[:, counted:k], votes_of[:, counted:k])
            counted = k
            correct[k].append(votes.argmax(1) == truth)
    return {k: torch.cat(hits) for k, hits in correct.items()}


def _nearest(
    gallery: Tensor, queries: Tensor, k: int, chunk: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosine similarities and gallery indices [m k] of the k nearest to each query, on the CPU.

    Parts of the gallery and blocks of queries go to the device in turn; only the nearest come back, once, at the end.
    """
    near: list[Tensor] = []
    places: list[Tensor] = []
    size = max(1, _GALLERY // gallery.shape[1])
    for number, part in enumerate(gallery.split(size)):
        units = F.normalize(part.to(device, non_blocking=True).float(), dim=1)
        blocks = queries.split(chunk or max(1, _SIMILARITIES // len(part)))
        best = [
            (F.normalize(block.to(device, non_blocking=True).float(), dim=1) @ units.T).topk(min(k, len(part)))
            for block in blocks
        ]
        near.append(torch.cat([one.values for one in best]))
        places.append(torch.cat([one.indices for one in best]) + number * size)
    # stable, so that the order that a single part was found in stays
    similarities, order = torch.cat(near, 1).sort(dim=1, descending=True, stable=True)
    return similarities[:, :k].cpu(), torch.cat(places, 1).gather(1, order[:, :k]).cpu()


_USUAL_K = 20
_KS = (1, 5, 20, 100)


def knn(
    run: str | Path,
    data: DataLike,
    settings: EvalSettings,
    *,
    pooling: Pooling | Literal["all"] = "all",
    ks: Sequence[int] = _KS,
    gallery: float = 1.0,
    test_crop: float = 1.0,
    last_norm: bool = True,
    blend: float | list[float] | None = None,
) -> Evaluation:
    """Classify by the nearest neighbours among training images, by cosine similarity of frozen features.

    Args:
        run, data, settings: as in `patchloom.evaluate.protocols.evaluate`.
        pooling: feature pooling: "class", "mean", "prefix" (mean of class token and registers), "instance" (with an
            instance head), "both" (class and mean), or "all".
        ks: numbers of neighbours k.
        gallery: stratified fraction of the training images to search.
        test_crop: side of the centre crop over the short side of the resized image; 1: the largest centre crop. 0.875
            is the papers' 224 of 256.
        last_norm: features after the encoder's last norm; false takes them before it.
        blend: shares of the trained weights in blends with those that the run began with, such as 0.25,0.5,0.75.

    Raises:
        PatchloomError: unknown encoder or data, data without labels, or a pooling that the encoder lacks.
    """
    if any(k < 1 for k in ks):
        raise PatchloomError(f"--ks must be 1 or more, not {min(ks)}")
    if not 0 < gallery <= 1:
        raise PatchloomError(f"--gallery must be a fraction above 0 and up to 1, such as 0.1, not {gallery:g}")
    return measure_run(
        knn_with(tuple(ks), gallery), run, data, settings, pooling, gallery, blend, FeatureOptions(test_crop, last_norm)
    )


def knn_with(ks: Sequence[int], gallery: float = 1.0) -> FrozenProtocol:
    """Return the protocol for these k; it quotes the mean patch token with the k nearest to 20.

    Rows name the fraction of the training images that is searched if it is below 1.
    """
    fit, sentence = partial(_fit, ks=ks, gallery=gallery), partial(_sentence, ks=ks)
    drawn = gallery < 1  # one draw of the training images is as random as one training
    return FrozenProtocol(
        "knn", fit, _quoted, _title, sentence, drawn=drawn, across="k", gallery="Gallery", held_out=_held_out
    )


def _fit(
    train: ImageFeatures, pooling: str, settings: EvalSettings, *, ks: Sequence[int], gallery: float = 1.0
) -> ScoreFunction:
    searched = {"gallery": gallery} if gallery < 1 else {}

    def score(test: ImageFeatures) -> list[tuple[dict[str, float], Tensor]]:
        pooled = train.pooled(pooling), train.labels, test.pooled(pooling), test.labels
        found = knn_right(*pooled, ks, device=settings.torch_device)
        return [({"k": k, "temperature": TEMPERATURE, **searched}, correct) for k, correct in found.items()]

    return score


def _quoted(rows: Sequence[Result]) -> Result:
    first = [row for row in rows if row.pooling == "mean"] or rows
    return min(first, key=lambda row: abs(row.settings["k"] - _USUAL_K))


def _held_out(train: ImageFeatures, row: Result, settings: EvalSettings) -> float:
    """Return the accuracy of a row's pooling and k on held-out training images, with the others as the gallery."""
    if len(train.labels) < 2:
        raise PatchloomError("a blend is chosen on held-out training images: add a second training image")
    rest, held = hold_out_for_choice(train.labels, settings.seed, train.groups)
    values, labels, k = train.pooled(row.pooling), train.labels, min(row.settings["k"], len(rest))
    pooled = values[rest], labels[rest], values[held], labels[held]
    return knn_accuracies(*pooled, (k,), device=settings.torch_device)[k]


def _title(row: Result) -> str:
    return f"kNN (k={row.settings['k']}, {row.pooling})"


def _sentence(train: ImageFeatures, test: ImageFeatures, *, ks: Sequence[int]) -> str:
    n, m = len(train.labels), len(test.labels)
    large = ", ".join(f"k = {k}" for k in ks if k > n)
    return (
        f"kNN: for each of {m:,} test {test.noun} the k most similar of {n:,} training {train.noun} vote (cosine "
        f"similarity of frozen features, votes weighted by exp(similarity / {TEMPERATURE})); nothing was trained or "
        "chosen." + (f" Left out, since larger than the gallery: {large}." if large else "")
    )


KNN = knn_with(_KS)
