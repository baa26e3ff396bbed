"""The task of a run: built from its settings, and loaded with the weights of its last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from patchloom.data.augment import RandAugment
from patchloom.data.stats import Stats
from patchloom.errors import PatchloomError
from patchloom.nets.build import build_encoder
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.finetune import train_last_blocks
from patchloom.nets.performance import checkpoint_gradients, fuse_attention, use_kernels
from patchloom.nets.swin import Encoder
from patchloom.nets.teacher import use_half_without_grad
from patchloom.runs.checkpoint import is_best, restore
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import ResolvedSettings, TaskLike
from patchloom.system.hardware import MemoryGuard
from patchloom.system.network import from_cache_alone
from patchloom.tasks import build_task, task_name
from patchloom.tasks.custom import Code, label, refuse_untyped, same_task
from patchloom.tasks.task import Task


def run_card(settings: ResolvedSettings, stats: Stats, name: str) -> EncoderCard:
    """What belongs to the encoder of a run."""
    task = label(settings.task["name"])
    return EncoderCard(settings.encoder_spec(), stats.mean, stats.std, task, name, sound=stats.sound)


def prepare_task(
    settings: ResolvedSettings,
    stats: Stats,
    begin: Callable[[Encoder], None] | None = None,
) -> Task:
    """A fresh task by resolved settings, with the attention form and the kernels that they name."""
    # what a GPU lacks it tells itself; of blocks that stay as they are there is neither gradient nor moment
    affordable = MemoryGuard(4 if settings.device == "cpu" and settings.train_blocks is None else 1)
    with affordable:
        vit = build_encoder(settings.encoder_spec())
    if begin is not None:
        begin(vit)
    if settings.train_blocks is not None:
        train_last_blocks(vit, settings.train_blocks)
    with affordable:
        task = build_task(settings.task, vit)
    fuse_attention(task, fused=settings.attention == "fused")
    use_kernels(task, settings.kernels)
    checkpoint_gradients(task, settings.checkpointing)
    if settings.teacher_precision == "bfloat16" and not use_half_without_grad(task):
        raise PatchloomError(
            f"--teacher_precision is for a teacher or a guide, and {label(settings.task['name'])} has none here: leave "
            "it out"
        )
    task.normalized_by(stats.mean, stats.std)
    task.modality = stats.modality
    task.augment.flip = settings.flip
    if settings.crop_scale == "native":
        _native_crops(task, label(settings.task["name"]))
    else:
        task.augment.scale = (settings.crop_scale, 1.0)
    if settings.randaugment:
        _randaugment(task, settings, stats.mean)
    task.augment = stats.modality.cut(task.augment)
    return task


def _native_crops(task: Task, name: str) -> None:
    if not hasattr(task.augment, "native"):
        raise PatchloomError(
            f"--crop_scale native changes nothing in {name}, whose augment has no attribute native, as RandomCrop has: "
            "give a share, such as 0.2"
        )
    if getattr(task.augment, "crops", 1) > 1:
        raise PatchloomError(
            f"--crop_scale native: {name} compares two crops of an image, which would seldom overlap: give a share, "
            "such as 0.2"
        )
    task.augment.native = True


def _randaugment(task: Task, settings: ResolvedSettings, mean: Sequence[float]) -> None:
    if not hasattr(task.augment, "randaugment"):
        raise PatchloomError(
            f"--randaugment changes nothing in {label(settings.task['name'])}, whose augment has no attribute "
            "randaugment, as RandomCrop has: leave it out"
        )
    task.augment.randaugment = RandAugment(settings.randaugment, settings.randaugment_std, mean)


class LoadedTask(NamedTuple):
    """A run's task with its weights, the card of its encoder, its settings, its folder, and where it is.

    Of ``about``, what the checkpoint keeps beside its tensors, ``step`` is the number of steps done; of which step the
    weights are, `step_of_weights` says.
    """

    task: Task
    card: EncoderCard
    settings: ResolvedSettings
    folder: RunFolder
    about: dict[str, Any]


def load_task(run: str | Path, task: TaskLike | None = None) -> LoadedTask:
    """The task of a run in eval mode, as its last checkpoint has it."""
    folder = RunFolder(run)
    settings = folder.read_config()
    settings = replace(settings, task=settings.task | {"name": _found_again(folder, settings.task["name"], task)})
    why = f"{folder.path} names them, and what a run names is not fetched for it"
    with from_cache_alone(True, why):  # a teacher's, of which a stranger's run may say where it is
        prepared = prepare_task(settings, folder.read_stats())
    weights, about = folder.checkpoints.newest()
    restore(weights, prepared)
    return LoadedTask(prepared.eval(), newest_card(folder, settings, about), settings, folder, about)


def newest_card(folder: RunFolder, settings: ResolvedSettings, about: Mapping[str, Any]) -> EncoderCard:
    """The card of a run's encoder as a checkpoint has it; of a run that is not finished, name and note say so."""
    card = run_card(settings, folder.read_stats(), folder.name)
    if folder.encoder.exists():
        return card
    reached = step_of(about)
    best = "with the weights of its best measure, at " if is_best(about) else ""
    note = f"The run {folder.path} is not finished: this is its newest checkpoint, {best}{reached}."
    return replace(card, name=f"{card.name} ({reached})", note=note)


def step_of(about: Mapping[str, Any]) -> str:
    """Which step the weights of a checkpoint are of, in words; of how many an older version did not say."""
    steps = about.get("steps", 0)
    return f"step {step_of_weights(about):,}" + (f" of {steps:,}" if steps else "")


def step_of_weights(about: Mapping[str, Any]) -> int:
    """How many steps were done when the weights were there that `Checkpoints.newest` gives.

    Once the training of a run with ``--patience`` has ended, it is the step of its best measure, not the last one.
    """
    step: int = about["best"]["step"] if is_best(about) else about["step"]
    return step


def _found_again(folder: RunFolder, stored: str, task: TaskLike | None) -> str:
    """The name of a run's task: ``stored``, if the user has named it already, or that of the class given instead."""
    if task is None:
        refuse_untyped(stored, folder.path)
        return stored
    name = task_name(task)
    if name != stored and same_task(name, stored):
        print(f"{Code.of(name).typed} has changed since {folder.path} was trained by it", file=sys.stderr)
    return name
