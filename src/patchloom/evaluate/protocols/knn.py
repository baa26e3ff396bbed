"""k-nearest-neighbour classification of frozen features by cosine similarity, for several k at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import track_progress
from patchloom.errors import PatchloomError
from patchloom.evaluate.classification import constant_answers, results_of_answers
from patchloom.evaluate.features import FeatureOptions, ImageFeatures
from patchloom.evaluate.frozen import (
    blend_drawings,
    blend_row,
    blend_shares,
    chosen_poolings,
    frozen_report,
    open_frozen,
)
from patchloom.evaluate.logistic import CHOICE_VALIDATION_SHARE, hold_out_for_choice
from patchloom.evaluate.settings import EvalSettings, Parts, stratified_subset
from patchloom.look.charts import Line, Panel, draw_lines
from patchloom.look.sheet import Caption
from patchloom.nets.checkpoints.live import has_no_folder
from patchloom.options.protocols import KS, Knn, Layers
from patchloom.results.classes import called, explain_measure, headline_row
from patchloom.results.evaluation import Drawing, Evaluation
from patchloom.results.result import ACCURACY, Result

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
    found = knn_answers(gallery, gallery_labels, queries, ks, **options)
    return {k: (answers == query_labels).double().mean().item() for k, (answers, _) in found.items()}


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
    study = open_frozen("knn", run, data, settings, features, pooling=pooling)
    more = features.plain()
    if gallery < 1:
        n, noun = len(study.parts.train), study.parts.train.noun
        some = stratified_subset(study.parts.train, max(1, round(gallery * n)), settings.seed)
        drawn = f"The gallery is a stratified {100 * gallery:.3g} % of {n:,} training {noun} (seed {settings.seed})."
        study = replace(study, parts=replace(study.parts, train=some, story=f"{study.parts.story} {drawn}"))
        more = {"gallery": gallery, **more}
    parts = study.parts

    # ---- features and accuracies of each encoder
    rows, blends = list[Result](), list[Result]()
    for one in study.each(shares=shares):
        train = one.features_of(parts.train)
        poolings = chosen_poolings(train, pooling)
        if one.share is not None:
            quoted, k = quoted_choice(train, poolings, ks)
            held_out, _ = held_out_accuracy(train.pooled(quoted), train, k, settings, "a blend", fewer=True)
        # all choices are made: read the test images
        test = one.features_of(parts.test)
        found = knn_results(one.name, train, test, parts.test, poolings, settings, ks, more)
        if one.share is not None:
            blends += [blend_row(row, one.share, held_out) for row in found if row.quoted]
        if one.share in (None, 0, 1):
            rows += found

    # ---- the report
    around = study.around(train, test, any(row.pooling == "instance" for row in rows))
    # one draw of the gallery is as random as one training
    report = knn_report(rows, parts, settings, train, test, around, ks=ks, trained=gallery < 1, blends=blends)
    return replace(report, drawings=blend_drawings(report, run))


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


def held_out_accuracy(
    values: Tensor, train: ImageFeatures, k: int, settings: EvalSettings, what: str, *, fewer: bool = False
) -> tuple[float, int]:
    """Return the accuracy of features [n d] on held-out training images, with the others as the gallery, and the
    number of those held out.

    ``what`` is chosen by it. With ``fewer``, k is at most the size of that gallery.
    """
    if len(train.labels) < 2:
        raise PatchloomError(f"{what} is chosen on held-out training images: add a second training image")
    rest, held = hold_out_for_choice(train.labels, settings.seed, train.groups)
    labels, k = train.labels, min(k, len(rest)) if fewer else k
    found = knn_accuracies(values[rest], labels[rest], values[held], labels[held], (k,), device=settings.torch_device)
    return found[k], len(held)


def knn_report(
    rows: Sequence[Result],
    parts: Parts[Source],
    settings: EvalSettings,
    train: ImageFeatures,
    test: ImageFeatures,
    around: str,
    *,
    ks: Sequence[int] = KS,
    **options: Any,
) -> Evaluation:
    """Return the report of kNN; ``options`` are those of `frozen_report`."""
    ours = next(row for row in rows if row.quoted)
    n, m = len(train.labels), len(test.labels)
    method = (
        f"kNN: for each of {m:,} test {test.noun} the k most similar of {n:,} training {train.noun} vote (cosine "
        f"similarity of frozen features, votes weighted by exp(similarity / {TEMPERATURE})); nothing was trained or "
        "chosen."
    )
    if large := ", ".join(f"k = {k}" for k in ks if k > n):
        method += f" Left out, since larger than the gallery: {large}."
    title, images = f"kNN (k={ours.settings['k']}, {ours.pooling})", (parts, settings, train, test)
    return frozen_report(title, method, "Gallery", rows, *images, around, across="k", **options)


# Layers: kNN accuracy of the mean patch token of every layer (MP3's layer-wise evaluation).


def layers(run: str | Path, data: DataLike, settings: EvalSettings, options: Layers) -> Evaluation:
    """Classify by the nearest neighbours among training images, with the features of every layer.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: unknown encoder or data, or data without labels.
    """
    k, features = options.k, FeatureOptions(options.test_crop)
    study = open_frozen("layers", run, data, settings, features, head=False, plain=True)
    parts = study.parts

    # ---- accuracies of each layer of each encoder
    groups: list[list[Result]] = []
    beside: list[Result] = []
    for one in study.each(layers=True):
        train, raw = one.features_of(parts.train), one.subject is None
        row_settings: list[dict[str, Any]] = [{}] if raw else []
        for layer, values in () if raw else train.tokens.items():
            accuracy, count = held_out_accuracy(values, train, k, settings, "the best layer")
            row_settings.append({"layer": layer, "held_out_accuracy": accuracy, "held_out": count})
        # the best layer is chosen: read the test images
        test = one.features_of(parts.test)
        pooling, found = "pixels" if raw else "mean", []
        for values, queries, about in zip(train.tokens.values(), test.tokens.values(), row_settings, strict=True):
            answers, _ = knn_answers(values, train.labels, queries, (k,), device=settings.torch_device)[k]
            about = {"pooling": pooling, "k": k, "temperature": TEMPERATURE, **about, **features.plain()}
            its = one.name, "layers", about, parts.test, settings, test.labels, answers, None, test.groups
            made = results_of_answers(*its, quoted=False)
            found.append(headline_row(made, test.labels))
            if found[-1].measure != ACCURACY:
                beside += [row for row in made if row.measure == ACCURACY]
        groups.append(found)

    # ---- the report
    ours, *starts, twins, (pixels,) = groups
    n_test = len(test.labels)
    guessed = headline_row(constant_answers("layers", test.labels, parts.test, test.groups), test.labels)
    last, best, twin, twins_best = ours[-1], _best(ours), twins[-1], _best(twins)
    quoted = (last, best, twin, twins_best, pixels, *(its[-1] for its in starts))
    pairs = (*range(5, len(quoted)), 2)  # in the last layer: start, untrained
    method = (
        f"Layers: mean of the patch tokens before the blocks, after each of {len(ours) - 2} blocks and after the final "
        f"norm, in one pass; in each layer the {k} most similar of {len(train.labels):,} training {train.noun} vote "
        f"for each of {n_test:,} test {test.noun} (kNN by cosine similarity, votes weighted by exp(similarity / "
        f"{TEMPERATURE})). The best layer was chosen by the same vote on a stratified "
        f"{100 * CHOICE_VALIDATION_SHARE:.0f} % of the training {train.noun}, with votes of the rest, without the test "
        f"{test.noun}. {study.around(train, test)}"
    )
    method += f" {explain_measure(test.labels.numpy(), parts.test.classes, test.noun)}"
    if starts:
        method += " Start: the weights that the run began with, with their own normalisation."
    out, drawings = None if options.out is None else Path(options.out), tuple[Drawing, ...]()
    if out is None and not has_no_folder(run) and Path(run).is_dir():
        out = Path(run) / "pictures" / "layers.png"
    if out is not None:
        places, ends = np.arange(len(ours)), np.array([(row.value, row.low, row.high) for row in ours])
        beneath = [
            Line(its[0].encoder, places, np.array([row.value for row in its]), dashed=True) for its in (twins, *starts)
        ]
        panel = Panel(
            f"Layers of {ours[0].encoder}",
            f"{ours[0].measure} of {k} nearest neighbours, mean patch token, 95 % interval",
            [Line("this encoder", places, *ends.T), *beneath],
            percent=True,
            baselines={row.encoder: row.value for row in (pixels, guessed)},
            ticks=dict(enumerate(["0", *(row.settings["layer"].removeprefix("block ") for row in ours[1:])])),
            chosen=ours.index(best),
            axis="after block",
        )
        caption = Caption(
            "kNN accuracy by layer",
            "kNN accuracy of the features of each layer, compared with the untrained encoder, and with the start of an "
            "adapted one. A drop in the last blocks means that these are specialised in the pretext task.",
            201,
        )
        drawings = (Drawing(draw_lines, out, {"panels": [panel], "caption": caption}),)
    return Evaluation.of_test(
        parts.test,
        settings.seed,
        n_test,
        results=[*ours, *sum(starts, []), *twins, pixels, guessed, *beside],
        method=method,
        headline=f"Layers (kNN, k={k}, mean): last layer {called(last)}{last.text()} against {twin.number()} "
        f"untrained; best layer by held-out training {test.noun}, {best.settings['layer']}, {best.text()} against "
        f"{twins_best.number()} untrained ({twins_best.settings['layer']}); {pixels.encoder} {pixels.number()}; on "
        f"{n_test:,} test {test.noun}.",
        quoted=quoted,
        across="layer",
        down=True,
        drawings=drawings,
    ).with_differences(False, *pairs)


def _best(rows: list[Result]) -> Result:
    """Return the layer with the best accuracy on held-out training images; ties go to the first."""
    return max(rows, key=lambda row: row.settings["held_out_accuracy"])
