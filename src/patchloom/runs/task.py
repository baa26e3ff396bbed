"""Task of a run, built from its settings and loaded from its last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from patchloom.data.augment import ColoredCrop, RandAugment, RandomCrop, TwoViews
from patchloom.data.stats import Stats
from patchloom.display import print_line
from patchloom.errors import PatchloomError
from patchloom.nets.build import build_encoder, initialized_as
from patchloom.nets.checkpoints.format import UNKNOWN_LICENSE, EncoderCard, join_licenses, read_encoder_card
from patchloom.nets.checkpoints.origin import Weights
from patchloom.nets.finetune import add_low_rank, freeze_for
from patchloom.nets.performance import checkpoint_gradients, fuse_attention, use_kernels
from patchloom.nets.swin import Encoder
from patchloom.nets.teacher import use_half_without_grad
from patchloom.runs.checkpoint import is_best, restore
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import ResolvedSettings, TaskLike
from patchloom.system.device import MemoryGuard
from patchloom.system.network import from_cache_alone
from patchloom.tasks import build_task, task_name
from patchloom.tasks.custom import Code, label, refuse_untyped, same_task
from patchloom.tasks.task import Task


def run_card(settings: ResolvedSettings, stats: Stats, folder: RunFolder) -> EncoderCard:
    task, license = label(settings.task["name"]), ""
    if folder.start.is_file():
        license = read_encoder_card(folder.start).license
    elif settings.init or settings.from_run:  # not stored yet, or by a version that stored none
        license = UNKNOWN_LICENSE
    if isinstance(source := settings.task.get("features_of"), str):
        try:
            with from_cache_alone(True):
                of_teacher = Weights(source).stated.license
        except (PatchloomError, OSError):  # moved since the training
            of_teacher = UNKNOWN_LICENSE
        license = join_licenses(license, of_teacher)
    spec = settings.encoder_spec()
    return EncoderCard(spec, stats.mean, stats.std, task, folder.name, sound=stats.sound, license=license)


def prepare_task(
    settings: ResolvedSettings,
    stats: Stats,
    begin: Callable[[Encoder], None] | None = None,
) -> Task:
    """Build a task from resolved settings; ``begin`` may load weights into its encoder first."""
    # a GPU reports a lack of memory itself; frozen blocks have neither gradients nor moments
    affordable = MemoryGuard(4 if settings.device == "cpu" and settings.adapt == "all" else 1)
    with affordable, initialized_as(settings.initialization):
        vit = build_encoder(settings.encoder_spec())
    if begin is not None:
        begin(vit)
    freeze_for(vit, settings.adapt, settings.train_blocks)
    with affordable, initialized_as(settings.initialization):
        task = build_task(settings.task, vit)
    if settings.anchor:
        task.anchor_to_start(settings.anchor)
    if settings.adapt == "lora":  # the teachers and the start have plain weights
        add_low_rank(task.encoder, settings.lora_rank, settings.lora_on, settings.train_blocks)
    fuse_attention(task, fused=settings.attention == "fused")
    use_kernels(task, settings.kernels)
    checkpoint_gradients(task, settings.checkpointing)
    if settings.teacher_precision == "bfloat16" and not use_half_without_grad(task):
        raise PatchloomError(
            f"--teacher_precision needs a teacher or a guide, and {label(settings.task['name'])} has none here: leave "
            "it out"
        )
    task.normalized_by(stats.mean, stats.std)
    task.modality = stats.modality
    task.augment.flip = settings.flip
    if settings.crop_scale == "native":
        _require(task, "native", settings, "--crop_scale native", "give a fraction, such as 0.2")
        if getattr(task.augment, "crops", 1) > 1:
            raise PatchloomError(
                f"--crop_scale native: {label(settings.task['name'])} compares two crops of an image, which would "
                "seldom overlap: give a fraction, such as 0.2"
            )
        task.augment.native = True
    elif isinstance(settings.crop_scale, str):
        _require(task, "border", settings, f"--crop_scale {settings.crop_scale}", "give a fraction, such as 0.2")
        task.augment.border = settings.crop_scale
    else:
        task.augment.scale = (settings.crop_scale, 1.0)
    if settings.randaugment:
        _require(task, "randaugment", settings, "--randaugment", "leave it out")
        task.augment.randaugment = RandAugment(settings.randaugment, settings.randaugment_std, stats.mean)
    if settings.crop_on == "device" and type(task.augment) not in (RandomCrop, ColoredCrop, TwoViews):
        raise PatchloomError(
            f"--crop_on device has no effect on {label(settings.task['name'])}, whose augment is none of RandomCrop, "
            "ColoredCrop and TwoViews: leave it out"
        )
    task.augment = stats.modality.cut(task.augment)
    return task


def augment_of_readers(task: Task, settings: ResolvedSettings) -> Any:
    """Return the augmentation of a run's training images as the readers apply it, see ``--crop_on``."""
    return task.augment.without_resizing() if settings.crop_on == "device" else task.augment


def _require(task: Task, attribute: str, settings: ResolvedSettings, option: str, remedy: str) -> None:
    """Refuse an option if the augmentation of a task, perhaps of a user's own, lacks the attribute that it sets."""
    if not hasattr(task.augment, attribute):
        raise PatchloomError(
            f"{option} has no effect on {label(settings.task['name'])}, because its augment has no attribute "
            f"{attribute}, as RandomCrop has: {remedy}"
        )


class LoadedTask(NamedTuple):
    """Task of a run with its weights, card, settings, folder, and the values beside the tensors of its checkpoint.

    ``about["step"]`` is the number of steps done; `step_of_weights` is the step of the weights.
    """

    task: Task
    card: EncoderCard
    settings: ResolvedSettings
    folder: RunFolder
    about: dict[str, Any]


def load_task(run: str | Path, task: TaskLike | None = None) -> LoadedTask:
    """Load the task of a run in eval mode, with the weights of its last checkpoint."""
    folder = RunFolder(run)
    settings = folder.read_config()
    name = stored = settings.task["name"]
    if task is None:
        refuse_untyped(stored, folder.path)
    else:
        name = task_name(task)
        if name != stored and same_task(name, stored):
            print_line(f"{Code.of(name).typed} has changed since {folder.path} was trained with it", file=sys.stderr)
    settings = replace(settings, task=settings.task | {"name": name})
    why = f"{folder.path} names them, and patchloom does not download what the files of a run name"
    with from_cache_alone(True, why):  # weights of a teacher, which an untrusted run may name
        prepared = prepare_task(settings, folder.read_stats())
    weights, about = folder.checkpoints.newest()
    restore(weights, prepared)
    return LoadedTask(prepared.eval(), newest_card(folder, settings, about), settings, folder, about)


def newest_card(folder: RunFolder, settings: ResolvedSettings, about: Mapping[str, Any]) -> EncoderCard:
    """Return the card of a run's encoder; for an unfinished run, name and note say so."""
    card = run_card(settings, folder.read_stats(), folder)
    if folder.encoder.exists():
        return card
    reached = f"step {step_of_weights(about):,} of {about.get('steps', 0):,}"
    best = "with the weights of its best measure, at " if is_best(about) else ""
    note = f"The run {folder.path} is not finished: this is its newest checkpoint, {best}{reached}."
    return replace(card, name=f"{card.name} ({reached})", note=note)


def step_of_weights(about: Mapping[str, Any]) -> int:
    """Return the step of the weights of `Checkpoints.newest`: for a finished run with ``--patience``, the best one."""
    step: int = about["best"]["step"] if is_best(about) else about["step"]
    return step
