"""Scores of encoders by labels: correctness of the prediction for each test image."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.compare.finetuned import finetuned
from patchloom.compare.runner import Job
from patchloom.data.source import Data, Source, Subset
from patchloom.data.sources.in_memory import DataLike
from patchloom.evaluate.features import ImageFeatures, count_classes, has_labels, known_labels, only_labelled
from patchloom.evaluate.frozen import FeatureExtractor, FrozenProtocol, constant_answer, evaluate_extractor, extractors
from patchloom.evaluate.protocols.fewshot import subsample_training
from patchloom.evaluate.protocols.knn import KNN
from patchloom.evaluate.protocols.linear import LINEAR
from patchloom.evaluate.settings import EvalSettings, Parts, limit_training_images, parts_of
from patchloom.nets.checkpoints.format import EncoderCard, extra_module_file, is_on_hub, weights_file
from patchloom.runs.encoder import load_encoder, load_extra_module, unfinished_run
from patchloom.runs.held_out import unchanged_held_out
from patchloom.system.files import make_folder, open_regular, read_bytes, write_whole
from patchloom.version import __version__


class Way(NamedTuple):
    """Way of scoring: name in tables, protocol, and number or fraction of labels (None: all).

    With a ``recipe``, encoders are fine-tuned instead (`patchloom.compare.finetuned`).
    """

    name: str
    protocol: FrozenProtocol
    few: float | None = None
    recipe: str = ""


@dataclass(frozen=True)
class Scores:
    """Scores of one encoder.

    Attributes:
        right: [n] by name of the way: whether each test image is classified correctly.
        about: by name of the way: details such as k or the number of labels.
        constant: [n] whether the best constant answer is right.
        answer: name of its class.
        groups: [n] groups of the test images; None: no groups.
    """

    right: dict[str, Tensor]
    about: dict[str, str]
    constant: Tensor
    answer: str
    groups: Tensor | None = None

    def plain(self) -> dict[str, Any]:
        """Return values for JSON; correctness is stored as bits in base64."""
        return {
            "right": {name: _bits(right) for name, right in self.right.items()},
            "about": self.about,
            "constant": _bits(self.constant),
            "answer": self.answer,
            "groups": None if self.groups is None else self.groups.tolist(),
        }

    @staticmethod
    def of(values: dict[str, Any]) -> Scores:
        """Read the values of `plain`."""
        right = {name: _from_bits(*bits) for name, bits in values["right"].items()}
        groups = values["groups"]
        groups = None if groups is None else torch.tensor(groups, dtype=torch.int64)
        return Scores(right, values["about"], _from_bits(*values["constant"]), str(values["answer"]), groups)


def _bits(right: Tensor) -> list[int | str]:
    return [len(right), base64.b64encode(np.packbits(right.numpy()).tobytes()).decode()]


def _from_bits(n: int, bits: str) -> Tensor:
    return torch.from_numpy(np.unpackbits(np.frombuffer(base64.b64decode(bits), np.uint8))[:n].astype(bool))


def ways_of(shares: Sequence[float], train: Source) -> tuple[list[Way], list[str]]:
    """Return the ways of scoring, by all labels and by few, and remarks on those that are left out."""
    ways, notes = [Way("linear", LINEAR), Way("kNN", KNN)], []
    classes, counts = count_classes(train), np.bincount(known_labels(train))
    least = int(counts[counts > 0].min())
    for share in shares:
        if share < 1 and round(share * len(train)) < classes:
            notes.append(f"{share:.3g} of the labels is left out: that is fewer than the {classes} classes")
        elif share >= 1 and share > least:
            notes.append(f"{share:g} labels per class are left out: a class has only {least}")
        else:
            name = f"linear, {100 * share:g} % of labels" if share < 1 else f"linear, {share:g} labels a class"
            ways.append(Way(name, LINEAR, share))
    return ways, notes


def score_encoder(
    extractor: FeatureExtractor, ways: Sequence[Way], parts: Parts, settings: EvalSettings, seed: int
) -> Scores:
    """Score one encoder in several ways."""
    right, about = {}, {}
    once = caching_extractor(extractor, parts.train)
    for way in ways:
        if way.recipe:
            continue
        its = parts
        if way.few is not None:
            share, per_class = (way.few, None) if way.few < 1 else (None, int(way.few))
            its = subsample_training(parts, share, per_class, seed)[0]
        rows, train, test = evaluate_extractor(once, [way.protocol], its, settings)
        row = way.protocol.quoted(rows[way.protocol.name])
        assert row.outcomes is not None
        right[way.name], k = torch.from_numpy(row.outcomes.values), row.settings.get("k")
        about[way.name] = f"k = {k}" if k else f"{len(train.labels):,} labels, {row.pooling}"
    constant = constant_answer(ways[0].protocol.name, test.labels, parts.test, test.groups)
    assert constant.outcomes is not None
    always = torch.from_numpy(constant.outcomes.values)
    return Scores(right, about, always, constant.settings["answer"], test.groups)


def caching_extractor(extractor: FeatureExtractor, train: Source) -> FeatureExtractor:
    """Return an extractor that reads every source once and selects features of a subset of ``train``."""
    found: dict[int, tuple[Source, ImageFeatures]] = {}  # keeps the source, whose id could be reused otherwise

    def features_of(source: Source) -> ImageFeatures:
        if isinstance(source, Subset) and source.source is train:
            return subset_features(features_of(train), source)
        if id(source) not in found:
            found[id(source)] = source, extractor.features_of(source)
        return found[id(source)][1]

    return extractor._replace(features_of=features_of)


def subset_features(features: ImageFeatures, some: Subset) -> ImageFeatures:
    """Select the features of some images from those of all, which all have labels."""
    rows = {index: row for row, index in enumerate(features.indices.tolist())}
    there = [(place, rows[index]) for place, index in enumerate(some.indices.tolist()) if index in rows]
    places, chosen = (torch.tensor(one, dtype=torch.int64) for one in zip(*there, strict=True))
    lost = [some.describe(place) for place, index in enumerate(some.indices.tolist()) if index not in rows]
    return ImageFeatures(
        {name: values[chosen] for name, values in features.tokens.items()},
        features.labels[chosen],
        places,
        lost,
        features.cached,
        None if features.groups is None else features.groups[chosen],
        features.noun,
    )


# Cache of measurements in the comparison's folder, so that none is repeated.


T = TypeVar("T")

_AT_ONCE = 2**20  # bytes


def load_or_compute(
    path: Path, key: str, make: Callable[[], T], to_plain: Callable[[T], Any], from_plain: Callable[[Any], T]
) -> T:
    """Return the content of a cache file, or compute and store it if the file is missing or has another ``key``."""
    try:
        values = json.loads(read_bytes(path))
        if values["key"] == key:
            return from_plain(values["found"])
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: it is computed again
        pass
    found = make()
    make_folder(path.parent)
    write_whole(path, json.dumps({"key": key, "found": to_plain(found)}, indent=1))
    return found


def measurement_key(place: str, about: Sequence[str], sources: Sequence[Source]) -> str:
    """Return a key of everything that a measurement depends on: weights, images, settings and version."""
    states = [f"{len(one)} {one.fingerprint()} {one.stamp()}" for one in sources]
    # a moved folder is still the same encoder
    return "\n".join([weights_digest(place) or place, *about, *states, __version__])


def weights_digest(place: str) -> str:
    """Return 64 hex digits of an encoder's files; "" for timm, where the name identifies the weights."""
    if place.startswith("timm:") and not is_on_hub(place):
        return ""
    run = unfinished_run(place)
    if run is not None:
        files = [run.checkpoints.last, run.checkpoints.before]
    else:
        head = extra_module_file(place, "pooling")
        files = [weights_file(place), *([] if head is None else [head])]
    total = hashlib.sha256()
    for file in files:
        if file.exists():
            total.update(f"\0{file.name}\0".encode())
            with open_regular(file, follow=True) as opened:
                while part := opened.read(_AT_ONCE):
                    total.update(part)
    return total.hexdigest()


# Labelled images for scoring, and the encoders that are scored.


UNTRAINED, PIXELS = "untrained", "raw pixels"
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


class LabelledData(NamedTuple):
    """Labelled images, ways of scoring on them, and remarks on both."""

    parts: Parts
    ways: list[Way]
    notes: list[str]


def labelled_parts(
    opened: Data, labels: DataLike | None, run: Path, card: EncoderCard, settings: EvalSettings, few: Sequence[float]
) -> LabelledData | None:
    """Return the labelled images of a comparison, or None if there are none.

    They are those of ``labels``, or the data's own: its test images, or those that all runs held out.
    """
    if labels is not None:
        parts = parts_of(labels, settings, card=replace(card, note=""))
    else:
        opened = with_encoder_sound(opened, card.sound, card.name)
        training, held_out = unchanged_held_out(run, opened.train).parts(opened.train)
        own = opened.test if has_labels(opened.test) else None
        test = held_out if own is None else own
        if not has_labels(training) or not has_labels(test) or count_classes(training) < 2:
            return None
        story = (
            "The test images are those that all runs held out." if own is None else "The data has its own test images."
        )
        story = story.replace("images", training.noun)
        parts = limit_training_images(
            Data(only_labelled(training), only_labelled(test)), story, settings, looked=own is None
        )
    ways, notes = ways_of(few, parts.train)
    return LabelledData(parts, ways, notes)


def contenders(jobs: Sequence[Job], seeds: int, beside: Sequence[str], draws: int = 1) -> list[Contender]:
    """Return all encoders to score: those of complete tasks, untrained twins, raw pixels, and further ones.

    The last two are not trained here, and are scored by ``draws`` draws of few labels.
    """
    ended = [job for job in jobs if job.finished]
    tasks = [Contender(job.task, job.seed, TASK, str(job.folder)) for job in ended]
    twins = [Contender(UNTRAINED, seed, CONTROL, tasks[0].place) for seed in range(seeds)]
    pixels = [Contender(PIXELS, seed, CONTROL, tasks[0].place) for seed in range(draws)]
    return [*tasks, *twins, *pixels, *(Contender(one, seed, BESIDE, one) for one in beside for seed in range(draws))]


def all_scores(
    those: Sequence[Contender], on: LabelledData, settings: EvalSettings, out: Path
) -> Iterator[tuple[Contender, Scores]]:
    """Yield the scores of each encoder, from ``out/scores`` if they are stored there."""
    about = [*(way.name for way in on.ways), *["groups"] * (on.parts.test.groups is not None)]
    for number, one in enumerate(those):
        key = measurement_key(one.place, [one.name, str(one.seed), *about], [on.parts.train, on.parts.test])
        make = partial(_score, one, on, settings)
        yield one, load_or_compute(file_of(one, number, out), key, make, Scores.plain, Scores.of)


def file_of(one: Contender, number: int, out: Path, kind: str = "") -> Path:
    """Return the file for scores of a ``kind`` in a comparison's folder."""
    name = "".join(c if c.isalnum() else "-" for c in one.name)
    return out / "scores" / f"{number:03d}-{name}-seed{one.seed}{kind}.json"


def _score(one: Contender, on: LabelledData, settings: EvalSettings) -> Scores:
    vit, card = load_encoder(one.place)
    head = load_extra_module(one.place, "pooling")
    its = replace(settings, seed=one.seed, cache=False)
    # in the order of `extractors`: the encoder, its untrained twin, raw pixels
    which = {UNTRAINED: 1, PIXELS: 2}.get(one.name, 0) if one.kind == CONTROL else 0
    found = score_encoder(extractors(vit, card, its, head)[which], on.ways, on.parts, its, one.seed)
    for way in on.ways:
        if way.recipe and one.name != PIXELS:
            result = finetuned(one.place, one.name == UNTRAINED, one.seed, on.parts, its, way.recipe)
            assert result.outcomes is not None
            found.right[way.name] = torch.from_numpy(result.outcomes.values)
            found.about[way.name] = f"{len(on.parts.train):,} labels, {result.pooling}"
    return found
