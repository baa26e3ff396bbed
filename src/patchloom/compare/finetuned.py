"""Fine-tuning of the encoders of a comparison, one more way of scoring them."""

from __future__ import annotations

from dataclasses import replace

from patchloom.evaluate.classifier import class_names
from patchloom.evaluate.protocols.finetune import classifier_builder
from patchloom.evaluate.settings import EvalSettings, Parts
from patchloom.evaluate.training import Candidate, plan_for, train_and_predict
from patchloom.nets.checkpoints.format import untrained_twin
from patchloom.results.result import Result
from patchloom.runs.encoder import load_encoder

RECIPE = "small"  # of evaluate finetune, for small data


def finetuned(place: str, untrained: bool, seed: int, parts: Parts, settings: EvalSettings, recipe: str) -> Result:
    """Fine-tune an encoder with a linear head, and return its accuracy with the outcome of each test image.

    Args:
        place: run, file or timm:NAME.
        untrained: whether to train an encoder of the same shape with new weights instead.
        seed: random seed of the new weights and the training.
        parts: labelled training and test images.
        settings: device of the training.
        recipe: recipe of ``evaluate finetune``.
    """
    vit, card = load_encoder(place)
    name = "untrained" if untrained else card.name
    if untrained:
        vit = untrained_twin(card, seed=seed)[0]
    settings = replace(settings, seed=seed, cache=False)
    plan = plan_for(recipe, {}, vit, card, parts.train, settings, "auto")
    build = classifier_builder(vit, card, "auto", len(class_names(parts.train)))
    return train_and_predict("finetune", [Candidate(name, build, {})], plan, parts)[0][0]
