"""Pictures of a run's pretext task: the hidden parts of images and the model's predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from patchloom.data.augment import cuts_natively
from patchloom.data.loader import plain_batches
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import evenly_spaced
from patchloom.data.stats import normalize
from patchloom.look.sheet import Title, draw_sheet
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.options.verbs import SHEET_ROWS
from patchloom.questions.question import Measure
from patchloom.runs.settings import ResolvedSettings
from patchloom.tasks.custom import label
from patchloom.tasks.task import Task


def draw_task(
    task: Task,
    source: Source,
    card: EncoderCard,
    folder: Path,
    device: torch.device | str = "cpu",
    images: int = SHEET_ROWS,
    seed: int = 0,
    title: Callable[[Measure], Title] | None = None,
) -> list[Path]:
    """Draw the task's sheets for images spread evenly over ``source``, because files may be sorted by class."""
    shown, rest = evenly_spaced(len(source), images), evenly_spaced(len(source), task.pictured)
    rest = [i for i in rest if i not in shown][: max(0, task.pictured - len(shown))]
    some = source.subset([*shown, *rest])
    reading: dict[str, Any] = {
        "channels": card.own_spec.channels,
        "device": device,
        "native": cuts_natively(task.augment),
    }
    h, w = task.augment.size
    batches = plain_batches(some, (h, w), len(some), **reading)
    given = normalize(next(batches).views[0], card.mean, card.std)
    was_training = task.training
    task.eval()
    with torch.inference_mode():
        sheets = task.draw(given, torch.Generator().manual_seed(seed))
        above = None if title is None else title(task.measure(given, torch.Generator().manual_seed(seed)))
    task.train(was_training)
    return [
        draw_sheet(sheet, card.mean, card.std, folder, above, images, order, card.modality)
        for order, sheet in enumerate(sheets)
    ]


def title_of(
    name: str,
    settings: ResolvedSettings,
    steps: tuple[int, int],
    rows: Sequence[Mapping[str, str | float]],
    doubt: str,
    measure: Measure,
    noun: str = "images",
) -> Title:
    """Return the title of a run's sheets: run, task, epoch, and the last held-out measure with the baseline to beat."""
    done, whole = steps
    measured = next((row for row in reversed(rows) if row.get("held_out")), {})
    epoch = settings.epochs * done / whole if whole else float((rows or [{}])[-1].get("epoch") or 0)
    said = f"epoch {epoch:.4g} of {settings.epochs:,}"
    values = {name.removeprefix("baseline:"): value for name, value in measured.items() if name.startswith("baseline:")}
    beaten = replace(measure, baselines={name: torch.tensor([float(value)]) for name, value in values.items() if value})
    if measured:
        before = float(measured["epoch"])
        when = f" (at epoch {before:.4g})" if abs(before - epoch) > 1e-3 * settings.epochs else ""
        images = f"{noun} that pre-trained weights may have seen" if doubt else f"held-out {noun}"
        said += f"; on {images}{when}: {measure.name} {measure.result.compact(float(measured['held_out']))}"
        if beaten.baselines:
            beat = beaten.baseline_to_beat()
            said += f", {beat} {measure.result.compact(beaten.means()[beat])}"
    return Title(f"{name}: {label(settings.task['name'])}", f"{said[0].upper()}{said[1:]}")
