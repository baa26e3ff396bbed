"""What ExtreMA and LUT share: how agreement with a teacher is measured, and pictures of views and neighbours."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.objectives.agreement import cosine, others
from patchloom.objectives.pixels import paint_patches
from patchloom.tasks.measure import Measure
from patchloom.tasks.task import WITHHELD, Sheet, Size, Task

GALLERY = 200  # images among which neighbours are looked for
ROWS, NEIGHBOURS = 8, 3


def agreement_measure(student: Tensor, teacher: Tensor) -> Measure:
    """Cosine of student [b d] and teacher [b d] on the same image, beside that with the teacher on other images."""
    return Measure(
        "agreement with the teacher",
        cosine(student, teacher),
        {"on other images": others(student, teacher)},
        bar="on other images",
        higher_is_better=True,
        form=".3f",
        outputs=teacher.float(),
    )


def check_momentum(momentum: float) -> None:
    """Refuse a momentum with which no teacher can follow.

    Raises:
        PatchloomError: it is no share.
    """
    if not 0 <= momentum <= 1:
        raise PatchloomError(f"--task.momentum must lie in [0, 1], not at {momentum}")


def head_sizes(task: Task, width: Size, out: Size) -> tuple[int, int]:
    """Hidden width and output of the heads; ``auto`` is the papers' 4096 and 256.

    For an encoder narrower than ViT-S, which the papers do not train, auto is four times its width and its width.

    Raises:
        PatchloomError: a size below 1.
    """
    d = task.encoder.embed_dim
    why = "in proportion to an encoder below ViT-S" if d < 384 else "the papers'"
    width = task.choose("head_width", width, 4 * d if d < 384 else 4096, why)
    out = task.choose("head_out", out, d if d < 384 else 256, why)
    if min(width, out) < 1:
        raise PatchloomError(f"heads cannot be {width} wide with {out} outputs: both must be 1 or more")
    return width, out


def views_sheet(task: Task, views: dict[str, tuple[Tensor, Tensor | None]], caption: str) -> Sheet:
    """The views of the first images; by heading, images [b c h w] and the patches [b k] of them that are seen."""
    columns = {}
    for heading, (images, visible) in views.items():
        columns[heading] = (
            images if visible is None else paint_patches(images, task.p, hidden(visible, task.patches), WITHHELD)
        )
    return Sheet("views", caption, columns)


def hidden(visible: Tensor, n: int) -> Tensor:
    """The patches [b n-k] that are not among ``visible`` [b k]."""
    seen = torch.zeros(len(visible), n, dtype=torch.uint8, device=visible.device).scatter_(1, visible, 1)
    return seen.argsort(dim=1, stable=True)[:, : n - visible.shape[1]]


def neighbours_sheet(images: Tensor, found: dict[str, tuple[Tensor, Tensor]], caption: str) -> Sheet:
    """The nearest neighbours of the first images among all others.

    Args:
        images: [g c h w] the gallery; its first images ask.
        found: by heading, features [q d] of the asking images and [g d] of the gallery.
        caption: what was compared.
    """
    asking = min(ROWS, len(images))
    columns = {"image": images[:asking]}
    for heading, (queries, gallery) in found.items():
        near = F.normalize(queries[:asking].float(), dim=-1) @ F.normalize(gallery.float(), dim=-1).T
        near[torch.arange(asking), torch.arange(asking)] = -torch.inf  # not itself
        count = min(NEIGHBOURS, len(images) - 1)
        for place, which in enumerate(near.topk(count, dim=1).indices.unbind(1), start=1):
            columns[f"{heading}, {place}."] = images[which]
    return Sheet("neighbours", caption, columns)
