"""Scores of encoders by labels: which test images each classifies rightly, kept so that none is measured twice."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.data import Source
from patchloom.evaluate import KNN, LINEAR, EvalSettings, Parts, classes_of
from patchloom.evaluate.frozen import FeatureExtractor, FrozenProtocol, rows_of
from patchloom.evaluate.protocols.fewshot import few
from patchloom.files import make_folder, write_whole


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
    for way in ways:
        its = parts
        if way.few is not None:
            share, per_class = (way.few, None) if way.few < 1 else (None, int(way.few))
            its = few(parts, share, per_class, seed)[0]
        rows, train, _ = rows_of(extractor, [way.protocol], its, settings)
        row = way.protocol.quoted(rows[way.protocol.name])
        assert row.right is not None
        right[way.name], k = row.right, row.settings.get("k")
        about[way.name] = f"k = {k}" if k else f"{len(train.labels):,} labels, {row.pooling}"
    return Scores(right, about)


def kept(path: Path, key: str, make: Callable[[], Scores]) -> Scores:
    """Scores from a file, or made now and written there; those of another ``key`` are made anew.

    Raises:
        PatchloomError: the file cannot be written, or what ``make`` raises.
    """
    found = _read(path, key)
    if found is None:
        found = make()
        bits = {
            name: [len(right), base64.b64encode(np.packbits(right.numpy()).tobytes()).decode()]
            for name, right in found.right.items()
        }
        make_folder(path.parent)
        write_whole(path, json.dumps({"key": key, "right": bits, "about": found.about}, indent=1))
    return found


def _read(path: Path, key: str) -> Scores | None:
    try:
        values = json.loads(path.read_bytes())
        if values["key"] != key:
            return None
        right = {
            name: torch.from_numpy(np.unpackbits(np.frombuffer(base64.b64decode(bits), np.uint8))[:n].astype(bool))
            for name, (n, bits) in values["right"].items()
        }
        return Scores(right, values["about"])
    except (OSError, ValueError, KeyError, TypeError):  # missing, or damaged: it is made anew
        return None
