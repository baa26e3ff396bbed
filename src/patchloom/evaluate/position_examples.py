"""Patches that tell how an encoder answers where they were: of those it is sure of, and of those it is not."""

from __future__ import annotations

import torch
from torch import Tensor

from patchloom.look import Example
from patchloom.questions.positions import PositionPrediction

EACH = 4  # of a kind


def examples_of(
    placed: PositionPrediction, pictures: Tensor, grid: tuple[int, int], each: int = EACH
) -> list[tuple[str, list[Example]]]:
    """Some patches of each kind, by its name: sure and right, between two places, sure and wrong.

    Args:
        placed: what was answered.
        pictures: [b h w 3] of the images, colours uint8.
        grid: rows and columns of patches.
        each: at most so many of a kind, of different images.
    """
    likely = placed.logits.detach().float().softmax(-1).cpu()
    visible, dropped = placed.visible.cpu(), placed.dropped.cpu()
    (best, second), guess = _two_best(likely)
    right = guess == visible
    # large for the patches that are shown of a kind
    kinds = {
        "sure, and right": torch.where(right, best, -1.0),
        "between two places": second,
        "sure, and wrong": torch.where(right, -1.0, best),
    }
    found = []
    for name, worth in kinds.items():
        worth = torch.where(dropped, worth, -1.0)
        top, which = worth.max(dim=1)
        images = [i for i in top.argsort(descending=True, stable=True).tolist() if top[i] > 0][:each]
        some = [
            Example(pictures[i].numpy(), int(visible[i, which[i]]), likely[i, which[i]].view(grid).numpy())
            for i in images
        ]
        found.append((name, some))
    return found


def _two_best(likely: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Probabilities [b k] of the likeliest and of the next place, and the likeliest place [b k]."""
    top = likely.topk(min(2, likely.shape[-1]), dim=-1)
    return (top.values[..., 0], top.values[..., -1]), top.indices[..., 0]
