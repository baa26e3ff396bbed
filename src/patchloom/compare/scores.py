"""Scores of encoders by labels: which test images each classifies rightly."""

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
from patchloom.compare.runner import Job
from patchloom.data.source import Data, Source, Subset
from patchloom.data.sources.in_memory import DataLike
from patchloom.evaluate.features import ImageFeatures, count_classes, has_labels, known_labels, only_labelled
from patchloom.evaluate.frozen import FeatureExtractor, FrozenProtocol, evaluate_extractor, extractors
from patchloom.evaluate.protocols.fewshot import subsample_training
from patchloom.evaluate.protocols.knn import KNN
from patchloom.evaluate.protocols.linear import LINEAR
from patchloom.evaluate.settings import EvalSettings, Parts, limit_training_images, parts_of
from patchloom.nets.checkpoints.format import EncoderCard, extra_module_file, weights_file
from patchloom.runs.encoder import load_encoder, load_extra_module, unfinished_run
from patchloom.runs.held_out import unchanged_held_out
from patchloom.system.files import make_folder, write_whole
from patchloom.version import __version__


class Way(NamedTuple):
    """A way of scoring: its name in tables, the protocol, and how few labels it has (None: all)."""

    name: str
    protocol: FrozenProtocol
    few: float | None = None


@dataclass(frozen=True)
class Scores:
    """What one encoder reached.

    Attributes:
        right: [n] by the way's name, whether each test image is classified rightly.
        about: by the way's name, what is to be known of it, such as k, or how many labels there were.
    """

    right: dict[str, Tensor]
    about: dict[str, str]

    def plain(self) -> dict[str, Any]:
        """As values for JSON: what is right in bits, by base64."""
        bits = {
            name: [len(right), base64.b64encode(np.packbits(right.numpy()).tobytes()).decode()]
            for name, right in self.right.items()
        }
        return {"right": bits, "about": self.about}

    @staticmethod
    def of(values: dict[str, Any]) -> Scores:
        """From what `plain` made."""
        right = {
            name: torch.from_numpy(np.unpackbits(np.frombuffer(base64.b64decode(bits), np.uint8))[:n].astype(bool))
            for name, (n, bits) in values["right"].items()
        }
        return Scores(right, values["about"])


def ways_of(shares: Sequence[float], train: Source) -> tuple[list[Way], list[str]]:
    """Ways of scoring by all labels and by few; and sentences on those that are left out."""
    ways, notes = [Way("linear", LINEAR), Way("kNN", KNN)], []
    classes, counts = count_classes(train), np.bincount(known_labels(train))
    least = int(counts[counts > 0].min())
    for share in shares:
        if share < 1 and round(share * len(train)) < classes:
            notes.append(f"{share:.3g} of the labels is left out: it makes fewer than the {classes} classes")
        elif share >= 1 and share > least:
            notes.append(f"{share:g} labels a class are left out: a class has {least}")
        else:
            name = f"linear, {100 * share:g} % of labels" if share < 1 else f"linear, {share:g} labels a class"
            ways.append(Way(name, LINEAR, share))
    return ways, notes


def score_encoder(
    extractor: FeatureExtractor, ways: Sequence[Way], parts: Parts, settings: EvalSettings, seed: int
) -> Scores:
    """One encoder's scores by some ways."""
    right, about = {}, {}
    once = caching_extractor(extractor, parts.train)
    for way in ways:
        its = parts
        if way.few is not None:
            share, per_class = (way.few, None) if way.few < 1 else (None, int(way.few))
            its = subsample_training(parts, share, per_class, seed)[0]
        rows, train, _ = evaluate_extractor(once, [way.protocol], its, settings)
        row = way.protocol.quoted(rows[way.protocol.name])
        assert row.right is not None
        right[way.name], k = row.right, row.settings.get("k")
        about[way.name] = f"k = {k}" if k else f"{len(train.labels):,} labels, {row.pooling}"
    return Scores(right, about)


def caching_extractor(extractor: FeatureExtractor, train: Source) -> FeatureExtractor:
    """An extractor that reads every source once, and has the features of a part of ``train`` from all of it."""
    found: dict[int, tuple[Source, ImageFeatures]] = {}  # with the source, or another one might get its place

    def features_of(source: Source) -> ImageFeatures:
        if isinstance(source, Subset) and source.source is train:
            return subset_features(features_of(train), source)
        if id(source) not in found:
            found[id(source)] = source, extractor.features_of(source)
        return found[id(source)][1]

    return extractor._replace(features_of=features_of)


def subset_features(features: ImageFeatures, some: Subset) -> ImageFeatures:
    """The features of some images, from those of all of them, of which all have labels."""
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


# What was measured of an encoder, kept in the comparison's folder, so that none is measured twice.


T = TypeVar("T")

_AT_ONCE = 2**20  # bytes


def load_or_compute(
    path: Path, key: str, make: Callable[[], T], to_plain: Callable[[T], Any], from_plain: Callable[[Any], T]
) -> T:
    """What a file holds, or what is made now and written there; that of another ``key`` is made anew."""
    try:
        values = json.loads(path.read_bytes())
        if values["key"] == key:
            return from_plain(values["found"])
    except (OSError, ValueError, KeyError, TypeError):  # missing, or damaged: it is made anew
        pass
    found = make()
    make_folder(path.parent)
    write_whole(path, json.dumps({"key": key, "found": to_plain(found)}, indent=1))
    return found


def measurement_key(place: str, about: Sequence[str], sources: Sequence[Source]) -> str:
    """All on which a measurement of an encoder depends: its weights, the images, what is asked, and this version."""
    states = [f"{len(one)} {one.fingerprint()} {one.stamp()}" for one in sources]
    # a folder that was moved is still the same encoder
    return "\n".join([weights_digest(place) or place, *about, *states, __version__])


def weights_digest(place: str) -> str:
    """64 hex digits of the files of an encoder; "" of timm's, whose name says which weights they are."""
    if place.startswith("timm:"):
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
            with open(file, "rb") as opened:
                while part := opened.read(_AT_ONCE):
                    total.update(part)
    return total.hexdigest()


# The labelled part of a comparison: on which images encoders are scored, and what each of them reached.


UNTRAINED, PIXELS = "untrained", "raw pixels"
TASK, CONTROL, BESIDE = "task", "control", "beside"


class Contender(NamedTuple):
    """An encoder that is scored.

    Attributes:
        name: of its task, or of what needs no training here.
        seed: of it.
        kind: a task that was trained, a control that it has to beat, or what stands beside them.
        place: a run, a file, or timm:NAME; of a control the run whose shape it has.
    """

    name: str
    seed: int
    kind: str
    place: str


class LabelledData(NamedTuple):
    """Labelled images, and the ways in which encoders are scored on them; and sentences on both."""

    parts: Parts
    ways: list[Way]
    notes: list[str]


def labelled_parts(
    opened: Data, labels: DataLike | None, run: Path, card: EncoderCard, settings: EvalSettings, few: Sequence[float]
) -> LabelledData | None:
    """The labelled images of a comparison, or None where there are none.

    They are those of ``labels``; else the data's own, with its own test images, or those that all runs held out.
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
        story = "The test images are those that all runs held out." if own is None else "The data brings its own test."
        story = story.replace("images", training.noun)
        parts = limit_training_images(
            Data(only_labelled(training), only_labelled(test)), story, settings, looked=own is None
        )
    ways, notes = ways_of(few, parts.train)
    return LabelledData(parts, ways, notes)


def contenders(jobs: Sequence[Job], seeds: int, beside: Sequence[str]) -> list[Contender]:
    """All encoders that are scored: those of the runs that ended, their untrained twins, raw pixels, and others."""
    ended = [job for job in jobs if job.finished]
    tasks = [Contender(job.task, job.seed, TASK, str(job.folder)) for job in ended]
    twins = [Contender(UNTRAINED, seed, CONTROL, tasks[0].place) for seed in range(seeds)]
    pixels = Contender(PIXELS, 0, CONTROL, tasks[0].place)
    return [*tasks, *twins, pixels, *(Contender(one, 0, BESIDE, one) for one in beside)]


def all_scores(
    those: Sequence[Contender], on: LabelledData, settings: EvalSettings, out: Path
) -> Iterator[tuple[Contender, Scores]]:
    """The scores of each encoder, from ``out/scores`` where they are there already."""
    about = [way.name for way in on.ways]
    for number, one in enumerate(those):
        key = measurement_key(one.place, [one.name, str(one.seed), *about], [on.parts.train, on.parts.test])
        make = partial(_score, one, on, settings)
        yield one, load_or_compute(file_of(one, number, out), key, make, Scores.plain, Scores.of)


def file_of(one: Contender, number: int, out: Path, kind: str = "") -> Path:
    """The file in which scores of a ``kind`` are kept, in a comparison's folder."""
    name = "".join(c if c.isalnum() else "-" for c in one.name)
    return out / "scores" / f"{number:03d}-{name}-seed{one.seed}{kind}.json"


def _score(one: Contender, on: LabelledData, settings: EvalSettings) -> Scores:
    vit, card = load_encoder(one.place)
    head = load_extra_module(one.place, "pooling")
    its = replace(settings, seed=one.seed, cache=False)
    # in the order of `extractors`: the encoder, its untrained twin, raw pixels
    which = {UNTRAINED: 1, PIXELS: 2}.get(one.name, 0) if one.kind == CONTROL else 0
    return score_encoder(extractors(vit, card, its, head)[which], on.ways, on.parts, its, one.seed)
