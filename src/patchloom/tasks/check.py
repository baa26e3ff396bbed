"""Check of a task: that it trains, measures and draws as a run needs it, by several processes and on a GPU.

It needs neither a GPU nor a second process: a GPU's tensors are fake, and the draws of two processes are compared with
those of one. It cannot know whether a loss is the right one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from patchloom.errors import PatchloomError
from patchloom.nets.build import EncoderSpec, build_encoder
from patchloom.nets.swin import Encoder
from patchloom.questions.question import Measure, Outcome
from patchloom.system.distributed import Shared
from patchloom.system.fake_cuda import CUDA, Waits, fake_cuda, fake_cuda_with_copies, on_fake_cuda
from patchloom.tasks import build_task, encoder_defaults, task_name
from patchloom.tasks.task import Task
from patchloom.withhold.encoder_input import EncoderInput

_SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}
_SIDE, _PATCH = 32, 8  # pixels
_DRAW = "draw with patchloom.system.distributed.draw(kind, shape, generator, device), a row for each image"


def check_task(task: str | type[Task] | Mapping[str, Any], encoder: Encoder | None = None) -> None:
    """Raise an error unless a task can be trained, measured and drawn.

    Args:
        task: the task as for `patchloom.pretrain`: a name, FILE.py:CLASS, a class, or a dict of ``name`` and options.
        encoder: encoder to train; its weights are lost. None: a small ViT for images of 32x32 pixels in patches of 8.

    Raises:
        PatchloomError: naming what fails and the remedy: a loss or a metric of the wrong form, a parameter without a
            gradient, a draw that does not come from ``generator`` or that is equal in two processes, a step that waits
            for a GPU or cannot run on one, a measure that is not finite or does not repeat, sheets without pictures.
    """
    options = dict(task) if isinstance(task, Mapping) else {"name": task}
    options["name"] = task_name(options["name"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if encoder is None:
            defaults = encoder_defaults(options)
            sizes = _SMALL | {name: value for name, (value, _) in defaults.items() if name == "class_token"}
            positions: Any = defaults.get("positions", ("sincos",))[0]
            encoder = build_encoder(EncoderSpec("nano", (_SIDE, _SIDE), _PATCH, 3, positions, sizes))
        made = build_task(options, encoder)
        views = random_views(made)
        _check_measure(made, views[0])  # first, as in a run: it must leave no trace
        _check_step(made, views)
        _check_draws(made, views)
        _check_gpu(made, views)


def random_views(task: Task, b: int = 8, seed: int = 0) -> list[Tensor]:
    """Return the views [b c h w] that a task's augmentation makes of random images, in [-1, 1]."""
    rng = np.random.default_rng(seed)
    shape = task.geometry.channels, 40, 40
    images = [torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(b)]
    made = [task.augment(image, rng) for image in images]
    return [torch.stack(views).float() / 127.5 - 1 for views in zip(*made, strict=True)]


def _require(fulfilled: bool, task: Task, fact: str, remedy: str) -> None:
    if not fulfilled:
        raise PatchloomError(f"the task {type(task).__name__} {fact}: {remedy}")


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _check_step(task: Task, views: list[Tensor]) -> None:
    """Check loss, metrics and gradients of a step."""
    outcome = task.train()(*views, progress=0.5, generator=_seeded())
    _require(isinstance(outcome, Outcome), task, f"returns {type(outcome).__name__}", "return Outcome(loss, metrics)")
    loss = outcome.loss
    good = loss.ndim == 0 and loss.dtype == torch.float32 and bool(loss.isfinite())
    _require(good, task, f"has the loss {loss}", "return a finite scalar of float32")
    for name, value in outcome.metrics.items():
        good = isinstance(value, Tensor) and value.ndim == 0 and not value.requires_grad
        _require(good, task, f"has the metric {name} = {value}", "return a scalar tensor without gradient")
    loss.backward()
    lacking = [name for name, one in task.named_parameters() if one.requires_grad and one.grad is None]
    _require(
        not lacking,
        task,
        f"has parameters without a gradient ({', '.join(lacking[:3])})",
        "use them in the loss, or leave them out: several processes would wait for their gradients",
    )
    task.zero_grad()
    with torch.no_grad():
        for weight in task.parameters():
            if weight.requires_grad:
                weight.add_(1e-3)  # so that a teacher has something to follow
    before = {name: value.clone() for name, value in task.state_dict().items()}
    task.after_step(0.5, torch.zeros(()))
    changed = [name for name, value in task.state_dict().items() if not torch.equal(value, before[name])]
    _require(
        not changed,
        task,
        f"changes {', '.join(changed[:3])} after an update that was skipped",
        "pass `applied` of after_step on to Teacher.follow, or multiply by it",
    )
    task.after_step(0.5)


def _check_draws(task: Task, views: list[Tensor]) -> None:
    """Check that a step depends on its generator alone, and that each image has a draw of its own in two processes."""
    task.eval()  # stochastic depth and dropout draw from torch's global generator
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(task(*views, progress=0.5, generator=_seeded()).loss)
    _require(
        torch.equal(*losses),
        task,
        f"has losses of {losses[0]:.4f} and {losses[1]:.4f} with one generator",
        f"draw nothing but from generator; {_DRAW}",
    )
    images, half = views[0], len(views[0]) // 2
    whole, parts = task.given(images, _seeded()), []
    for rank in range(2):
        generator = Shared()
        generator.rank, generator.world = rank, 2
        generator.manual_seed(0)
        parts.append(task.given(images[rank * half : (rank + 1) * half], generator))
    for (name, together), (_, first), (_, second) in zip(_tensors(whole), *map(_tensors, parts), strict=True):
        if len(together) % len(images):
            continue  # not one row for each image, or several
        rows = [one.unflatten(0, (-1, count)) for one, count in ((together, 2 * half), (first, half), (second, half))]
        alike = rows[0].shape == torch.cat(rows[1:], 1).shape and torch.allclose(
            rows[0].double(), torch.cat(rows[1:], 1).double(), atol=1e-5, equal_nan=True
        )
        _require(alike, task, f"draws other {name} by two processes than by one", _DRAW)


def _tensors(given: EncoderInput) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an input by name."""
    for field in fields(given):
        value = getattr(given, field.name)
        if isinstance(value, Tensor):
            yield field.name, value
    yield from given.targets.items()


def _check_measure(task: Task, images: Tensor) -> None:
    """Check that measure and pictures are finite, complete and repeatable."""
    images, b = images[:4], min(4, len(images))
    task.eval()
    with torch.inference_mode():
        one, two = (task.measure(images, _seeded()) for _ in range(2))
        sheets = task.draw(images, _seeded())
    _require(isinstance(one, Measure), task, f"is measured by {type(one).__name__}", "return a Measure")
    shaped = all(values.shape == (b,) for values in (one.values, *one.baselines.values()))
    _require(shaped, task, "has a measure of another shape than [b]", "return a result and baselines for each image")
    finite = bool(torch.cat([one.values, *one.baselines.values()]).isfinite().all())
    _require(finite, task, f"has the measures {one.values.tolist()}", "make results and baselines finite")
    known = all(name in one.baselines for name in one._to_beat())
    _require(known, task, f"has no baseline {one.to_beat}", "name one of its baselines as to_beat")
    same = torch.equal(one.values, two.values)
    _require(same, task, "is measured differently with one generator", f"draw from generator alone; {_DRAW}")
    _require(bool(sheets), task, "draws no sheets", "return a Sheet from the question's sheets")
    for sheet in sheets:
        good = bool(sheet.caption) and all(column.shape[:2] == images.shape[:2] for column in sheet.columns.values())
        _require(good, task, f"draws the sheet {sheet.name}", "give it a caption, and images [b c h w] as columns")


def _check_gpu(task: Task, views: list[Tensor]) -> None:
    """Check on fake tensors that a step runs on a GPU without waiting for it, and a measure with a CPU's generator."""
    shapes, task = [view.shape for view in views], task.train()
    try:
        with fake_cuda():
            on_fake_cuda(task)
            with torch.autocast("cuda", torch.bfloat16):
                outcome = task(*(torch.empty(shape, device=CUDA) for shape in shapes), progress=0.5)
            task.after_step(0.5, torch.empty((), device=CUDA))
            _require(
                outcome.loss.device == CUDA, task, "has its loss on the CPU", "keep it on the device of the images"
            )
    except (Waits, DataDependentOutputException, DynamicOutputShapeException, RuntimeError) as problem:
        remedy = "see docs/how-to/contribute-task.md for what a step must not contain"
        raise PatchloomError(
            f"a step of the task {type(task).__name__} waits for a GPU, or fails on one ({problem}): {remedy}"
        ) from problem
    try:
        with fake_cuda_with_copies():
            on_fake_cuda(task)  # tensors of another block cannot be mixed with those of this one
            task.given(torch.empty(shapes[0], device=CUDA), _seeded())
    except (Waits, RuntimeError) as problem:
        raise PatchloomError(
            f"the task {type(task).__name__} cannot be measured on a GPU with a generator of the CPU ({problem}): "
            f"{_DRAW}"
        ) from problem
