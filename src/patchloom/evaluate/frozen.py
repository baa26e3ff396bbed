"""Frozen features of an encoder and its controls, and the report of a probe on them.

The controls are its untrained twin, raw pixels and, for an adapted encoder, the weights that it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from patchloom.data.source import Data, Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.classification import class_report
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
from patchloom.evaluate.settings import EvalSettings, Parts, Subject, Subjects, open_subjects, parts_of
from patchloom.look.charts import Line, Panel, draw_lines
from patchloom.look.sheet import Caption
from patchloom.nets.encode import input_size
from patchloom.nets.finetune import without_last_norm
from patchloom.nets.heads import check_pooling, tokens_of
from patchloom.nets.swin import refuse_hierarchical
from patchloom.options.evaluate import Pooling
from patchloom.results.claims import BLEND, START
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


@dataclass(frozen=True)
class FrozenStudy:
    """Encoder, controls and images of an evaluation of frozen features.

    Attributes:
        protocol: name of the protocol.
        subjects: the encoder and its controls.
        parts: the images.
        settings: common settings of all protocols.
        options: options of the features.
        cached: names of the subjects whose features came from the cache, in order.
    """

    protocol: str
    subjects: Subjects
    parts: Parts[Source]
    settings: EvalSettings
    options: FeatureOptions = USUAL_FEATURES
    cached: dict[str, None] = field(default_factory=dict)

    def each(self, *, layers: bool = False, shares: Sequence[float] = ()) -> Iterator[FeatureExtractor]:
        """Yield the extractors of an encoder, its start if there is one, its untrained twin and raw pixels, then of
        blends; a dry run ends here.

        A blend is made when its turn comes, so that only one is in memory.
        """
        (ours, start, fresh), parts = self.subjects, self.parts
        controls = [ours.card.modality.raw, *(one.name for one in self.subjects.controls)]
        self.settings.end_if_dry(
            parts.test,
            f"{self.protocol} of {ours.card.name} would encode {len(parts.train):,} training and {len(parts.test):,} "
            f"test {parts.test.noun}, and the same by its controls: {listing(controls, 'and')}.",
            parts.story,
        )

        def extractor(subject: Subject, share: float | None = None) -> FeatureExtractor:
            found = encoder_extractor(subject, self.settings, layers=layers, options=self.options)
            return self.noting(found._replace(share=share))

        yield extractor(ours, 1.0 if shares else None)
        if start is not None:
            yield extractor(start, 0.0 if shares else None)
        yield extractor(fresh)
        yield self.noting(raw_extractor(ours, self.settings, self.options))
        for share in sorted({*shares} - {0, 1}):
            assert start is not None  # with shares
            vit, card = blend((start.vit, start.card), (ours.vit, ours.card), share)
            yield extractor(Subject(f"{BLEND} {share:g}", vit, card), share)

    def noting(self, one: FeatureExtractor) -> FeatureExtractor:
        """Return an extractor that notes in ``cached`` whether its features came from the cache."""

        def features_of(source: Source) -> ImageFeatures:
            found = one.features_of(source)
            self.cached.update(dict.fromkeys([one.name] * found.cached))
            return found

        return one._replace(features_of=features_of)

    def around(self, train: ImageFeatures, test: ImageFeatures, instance: bool = False) -> str:
        """Return sentences on the origin of images and features and on the controls."""
        modality, size = self.parts.train.modality, input_size(self.subjects.ours.vit)
        h, w = raw_size(modality, size)
        said = [self.parts.story, f"{modality.raw.capitalize()} are {modality.pictured} at {h}x{w}."]
        said += self.options.sentences(size)
        if instance:
            said.append("Pooling instance uses the head saved with the encoder; untrained has an untrained head.")
        if self.cached:
            said.append(f"Cached features were used for {', '.join(self.cached)}: --cache false computes them again.")
        return " ".join([*said, *note_unreadable(train.unreadable + test.unreadable, self.parts.train.noun)])


def open_frozen(
    protocol: str,
    run: str | Path,
    data: DataLike,
    settings: EvalSettings,
    options: FeatureOptions = USUAL_FEATURES,
    *,
    pooling: str = "all",
    head: bool = True,
    plain: bool = False,
    prepare: Callable[[Data], Data] = lambda opened: opened,
) -> FrozenStudy:
    """Load the encoder of a run, and open the images.

    The start has no instance head, so pooling ``instance`` leaves it out; without ``head`` there is none. ``plain``
    refuses a Swin, and ``prepare`` is as for `parts_of`.
    """
    subjects = open_subjects(run, settings, head=head)
    ours = subjects.ours
    if plain:
        refuse_hierarchical(ours.vit, protocol, INSTEAD)
    if pooling != "all":
        check_pooling(pooling, tokens_of(ours.vit, ours.head))
    if pooling == "instance":
        subjects = subjects._replace(start=None)
    parts = parts_of(data, settings, card=ours.card, run=run, prepare=prepare)
    options.check(parts.test)
    return FrozenStudy(protocol, subjects, parts, settings, options)


def encoder_extractor(
    subject: Subject,
    settings: EvalSettings,
    *,
    layers: bool = False,
    options: FeatureOptions = USUAL_FEATURES,
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
    return FeatureExtractor(subject.name, features_of, subject)


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


# The report of a probe.


def frozen_report(
    title: str,
    said: str,
    fitted: str,
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
    across: str = "",
) -> Evaluation:
    """Return the report of a probe.

    Args:
        title: start of the headline.
        said: description of the method.
        fitted: name of the training images in the headline, before their number.
        rows: results of the encoder, then of its controls; one of each is marked as quoted.
        train, test: features of both parts, of any of the subjects.
        around: `FrozenStudy.around`.
        against: the controls in the headline; by default, the quoted number of each.
        trained: whether another draw of labels or a training would give the encoder other results.
        blends: `blend_row` of each share; the best on held-out training images is quoted.
        across: setting whose values are the columns of the table.
    """
    noun, chosen = parts.test.noun, list[Result]()
    against = against or listing([as_control(row) for row in rows if row.quoted][1:], "and")
    origin = f"; test: {parts.origin}" if parts.origin else ""
    ending = f" {fitted}: {len(train.labels):,} training {parts.train.noun}{origin}."
    curve = sorted(blends, key=lambda row: row.settings["blend"])
    if curve:
        chosen = [max(curve, key=lambda row: row.settings[_HELD_OUT])]  # ties go to the one nearest to the start
        share, held_out = chosen[0].settings["blend"], chosen[0].settings[_HELD_OUT]
        gain = compare_results(chosen, [replace(curve[0], encoder=START)], False)
        ending += (
            f" Of {len(curve)} blends with the start, {share:g} is the best on held-out training {noun} "
            f"({100 * held_out:.1f} %): {chosen[0].text()}, {gain.text()} against the start."
        )
        around += (
            " Blends are (1 - blend) times the start and blend times the encoder, weight by weight (WiSE-FT). The "
            f"quoted one was chosen on a stratified {100 * CHOICE_VALIDATION_SHARE:.0f} % of the training {noun}; a "
            "tie goes to the one nearest to the start."
        )
    controls: Any = {"against": against, "ending": ending, "curve": curve, "quoted": chosen, "across": across}
    return class_report(title, [said], rows, parts, settings, test, after=[around], **controls).with_differences(
        trained
    )


# Blends of a run's encoder with its start (WiSE-FT).


def blend_shares(
    given: float | Sequence[float] | None, run: str | Path, pooling: str, settings: EvalSettings
) -> list[float]:
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
    blends = [row for row in report.results if row.encoder == BLEND]
    if not blends or not Path(run).is_dir():
        return ()
    trained, *controls, chosen = report.quoted
    shares = [row.settings["blend"] for row in blends]
    panel = Panel(
        f"Blends of {trained.encoder}",
        f"{trained.measure} by evaluate {trained.protocol}, 95 % interval",
        [Line("this encoder", np.array(shares), *np.array([(row.value, row.low, row.high) for row in blends]).T)],
        percent=True,
        baselines={row.encoder: row.value for row in controls if row.encoder != START},
        ticks={share: f"{share:g}" for share in shares},
        chosen=blends.index(chosen),
        axis="share of the adapted weights; 0: the start",
    )
    caption = Caption(
        "Accuracy of blends with the start",
        "Accuracy of weighted means of the adapted weights and those of the start. A maximum between both ends means "
        "that a blend is better than either.",
        202,
    )
    out = Path(run) / "pictures" / f"blends-{trained.protocol}.png"
    return (Drawing(draw_lines, out, {"panels": [panel], "caption": caption}),)
