"""How long what comes after training will take: the scoring of an encoder, and a run's part of the page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from patchloom.compare.labels import Labelled
from patchloom.compare.scores import Way, scored
from patchloom.data import Source
from patchloom.errors import PatchloomError
from patchloom.evaluate import EvalSettings, Parts
from patchloom.evaluate.frozen import extractors
from patchloom.evaluate.label_free import label_free_rows
from patchloom.evaluate.label_free.encoded import LEAST
from patchloom.evaluate.label_free.rows import IMAGES
from patchloom.evaluate.settings import stratified
from patchloom.report.render import render
from patchloom.report.verb import page_of
from patchloom.runs.encoder import load_encoder, load_extra_module

_FEW, _SOME = LEAST, 320  # images on which it is timed: what does not depend on them shows in the difference
_LONG = 6.0  # seconds that few may take for some more to be tried


class After(NamedTuple):
    """Seconds of what comes after training.

    Attributes:
        scoring: of an encoder.
        page: of a run's part.
    """

    scoring: float
    page: float


def timed_after(run: Path, on: Labelled | None, held_out: Source, settings: EvalSettings) -> After:
    """What comes after training, timed on a small share of the images, and scaled by their number.

    Args:
        run: one whose encoder is scored.
        on: labelled images, and the ways of scoring; None where there are none.
        held_out: images for the measures without labels.
        settings: of reading.

    Raises:
        PatchloomError: the encoder cannot be loaded, or images cannot be read.
    """
    if on is not None:
        scoring = scaled(partial(_by_labels, run, on, settings), len(on.parts.train) + len(on.parts.test))
    else:
        n = min(len(held_out), IMAGES)
        scoring = scaled(partial(_without_labels, run, held_out, settings), n) if n >= LEAST else 0.0
    return After(scoring, _seconds(lambda _: render(page_of([run])), 1))


def scaled(work: Callable[[int], object], n: int) -> float:
    """Seconds of ``work`` on n images: what it takes on few, and what each of some more adds.

    What does not depend on the images, such as the steps of a probe, is in both and is not multiplied. Where few
    already take long, some more are twice as many.
    """
    few = min(n, _FEW)
    first = _seconds(work, few)  # with the loading of what is needed
    if few == n:
        return first
    some = min(n, _SOME if first <= _LONG else 2 * few)
    least, more = _seconds(work, few), _seconds(work, some)
    return more + max(0.0, more - least) * (n - some) / (some - few)


def _seconds(work: Callable[[int], object], count: int) -> float:
    begun = time.perf_counter()
    work(count)
    return time.perf_counter() - begun


def _by_labels(run: Path, on: Labelled, settings: EvalSettings, count: int) -> None:
    vit, card = load_encoder(run)
    its = replace(settings, cache=False)
    share = count / (len(on.parts.train) + len(on.parts.test))
    train, test = (_some(one, share) for one in (on.parts.train, on.parts.test))
    # few labels cost what their share does, which may be too few to be drawn from this part
    ways: Sequence[Way] = [way for way in on.ways if way.few is None]
    scored(extractors(vit, card, its, load_extra_module(run, "pooling"))[0], ways, Parts(train, test, ""), its, 0)


def _some(source: Source, share: float) -> Source:
    count = max(2, round(share * len(source)))
    return source if count >= len(source) else stratified(source, count, 0)


def _without_labels(run: Path, held_out: Source, settings: EvalSettings, count: int) -> None:
    vit, card = load_encoder(run)
    with suppress(PatchloomError):  # too few can be read, or its few steps diverged: what came of it is said later
        label_free_rows("pilot", vit, card, held_out, replace(settings, seed=0), images=count)
