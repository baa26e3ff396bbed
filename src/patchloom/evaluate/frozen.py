"""Frozen features of an encoder and its controls, and the report of a probe on them.

The controls are its untrained twin, raw pixels and, for an adapted encoder, the weights that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from patchloom.data.source import Source
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.answers import constant_answers
from patchloom.evaluate.classifier import class_names
from patchloom.evaluate.features import (
    USUAL_FEATURES,
    FeatureOptions,
    ImageFeatures,
    about_encoder,
    extract,
    load_or_extract,
    pixel_features,
    pixels_size,
    raw_size,
)
from patchloom.evaluate.logistic import CHOICE_VALIDATION_SHARE
from patchloom.evaluate.settings import EvalSettings, Parts
from patchloom.evaluate.subjects import Subject, Subjects
from patchloom.look.charts import draw_blends
from patchloom.nets.encode import input_size
from patchloom.nets.finetune import without_last_norm
from patchloom.options.evaluate import Pooling
from patchloom.results.claims import BLEND, START
from patchloom.results.classes import called, explain_measure, quoted_first
from patchloom.results.evaluation import Drawing, Evaluation, as_control, compare_results, note_unreadable
from patchloom.results.result import Result
from patchloom.runs.encoder import blend, load_blend

# suggestion for encoders that a protocol does not support
INSTEAD = "take knn, linear, blocks, few-shot or finetune, and positions for a run of droppos"

_HELD_OUT = "held_out_accuracy"


# Features.


class FeatureExtractor(NamedTuple):
    """Function from images to the features of one subject.

    Attributes:
        name: name in the report.
        features_of: the function, with the cache.
        subject: the encoder; None for raw pixels.
        share: share of the run's weights in a blend with its start, 1 and 0 for these two; None: not on that curve.
    """

    name: str
    features_of: Callable[[Source], ImageFeatures]
    subject: Subject | None = None
    share: float | None = None

    @property
    def is_blend(self) -> bool:
        """Whether the weights are neither the run's nor its start's."""
        return self.share not in (None, 0, 1)


def extractors(
    subjects: Subjects,
    settings: EvalSettings,
    *,
    layers: bool = False,
    options: FeatureOptions = USUAL_FEATURES,
    shares: Sequence[float] = (),
) -> Iterator[FeatureExtractor]:
    """Yield the extractors of an encoder, its start if there is one, its untrained twin and raw pixels, then of blends.

    A blend is made when its turn comes, so that only one is in memory.
    """
    ours, start, fresh = subjects
    make = partial(encoder_extractor, settings=settings, layers=layers, options=options)
    yield make(ours, share=1.0 if shares else None)
    if start is not None:
        yield make(start, share=0.0 if shares else None)
    yield make(fresh)
    yield raw_extractor(ours, settings, options)
    for share in sorted({*shares} - {0, 1}):
        assert start is not None  # with shares
        vit, card = blend((start.vit, start.card), (ours.vit, ours.card), share)
        yield make(Subject(f"{BLEND} {share:g}", vit, card), share=share)


def encoder_extractor(
    subject: Subject,
    settings: EvalSettings,
    *,
    layers: bool = False,
    options: FeatureOptions = USUAL_FEATURES,
    share: float | None = None,
) -> FeatureExtractor:
    """Return the extractor of an encoder, with the cache; ``layers`` gives features of all layers, without a head."""
    card, device, head = subject.card, settings.torch_device, None if layers else subject.head
    vit = subject.vit if options.last_norm else without_last_norm(subject.vit)
    about = tuple[str, ...]()
    if settings.cache:
        about = ("layers" if layers else "pooled", *about_encoder(vit, card, device, head), *_key(options))

    def extract_features(source: Source) -> ImageFeatures:
        how = _reading(source, subject.name, settings, options)
        return extract(vit, card, source, device=device, head=head, layers=layers, **how)

    features_of = partial(load_or_extract, extract_features, about, keep=settings.cache)
    return FeatureExtractor(subject.name, features_of, subject, share)


def raw_extractor(
    subject: Subject, settings: EvalSettings, options: FeatureOptions = USUAL_FEATURES
) -> FeatureExtractor:
    """Return the extractor of raw pixels, or of the raw features of recordings, at the encoder's input size."""
    card, size = subject.card, input_size(subject.vit)
    name = card.modality.raw
    about: tuple[str, ...] = "pixels", str(pixels_size(size)), str(card.mean), str(card.std)
    about += (*(f"{name} {value}" for name, value in (card.modality.plain() or {}).items()), *_key(options))

    def extract_features(source: Source) -> ImageFeatures:
        how = _reading(source, name, settings, options)
        return pixel_features(source, size, card.mean, card.std, whole=not card.modality.resizable, **how)

    return FeatureExtractor(name, partial(load_or_extract, extract_features, about, keep=settings.cache))


def _key(options: FeatureOptions) -> list[str]:
    return [f"{name} {value}" for name, value in options.plain().items()]


def _reading(source: Source, name: str, settings: EvalSettings, options: FeatureOptions) -> dict[str, Any]:
    what = f"{name}: features of {len(source):,} {source.noun}"
    return {**settings.reading(source), "what": what, "test_crop": options.test_crop}


def chosen_poolings(train: ImageFeatures, pooling: Pooling | Literal["all"]) -> tuple[str, ...]:
    """Return the poolings to measure: the given one, or all; raw pixels have one of their own."""
    return (pooling,) if pooling in train.poolings() else train.poolings()


# What is done.


def plan_frozen(protocol: str, subjects: Subjects, parts: Parts[Source], settings: EvalSettings) -> None:
    """End a dry run of a protocol on frozen features."""
    train, test, card = parts.train, parts.test, subjects.ours.card
    controls = [card.modality.raw, *(one.name for one in subjects.controls)]
    settings.end_if_dry(
        test,
        f"{protocol} of {card.name} would encode {len(train):,} training and {len(test):,} test {test.noun}, and the "
        f"same by its controls: {listing(controls, 'and')}.",
        parts.story,
    )


def circumstances(
    subjects: Subjects,
    parts: Parts[Source],
    train: ImageFeatures,
    test: ImageFeatures,
    cached: Sequence[str] = (),
    options: FeatureOptions = USUAL_FEATURES,
    instance: bool = False,
) -> str:
    """Return sentences on the origin of images and features and on the controls, for any protocol."""
    modality, size = parts.train.modality, input_size(subjects.ours.vit)
    h, w = raw_size(modality, size)
    said = [parts.story, f"{modality.raw.capitalize()} are {modality.pictured} at {h}x{w}.", *options.sentences(size)]
    if instance:
        said.append("Pooling instance uses the head saved with the encoder; untrained has an untrained head.")
    if cached:
        said.append(f"Cached features were used for {', '.join(cached)}: --cache false computes them again.")
    return " ".join([*said, *note_unreadable(train.unreadable + test.unreadable, parts.train.noun)])


# The report of a probe.


class Wording(NamedTuple):
    """Texts of a probe's report.

    Attributes:
        title: start of the headline.
        method: description of the method.
        fitted: name of the training images in the headline, before their number.
        across: setting whose values are the columns of the table.
    """

    title: str
    method: str
    fitted: str
    across: str = ""


def frozen_report(
    wording: Wording,
    rows: Sequence[Result],
    parts: Parts[Source],
    settings: EvalSettings,
    train: ImageFeatures,
    test: ImageFeatures,
    around: str,
    *,
    against: str = "",
    trained: bool = False,
    blends: Sequence[Result] = (),
) -> Evaluation:
    """Return the report of a probe, with the row of the best constant answer.

    Args:
        rows: results of the encoder, then of its controls; one of each is marked as quoted.
        train, test: features of both parts, of any of the subjects.
        around: `circumstances`.
        against: the controls in the headline; by default, the quoted number of each.
        trained: whether another draw of labels or a training would give the encoder other results.
        blends: `blend_row` of each share; the best on held-out training images is quoted.
    """
    n, noun = len(test.labels), parts.test.noun
    quoted = [row for row in rows if row.quoted]
    constant = constant_answers(rows[0].protocol, test.labels, parts.test, test.groups)
    results = quoted_first([*rows, *constant], test.labels)
    against = against or listing([as_control(row) for row in quoted[1:]], "and")
    origin = f"; test: {parts.origin}" if parts.origin else ""
    headline = (
        f"{wording.title}: {called(quoted[0])}{quoted[0].text()} against {against} on {n:,} test {noun}. "
        f"{wording.fitted}: {len(train.labels):,} training {parts.train.noun}{origin}."
    )
    method = f"{wording.method} {explain_measure(test.labels.numpy(), parts.test.classes, noun)} {around}"
    if blends:
        curve = sorted(blends, key=lambda row: row.settings["blend"])
        chosen = max(curve, key=lambda row: row.settings[_HELD_OUT])  # ties go to the one nearest to the start
        share, held_out = chosen.settings["blend"], chosen.settings[_HELD_OUT]
        gain = compare_results([chosen], [replace(curve[0], encoder=START)], False)
        headline += (
            f" Of {len(curve)} blends with the start, {share:g} is the best on held-out training {noun} "
            f"({100 * held_out:.1f} %): {chosen.text()}, {gain.text()} against the start."
        )
        method += (
            " Blends are (1 - blend) times the start and blend times the encoder, weight by weight (WiSE-FT). The "
            f"quoted one was chosen on a stratified {100 * CHOICE_VALIDATION_SHARE:.0f} % of the training {noun}; a "
            "tie goes to the one nearest to the start."
        )
        results += curve
        quoted.append(chosen)
    return Evaluation.of_test(
        parts.test,
        settings.seed,
        n,
        results=results,
        method=method,
        headline=headline,
        quoted=tuple(quoted),
        across=wording.across,
        classes=class_names(parts.test),
    ).with_differences(trained)


# Blends of a run's encoder with its start (WiSE-FT).


def blend_shares(
    given: float | Sequence[float] | None, run: str | Path, pooling: str, settings: EvalSettings
) -> list[float]:
    """Return the shares of --blend; [] without it."""
    if given is None:
        return []
    shares = [given] if isinstance(given, int | float) else [*given]
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise PatchloomError(
            f"--blend takes shares of the adapted weights from 0 to 1, such as 0.25,0.5,0.75, not {listing(shares)}"
        )
    if pooling == "instance":
        raise PatchloomError("--blend has no instance head: leave out --pooling instance")
    if settings.network == "teacher":
        raise PatchloomError("--blend is of the student with its start: leave out --network teacher")
    load_blend(run, 0)  # refuse a run without a start before its images are read
    return shares


def blend_row(row: Result, share: float, held_out: float) -> Result:
    """Return the row of a blend; ``held_out`` is its accuracy on held-out training images."""
    settings = {**row.settings, "blend": share, _HELD_OUT: held_out}
    return replace(row, encoder=BLEND, settings=settings, quoted=False)


def blend_drawings(report: Evaluation, run: str | Path) -> tuple[Drawing, ...]:
    """Return the picture of the blends of a report, if it has any and the run is a folder."""
    blends = [row for row in report.results if row.encoder == BLEND]
    if not blends or not Path(run).is_dir():
        return ()
    trained, *controls, chosen = report.quoted
    content = {
        "shares": [row.settings["blend"] for row in blends],
        "values": [(row.value, row.low, row.high) for row in blends],
        "baselines": {row.encoder: row.value for row in controls if row.encoder != START},
        "best": blends.index(chosen),
        "name": trained.encoder,
        "note": f"{trained.measure} by evaluate {trained.protocol}, 95 % interval",
    }
    return (Drawing(draw_blends, Path(run) / "pictures" / f"blends-{trained.protocol}.png", content),)
