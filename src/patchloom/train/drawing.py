"""Pictures of a run while it trains and at its end: the sheets of its task on held-out images, and its curves."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch

from patchloom.look import draw_curves
from patchloom.look.pictures import draw_task, title_of
from patchloom.nets.encode import patch_count
from patchloom.questions.measure import Measure
from patchloom.runs.folder import RunFolder
from patchloom.runs.settings import Settings
from patchloom.sound import in_words
from patchloom.tasks.task import Task
from patchloom.train.validation import Validation

# Operations of training between two drawings. A drawing takes 0.5 to 0.9 s of a CPU core, and so many operations half a
# minute of one or more: some 2 % of the time go into pictures. A run that is shorter has them soon, at its end.
_BETWEEN = 5e12


def drawn_after(steps: int, measured: Collection[int], images_per_step: int, task: Task) -> set[int]:
    """Steps after which pictures are drawn on the way: 0 (before the first one), and those of some measures.

    There is enough training between two of them that they cost little, and nothing at the end, which draws anyhow.
    Which they are follows from the settings alone, as with the measures.

    Args:
        steps: of the whole training.
        measured: steps after which there is a measure.
        images_per_step: of all processes.
        task: whose size says how much work a step is.
    """
    each = images_per_step * operations(task)
    drawn: set[int] = set()
    last = -_BETWEEN  # so that the first picture comes before the first step
    for step in sorted({0, *measured}):
        if (step * each - last) >= _BETWEEN and (steps - step) * each >= _BETWEEN:
            drawn.add(step)
            last = step * each
    return drawn


def operations(task: Task) -> float:
    """Roughly those of training on an image: 2 a weight and patch, and twice as many on the way back.

    Blocks of the encoder that stay as they are have no way back (``--train_blocks``). Patches that are masked, and
    decoders that see less than the encoder, are not looked at: it is the size that counts.
    """
    trained = sum(one.numel() for one in task.parameters() if one.requires_grad)
    kept = sum(one.numel() for one in task.encoder.parameters() if not one.requires_grad and one.ndim == 2)
    return (6.0 * trained + 2.0 * kept) * patch_count(task.encoder)


def draw_run(
    validation: Validation,
    folder: RunFolder,
    settings: Settings,
    measure: Measure,
    place: tuple[int, int],
    device: torch.device,
    ended: bool = False,
) -> list[Path]:
    """Draw the sheets of a run's task, and its curves, into the folder of its pictures; they replace those before.

    Args:
        validation: has the task and the held-out images.
        folder: of the run; its ``metrics.csv`` is read for the curves.
        settings: resolved.
        measure: the last one.
        place: steps that were done when it was taken, and those of the whole run. Before the first one there are no
            curves yet.
        device: where the task is.
        ended: the run has, of whichever step these weights are.

    Returns:
        The files.
    """
    card, doubt, (done, whole) = validation.card, validation.doubt, place
    folder.check_lock()
    files = []
    if done or ended:
        shown = in_words("images that may be known by heart" if doubt else "held-out images", card.sound)
        files.append(draw_curves(folder.metrics, folder.pictures / "curves.png", measure.name, images=shown))
    means = {f"baseline:{name}": value for name, value in measure.means().items()}
    row = {"epoch": settings.epochs * done / whole, "held_out": measure.value} | means
    title = partial(title_of, folder.name, settings, place, [row], doubt)
    return [*files, *draw_task(validation.task, validation.held_out, card, folder.pictures, device, title=title)]
