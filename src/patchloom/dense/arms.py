"""What segmentation and detection share: models that are trained alike, and tested once, at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchloom.dense.annotations.base import Annotated, T
from patchloom.dense.checkpoint import DenseCard, DenseTask, is_dense, save_dense
from patchloom.dense.recipes import R
from patchloom.dense.setup import Setup, median_size
from patchloom.dense.training import DenseTraining
from patchloom.display import TimeLeft, duration, is_first, progress_message
from patchloom.errors import PatchloomError
from patchloom.evaluate.results import Drawing, Report, Row, note_unreadable
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.training import format_recipe_value, temporary_seed
from patchloom.nets.encode import patch_side
from patchloom.system.distributed import rank, smallest, world
from patchloom.system.hardware import free_memory, memory, memory_shortage, resident

_SHOWN = 2  # of the best images, and of the worst
_MEASURED_FROM = 50  # steps: fewer are made sooner than told about
_GIB = 2**30
_SLACK = 1.15  # of memory over what is counted, which allocators do not give back at once
_FEWEST = 4  # patches of a side that is proposed
_FILLED = 0.95  # the share of what is free that a proposal fills


@dataclass(frozen=True)
class DenseCandidate:
    """A model to be trained and tested: with the encoder, or a control.

    Attributes:
        name: in the report.
        build: makes the model; random values come from torch's global generator.
    """

    name: str
    build: Callable[[], nn.Module]


def train_each(
    candidates: Sequence[DenseCandidate], setup: Setup[T, R], begin: Callable[[Any], DenseTraining[T]]
) -> list[tuple[Any, dict[str, Any]]]:
    """Train every candidate; no test image is read."""
    with temporary_seed(setup.settings.seed), _enough_memory(setup.recipe.batch):
        _foresee_memory(candidates, setup, begin(candidates[0].build()))
    left, found = _announced(candidates, setup, begin), []
    for candidate in candidates:
        with temporary_seed(setup.settings.seed), _enough_memory(setup.recipe.batch):
            trained = begin(candidate.build()).run(candidate.name, left)
        found.append((trained.model.cpu(), trained.chosen))
    return found


def _announced(
    candidates: Sequence[DenseCandidate], setup: Setup[T, R], begin: Callable[[Any], DenseTraining[T]]
) -> TimeLeft:
    """Say what will be trained, and how long all of it takes, from a few steps."""
    steps = setup.recipe.steps
    left = TimeLeft(len(candidates) * steps)
    if steps < _MEASURED_FROM:
        return left
    with (
        temporary_seed(setup.settings.seed),
        progress_message("measuring a few steps"),
        _enough_memory(setup.recipe.batch),
    ):
        left.seconds = begin(candidates[0].build()).seconds_of_step()
    if is_first():
        names = ", then ".join(candidate.name for candidate in candidates)
        by = f" by {world()} processes" if world() > 1 else ""
        print(
            f"Training {names}{by}: {steps:,} steps each. All of it takes about "
            f"{duration(left.steps * left.seconds)}, and the time of validation and test.",
            flush=True,
        )
    return left


def _foresee_memory(candidates: Sequence[DenseCandidate], setup: Setup[T, R], training: DenseTraining[T]) -> None:
    """Print how much memory training and tests will have in use, counted before any of it is taken."""
    kind = training.device.type
    if kind not in ("cpu", "cuda"):  # others do not tell what is free
        return
    sharing, images = (world() if kind == "cpu" else 1), training.batch
    weights = [*training.model.parameters()]
    own, trained = (sum(one.nbytes for one in some) for some in (weights, [w for w in weights if w.requires_grad]))
    # models that are trained already, and the best weights, are on the CPU
    kept = own * (len(candidates) - 1 + (setup.held is not None)) if kind == "cpu" else 0
    least = min(images, 2 if any(isinstance(one, nn.BatchNorm2d) for one in training.model.modules()) else 1)
    with progress_message("counting what a step takes"):
        counted = training.bytes_of_step(images)
        if counted is None:
            return
        tests = kept + _SLACK * training.bytes_of_test(median_size(setup.train))
    free, there = smallest(int(free_memory(kind) * _GIB)) / sharing, memory(kind)[1] * _GIB / sharing
    need, base = kept + _SLACK * counted, resident() if kind == "cpu" else 0.0
    most = max(need, tests)
    if most <= free:
        if is_first():
            each = " in each process" if world() > 1 else ""
            print(f"needs about {(base + most) / _GIB:.1f} of {there / _GIB:.1f} GiB of memory{each}", flush=True)
        return
    (h, w), patch, room = setup.size, patch_side(setup.vit), _FILLED * free
    state, few = kept + _SLACK * (own + 3 * trained), kept + _SLACK * (training.bytes_of_step(least) or counted)
    side = int(h * math.sqrt(max(0.0, room - state) / (few - state))) // patch * patch
    if need <= free:
        remedy = "give --side size, which reduces images to a window"
    elif few <= room:
        fitting = least + int((room - few) / (need - few) * (images - least))
        remedy = f"give --batch_size {fitting * world()}, or lower --size"
    elif side >= _FEWEST * patch:
        remedy = f"give --size {side} with --batch_size {least * world()}"
    else:
        remedy = "choose a smaller encoder"
    work = f"a step of {images} images of {h}x{w}" if need > free else "testing an image"
    raise PatchloomError(
        f"{work} needs about {most / _GIB:,.1f} GiB of memory, and {free / _GIB:,.1f} of {there / _GIB:,.1f} GiB are "
        f"free: {remedy}"
    )


@contextmanager
def _enough_memory(images: int) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as problem:
        if (need := memory_shortage(problem)) is None:
            raise
        raise PatchloomError(
            f"there is too little memory for {images} images at once ({need}): lower --size or --batch_size"
        ) from problem


def check_outputs(run: str | Path, settings: EvalSettings, from_scratch: bool, save: bool, out: str | None) -> None:
    """Refuse what cannot be saved."""
    if out is not None:
        _check_file(Path(out))
    if save and out is None and str(run).startswith("timm:"):
        raise PatchloomError(f"{run} has no folder for its model: give --out FILE")
    if out is not None and settings.seeds > 1:
        raise PatchloomError(f"--out names one file, but --seeds {settings.seeds} gives several: use --save true")
    if from_scratch and (save or out is not None):
        raise PatchloomError("--from_scratch saves no model: leave --save and --out away")


def _check_file(path: Path) -> None:
    """Refuse to write a model where something else is, or cannot be."""
    if path.suffix != ".safetensors":
        raise PatchloomError(f"--out is the file of a model, so its name ends in .safetensors, which {path} does not")
    if path.is_dir() or (path.exists() and not is_dense(path)):
        raise PatchloomError(f"{path} is there already, and no model of segment or detect: give --out another name")


def save_model(
    model: nn.Module,
    setup: Setup[T, R],
    kind: DenseTask,
    side: int | None,
    head: dict[str, Any],
    out: str | None,
    ids: tuple[int, ...] = (),
) -> None:
    """Save the encoder's model, for `patchloom.predict`."""
    folder = {"segment": "segmented", "detect": "detected"}[kind]
    path = setup.place(folder, ".safetensors") if out is None else Path(out)
    assert path is not None, "check_outputs comes first"
    parts, settings = setup.parts, setup.settings
    encoder = setup.card, setup.variant, setup.size, side, head, setup.classes
    of_data = parts.train.images.name, parts.test.fingerprint(), settings.seed, setup.row_settings()
    if rank() == 0:
        save_dense(model, DenseCard(kind, *encoder, *of_data, ids), path)
        print(f"  {setup.card.name}: saved as {path}", flush=True)


def _recipe_sentence(setup: Setup[T, R]) -> str:
    """What the training was, as the report has it."""
    values = {**setup.values, "precision": "bfloat16" if setup.half else "float32"}
    recipe = ", ".join(f"{name.replace('_', ' ')} {format_recipe_value(value)}" for name, value in values.items())
    chosen = "The last weights are tested"
    if setup.held is not None:
        chosen = f"The step whose weights are tested was chosen on {len(setup.held):,} images that were not trained on"
    by = f" by {world()} processes" if world() > 1 else ""
    return (
        f"Trained on {len(setup.train):,} images{by} by the recipe {setup.name}: {recipe}. {chosen}. Tested once, on "
        f"{len(setup.parts.test):,} others."
    )


def check_read(test: Annotated[T], lost: Sequence[str]) -> None:
    """Refuse to report on nothing."""
    if len(lost) == len(test):
        raise PatchloomError(
            f"none of the {len(test):,} test images could be read, beginning with {lost[0]}: mend them"
        )


def dense_report(
    setup: Setup[T, R],
    title: str,
    measure: str,
    rows: Sequence[Sequence[Row]],
    said: Sequence[str],
    lost: Sequence[str],
    drawings: tuple[Drawing, ...],
) -> Report:
    """A report whose lines are measures, and whose columns are the encoder and its controls."""
    n = len(setup.parts.test) - len(lost)
    controls = " and ".join(f"{of[0].number()} {of[0].encoder}" for of in rows[1:])
    against = f" against {controls}" if controls else ""
    sentences = [said[0], _recipe_sentence(setup), setup.parts.story, *said[1:], *note_unreadable(lost, "test images")]
    return Report(
        rows=[row for of in rows for row in of],
        protocol=" ".join(sentences),
        headline=f"{title}: {rows[0][0].text()} {measure}{against} on {n:,} test images.",
        quoted=tuple(of[0] for of in rows),
        data=setup.parts.test.images.name,
        fingerprint=setup.parts.test.fingerprint(),
        seed=setup.settings.seed,
        n_test=n,
        across="measure",
        down=True,
        drawings=drawings,
    ).beside(True)


def best_and_worst(scores: Sequence[float]) -> list[int]:
    """Numbers of the images to be shown: those with the highest scores, then those with the lowest; nan is no score."""
    there = sorted((i for i, score in enumerate(scores) if score == score), key=lambda i: -scores[i])
    return list(dict.fromkeys([*there[:_SHOWN], *there[-_SHOWN:]]))
