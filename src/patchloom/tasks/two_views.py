"""What ExtreMA and LUT show of their two views."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from patchloom.data.sound.excerpts import RandomExcerpt
from patchloom.nets.geometry import Geometry
from patchloom.patches.partition import complement
from patchloom.patches.pictures import WITHHELD, paint_patches
from patchloom.questions.question import Sheet
from patchloom.tasks.task import Task


def augmented(task: Task, images: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The views [b c h w] that a task's augmentation makes of normalised images [b c h w], for pictures.

    Of recordings both are the middle: the picture does not have the samples from which a shifted excerpt is cut.
    """
    if isinstance(task.augment, RandomExcerpt):
        return images, images
    rng = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
    plain, white = (images * task.std + task.mean).clamp(0, 1), 1
    levels = (plain * 255).round()
    if torch.equal((levels / 255 - task.mean) / task.std, images):  # of 8 bits, in which training crops them, too
        plain, white = levels.byte(), 255
    views = zip(*(task.augment(image, rng) for image in plain.cpu()), strict=True)
    return tuple((torch.stack(view).to(images.device) / white - task.mean) / task.std for view in views)


def views_sheet(geometry: Geometry, views: dict[str, tuple[Tensor, Tensor | None]], caption: str) -> Sheet:
    """The views of the first images; by heading, images [b c h w] and the patches [b k] of them that are seen."""
    columns = {}
    for heading, (images, visible) in views.items():
        columns[heading] = images
        if visible is not None:
            columns[heading] = paint_patches(images, geometry.p, complement(visible, geometry.n), WITHHELD)
    return Sheet("views", caption, columns)
