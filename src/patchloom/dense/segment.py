"""Segmentation: UPerNet on the encoder, fine-tuned, or a linear layer on the frozen one, beside the same without it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.loader import Batch
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.stats import normalize
from patchloom.dense.annotations.base import IGNORED, Annotated
from patchloom.dense.annotations.segmentation import class_ids, class_pixels, image_class_pixels, open_label_maps
from patchloom.dense.answers import AT_ONCE, BAND, predict_images, segment_image, segment_images
from patchloom.dense.augment import PixelAugment
from patchloom.dense.metrics import (
    class_ious,
    confusion,
    constant_overlaps,
    foreground_iou,
    interval,
    mean_iou,
    overlaps,
    pixel_accuracy,
    pseudo_values,
)
from patchloom.dense.pictures import MapRow, segmentation_picture
from patchloom.dense.recipes import FOR_RARE, PROBE, SEGMENT, ResolvedSegmentRecipe, SegmentRecipe, dense_recipe
from patchloom.dense.segmenter import PixelSegmenter, Segmenter, SegmentLogits
from patchloom.dense.study import (
    Study,
    begin_training,
    check_outputs,
    dense_report,
    median_size,
    save_model,
    set_up,
    window_count,
)
from patchloom.errors import PatchloomError, listing
from patchloom.estimate import fake_numbers
from patchloom.evaluate.classification import SCRATCH
from patchloom.evaluate.select import Fitted, Plan, train_candidates
from patchloom.evaluate.settings import EvalSettings, print_notes
from patchloom.evaluate.trainer import Forward, Trainer
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import input_channels, patch_side
from patchloom.nets.performance import use_kernels
from patchloom.options.evaluate import Precision
from patchloom.options.protocols import Segment
from patchloom.results.claims import CONSTANT, PIXELS, UNTRAINED
from patchloom.results.evaluation import Evaluation
from patchloom.results.result import Outcomes, Result

# Training and testing of segmentation. Letters: b batch, c channels, h w height and width, k classes, n images.


_TENTHS = 10
FOREGROUND = "foreground IoU"  # name of the measure
_NOTHING = 0.01  # foreground IoU below which nothing but the most frequent class was found


@dataclass(eq=False)
class SegmentLoss:
    """Loss of both heads, with counts of the answers in about the last tenth of the steps; no GPU is waited for."""

    card: EncoderCard
    recipe: ResolvedSegmentRecipe
    classes: Sequence[str]
    weights: Tensor | None
    device: torch.device

    def __post_init__(self) -> None:
        self.answered = torch.zeros(3, len(self.classes), device=self.device)  # what `overlaps` gives

    def __call__(self, forward: Forward, batch: Batch) -> Tensor:
        truth = torch.stack(batch.truths).to(self.device, non_blocking=True).long()
        answer = forward(normalize(batch.views[0], self.card.mean, self.card.std))
        kept = max(0.0, 1 - _TENTHS / self.recipe.steps)
        self.answered = self.answered * kept + batch_overlaps(answer.main.detach(), truth)
        return self._compare(answer, truth)

    def outline(self, model: Segmenter, images: Tensor) -> Tensor:
        """Return a loss of the same memory that is independent of values."""
        return self._compare(model(images), images[:, 0].long())

    def remark(self, step: int) -> str:
        """Return a remark if nothing but one class has been found lately."""
        if _TENTHS * step < self.recipe.steps or not foreground_iou(self.answered) < _NOTHING:
            return ""
        return f"nothing but {self.classes[int(self.answered[2].argmax())]} found in training"

    def _compare(self, answer: SegmentLogits, truth: Tensor) -> Tensor:
        dice = self.recipe.loss == "dice"
        loss = pixel_loss(answer.main, truth, self.weights, dice)
        if answer.auxiliary is not None:
            loss = loss + self.recipe.auxiliary * pixel_loss(answer.auxiliary, truth, self.weights, dice)
        return loss


def begin_segmenter(
    model: Segmenter | PixelSegmenter,
    card: EncoderCard,
    recipe: ResolvedSegmentRecipe,
    train: Annotated[Tensor],
    held: Annotated[Tensor] | None,
    *,
    settings: EvalSettings,
    half: bool = False,
    kernels: str = "torch",
) -> Trainer:
    pixels = image_class_pixels(train) if recipe.class_weights or recipe.rare_crops else np.zeros((len(train), 1))
    crops, device = rare_crops(pixels, recipe.rare_crops), settings.torch_device
    if len(crops.images) > len(train):
        train = train.subset(crops.images)
    weights = class_weights(pixels).to(device) if recipe.class_weights else None
    loss = SegmentLoss(card, recipe, train.classes, weights, device)
    return begin_training(
        model,
        card,
        recipe,
        train,
        held,
        loss,
        PixelAugment(model.size, recipe.resized, recipe.scale, recipe.flip, recipe.color, crops.classes, crops.aimed),
        functools.partial(segment_score, recipe=recipe, settings=settings, half=half),
        settings,
        measure="mIoU",
        half=half,
        kernels=kernels if isinstance(model, Segmenter) else "torch",
        remark=loss.remark,
        outline=loss.outline,
    )


def segment_score(
    model: Segmenter,
    card: EncoderCard,
    images: Annotated[Tensor],
    *,
    recipe: ResolvedSegmentRecipe,
    settings: EvalSettings,
    half: bool,
) -> float:
    """Return the mIoU; 0 if no pixel counts."""
    precision: Precision = "bfloat16" if half else "float32"
    found = predict_overlaps(model, images, card, settings, recipe.resized, precision=precision)
    iou = mean_iou(joined(found, model.classes).sum(0)).item()
    return 0.0 if math.isnan(iou) else iou


def bytes_of_segmenting(trainer: Trainer, plan: Plan[Annotated[Tensor], ResolvedSegmentRecipe]) -> int:
    """Return the peak bytes of a test on a usual image, counted with fake tensors, which replace the weights.

    They are those of the windows at once, of all their logits, and of the image's, a band after the other.
    """
    model, kind, recipe, image = trainer.model, trainer.device.type, plan.recipe, median_size(plan.parts.train)
    count = window_count(image, recipe.resized, recipe.size)
    use_kernels(model.eval(), "torch")  # native kernels need numbers
    with fake_numbers(model, kind) as live, torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=trainer.half):
        views = torch.zeros(min(count, AT_ONCE), model.channels, *model.size, device=trainer.device)
        logits = model(views).main
    model.train()
    return live.peak + 4 * (count * logits[0].numel() + 4 * min(BAND, model.classes * math.prod(image)))


def pixel_loss(logits: Tensor, truth: Tensor, weights: Tensor | None = None, dice: bool = False) -> Tensor:
    """Return the mean cross-entropy of the pixels that count, and perhaps the Dice loss; 0 if no pixel counts.

    Logits [b k h' w'] are resized to the truth [b h w] bilinearly. The mean is weighted by the classes' weights [k].
    """
    whole = F.interpolate(logits.float(), truth.shape[-2:], mode="bilinear", align_corners=False)
    each = F.cross_entropy(whole, truth, weights, ignore_index=IGNORED, reduction="sum")
    counted = truth != IGNORED
    size = counted.sum() if weights is None else (weights[truth.clamp_min(0)] * counted).sum()
    loss = each / size.clamp_min(1)
    return loss + dice_loss(whole, truth) if dice else loss


def batch_overlaps(logits: Tensor, truth: Tensor) -> Tensor:
    """Return what `overlaps` gives, float [3 k], at the places of logits [b k h' w']; the truth is [b h w]."""
    labels = F.interpolate(truth[:, None].float(), logits.shape[-2:], mode="nearest")[:, 0].long().flatten()
    answers, counted = logits.argmax(1).flatten(), (labels >= 0).float()
    none, labels = counted.new_zeros(logits.shape[1]), labels.clamp_min(0)
    common = none.index_add(0, labels, counted * (answers == labels))
    there, answered = none.index_add(0, labels, counted), none.index_add(0, answers, counted)
    return torch.stack([common, there + answered - common, there])


def predict_overlaps(
    model: Segmenter,
    images: Annotated[Tensor],
    card: EncoderCard,
    settings: EvalSettings,
    side: int | None,
    *,
    precision: Precision = "auto",
    name: str = "",
) -> list[Tensor | None]:
    """Return what `overlaps` gives of every image, [3 k]; None for unreadable ones. All processes must call it."""
    return predict_images(
        model,
        images,
        settings,
        lambda some, device, half: segment_images(model, some, card.mean, card.std, side, device, half),
        lambda picture, answer: overlaps(confusion(answer, picture.truth, model.classes)),
        truth=True,
        precision=precision,
        what=name and f"  {name}: segmenting {images.images.name}",
    )


def joined(found: Sequence[Tensor | None], classes: int) -> Tensor:
    """Return the overlaps of all images, [n 3 k], with zeros for the unreadable ones."""
    none = torch.zeros(3, classes, dtype=torch.int64)
    return torch.stack([none if one is None else one for one in found])


_OF_ENCODER = ("layer_decay", "drop_path", "head_width", "auxiliary")  # and of UPerNet: not of a linear layer
_DONE = {
    "upernet": "Segmentation: UPerNet on four evenly spaced blocks, trained together with the encoder.",
    "linear": "Segmentation: a batch norm and a linear layer on the last tokens of the frozen encoder.",
}
_BESIDE = "Untrained is the same on fresh weights, raw pixels on the pixels of each patch."
_MEASURED = (
    "mIoU is the mean over the classes of intersection over union, each of one sum over all test images, and aAcc the "
    "share of right pixels. Foreground IoU is the mean over the classes but the most frequent one of the test images. "
    "The best constant answers that one, and by foreground IoU the second most frequent one. "
    "Intervals are over the test images, or their groups (jackknife)."
)


def segment(run: str | Path, data: DataLike, settings: EvalSettings, options: Segment) -> Evaluation:
    """Train a head that gives each pixel a class, and measure mIoU on the test images.

    UPerNet (Xiao et al. 2018) on four evenly spaced blocks is trained together with the encoder, beside the same from
    scratch, or from the start of a run with --init or --from: the papers' protocol. linear is a batch norm and a linear
    layer on the frozen encoder's last tokens, beside the start, an untrained encoder and raw pixels: it is fast, and
    measures the frozen features.

    Args:
        run, settings, options: as in `patchloom.evaluate.protocols.evaluate`.
        data: images with a class for each pixel, as for `patchloom.dense.annotations.segmentation.open_label_maps`.

    Raises:
        PatchloomError: no such encoder, data or recipe, label maps that do not fit, or values that do not.
    """
    recipe, head, positions, precision = options.recipe, options.head, options.positions, options.precision
    changes, linear = options.changes(), options.head == "linear"
    if linear:
        _check_linear(recipe, options.from_scratch, positions, changes)
        positions = "keep"
    check_outputs(run, settings, options)
    known = {**SEGMENT, "small": PROBE} if linear else SEGMENT
    asked = dense_recipe(recipe, known, changes, settings.batch_size)
    study: Study[Tensor, ResolvedSegmentRecipe] = set_up(
        run,
        functools.partial(open_label_maps, data, options.ignore, threshold=options.threshold),
        settings,
        recipe,
        asked,
        begin_segmenter,
        segment_score,
        positions=positions,
        precision=precision,
        fresh=UNTRAINED if linear else SCRATCH,
        label="linear" if linear else recipe,
        unused=_OF_ENCODER if linear else (),
        bytes_of_test=bytes_of_segmenting,
    )
    parts, test, classes = study.parts, study.parts.test, study.classes
    if any(getattr(asked, name) == "auto" for name in FOR_RARE):
        train, _ = parts.trained_on(study.recipe, settings)
        values, rarity = for_rare_classes(asked, study.recipe, class_pixels(train), classes)
        print_notes([rarity] if rarity else [])
        study = replace(study, recipes=(values,))
    values = study.recipe
    arguments: dict[str, Any] = {"head": head, "head_width": values.head_width, "auxiliary": values.auxiliary > 0}

    def pixels(recipe: ResolvedSegmentRecipe) -> PixelSegmenter:
        vit, size = study.subjects.ours.vit, (recipe.size, recipe.size)
        return PixelSegmenter(len(classes), size, input_channels(vit), patch_side(vit))

    ids = class_ids(parts.train)
    about: Any = {"side": values.resized, "arguments": arguments, "ids": ids}
    saved = functools.partial(save_model, study, "segment", options.out, **about)
    build = functools.partial(Segmenter, classes=len(classes), **arguments)
    candidates, done = study.candidates(build, {"head": head}, options, saved, both=linear)
    done = f"{_DONE[head]}{done}"
    if linear and options.control:
        candidates.append(replace(candidates[0], name=PIXELS, build=pixels, save=None))
        done += f" {_BESIDE}"
    fitted = train_candidates(candidates, study)

    def answer(one: Fitted) -> list[Tensor | None]:
        its = one.model, test, one.candidate.card, settings, values.resized
        return predict_overlaps(*its, precision=precision, name=one.candidate.name)

    rows, found, kept = [], [], list[int]()
    for one, answers in study.tested(fitted, answer):
        found.append(joined(answers, len(classes)))
        kept = [i for i, answered in enumerate(answers) if answered is not None]
        groups = test.subset(kept).images.groups
        rows.append(_rows(one.candidate.name, one.settings, found[-1][kept], classes, groups))
    most, second = (
        _rows(CONSTANT, {"answer": classes[best]}, constant, classes, groups)
        for best, constant in (constant_overlaps(found[0][kept], place) for place in (0, 1))
    )
    constant = [row for row in most if row.measure != FOREGROUND]
    constant += [row for row in second if row.measure == FOREGROUND]

    def row(i: int, title: str) -> MapRow:
        model, card = fitted[0].model.cpu(), study.subjects.ours.card
        image = test.images.read_as(i, model.channels)
        return MapRow(image, test.truth(i), segment_image(model, image, card.mean, card.std, values.resized), title)

    return dense_report(
        study,
        [*rows, constant],
        title="Linear segmentation of the frozen encoder" if linear else f"Segmentation ({recipe}, UPerNet)",
        measure="mIoU",
        done=done,
        measured=_MEASURED,
        drawings=study.drawings(segmentation_picture, "segment-", lambda: mean_iou(found[0]).tolist(), "mIoU", row),
        telling=FOREGROUND,
    )


def _check_linear(recipe: str, from_scratch: bool, positions: str, changes: Mapping[str, Any]) -> None:
    if recipe != "small":
        raise PatchloomError(f"--recipe {recipe} trains UPerNet: leave it out with --head linear")
    if from_scratch:
        raise PatchloomError(
            "--head linear does not train the encoder, so there is no training from scratch: leave that out"
        )
    if positions not in ("auto", "keep"):
        raise PatchloomError(f"--head linear does not train the encoder: leave out --positions {positions}")
    for name in _OF_ENCODER:
        if changes.get(name) is not None:
            raise PatchloomError(f"--{name} has no effect with --head linear, which trains one layer: leave it out")


def _rows(
    name: str, settings: dict[str, Any], each: Tensor, classes: Sequence[str], groups: np.ndarray | None
) -> list[Result]:
    """Return rows of mIoU, pixel accuracy, foreground IoU and the IoU of each class, from `overlaps` [n 3 k]."""
    total, rows = each.sum(0), list[Result]()
    among = 0 if groups is None else len(np.unique(groups))
    measures = {"mIoU": mean_iou, "aAcc": pixel_accuracy, FOREGROUND: foreground_iou}
    for measure, statistic in measures.items():
        value, pseudo = statistic(total), pseudo_values(statistic, each, groups)
        if value != value:  # nan: the test images show one class alone
            continue
        low, high = interval(value, pseudo)
        numbers, outcomes = (value.item(), low.item(), high.item()), Outcomes(pseudo.cpu().numpy(), pseudo=True)
        rows.append(Result(measure, *numbers, len(each), name, "segment", settings, groups=among, outcomes=outcomes))
    values = class_ious(total)
    lows, highs = interval(values, pseudo_values(class_ious, each, groups))
    for called, value, low, high in zip(classes, values.tolist(), lows.tolist(), highs.tolist(), strict=True):
        if value == value:  # nan: neither in truth nor in answers
            rows.append(Result(called, value, low, high, len(each), name, "segment", settings, groups=among))
    return rows


# Training for rare classes: weights in the loss, the Dice loss, and crops that hold them.

RARE = 0.05  # fraction of the training pixels below which a class is rare


def rare_classes(pixels: np.ndarray) -> np.ndarray:
    """Return the classes that occur in less than `RARE` of the pixels; ``pixels`` are counts [n k] or [k]."""
    counts = pixels.reshape(-1, pixels.shape[-1]).sum(0)
    return np.flatnonzero((counts > 0) & (counts < RARE * counts.sum()))


def for_rare_classes(
    asked: SegmentRecipe, recipe: ResolvedSegmentRecipe, pixels: np.ndarray, classes: Sequence[str]
) -> tuple[ResolvedSegmentRecipe, str]:
    """Return the recipe with values for rare classes where ``asked`` has auto, and a sentence on them, or "".

    They act only if a constant answer is nearly right: all classes but one have under `RARE` of the pixels together.
    There they were measured to find what else is not found (benchmarks/rare.py).

    Args:
        pixels: number of training pixels of each class, [k].
    """
    rest = 1 - pixels.max() / pixels.sum()
    changed = {name: value for name, value in FOR_RARE.items() if getattr(asked, name) == "auto"}
    if not 0 < rest < RARE or not changed:
        return recipe, ""
    chosen = listing([f"--{name} {str(value).lower()}" for name, value in changed.items()], "and")
    said = f"Only {rest:.2%} of the training pixels are not {classes[int(pixels.argmax())]}, so auto chose {chosen}"
    return replace(recipe, **changed), said


def class_weights(pixels: np.ndarray) -> Tensor:
    """Return the weight of each class in the cross-entropy, 1 / ln(1.02 + p) for the fraction p of the pixels, [k].

    From ENet (Paszke et al. 2016, section 5.1). They go from 1.4 for a class of all pixels to 50 for one of none.

    Args:
        pixels: number of pixels of each class, [n k].
    """
    counts = pixels.sum(0)
    return torch.from_numpy(1 / np.log(1.02 + counts / counts.sum())).float()


def dice_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """Return 1 minus the mean soft Dice score of the classes in a batch; 0 if no pixel counts.

    Dice is 2 Σ p t / (Σ p + Σ t) over all pixels of the batch, for the chance p of a class and 1 or 0 for t, its truth
    (Milletari et al. 2016, with sums instead of squares in the denominator, as in nnU-Net). Classes that the batch does
    not show have no part in the mean: the cross-entropy beside it teaches not to predict them.

    Args:
        logits: [b k h w].
        truth: [b h w], with negative numbers for pixels that do not count.
    """
    counted, labels = (truth >= 0).flatten(), truth.clamp_min(0)
    chances = logits.float().softmax(1)
    own = chances.gather(1, labels[:, None])[:, 0].flatten() * counted
    zeros = own.new_zeros(logits.shape[1])
    common = zeros.index_add(0, labels.flatten(), own)
    there = zeros.index_add(0, labels.flatten(), counted.to(own.dtype))
    predicted = (chances * (truth >= 0)[:, None]).sum((0, 2, 3))
    shown = there > 0
    scores = 2 * common / (predicted + there).clamp_min(1e-6)
    return ((1 - scores) * shown).sum() / shown.sum().clamp_min(1)


class RareCrops(NamedTuple):
    """Images to train on, some of them several times, and how often their crops are aimed at a rare class.

    Attributes:
        images: [m] indices of the images, each once, and those with a rare class perhaps more often.
        classes: the rare classes.
        aimed: probability of an aimed crop in an image with a rare class.
    """

    images: np.ndarray
    classes: tuple[int, ...]
    aimed: float


def rare_crops(pixels: np.ndarray, fraction: float) -> RareCrops:
    """Choose images and aim so that ``fraction`` of the crops hold a rare class.

    Args:
        pixels: number of pixels of each class in each image, [n k].
        fraction: from 0 to below 1.
    """
    rare, n = rare_classes(pixels), len(pixels)
    holding = np.flatnonzero(pixels[:, rare].any(1))
    if not fraction or not len(holding):
        return RareCrops(np.arange(n), (), 0.0)
    others = n - len(holding)
    times = max(1, math.ceil(fraction * others / ((1 - fraction) * len(holding))))
    share = times * len(holding) / (times * len(holding) + others)
    images = np.concatenate([np.arange(n), np.tile(holding, times - 1)])
    return RareCrops(images, tuple(rare.tolist()), fraction / share)
