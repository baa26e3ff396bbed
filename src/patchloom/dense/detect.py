"""Detection: a Mask R-CNN or Faster R-CNN on a simple feature pyramid of the encoder, beside the same from scratch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.data.loader import Batch
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.stats import normalize
from patchloom.dense.annotations.base import Annotated, Objects
from patchloom.dense.annotations.boxes import category_ids
from patchloom.dense.annotations.detection import open_boxes
from patchloom.dense.answers import detect_images, mask_padding, predict_images
from patchloom.dense.augment import BoxAugment
from patchloom.dense.backbone import window_of
from patchloom.dense.detector import Detector
from patchloom.dense.metrics import DetectedObjects, average_precision, coco_tool, interval, pseudo_precision
from patchloom.dense.pictures import BoxRow, detection_picture
from patchloom.dense.recipes import DETECT, ResolvedDetectRecipe, dense_recipe
from patchloom.dense.study import (
    Study,
    begin_training,
    check_outputs,
    dense_report,
    save_model,
    set_up,
)
from patchloom.errors import PatchloomError
from patchloom.evaluate.classification import SCRATCH
from patchloom.evaluate.select import Fitted, train_candidates
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trainer import Forward, Trainer
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import grid_size
from patchloom.options.evaluate import Precision
from patchloom.options.protocols import Detect
from patchloom.results.evaluation import Evaluation
from patchloom.results.result import Outcomes, Result

# Training and testing of detection. Letters: b batch, c channels, h w height and width, n images.


def begin_detector(
    model: Detector,
    card: EncoderCard,
    recipe: ResolvedDetectRecipe,
    train: Annotated[Objects],
    held: Annotated[Objects] | None,
    *,
    settings: EvalSettings,
    half: bool = False,
    kernels: str = "torch",
) -> Trainer:
    """Return the training of a detector with the sum of its losses; arguments as in `begin_training`."""
    device = settings.torch_device

    def loss(forward: Forward, batch: Batch) -> Tensor:
        sizes = [target.size for target in batch.truths]
        targets = []
        for objects in (target.objects for target in batch.truths):
            masks = None if objects.masks is None else objects.masks.to(device)
            labels, crowd = objects.labels.to(device), objects.crowd.to(device)
            targets.append(Objects(objects.boxes.to(device), labels, masks, crowd))
        images = mask_padding(normalize(batch.views[0], card.mean, card.std), sizes)
        losses = forward(images, sizes, targets)
        return torch.stack([loss.float() for loss in losses.values()]).sum()

    return begin_training(
        model,
        card,
        recipe,
        train,
        held,
        loss,
        BoxAugment(model.size, recipe.scale, recipe.flip, recipe.color, recipe.sides),
        functools.partial(detect_score, recipe=recipe, settings=settings, half=half),
        settings,
        measure="AP",
        half=half,
        kernels=kernels,
        outline=Detector.outline,
    )


def detect_score(
    model: Detector,
    card: EncoderCard,
    images: Annotated[Objects],
    *,
    recipe: ResolvedDetectRecipe,
    settings: EvalSettings,
    half: bool,
) -> float:
    """Return the AP of the boxes; 0 if there are no objects."""
    precision: Precision = "bfloat16" if half else "float32"
    found = detect_objects(model, images, card, settings, recipe.score, precision=precision)
    kept = {i: one for i, one in enumerate(found) if one is not None}
    ap = average_precision(images.subset([*kept]), [*kept.values()], images.classes, "bbox").ap
    return 0.0 if math.isnan(ap) else ap


def detect_objects(
    model: Detector,
    images: Annotated[Objects],
    card: EncoderCard,
    settings: EvalSettings,
    score: float,
    *,
    precision: Precision = "auto",
    name: str = "",
) -> list[DetectedObjects | None]:
    """Detect objects in each image; None for unreadable ones. All processes must call it."""
    return predict_images(
        model,
        images,
        settings,
        lambda some, device, half: detect_images(model, some, card.mean, card.std, device, half, score),
        lambda _, answer: answer[1].detected(answer[0], score),
        precision=precision,
        what=name and f"  {name}: looking for objects in {images.images.name}",
    )


_DONE = (
    "Detection: {kind} on a simple feature pyramid of the encoder's last map, as ViTDet has it, trained together with "
    "the encoder."
)
_MEASURED = (
    "AP is COCO's: the mean over classes, and over intersections over union from 0.5 to 0.95; S, M and L are objects "
    "of up to 32x32 pixels, up to 96x96, and above. Intervals of AP are over the test images, or over their groups "
    "(jackknife)."
)


def detect(run: str | Path, data: DataLike, settings: EvalSettings, options: Detect) -> Evaluation:
    """Train a detector on the encoder, and measure average precision of boxes and masks on the test images.

    The model is torchvision's Mask R-CNN, or Faster R-CNN without masks, on the pyramid of ViTDet (Li et al. 2022):
    strides 4, 8, 16 and 32 from the last map, and window attention in all blocks but four for large images.

    Args:
        run, settings, options: as in `patchloom.evaluate.protocols.evaluate`.
        data: images with boxes, as `patchloom.dense.annotations.detection.open_boxes` takes them.

    Raises:
        PatchloomError: no such encoder, data or recipe, boxes that do not fit, or values that do not.
    """
    recipe, precision = options.recipe, options.precision
    check_outputs(run, settings, options)
    coco_tool("mask")  # what scores is missed now, and not after the training
    study: Study[Objects, ResolvedDetectRecipe] = set_up(
        run,
        lambda: open_boxes(data),
        settings,
        recipe,
        dense_recipe(recipe, DETECT, options.changes(), settings.batch_size),
        begin_detector,
        detect_score,
        positions=options.positions,
        precision=precision,
        fresh=SCRATCH,
    )
    values, classes, test = study.recipe, study.classes, study.parts.test
    train, held = study.parts.trained_on(values, settings)
    _check_objects(test, "to test on")
    if held is not None:
        _check_objects(held, "to choose the weights by")
    there = _has_masks(train)
    with_masks = there if options.masks == "auto" else options.masks
    if with_masks and not there:
        raise PatchloomError(f"{train.images.name} has boxes without masks: leave out --masks true")
    window = None if values.window == 0 else values.window
    if values.window == "auto":
        window = window_of(study.encoder(study.subjects.ours), grid_size(study.subjects.ours.vit))
    arguments: dict[str, Any] = {
        "masks": with_masks,
        "width": values.head_width,
        "window": window,
        "light": values.heads == "light",
    }
    if values.sides is not None:
        arguments["sides"] = values.sides[1:]
    ids = category_ids(train)
    saved = functools.partial(save_model, study, "detect", options.out, side=None, arguments=arguments, ids=ids)
    build = functools.partial(Detector, classes=len(classes), **arguments)
    candidates, done = study.candidates(build, {"masks": with_masks}, options, saved)

    def answer(one: Fitted) -> list[DetectedObjects | None]:
        its = one.model, test, one.candidate.card, settings, values.score
        return detect_objects(*its, precision=precision, name=one.candidate.name)

    rows, found = [], []
    for one, answers in study.tested(train_candidates(candidates, study), answer):
        found.append(answers)
        rows.append(_rows(one.candidate.name, one.settings, test, answers))

    def row(i: int, title: str) -> BoxRow:
        image, its = test.images.read_as(i, len(study.subjects.ours.card.mean)), found[0][i]
        assert its is not None  # it has a score
        return BoxRow(image, test.outlined(i), its.objects((image.shape[1], image.shape[2])), its.scores, title)

    return dense_report(
        study,
        rows,
        title=f"Detection ({recipe})",
        measure="AP of boxes",
        done=_DONE.format(kind="Mask R-CNN" if with_masks else "Faster R-CNN") + done,
        measured=_MEASURED,
        drawings=study.drawings(detection_picture, "detect-", lambda: _scores(test, found[0]), "AP", row),
    )


def _scores(test: Annotated[Objects], found: Sequence[DetectedObjects | None]) -> list[float]:
    """Return the AP of the boxes of each image; nan for unreadable ones."""
    scores = []
    for i, one in enumerate(found):
        truth = [test.outlined(i)]
        scores.append(math.nan if one is None else average_precision(truth, [one], test.classes, "bbox").ap)
    return scores


def _check_objects(images: Annotated[Objects], what: str) -> None:
    # annotations alone are looked at, and no further than to the first object
    if not any((~images.outlined(i).crowd).any() for i in range(len(images))):
        raise PatchloomError(f"the {len(images):,} images {what} have no object: annotate some of them")


def _has_masks(images: Annotated[Objects]) -> bool:
    return all(images.outlined(i).has_masks for i in range(min(len(images), 100)))


def _rows(
    name: str, settings: dict[str, Any], test: Annotated[Objects], found: Sequence[DetectedObjects | None]
) -> list[Result]:
    """Return rows for boxes and masks: AP with its interval first."""
    kept = [i for i, one in enumerate(found) if one is not None]
    images, answers = test.subset(kept), [one for one in found if one is not None]
    rows, groups = [], images.images.groups
    among = 0 if groups is None else len(np.unique(groups))
    kinds = [("", average_precision(images, answers, test.classes, "bbox"))]
    if settings["masks"] and _has_masks(images):
        kinds.append((" of masks", average_precision(images, answers, test.classes, "segm")))
    for of, score in kinds:
        named = dict(score.means)
        if len(test.classes) > 1:
            named |= {f"AP {name}": value for name, value in score.by_class(test.classes).items()}
        for measure, value in named.items():
            low, high, outcomes = value, value, None
            if measure == "AP":
                pseudo = pseudo_precision(score.matches, groups)
                low, high = (end.item() for end in interval(torch.tensor(value, dtype=torch.float64), pseudo))
                outcomes = Outcomes(pseudo.cpu().numpy(), pseudo=True)
            numbers = f"{measure}{of}", value, low, high, len(kept)
            rows.append(Result(*numbers, name, "detect", settings, groups=among, outcomes=outcomes))
    return rows
