"""Shared code of protocols on frozen features, which compare an encoder with its controls.

The controls are its untrained twin, raw pixels and, for an adapted encoder, the weights that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import track_progress
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.features import (
    USUAL_FEATURES,
    FeatureOptions,
    ImageFeatures,
    Pooling,
    about_encoder,
    extract,
    load_or_extract,
    pixel_features,
    pixels_size,
    raw_size,
)
from patchloom.evaluate.logistic import CHOICE_VALIDATION_SHARE
from patchloom.evaluate.settings import EvalSettings, Parts, parts_of, stratified_subset
from patchloom.nets.checkpoints.format import EncoderCard, untrained_twin
from patchloom.nets.encode import input_size
from patchloom.nets.finetune import without_last_norm
from patchloom.nets.heads import InstanceHead, check_pooling, tokens_of
from patchloom.nets.swin import Encoder
from patchloom.results.claims import BLEND, CONSTANT, START, UNTRAINED
from patchloom.results.evaluation import Drawing, Evaluation, as_control, compare_results, note_unreadable
from patchloom.results.result import Result
from patchloom.runs.encoder import blend, load_blend, load_start

# suggestion for encoders that a protocol does not support
INSTEAD = "take knn, linear, blocks, few-shot or finetune, and positions for a run of droppos"

_HELD_OUT = "held_out_accuracy"

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

    `fit` runs for each encoder and pooling; its result runs once, on test features;
    `Result.of_images` gives the accuracy.

    Attributes:
        name: name in the rows.
        fit: function that fits features of training images; its result scores features of test images.
        quoted: function that selects the quoted row of an encoder, without its value on the test images.
        title: function from the encoder's quoted row to the start of the headline.
        sentence: function from training and test features to a description of the method.
        drawn: whether the result of a given encoder is random, such as with a draw of few labels.
        across: setting whose values are the columns of the table, as in `Evaluation`.
        gallery: name of the training images in the headline, before their number; "" leaves them out.
        held_out: function from training features, a quoted row and settings to the row's accuracy on held-out training
            images, which chooses a blend; None: the protocol has no blends.
    """

    name: str
    fit: FitFunction
    quoted: Callable[[Sequence[Result]], Result]
    title: Callable[[Result], str]
    sentence: Callable[[ImageFeatures, ImageFeatures], str]
    drawn: bool = False
    across: str = ""
    gallery: str = ""
    held_out: Callable[[ImageFeatures, Result, EvalSettings], float] | None = None


class BlendPoint(NamedTuple):
    """Quoted row of a blend of a run's encoder with its start, and its accuracy on held-out training images."""

    share: float
    row: Result
    held_out: float


def measure_run(
    protocol: FrozenProtocol,
    run: str | Path,
    data: DataLike,
    settings: EvalSettings,
    pooling: Pooling | Literal["all"],
    gallery: float = 1.0,
    shares: float | Sequence[float] | None = None,
    options: FeatureOptions = USUAL_FEATURES,
) -> Evaluation:
    """Evaluate a run by one protocol.

    Args:
        protocol: the protocol.
        run, data, settings: as in `patchloom.evaluate.protocols.evaluate`.
        pooling: feature pooling, or all.
        gallery: stratified fraction of the training images that is used.
        shares: shares of the run's weights in blends with its start; 0 and 1 are added.
        options: how the features are made.
    """
    shares = [shares] if isinstance(shares, int | float) else shares
    if shares is not None:
        _check_shares(shares, run, pooling, settings)
    vit, card = settings.encoder(run)
    parts = parts_of(data, settings, card=card, run=run)
    if gallery < 1:
        n = len(parts.train)
        some = stratified_subset(parts.train, max(1, round(gallery * n)), settings.seed)
        drawn = (
            f"The gallery is a stratified {100 * gallery:.3g} % of {n:,} training {some.noun} (seed {settings.seed})."
        )
        parts = replace(parts, train=some, story=f"{parts.story} {drawn}")
    head = settings.extra_module(run, "pooling")
    start = load_start(run)
    (report,) = compare_frozen((protocol,), vit, card, parts, settings, head, pooling, start, shares, options)
    if shares is None or not Path(run).is_dir():  # a file has no folder of pictures
        return report
    return replace(report, drawings=(_blend_drawing(report, run),))


def _blend_drawing(report: Evaluation, run: str | Path) -> Drawing:
    """Return the picture of the blends of a report, whose last quoted row is the chosen one."""
    trained, *controls, chosen = report.quoted
    blends = [row for row in report.results if row.encoder == BLEND]
    content = {
        "shares": [row.settings["blend"] for row in blends],
        "values": [(row.value, row.low, row.high) for row in blends],
        "baselines": {row.encoder: row.value for row in controls if row.encoder != START},
        "best": blends.index(chosen),
        "name": trained.encoder,
        "note": f"accuracy by evaluate {trained.protocol}, 95 % interval",
    }
    return Drawing(
        "patchloom.look.charts.draw_blends", Path(run) / "pictures" / f"blends-{trained.protocol}.png", content
    )


def _check_shares(shares: Sequence[float], run: str | Path, pooling: str, settings: EvalSettings) -> None:
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise PatchloomError(
            f"--blend takes shares of the adapted weights from 0 to 1, such as 0.25,0.5,0.75, not {listing(shares)}"
        )
    if pooling == "instance":
        raise PatchloomError("--blend has no instance head: leave out --pooling instance")
    if settings.network == "teacher":
        raise PatchloomError("--blend is of the student with its start: leave out --network teacher")
    load_blend(run, 0)  # refuse a run without a start before its images are read


def extractors(
    vit: Encoder,
    card: EncoderCard,
    settings: EvalSettings,
    head: InstanceHead | None = None,
    *,
    layers: bool = False,
    start: tuple[Encoder, EncoderCard] | None = None,
    options: FeatureOptions = USUAL_FEATURES,
) -> list[FeatureExtractor]:
    """Return the extractors of an encoder, its start if given, its untrained twin and raw pixels, with the cache.

    The start has no instance ``head``.
    """
    twin, fresh = untrained_twin(card, head, settings.seed)
    own: Any = {"layers": layers, "options": options}
    starts = [] if start is None else [encoder_extractor(START, *start, settings, **own)]
    # functions, so that only one set of features is in memory at a time
    return [
        encoder_extractor(card.name, vit, card, settings, head, **own),
        *starts,
        encoder_extractor(UNTRAINED, twin, card, settings, fresh, **own),
        raw_extractor(vit, card, settings, options),
    ]


def encoder_extractor(
    name: str,
    vit: Encoder,
    card: EncoderCard,
    settings: EvalSettings,
    head: InstanceHead | None = None,
    *,
    layers: bool = False,
    options: FeatureOptions = USUAL_FEATURES,
) -> FeatureExtractor:
    """Return the extractor of an encoder, with the cache; ``layers`` gives features of all layers, without a head."""
    device, head = settings.torch_device, None if layers else head
    vit = vit if options.last_norm else without_last_norm(vit)
    kind = "layers" if layers else "pooled"
    about = (kind, *about_encoder(vit, card, device, head), *_key(options)) if settings.cache else ()

    def extract_features(source: Source) -> ImageFeatures:
        how = {**_reading(source, name, settings), "test_crop": options.test_crop}
        return extract(vit, card, source, device=device, head=head, layers=layers, **how)

    def cached_features_of(source: Source) -> ImageFeatures:
        return load_or_extract(about, source, extract_features, keep=settings.cache)

    return FeatureExtractor(name, cached_features_of, vit)


def _key(options: FeatureOptions) -> list[str]:
    return [f"{name} {value}" for name, value in options.plain().items()]


def raw_extractor(
    vit: Encoder, card: EncoderCard, settings: EvalSettings, options: FeatureOptions = USUAL_FEATURES
) -> FeatureExtractor:
    """Return the extractor of raw pixels, or of the raw features of recordings, at the input size of ``vit``."""
    size, name = input_size(vit), raw_name(card)
    about: tuple[str, ...] = "pixels", str(pixels_size(size)), str(card.mean), str(card.std)
    about += (*(f"{name} {value}" for name, value in (card.modality.plain() or {}).items()), *_key(options))

    def extract_features(source: Source) -> ImageFeatures:
        own = {"whole": not card.modality.resizable, "test_crop": options.test_crop}
        how = {**_reading(source, name, settings), **own}
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
    parts: Parts[Source],
    settings: EvalSettings,
    head: InstanceHead | None = None,
    pooling: Pooling | Literal["all"] = "all",
    start: tuple[Encoder, EncoderCard] | None = None,
    shares: Sequence[float] | None = None,
    options: FeatureOptions = USUAL_FEATURES,
) -> list[Evaluation]:
    """Evaluate an encoder and its controls by several protocols, sharing features.

    ``start`` are the weights that the encoder began with; they have no instance head. ``shares`` are those of the
    encoder in blends with its start, and ``options`` say how the features are made.
    """
    options.check(parts.test)
    if pooling != "all":
        check_pooling(pooling, tokens_of(vit, head))
    controls = [raw_name(card), UNTRAINED, *([] if start is None else [START])]
    plan_frozen(listing([protocol.name for protocol in protocols], "and"), card, parts, settings, controls)
    rows: dict[str, list[list[Result]]] = {protocol.name: [] for protocol in protocols}
    curves: dict[str, list[BlendPoint]] = {protocol.name: [] for protocol in protocols}
    cached = []

    def measure(
        extractor: FeatureExtractor, share: float | None
    ) -> tuple[dict[str, list[Result]], ImageFeatures, ImageFeatures]:
        found, train, test = evaluate_extractor(extractor, protocols, parts, settings, pooling, options.plain())
        cached.extend([extractor.name] * (train.cached or test.cached))
        for protocol in protocols:
            if share is None:
                continue
            row = protocol.quoted([one for one in found[protocol.name] if one.pooling != "instance"])
            assert protocol.held_out is not None  # of the protocols with --blend
            curves[protocol.name].append(BlendPoint(share, row, protocol.held_out(train, row, settings)))
        return found, train, test

    begins = None if pooling == "instance" else start
    for place, extractor in enumerate(extractors(vit, card, settings, head, start=begins, options=options)):
        # the encoder and its start are the ends of the curve
        found, train, test = measure(extractor, 1.0 - place if shares is not None and place < 2 else None)
        for title, its in found.items():
            rows[title].append(its)
    for share in sorted({*(shares or ())} - {0, 1}):
        assert start is not None  # with shares
        mixed = blend(start, (vit, card), share)
        measure(encoder_extractor(f"{BLEND} {share:g}", *mixed, settings, options=options), share)
    size, instance = input_size(vit), head is not None and pooling in ("all", "instance")
    around = circumstances(parts, train, test, size, cached, instance, options)
    return [
        _report(protocol, rows[protocol.name], curves[protocol.name], around, parts, settings, train, test)
        for protocol in protocols
    ]


def plan_frozen(
    protocol: str, card: EncoderCard, parts: Parts[Source], settings: EvalSettings, controls: Sequence[str]
) -> None:
    """End a dry run of a protocol on frozen features."""
    train, test = parts.train, parts.test
    settings.end_if_dry(
        test,
        f"{protocol} of {card.name} would encode {len(train):,} training and {len(test):,} test {test.noun}, and the "
        f"same by its controls: {listing(controls, 'and')}.",
        parts.story,
    )


def evaluate_extractor(
    extractor: FeatureExtractor,
    protocols: Sequence[FrozenProtocol],
    parts: Parts[Source],
    settings: EvalSettings,
    pooling: Pooling | Literal["all"] = "all",
    more: Mapping[str, Any] | None = None,
) -> tuple[dict[str, list[Result]], ImageFeatures, ImageFeatures]:
    """Return the rows of an extractor by protocol name, with ``more`` settings, and its features of both parts."""
    name, features_of, encoder = extractor
    train = features_of(parts.train)
    poolings = train.poolings() if pooling == "all" or encoder is None else (pooling,)
    scores: dict[str, dict[str, ScoreFunction]] = {protocol.name: {} for protocol in protocols}
    for protocol in protocols:
        for one in track_progress(poolings, len(poolings), f"{name}: {protocol.name}"):
            scores[protocol.name][one] = protocol.fit(train, one, settings)
    # all choices are made: read the test images
    test = features_of(parts.test)
    rows: dict[str, list[Result]] = {}
    for title, of_pooling in scores.items():
        rows[title] = [
            Result.of_images(
                name, title, {"pooling": pooled, **row_settings, **(more or {})}, correct.cpu(), test.groups
            )
            for pooled, score in track_progress(of_pooling.items(), len(of_pooling), f"{name}: {title}")
            for row_settings, correct in score(test)
        ]
    return rows, train, test


def _report(
    protocol: FrozenProtocol,
    rows: list[list[Result]],
    curve: Sequence[BlendPoint],
    around: str,
    parts: Parts[Source],
    settings: EvalSettings,
    train: ImageFeatures,
    test: ImageFeatures,
) -> Evaluation:
    trained, *controls = map(protocol.quoted, rows)
    beside = listing([as_control(row) for row in controls], "and")
    headline = f"{protocol.title(trained)}: {trained.text()} against {beside}"
    report = frozen_report(protocol, rows, headline, around, parts, settings, train, test)
    return (_with_blends(report, curve) if curve else report).with_differences(protocol.drawn)


def _with_blends(report: Evaluation, curve: Sequence[BlendPoint]) -> Evaluation:
    """Return the report with a row for each blend; the one chosen on held-out training images is quoted."""
    points = sorted(curve)
    best = max(points, key=lambda point: point.held_out)  # ties go to the one nearest to the start
    rows = [
        replace(
            point.row, encoder=BLEND, settings={**point.row.settings, "blend": point.share, _HELD_OUT: point.held_out}
        )
        for point in points
    ]
    chosen = rows[points.index(best)]
    against = compare_results([chosen], [replace(points[0].row, encoder=START)], False)
    said = (
        f"Of {len(points)} blends with the start, {best.share:g} is the best on held-out training {report.noun} "
        f"({100 * best.held_out:.1f} %): {chosen.text()}, {against.text()} against the start."
    )
    method = (
        "Blends are (1 - blend) times the start and blend times the encoder, weight by weight (WiSE-FT). The quoted "
        f"one was chosen on a stratified {100 * CHOICE_VALIDATION_SHARE:.0f} % of the training {report.noun}; a tie "
        "goes to the one nearest to the start."
    )
    return replace(
        report,
        results=[*report.results, *rows],
        quoted=(*report.quoted, chosen),
        headline=f"{report.headline} {said}",
        method=f"{report.method} {method}",
    )


def frozen_report(
    protocol: FrozenProtocol,
    rows: list[list[Result]],
    headline: str,
    around: str,
    parts: Parts[Source],
    settings: EvalSettings,
    train: ImageFeatures,
    test: ImageFeatures,
) -> Evaluation:
    """Return the report on the ``rows`` of each extractor, without differences.

    The end of the ``headline``, which names training and test images, is added, and so is the row of the best
    constant answer.
    """
    n_test = len(test.labels)
    used = f" {protocol.gallery}: {len(train.labels):,} training {parts.train.noun}" if protocol.gallery else ""
    used += f"; test: {parts.origin}" if used and parts.origin else ""
    return Evaluation.of_test(
        parts.test,
        settings.seed,
        n_test,
        results=[*sum(rows, []), constant_answer(protocol.name, test.labels, parts.test, test.groups)],
        method=f"{protocol.sentence(train, test)} {around}",
        headline=f"{headline} on {n_test:,} test {parts.test.noun}.{used}{'.' if used else ''}",
        quoted=tuple(map(protocol.quoted, rows)),
        across=protocol.across,
    )


def circumstances(
    parts: Parts[Source],
    train: ImageFeatures,
    test: ImageFeatures,
    size: tuple[int, int],
    cached: Sequence[str],
    instance: bool = False,
    options: FeatureOptions = USUAL_FEATURES,
) -> str:
    """Return sentences on the origin of images and features and on the controls, for any protocol."""
    modality = parts.train.modality
    h, w = raw_size(modality, size)
    said = [parts.story, f"{modality.raw.capitalize()} are {modality.pictured} at {h}x{w}.", *options.sentences(size)]
    if instance:
        said.append("Pooling instance uses the head saved with the encoder; untrained has an untrained head.")
    if cached:
        said.append(f"Cached features were used for {', '.join(cached)}: --cache false computes them again.")
    return " ".join([*said, *note_unreadable(train.unreadable + test.unreadable, parts.train.noun)])


def constant_answer(protocol: str, labels: Tensor, test: Source, groups: Tensor | None) -> Result:
    """Return the row of the best constant answer to the test images with ``labels`` [n] of the source ``test``.

    It is the most frequent class of the test images, not of the training images: what a classifier has to beat to show
    anything, whatever the two parts hold.
    """
    best = int(labels.bincount().argmax())
    answer = test.classes[best] if test.classes else str(best)
    return Result.of_images(CONSTANT, protocol, {"answer": answer}, labels == best, groups)
