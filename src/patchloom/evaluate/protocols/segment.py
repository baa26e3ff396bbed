"""Segmentation: UPerNet on the encoder, fine-tuned, or a linear layer on the frozen one, beside the same without it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from patchloom.data import DataLike, to_channels
from patchloom.data.annotated import class_ids, open_label_maps
from patchloom.errors import PatchloomError
from patchloom.evaluate.classifier import PositionChoice
from patchloom.evaluate.dense.compare import (
    Candidate,
    best_and_worst,
    check_outputs,
    check_read,
    keep,
    report_of,
    train_each,
)
from patchloom.evaluate.dense.confusion import class_ious, mean_iou, pixel_accuracy
from patchloom.evaluate.dense.intervals import interval, pseudo_values
from patchloom.evaluate.dense.recipes import PROBE, SEGMENT, SegmentRecipe
from patchloom.evaluate.dense.segmenting import SegmentTraining, compared_with_truth
from patchloom.evaluate.dense.setup import Setup, set_up
from patchloom.evaluate.dense.sliding import segment_image
from patchloom.evaluate.features import Precision
from patchloom.evaluate.frozen import PIXELS, UNTRAINED
from patchloom.evaluate.recipe_options import takes_recipe
from patchloom.evaluate.report import Drawing, Report, Row
from patchloom.evaluate.settings import EvalSettings
from patchloom.evaluate.trained import SCRATCH
from patchloom.hints import check_options
from patchloom.look.dense import MapRow
from patchloom.nets.dense.segmenter import PixelSegmenter, Segmenter
from patchloom.nets.encode import input_channels, patch_side
from patchloom.nets.hierarchical import Encoder
from patchloom.nets.weights import untrained_twin
from patchloom.processes import rank

_OF_ENCODER = ("layer_decay", "drop_path", "head_width", "auxiliary")  # and of UPerNet: not of a linear layer
_DONE = {
    "upernet": ("Segmentation: UPerNet on four evenly spaced blocks, trained together with the encoder."),
    "linear": "Segmentation: a batch norm and a linear layer on the last tokens of the frozen encoder.",
}
_BESIDE = {
    "upernet": " From scratch is the same with fresh weights.",
    "linear": " Untrained is the same on fresh weights, raw pixels on the pixels of each patch.",
}
_MEASURED = (
    "mIoU is the mean over the classes of intersection over union, each of one sum over all test images, and aAcc the "
    "share of right pixels; intervals are over the test images (jackknife)."
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
    control: bool = True,
    from_scratch: bool = False,
    precision: Precision = "auto",
    save: bool = False,
    out: str | None = None,
    **changes: Any,
) -> Report:
    """Train a head that gives each pixel a class, and measure mIoU on the test images.

    UPerNet (Xiao et al. 2018) stands on four evenly spaced blocks, and the encoder is trained with it, beside the same
    from scratch: the papers' protocol. linear is a batch norm and a linear layer on the frozen encoder's last tokens,
    beside an untrained encoder and raw pixels: quick, and it shows what the encoder knows by itself.

    Args:
        run, settings: as in `patchloom.evaluate.evaluate`.
        data: images with a class for each pixel, as `patchloom.data.annotated.open_label_maps` takes them.
        recipe: small (ours), or a paper's, which train UPerNet: mae, lut, droppos, restore, restore-4e-4 or extrema;
            each value below replaces one of its own.
        head: upernet, or linear on the frozen encoder.
        positions: keep the encoder's, fixed sine-cosine, learned, relative, or none; auto is keep, or learned for an
            encoder without positions; a frozen encoder keeps its own.
        ignore: number in the label maps of pixels that do not count.
        control: train the controls, too.
        from_scratch: train only from scratch.
        precision: of the training: float32, or bfloat16 products; auto is bfloat16 where that is clearly faster.
        save: keep the trained model, by which the verb predict writes label maps.
        out: file of the saved model; by default segmented/DATA-RECIPE-SEED.safetensors in the run.
        changes: values of the recipe.

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
    how = known, changes, positions, precision, label, _OF_ENCODER if linear else ()
    setup = set_up(run, lambda: open_label_maps(data, ignore), settings, recipe, *how)
    values, classes = setup.recipe, setup.classes
    options = {"head": head, "head_width": values.head_width, "auxiliary": values.auxiliary > 0}

    def begin(model: Segmenter) -> SegmentTraining:
        native = setup.native and isinstance(model, Segmenter)
        images = setup.train, setup.held, values, setup.card, settings
        return SegmentTraining(model, *images, half=setup.half, native=native)

    def built(encoder: Encoder) -> Segmenter:
        return Segmenter(setup.encoder(encoder), len(classes), **options)

    def pixels() -> PixelSegmenter:
        return PixelSegmenter(len(classes), setup.size, input_channels(setup.vit), patch_side(setup.vit))

    def untrained() -> Segmenter:
        return built(untrained_twin(setup.card, seed=settings.seed)[0])

    candidates = [] if from_scratch else [Candidate(setup.card.name, lambda: built(setup.vit))]
    if linear and control:
        candidates += [Candidate(UNTRAINED, untrained), Candidate(PIXELS, pixels)]
    elif control or from_scratch:
        candidates.append(Candidate(SCRATCH, untrained))
    models = train_each(candidates, setup, begin)
    if save or out is not None:
        keep(models[0][0], setup, "segment", values.resized, options, out, class_ids(setup.train))
    # every choice has been made: now the test images are read
    found, rows, lost = [], [], []
    for candidate, (model, chosen) in zip(candidates, models, strict=True):
        how = {"precision": precision, "name": f"  {candidate.name}"}
        each, lost = compared_with_truth(model, setup.parts.test, setup.card, settings, values.resized, **how)
        found.append(each)
        rows.append(_rows(candidate.name, setup.row_settings(head=head, **chosen), each, classes))
    check_read(setup.parts.test, lost)
    title = "Linear segmentation of the frozen encoder" if linear else f"Segmentation ({recipe}, UPerNet)"
    drawings = _drawings(models[0][0], found[0], setup)
    done = _DONE[head] + _BESIDE[head] * (len(candidates) > 1)
    return report_of(setup, title, "mIoU", rows, [done, _MEASURED], lost, drawings)


def _check_linear(recipe: str, from_scratch: bool, positions: str, changes: Mapping[str, Any]) -> None:
    if recipe != "small":
        raise PatchloomError(f"--recipe {recipe} trains UPerNet: leave it out with --head linear")
    if from_scratch:
        raise PatchloomError("--head linear leaves the encoder as it is, so nothing is trained from scratch")
    if positions not in ("auto", "keep"):
        raise PatchloomError(f"--head linear leaves the encoder as it is: leave out --positions {positions}")
    for name in _OF_ENCODER:
        if changes.get(name) is not None:
            raise PatchloomError(f"--{name} has no effect with --head linear, which trains one layer: leave it out")


def _rows(name: str, settings: dict[str, Any], each: Tensor, classes: Sequence[str]) -> list[Row]:
    """mIoU, pixel accuracy and the IoU of each class that occurs, with intervals; ``each`` [n 3 k] is of the images."""
    total, rows = each.sum(0), []
    for measure, statistic in {"mIoU": mean_iou, "aAcc": pixel_accuracy}.items():
        value, pseudo = statistic(total), pseudo_values(statistic, each)
        low, high = interval(value, pseudo)
        row = Row(name, "-", "segment", {**settings, "measure": measure}, value.item(), low.item(), high.item())
        rows.append(replace(row, pseudo=pseudo))
    values = class_ious(total)
    lows, highs = interval(values, pseudo_values(class_ious, each))
    for called, value, low, high in zip(classes, values.tolist(), lows.tolist(), highs.tolist(), strict=True):
        if value == value:  # nan: neither in truth nor in answers
            rows.append(Row(name, "-", "segment", {**settings, "measure": called}, value, low, high))
    return rows


def _drawings(model: Segmenter, each: Tensor, setup: Setup[Tensor, SegmentRecipe]) -> tuple[Drawing, ...]:
    """The best and the worst test images: image, truth, answer."""
    path = setup.place("pictures", ".png", "segment-")
    if path is None or rank():
        return ()
    scores = mean_iou(each).tolist()
    test, card = setup.parts.test, setup.card
    rows = []
    for i in best_and_worst(scores):
        image = to_channels(test.images.read(i), model.channels)
        answer = segment_image(model.cpu(), image, card.mean, card.std, setup.recipe.resized)
        title = f"{Path(test.images.describe(i)).name}: {scores[i]:.1%} mIoU"
        rows.append(MapRow(image, test.truth(i), answer, title))
    return (Drawing("patchloom.look.dense.segmentation_picture", path, {"rows": rows, "classes": setup.classes}),)
