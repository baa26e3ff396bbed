"""What a protocol measures: an encoder, the weights that it began with, and its untrained twin."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.checkpoints.format import EncoderCard, untrained_twin
from patchloom.nets.heads import InstanceHead, Stem
from patchloom.nets.swin import Encoder
from patchloom.results.claims import START, UNTRAINED
from patchloom.runs.encoder import load_start


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
    """Load the encoder of a run, and make its controls.

    Args:
        run: run, file of an encoder or timm:NAME.
        settings: settings with the seed of new weights.
        tuned: whether the encoder is fine-tuned, for which all authors take the student.
        fresh: name of the encoder with new weights.
        head: whether to load the instance head beside the encoder, if there is one.
    """
    vit, card = settings.encoder(run, tuned)
    own = settings.extra_module(run, "pooling", tuned) if head else None
    start = load_start(run)
    ours = Subject(card.name, vit, card, own)
    twin, its = untrained_twin(card, own, settings.seed)
    return Subjects(ours, None if start is None else Subject(START, *start), Subject(fresh, twin, card, its))
