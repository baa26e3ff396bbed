"""The labelled part of a comparison: on which images encoders are scored, and what each of them reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from patchloom.compare.kept import kept, key_of
from patchloom.compare.runner import Job
from patchloom.compare.scores import Scores, Way, scored, ways_of
from patchloom.data import Data, DataLike
from patchloom.data.sound.hearing import heard_by
from patchloom.evaluate import EvalSettings, Parts, classes_of, has_labels, labelled, parts_of
from patchloom.evaluate.frozen import extractors
from patchloom.evaluate.settings import shortened
from patchloom.nets.weights import EncoderCard
from patchloom.runs.encoder import load_encoder, load_extra_module
from patchloom.runs.held_out import unchanged_held_out

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


class Labelled(NamedTuple):
    """Labelled images, and the ways in which encoders are scored on them; and sentences on both."""

    parts: Parts
    ways: list[Way]
    notes: list[str]


def labelled_parts(
    opened: Data, labels: DataLike | None, run: Path, card: EncoderCard, settings: EvalSettings, few: Sequence[float]
) -> Labelled | None:
    """The labelled images of a comparison, or None where there are none.

    They are those of ``labels``; else the data's own, with its own test images, or those that all runs held out.

    Args:
        opened: what was pre-trained on.
        labels: other, labelled images.
        run: one of the runs, which held out the same images as all others.
        card: of its encoder.
        settings: of reading; ``max_train`` limits the training images.
        few: as in `patchloom.compare.verb.compare`.

    Raises:
        PatchloomError: no such data, or no labels in it; or the images have changed since the run.
    """
    if labels is not None:
        parts = parts_of(labels, settings, card=replace(card, note=""))
    else:
        opened = heard_by(opened, card.sound, card.name)
        training, held_out = unchanged_held_out(run, opened.train).parts(opened.train)
        own = opened.test if has_labels(opened.test) else None
        test = held_out if own is None else own
        if not has_labels(training) or not has_labels(test) or classes_of(training) < 2:
            return None
        story = "The test images are those that all runs held out." if own is None else "The data brings its own test."
        story = story.replace("images", training.noun)
        parts = shortened(Data(labelled(training), labelled(test)), story, settings, looked=own is None)
    ways, notes = ways_of(few, parts.train)
    return Labelled(parts, ways, notes)


def contenders(jobs: Sequence[Job], seeds: int, beside: Sequence[str]) -> list[Contender]:
    """All encoders that are scored: those of the runs that ended, their untrained twins, raw pixels, and others."""
    ended = [job for job in jobs if job.finished]
    tasks = [Contender(job.task, job.seed, TASK, str(job.folder)) for job in ended]
    twins = [Contender(UNTRAINED, seed, CONTROL, tasks[0].place) for seed in range(seeds)]
    pixels = Contender(PIXELS, 0, CONTROL, tasks[0].place)
    return [*tasks, *twins, pixels, *(Contender(one, 0, BESIDE, one) for one in beside)]


def all_scores(
    those: Sequence[Contender], on: Labelled, settings: EvalSettings, out: Path
) -> Iterator[tuple[Contender, Scores]]:
    """The scores of each encoder, from ``out/scores`` where they are there already.

    Raises:
        PatchloomError: an encoder cannot be loaded, or images cannot be read.
    """
    about = [way.name for way in on.ways]
    for number, one in enumerate(those):
        key = key_of(one.place, [one.name, str(one.seed), *about], [on.parts.train, on.parts.test])
        make = partial(_score, one, on, settings)
        yield one, kept(file_of(one, number, out), key, make, Scores.plain, Scores.of)


def file_of(one: Contender, number: int, out: Path, kind: str = "") -> Path:
    """The file in which scores of a ``kind`` are kept, in a comparison's folder."""
    name = "".join(c if c.isalnum() else "-" for c in one.name)
    return out / "scores" / f"{number:03d}-{name}-seed{one.seed}{kind}.json"


def _score(one: Contender, on: Labelled, settings: EvalSettings) -> Scores:
    vit, card = load_encoder(one.place)
    head = load_extra_module(one.place, "pooling")
    its = replace(settings, seed=one.seed, cache=False)
    # in the order of `extractors`: the encoder, its untrained twin, raw pixels
    which = {UNTRAINED: 1, PIXELS: 2}.get(one.name, 0) if one.kind == CONTROL else 0
    return scored(extractors(vit, card, its, head)[which], on.ways, on.parts, its, one.seed)
