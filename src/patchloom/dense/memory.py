"""Memory of a training with maps or boxes, counted before any of it is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from patchloom.dense.annotations.base import Annotated, T
from patchloom.dense.recipes import R
from patchloom.display import StatusMessage, is_first, print_line
from patchloom.errors import PatchloomError
from patchloom.evaluate.select import Candidate, Plan
from patchloom.evaluate.trainer import Trainer
from patchloom.nets.encode import patch_side
from patchloom.system.device import free_memory, memory, resident
from patchloom.system.distributed import smallest, world

_GIB = 2**30
_SLACK = 1.15  # of memory over what is counted, which allocators do not give back at once
_FEWEST = 4  # patches of a side that is proposed
_FILLED = 0.95  # the share of what is free that a proposal fills


def foresee_memory(
    candidates: Sequence[Candidate],
    plan: Plan[Annotated[T], R],
    *,
    bytes_of_test: Callable[[Trainer, Any], int] | None,
) -> None:
    """Print how much memory training and tests will have in use; refuse a step or a test that does not fit.

    ``bytes_of_test`` returns the peak bytes of a test, given a training and the plan; None if a step takes more.
    """
    kind = plan.settings.torch_device.type
    if kind not in ("cpu", "cuda"):  # others do not tell what is free
        return
    train, held = plan.parts.trained_on(plan.recipe, plan.settings)
    ours = candidates[0]
    trainer = plan.begin(ours.build(plan.recipe), ours.card, plan.recipe, train, held)
    model: Any = trainer.model
    sharing = world() if kind == "cpu" else 1
    images = -(-plan.recipe.batch // world() // plan.settings.accumulate)
    own = sum(one.nbytes for one in model.parameters())
    trained = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    # models that are trained already, and the best weights, are on the CPU
    kept = own * (len(candidates) - 1 + (held is not None)) if kind == "cpu" else 0
    least = min(images, 2 if any(isinstance(one, _BatchNorm) for one in model.modules()) else 1)
    with StatusMessage("counting what a step takes"):
        counted = trainer.bytes_of_step(images)
        if counted is None:
            return
        tests = 0.0 if bytes_of_test is None else kept + _SLACK * bytes_of_test(trainer, plan)
    free, there = smallest(int(free_memory(kind) * _GIB)) / sharing, memory(kind)[1] * _GIB / sharing
    need, base = kept + _SLACK * counted, resident() if kind == "cpu" else 0.0
    most = max(need, tests)
    if most <= free:
        if is_first():
            each = " in each process" if world() > 1 else ""
            print_line(f"needs about {(base + most) / _GIB:.1f} of {there / _GIB:.1f} GiB of memory{each}")
        return
    (h, w), patch, room = model.size, patch_side(model.inner_encoder()), _FILLED * free
    state, few = kept + _SLACK * (own + 3 * trained), kept + _SLACK * (trainer.bytes_of_step(least) or counted)
    side = int(h * math.sqrt(max(0.0, room - state) / (few - state))) // patch * patch
    if need <= free:
        remedy = "give --side size, which reduces images to a window"
    elif few <= room:
        fitting = least + int((room - few) / (need - few) * (images - least))
        remedy = f"give --batch_size {fitting * world()}, raise --accumulate, or lower --size"
    elif side >= _FEWEST * patch:
        remedy = f"give --size {side} with --batch_size {least * world()}"
    else:
        remedy = "choose a smaller encoder"
    work = f"a step of {images} images of {h}x{w}" if need > free else "testing an image"
    raise PatchloomError(
        f"{work} needs about {most / _GIB:,.1f} GiB of memory, and {free / _GIB:,.1f} of {there / _GIB:,.1f} GiB are "
        f"free: {remedy}"
    )
