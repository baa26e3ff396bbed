"""A trained segmenter or detector as a file: its weights, and all that is needed to use it again."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from patchloom.dense.annotations.boxes import LARGEST_ID
from patchloom.dense.detector import Detector
from patchloom.dense.segmenter import SegmentationHead, Segmenter
from patchloom.errors import PatchloomError
from patchloom.nets.checkpoints.format import (
    DENSE_FORMAT,
    EncoderCard,
    check_arguments,
    checked_card,
    read_about,
    refuse_larger,
    save_net,
    untrained_twin,
)
from patchloom.nets.checkpoints.read import expect_intact, read_metadata, read_weights
from patchloom.nets.finetune import Variant, at_size
from patchloom.system.device import MemoryGuard

_RANGES = {"size": (1, 2**14), "side": (1, 2**16), "ids": (0, LARGEST_ID)}
_DEEPEST = 2**16 - 1  # number in a label map
# of `Segmenter` and `Detector`, as a card may name them
_ARGUMENTS: dict[str, Any] = {
    **{"head": SegmentationHead, "head_width": int, "auxiliary": bool},
    **{"masks": bool, "width": int, "window": int | None, "light": bool},
}

DenseTask = Literal["segment", "detect"]


@dataclass(frozen=True)
class DenseCard:
    """Card of a saved segmenter or detector.

    Attributes:
        kind: segment or detect.
        encoder: card of the encoder at the start of the training.
        positions: position embeddings in training.
        size: height and width in pixels of the model's input.
        side: shorter side in pixels to which a segmenter's images are resized; None if they are not, and for a
            detector.
        arguments: keyword arguments of `Segmenter` or `Detector`.
        classes: names of the classes, in the order of their numbers in predictions.
        data: name of the training data.
        test: fingerprint of the test images, the only ones on which the model may be measured.
        seed: random seed of split and training.
        settings: the recipe.
        ids: number of each class in the label maps that a segmenter was trained on, or category id of each class in
            the COCO JSON of a detector.
    """

    kind: DenseTask
    encoder: EncoderCard
    positions: Variant
    size: tuple[int, int]
    side: int | None
    arguments: dict[str, Any]
    classes: tuple[str, ...]
    data: str
    test: str
    seed: int
    settings: dict[str, Any]
    ids: tuple[int, ...] = ()


def save_dense(model: Segmenter | Detector, card: DenseCard, path: Path) -> None:
    save_net(model, DENSE_FORMAT, asdict(card), path)


def load_dense(path: str | Path) -> tuple[Segmenter | Detector, DenseCard]:
    """Load a trained segmenter or detector in eval mode, and its card."""
    card, weights = read_dense(path), read_weights(Path(path))
    refuse_larger(card.encoder, weights, Path(path))
    with expect_intact(path), MemoryGuard(1), torch.random.fork_rng(devices=[]):
        twin, _ = untrained_twin(card.encoder)
        encoder = at_size(twin, card.encoder, card.size, card.positions)
        net = Segmenter if card.kind == "segment" else Detector
        model = net(encoder, len(card.classes), **card.arguments)
        model.load_state_dict(weights, strict=True)
    return model.eval(), card


def is_dense(path: Path) -> bool:
    try:
        return DENSE_FORMAT in read_metadata(path, "a segmenter or detector")
    except PatchloomError:
        return False


def read_dense(path: str | Path) -> DenseCard:
    """Read the card of a segmenter's or detector's file; errors as in `load_dense`."""
    path = Path(path)
    if not path.is_file():
        raise PatchloomError(
            f"there is no model at {path}: patchloom evaluate segment or detect writes one with --save true"
        )
    about = read_about(path, DENSE_FORMAT, "a segmenter or detector")
    with expect_intact(path):
        card = checked_card(DenseCard, about, _RANGES)
        check_arguments(card.arguments, _ARGUMENTS, 2**14)
        if card.kind == "segment" and max(card.ids, default=0) > _DEEPEST:
            raise ValueError(f"it has ids above {_DEEPEST:,}")
        if len({*card.ids}) not in (0, len(card.classes)) or len({*card.ids}) < len(card.ids):
            raise ValueError(f"it has {len(card.ids)} ids of {len(card.classes)} classes")
        ids = card.ids or tuple(range(len(card.classes))) * (card.kind == "segment")
        return replace(card, ids=ids)
