"""What a protocol measures: an encoder, the weights that it began with, and its untrained twin."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.checkpoints.format import EncoderCard, untrained_twin
from patchloom.nets.heads import InstanceHead, Stem, check_pooling, tokens_of
from patchloom.nets.swin import Encoder
from patchloom.results.claims import START, UNTRAINED
from patchloom.runs.encoder import load_encoder, load_extra_module, load_start


class Subject(NamedTuple):
    """Encoder that is evaluated, or a control.

    Attributes:
        name: name in the report.
        vit: encoder.
        card: its card.
        head: instance head; None: there is none.
        stem: first layer of the projection, for a head that is trained on it.
    """

    name: str
    vit: Encoder
    card: EncoderCard
    head: InstanceHead | None = None
    stem: Stem | None = None


class Subjects(NamedTuple):
    """Encoder of a run and its controls.

    Attributes:
        ours: encoder.
        start: weights that an adapted encoder began with, without an instance head; None for one from random weights.
        fresh: same architecture with new weights.
    """

    ours: Subject
    start: Subject | None
    fresh: Subject

    @property
    def controls(self) -> list[Subject]:
        """The start, if there is one, and the fresh encoder."""
        return [*([] if self.start is None else [self.start]), self.fresh]


def open_subjects(
    run: str | Path, settings: EvalSettings, *, tuned: bool = False, fresh: str = UNTRAINED, head: bool = False
) -> Subjects:
    """Load the encoder of a run, with its instance head if wanted and there, and make its controls.

    All authors fine-tune (``tuned``) the student. ``fresh`` is the name of the encoder with new weights.
    """
    network = settings.network or ("student" if tuned else None)
    vit, card = load_encoder(run, settings.model, network)
    own = load_extra_module(run, "pooling", network) if head else None
    return with_controls(Subject(card.name, vit, card, own), load_start(run), settings.seed, fresh)


def open_probed(run: str | Path, settings: EvalSettings, pooling: str) -> Subjects:
    """Load the encoder of a run for a probe on frozen features, and make its controls.

    The start has no instance head, so ``instance`` leaves it out.
    """
    subjects = open_subjects(run, settings, head=True)
    if pooling != "all":
        check_pooling(pooling, tokens_of(subjects.ours.vit, subjects.ours.head))
    return subjects._replace(start=None) if pooling == "instance" else subjects


def with_controls(
    ours: Subject, start: tuple[Encoder, EncoderCard] | None, seed: int, fresh: str = UNTRAINED
) -> Subjects:
    """Return an encoder with the weights that it began with, if any, and with new weights by ``seed``."""
    twin, its = untrained_twin(ours.card, ours.head, seed)
    return Subjects(ours, None if start is None else Subject(START, *start), Subject(fresh, twin, ours.card, its))
