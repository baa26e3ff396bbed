"""Pictures of a task on images: what was withheld, and what came back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer

from patchloom.data import Source, normalize, open_data, plain_batches
from patchloom.errors import PatchloomError
from patchloom.look import draw_sheet
from patchloom.memory import Affordable
from patchloom.nets.build import build_encoder
from patchloom.nets.encode import checkpoint_gradients, fuse_attention
from patchloom.nets.native import missing
from patchloom.nets.native.blocks import use_native
from patchloom.nets.teacher import halve_asides
from patchloom.nets.weights import EncoderCard
from patchloom.tasks import build_task
from patchloom.tasks.task import Task
from patchloom.train.checkpoint import restore
from patchloom.train.folder import RunFolder, plain_name
from patchloom.train.held_out import own_held_out
from patchloom.train.settings import Settings


def run_card(settings: Settings, mean: Sequence[float], std: Sequence[float], name: str) -> EncoderCard:
    """What belongs to the encoder of a run."""
    return EncoderCard(settings.encoder_spec(), tuple(mean), tuple(std), settings.task["name"], name)


def prepare_task(
    settings: Settings,
    mean: Sequence[float],
    std: Sequence[float],
    begin: Callable[[VisionTransformer], object] = lambda vit: None,
) -> Task:
    """A fresh task by resolved settings, with the attention form and the kernels that they name.

    Its images are normalised by ``mean`` and ``std``; ``begin`` is given the encoder before the task is built around
    it, and may put weights into it.
    """
    affordable = Affordable(4 if settings.device == "cpu" else 1)  # what a GPU lacks it tells itself
    with affordable:
        vit = build_encoder(settings.encoder_spec())
    begin(vit)
    with affordable:
        task = build_task(settings.task, vit)
    fuse_attention(task, fused=settings.attention == "fused")
    use_native(task, settings.kernels == "native" and missing() is None)
    checkpoint_gradients(task, settings.checkpointing)
    if settings.teacher_precision == "bfloat16" and not halve_asides(task):
        raise PatchloomError(
            f"--teacher_precision is for a teacher or a guide, and {settings.task['name']} has none here: leave it out"
        )
    task.normalized_by(mean, std)
    task.augment.scale, task.augment.flip = (settings.crop_scale, 1.0), settings.flip
    return task


class Loaded(NamedTuple):
    """A run's task with its weights, the card of its encoder, its settings, and its folder."""

    task: Task
    card: EncoderCard
    settings: Settings
    folder: RunFolder


def load_task(run: str | Path) -> Loaded:
    """The task of a run in eval mode, as its last checkpoint has it.

    Raises:
        PatchloomError: no run there, or a damaged checkpoint.
    """
    folder = RunFolder(run)
    settings = folder.read_config()
    found = folder.read_data()
    task = prepare_task(settings, found["mean"], found["std"])
    if not folder.checkpoints.there():
        raise PatchloomError(f"{folder.path} has no checkpoint yet: let the run train first")
    restore(folder.checkpoints.weights(), task)
    return Loaded(task.eval(), run_card(settings, found["mean"], found["std"], folder.path.name), settings, folder)


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
    if data is None or str(data) == settings.data or str(Path(data).absolute()) == settings.data:
        if data is None and settings.data.startswith("pipe:"):  # a run may come from a stranger
            raise PatchloomError(
                f"{folder.path} trained on what a command gives, which is only run for who types it: "
                f"patchloom look {folder.path} {settings.data!r}"
            )
        train = open_data(settings.data).train
        source = own_held_out(folder, settings, train).parts(train)[1]
        target = folder.pictures
    else:
        opened = open_data(data)
        source = opened.test or opened.train
        target = folder.path / f"pictures-{plain_name(data)}"
    return draw_task(task, source, card, Path(out) if out else target, images=images, seed=seed)
