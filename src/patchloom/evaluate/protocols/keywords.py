"""Keyword spotting: fine-tuning on recordings of words, with trained controls and raw features (MP3, 4.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from patchloom.arguments import takes_recipe
from patchloom.audio.keywords import KeywordParts, open_keywords
from patchloom.data.source import Data
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError, check_options, listing
from patchloom.evaluate.classifier import PositionChoice, class_names, variant_of
from patchloom.evaluate.features import Precision, only_labelled
from patchloom.evaluate.frozen import raw_extractor
from patchloom.evaluate.logistic import CHOICE_VALIDATION_SHARE, linear_probe
from patchloom.evaluate.protocols.fewshot import subsample_training
from patchloom.evaluate.protocols.finetune import (
    classifier_path,
    pretrained_candidate,
    scratch_candidate,
    start_candidate,
)
from patchloom.evaluate.recipes import Recipe
from patchloom.evaluate.settings import (
    EvalSettings,
    Parts,
    limit_training_images,
    open_together,
    place_in_run,
    print_notes,
    share_steps,
)
from patchloom.evaluate.training import (
    ClassPredictions,
    about_control,
    plan_for,
    plan_training,
    recipe_sentence,
    train_and_predict,
    training_report,
)
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import input_size
from patchloom.nets.swin import Encoder
from patchloom.results.evaluation import Drawing, Evaluation
from patchloom.results.result import Result
from patchloom.runs.encoder import load_start
from patchloom.runs.held_out import seen_in_pretraining
from patchloom.system.distributed import first_decides, rank

_NAME = "keywords"
_DRAWN = "patchloom.look.charts.draw_confusion"


@partial(takes_recipe, kind=Recipe)
def keywords(
    run: str | Path,
    data: DataLike,
    settings: EvalSettings,
    *,
    words: str | list[str] | None = None,
    labels: float = 1.0,
    recipe: str = "small",
    positions: PositionChoice = "auto",
    control: bool = True,
    precision: Precision = "auto",
    out: str | None = None,
    **changes: Any,
) -> Evaluation:
    """Fine-tune on recordings of words, to classify keywords, silence and other words.

    Args:
        run, settings: as in `patchloom.evaluate.protocols.evaluate`; a run on recordings.
        data: data for `patchloom.audio.keywords.open_keywords`: Speech Commands' layout, or a folder with one
            folder per word.
        words: keywords, separated by commas (default: the ten of Speech Commands, or all classes of other data).
        labels: stratified fraction of the training recordings to use, such as 0.1, or a number of 2 or more.
        recipe: small (ours), or from a paper: mp3-speech for recordings; mae, mae-normalized, droppos, mp3,
            mp3-300, mp3-cifar100, mp3-tiny-imagenet, restore, simmim, extrema, extrema-22k, extrema-few or lut for
            images; options below override it.
        positions: position embeddings: keep, fixed, learned, relative or none, as in finetune.
        control: control training from the start of a run with --init or --from, or else from scratch.
        precision: precision of products in training: float32 or bfloat16; auto is that of pretrain.
        out: output file of the classifier; by default finetuned/keywords-DATA-RECIPE-SEED.safetensors in the
            run.
        changes: overrides of the recipe's values.

    Raises:
        PatchloomError: as for `finetune`; an encoder of images, or words that the data lacks.
    """
    check_options(keywords, locals())
    share_steps(settings)
    vit, card = settings.encoder(run, tuned=True)
    opened = _opened(data, words, card, settings)
    parts, label = _parts(opened, card, settings, run), recipe
    what: dict[str, Any] = {}
    if labels != 1:
        parts, what = subsample_training(parts, labels, None, settings.seed)
        parts = replace(parts, story=f"{parts.story} All validation recordings were used.")
        label = f"{recipe}-{labels:g}"
    plan = plan_for(recipe, changes, vit, card, parts.train, settings, precision, validation=parts.validation)
    variant, classes = variant_of(positions, vit), class_names(parts.train)
    place = classifier_path(run, data, label, settings, out, f"{_NAME}-")  # finetune on the same data has other classes
    candidates = [pretrained_candidate(vit, card, positions, parts, settings, place, what)]
    start = load_start(run)
    if control:
        beside = (
            scratch_candidate(card, positions, len(classes), settings)
            if start is None
            else start_candidate(start, positions, len(classes))
        )
        candidates.append(replace(beside, settings={**beside.settings, **what}))
    plan_training(candidates, plan, parts)
    raw_features: Any = _raw_features(vit, card, parts, settings, what) if rank() == 0 else None
    rows, found = train_and_predict(_NAME, candidates, plan, parts)
    rows.append(first_decides(raw_features))
    about = f" {about_control(start is not None)}" if control else ""
    h, w = input_size(vit)
    done = (
        f"Keyword spotting: the encoder and a linear head were trained together, positions: {variant}.{about} "
        f"{rows[-1].encoder.capitalize()} are a logistic regression on the spectrograms, {h}x{w} numbers each; "
        f"its L2 strength was chosen on a stratified {100 * CHOICE_VALIDATION_SHARE:.0f} % of the training recordings. "
        f"There are {len(classes)} classes: {listing(classes, 'and')}."
    )
    said = [done, recipe_sentence(plan, parts, rows[0].settings)]
    report = training_report(_NAME, f"Keyword spotting ({label}): ", said, rows, parts, settings, found[-1])
    picture = place_in_run(run, data, label, settings.seed, "pictures", ".png", f"{_NAME}-")
    return replace(report.with_differences(True), drawings=_drawings(picture, found[0], rows[0], classes, parts))


def _opened(data: DataLike, words: str | list[str] | None, card: EncoderCard, settings: EvalSettings) -> KeywordParts:
    """Open the recordings with the settings of the encoder."""
    if card.sound is None:
        raise PatchloomError(
            f"{card.name} is an encoder of images: keywords needs one that was pre-trained on recordings"
        )
    if settings.group is not None:
        raise PatchloomError("keywords uses the parts of the data: remove --group")
    named = words.split(",") if isinstance(words, str) else words
    with StatusMessage("listing the recordings"):
        chosen = None if named is None else [word.strip() for word in named]
        opened = open_together(lambda: open_keywords(data, chosen, settings.seed))
    print_notes(opened.notes)
    return opened.heard_as(card.sound).with_noise()


def _parts(opened: KeywordParts, card: EncoderCard, settings: EvalSettings, run: str | Path) -> Parts:
    """Return the labelled recordings and a description of their origin."""
    train, validation, test = map(only_labelled, (opened.train, opened.validation, opened.test))
    counts = f"{len(train):,} recordings for training, {len(validation):,} for validation "
    story = " ".join([card.note, f"The data has {counts}and {len(test):,} for testing."]).strip()
    with StatusMessage("looking for copies among the recordings"):
        parts = limit_training_images(Data(train, test), story + seen_in_pretraining(run, test), settings)
    return replace(parts, validation=validation)


def _raw_features(
    vit: Encoder, card: EncoderCard, parts: Parts, settings: EvalSettings, what: dict[str, Any]
) -> Callable[[], Result]:
    """Fit a logistic regression on the training recordings; return a function that tests it."""
    name, features_of, _ = raw_extractor(vit, card, settings)
    train = features_of(parts.train)
    probe, choice = linear_probe(
        train.pooled("pixels"), train.labels, seed=settings.seed, device=settings.torch_device, groups=train.groups
    )
    about = {"l2": choice.strength, "held_out_accuracy": choice.accuracy, "held_out": choice.held_out, **what}

    def row() -> Result:
        test = features_of(parts.test)
        return Result.of_images(name, _NAME, about, probe.right(test.pooled("pixels"), test.labels).cpu(), test.groups)

    return row


def _drawings(
    place: Path | None, found: ClassPredictions, row: Result, classes: tuple[str, ...], parts: Parts
) -> tuple[Drawing, ...]:
    """Return the confusion matrix of the fine-tuned encoder."""
    if place is None:
        return ()
    c, n = len(classes), len(found.labels)
    pairs = c * found.labels + found.logits.argmax(1)
    content = {
        "counts": torch.bincount(pairs, minlength=c * c).view(c, c).numpy(),
        "classes": classes,
        "title": f"{row.encoder}, fine-tuned: {row.text()} of {n:,} recordings of {Path(parts.test.name).name}",
        "caption": "Each cell: number of recordings and fraction of the row. Blue: correct; red: wrong.",
    }
    return (Drawing(_DRAWN, place, content),)
