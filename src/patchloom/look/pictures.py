"""Pictures of the task of a run on images: what was withheld, and what came back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from patchloom.data import Source, lasting, named, normalize, open_data, plain_batches
from patchloom.data.sources.addresses import PIPE
from patchloom.errors import PatchloomError
from patchloom.look.sheets import draw_sheet
from patchloom.nets.weights import EncoderCard
from patchloom.runs.folder import plain_name
from patchloom.runs.held_out import own_held_out
from patchloom.runs.task import load_task
from patchloom.tasks.task import Task


def draw_task(
    task: Task,
    source: Source,
    card: EncoderCard,
    folder: Path,
    device: torch.device | str = "cpu",
    images: int = 8,
    seed: int = 0,
) -> list[Path]:
    """Draw the task's sheets on some images, spread evenly over ``source``: its files may lie class by class.

    Args:
        task: trained.
        source: images that were not trained on.
        card: sizes, mean and std with which images become its input.
        folder: where the pictures go.
        device: where the task is.
        images: how many.
        seed: of the draws.

    Returns:
        The files.
    """
    shown, rest = _spread(len(source), images), _spread(len(source), task.pictured)
    rest = np.setdiff1d(rest, shown)[: max(0, task.pictured - len(shown))]
    some = source.subset(np.concatenate([shown, rest]))
    batches = plain_batches(some, tuple(task.augment.size), len(some), channels=card.spec.channels, device=device)
    given = normalize(next(batches).views[0], card.mean, card.std)
    was_training = task.training
    task.eval()
    with torch.inference_mode():
        sheets = task.draw(given, torch.Generator().manual_seed(seed))
    task.train(was_training)
    return [draw_sheet(sheet, card.mean, card.std, folder) for sheet in sheets]


def _spread(n: int, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, n - 1, count).round().astype(int))


def look(
    run: str | Path, data: str | None = None, *, out: str | Path | None = None, images: int = 8, seed: int = 0
) -> list[Path]:
    """Draw what a run's task withholds from images, and what comes back.

    Args:
        run: the folder of a run.
        data: images of any source; its test split if it has one. The run's own held-out images, if absent.
        out: folder for the pictures; ``RUN/pictures`` for the run's own images, else ``RUN/pictures-DATA``.
        images: how many.
        seed: of what is withheld.

    Returns:
        The files.

    Raises:
        PatchloomError: no run there, a damaged checkpoint, or images that do not fit.
    """
    if images < 1:
        raise PatchloomError(f"--images must be 1 or more, not {images}")
    task, card, settings, folder = load_task(run)
    if data is None or settings.data in (str(data), lasting(data)):
        if data is None and any(
            name.startswith(PIPE) for name in map(str, named(settings.data))
        ):  # a run may come from a stranger
            raise PatchloomError(
                f"{folder.path} trained on what a command gives, which is only run for who types it: "
                f"patchloom look {folder.path} {settings.data!r}"
            )
        train = open_data(settings.data, group=settings.group).train
        source = own_held_out(folder, settings, train).parts(train)[1]
        target = folder.pictures
    else:
        opened = open_data(data)
        source = opened.test or opened.train
        target = folder.path / f"pictures-{plain_name(data)}"
    return draw_task(task, source, card, Path(out) if out else target, images=images, seed=seed)
