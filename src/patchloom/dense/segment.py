"""Segmentation: UPerNet on the encoder, fine-tuned, or a linear layer on the frozen one, beside the same without it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.arguments import takes_recipe
from patchloom.data.loader import Batch
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.stats import normalize
from patchloom.dense.annotations.base import IGNORED, Annotated
from patchloom.dense.annotations.segmentation import class_ids, class_pixels, image_class_pixels, open_label_maps
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
from patchloom.dense.protocol import (
    DenseCandidate,
    Setup,
    best_and_worst,
    check_outputs,
    check_read,
    dense_report,
    save_model,
    set_up,
    start_candidates,
    train_each,
    trained_candidates,
    untrained_candidate,
    window_count,
)
from patchloom.dense.rare import class_weights, dice_loss, for_rare_classes, rare_crops
from patchloom.dense.recipes import FOR_RARE, PROBE, SEGMENT, ResolvedSegmentRecipe, SegmentRecipe, dense_recipe
from patchloom.dense.segmenter import PixelSegmenter, Segmenter, SegmentLogits
from patchloom.dense.training import DenseTraining, ReadPicture, predict_images
from patchloom.dense.windows import AT_ONCE, BAND, segment_image, segment_images
from patchloom.errors import PatchloomError, check_options
from patchloom.estimate import fake_numbers
from patchloom.evaluate.classifier import PositionChoice
from patchloom.evaluate.features import Precision
from patchloom.evaluate.settings import EvalSettings, print_notes
from patchloom.evaluate.training import about_control
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import input_channels, patch_side
from patchloom.nets.performance import use_kernels
from patchloom.nets.swin import Encoder
from patchloom.results.claims import CONSTANT, PIXELS, UNTRAINED
from patchloom.results.evaluation import Drawing, Evaluation
from patchloom.results.result import Outcomes, Result
from patchloom.system.distributed import rank

# Training and testing of segmentation. Letters: b batch, c channels, h w height and width, k classes, n images.


_TENTHS = 10
FOREGROUND = "foreground IoU"  # name of the measure
_NOTHING = 0.01  # foreground IoU below which nothing but the most frequent class was found


class SegmentTraining(DenseTraining[Tensor]):
    """The training of a `Segmenter`: loss of each pixel that counts, and of a second head's answer.

    Arguments are those of `DenseTraining`.
    """

    measure = "mIoU"
    model: Segmenter
    recipe: ResolvedSegmentRecipe

    def __init__(
        self,
        model: Segmenter,
        train: Annotated[Tensor],
        held: Annotated[Tensor] | None,
        recipe: ResolvedSegmentRecipe,
        *arguments: Any,
        **options: Any,
    ) -> None:
        pixels = image_class_pixels(train) if recipe.class_weights or recipe.rare_crops else np.zeros((len(train), 1))
        crops = rare_crops(pixels, recipe.rare_crops)
        if len(crops.images) > len(train):
            train = train.subset(crops.images)
        super().__init__(model, train, held, recipe, *arguments, **options)
        how = recipe.resized, recipe.scale, recipe.flip, recipe.color
        self.augment = PixelAugment(self.model.size, *how, crops.classes, crops.aimed)
        self.weights = class_weights(pixels).to(self.device) if recipe.class_weights else None
        # what `overlaps` gives of about the last tenth of the steps
        self.answered = torch.zeros(3, len(train.classes), device=self.device)
        self.classes = train.classes

    def _loss(self, batch: Batch) -> Tensor:
        truth = torch.stack(batch.truths).to(self.device, non_blocking=True).long()
        images = normalize(batch.views[0], self.card.mean, self.card.std)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            answer = self.parallel(images)
        self.answered = self.answered * max(0.0, 1 - _TENTHS / self.steps) + batch_overlaps(answer.main.detach(), truth)
        return self._loss_of(answer, truth)

    def _remark(self) -> str:
        if _TENTHS * self.step < self.steps or not foreground_iou(self.answered) < _NOTHING:
            return ""
        return f"nothing but {self.classes[int(self.answered[2].argmax())]} found in training"

    def _outline(self, images: Tensor) -> Tensor:
        return self._loss_of(self.model(images), images[:, 0].long())

    def _loss_of(self, answer: SegmentLogits, truth: Tensor) -> Tensor:
        how = self.weights, self.recipe.loss == "dice"
        loss = pixel_loss(answer.main, truth, *how)
        if answer.auxiliary is not None:
            loss = loss + self.recipe.auxiliary * pixel_loss(answer.auxiliary, truth, *how)
        return loss

    def bytes_of_test(self, image: tuple[int, int]) -> int:
        """Those of the windows at once, of all their logits, and of the image's, a band after the other."""
        count = window_count(image, self.recipe.resized, self.recipe.size)
        self.model.eval()
        use_kernels(self.model, "torch")  # native kernels need numbers
        with fake_numbers(self.model, self.device.type) as live, torch.no_grad():
            logits = self._fake(lambda views: self.model(views).main, min(count, AT_ONCE))
        self.model.train()
        return live.peak + 4 * (count * logits[0].numel() + 4 * min(BAND, self.model.classes * math.prod(image)))

    def score(self, images: Annotated[Tensor]) -> float:
        """mIoU."""
        found, _ = confusion_per_image(
            self.tested, images, self.card, self.settings, self.recipe.resized, half=self.half
        )
        iou = mean_iou(found.sum(0)).item()
        return 0.0 if math.isnan(iou) else iou  # nan: no pixel counts


def pixel_loss(logits: Tensor, truth: Tensor, weights: Tensor | None = None, dice: bool = False) -> Tensor:
    """Mean cross-entropy of the pixels that count, and perhaps the Dice loss; 0 if no pixel counts.

    Args:
        logits: [b k h' w'], resized to the truth bilinearly.
        truth: [b h w], with `IGNORED`.
        weights: [k] weights of the classes, each at least 1; the mean is weighted, too.
        dice: whether to add `dice_loss`.
    """
    whole = F.interpolate(logits.float(), truth.shape[-2:], mode="bilinear", align_corners=False)
    each = F.cross_entropy(whole, truth, weights, ignore_index=IGNORED, reduction="sum")
    counted = truth != IGNORED
    size = counted.sum() if weights is None else (weights[truth.clamp_min(0)] * counted).sum()
    loss = each / size.clamp_min(1)
    return loss + dice_loss(whole, truth) if dice else loss


def batch_overlaps(logits: Tensor, truth: Tensor) -> Tensor:
    """Return what `overlaps` gives, float [3 k], at the places of the logits, without waiting for a GPU.

    Args:
        logits: [b k h' w'].
        truth: [b h w], with `IGNORED`.
    """
    labels = F.interpolate(truth[:, None].float(), logits.shape[-2:], mode="nearest")[:, 0].long().flatten()
    answers, counted = logits.argmax(1).flatten(), (labels >= 0).float()
    none, labels = counted.new_zeros(logits.shape[1]), labels.clamp_min(0)
    common = none.index_add(0, labels, counted * (answers == labels))
    there, answered = none.index_add(0, labels, counted), none.index_add(0, answers, counted)
    return torch.stack([common, there + answered - common, there])


def confusion_per_image(
    model: Segmenter,
    images: Annotated[Tensor],
    card: EncoderCard,
    settings: EvalSettings,
    side: int | None,
    *,
    precision: Precision = "auto",
    half: bool | None = None,
    name: str = "",
) -> tuple[Tensor, list[str]]:
    """Compare answers and truth of every image; several processes take turns, and all must ask.

    Returns:
        [n 3 k], what `overlaps` gives of each image, in order, with zeros for the unreadable ones; their names.
    """

    def segmented(some: list[Tensor], device: torch.device, half: bool) -> list[Tensor]:
        return segment_images(model, some, card.mean, card.std, side, device, half)

    def compared(picture: ReadPicture, answer: Tensor) -> Tensor:
        return overlaps(confusion(answer, picture.truth, model.classes))

    how: dict[str, Any] = {"precision": precision, "half": half}
    what = name and f"{name}: segmenting {images.images.name}"
    found = predict_images(model, images, settings, segmented, compared, truth=True, what=what, **how)
    none = torch.zeros(3, model.classes, dtype=torch.int64)
    unreadable = [images.images.describe(i) for i, one in enumerate(found) if one is None]
    return torch.stack([none if one is None else one for one in found]), unreadable


_OF_ENCODER = ("layer_decay", "drop_path", "head_width", "auxiliary")  # and of UPerNet: not of a linear layer
_DONE = {
    "upernet": ("Segmentation: UPerNet on four evenly spaced blocks, trained together with the encoder."),
    "linear": "Segmentation: a batch norm and a linear layer on the last tokens of the frozen encoder.",
}
_BESIDE = "Untrained is the same on fresh weights, raw pixels on the pixels of each patch."
_MEASURED = (
    "mIoU is the mean over the classes of intersection over union, each of one sum over all test images, and aAcc the "
    "share of right pixels. Foreground IoU is the mean over the classes but the most frequent one of the test images. "
    "The best constant answers that one, and by foreground IoU the second most frequent one. "
    "Intervals are over the test images, or their groups (jackknife)."
)


@functools.partial(takes_recipe, kind=SegmentRecipe)
def segment(
    run: str | Path,
    data: DataLike,
    settings: EvalSettings,
    *,
    recipe: str = "small",
    head: Literal["upernet", "linear"] = "upernet",
    positions: PositionChoice = "auto",
    ignore: int = 255,
    threshold: int | None = None,
    control: bool = True,
    from_scratch: bool = False,
    precision: Precision = "auto",
    save: bool = False,
    out: str | None = None,
    **changes: Any,
) -> Evaluation:
    """Train a head that gives each pixel a class, and measure mIoU on the test images.

    UPerNet (Xiao et al. 2018) on four evenly spaced blocks is trained together with the encoder, beside the same from
    scratch, or from the start of a run with --init or --from: the papers' protocol. linear is a batch norm and a linear
    layer on the frozen encoder's last tokens, beside the start, an untrained encoder and raw pixels: it is fast, and
    measures the frozen features.

    Args:
        run, settings: as in `patchloom.evaluate.protocols.evaluate`.
        data: images with a class for each pixel, as for `patchloom.dense.annotations.segmentation.open_label_maps`.
        recipe: small (ours), or a paper's, which train UPerNet: mae, lut, droppos, restore, restore-4e-4 or extrema;
            each value below replaces one of the recipe.
        head: segmentation head: upernet, or linear on the frozen encoder.
        positions: position embeddings: keep (the encoder's), fixed (sincos), learned, relative, or none; auto: keep, or
            learned for an encoder without positions. A frozen encoder keeps its own.
        ignore: number in the label maps of pixels that do not count.
        threshold: number in the label maps from which on pixels are the second of two classes, such as 128 for masks
            with soft edges; then all pixels count.
        control: whether to train the controls as well.
        from_scratch: whether to train from scratch only.
        precision: precision of the training: float32, or bfloat16 products; auto: that of pretrain.
        save: whether to save the trained model, for the verb predict.
        out: file for the saved model; default: segmented/DATA-RECIPE-SEED.safetensors in the run.
        changes: changed values of the recipe.

    Raises:
        PatchloomError: no such encoder, data or recipe, label maps that do not fit, or values that do not.
    """
    check_options(segment, locals())
    linear = head == "linear"
    if linear:
        _check_linear(recipe, from_scratch, positions, changes)
        positions = "keep"
    check_outputs(run, settings, from_scratch, save, out)
    known = {**SEGMENT, "small": PROBE} if linear else SEGMENT
    label = "linear" if linear else recipe
    asked = dense_recipe(recipe, known, changes, settings.batch_size)
    how = positions, precision, label, _OF_ENCODER if linear else ()
    opened = functools.partial(open_label_maps, data, ignore, threshold=threshold)
    setup = set_up(run, opened, settings, recipe, asked, *how)
    if any(getattr(asked, name) == "auto" for name in FOR_RARE):
        values, rarity = for_rare_classes(asked, setup.recipe, class_pixels(setup.train), setup.classes)
        print_notes([rarity] if rarity else [])
        setup = replace(setup, recipe=values)
    values = setup.recipe
    classes = setup.classes
    options: dict[str, Any] = {"head": head, "head_width": values.head_width, "auxiliary": values.auxiliary > 0}

    def begin(model: Segmenter, card: EncoderCard) -> SegmentTraining:
        kernels = setup.kernels if isinstance(model, Segmenter) else "torch"
        images = setup.train, setup.held, values, card, settings
        return SegmentTraining(model, *images, half=setup.half, kernels=kernels)

    def built(encoder: Encoder) -> Segmenter:
        return Segmenter(setup.encoder(encoder), len(classes), **options)

    def pixels() -> PixelSegmenter:
        return PixelSegmenter(len(classes), setup.size, input_channels(setup.vit), patch_side(setup.vit))

    candidates, beside = trained_candidates(setup, built, control and not linear, from_scratch)
    if linear and control:
        starts = start_candidates(setup, built)
        untrained, raw = untrained_candidate(UNTRAINED, setup, built), DenseCandidate(PIXELS, pixels, setup.card)
        candidates, beside = [*candidates, *starts, untrained, raw], _BESIDE
        if starts:
            beside = f"{about_control(True)} {beside}"
    models = train_each(candidates, setup, begin)
    if save or out is not None:
        save_model(models[0][0], setup, "segment", values.resized, options, out, class_ids(setup.train))
    # every choice has been made: now the test images are read
    found, rows, lost = [], [], list[str]()
    for candidate, (model, chosen) in zip(candidates, models, strict=True):
        name = f"  {candidate.name}"
        each, lost = confusion_per_image(
            model, setup.parts.test, candidate.card, settings, values.resized, precision=precision, name=name
        )
        found.append(each)
        groups = setup.parts.test.images.groups
        rows.append(_rows(candidate.name, setup.row_settings(head=head, **chosen), each, classes, groups))
    check_read(setup.parts.test, lost)
    most, second = (
        _rows(CONSTANT, {"answer": classes[best]}, constant, classes, setup.parts.test.images.groups)
        for best, constant in (constant_overlaps(found[0], place) for place in (0, 1))
    )
    answers = [row for row in most if row.measure != FOREGROUND]
    answers += [row for row in second if row.measure == FOREGROUND]
    title = "Linear segmentation of the frozen encoder" if linear else f"Segmentation ({recipe}, UPerNet)"
    drawings = _drawings(models[0][0], found[0], setup)
    done = " ".join(filter(None, [_DONE[head], beside]))
    return dense_report(setup, title, "mIoU", rows, [done, _MEASURED], lost, drawings, answers, FOREGROUND)


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
    """Return rows of mIoU, pixel accuracy, foreground IoU and the IoU of each class that occurs, with intervals.

    Args:
        each: [n 3 k], `overlaps` of each test image.
        groups: [n] groups of the test images; None: no groups.
    """
    total, rows = each.sum(0), []
    measures = {"mIoU": mean_iou, "aAcc": pixel_accuracy, FOREGROUND: foreground_iou}
    for measure, statistic in measures.items():
        value, pseudo = statistic(total), pseudo_values(statistic, each, groups)
        if value != value:  # nan: the test images show one class alone
            continue
        low, high = interval(value, pseudo)
        numbers, outcomes = (value.item(), low.item(), high.item()), Outcomes(pseudo.cpu().numpy(), pseudo=True)
        rows.append(Result(measure, *numbers, len(each), name, "segment", settings, outcomes=outcomes))
    values = class_ious(total)
    lows, highs = interval(values, pseudo_values(class_ious, each, groups))
    for called, value, low, high in zip(classes, values.tolist(), lows.tolist(), highs.tolist(), strict=True):
        if value == value:  # nan: neither in truth nor in answers
            rows.append(Result(called, value, low, high, len(each), name, "segment", settings))
    return rows


def _drawings(model: Segmenter, each: Tensor, setup: Setup[Tensor, ResolvedSegmentRecipe]) -> tuple[Drawing, ...]:
    """The best and the worst test images: image, truth, answer."""
    path = setup.place("pictures", ".png", "segment-")
    if path is None or rank():
        return ()
    scores = mean_iou(each).tolist()
    test, card = setup.parts.test, setup.card
    rows = []
    for i in best_and_worst(scores):
        image = test.images.read_as(i, model.channels)
        answer = segment_image(model.cpu(), image, card.mean, card.std, setup.recipe.resized)
        title = f"{Path(test.images.describe(i)).name}: {scores[i]:.1%} mIoU"
        rows.append(MapRow(image, test.truth(i), answer, title))
    return (Drawing(segmentation_picture, path, {"rows": rows, "classes": setup.classes}),)
