"""Predicted positions: their measure, where to measure, pictures (DropPos Fig. 3, MP3's rebuilt and mixed images)."""

from __future__ import annotations

import torch
from torch import Tensor

from patchloom.tasks.measure import Measure
from patchloom.tasks.task import WITHHELD, WRONG, Sheet, Task
from patchloom.views.positions import Placed, blind_guess
from patchloom.views.tokens import deal, grid_of, patchify, put, share_of, take, unpatchify

MASK_RATIOS = (0.0, 0.25, 0.5, 0.75)
POSITION_MASK_RATIO = 0.95
# ratios at which positions are measured: DropPos' Tables S3-S5, MP3's curve
POSITION_GRID = {"mask_ratio": MASK_RATIOS, "position_mask_ratio": (0.25, 0.5, 0.75, POSITION_MASK_RATIO)}
CONTEXT_RATIOS = {"context_mask_ratio": (0.0, 0.25, 0.5, 0.75, 0.9)}


def position_measure(placed: Placed) -> Measure:
    """Share of the withheld positions that are found, beside the exact chance level."""
    chance = blind_guess(placed.logits.shape[-1], placed.told())
    return Measure("position accuracy", placed.found(), {"chance": chance}, bar="chance", higher_is_better=True)


def position_sheets(task: Task, images: Tensor, generator: torch.Generator) -> list[Sheet]:
    """Two sheets, over the mask ratios of Fig. 3: which patches are placed rightly, and the images put together again.

    ``task`` offers ``place`` at the ratios of `POSITION_GRID`.
    """
    marked, rebuilt = {"original": images}, {"original": images}
    for ratio in MASK_RATIOS:
        if share_of(task.patches, 1 - ratio) < 2:  # nothing to compare with
            continue
        answer = task.place(images, generator, mask_ratio=ratio, position_mask_ratio=POSITION_MASK_RATIO)
        visible, placed = answer.visible, answer.places()
        if ratio == 0:
            rebuilt["given"] = put_together(images, task.p, visible, scattered(visible, answer.dropped, generator))
        marked[f"γ = {ratio}"] = mark_wrong(images, task.p, visible, placed)
        rebuilt[f"γ = {ratio}"] = put_together(images, task.p, visible, placed)
    told = share_of(task.patches, 1 - POSITION_MASK_RATIO)
    asked = (
        f"At γ = 0 the places of {task.patches - told} of {task.patches} patches were withheld; γ is the share masked."
    )
    return [
        Sheet("positions", f"{asked} Black: masked. White: placed wrongly. The rest: placed rightly.", marked),
        Sheet(
            "rebuilt",
            f"{asked} Given: patches without a place, in random order. Then each stands where it was placed; where "
            "several landed, their mean. Black: nothing landed.",
            rebuilt,
        ),
    ]


def rebuilt_sheet(task: Task, images: Tensor, placed: dict[str, Tensor], generator: torch.Generator) -> Sheet:
    """Images put together from all their patches at the places [b n] that were predicted, by heading."""
    n = task.patches
    everywhere = torch.arange(n, device=images.device).expand(len(images), -1)
    (order,) = deal(len(images), n, (n,), generator, images.device)
    columns = {"original": images, "given": put_together(images, task.p, everywhere, order)}
    columns |= {name: put_together(images, task.p, everywhere, places) for name, places in placed.items()}
    caption = (
        "Given: the patches without their places, in random order. Then each stands where it was placed, when a share "
        "η of the patches was barred from keys and values; where several landed, their mean. Black: nothing landed."
    )
    return Sheet("rebuilt", caption, columns)


def mixed_sheet(task: Task, images: Tensor, placed: Tensor) -> Sheet:
    """What becomes of images whose patches shared one context with another image's; ``placed`` [b n] are the places."""
    everywhere = torch.arange(task.patches, device=images.device).expand(len(images), -1)
    columns = {
        "image": images,
        "shared its context with": images.roll(1, 0),
        "rebuilt": put_together(images, task.p, everywhere, placed),
    }
    caption = (
        "Half of the patches of both images are keys and values for the patches of both. Rebuilt: the image's own "
        "patches where they were placed."
    )
    return Sheet("mixed", caption, columns)


def scattered(visible: Tensor, dropped: Tensor, generator: torch.Generator) -> Tensor:
    """Places [b k] for a picture of what was given: patches without a position change places at random.

    Args:
        visible: [b k] true places.
        dropped: [b k] True where the position is withheld, in the same number for every image.
        generator: source of the order.
    """
    b = len(visible)
    which = dropped.nonzero()[:, 1].view(b, -1)
    (order,) = deal(b, which.shape[1], (which.shape[1],), generator, visible.device)
    return visible.scatter(1, which, take(visible, take(which, order)))


def mark_wrong(images: Tensor, p: int, visible: Tensor, placed: Tensor) -> Tensor:
    """Images [b c h w] with masked patches withheld and wrongly placed ones marked, at their true places."""
    patches = patchify(images, p)
    shown = torch.where((placed == visible)[..., None], take(patches, visible), WRONG)
    drawn = put(shown, visible, torch.full_like(patches, WITHHELD))
    return unpatchify(drawn, p, grid_of(images, p))


def put_together(images: Tensor, p: int, visible: Tensor, placed: Tensor) -> Tensor:
    """Images [b c h w] rebuilt from the visible patches [b k] at the places [b k]; where several land, their mean."""
    grid = grid_of(images, p)
    patches = patchify(images, p, visible)
    sums = patches.new_zeros(len(images), grid[0] * grid[1], patches.shape[-1])
    sums.scatter_add_(1, placed[..., None].expand_as(patches), patches)
    landed = torch.zeros_like(sums[..., 0]).scatter_add_(1, placed, torch.ones_like(placed, dtype=sums.dtype))
    return unpatchify(sums / landed[..., None], p, grid)  # 0 / 0 is nan: withheld
