"""A trained model's answers to annotated images, which several processes find together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from patchloom.data.annotated.base import Annotated, T
from patchloom.data.read import Unreadable, to_channels
from patchloom.evaluate.features import Precision, runs_in_bfloat16
from patchloom.evaluate.pace import watched
from patchloom.evaluate.settings import EvalSettings
from patchloom.nets.on_encoder import OnEncoder
from patchloom.processes import collected, rank, world

A = TypeVar("A")


def answers(
    model: OnEncoder,
    images: Annotated[T],
    settings: EvalSettings,
    answer: Callable[[int, Tensor, torch.device, bool], A],
    *,
    precision: Precision = "auto",
    half: bool | None = None,
    what: str = "",
) -> list[A | None]:
    """Ask a model about every image; several processes take turns, and all must ask.

    Args:
        model: is moved to the device, and put into eval mode.
        images: annotated.
        settings: the device.
        answer: to image number i, of which it is given the number, the pixels [c h w], the device, and whether to
            compute in bfloat16.
        precision: of matrix products, unless ``half`` says it.
        half: whether they are in bfloat16.
        what: is being done, in a line of progress; there is none without it.

    Returns:
        The answers in the order of the images, None for those that cannot be read.
    """
    device = settings.at
    model.to(device).eval()
    if half is None:
        half = runs_in_bfloat16(device, precision)
    found: list[tuple[int, A]] = []
    turns = range(rank(), len(images), world())
    for i in watched(turns, len(turns), what):
        try:
            image = to_channels(images.images.read(i), model.channels)
        except Unreadable:
            continue
        found.append((i, answer(i, image, device, half)))
    by_image = dict(collected(found))
    return [by_image.get(i) for i in range(len(images))]
