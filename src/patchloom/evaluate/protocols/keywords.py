"""Keyword spotting: fine-tuning on recordings of words, with trained controls and raw features (MP3, 4.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from patchloom.audio.keywords import KeywordParts, open_keywords
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.classification import (
    SCRATCH,
    about_control,
    fitted_report,
    plan_for,
    results_of_answers,
    test_classifiers,
)
from patchloom.evaluate.classifier import variant_of
from patchloom.evaluate.features import class_names, only_labelled
from patchloom.evaluate.frozen import raw_extractor
from patchloom.evaluate.logistic import CHOICE_VALIDATION_SHARE, linear_probe
from patchloom.evaluate.protocols.fewshot import subsample_training
from patchloom.evaluate.protocols.finetune import saved_candidates
from patchloom.evaluate.select import end_if_dry, train_candidates
from patchloom.evaluate.settings import (
    EvalSettings,
    Parts,
    Subject,
    divide,
    named_file,
    open_subjects,
    open_together,
    place_in_run,
    print_notes,
    share_steps,
)
from patchloom.look.charts import draw_confusion
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import input_size
from patchloom.options.protocols import Keywords
from patchloom.options.values import comma_words
from patchloom.results.classes import called
from patchloom.results.evaluation import Drawing, Evaluation
from patchloom.results.result import Result
from patchloom.system.distributed import first_decides, rank

_NAME = "keywords"


def keywords(run: str | Path, data: DataLike, settings: EvalSettings, options: Keywords) -> Evaluation:
    """Fine-tune on recordings of words, to classify keywords, silence and other words.

    Args:
        run, settings, options: as in `patchloom.evaluate.protocols.evaluate`; a run on recordings.
        data: data for `patchloom.audio.keywords.open_keywords`: Speech Commands' layout, or a folder with one
            folder per word.

    Raises:
        PatchloomError: as for `finetune`; an encoder of images, or words that the data lacks.
    """
    labels, recipe, positions, precision = options.labels, options.recipe, options.positions, options.precision
    share_steps(settings)
    subjects = open_subjects(run, settings, tuned=True, fresh=SCRATCH)
    ours, start = subjects.ours, subjects.start
    opened = _opened(data, options.words, ours.card, settings)
    with StatusMessage("looking for copies among the recordings"):
        train, validation, test = map(only_labelled, (opened.train, opened.validation, opened.test))
        counts = f"{len(train):,} recordings for training, {len(validation):,} for validation and {len(test):,}"
        note = f"{ours.card.note} The data has {counts} for testing.".strip()
        parts = divide(train, validation, test, settings, note, run)
    what, label = dict[str, Any](), recipe
    if labels != 1:
        parts, what = subsample_training(parts, labels, None, settings.seed)
        parts = replace(parts, story=f"{parts.story} All validation recordings were used.")
        label = f"{recipe}-{labels:g}"
    plan = plan_for(recipe, options.changes(), ours.vit, parts, settings, precision)
    # finetune on the same data has other classes
    place = named_file(options.out, settings, "remove --out")
    place = place or place_in_run(run, data, label, settings.seed, "finetuned", ".safetensors", f"{_NAME}-")
    candidates = saved_candidates(subjects, positions, plan, precision, place, options.control, what)
    end_if_dry(candidates, plan)
    raw_features: Any = _raw_features(ours, parts, settings, what) if rank() == 0 else None
    fitted = train_candidates(candidates, plan)
    rows, found = test_classifiers(_NAME, fitted, plan, precision)
    rows += first_decides(raw_features)

    # ---- the report
    variant, classes = variant_of(positions, ours.vit), class_names(parts.train)
    about = f" {about_control(start is not None)}" if options.control else ""
    h, w = input_size(ours.vit)
    done = (
        f"Keyword spotting: the encoder and a linear head were trained together, positions: {variant}.{about} "
        f"{rows[-1].encoder.capitalize()} are a logistic regression on the spectrograms, {h}x{w} numbers each; "
        f"its L2 strength was chosen on a stratified {100 * CHOICE_VALIDATION_SHARE:.0f} % of the training recordings. "
        f"There are {len(classes)} classes: {listing(classes, 'and')}."
    )
    report = fitted_report(f"Keyword spotting ({label})", done, rows, plan, found[-1])
    picture = place_in_run(run, data, label, settings.seed, "pictures", ".png", f"{_NAME}-")
    if picture is None:
        return report
    c, tested, row = len(classes), found[0], report.quoted[0]
    pairs = c * tested.labels + tested.logits.argmax(1)
    on = f"{len(tested.labels):,} recordings of {Path(parts.test.name).name}"
    content = {
        "counts": torch.bincount(pairs, minlength=c * c).view(c, c).numpy(),
        "classes": classes,
        "title": f"{row.encoder}, fine-tuned: {called(row)}{row.text()} of {on}",
        "caption": "Each cell: number of recordings and fraction of the row. Blue: correct; red: wrong.",
    }
    return replace(report, drawings=(Drawing(draw_confusion, picture, content),))


def _opened(data: DataLike, words: str | list[str] | None, card: EncoderCard, settings: EvalSettings) -> KeywordParts:
    """Open the recordings with the settings of the encoder."""
    if card.sound is None:
        raise PatchloomError(
            f"{card.name} is an encoder of images: keywords needs one that was pre-trained on recordings"
        )
    if settings.group is not None:
        raise PatchloomError("keywords uses the parts of the data: remove --group")
    with StatusMessage("listing the recordings"):
        chosen = None if words is None else comma_words(words)
        opened = open_together(lambda: open_keywords(data, chosen, settings.seed))
    print_notes(opened.notes)
    return opened.heard_as(card.sound).with_noise()


def _raw_features(
    ours: Subject, parts: Parts[Source], settings: EvalSettings, what: dict[str, Any]
) -> Callable[[], list[Result]]:
    """Fit a logistic regression on the training recordings; return a function that tests it."""
    raw = raw_extractor(ours, settings)
    train = raw.features_of(parts.train)
    probe, choice = linear_probe(
        train.pooled("pixels"), train.labels, seed=settings.seed, device=settings.torch_device, groups=train.groups
    )
    about = {"l2": choice.strength, "held_out_accuracy": choice.accuracy, "held_out": choice.held_out, **what}

    def rows() -> list[Result]:
        test = raw.features_of(parts.test)
        features = test.pooled("pixels")
        given = test.labels, probe.predict(features), probe.scores(features), test.groups
        return results_of_answers(raw.name, _NAME, about, parts.test, settings, *given)

    return rows
