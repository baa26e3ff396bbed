"""Results of encoders by labels, which a comparison keeps in its folder so that it measures nothing twice."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.compare.runner import Job
from patchloom.data.source import Data, Source, Subset
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.evaluate.classification import constant_answers, plan_for, test_classifiers
from patchloom.evaluate.features import (
    ImageFeatures,
    about_encoder,
    count_classes,
    has_labels,
    known_labels,
    only_labelled,
)
from patchloom.evaluate.frozen import FeatureExtractor, encoder_extractor, raw_extractor
from patchloom.evaluate.logistic import Choice, Probe
from patchloom.evaluate.protocols import attentive
from patchloom.evaluate.protocols.attentive import memory_shortfall
from patchloom.evaluate.protocols.fewshot import subsample_training
from patchloom.evaluate.protocols.finetune import candidate
from patchloom.evaluate.protocols.knn import knn_results
from patchloom.evaluate.protocols.linear import fit_probes, linear_results
from patchloom.evaluate.select import train_candidates
from patchloom.evaluate.settings import EvalSettings, Parts, Subject, limit_training_images, parts_of, with_controls
from patchloom.nets.encode import input_channels, patch_size, width
from patchloom.nets.swin import is_hierarchical, refuse_hierarchical
from patchloom.results import store
from patchloom.results.claims import CONSTANT, PIXELS, UNTRAINED
from patchloom.results.classes import headline_row, quoted_measure
from patchloom.results.result import ACCURACY, Result
from patchloom.runs.encoder import load_encoder, load_extra_module
from patchloom.runs.held_out import unchanged_held_out
from patchloom.version import __version__

RECIPE = "small"  # of evaluate finetune, for small data
ResultsByWay = dict[str, dict[str, list[Result]]]  # results by way and encoder, one per seed


class Way(NamedTuple):
    """Way of scoring.

    Attributes:
        name: name in tables.
        protocol: name of the protocol.
        few: number of labels per class, or fraction of the labels; None: all.
        recipe: recipe of finetune.
    """

    name: str
    protocol: Literal["attentive", "linear", "knn", "finetune"]
    few: float | None = None
    recipe: str = ""


def ways_of(shares: Sequence[float], train: Source) -> tuple[list[Way], list[str]]:
    """Return the ways of scoring, by all labels and by few, and remarks on those that are left out."""
    ways, notes = [Way("linear", "linear"), Way("kNN", "knn")], []
    classes, counts = count_classes(train), np.bincount(known_labels(train))
    least = int(counts[counts > 0].min())
    for share in shares:
        if share < 1 and round(share * len(train)) < classes:
            notes.append(f"{share:.3g} of the labels is left out: that is fewer than the {classes} classes")
        elif share >= 1 and share > least:
            notes.append(f"{share:g} labels per class are left out: a class has only {least}")
        else:
            name = f"linear, {100 * share:g} % of labels" if share < 1 else f"linear, {share:g} labels a class"
            ways.append(Way(name, "linear", share))
    return ways, notes


def score_encoder(
    extractor: FeatureExtractor, ways: Sequence[Way], parts: Parts[Source], settings: EvalSettings, seed: int
) -> dict[str, tuple[Result, Result]]:
    """Return the results of one encoder and of the best constant answer by the name of each way.

    The images are read once for all ways.
    """
    train, name = extractor.features_of(parts.train), extractor.name
    few, probes = dict[str, dict[str, Any]](), dict[str, dict[str, tuple[Probe, Choice]]]()
    for way in ways:
        some, few[way.name] = train, {}
        if way.few is not None:
            share, per_class = (way.few, None) if way.few < 1 else (None, int(way.few))
            its, few[way.name] = subsample_training(parts, share, per_class, seed)
            some = subset_features(train, cast(Subset, its.train))
        if way.protocol == "linear":
            probes[way.name] = fit_probes(name, some, some.poolings(), settings)
    # all choices are made: read the test images
    test, found = extractor.features_of(parts.test), {}
    for way in ways:
        if way.protocol == "linear":
            rows = linear_results(name, probes[way.name], test, parts.test, settings, more=few[way.name])
        else:
            rows = knn_results(name, train, test, parts.test, train.poolings(), settings)
        constants = constant_answers(way.protocol, test.labels, parts.test, test.groups)
        constant = headline_row(constants, test.labels)
        constant = replace(constant, settings={**constant.settings, **few[way.name]})
        found[way.name] = next(row for row in rows if row.quoted), constant
    return found


def subset_features(features: ImageFeatures, some: Subset) -> ImageFeatures:
    """Select the features of some images from those of all; images that could not be read are left out of both."""
    wanted = torch.from_numpy(some.indices)
    rows = torch.searchsorted(features.indices, wanted).clamp(max=len(features.indices) - 1)
    there = features.indices[rows] == wanted
    rows = rows[there]
    return replace(
        features,
        tokens={name: values[rows] for name, values in features.tokens.items()},
        labels=features.labels[rows],
        indices=there.nonzero().flatten(),
        unreadable=[some.describe(i) for i in (~there).nonzero().flatten().tolist()],
        groups=None if features.groups is None else features.groups[rows],
    )


# Results in the comparison's folder, by a key of everything that they depend on.


class ResultCache:
    """Results in the folder of a comparison, by the key in their settings."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.by_key = folder, dict[str, list[Result]]()
        damaged: list[str] = []
        for one in store.load(folder, damaged, outcomes=True):
            self.by_key.setdefault(str(one.settings.get("key")), []).append(one)
        if damaged:  # the results of a key may be incomplete: all are measured again
            (folder / store.FILE).unlink()
            self.by_key = {}

    def outcome(self, key: str) -> Result | None:
        """Return the newest result of a key that has the outcomes of images; None if there is none."""
        return next((one for one in reversed(self.by_key.get(key, [])) if one.outcomes is not None), None)

    def add(self, encoder: str, seed: int, test: Source, results: Sequence[tuple[str, Result]]) -> None:
        """Store results of an encoder on the images ``test``, each with its key."""
        about: dict[str, Any] = {"encoder": encoder, "seed": seed, "data": test.name, "noun": test.noun}
        about |= {"fingerprint": test.fingerprint(), "date": datetime.now(UTC).isoformat(), "quoted": True}
        made = [
            replace(one, **about, n=one.n or len(test), settings={**one.settings, "key": key}) for key, one in results
        ]
        store.append(self.folder, made)
        for one in made:
            self.by_key.setdefault(one.settings["key"], []).append(one)


def measurement_key(one: Contender, sources: Sequence[Source], *about: str) -> str:
    """Return a digest of everything that a measurement depends on: weights, images, settings and version."""
    vit, card = load_encoder(one.place)
    encoder = about_encoder(vit, card, "cpu", load_extra_module(one.place, "pooling"))
    states = [f"{len(source)} {source.fingerprint()} {source.stamp()}" for source in sources]
    return _digest(*encoder, one.name, str(one.seed), *about, *states, __version__)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


# Labelled images for scoring, and the encoders that are scored.


TASK, CONTROL, BESIDE = "task", "control", "beside"


class Contender(NamedTuple):
    """Encoder to be scored.

    Attributes:
        name: name of its task or control.
        seed: random seed.
        kind: trained task, control, or further encoder of --beside.
        place: run, file or timm:NAME; for a control, the run whose shape it has.
    """

    name: str
    seed: int
    kind: str
    place: str


# with 600 of CIFAR-10 its queries were not trained yet, with 5,000 they were (docs/how-to/compare.md): a choice between
_ATTENTIVE_LABELS = 1_000


class LabelledData(NamedTuple):
    """Labelled images, ways of scoring on them, and remarks on both."""

    parts: Parts[Source]
    ways: list[Way]
    notes: list[str]


def with_attentive(on: LabelledData, those: Sequence[Contender], settings: EvalSettings) -> LabelledData:
    """Put the attentive probe before the other ways, so that the verdict is by it, if it applies to all encoders.

    Otherwise a remark says why it is left out.
    """
    train = on.parts.train
    for one in those:
        vit, why = load_encoder(one.place)[0], ""
        pixels = input_channels(vit) * math.prod(patch_size(vit))  # raw patches may be wider than tokens
        if len(train) < _ATTENTIVE_LABELS:
            why = f"it scatters too much with fewer than {_ATTENTIVE_LABELS:,} labels"
        elif is_hierarchical(vit):
            why = f"{one.name} is a Swin, which has no such probe"
        elif not (why := memory_shortfall(vit, len(train), train.noun, max(width(vit), pixels))):
            try:
                attentive.small_plan(vit, on.parts, settings)
            except PatchloomError as problem:
                why = str(problem)
        if why:
            said = f"The attentive probe is left out, and the verdict is by the linear probe: {why}."
            return on._replace(notes=[*on.notes, said])
    return on._replace(ways=[Way("attentive", "attentive"), *on.ways])


def labelled_parts(
    opened: Data, labels: str | None, run: Path, settings: EvalSettings, few: Sequence[float], recipe: str = ""
) -> LabelledData | None:
    """Return the labelled images of a comparison, or None if there are none.

    They are those of ``labels``, or the data's own: its test images, or those that all runs held out. With a ``recipe``
    of ``evaluate finetune``, encoders are fine-tuned, too.
    """
    card = load_encoder(run)[1]
    if labels is not None:
        parts = parts_of(labels, settings, card=replace(card, note=""))
    else:
        opened = with_encoder_sound(opened, card.sound, card.name)
        training, held_out = unchanged_held_out(run, opened.train).parts(opened.train)
        own = opened.test if has_labels(opened.test) else None
        test = held_out if own is None else own
        if not has_labels(training) or not has_labels(test) or count_classes(training) < 2:
            return None
        noun = training.noun
        held_out_by_all = f"The test {noun} are those that all runs held out."
        story = held_out_by_all if own is None else f"The data has its own test {noun}."
        parts = Parts(only_labelled(training), only_labelled(test), story)
        parts = limit_training_images(parts, settings, looked=own is None)
    ways, notes = ways_of(few, parts.train)
    ways += [Way(f"fine-tuned, {recipe}", "finetune", recipe=recipe)] * bool(recipe)
    return LabelledData(parts, ways, notes)


def contenders(jobs: Sequence[Job], seeds: int, beside: Sequence[str], draws: int = 1) -> list[Contender]:
    """Return all encoders to score: those of complete tasks, untrained twins, raw pixels, and further ones.

    The last two are not trained here, and are scored by ``draws`` draws of few labels.
    """
    tasks = [Contender(job.task, job.seed, TASK, str(job.folder)) for job in jobs]
    twins = [Contender(UNTRAINED, seed, CONTROL, tasks[0].place) for seed in range(seeds)]
    pixels = [Contender(PIXELS, seed, CONTROL, tasks[0].place) for seed in range(draws)]
    return [*tasks, *twins, *pixels, *(Contender(one, seed, BESIDE, one) for one in beside for seed in range(draws))]


def all_scores(those: Sequence[Contender], on: LabelledData, settings: EvalSettings, out: Path) -> ResultsByWay:
    """Return the results of all encoders and of the best constant answer; those in ``out`` are not measured again."""
    cache, found = ResultCache(out), ResultsByWay({way.name: {} for way in on.ways})
    sources, grouped = (on.parts.train, on.parts.test), ["groups"] * (on.parts.test.groups is not None)
    quoted = quoted_measure(known_labels(on.parts.test))
    measure = [quoted] * (quoted != ACCURACY)  # accuracies that were kept before stay valid
    with StatusMessage("scoring encoders", len(those)) as waiting:
        for one in those:
            measured = measurement_key(one, sources, *grouped, *measure)
            # the constant answer is that to readable images, which only a pass over them tells
            names = (one.name, CONSTANT) if (one.name, one.seed) == (PIXELS, 0) else (one.name,)
            ways = [way for way in on.ways if not (way.protocol == "finetune" and one.name == PIXELS)]
            keys = {(way.name, name): _digest(measured, way.name, name) for way in ways for name in names}
            new = [way for way in ways if any(cache.outcome(keys[way.name, name]) is None for name in names)]
            made = _score(one, new, on, settings) if new else {}
            for place, name in enumerate(names):
                results = [(keys[way, name], pair[place]) for way, pair in made.items()]
                cache.add(name, one.seed, on.parts.test, results)
            for (way, name), key in keys.items():
                if (result := cache.outcome(key)) is not None:
                    found[way].setdefault(name, []).append(result)
            waiting.advance()
    return found


def _score(
    one: Contender, ways: Sequence[Way], on: LabelledData, settings: EvalSettings
) -> dict[str, tuple[Result, ...]]:
    """Return by way the result of an encoder and, of a frozen one, that of the best constant answer.

    The attentive probe of raw pixels is one of raw patches.
    """
    vit, card = load_encoder(one.place)
    subject = Subject(card.name, vit, card, load_extra_module(one.place, "pooling"))
    if one.kind == CONTROL and one.name == UNTRAINED:
        subject = with_controls(subject, None, one.seed).fresh
    its = replace(settings, seed=one.seed, cache=False)
    found: dict[str, tuple[Result, ...]] = {}
    raw = one.kind == CONTROL and one.name == PIXELS
    if frozen := [way for way in ways if way.protocol in ("linear", "knn")]:
        extractor = raw_extractor(subject, its) if raw else encoder_extractor(subject, its)
        found |= score_encoder(extractor, frozen, on.parts, its, one.seed)
    for way in ways:
        if way.protocol == "attentive":
            plan = attentive.small_plan(refuse_hierarchical(subject.vit, "attentive", ""), on.parts, its)
            its_candidate = attentive.candidate(subject._replace(name=one.name), on.parts, raw=raw)
            rows, answered = test_classifiers(
                "attentive", train_candidates([its_candidate], plan, quiet=True), plan, "auto"
            )
            constants = constant_answers("attentive", answered[0].labels, on.parts.test, answered[0].groups)
            found[way.name] = next(row for row in rows if row.quoted), headline_row(constants, answered[0].labels)
        elif way.protocol == "finetune":
            plan = plan_for(way.recipe, {}, subject.vit, on.parts, its, "auto")
            fitted = train_candidates([candidate(subject._replace(name=one.name), "auto", on.parts)], plan)
            rows, _ = test_classifiers("finetune", fitted, plan, "auto")
            found[way.name] = (next(row for row in rows if row.quoted),)
    return found
