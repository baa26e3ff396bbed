"""Shared code of protocols on frozen features, which compare an encoder with its controls.

The controls are its untrained twin, raw pixels and, for an adapted encoder, the weights that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from patchloom.claims import START
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import track_progress
from patchloom.errors import listing
from patchloom.evaluate.features import (
    ImageFeatures,
    Pooling,
    about_encoder,
    extract,
    load_or_extract,
    pixel_features,
    pixels_size,
    raw_size,
)
from patchloom.evaluate.results import Report, Row, note_unreadable
from patchloom.evaluate.settings import EvalSettings, Parts, parts_of, stratified_subset
from patchloom.nets.checkpoints.format import EncoderCard, untrained_twin
from patchloom.nets.encode import input_size
from patchloom.nets.heads import InstanceHead, check_pooling, tokens_of
from patchloom.nets.swin import Encoder
from patchloom.runs.encoder import load_encoder, load_extra_module, load_start

# suggestion for encoders that a protocol does not support
INSTEAD = "take knn, linear, blocks, few-shot or finetune, and positions for a run of droppos"
UNTRAINED, PIXELS, MAJORITY = "untrained", "raw pixels", "majority class"

_IN_HEADLINE = {START: "at its start"}

# features of test images -> settings of each row of the protocol, and [n] correctness of each image
ScoreFunction = Callable[[ImageFeatures], list[tuple[dict[str, Any], Tensor]]]
# features of training images, pooling, settings -> the function above; all choices are made here
FitFunction = Callable[[ImageFeatures, str, EvalSettings], ScoreFunction]


class FeatureExtractor(NamedTuple):
    """Name, function from images to features, and encoder, which raw pixels lack."""

    name: str
    features_of: Callable[[Source], ImageFeatures]
    encoder: Encoder | None


@dataclass(frozen=True)
class FrozenProtocol:
    """Protocol on frozen features, run by `compare_frozen`.

    `fit` runs for each encoder and pooling; its result runs once, on test features; `Row.of_images` gives the accuracy.

    Attributes:
        name: name in the rows.
        fit: function that fits features of training images; its result scores features of test images.
        quoted: function that selects the quoted row of an encoder, without its value on the test images.
        title: function from the encoder's quoted row to the start of the headline.
        sentence: function from training and test features to a description of the method.
        drawn: whether the result of a given encoder is random, such as with a draw of few labels.
        across: setting whose values are the columns of the table, as in `Report`.
        gallery: name of the training images in the headline, before their number; "" leaves them out.
    """

    name: str
    fit: FitFunction
    quoted: Callable[[Sequence[Row]], Row]
    title: Callable[[Row], str]
    sentence: Callable[[ImageFeatures, ImageFeatures], str]
    drawn: bool = False
    across: str = ""
    gallery: str = ""


def measure_run(
    protocol: FrozenProtocol,
    run: str | Path,
    data: DataLike,
    settings: EvalSettings,
    pooling: Pooling | Literal["all"],
    gallery: float = 1.0,
) -> Report:
    """Evaluate a run by one protocol; ``gallery`` is the stratified fraction of the training images that is used."""
    vit, card = load_encoder(run, settings.model)
    parts = parts_of(data, settings, card=card, run=run)
    if gallery < 1:
        n = len(parts.train)
        some = stratified_subset(parts.train, max(1, round(gallery * n)), settings.seed)
        drawn = (
            f"The gallery is a stratified {100 * gallery:.3g} % of {n:,} training {some.noun} (seed {settings.seed})."
        )
        parts = replace(parts, train=some, story=f"{parts.story} {drawn}")
    head = load_extra_module(run, "pooling")
    (report,) = compare_frozen((protocol,), vit, card, parts, settings, head, pooling, load_start(run))
    return report


def extractors(
    vit: Encoder,
    card: EncoderCard,
    settings: EvalSettings,
    head: InstanceHead | None = None,
    *,
    layers: bool = False,
    start: tuple[Encoder, EncoderCard] | None = None,
) -> list[FeatureExtractor]:
    """Return the extractors of an encoder, its start if given, its untrained twin and raw pixels, with the cache.

    The start has no instance ``head``.
    """
    twin, fresh = untrained_twin(card, head, settings.seed)
    starts = [] if start is None else [encoder_extractor(START, *start, settings, layers=layers)]
    # functions, so that only one set of features is in memory at a time
    return [
        encoder_extractor(card.name, vit, card, settings, head, layers=layers),
        *starts,
        encoder_extractor(UNTRAINED, twin, card, settings, fresh, layers=layers),
        raw_extractor(vit, card, settings),
    ]


def encoder_extractor(
    name: str,
    vit: Encoder,
    card: EncoderCard,
    settings: EvalSettings,
    head: InstanceHead | None = None,
    *,
    layers: bool = False,
) -> FeatureExtractor:
    """Return the extractor of an encoder, with the cache; ``layers`` gives features of all layers, without a head."""
    device, head = settings.torch_device, None if layers else head
    about = ("layers" if layers else "pooled", *about_encoder(vit, card, device, head)) if settings.cache else ()

    def extract_features(source: Source) -> ImageFeatures:
        how = _reading(source, name, settings)
        return extract(vit, card, source, device=device, head=head, layers=layers, **how)

    def cached_features_of(source: Source) -> ImageFeatures:
        return load_or_extract(about, source, extract_features, keep=settings.cache)

    return FeatureExtractor(name, cached_features_of, vit)


def raw_extractor(vit: Encoder, card: EncoderCard, settings: EvalSettings) -> FeatureExtractor:
    """Return the extractor of raw pixels, or of the raw features of recordings, at the input size of ``vit``."""
    size, name = input_size(vit), raw_name(card)
    about: tuple[str, ...] = "pixels", str(pixels_size(size)), str(card.mean), str(card.std)
    about += tuple(f"{name} {value}" for name, value in (card.modality.plain() or {}).items())

    def extract_features(source: Source) -> ImageFeatures:
        how = {**_reading(source, name, settings), "whole": not card.modality.resizable}
        return pixel_features(source, size, card.mean, card.std, **how)

    def cached_features_of(source: Source) -> ImageFeatures:
        return load_or_extract(about, source, extract_features, keep=settings.cache)

    return FeatureExtractor(name, cached_features_of, None)


def raw_name(card: EncoderCard) -> str:
    """Return the name of the control without an encoder: raw pixels, or raw features of recordings."""
    return card.modality.raw


def _reading(source: Source, name: str, settings: EvalSettings) -> dict[str, Any]:
    return {**settings.reading(source), "what": f"{name}: features of {len(source):,} {source.noun}"}


def compare_frozen(
    protocols: Sequence[FrozenProtocol],
    vit: Encoder,
    card: EncoderCard,
    parts: Parts,
    settings: EvalSettings,
    head: InstanceHead | None = None,
    pooling: Pooling | Literal["all"] = "all",
    start: tuple[Encoder, EncoderCard] | None = None,
) -> list[Report]:
    """Evaluate an encoder and its controls by several protocols, sharing features.

    ``start`` are the weights that the encoder began with; they have no instance head.
    """
    if pooling != "all":
        check_pooling(pooling, tokens_of(vit, head))
    rows: dict[str, list[list[Row]]] = {protocol.name: [] for protocol in protocols}
    cached = []
    for extractor in extractors(vit, card, settings, head, start=None if pooling == "instance" else start):
        found, train, test = evaluate_extractor(extractor, protocols, parts, settings, pooling)
        for title, its in found.items():
            rows[title].append(its)
        cached += [extractor.name] * (train.cached or test.cached)
    size, instance = input_size(vit), head is not None and pooling in ("all", "instance")
    around = circumstances(parts, train, test, size, cached, instance)
    return [_report(protocol, rows[protocol.name], around, parts, settings, train, test) for protocol in protocols]


def evaluate_extractor(
    extractor: FeatureExtractor,
    protocols: Sequence[FrozenProtocol],
    parts: Parts,
    settings: EvalSettings,
    pooling: Pooling | Literal["all"] = "all",
) -> tuple[dict[str, list[Row]], ImageFeatures, ImageFeatures]:
    """Return the rows of an extractor by protocol name, and its features of both parts."""
    name, features_of, encoder = extractor
    train = features_of(parts.train)
    poolings = train.poolings() if pooling == "all" or encoder is None else (pooling,)
    scores: dict[str, dict[str, ScoreFunction]] = {protocol.name: {} for protocol in protocols}
    for protocol in protocols:
        for one in track_progress(poolings, len(poolings), f"{name}: {protocol.name}"):
            scores[protocol.name][one] = protocol.fit(train, one, settings)
    # all choices are made: read the test images
    test = features_of(parts.test)
    rows: dict[str, list[Row]] = {}
    for title, of_pooling in scores.items():
        rows[title] = [
            Row.of_images(name, pooled, title, row_settings, correct)
            for pooled, score in track_progress(of_pooling.items(), len(of_pooling), f"{name}: {title}")
            for row_settings, correct in score(test)
        ]
    return rows, train, test


def _report(
    protocol: FrozenProtocol,
    rows: list[list[Row]],
    around: str,
    parts: Parts,
    settings: EvalSettings,
    train: ImageFeatures,
    test: ImageFeatures,
) -> Report:
    trained, *controls = map(protocol.quoted, rows)
    beside = [f"{100 * row.value:.1f} % {_IN_HEADLINE.get(row.encoder, row.encoder)}" for row in controls]
    headline = f"{protocol.title(trained)}: {trained.text()} against {listing(beside, 'and')}"
    return frozen_report(protocol, rows, headline, around, parts, settings, train, test).with_differences(
        protocol.drawn
    )


def frozen_report(
    protocol: FrozenProtocol,
    rows: list[list[Row]],
    headline: str,
    around: str,
    parts: Parts,
    settings: EvalSettings,
    train: ImageFeatures,
    test: ImageFeatures,
) -> Report:
    """Return the report on the ``rows`` of each extractor, without differences.

    The end of the ``headline``, which names training and test images, is added, and so is the row of the majority
    class.
    """
    n_test = len(test.labels)
    used = f" {protocol.gallery}: {len(train.labels):,} training {parts.train.noun}" if protocol.gallery else ""
    used += f"; test: {parts.origin}" if used and parts.origin else ""
    return Report(
        rows=[*sum(rows, []), majority(protocol.name, train.labels, test.labels)],
        protocol=f"{protocol.sentence(train, test)} {around}",
        headline=f"{headline} on {n_test:,} test {parts.test.noun}.{used}{'.' if used else ''}",
        quoted=tuple(map(protocol.quoted, rows)),
        data=parts.test.name,
        fingerprint=parts.test.fingerprint(),
        seed=settings.seed,
        n_test=n_test,
        across=protocol.across,
        noun=parts.test.noun,
    )


def circumstances(
    parts: Parts,
    train: ImageFeatures,
    test: ImageFeatures,
    size: tuple[int, int],
    cached: Sequence[str],
    instance: bool = False,
) -> str:
    """Return sentences on the origin of images and features and on the controls, for any protocol."""
    modality = parts.train.modality
    h, w = raw_size(modality, size)
    said = [parts.story, f"{modality.raw.capitalize()} are {modality.pictured} at {h}x{w}."]
    if instance:
        said.append("Pooling instance uses the head saved with the encoder; untrained has an untrained head.")
    if cached:
        said.append(f"Cached features were used for {', '.join(cached)}: --cache false computes them again.")
    return " ".join([*said, *note_unreadable(train.unreadable + test.unreadable, parts.train.noun)])


def majority(protocol: str, train: Tensor, test: Tensor) -> Row:
    """Return the row of a classifier that predicts the most frequent label of ``train`` [n], on ``test`` [m]."""
    return Row.of_images(MAJORITY, "-", protocol, {}, test == train.bincount().argmax())
