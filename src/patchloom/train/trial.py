"""Steps of a run before it begins: for what they cost, and to see whether there is the memory for them."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from patchloom.data import Batch, Source, normalize, training_batches
from patchloom.machine import wait_for
from patchloom.memory import keep_freed_memory, peak_apart
from patchloom.nets.performance import compile_blocks
from patchloom.runs.settings import Settings
from patchloom.runs.task import prepare_task, unknown_stats
from patchloom.sound import Sound
from patchloom.tasks.code import allow, only_here
from patchloom.tasks.task import Task
from patchloom.train.optim import build_optimizer
from patchloom.train.step import autocast

_READING = 3.0  # seconds of reading


class Pictured(Source):
    """Images [n c h w] in memory."""

    name = "noise"

    def __init__(self, images: Tensor):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def read(self, i: int) -> Tensor:
        return self.images[i]

    def fingerprint(self) -> str:
        return self.name


class Step:
    """One step of training: normalising, forward, backward, clipping, optimiser, teacher; on random images.

    Args:
        settings: resolved.
        compiled: compile the blocks.
        batch: images, instead of the settings'.
        sound: of recordings, which are noise then.
    """

    def __init__(
        self, settings: Settings, compiled: bool = False, batch: int | None = None, sound: Sound | None = None
    ):
        torch.manual_seed(0)
        c = settings.channels
        self.settings, stats = settings, unknown_stats(c, sound)
        self.task: Task = prepare_task(settings, stats).to(settings.device).train()
        if compiled:
            compile_blocks(self.task)
        self.optimizer = build_optimizer(self.task, settings.weight_decay, settings.device, settings.betas)
        b = batch or settings.batch_size
        if stats.sound is None:
            picture = Pictured(torch.randint(256, (b, c, *self.task.augment.size), dtype=torch.uint8))
        else:
            picture = Pictured(torch.randint(-(2**15), 2**15, (b, 1, 1, stats.sound.samples), dtype=torch.int16))
            picture.sound = stats.sound
        batches = training_batches(picture, self.task.augment, b, 0, 0, 1, 0, c)
        self.batch: Batch = next(batches)

    def __call__(self) -> None:
        kind = self.settings.device
        views = [normalize(view, self.task.mean, self.task.std) for view in self.batch.on(kind).views]
        with autocast(kind, self.settings.precision):
            loss = self.task(*views, progress=0.5).loss
        loss.backward()
        if self.settings.clip:
            torch.nn.utils.clip_grad_norm_(self.task.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.task.after_step(0.5)
        wait_for(kind)


def memory_of(settings: Settings, compiled: bool = False, sound: Sound | None = None) -> float | None:
    """GiB that two steps need at their peak, in a process of its own: other steps have left their memory in this.

    ``sound`` is that of recordings.

    Raises:
        PatchloomError: as `peak_apart`.
    """
    if only_here(settings.task["name"]):  # no other process could build it
        return None
    return peak_apart(_two_steps, settings.device, settings, compiled, sound)


def _two_steps(settings: Settings, compiled: bool, sound: Sound | None) -> None:
    keep_freed_memory()
    allow(settings.task["name"])  # the process that started this one has met it
    if settings.device == "cpu":
        torch.set_num_threads(settings.threads)
    step = Step(settings, compiled, sound=sound)
    step()
    step()


def reading(source: Source, task: Task, settings: Settings) -> float:
    """Images a second that are read and augmented as training would have them."""
    batch = min(settings.batch_size, len(source))
    steps = 10**6  # more than are made in the time
    batches: Any = training_batches(source, task.augment, batch, 0, 0, steps, settings.workers, settings.channels)
    next(batches)  # the workers start
    start, done = time.perf_counter(), 0
    for _ in islice(batches, 200):
        done += batch
        if time.perf_counter() - start > _READING:
            break
    return done / (time.perf_counter() - start)
