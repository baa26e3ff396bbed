"""k-nearest-neighbour classification of frozen features by cosine similarity, for several k at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import track_progress
from patchloom.errors import PatchloomError
from patchloom.evaluate.answers import results_of_answers
from patchloom.evaluate.features import FeatureOptions, ImageFeatures
from patchloom.evaluate.frozen import (
    Wording,
    blend_drawings,
    blend_row,
    blend_shares,
    chosen_poolings,
    circumstances,
    extractors,
    frozen_report,
    plan_frozen,
)
from patchloom.evaluate.logistic import hold_out_for_choice
from patchloom.evaluate.settings import EvalSettings, Parts, parts_of, stratified_subset
from patchloom.evaluate.subjects import open_probed
from patchloom.options.protocols import KS, Knn
from patchloom.results.evaluation import Evaluation
from patchloom.results.result import Result

TEMPERATURE = 0.07
_USUAL_K = 20
_SIMILARITIES = 2**24  # in memory at once
_GALLERY = 2**28  # numbers of the gallery that are searched at once: 1 GiB of a GPU's memory


def knn_accuracies(
    gallery: Tensor,
    gallery_labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    ks: Sequence[int] = KS,
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
    ks: Sequence[int] = KS,
    *,
    weighted: bool = True,
    temperature: float = TEMPERATURE,
    chunk: int | None = None,
    device: torch.device | str = "cpu",
) -> dict[int, Tensor]:
    """Return which queries are classified correctly [m], by k in ascending order; arguments as in `knn_accuracies`."""
    options: dict[str, Any] = {"weighted": weighted, "temperature": temperature, "chunk": chunk, "device": device}
    found = knn_answers(gallery, gallery_labels, queries, ks, **options)
    return {k: answers == query_labels for k, (answers, _) in found.items()}


@torch.no_grad()
def knn_answers(
    gallery: Tensor,
    gallery_labels: Tensor,
    queries: Tensor,
    ks: Sequence[int] = KS,
    *,
    weighted: bool = True,
    temperature: float = TEMPERATURE,
    chunk: int | None = None,
    device: torch.device | str = "cpu",
    scored: Sequence[int] = (),
) -> dict[int, tuple[Tensor, Tensor | None]]:
    """Return the predicted classes of queries [m] by k in ascending order, and shares of the votes [m c].

    The shares are None but for the ``scored`` k. Other arguments are as in `knn_accuracies`.
    """
    n = len(gallery)
    counts = sorted({k for k in ks if k <= n})
    if not counts or counts[0] < 1:
        raise PatchloomError(f"k = {', '.join(map(str, ks))} does not fit a gallery of {n} images: choose 1 to {n}")
    similarities, nearest = nearest_images(gallery, queries, counts[-1], chunk, torch.device(device))
    weights = (similarities / temperature).exp() if weighted else torch.ones_like(similarities)
    classes = int(gallery_labels.max()) + 1
    answers: dict[int, list[Tensor]] = {k: [] for k in counts}
    shares: dict[int, list[Tensor]] = {k: [] for k in counts if k in scored}
    parts = (each.split(max(1, _SIMILARITIES // classes)) for each in (gallery_labels[nearest], weights))
    for labels, votes_of in zip(*parts, strict=True):
        votes = weights.new_zeros(len(labels), classes)
        counted = 0
        for k in counts:
            votes.scatter_add_(1, labels[:, counted:k], votes_of[:, counted:k])
            counted = k
            answers[k].append(votes.argmax(1))
            if k in shares:
                shares[k].append(votes / votes.sum(1, keepdim=True))
    return {k: (torch.cat(answers[k]), torch.cat(shares[k]) if k in shares else None) for k in counts}


def nearest_images(
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


def knn(run: str | Path, data: DataLike, settings: EvalSettings, options: Knn) -> Evaluation:
    """Classify by the nearest neighbours among training images, by cosine similarity of frozen features.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: unknown encoder or data, data without labels, or a pooling that the encoder lacks.
    """
    ks, pooling, gallery = options.ks, options.pooling, options.gallery
    shares = blend_shares(options.blend, run, pooling, settings)
    features = FeatureOptions(options.test_crop, options.last_norm)
    subjects = open_probed(run, settings, pooling)
    parts = parts_of(data, settings, card=subjects.ours.card, run=run)
    features.check(parts.test)
    more = features.plain()
    if gallery < 1:
        parts, more = draw_gallery(parts, gallery, settings.seed), {"gallery": gallery, **more}
    plan_frozen("knn", subjects, parts, settings)

    # ---- features and accuracies of each encoder
    rows, blends, cached = list[Result](), list[Result](), list[str]()
    for one in extractors(subjects, settings, options=features, shares=shares):
        train = one.features_of(parts.train)
        poolings = chosen_poolings(train, pooling)
        if one.share is not None:
            held_out = held_out_accuracy(train, *quoted_choice(train, poolings, ks), settings)
        # all choices are made: read the test images
        test = one.features_of(parts.test)
        found = knn_results(one.name, train, test, parts.test, poolings, settings, ks, more)
        cached += [one.name] * (train.cached or test.cached)
        if one.share is not None:
            blends += [blend_row(row, one.share, held_out) for row in found if row.quoted]
        if not one.is_blend:
            rows += found

    # ---- the report
    instance = any(row.pooling == "instance" for row in rows)
    around = circumstances(subjects, parts, train, test, cached, features, instance)
    # one draw of the gallery is as random as one training
    trained, wording = gallery < 1, knn_wording(rows, train, test, ks)
    report = frozen_report(wording, rows, parts, settings, train, test, around, trained=trained, blends=blends)
    return replace(report, drawings=blend_drawings(report, run))


def draw_gallery(parts: Parts[Source], share: float, seed: int) -> Parts[Source]:
    """Return parts with a stratified fraction of the training images."""
    n = len(parts.train)
    some = stratified_subset(parts.train, max(1, round(share * n)), seed)
    drawn = f"The gallery is a stratified {100 * share:.3g} % of {n:,} training {some.noun} (seed {seed})."
    return replace(parts, train=some, story=f"{parts.story} {drawn}")


def quoted_choice(train: ImageFeatures, poolings: Sequence[str], ks: Sequence[int]) -> tuple[str, int]:
    """Return pooling and k of the quoted result: the mean patch token, and the k nearest to 20."""
    pooling = "mean" if "mean" in poolings else poolings[0]
    fitting = sorted(k for k in ks if k <= len(train.labels))
    return pooling, min(fitting or ks, key=lambda k: abs(k - _USUAL_K))


def knn_results(
    name: str,
    train: ImageFeatures,
    test: ImageFeatures,
    source: Source,
    poolings: Sequence[str],
    settings: EvalSettings,
    ks: Sequence[int] = KS,
    more: Mapping[str, Any] | None = None,
) -> list[Result]:
    """Return the results of the subject ``name`` on the images ``source`` for each pooling and k, with ``more``
    settings; one of them is quoted."""
    rows, choice = list[Result](), quoted_choice(train, poolings, ks)
    for pooling in track_progress(poolings, len(poolings), f"{name}: knn"):
        gallery, queries = train.pooled(pooling), test.pooled(pooling)
        scored = [choice[1]] if settings.all_measures and pooling == choice[0] else []
        found = knn_answers(gallery, train.labels, queries, ks, device=settings.torch_device, scored=scored)
        for k, given in found.items():
            about = {"pooling": pooling, "k": k, "temperature": TEMPERATURE, **(more or {})}
            its, quoted = (name, "knn", about, source, settings), (pooling, k) == choice
            rows += results_of_answers(*its, test.labels, *given, test.groups, quoted=quoted)
    return rows


def held_out_accuracy(train: ImageFeatures, pooling: str, k: int, settings: EvalSettings) -> float:
    """Return the accuracy on held-out training images, with the others as the gallery."""
    if len(train.labels) < 2:
        raise PatchloomError("a blend is chosen on held-out training images: add a second training image")
    rest, held = hold_out_for_choice(train.labels, settings.seed, train.groups)
    values, labels, k = train.pooled(pooling), train.labels, min(k, len(rest))
    found = knn_accuracies(values[rest], labels[rest], values[held], labels[held], (k,), device=settings.torch_device)
    return found[k]


def knn_wording(rows: Sequence[Result], train: ImageFeatures, test: ImageFeatures, ks: Sequence[int] = KS) -> Wording:
    """Describe kNN, for its report."""
    ours = next(row for row in rows if row.quoted)
    n, m = len(train.labels), len(test.labels)
    method = (
        f"kNN: for each of {m:,} test {test.noun} the k most similar of {n:,} training {train.noun} vote (cosine "
        f"similarity of frozen features, votes weighted by exp(similarity / {TEMPERATURE})); nothing was trained or "
        "chosen."
    )
    if large := ", ".join(f"k = {k}" for k in ks if k > n):
        method += f" Left out, since larger than the gallery: {large}."
    return Wording(f"kNN (k={ours.settings['k']}, {ours.pooling})", method, "Gallery", across="k")
