"""What no run can have is refused before it begins: more memory for a step than there is, or more of the disc."""

from __future__ import annotations

import math
import shutil

from patchloom.errors import PatchloomError
from patchloom.files import size_in_words
from patchloom.memory import memory, resident
from patchloom.processes import alone
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import Settings
from patchloom.tasks import images_needed
from patchloom.train.sketch import Sketch, sketch, upper
from patchloom.waiting import Waiting

_GIB = 2**30
_SURE = 1 / 8  # a step that takes no more of the memory than this by a rough rule needs no counting
_MANY = 10_000  # patches of an image: the largest that people train on have 4,096


def refuse_too_large(settings: Settings, images: int, processes: int = 1) -> Sketch | None:
    """Refuse a run of which one step takes more than all of the memory, before any of it is taken.

    Args:
        settings: resolved.
        images: of a step in each process.
        processes: that share the memory of this machine; on a GPU each has its own.

    Returns:
        What was counted; None where a step is so small that there was no need.

    Raises:
        PatchloomError: so it is, or the settings do not fit each other.
    """
    there = memory(settings.device)[1] * _GIB / (processes if settings.device == "cpu" else 1)
    with Waiting("counting what a step takes"), alone():
        if upper(settings, images) <= _SURE * there:
            return None
        counted = sketch(settings, images)
    base = resident() if settings.device == "cpu" else 0.0
    parts = max(1, settings.devices * settings.nodes) if settings.strategy == "fsdp" else 1
    held = counted.least() - counted.sizes.state * (1 - 1 / parts) + base
    if held <= there:
        return counted
    least = max(1, images_needed(settings.task)[0])
    fitting = next((n for n in _halves(counted.images) if counted.least(n) + base < 0.8 * there), 0)
    patches = math.prod(settings.encoder_spec().grid)
    if patches > _MANY:
        sides = "x".join(map(str, settings.img_size))
        remedy = f"lower --img_size, which makes {patches:,} patches of an image at {sides}, or give larger patches"
    elif fitting >= least and settings.batch_size % counted.images == 0:
        times = counted.images // fitting
        batch = settings.batch_size // counted.images * fitting
        remedy = f"give --batch_size {batch} and --accumulate {times * settings.accumulate}, or take smaller images"
    elif counted.sizes.state + base > there:
        remedy = "choose a smaller --model, larger patches, or smaller images, heads and decoders"
    else:
        remedy = "choose smaller images, larger patches, or a smaller --model"
    state = f"{counted.sizes.state / _GIB:,.1f} of them for weights, gradients and moments"
    raise PatchloomError(
        f"this cannot be trained in the {there / _GIB:,.1f} GiB of memory that there are: a step of {counted.images} "
        f"images needs {held / _GIB:,.0f} GiB or more, {state}: {remedy}"
    )


def refuse_full_disc(folder: RunFolder, need: float) -> float:
    """Bytes that are free on the disc of a run's folder.

    Raises:
        PatchloomError: fewer than ``need``.
    """
    place = folder.path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        room = float(shutil.disk_usage(place).free)
    except OSError:  # what is written there will tell
        return float("inf")
    if need > room:
        raise PatchloomError(
            f"the run needs {size_in_words(need)} for its checkpoints and the encoder, and the disc of {folder.path} "
            f"has {size_in_words(room)} free: make room, choose another folder with --out, or a smaller --model"
        )
    return room


def _halves(images: int) -> list[int]:
    return [images // 2**k for k in range(1, images.bit_length()) if images % 2**k == 0]
