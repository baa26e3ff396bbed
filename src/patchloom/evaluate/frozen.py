"""Protocols on frozen features: one measurement of an encoder, its untrained twin and raw pixels, and what to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchloom.data import Source
from patchloom.errors import PatchloomError
from patchloom.evaluate.cache import about_encoder, remembered
from patchloom.evaluate.features import (
    Features,
    Pooling,
    check_pooling,
    extract,
    extract_layers,
    pixel_features,
    pixels_size,
    tokens_of,
)
from patchloom.evaluate.how import How, Parts, parts_of, stratified
from patchloom.evaluate.knn import TEMPERATURE, knn_accuracies
from patchloom.evaluate.linear import HELD_OUT_SHARE, STRENGTHS, linear_probe
from patchloom.evaluate.report import Report, Row, lost_images
from patchloom.nets.heads import InstanceHead
from patchloom.nets.weights import EncoderCard, load_encoder, load_instance_head, untrained_twin

Protocol = Literal["knn", "linear"]

UNTRAINED, PIXELS, CHANCE = "untrained", "raw pixels", "majority class"
_USUAL_K = 20
_KS = (1, 5, 20, 100)

# test images -> settings and accuracy of each number that the protocol gives
Score = Callable[[Features], list[tuple[dict[str, Any], float]]]
# training images, pooling -> how test images are scored; all that is chosen is chosen here
Fit = Callable[[Features, str], Score]


class Subject(NamedTuple):
    """What is measured: its name, the features it has of some images, and the encoder, which raw pixels lack."""

    name: str
    features_of: Callable[[Source], Features]
    encoder: VisionTransformer | None


def knn(
    run: str | Path,
    data: str | Path,
    how: How,
    *,
    pooling: Pooling | Literal["all"] = "all",
    ks: Sequence[int] = _KS,
    gallery: float = 1.0,
) -> Report:
    """Let the most similar training images vote, by the cosine of frozen features.

    Args:
        run: a run's folder, an encoder's ``.safetensors`` file, or ``timm:NAME``.
        data: labelled images, as `patchloom.data.open_data` takes them.
        how: what is common to all protocols.
        pooling: "class", "mean", "instance" (of a head beside the encoder), "both" class and mean, or "all" there are.
        ks: numbers of neighbours.
        gallery: share of the training images, drawn from each class alike, that may vote.

    Raises:
        PatchloomError: no such encoder or data; data without labels; or a pooling that the encoder lacks.
    """
    if any(k < 1 for k in ks):
        raise PatchloomError(f"--ks must be 1 or more, not {min(ks)}")
    if not 0 < gallery <= 1:
        raise PatchloomError(f"--gallery must be a share above 0 and up to 1, such as 0.1, not {gallery:g}")
    return _one("knn", run, data, how, pooling, tuple(ks), gallery)


def linear(run: str | Path, data: str | Path, how: How, *, pooling: Pooling | Literal["all"] = "all") -> Report:
    """Train a linear classifier on frozen features.

    Args:
        run, data, how, pooling: as for `knn`.

    Raises:
        PatchloomError: as `knn`.
    """
    return _one("linear", run, data, how, pooling)


def _one(
    protocol: Protocol, run: str | Path, data: str | Path, how: How, pooling: str, ks=_KS, gallery: float = 1.0
) -> Report:
    vit, card = load_encoder(run)
    parts = parts_of(data, how)
    if gallery < 1:
        n = len(parts.train)
        some = stratified(parts.train, max(1, round(gallery * n)), how.seed)
        drawn = f"The gallery is a stratified {100 * gallery:.3g} % of {n:,} training images (seed {how.seed})."
        parts = replace(parts, train=some, story=f"{parts.story} {drawn}")
    (report,) = compare((protocol,), vit, card, parts, how, load_instance_head(run), pooling, ks)
    return report


def subjects(
    vit: VisionTransformer, card: EncoderCard, how: How, head: InstanceHead | None = None, *, layers: bool = False
) -> list[Subject]:
    """An encoder, its untrained twin and raw pixels; features that were taken before come from the cache.

    Args:
        vit, card, how: the encoder, what belongs to it, and how to measure.
        head: gives the instance representation; the twin has an untrained one.
        layers: give every layer's features rather than every pooling of the last.
    """
    at, keep = how.at, how.cache
    size, what = tuple(vit.patch_embed.img_size), "layers" if layers else "pooled"

    def by(net: VisionTransformer, its_head: InstanceHead | None) -> Callable[[Source], Features]:
        def take(source: Source) -> Features:
            if layers:
                return extract_layers(net, card, source, device=at, **how.reading(source))
            return extract(net, card, source, device=at, head=its_head, **how.reading(source))

        about = (what, *about_encoder(net, card, at, its_head)) if keep else ()
        return lambda source: remembered(about, source, take, keep=keep)

    def pixels(source: Source) -> Features:
        about = ("pixels", str(pixels_size(size)), str(card.mean), str(card.std))
        take = partial(pixel_features, size=size, mean=card.mean, std=card.std, **how.reading(source))
        return remembered(about, source, take, keep=keep)

    twin, fresh = untrained_twin(card, head, how.seed)
    # functions, so that only one encoder's features are in memory at a time
    return [
        Subject(card.name, by(vit, head), vit),
        Subject(UNTRAINED, by(twin, fresh), twin),
        Subject(PIXELS, pixels, None),
    ]


def compare(
    protocols: Sequence[Protocol],
    vit: VisionTransformer,
    card: EncoderCard,
    parts: Parts,
    how: How,
    head: InstanceHead | None = None,
    pooling: Pooling | Literal["all"] = "all",
    ks: Sequence[int] = _KS,
) -> list[Report]:
    """Measure an encoder, its untrained twin and raw pixels; each one's features are taken once for all protocols.

    ``head`` gives the pooling "instance"; the twin has an untrained one.

    Raises:
        PatchloomError: a pooling that the encoder lacks, or images that cannot be measured.
    """
    if pooling != "all":
        check_pooling(pooling, tokens_of(vit, head))
    fits: dict[str, Fit] = {
        "knn": partial(_knn, ks=ks),
        "linear": partial(_linear, seed=how.seed, device=how.at),
    }
    rows: dict[str, list[list[Row]]] = {protocol: [] for protocol in protocols}
    kept = []
    for name, features_of, _ in subjects(vit, card, how, head):
        train = features_of(parts.train)
        poolings = train.poolings() if pooling == "all" or name == PIXELS else (pooling,)
        scores = {protocol: {pooled: fits[protocol](train, pooled) for pooled in poolings} for protocol in protocols}
        # all that is chosen has been chosen: now the test images are read
        test = features_of(parts.test)
        for protocol in protocols:
            found = [
                Row.of(name, pooled, protocol, settings, value, len(test.labels))
                for pooled, score in scores[protocol].items()
                for settings, value in score(test)
            ]
            rows[protocol].append(found)
        kept += [name] * (train.kept or test.kept)
    n_test = len(test.labels)
    size, instance = tuple(vit.patch_embed.img_size), head is not None and pooling in ("all", "instance")
    around = circumstances(parts, train, test, size, kept, instance)
    quoted = {protocol: tuple(_to_quote(protocol, some) for some in rows[protocol]) for protocol in protocols}
    return [
        Report(
            rows=[*sum(rows[protocol], []), majority(protocol, train.labels, test.labels)],
            protocol=f"{_sentence(protocol, train, test, ks)} {around}",
            headline=_headline(protocol, *quoted[protocol], n_test),
            quoted=quoted[protocol],
            data=parts.test.name,
            fingerprint=parts.test.fingerprint(),
            seed=how.seed,
            n_test=n_test,
        )
        for protocol in protocols
    ]


def _knn(train: Features, pooling: str, *, ks: Sequence[int]) -> Score:
    def score(test: Features) -> list[tuple[dict[str, Any], float]]:
        found = knn_accuracies(train.pooled(pooling), train.labels, test.pooled(pooling), test.labels, ks)
        return [({"k": k, "temperature": TEMPERATURE}, value) for k, value in found.items()]

    return score


def _linear(train: Features, pooling: str, *, seed: int, device: torch.device) -> Score:
    probe, choice = linear_probe(train.pooled(pooling), train.labels, seed=seed, device=device)
    settings = {"l2": choice.strength, "held_out_accuracy": choice.accuracy, "held_out": choice.held_out}
    return lambda test: [(settings, probe.accuracy(test.pooled(pooling), test.labels))]


def _to_quote(protocol: Protocol, rows: list[Row]) -> Row:
    """The one row of an encoder that is quoted, chosen without a look at its value on the test images."""
    if protocol == "linear":
        return max(rows, key=lambda row: row.settings["held_out_accuracy"])
    first = [row for row in rows if row.pooling == "mean"] or rows
    return min(first, key=lambda row: abs(row.settings["k"] - _USUAL_K))


def _sentence(protocol: Protocol, train: Features, test: Features, ks: Sequence[int]) -> str:
    n, m = len(train.labels), len(test.labels)
    if protocol == "knn":
        large = ", ".join(f"k = {k}" for k in ks if k > n)
        return (
            f"kNN: for each of {m:,} test images the k most similar of {n:,} training images vote (cosine similarity "
            f"of frozen features, votes weighted by exp(similarity / {TEMPERATURE})); nothing was trained or chosen."
            + (f" Left out, since more than there are: {large}." if large else "")
        )
    return (
        f"Linear probe: a logistic regression on the frozen, standardised features of {n:,} training images, "
        f"tested on {m:,} others; its L2 strength (of {len(STRENGTHS)} from {min(STRENGTHS):g} to "
        f"{max(STRENGTHS):g}) and the pooling that is quoted were chosen on a stratified {100 * HELD_OUT_SHARE:.0f} % "
        "of the training images, then all of them were fitted again."
    )


def circumstances(
    parts: Parts, train: Features, test: Features, size: tuple[int, int], kept: Sequence[str], instance: bool = False
) -> str:
    """Sentences for any protocol on frozen features: where images and features came from, and what the controls are.

    Args:
        parts, train, test: the images, and features of them.
        size: height and width that the encoder sees.
        kept: whose features are of an earlier pass.
        instance: the instance representation was measured.
    """
    said = [parts.story, "Raw pixels are the images at {}x{}.".format(*pixels_size(size))]
    if instance:
        said.append("Pooling instance is by the head that is beside the encoder; untrained has an untrained head.")
    if kept:
        said.append(f"Features of an earlier pass were used for {', '.join(kept)}: --cache false takes them anew.")
    return " ".join([*said, *lost_images(train.unreadable + test.unreadable)])


def majority(protocol: str, train: Tensor, test: Tensor) -> Row:
    """The row of a guesser who names the most frequent label [n] of the training images for all of ``test`` [m]."""
    right = (test == train.bincount().argmax()).double().mean().item()
    return Row.of(CHANCE, "-", protocol, {}, right, len(test))


def _headline(protocol: Protocol, trained: Row, untrained: Row, pixels: Row, n_test: int) -> str:
    if protocol == "knn":
        name = f"kNN (k={trained.settings['k']}, {trained.pooling})"
    else:
        name = f"Linear probe ({trained.pooling})"
    return (
        f"{name}: {trained.text()} against {100 * untrained.value:.1f} % untrained and "
        f"{100 * pixels.value:.1f} % raw pixels on {n_test:,} test images."
    )
