"""What segmentation and detection share: models that are trained alike, and tested once, at the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import torch
from torch import nn

from patchloom.data.annotated.base import Annotated, AnnotatedData, T
from patchloom.errors import PatchloomError
from patchloom.evaluate.classifier import PositionChoice, variant_of
from patchloom.evaluate.dense.models import DenseCard, Kind, save_dense
from patchloom.evaluate.dense.parts import DenseParts, dense_parts
from patchloom.evaluate.dense.recipes import R, dense_recipe
from patchloom.evaluate.dense.training import DenseTraining
from patchloom.evaluate.features import Precision, trains_in_bfloat16
from patchloom.evaluate.fit import seeded
from patchloom.evaluate.pace import TimeLeft, waiting_for
from patchloom.evaluate.report import Drawing, Report, Row, lost_images
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trained import in_words
from patchloom.launch import first_decides, launch, started
from patchloom.nets.dense.maps import at_size
from patchloom.nets.encode import input_size, patch_side, width
from patchloom.nets.hierarchical import Encoder
from patchloom.nets.native.choice import choose_kernels
from patchloom.nets.variants import Variant
from patchloom.nets.weights import EncoderCard
from patchloom.processes import rank, world
from patchloom.runs.encoder import load_encoder
from patchloom.waiting import duration, is_first

_MEASURED_FROM = 50  # steps: fewer are made sooner than told about


@dataclass(frozen=True)
class Candidate:
    """A model to be trained and tested: with the encoder, or a control.

    Attributes:
        name: in the report.
        build: makes the model; random values come from torch's global generator.
    """

    name: str
    build: Callable[[], nn.Module]


@dataclass(frozen=True)
class Setup(Generic[T, R]):
    """How all candidates are trained, and on what.

    Attributes:
        name: of the recipe.
        recipe: with every ``auto`` resolved.
        run: what the user typed for the encoder.
        vit, card: the encoder, and what is known of it.
        variant: its positions.
        parts: the images.
        train, held: images to train on, and to choose weights by.
        settings: of the evaluation.
        half: matrix products of the training are in bfloat16.
        native: attention is by our own kernels.
        precision: of the test, as it was asked for.
    """

    name: str
    recipe: R
    run: str | Path
    vit: Encoder
    card: EncoderCard
    variant: Variant
    parts: DenseParts[T]
    train: Annotated[T]
    held: Annotated[T] | None
    settings: EvalSettings
    half: bool
    native: bool
    precision: Precision

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names."""
        return self.parts.train.classes

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of what models are given, in pixels."""
        return self.recipe.size, self.recipe.size

    def encoder(self, vit: Encoder) -> Encoder:
        """A copy of an encoder of the same kind for images of that size."""
        return at_size(vit, self.card, self.size, self.variant, self.recipe.drop_path)

    def row_settings(self, **more: Any) -> dict[str, Any]:
        """Settings of a row of the report."""
        how = {"positions": self.variant, "precision": "bfloat16" if self.half else "float32"}
        return {"recipe": self.name, **self.recipe.plain(), **how, **more}

    def place(self, folder: str, suffix: str, what: str = "") -> Path | None:
        """Where a file of the evaluation lies in the run; None where that is no folder or file of the user's."""
        if str(self.run).startswith("timm:"):
            return None
        home = Path(self.run) if Path(self.run).is_dir() else Path(self.run).parent
        name = re.sub(r"[^\w.-]+", "-", Path(self.parts.train.images.name).name)
        return home / folder / f"{what}{name}-{self.settings.seed}{suffix}"


def set_up(
    run: str | Path,
    opened: Callable[[], AnnotatedData[T]],
    settings: EvalSettings,
    name: str,
    known: Mapping[str, R],
    changes: Mapping[str, Any],
    positions: PositionChoice,
    precision: Precision,
) -> Setup[T, R]:
    """Load the encoder, open the images, and resolve the recipe.

    Args:
        run, settings: as in `patchloom.evaluate.evaluate`.
        opened: opens the images.
        name: of the recipe.
        known: recipes by name.
        changes: of its values.
        positions, precision: as options of the protocol.

    Raises:
        PatchloomError: no such encoder, data or recipe, or values that do not fit.
    """
    if settings.batch_size != "auto":
        changes = {**changes, "batch": settings.batch_size}
    asked = dense_recipe(name, known, changes)
    vit, card = load_encoder(run, settings.model)
    if started() > 1 and world() == 1:
        fabric = launch(settings.at.type)
        first_decides(fabric, lambda: opened() and None)  # what is wrong with the images is said once
    parts = dense_parts(opened(), settings, card.note)
    own = 0 if parts.validation is None else len(parts.validation)
    of_encoder = min(input_size(vit)), patch_side(vit), width(vit)
    recipe = asked.settled(len(parts.train), settings.at.type, own, *of_encoder)
    if recipe.batch % world():
        raise PatchloomError(f"--batch_size {recipe.batch} cannot be shared by {world()} processes: give a multiple")
    train, held = parts.trained_on(recipe.validation, settings.seed)
    half = trains_in_bfloat16(settings.at, precision)
    kernels, _ = choose_kernels(vit, settings.at.type, half and not recipe.drop_path, recipe.batch)
    plan = name, recipe, run, vit, card, variant_of(positions, vit), parts, train, held, settings
    return Setup(*plan, half, kernels == "native", precision)


def train_each(
    candidates: Sequence[Candidate], setup: Setup[T, R], begin: Callable[[Any], DenseTraining[T]]
) -> list[tuple[Any, dict[str, Any]]]:
    """Train every candidate; no test image is read.

    Args:
        candidates: the encoder's first, then its controls.
        setup: how.
        begin: a training of a model, before its first step.

    Returns:
        Each model, on the CPU, and what was chosen on validation images.

    Raises:
        PatchloomError: a non-finite loss, too little memory on the device, or images that cannot be read.
        Stopped: somebody stopped it; the same command goes on.
    """
    left, found = _announced(candidates, setup, begin), []
    for candidate in candidates:
        with seeded(setup.settings.seed), _enough_memory(setup.recipe.batch):
            trained = begin(candidate.build()).run(candidate.name, left)
        found.append((trained.model.cpu(), trained.chosen))
    return found


def _announced(
    candidates: Sequence[Candidate], setup: Setup[T, R], begin: Callable[[Any], DenseTraining[T]]
) -> TimeLeft:
    """Say what will be trained, and how long all of it takes, from a few steps."""
    steps = setup.recipe.steps
    left = TimeLeft(len(candidates) * steps)
    if steps < _MEASURED_FROM:
        return left
    with seeded(setup.settings.seed), waiting_for("measuring a few steps"), _enough_memory(setup.recipe.batch):
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


@contextmanager
def _enough_memory(images: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as problem:
        raise PatchloomError(
            f"the device has too little memory for {images} images at once: lower --batch_size or --size"
        ) from problem


def check_outputs(settings: EvalSettings, from_scratch: bool, save: bool, out: str | None) -> None:
    """Refuse what cannot be saved.

    Raises:
        PatchloomError: several models for one file, or nothing to be saved.
    """
    if out is not None and settings.seeds > 1:
        raise PatchloomError(f"--out names one file, but --seeds {settings.seeds} gives several: use --save true")
    if from_scratch and (save or out is not None):
        raise PatchloomError("--from_scratch saves no model: leave --save and --out away")


def keep(
    model: nn.Module,
    setup: Setup[T, R],
    kind: Kind,
    side: int | None,
    head: dict[str, Any],
    out: str | None,
    ids: tuple[int, ...] = (),
) -> None:
    """Save the encoder's model, for `patchloom.predict.predict`.

    Args:
        model: of the encoder.
        setup: how it was trained.
        kind: segment or detect.
        side: of the recipe, if it has one.
        head: options of the head.
        out: the file; in the run if absent.
        ids: of the classes in label maps.

    Raises:
        PatchloomError: there is no run, and no file is named.
    """
    folder = {"segment": "segmented", "detect": "detected"}[kind]
    path = setup.place(folder, ".safetensors") if out is None else Path(out)
    if path is None:
        raise PatchloomError(f"{setup.card.name} has no folder for its model: give --out FILE")
    parts, settings = setup.parts, setup.settings
    encoder = setup.card, setup.variant, setup.size, side, head, setup.classes
    of_data = parts.train.images.name, parts.test.fingerprint(), settings.seed, setup.row_settings()
    if rank() == 0:
        save_dense(model, DenseCard(kind, *encoder, *of_data, ids), path)
        print(f"  {setup.card.name}: saved as {path}", flush=True)


def _recipe_sentence(setup: Setup[T, R]) -> str:
    """What the training was, as the report has it."""
    values = {**setup.recipe.plain(), "precision": "bfloat16" if setup.half else "float32"}
    recipe = ", ".join(f"{name.replace('_', ' ')} {in_words(value)}" for name, value in values.items())
    chosen = "The last weights are tested"
    if setup.held is not None:
        chosen = f"The step whose weights are tested was chosen on {len(setup.held):,} images that were not trained on"
    by = f" by {world()} processes" if world() > 1 else ""
    return (
        f"Trained on {len(setup.train):,} images{by} by the recipe {setup.name}: {recipe}. {chosen}. Tested once, on "
        f"{len(setup.parts.test):,} others."
    )


def report_of(
    setup: Setup[T, R],
    title: str,
    measure: str,
    rows: Sequence[Sequence[Row]],
    said: Sequence[str],
    lost: Sequence[str],
    verdict: str,
    drawings: tuple[Drawing, ...],
) -> Report:
    """A report whose lines are measures, and whose columns are the encoder and its controls.

    Args:
        setup: how all were trained.
        title: what was done, as the headline begins.
        measure: what is quoted, such as mIoU.
        rows: of each candidate; the first one is quoted.
        said: sentences on what was done; those on the data are added.
        lost: names of test images that could not be read.
        verdict: a sentence on the difference from the first control, or nothing.
        drawings: pictures to be drawn.
    """
    n = len(setup.parts.test) - len(lost)
    controls = " and ".join(f"{of[0].number()} {of[0].encoder}" for of in rows[1:])
    against = f" against {controls}" if controls else ""
    sentences = [said[0], _recipe_sentence(setup), setup.parts.story, *said[1:], *lost_images(lost, "test images")]
    return Report(
        rows=[row for of in rows for row in of],
        protocol=" ".join(sentences),
        headline=f"{title}: {rows[0][0].text()} {measure}{against} on {n:,} test images. {verdict}".rstrip(),
        quoted=tuple(of[0] for of in rows),
        data=setup.parts.test.images.name,
        fingerprint=setup.parts.test.fingerprint(),
        seed=setup.settings.seed,
        n_test=n,
        across="measure",
        down=True,
        drawings=drawings,
    )
