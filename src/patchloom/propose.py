"""What pre-training on some images would be, and what it would cost on this machine, measured in a few steps."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from patchloom.data import Source, is_given, steps_of
from patchloom.errors import PatchloomError
from patchloom.machine import seconds_of
from patchloom.memory import keep_freed_memory, memory
from patchloom.runs.settings import Settings
from patchloom.shown import Grid, Shown, Verbatim
from patchloom.sides import compact, in_pixels
from patchloom.tasks.code import label
from patchloom.train.failures import smaller_steps
from patchloom.train.limits import refuse_too_large
from patchloom.train.trial import Step, memory_of, reading
from patchloom.waiting import Waiting, duration

_STEPS = 5  # that are timed
_KEPT = 1.25  # pixels to keep of an image, over those that are trained on (docs/data.md)


@dataclass(frozen=True)
class Estimate:
    """What a run would need, measured in a few steps.

    Attributes:
        steps: of the run.
        seconds: of each step that was timed, with its images there.
        reading: seconds in which the images of a step are read.
        apart: other processes read while the device computes.
        memory: GiB at the peak of two steps beyond what the imports hold; None where that is unknown.
        room: GiB that the device, or this process, may use.
        side: of the task's crops in pixels, the longer one.
    """

    steps: int
    seconds: tuple[float, ...]
    reading: float
    apart: bool
    memory: float | None
    room: float
    side: int

    @property
    def step(self) -> float:
        """Seconds of a step at the median."""
        return statistics.median(self.seconds)

    @property
    def total(self) -> float:
        """Seconds of the run, without measures and pictures."""
        return self.steps * max(self.step, self.reading) if self.apart else self.worst

    @property
    def worst(self) -> float:
        """Seconds if reading and computing go on in turns."""
        return self.steps * (self.step + self.reading)


@dataclass(frozen=True, repr=False)
class Proposal(Shown):
    """What `pretrain` would choose.

    Attributes:
        data: the words that the user typed for it.
        settings: without any ``auto``.
        reasons: for each setting that was left open.
        estimate: what that needs; None if it was not asked for or could not be made.
        failure: why it could not be made.
        recordings: whether they are trained on, of which settings of images are not given.
    """

    data: Sequence[str]
    settings: Settings
    reasons: dict[str, str]
    estimate: Estimate | None
    failure: str = ""
    recordings: bool = False

    def parts(self, width: int) -> list[str | Grid]:
        """See `Shown`."""
        command, *sentences = self.sentences()
        return [Grid.of(self.table(), texts=[1, 2]), "", Verbatim(command), *sentences]

    @property
    def command(self) -> str:
        """To be pasted into a terminal, or into a program; what it leaves open becomes the same again."""
        s = self.settings
        begin = {"task": s.task["name"].partition("#")[0]} if s.recipe is None else {"recipe": s.recipe}
        options = begin | {"model": s.model["name"]}
        options |= {} if self.recordings else {"img_size": compact(s.img_size)}
        options |= {"patch_size": s.patch_size} | ({} if self.recordings else {"channels": s.channels})
        options |= {"epochs": s.epochs, "batch_size": s.batch_size}
        options |= {"crop_scale": s.crop_scale} if s.crop_scale == "native" else {}
        options |= {name: getattr(s, name) for name in ("workers", "device") if name not in self.reasons}
        options |= {"group": s.group} if s.group is not None else {}
        if is_given(self.data[0]):
            return f"patchloom.pretrain(data, {', '.join(f'{name}={value!r}' for name, value in options.items())})"
        options |= {name: in_pixels(options[name]) for name in ("img_size", "patch_size") if name in options}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return shlex.join(["patchloom", "pretrain", *self.data, *words])

    def table(self) -> list[tuple[str, ...]]:
        """A heading, and a row for each setting that was left open."""
        s = self.settings
        shown = s.plain() | {
            "task": label(s.task["name"]),
            "model": s.model["name"],
            "img_size": in_pixels(s.img_size),
            "patch_size": in_pixels(s.patch_size),
        }
        shown |= {f"model.{name}": value for name, value in s.model.items()}
        rows = [("setting", "proposed", "since")]
        for name, why in self.reasons.items():
            value = shown[name]
            rows.append((name, f"{value:.4g}" if isinstance(value, float) else str(value), why))
        return rows

    def sentences(self) -> list[str]:
        """The command, and what it would need."""
        said = [self.command]
        if self.failure:
            said.append(f"It would stop: {self.failure.rstrip('.')}.")
        if self.estimate is None:
            return said
        e, s = self.estimate, self.settings
        reading = f"while {e.reading:.3f} s go into reading" if e.apart else f"and {e.reading:.3f} s of reading"
        span = f"{e.step:.3f} s ({min(e.seconds):.3f} to {max(e.seconds):.3f})"
        said.append(
            f"It would take about {duration(max(1, e.total))}: {e.steps:,} steps in {s.epochs:,} epochs, each of "
            f"{span} {reading}. Estimated from {len(e.seconds)} steps; measures and pictures come on top."
        )
        if e.apart and s.device == "cpu" and e.worst > 1.1 * e.total:
            said.append(f"Reading shares the cores with training here, which can make it {duration(e.worst)}.")
        if e.reading > e.step:
            remedy = "more --workers" if e.apart else "--workers 1"
            kept = "whole" if self.recordings or s.crop_scale == "native" else round(_KEPT * e.side)
            said.append(f"Reading is what takes longest: {remedy} or --cache {kept} can make it faster.")
        if e.memory is not None:
            need = f"It would need {e.memory:.2f} GiB of memory beyond what the imports hold"
            said.append(f"{need}; there are {e.room:,.1f} GiB.")
            if e.memory > e.room:
                said.append(f"That is more than there is: {smaller_steps(s)}.")
        return said


def propose(
    data: Sequence[str], training: Source, settings: Settings, reasons: dict[str, str], estimate: bool = True
) -> Proposal:
    """Measure a few steps of a run.

    Args:
        data: the words that the user typed for it.
        training: images to train on.
        settings, reasons: as `resolve` gives them.
        estimate: or leave that out.
    """
    made, failure = None, ""
    if estimate:
        try:
            made = _estimate(training, settings)
        except torch.OutOfMemoryError:
            full = f"the device has too little memory for {settings.batch_size} {training.noun} at once"
            failure = f"{full}: {smaller_steps(settings)}"
        except PatchloomError as problem:  # the images may well be read, and that shall not be lost
            failure = str(problem)
    return Proposal(data, settings, reasons, made, failure, training.sound is not None)


def _estimate(training: Source, settings: Settings) -> Estimate:
    keep_freed_memory()
    if settings.device == "cpu":
        torch.set_num_threads(settings.threads)
    batch = min(settings.batch_size, len(training))
    settings = replace(settings, batch_size=batch)
    refuse_too_large(settings, batch)
    with Waiting(f"timing {1 + _STEPS} steps of the run"):
        step = Step(settings, settings.compile, sound=training.sound)
        seconds = tuple(seconds_of({"step": step}, settings.device, _STEPS)["step"])
    with Waiting(f"timing how fast {training.noun} are read"):
        rate = reading(training, step.task, settings)
    with Waiting("measuring its memory in a process of its own"):
        needed, (_, room) = memory_of(settings, settings.compile, training.sound), memory(settings.device)
    steps = steps_of(settings.epochs, len(training), batch)
    side = max(step.task.augment.size)
    return Estimate(steps, seconds, batch / rate, settings.workers > 0, needed, room, side)
