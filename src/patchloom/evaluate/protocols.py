"""Protocols: the same measurement of an encoder, of its untrained twin and of raw pixels, and what to say about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer

from patchloom.data import Source, open_data, split_for_test
from patchloom.data.source import pick
from patchloom.errors import PatchloomError
from patchloom.evaluate.features import (
    Features,
    Pooling,
    check_pooling,
    extract,
    has_labels,
    labelled,
    pixel_features,
    pixels_size,
    tokens_of,
)
from patchloom.evaluate.knn import TEMPERATURE, knn_accuracies
from patchloom.evaluate.linear import HELD_OUT_SHARE, STRENGTHS, linear_probe
from patchloom.evaluate.report import Report, Row, append_rows
from patchloom.nets.heads import InstanceHead
from patchloom.nets.weights import EncoderCard, load_encoder, load_instance_head, untrained_twin

Protocol = Literal["knn", "linear"]
_PROTOCOLS = get_args(Protocol)

UNTRAINED, PIXELS, CHANCE = "untrained", "raw pixels", "majority class"
_USUAL_K = 20

# (training images, test images, pooling) -> settings and accuracy of each number that the protocol gives
Measure = Callable[[Features, Features, str], list[tuple[dict[str, Any], float]]]


@dataclass(frozen=True)
class Parts:
    """Labelled training and test images, and how they came about, in words."""

    train: Source
    test: Source
    story: str


@dataclass(frozen=True)
class Settings:
    """How to measure; the fields are arguments of `evaluate`."""

    pooling: Pooling | Literal["all"] = "all"
    ks: tuple[int, ...] = (1, 5, 20, 100)
    seed: int = 0
    device: torch.device = torch.device("cpu")
    batch_size: int = 256
    workers: int = 0


def evaluate(
    protocol: Protocol,
    run: str | Path,
    data: str | Path,
    *,
    pooling: Pooling | Literal["all"] = "all",
    ks: Sequence[int] = (1, 5, 20, 100),
    seed: int = 0,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 0,
    most: int | None = None,
) -> Report:
    """Measure what a frozen encoder's features are worth, beside an untrained encoder, raw pixels and chance.

    The rows are appended to ``results.csv`` in the run's folder, if ``run`` is one.

    Args:
        protocol: "knn", or "linear" for a linear probe.
        run: a run's folder, an encoder's ``.safetensors`` file, or ``timm:NAME``.
        data: labelled images, as `patchloom.data.open_data` takes them.
        pooling: "class", "mean", "instance" (of a head beside the encoder), "both" class and mean, or "all" there are.
        ks: numbers of neighbours (knn).
        seed: of the splits and of the untrained encoder.
        device: "auto" or what torch calls it.
        batch_size: images at once.
        workers: processes that read images.
        most: train on a stratified subset of at most so many images, for a quick look.

    Raises:
        PatchloomError: no such protocol, encoder or data; data without labels; or a pooling that the encoder lacks.
    """
    if protocol not in _PROTOCOLS:
        raise PatchloomError(f"there is no protocol {protocol}: choose {' or '.join(_PROTOCOLS)}")
    for name, value, least in (("batch_size", batch_size, 1), ("workers", workers, 0), ("seed", seed, 0)):
        if value < least:
            raise PatchloomError(f"--{name} must be {least} or more, not {value}")
    if any(k < 1 for k in ks):
        raise PatchloomError(f"--ks must be 1 or more, not {min(ks)}")
    at = _device(device)
    vit, card = load_encoder(run)
    parts = _parts(data, seed, most)
    settings = Settings(pooling, tuple(ks), seed, at, batch_size, workers)
    (report,) = compare((protocol,), vit, card, parts, settings, load_instance_head(run))
    if not str(run).startswith("timm:") and Path(run).is_dir():
        append_rows(Path(run) / "results.csv", report)
    return report


def compare(
    protocols: Sequence[Protocol],
    vit: VisionTransformer,
    card: EncoderCard,
    parts: Parts,
    settings: Settings,
    head: InstanceHead | None = None,
) -> list[Report]:
    """Measure an encoder, its untrained twin and raw pixels; each one's features are taken once for all protocols.

    ``head`` gives the pooling "instance"; the twin has an untrained one.

    Raises:
        PatchloomError: a pooling that the encoder lacks, or images that cannot be measured.
    """
    s = settings
    if s.pooling != "all":
        check_pooling(s.pooling, tokens_of(vit, head))
    read = {"batch_size": s.batch_size, "workers": s.workers}
    size = tuple(vit.patch_embed.img_size)
    twin, fresh = untrained_twin(card, head, s.seed)
    # a list of thunks, so that only one encoder's features are in memory at a time
    subjects: list[tuple[str, Callable[[Source], Features]]] = [
        (card.name, lambda source: extract(vit, card, source, device=s.device, head=head, **read)),
        (UNTRAINED, lambda source: extract(twin, card, source, device=s.device, head=fresh, **read)),
        (PIXELS, lambda source: pixel_features(source, size, card.mean, card.std, **read)),
    ]
    measures: dict[str, Measure] = {
        "knn": partial(_knn, ks=s.ks),
        "linear": partial(_linear, seed=s.seed, device=s.device),
    }
    rows: dict[str, list[list[Row]]] = {protocol: [] for protocol in protocols}
    for name, features_of in subjects:
        train, test = features_of(parts.train), features_of(parts.test)
        poolings = train.poolings() if s.pooling == "all" or name == PIXELS else (s.pooling,)
        for protocol in protocols:
            found = [
                Row.of(name, pooled, protocol, chosen, value, len(test.labels))
                for pooled in poolings
                for chosen, value in measures[protocol](train, test, pooled)
            ]
            rows[protocol].append(found)
    n_test = len(test.labels)
    instance = head is not None and s.pooling in ("all", "instance")
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
            seed=s.seed,
            n_test=n_test,
        )
        for protocol in protocols
    ]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as problem:  # torch built without CUDA asserts
        raise PatchloomError(f"the device {name} cannot be used here: choose auto or cpu") from problem


def _parts(data: str | Path, seed: int, most: int | None) -> Parts:
    opened = open_data(data)
    if has_labels(opened.test):
        train, test = labelled(opened.train), labelled(opened.test)
        story = "The data brings its own test images."
    else:
        train, test = split_for_test(labelled(opened.train), seed=seed)
        story = (
            f"The data brings no labelled test images, so a stratified fifth was split off for the test (seed {seed}): "
            "pre-training may have seen those images, without their labels."
        )
    n = len(train)
    if most is not None and most < 2:
        raise PatchloomError(f"{most} training images are too few: ask for at least 2")
    if most is not None and most < n:
        # what is left when the others are drawn: so a rare class keeps an image
        train = train.subset(np.setdiff1d(np.arange(n), pick(train.labels, n - most, seed)))
        story += f" For a quick look, only a stratified {most:,} of {n:,} training images were used (seed {seed})."
    return Parts(train, test, story)


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
