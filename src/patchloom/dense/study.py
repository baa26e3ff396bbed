"""Shared steps of segmentation and detection: encoder, images and recipe; training; test; report.

Everything is resolved before the first training; the test images are used once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from patchloom.data.decode import Unreadable
from patchloom.data.loader import AnnotatedAugment
from patchloom.data.source import Data, Source
from patchloom.data.splits import with_groups
from patchloom.dense.annotations.base import Annotated, AnnotatedData, T
from patchloom.dense.answers import starts
from patchloom.dense.checkpoint import DenseCard, DenseTask, is_dense, save_dense
from patchloom.dense.recipes import (
    VALIDATIONS,
    DenseRecipe,
    R,
    ResolvedDenseRecipe,
    ResolvedSegmentRecipe,
    SegmentRecipe,
    usual_crops,
)
from patchloom.display import StatusMessage, is_first, print_line
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.classification import about_control
from patchloom.evaluate.classifier import variant_of
from patchloom.evaluate.features import trains_in_bfloat16
from patchloom.evaluate.select import Candidate, Fitted, Plan, recipe_sentences
from patchloom.evaluate.settings import (
    EvalSettings,
    Parts,
    Subject,
    Subjects,
    divide,
    named_file,
    open_subjects,
    open_together,
    place_in_run,
    print_input_notes,
    print_leak_notes,
    print_notes,
    share_steps,
)
from patchloom.evaluate.trainer import Loss, Score, Trainer, image_batches
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.checkpoints.live import has_no_folder
from patchloom.nets.encode import input_size, patch_side, width
from patchloom.nets.finetune import Variant, at_size
from patchloom.nets.performance import choose_kernels
from patchloom.nets.swin import Encoder
from patchloom.options.evaluate import PositionChoice, Precision
from patchloom.options.protocols import Detect, Segment
from patchloom.results.claims import CONSTANT
from patchloom.results.evaluation import Drawing, Evaluation, as_control, note_unreadable
from patchloom.results.result import Result
from patchloom.sizes import in_pixels
from patchloom.system.device import free_memory, memory, resident
from patchloom.system.distributed import rank, refused_by_all, smallest, world

# Encoder, images and recipe.


_MOST = 4  # shorter side of images at native scale, over that of a window
_SAMPLED = 64  # images whose size is looked at
_TIMED_IMAGES = 4


DenseOptions = Segment | Detect


@dataclass(frozen=True, kw_only=True)
class Study(Plan[Annotated[T], R]):
    """Plan of a segmentation or detection, with its encoder.

    Attributes:
        run: encoder as typed by the user.
        subjects: the encoder and its controls.
        variant: position embeddings of the encoder.
        label: name of this training in file names: the recipe, or what distinguishes it from others of the same data.
        unreadable: names of the test images that could not be read.
    """

    run: str | Path
    subjects: Subjects
    variant: Variant
    label: str
    unreadable: list[str] = field(default_factory=list)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.parts.train.classes

    def encoder(self, subject: Subject) -> Encoder:
        """Return a copy of an encoder for images of the recipe's size."""
        size = self.recipe.size, self.recipe.size
        return at_size(subject.vit, subject.card, size, self.variant, self.recipe.drop_path)

    def candidates(
        self,
        build: Callable[[Encoder], nn.Module],
        settings: Mapping[str, Any],
        options: DenseOptions,
        save: Callable[[Any, dict[str, Any]], None],
        both: bool = False,
    ) -> tuple[list[Candidate], str]:
        """Return the encoder, which ``save`` saves if wanted, and its control, and a sentence on that, or "".

        The control is the start of an adapted encoder, or else the fresh one; ``both`` takes both.
        """
        ours, start, fresh = self.subjects
        subjects, said = [fresh if options.from_scratch else ours], ""
        if options.control and not options.from_scratch:
            subjects += self.subjects.controls if both else [start or fresh]
            said = "" if both and start is None else f" {about_control(start is not None)}"

        def candidate(subject: Subject) -> Candidate:
            its = {"positions": self.variant, **settings}
            return Candidate(subject.name, subject.card, lambda _: build(self.encoder(subject)), its)

        first, *others = map(candidate, subjects)
        if options.save or options.out is not None:
            first = replace(first, save=save)
        return [first, *others], said

    def tested(
        self, fitted: Sequence[Fitted], answer: Callable[[Fitted], Sequence[Any]]
    ) -> Iterator[tuple[Fitted, Sequence[Any]]]:
        """Yield each trained model with its answers to the test images, and list the unreadable ones once.

        Every choice has been made before.
        """
        test = self.parts.test
        for one in fitted:
            answers = answer(one)
            self.unreadable[:] = [test.images.describe(i) for i, found in enumerate(answers) if found is None]
            if len(self.unreadable) == len(test):
                raise PatchloomError(
                    f"none of the {len(test):,} test images could be read, beginning with {self.unreadable[0]}: mend "
                    "them"
                )
            yield one, answers
            one.model.cpu()

    def drawings(
        self,
        draw: Callable[..., Path],
        prefix: str,
        scores: Callable[[], Sequence[float]],
        measure: str,
        row: Callable[[int, str], Any],
    ) -> tuple[Drawing, ...]:
        """Return the picture of the best and the worst test images by ``scores``.

        Args:
            draw: function that draws rows.
            prefix: beginning of the file's name.
            scores: function that returns the score of each test image; nan is no score.
            measure: name of the score.
            row: function that returns the row of an image, with a title.
        """
        path, test = self.place("pictures", ".png", prefix), self.parts.test.images
        if path is None or rank():
            return ()
        each = scores()
        rows = [row(i, f"{Path(test.describe(i)).name}: {each[i]:.1%} {measure}") for i in best_and_worst(each)]
        return (Drawing(draw, path, {"rows": rows, "classes": self.classes}),) if rows else ()

    def place(self, folder: str, suffix: str, what: str = "") -> Path | None:
        """Return the path of a file of the evaluation in the run; None if the encoder is not a local folder or file."""
        data = self.parts.train.images.name
        return place_in_run(self.run, data, self.label, self.settings.seed, folder, suffix, what)


def set_up(
    run: str | Path,
    opened: Callable[[], AnnotatedData[T]],
    settings: EvalSettings,
    name: str,
    asked: DenseRecipe,
    begin: Callable[..., Trainer],
    score: Callable[..., float],
    *,
    positions: PositionChoice,
    precision: Precision,
    fresh: str,
    label: str = "",
    unused: Sequence[str] = (),
    bytes_of_test: Callable[[Trainer, Plan[Annotated[T], R]], int] | None = None,
) -> Study[T, R]:
    """Load the encoder, open the images, and resolve the recipe ``asked`` for; ``fresh`` is as in `open_subjects`."""
    subjects = open_subjects(run, settings, tuned=True, fresh=fresh)
    vit, card = subjects.ours.vit, subjects.ours.card
    share_steps(settings)
    data, device = open_together(opened), settings.torch_device
    with ExitStack() as afterwards:
        afterwards.callback(print_notes, data.notes)  # also where something is refused, which they may explain
        parts = annotated_parts(data, settings, card.note, run)
        print_input_notes(parts.train.images, card)
        own = 0 if parts.validation is None else len(parts.validation)
        recipe = asked.settled(len(parts.train), device.type, own, min(input_size(vit)), patch_side(vit), width(vit))
        if recipe.batch % world():
            raise refused_by_all(
                f"--batch_size {recipe.batch} cannot be shared by {world()} processes: give a multiple"
            )
        train, held = parts.trained_on(recipe, settings)
        scored = VALIDATIONS * len(held or ()) + len(parts.test)
        recipe, scale = _at_scale(recipe, asked, train, scored, device.type, patch_side(vit))
        if scale:
            print_notes([scale])
            parts = replace(parts, story=f"{scale}. {parts.story}")
    half = trains_in_bfloat16(device, precision)
    variant = variant_of(positions, vit)
    resized = at_size(vit, card, (recipe.size, recipe.size), variant)  # what is fastest depends on the size
    kernels, _ = choose_kernels(resized, device.type, half and not recipe.drop_path, recipe.batch)
    return Study(
        name,
        (recipe,),
        parts,
        settings,
        partial(begin, settings=settings, half=half, kernels=kernels),
        partial(score, recipe=recipe, settings=settings, half=half),
        half,
        unused,
        _TIMED_IMAGES,
        partial(foresee_memory, bytes_of_test=bytes_of_test),
        run=run,
        subjects=subjects,
        variant=variant,
        label=label or name,
    )


def annotated_parts(
    data: AnnotatedData[T], settings: EvalSettings, note: str = "", run: str | Path | None = None
) -> Parts[Annotated[T]]:
    """Return the parts of annotated images, in groups if there are any; arguments as in `divide`."""
    train, test = data.train, data.test
    if settings.group is not None:
        grouped = with_groups(Data(train.images, None if test is None else test.images), settings.group)
        train = _with_images(train, grouped.train)
        if test is not None and grouped.test is not None:
            test = _with_images(test, grouped.test)
    with StatusMessage("looking for copies among the images"):
        parts = divide(train, data.validation, test, settings, note, run, labels=False)
    print_leak_notes(parts.train.images, parts.test.images, own=test is not None)
    return parts


def _with_images(annotated: Annotated[T], images: Source) -> Annotated[T]:
    """Return the same annotations beside ``images``, the same ones but in groups."""
    same = annotated.subset(np.arange(len(annotated)))
    same.images = images
    return same


def _at_scale(recipe: R, asked: DenseRecipe, train: Annotated[T], tests: int, device: str, patch: int) -> tuple[R, str]:
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


# Training.


def begin_training(
    model: Any,
    card: EncoderCard,
    recipe: ResolvedDenseRecipe,
    train: Annotated[T],
    held: Annotated[T] | None,
    loss: Loss,
    augment: AnnotatedAugment,
    score: Callable[[Any, EncoderCard, Annotated[T]], float],
    settings: EvalSettings,
    **options: Any,
) -> Trainer:
    """Return the training of a segmenter or detector; ``options`` are other ones of `Trainer`.

    Of equal scores on the images ``held`` out, the weights that were trained longest win.
    """
    images, share = train.images, recipe.batch // world()

    def validate(tested: Any) -> Score:
        assert held is not None
        return Score(score(tested, card, held), float(trainer.step))

    trainer: Trainer = Trainer(
        model,
        loss,
        image_batches(images, augment, share, model.channels, settings, train.outlined),
        recipe.course(len(train), settings.accumulate),
        None if held is None else validate,
        settings=settings,
        identity={
            "recipe": recipe.plain(),
            "numbers": [card.mean, card.std],
            "images": [None if part is None else part.fingerprint() for part in (train, held)],
        },
        validation_images=0 if held is None else len(held),
        workers=partial(settings.workers_for, images, trained=True),
        **options,
    )
    return trainer


_FOLDERS: dict[DenseTask, str] = {"segment": "segmented", "detect": "detected"}


def check_outputs(run: str | Path, settings: EvalSettings, options: DenseOptions) -> None:
    """Refuse what cannot be saved, or would be written over something else."""
    save, out = options.save, options.out
    path = named_file(out, settings)
    if path is not None:
        if path.suffix != ".safetensors":
            raise PatchloomError(
                f"--out is the file of a model, so its name ends in .safetensors, which {path} does not"
            )
        if path.is_dir() or (path.exists() and not is_dense(path)):
            raise PatchloomError(f"{path} is there already, and no model of segment or detect: give --out another name")
    if save and out is None and has_no_folder(run):
        raise PatchloomError(f"{run} has no folder for its model: give --out FILE")
    if options.from_scratch and (save or out is not None):
        raise PatchloomError("--from_scratch saves no model: leave --save and --out away")


def save_model(
    study: Study[T, R],
    kind: DenseTask,
    out: str | None,
    model: Any,
    settings: dict[str, Any],
    *,
    side: int | None,
    arguments: dict[str, Any],
    ids: tuple[int, ...],
) -> None:
    """Save a trained segmenter or detector, for `patchloom.predict`, in the file ``out`` or in the run."""
    path = study.place(_FOLDERS[kind], ".safetensors") if out is None else Path(out)
    assert path is not None, "check_outputs comes first"
    card = DenseCard(
        kind=kind,
        encoder=study.subjects.ours.card,
        positions=study.variant,
        size=model.size,
        side=side,
        arguments=arguments,
        classes=study.classes,
        data=study.parts.train.images.name,
        test=study.parts.test.fingerprint(),
        seed=study.settings.seed,
        settings=settings,
        ids=ids,
    )
    save_dense(model, card, path)
    print_line(f"  {study.subjects.ours.card.name}: saved as {path}")


# Test and report.


_SHOWN = 2  # of the best images, and of the worst


def dense_report(
    plan: Study[T, R],
    rows: list[list[Result]],
    *,
    title: str,
    measure: str,
    done: str,
    measured: str,
    drawings: tuple[Drawing, ...],
    telling: str = "",
) -> Evaluation:
    """Return a report whose lines are measures, and whose columns are the encoder, its controls and a constant answer.

    There are ``rows`` for each column, and ``measure`` names the first one.
    """
    test = plan.parts.test
    n = len(test) - len(plan.unreadable)
    controls = listing([as_control(its[0]) for its in rows[1:]], "and")
    against = f" against {controls}" if controls else ""
    lost: list[str] = note_unreadable(plan.unreadable, "test images")
    return Evaluation(
        data=test.images.name,
        fingerprint=test.fingerprint(),
        seed=plan.settings.seed,
        n_test=n,
        results=[row for its in rows for row in its],
        method=" ".join([done, recipe_sentences(plan), plan.parts.story, measured, *lost]),
        headline=f"{title}: {rows[0][0].text()} {measure}{against} on {n:,} test images.",
        quoted=tuple(its[0] for its in rows if its[0].encoder != CONSTANT),
        across="measure",
        down=True,
        drawings=drawings,
        telling=telling,
    ).with_differences(True)


def best_and_worst(scores: Sequence[float]) -> list[int]:
    """Return the images to be shown: those with the highest scores, then those with the lowest; nan is no score."""
    there = sorted((i for i, score in enumerate(scores) if score == score), key=lambda i: -scores[i])
    return list(dict.fromkeys([*there[:_SHOWN], *there[-_SHOWN:]]))


# Memory of a training with maps or boxes, counted before any of it is taken.

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
