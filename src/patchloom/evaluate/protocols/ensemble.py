"""Ensemble of fine-tuned classifiers whose encoders were pre-trained by different tasks (MP3 section 4.2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.source import Data, Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.classification import (
    ClassPredictions,
    predict_classes,
    results_of_predictions,
    training_report,
)
from patchloom.evaluate.classifier import Classifier, ClassifierCard, class_names, load_classifier, read_classifier
from patchloom.evaluate.features import FeatureOptions
from patchloom.evaluate.settings import EvalSettings, parts_of
from patchloom.options.protocols import Ensemble
from patchloom.results.evaluation import Evaluation

_ENSEMBLE = "ensemble"


@dataclass(frozen=True)
class Member:
    """Classifier of an ensemble, with its name."""

    name: str
    model: Classifier
    card: ClassifierCard


def ensemble(run: str | Path, data: DataLike, settings: EvalSettings, options: Ensemble) -> Evaluation:
    """Average the softmax outputs of two or more fine-tuned classifiers.

    Args:
        run: classifier saved by finetune, or folder of a run that has one for this data and seed.
        data: labelled images on which the classifiers were fine-tuned.
        settings: common settings of all protocols; without test images the seed must be that of fine-tuning.
        options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: fewer than two classifiers, or classifiers with other classes or another split.
    """
    others, test_crop = options.others, options.test_crop
    paths = [str(run), *(others.split(",") if isinstance(others, str) else others)]
    paths = [path.strip() for path in paths if path.strip()]
    if len(paths) < 2:
        raise PatchloomError("an ensemble needs two or more classifiers: add others as --others A,B")
    parts = parts_of(data, settings)
    if test_crop is not None:
        FeatureOptions(test_crop).check(parts.test)
    fingerprint = parts.test.fingerprint()
    members = [_member(path, parts.test, fingerprint, settings) for path in paths]
    names = listing([member.name for member in members], "and")
    settings.end_if_dry(parts.test, f"ensemble would average {names} on {len(parts.test):,} {parts.test.noun}.")
    said = [
        predict_classes(
            member.model,
            _with_sound(parts.test, member),
            member.card.encoder,
            settings,
            options.precision,
            member.name,
            member.card.test_crop if test_crop is None else test_crop,
        )
        for member in members
    ]
    mean, agreement = average(said), agreement_of(said)
    row_settings: dict[str, Any] = {} if test_crop is None else {"test_crop": test_crop}
    row_settings |= {"members": len(members), "agreement": agreement}
    rows = results_of_predictions(_ENSEMBLE, "ensemble", row_settings, parts.test, settings, mean)
    for member, found in zip(members, said, strict=True):
        pooling = {"pooling": member.model.pooling}
        rows += results_of_predictions(member.name, "ensemble", pooling, parts.test, settings, found)
    done = (
        f"Ensemble: the mean of the softmax outputs of {len(members)} fine-tuned classifiers; nothing was trained or "
        f"chosen. Two of them predict the same class for {agreement:.1%} of the test {parts.test.noun}"
        f"{' on average' if len(members) > 2 else ''}."
    )
    return training_report("ensemble", f"Ensemble of {len(members)}: ", [done], rows, parts, settings, mean)


def _with_sound(test: Source, member: Member) -> Source:
    card = member.card.encoder
    return with_encoder_sound(Data(test, None), card.sound, card.name).train


def average(said: Sequence[ClassPredictions]) -> ClassPredictions:
    """Average predictions: the logits are the logarithms of the mean softmax outputs."""
    mean = torch.stack([found.logits.double().softmax(1) for found in said]).mean(0)
    return replace(said[0], logits=mean.log())


def agreement_of(said: Sequence[ClassPredictions]) -> float:
    """Return the fraction of images for which two classifiers predict the same class, averaged over all pairs."""
    named = [found.logits.argmax(1) for found in said]
    shares = [(one == other).double().mean().item() for one, other in combinations(named, 2)]
    return sum(shares) / len(shares)


def _member(place: str, test: Source, fingerprint: str, settings: EvalSettings) -> Member:
    path = Path(place)
    if path.is_dir():
        path = _only(path, test.name, settings.seed)
    model, card = load_classifier(path)
    names = class_names(test)
    if len(card.classes) != len(names):
        raise PatchloomError(
            f"{path} has {len(card.classes)} classes of {card.data}, and {test.name} has {len(names)}: "
            "give classifiers of the same data"
        )
    if card.classes != names:
        raise PatchloomError(f"{path} was fine-tuned on {card.data}, with other class names than {test.name}")
    if card.test != fingerprint:
        raise PatchloomError(
            f"{path} was fine-tuned with another split (data {card.data}, seed {card.seed}), so it may have been "
            f"trained on these test images: use the same data and --seed {card.seed}"
        )
    return Member(f"{card.encoder.name} ({path.stem})", model, card)


def _only(folder: Path, data: str, seed: int) -> Path:
    found = []
    for path in sorted((folder / "finetuned").glob("*.safetensors")):
        card = read_classifier(path)
        found += [path] * (card.data == data and card.seed == seed)
    if not found:
        raise PatchloomError(
            f"{folder} has no classifier of {data} and seed {seed}: create one by patchloom evaluate finetune"
        )
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise PatchloomError(f"{folder} has several classifiers of {data} and seed {seed}: name one of {names}")
    return found[0]
