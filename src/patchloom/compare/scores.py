"""Scores of encoders by labels: which test images each classifies rightly."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.data import Source
from patchloom.data.sources.base import Subset
from patchloom.evaluate import KNN, LINEAR, EvalSettings, ImageFeatures, Parts, classes_of
from patchloom.evaluate.frozen import FeatureExtractor, FrozenProtocol, rows_of
from patchloom.evaluate.protocols.fewshot import few


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
    """Ways of scoring by all labels and by few; and sentences on those that are left out.

    Args:
        shares: of the training labels, below 1; or from 1 on, labels a class.
        train: labelled images.
    """
    ways, notes = [Way("linear", LINEAR), Way("kNN", KNN)], []
    classes, counts = classes_of(train), np.bincount(train.labels[train.labels >= 0])
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


def scored(extractor: FeatureExtractor, ways: Sequence[Way], parts: Parts, settings: EvalSettings, seed: int) -> Scores:
    """One encoder's scores by some ways.

    Args:
        extractor: gives its features.
        ways: of scoring.
        parts: labelled images.
        settings: of reading.
        seed: draws the few labels, the same for all encoders of that seed.

    Raises:
        PatchloomError: images that cannot be read.
    """
    right, about = {}, {}
    once = read_once(extractor, parts.train)
    for way in ways:
        its = parts
        if way.few is not None:
            share, per_class = (way.few, None) if way.few < 1 else (None, int(way.few))
            its = few(parts, share, per_class, seed)[0]
        rows, train, _ = rows_of(once, [way.protocol], its, settings)
        row = way.protocol.quoted(rows[way.protocol.name])
        assert row.right is not None
        right[way.name], k = row.right, row.settings.get("k")
        about[way.name] = f"k = {k}" if k else f"{len(train.labels):,} labels, {row.pooling}"
    return Scores(right, about)


def read_once(extractor: FeatureExtractor, train: Source) -> FeatureExtractor:
    """An extractor that reads every source once, and has the features of a part of ``train`` from all of it."""
    found: dict[int, tuple[Source, ImageFeatures]] = {}  # with the source, or another one might get its place

    def features_of(source: Source) -> ImageFeatures:
        if isinstance(source, Subset) and source.source is train:
            return part_of(features_of(train), source)
        if id(source) not in found:
            found[id(source)] = source, extractor.features_of(source)
        return found[id(source)][1]

    return extractor._replace(features_of=features_of)


def part_of(features: ImageFeatures, some: Subset) -> ImageFeatures:
    """The features of some images, from those of all of them, of which all have labels.

    Args:
        features: of ``some.source``.
        some: the images.
    """
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
