"""Results of a classifier's answers to test images: the one place where classification protocols make theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from patchloom.data.source import Source
from patchloom.data.splits import group_names
from patchloom.evaluate.settings import EvalSettings
from patchloom.results.claims import CONSTANT
from patchloom.results.classes import Answers, class_results
from patchloom.results.result import Result


def results_of_answers(
    encoder: str,
    protocol: str,
    about: Mapping[str, Any],
    test: Source,
    settings: EvalSettings,
    labels: Tensor,
    answers: Tensor,
    scores: Tensor | None = None,
    groups: Tensor | None = None,
    *,
    quoted: bool = True,
) -> list[Result]:
    """Return all results of the answers of one encoder to the readable images of ``test``.

    Args:
        encoder: name of the encoder or control.
        protocol: name of the protocol.
        about: settings of the results.
        test: test images, for the names of classes and groups.
        settings: common settings; ``measures`` tells how many results there are.
        labels: [n] true classes.
        answers: [n] predicted classes.
        scores: [n c] scores of the classes; None: without AUROC and average precision.
        groups: [n] groups of the images.
        quoted: whether the headline quotes this setting.
    """
    found = Answers(
        labels.numpy(),
        answers.cpu().numpy(),
        None if scores is None else scores.cpu().numpy(),
        None if groups is None else groups.numpy(),
        test.classes,
        _group_names(test, settings) if quoted and settings.all_measures else (),
    )
    return class_results(encoder, protocol, about, found, quoted=quoted, every=settings.all_measures)


def constant_answers(protocol: str, labels: Tensor, test: Source, groups: Tensor | None) -> list[Result]:
    """Return accuracy and balanced accuracy of the best constant answer to the images of ``test`` with ``labels`` [n].

    It is the most frequent class of the test images, not of the training images: what a classifier has to beat to show
    anything, whatever the two parts hold.
    """
    best = int(labels.bincount().argmax())
    answers = np.full(len(labels), best)
    found = Answers(labels.numpy(), answers, None, None if groups is None else groups.numpy(), test.classes)
    return class_results(CONSTANT, protocol, {"answer": found.name(best)}, found, quoted=False)


def _group_names(test: Source, settings: EvalSettings) -> list[str]:
    """Return the names of the groups of ``--group`` by their number; [] if they have none."""
    if test.groups is None or settings.group is None:
        return []
    names = [str(number) for number in range(int(test.groups.max()) + 1)]
    for number, name in zip(test.groups.tolist(), group_names(test, settings.group), strict=True):
        names[number] = name or names[number]
    return names
