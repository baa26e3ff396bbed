"""Protocols on frozen features: one measurement of an encoder, its untrained twin and raw pixels, and what to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from timm.models.vision_transformer import VisionTransformer

from patchloom.data import Source
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import (
    Features,
    Pooling,
    check_pooling,
    extract,
    pixel_features,
    pixels_size,
    tokens_of,
)
from patchloom.evaluate.how import How, Parts, parts_of
from patchloom.evaluate.knn import TEMPERATURE, knn_accuracies
from patchloom.evaluate.linear import HELD_OUT_SHARE, STRENGTHS, linear_probe
from patchloom.evaluate.report import Report, Row
from patchloom.nets.heads import InstanceHead
from patchloom.nets.weights import EncoderCard, load_encoder, load_instance_head, untrained_twin

Protocol = Literal["knn", "linear"]

UNTRAINED, PIXELS, CHANCE = "untrained", "raw pixels", "majority class"
_USUAL_K = 20
_KS = (1, 5, 20, 100)

# (training images, test images, pooling) -> settings and accuracy of each number that the protocol gives
Measure = Callable[[Features, Features, str], list[tuple[dict[str, Any], float]]]


def knn(
    run: str | Path,
    data: str | Path,
    how: How,
    *,
    pooling: Pooling | Literal["all"] = "all",
    ks: Sequence[int] = _KS,
) -> Report:
    """Let the most similar training images vote, by the cosine of frozen features.

    Args:
        run: a run's folder, an encoder's ``.safetensors`` file, or ``timm:NAME``.
        data: labelled images, as `patchloom.data.open_data` takes them.
        how: what is common to all protocols.
        pooling: "class", "mean", "instance" (of a head beside the encoder), "both" class and mean, or "all" there are.
        ks: numbers of neighbours.

    Raises:
        PatchloomError: no such encoder or data; data without labels; or a pooling that the encoder lacks.
    """
    if any(k < 1 for k in ks):
        raise PatchloomError(f"--ks must be 1 or more, not {min(ks)}")
    return _one("knn", run, data, how, pooling, tuple(ks))


def linear(run: str | Path, data: str | Path, how: How, *, pooling: Pooling | Literal["all"] = "all") -> Report:
    """Train a linear classifier on frozen features.

    Args:
        run, data, how, pooling: as for `knn`.

    Raises:
        PatchloomError: as `knn`.
    """
    return _one("linear", run, data, how, pooling)


def _one(protocol: Protocol, run: str | Path, data: str | Path, how: How, pooling: str, ks=_KS) -> Report:
    vit, card = load_encoder(run)
    (report,) = compare((protocol,), vit, card, parts_of(data, how), how, load_instance_head(run), pooling, ks)
    return report


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
    at, read = how.at, how.reading
    size = tuple(vit.patch_embed.img_size)
    twin, fresh = untrained_twin(card, head, how.seed)
    # a list of thunks, so that only one encoder's features are in memory at a time
    subjects: list[tuple[str, Callable[[Source], Features]]] = [
        (card.name, lambda source: extract(vit, card, source, device=at, head=head, **read)),
        (UNTRAINED, lambda source: extract(twin, card, source, device=at, head=fresh, **read)),
        (PIXELS, lambda source: pixel_features(source, size, card.mean, card.std, **read)),
    ]
    measures: dict[str, Measure] = {
        "knn": partial(_knn, ks=ks),
        "linear": partial(_linear, seed=how.seed, device=at),
    }
    rows: dict[str, list[list[Row]]] = {protocol: [] for protocol in protocols}
    for name, features_of in subjects:
        train, test = features_of(parts.train), features_of(parts.test)
        poolings = train.poolings() if pooling == "all" or name == PIXELS else (pooling,)
        for protocol in protocols:
            found = [
                Row.of(name, pooled, protocol, chosen, value, len(test.labels))
                for pooled in poolings
                for chosen, value in measures[protocol](train, test, pooled)
            ]
            rows[protocol].append(found)
    n_test = len(test.labels)
    instance = head is not None and pooling in ("all", "instance")
    majority = (test.labels == train.labels.bincount().argmax()).double().mean().item()
    quoted = {protocol: tuple(_to_quote(protocol, some) for some in rows[protocol]) for protocol in protocols}
    return [
        Report(
            rows=[*sum(rows[protocol], []), Row.of(CHANCE, "-", protocol, {}, majority, n_test)],
            protocol=_sentences(protocol, parts, train, test, pixels_size(size), instance),
            headline=_headline(protocol, *quoted[protocol], n_test),
            quoted=quoted[protocol],
            data=parts.test.name,
            fingerprint=parts.test.fingerprint(),
            seed=how.seed,
            n_test=n_test,
        )
        for protocol in protocols
    ]


def _knn(train: Features, test: Features, pooling: str, *, ks: Sequence[int]) -> list[tuple[dict[str, Any], float]]:
    found = knn_accuracies(train.pooled(pooling), train.labels, test.pooled(pooling), test.labels, ks)
    return [({"k": k, "temperature": TEMPERATURE}, value) for k, value in found.items()]


def _linear(
    train: Features, test: Features, pooling: str, *, seed: int, device: torch.device
) -> list[tuple[dict[str, Any], float]]:
    probe, choice = linear_probe(train.pooled(pooling), train.labels, seed=seed, device=device)
    settings = {"l2": choice.strength, "held_out_accuracy": choice.accuracy, "held_out": choice.held_out}
    return [(settings, probe.accuracy(test.pooled(pooling), test.labels))]


def _to_quote(protocol: Protocol, rows: list[Row]) -> Row:
    """The one row of an encoder that is quoted, chosen without a look at its value on the test images."""
    if protocol == "linear":
        return max(rows, key=lambda row: row.settings["held_out_accuracy"])
    first = [row for row in rows if row.pooling == "mean"] or rows
    return min(first, key=lambda row: abs(row.settings["k"] - _USUAL_K))


def _sentences(
    protocol: Protocol, parts: Parts, train: Features, test: Features, pixels: tuple[int, int], instance: bool
) -> str:
    n, m = len(train.labels), len(test.labels)
    if protocol == "knn":
        done = (
            f"kNN: for each of {m:,} test images the k most similar of {n:,} training images vote (cosine similarity "
            f"of frozen features, votes weighted by exp(similarity / {TEMPERATURE})); nothing was trained or chosen."
        )
    else:
        held = round(100 * HELD_OUT_SHARE)
        done = (
            f"Linear probe: a logistic regression on the frozen, standardised features of {n:,} training images, "
            f"tested on {m:,} others; its L2 strength (of {len(STRENGTHS)} from {min(STRENGTHS):g} to "
            f"{max(STRENGTHS):g}) and the pooling that is quoted were chosen on a stratified {held} % of the training "
            "images, then all of them were fitted again."
        )
    said = [done, parts.story, f"Raw pixels are the images at {pixels[0]}x{pixels[1]}."]
    if instance:
        said.append("Pooling instance is by the head that is beside the encoder; untrained has an untrained head.")
    lost = train.unreadable + test.unreadable
    if lost:
        said.append(f"{len(lost):,} images could not be read and were left out, such as {lost[0]}.")
    return " ".join(said)


def _headline(protocol: Protocol, trained: Row, untrained: Row, pixels: Row, n_test: int) -> str:
    if protocol == "knn":
        name = f"kNN (k={trained.settings['k']}, {trained.pooling})"
    else:
        name = f"Linear probe ({trained.pooling})"
    return (
        f"{name}: {trained.text()} against {100 * untrained.value:.1f} % untrained and "
        f"{100 * pixels.value:.1f} % raw pixels on {n_test:,} test images."
    )
