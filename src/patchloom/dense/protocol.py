"""The protocol that segmentation and detection share: its parts, its settings, and the models that are compared.

Everything is resolved before the first training; the test images are used once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from patchloom.data.decode import Unreadable
from patchloom.data.source import Data, Source
from patchloom.data.splits import choose_indices, pick, some_groups, splittable, with_groups
from patchloom.dense.annotations.base import Annotated, AnnotatedData, T
from patchloom.dense.checkpoint import DenseCard, DenseTask, is_dense, save_dense
from patchloom.dense.detector import Detector
from patchloom.dense.recipes import R, Requested, ResolvedSegmentRecipe, SegmentRecipe, held_out, usual_crops
from patchloom.dense.segmenter import Segmenter
from patchloom.dense.training import DenseTraining, images_scored
from patchloom.dense.windows import starts
from patchloom.display import StatusMessage, duration, is_first, print_line, progress_message
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.classifier import PositionChoice, variant_of
from patchloom.evaluate.features import Precision, trains_in_bfloat16
from patchloom.evaluate.settings import (
    EvalSettings,
    note_copies,
    open_together,
    place_in_run,
    print_input_notes,
    print_leak_notes,
    print_notes,
    share_steps,
)
from patchloom.evaluate.training import SCRATCH, about_control, format_recipe_value, temporary_seed
from patchloom.nets.checkpoints.format import EncoderCard, untrained_twin
from patchloom.nets.encode import input_size, patch_side, width
from patchloom.nets.finetune import Variant, at_size
from patchloom.nets.performance import choose_kernels
from patchloom.nets.swin import Encoder
from patchloom.pace import Pace
from patchloom.results.claims import START
from patchloom.results.evaluation import Drawing, Evaluation, as_control, note_unreadable
from patchloom.results.result import Result
from patchloom.runs.encoder import load_start
from patchloom.runs.held_out import describe_seen, seen_in_pretraining
from patchloom.sizes import in_pixels
from patchloom.system.distributed import rank, refused_by_all, smallest, world
from patchloom.system.hardware import free_memory, memory, memory_shortage, resident
from patchloom.system.load import BackgroundLoad

# Training, validation and test images.

_TEST_SHARE = 0.2


@dataclass(frozen=True)
class DenseParts(Generic[T]):
    """Training, validation and test images, and sentences on their origin.

    Attributes:
        train: training images; with ``held``, validation images are split off.
        validation: validation images of the data.
        test: test images, read once at the end.
        story: sentences on the origin.
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


def _with_images(annotated: Annotated[T], images: Source) -> Annotated[T]:
    """Return the same annotations beside ``images``, the same ones but in groups."""
    same = annotated.subset(np.arange(len(annotated)))
    same.images = images
    return same


def dense_parts(
    opened: AnnotatedData[T], settings: EvalSettings, note: str = "", run: str | Path | None = None
) -> DenseParts[T]:
    """The parts of annotated images: without test images of the data's own, a fifth is split off."""
    train, validation, brought = opened.train, opened.validation, opened.test
    if settings.group is not None:
        grouped = with_groups(Data(train.images, None if brought is None else brought.images), settings.group)
        train = _with_images(train, grouped.train)
        if brought is not None and grouped.test is not None:
            brought = _with_images(brought, grouped.test)
    whole_groups = "" if train.images.groups is None else " in whole groups"
    if brought is None:
        chosen, copies = choose_indices(train.images, round(_TEST_SHARE * len(train)), settings.seed)
        rest = np.setdiff1d(np.arange(len(train)), np.concatenate([chosen, copies]))
        train, test = train.subset(rest), train.subset(chosen)
        copied = f" Nothing was trained on {len(copies):,} exact copies of test images." if len(copies) else ""
        story = (
            f"The data brings no test images, so a fifth was split off for the test{whole_groups} (seed "
            f"{settings.seed}): {describe_seen(run, test.images)}.{copied}"
        )
        if settings.group is not None:
            story += f" Test groups: {some_groups(test.images, settings.group)}; intervals are over groups."
    else:
        test = brought
        brings = "its own validation and test images" if validation is not None else "its own test images"
        story = f"The data brings {brings}."
        story += "" if test.images.groups is None else " Intervals are over its groups."
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
    print_leak_notes(train.images, test.images, own=brought is not None)
    return DenseParts(train, validation, test, f"{note} {story}".strip())


_MOST = 4  # shorter side of images at native scale, over that of a window
_SAMPLED = 64  # images whose size is looked at


@dataclass(frozen=True)
class Setup(Generic[T, R]):
    """Recipe, data and device shared by all candidates.

    Attributes:
        name: name of the recipe.
        label: name of this training in file names: the recipe, or what distinguishes it from others of the same data.
        recipe: values of the recipe.
        run: encoder as typed by the user.
        vit, card: the encoder and its card.
        start: the weights that an adapted encoder began with, and their card; None for one from random weights.
        variant: position embeddings of the encoder.
        parts: the images.
        train, held: images for training, and for choosing weights.
        settings: settings of the evaluation.
        half: whether matrix products of the training are in bfloat16.
        kernels: kernels of the training, torch or native.
        precision: requested precision of the test.
        unused: values of the recipe without effect here.
    """

    name: str
    label: str
    recipe: R
    run: str | Path
    vit: Encoder
    card: EncoderCard
    start: tuple[Encoder, EncoderCard] | None
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
        """Return the path of a file of the evaluation in the run; None if the encoder is not a local folder or file."""
        return place_in_run(
            self.run, self.parts.train.images.name, self.label, self.settings.seed, folder, suffix, what
        )


def set_up(
    run: str | Path,
    opened: Callable[[], AnnotatedData[T]],
    settings: EvalSettings,
    name: str,
    asked: Requested[R],
    positions: PositionChoice,
    precision: Precision,
    label: str = "",
    unused: Sequence[str] = (),
) -> Setup[T, R]:
    """Load the encoder, open the images, and resolve the recipe ``asked`` for."""
    vit, card = settings.encoder(run, tuned=True)
    share_steps(settings)
    found = open_together(opened)
    with ExitStack() as afterwards:
        afterwards.callback(print_notes, found.notes)  # also where something is refused, which they may explain
        parts = dense_parts(found, settings, card.note, run)
        print_input_notes(parts.train.images, card)
        own = 0 if parts.validation is None else len(parts.validation)
        of_encoder = min(input_size(vit)), patch_side(vit), width(vit)
        recipe = asked.settled(len(parts.train), settings.torch_device.type, own, *of_encoder)
        if recipe.batch % world():
            raise refused_by_all(
                f"--batch_size {recipe.batch} cannot be shared by {world()} processes: give a multiple"
            )
        train, held = parts.trained_on(recipe.validation, settings.seed)
        scored = images_scored(held, parts.test)
        recipe, scale = _at_scale(recipe, asked, train, scored, settings.torch_device.type, patch_side(vit))
        if scale:
            print_notes([scale])
            parts = replace(parts, story=f"{scale}. {parts.story}")
    half = trains_in_bfloat16(settings.torch_device, precision)
    variant = variant_of(positions, vit)
    resized = at_size(vit, card, (recipe.size, recipe.size), variant)  # what is fastest depends on the size
    kernels, _ = choose_kernels(resized, settings.torch_device.type, half and not recipe.drop_path, recipe.batch)
    plan = name, label or name, recipe, run, vit, card, load_start(run), variant, parts, train, held, settings
    return Setup(*plan, half, kernels, precision, unused)


def _at_scale(
    recipe: R, asked: Requested[R], train: Annotated[T], tests: int, device: str, patch: int
) -> tuple[R, str]:
    """The recipe with the scale at which images are seen, and a sentence on it, or "" if they are not reduced."""
    image = median_size(train)
    if not isinstance(recipe, ResolvedSegmentRecipe) or not isinstance(asked, SegmentRecipe):
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


# Models that are trained alike, and tested once, at the end.


_SHOWN = 2  # of the best images, and of the worst
_MEASURED_FROM = 50  # steps: fewer are made sooner than told about
_GIB = 2**30
_SLACK = 1.15  # of memory over what is counted, which allocators do not give back at once
_FEWEST = 4  # patches of a side that is proposed
_FILLED = 0.95  # the share of what is free that a proposal fills

Begin = Callable[[Any, EncoderCard], DenseTraining[T]]  # a model and the card of its encoder to its training


@dataclass(frozen=True)
class DenseCandidate:
    """A model to be trained and tested: with the encoder, or a control.

    Attributes:
        name: in the report.
        build: makes the model; random values come from torch's global generator.
        card: card of its encoder, with the mean and std that normalise its images.
    """

    name: str
    build: Callable[[], nn.Module]
    card: EncoderCard


def trained_candidates(
    setup: Setup[T, R], built: Callable[[Encoder], nn.Module], control: bool, from_scratch: bool
) -> tuple[list[DenseCandidate], str]:
    """Return the encoder, the control that is trained like it, and a sentence on the control, "" without one.

    The control is the start of an adapted encoder, or else training from scratch.
    """
    if from_scratch:
        return [untrained_candidate(SCRATCH, setup, built)], ""
    ours = DenseCandidate(setup.card.name, lambda: built(setup.vit), setup.card)
    if not control:
        return [ours], ""
    controls: list[DenseCandidate] = start_candidates(setup, built) or [untrained_candidate(SCRATCH, setup, built)]
    return [ours, *controls], about_control(setup.start is not None)


def start_candidates(setup: Setup[T, R], built: Callable[[Encoder], nn.Module]) -> list[DenseCandidate]:
    """Return the start of an adapted encoder, with its own normalisation; [] without one."""
    if setup.start is None:
        return []
    vit, card = setup.start
    return [DenseCandidate(START, lambda: built(vit), card)]


def untrained_candidate(name: str, setup: Setup[T, R], built: Callable[[Encoder], nn.Module]) -> DenseCandidate:
    """Return the same architecture with new weights."""
    return DenseCandidate(name, lambda: built(untrained_twin(setup.card, seed=setup.settings.seed)[0]), setup.card)


def train_each(
    candidates: Sequence[DenseCandidate], setup: Setup[T, R], begin: Begin[T]
) -> list[tuple[Any, dict[str, Any]]]:
    """Train every candidate; no test image is read."""
    recipe, test = setup.recipe, setup.parts.test
    names = listing([candidate.name for candidate in candidates], "and")
    setup.settings.end_if_dry(
        test.images,
        f"{names} would be trained on {len(setup.train):,} images in {recipe.steps:,} steps of {recipe.batch}, and "
        f"tested on {len(test):,} others. Recipe {setup.name}.",
        setup.parts.story,
    )
    with temporary_seed(setup.settings), _enough_memory(setup.recipe.batch):
        _foresee_memory(candidates, setup, begin(candidates[0].build(), candidates[0].card))
    pace, found = _announce(candidates, setup, begin), []
    for candidate in candidates:
        with temporary_seed(setup.settings), _enough_memory(setup.recipe.batch):
            trained = begin(candidate.build(), candidate.card).run(candidate.name, pace)
        found.append((trained.model.cpu(), trained.chosen))
    return found


def _announce(candidates: Sequence[DenseCandidate], setup: Setup[T, R], begin: Begin[T]) -> Pace:
    """Print the planned trainings and their duration, estimated from a few steps and images."""
    steps = setup.recipe.steps
    pace = Pace(len(candidates) * steps)
    if steps < _MEASURED_FROM:
        return pace
    with (
        temporary_seed(setup.settings),
        progress_message("measuring a few steps"),
        _enough_memory(setup.recipe.batch),
    ):
        training, others = begin(candidates[0].build(), candidates[0].card), BackgroundLoad()
        pace.before = training.seconds_of_step()
        images = len(candidates) * images_scored(setup.held, setup.parts.test)
        scoring = images * training.seconds_of_image(setup.train)
        load = others.load()
    if is_first():
        whole = pace.total * pace.before
        names = ", then ".join(candidate.name for candidate in candidates)
        by = f" by {world()} processes" if world() > 1 else ""
        print_line(
            f"Training {names}{by}: {steps:,} steps each. This takes about {duration(whole + scoring)} in total: "
            f"{duration(whole)} of steps, and {duration(scoring)} of validation and test."
        )
        if busy := load.sentence():
            print_line(f"  {busy}")
    return pace


def _foresee_memory(candidates: Sequence[DenseCandidate], setup: Setup[T, R], training: DenseTraining[T]) -> None:
    """Print how much memory training and tests will have in use, counted before any of it is taken."""
    kind = training.device.type
    if kind not in ("cpu", "cuda"):  # others do not tell what is free
        return
    sharing, images = (world() if kind == "cpu" else 1), -(-training.batch // setup.settings.accumulate)
    weights = [*training.model.parameters()]
    own, trained = (sum(one.nbytes for one in some) for some in (weights, [w for w in weights if w.requires_grad]))
    # models that are trained already, and the best weights, are on the CPU
    kept = own * (len(candidates) - 1 + (setup.held is not None)) if kind == "cpu" else 0
    least = min(images, 2 if any(isinstance(one, _BatchNorm) for one in training.model.modules()) else 1)
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
            print_line(f"needs about {(base + most) / _GIB:.1f} of {there / _GIB:.1f} GiB of memory{each}")
        return
    (h, w), patch, room = setup.size, patch_side(setup.vit), _FILLED * free
    state, few = kept + _SLACK * (own + 3 * trained), kept + _SLACK * (training.bytes_of_step(least) or counted)
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
    model: Segmenter | Detector,
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
        print_line(f"  {setup.card.name}: saved as {path}")


def _recipe_sentence(setup: Setup[T, R]) -> str:
    """Describe the training, for the report."""
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
    rows: Sequence[Sequence[Result]],
    said: Sequence[str],
    lost: Sequence[str],
    drawings: tuple[Drawing, ...],
    constant: Sequence[Result] = (),
    telling: str = "",
) -> Evaluation:
    """A report whose lines are measures, and whose columns are the encoder, its controls and a ``constant`` answer."""
    n = len(setup.parts.test) - len(lost)
    controls = listing([as_control(of[0]) for of in (*rows[1:], *[constant] * bool(constant))], "and")
    against = f" against {controls}" if controls else ""
    sentences = [said[0], _recipe_sentence(setup), setup.parts.story, *said[1:], *note_unreadable(lost, "test images")]
    return Evaluation(
        results=[row for of in (*rows, constant) for row in of],
        method=" ".join(sentences),
        headline=f"{title}: {rows[0][0].text()} {measure}{against} on {n:,} test images.",
        quoted=tuple(of[0] for of in rows),
        data=setup.parts.test.images.name,
        fingerprint=setup.parts.test.fingerprint(),
        seed=setup.settings.seed,
        n_test=n,
        across="measure",
        down=True,
        drawings=drawings,
        telling=telling,
    ).with_differences(True)


def best_and_worst(scores: Sequence[float]) -> list[int]:
    """Numbers of the images to be shown: those with the highest scores, then those with the lowest; nan is no score."""
    there = sorted((i for i, score in enumerate(scores) if score == score), key=lambda i: -scores[i])
    return list(dict.fromkeys([*there[:_SHOWN], *there[-_SHOWN:]]))
