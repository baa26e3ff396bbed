"""Sensitivity to patch order: accuracy with shuffled patches, and without position embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from patchloom.data.source import Source, digest
from patchloom.data.sources.in_memory import DataLike
from patchloom.evaluate.answers import constant_answers, results_of_answers
from patchloom.evaluate.features import ImageFeatures
from patchloom.evaluate.frozen import (
    INSTEAD,
    circumstances,
    encoder_extractor,
    extractors,
    plan_frozen,
)
from patchloom.evaluate.logistic import linear_probe
from patchloom.evaluate.protocols.knn import TEMPERATURE, knn_answers
from patchloom.evaluate.settings import EvalSettings, parts_of
from patchloom.evaluate.subjects import open_subjects
from patchloom.nets.encode import has_positions, has_rotations, input_size, patch_positions, patch_size
from patchloom.nets.heads import check_pooling, tokens_of
from patchloom.nets.swin import Encoder, refuse_hierarchical
from patchloom.options.protocols import Order
from patchloom.patches.tokens import grid_of, patchify, unpatchify
from patchloom.results.claims import START
from patchloom.results.classes import called, explain_measure, headline_row
from patchloom.results.evaluation import Evaluation
from patchloom.results.result import ACCURACY, Result
from patchloom.sizes import Sides, compact, in_pixels, to_pair

_LINEAR_PROBE = "linear"
AS_THEY_ARE, SHUFFLED, ZEROED = "as they are", "patches shuffled", "positions zeroed"


def order(run: str | Path, data: DataLike, settings: EvalSettings, options: Order) -> Evaluation:
    """Test probes of normal images on shuffled patches, and with position embeddings set to zero.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: unknown encoder or data, data without labels, or a pooling that the encoder lacks.
    """
    subjects = open_subjects(run, settings)
    vit, pooling, k = subjects.ours.vit, options.pooling, options.k
    refuse_hierarchical(vit, "order", INSTEAD)
    check_pooling(pooling, tokens_of(vit, None))
    parts = parts_of(data, settings, card=subjects.ours.card, run=run)
    plan_frozen("order", subjects, parts, settings)

    # ---- two probes of each encoder on each kind of test images
    shuffled = ShuffledPatches(parts.test, input_size(vit), patch_size(vit), settings.seed)
    rows: list[Result] = []
    beside: list[Result] = []
    cached: list[str] = []
    for one in extractors(subjects, settings):
        train = one.features_of(parts.train)
        pooled = "pixels" if one.subject is None else pooling
        probes = _probes(train, pooled, k, settings)
        # all choices are made: read the test images
        tests = {AS_THEY_ARE: one.features_of(parts.test), SHUFFLED: one.features_of(shuffled)}
        if one.subject is not None and has_positions(one.subject.vit):
            blind = one.subject._replace(vit=without_positions(one.subject.vit))
            tests[ZEROED] = encoder_extractor(blind, settings).features_of(parts.test)
        for probe, answers in probes.items():
            for given, test in tests.items():
                row_settings = {"pooling": pooled, "probe": probe, "test_images": given}
                its = one.name, "order", row_settings, parts.test, settings, test.labels, answers(test), None
                made = results_of_answers(*its, test.groups, quoted=False)
                rows.append(headline_row(made, test.labels))
                beside += [row for row in made if rows[-1].measure != ACCURACY == row.measure]
        cached += [one.name] * any(features.cached for features in (train, *tests.values()))

    # ---- the report
    test = tests[AS_THEY_ARE]
    n_test = len(test.labels)
    constant = constant_answers("order", test.labels, parts.test, test.groups)
    quoted = tuple(row for row in rows if row.settings["probe"] == _LINEAR_PROBE)
    report = Evaluation.of_test(
        parts.test,
        settings.seed,
        n_test,
        results=[*rows, headline_row(constant, test.labels), *beside],
        method=_sentences(vit, len(train.labels), n_test, k, train.noun)
        + f"{explain_measure(test.labels.numpy(), parts.test.classes, test.noun)} "
        + circumstances(subjects, parts, train, test, cached),
        headline=_headline(quoted, f"{n_test:,} test {train.noun}"),
        quoted=quoted,
        across="test_images",
    )
    same = [i for i, row in enumerate(quoted) if (row.encoder, row.settings["test_images"]) == (START, AS_THEY_ARE)]
    return report.with_differences(False, *same) if same else report


class ShuffledPatches(Source):
    """Centre crops of a source's images, or pictures of its recordings, with patches in random order.

    An image's order depends only on the seed and its index.
    """

    def __init__(self, source: Source, size: Sides, p: Sides, seed: int) -> None:
        self.source, self.size, self.p, self.seed = source, to_pair(size), p, seed
        self.crop = source.modality.centre(self.size, name=source.name)
        self.name, self.classes, self.labels = source.name, source.classes, source.labels

    def __len__(self) -> int:
        return len(self.source)

    def read(self, i: int) -> Tensor:
        (image,) = self.crop(self.source.read(i))
        image = self.source.modality.pictures(image[None])[0]
        patches = patchify(image[None], self.p)
        places = np.random.default_rng((self.seed, i)).permutation(patches.shape[1])
        return unpatchify(patches[:, torch.from_numpy(places)], self.p, grid_of(image[None], self.p))[0]

    def describe(self, i: int) -> str:
        return self.source.describe(i)

    def fingerprint(self) -> str:
        return self._digest(self.source.fingerprint())

    def stamp(self) -> str | None:
        stamp = self.source.stamp()
        return None if stamp is None else self._digest(stamp)

    def _digest(self, images: str) -> str:
        return digest(["patches shuffled", str(self.size), in_pixels(compact(self.p)), str(self.seed), images])


def without_positions(vit: Encoder) -> Encoder:
    """Return a copy of an encoder with zero position embeddings for patches, and without rotations.

    Class and register tokens keep their embeddings.
    """
    copy = deepcopy(vit)
    if has_rotations(copy):
        copy.register_module("rope", None)
    with torch.no_grad():
        table = patch_positions(copy)
        if table is not None:
            table.zero_()
    return copy


def _probes(
    train: ImageFeatures, pooled: str, k: int, settings: EvalSettings
) -> dict[str, Callable[[ImageFeatures], Tensor]]:
    """Return probes fitted to training features, by name: functions from test features to predicted classes."""
    features, labels, device = train.pooled(pooled), train.labels, settings.torch_device
    probe, _ = linear_probe(features, labels, seed=settings.seed, device=device, groups=train.groups)

    def nearest(test: ImageFeatures) -> Tensor:
        return knn_answers(features, labels, test.pooled(pooled), (k,), device=device)[k][0]

    return {_LINEAR_PROBE: lambda test: probe.predict(test.pooled(pooled)), f"kNN, k = {k}": nearest}


def _sentences(vit: Encoder, n: int, n_test: int, k: int, noun: str) -> str:
    zeroed = "and with the position embeddings of the patches set to zero. "
    if has_rotations(vit):
        zeroed = "and without positions: no patch is rotated, and embeddings, if there are any, are zero. "
    if not has_positions(vit):
        zeroed = "while the encoder has no position embeddings to remove. "
    return (
        f"Order: a linear probe (its L2 strength chosen on a stratified fifth) and the {k} nearest neighbours (votes "
        f"weighted by exp(similarity / {TEMPERATURE})) learn from the frozen features of {n:,} normal training {noun}. "
        f"They are tested on {n_test:,} test {noun} as they are, with their patches in a random order for each, "
        f"{zeroed}"
    )


def _headline(quoted: Sequence[Result], tested: str) -> str:
    said: dict[str, list[str]] = {}
    for row in quoted:
        number = row.number() if said else f"{called(row)}{row.text()}"
        said.setdefault(row.encoder, []).append(f"{number} {row.settings['test_images']}")
    each = "; ".join(f"{name} {', '.join(numbers)}" for name, numbers in said.items())
    return f"Order (linear probe, {quoted[0].pooling}): {each}; on {tested}."
