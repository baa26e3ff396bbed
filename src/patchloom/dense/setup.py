"""How an encoder and its controls are trained for maps or boxes, and on what: resolved before anything is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal

import numpy as np

from patchloom.data.decode import Unreadable
from patchloom.data.source import Data
from patchloom.data.splits import choose_indices, pick, splittable, with_groups
from patchloom.dense.annotations.base import Annotated, AnnotatedData, T
from patchloom.dense.recipes import R, SegmentRecipe, dense_recipe, held_out, usual_crops
from patchloom.dense.training import VALIDATED
from patchloom.dense.windows import starts
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.evaluate.classifier import PositionChoice, variant_of
from patchloom.evaluate.features import Precision, trains_in_bfloat16
from patchloom.evaluate.settings import EvalSettings, note_copies, place_in_run, print_notes, tell_colours, tell_leaks
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import input_size, patch_side, width
from patchloom.nets.finetune import Variant, at_size
from patchloom.nets.performance import choose_kernels
from patchloom.nets.swin import Encoder
from patchloom.runs.encoder import load_encoder
from patchloom.runs.held_out import seen_in_pretraining
from patchloom.sizes import in_pixels
from patchloom.system.distributed import first_decides, launch, launched_processes, world

# Training, validation and test images of an evaluation whose images are annotated.


_TEST_SHARE = 0.2


@dataclass(frozen=True)
class DenseParts(Generic[T]):
    """Training, validation and test images, and sentences on their origin.

    Attributes:
        train: what is trained on and, with ``held``, what validation images are split off.
        validation: images of the data's own to choose by.
        test: are read once, at the end.
        story: of the origin.
    """

    train: Annotated[T]
    validation: Annotated[T] | None
    test: Annotated[T]
    story: str

    def trained_on(self, share: float, seed: int) -> tuple[Annotated[T], Annotated[T] | None]:
        """Images to train on and to validate by, where ``share`` is that of a recipe: 0 has none of the latter."""
        if not share or self.validation is not None:
            return self.train, self.validation if share else None
        n = len(self.train)
        if n < 2:
            raise PatchloomError("a single training image cannot be split: use --validation 0")
        held, copies = choose_indices(splittable(self.train.images), held_out(share, n), seed)
        rest = np.setdiff1d(np.arange(n), np.concatenate([held, copies]))
        return self.train.subset(rest), self.train.subset(held)


def dense_parts(
    opened: AnnotatedData[T], settings: EvalSettings, note: str = "", run: str | Path | None = None
) -> DenseParts[T]:
    """The parts of annotated images: without test images of the data's own, a fifth is split off."""
    train, validation, brought = opened.train, opened.validation, opened.test
    if settings.group is not None:
        whole = train.subset(np.arange(len(train)))
        whole.images = with_groups(Data(train.images, None), settings.group).train
        train = whole
    whole_groups = "" if train.images.groups is None else " in whole groups"
    if brought is None:
        chosen, copies = choose_indices(train.images, round(_TEST_SHARE * len(train)), settings.seed)
        rest = np.setdiff1d(np.arange(len(train)), np.concatenate([chosen, copies]))
        train, test = train.subset(rest), train.subset(chosen)
        copied = f" Nothing was trained on {len(copies):,} exact copies of test images." if len(copies) else ""
        story = (
            f"The data brings no test images, so a fifth was split off for the test{whole_groups} (seed "
            f"{settings.seed}): pre-training may have seen those images, without their labels.{copied}"
        )
    else:
        test = brought
        brings = "its own validation and test images" if validation is not None else "its own test images"
        story = f"The data brings {brings}."
        if run is not None:
            story += seen_in_pretraining(run, test.images)
    n = len(train)
    if settings.max_train is not None and settings.max_train < n:
        chosen = np.setdiff1d(np.arange(n), pick(np.zeros(n, np.int64), n - settings.max_train, settings.seed))
        train = train.subset(chosen)
        own = " and, for as few labels as said, none of its validation images" if validation is not None else ""
        story += f" Only {settings.max_train:,} of {n:,} training images were used{own} (seed {settings.seed})."
        validation = None
    with StatusMessage("looking for copies among the images"):
        story += note_copies(train.images, test.images, looked=brought is None)
    tell_leaks(train.images, test.images, own=brought is not None)
    return DenseParts(train, validation, test, f"{note} {story}".strip())


_MOST = 4  # shorter side of images at native scale, over that of a window
_SAMPLED = 64  # images whose size is looked at


@dataclass(frozen=True)
class Setup(Generic[T, R]):
    """How all candidates are trained, and on what.

    Attributes:
        name: of the recipe.
        label: the recipe, or what else tells this training from others of the same data, in names of files.
        recipe: with every ``auto`` resolved.
        run: what the user typed for the encoder.
        vit, card: the encoder, and what is known of it.
        variant: its positions.
        parts: the images.
        train, held: images to train on, and to choose weights by.
        settings: of the evaluation.
        half: matrix products of the training are in bfloat16.
        kernels: torch or native, of the training.
        precision: of the test, as it was asked for.
        unused: values of the recipe that have no meaning here.
    """

    name: str
    label: str
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
    kernels: str
    precision: Precision
    unused: Sequence[str] = ()

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
        return {"recipe": self.name, **self.values, **how, **more}

    @property
    def values(self) -> dict[str, Any]:
        """Those of the recipe that have a meaning here."""
        return {name: value for name, value in self.recipe.plain().items() if name not in self.unused}

    def place(self, folder: str, suffix: str, what: str = "") -> Path | None:
        """Where a file of the evaluation lies in the run; None where that is no folder or file of the user's."""
        return place_in_run(
            self.run, self.parts.train.images.name, self.label, self.settings.seed, folder, suffix, what
        )


def set_up(
    run: str | Path,
    opened: Callable[[], AnnotatedData[T]],
    settings: EvalSettings,
    name: str,
    known: Mapping[str, R],
    changes: Mapping[str, Any],
    positions: PositionChoice,
    precision: Precision,
    label: str = "",
    unused: Sequence[str] = (),
) -> Setup[T, R]:
    """Load the encoder, open the images, and resolve the recipe."""
    if settings.batch_size != "auto":
        changes = {**changes, "batch": settings.batch_size}
    asked = dense_recipe(name, known, changes)
    vit, card = load_encoder(run, settings.model)
    if launched_processes() > 1 and world() == 1:
        fabric = launch(settings.at.type)
        first_decides(fabric, lambda: opened() and None)  # what is wrong with the images is said once
    found = opened()
    with ExitStack() as afterwards:
        afterwards.callback(print_notes, found.notes)  # also where something is refused, which they may explain
        parts = dense_parts(found, settings, card.note, run)
        tell_colours(parts.train.images, card)
        own = 0 if parts.validation is None else len(parts.validation)
        of_encoder = min(input_size(vit)), patch_side(vit), width(vit)
        recipe = asked.settled(len(parts.train), settings.at.type, own, *of_encoder)
        if recipe.batch % world():
            raise PatchloomError(
                f"--batch_size {recipe.batch} cannot be shared by {world()} processes: give a multiple"
            )
        train, held = parts.trained_on(recipe.validation, settings.seed)
        tests = VALIDATED * len(held or ()) + len(parts.test)
        recipe, scale = _at_scale(recipe, asked, train, tests, settings.at.type, patch_side(vit))
        if scale:
            print_notes([scale])
            parts = replace(parts, story=f"{scale}. {parts.story}")
    half = trains_in_bfloat16(settings.at, precision)
    variant = variant_of(positions, vit)
    resized = at_size(vit, card, (recipe.size, recipe.size), variant)  # what is fastest depends on the size
    kernels, _ = choose_kernels(resized, settings.at.type, half and not recipe.drop_path, recipe.batch)
    plan = name, label or name, recipe, run, vit, card, variant, parts, train, held, settings
    return Setup(*plan, half, kernels, precision, unused)


def _at_scale(recipe: R, asked: R, train: Annotated[T], tests: int, device: str, patch: int) -> tuple[R, str]:
    """The recipe with the scale at which images are seen, and a sentence on it, or "" if they are not reduced."""
    image = median_size(train)
    if not isinstance(recipe, SegmentRecipe) or not isinstance(asked, SegmentRecipe):
        factor = max(image) / recipe.size
        if factor <= 1:
            return recipe, ""
        whole = math.ceil(max(image) / patch) * patch
        reduced = f"Images are reduced x{factor:.1f} ({in_pixels(image)} at the median) to fit into {recipe.size}"
        return recipe, f"{reduced}x{recipe.size}: --size {whole} does not reduce them, and takes more time and memory"
    side, why = recipe.side, ""
    if asked.side == "auto":
        side, why = native_or_reduced(image, recipe.size, tests, usual_crops(device), patch)
        recipe = replace(recipe, side=side)
    native = window_count(image, None, recipe.size)
    windows = f"{native:,} windows of {recipe.size}x{recipe.size}"
    if isinstance(side, int) and side < min(image):
        factor = min(image) / side
        reduced = f"Images are reduced x{factor:.1f}, from {min(image)} to {side} pixels on the shorter side"
        return recipe, f"{reduced}{why}: --side native does not reduce them ({windows} an image)"
    if side == "native" and native > 1:
        return recipe, f"Images are seen at their own scale, {in_pixels(image)}, in {windows}"
    return recipe, ""


def native_or_reduced(
    image: tuple[int, int], size: int, tests: int, crops: int, patch: int
) -> tuple[int | Literal["native"], str]:
    """``--side`` where it is auto: native, or as near to it as fits, with the reason in brackets.

    Images up to `_MOST` times as large as a window are seen at their own scale, unless the windows of all tests take
    more than about twice as long as the usual training. Those no larger than a window are brought to its size.
    """
    if min(image) <= size:
        return size, ""
    most = 2 * 3 * crops  # forwards; a step of training costs about three
    native = window_count(image, None, size) * tests
    large = min(image) > _MOST * size
    if not large and native <= most:
        return "native", ""
    why = (
        f" (a window would show less than 1/{_MOST**2} of them)" if large else f" (else tests take {native:,} windows)"
    )
    sides = range(min(min(image), _MOST * size) // patch * patch, size, -patch)
    return next((side for side in sides if window_count(image, side, size) * tests <= most), size), why


def window_count(image: tuple[int, int], side: int | None, size: int) -> int:
    """Number of windows in which an image (h, w) is tested whose shorter side becomes ``side``; None leaves it."""
    factor = 1 if side is None else side / min(image)
    return math.prod(len(starts(round(length * factor), size)) for length in image)


def median_size(images: Annotated[T]) -> tuple[int, int]:
    """(h, w) at the median of some images."""
    sizes = []
    for i in np.linspace(0, len(images) - 1, min(_SAMPLED, len(images))).round().astype(int).tolist():
        try:
            sizes.append(images.size(i))
        except Unreadable:  # is reported where images are read
            continue
    height, width = np.median(sizes, axis=0) if sizes else (0, 0)
    return round(height), round(width)
