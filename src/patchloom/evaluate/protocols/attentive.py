"""Attentive probe: learned queries pool the tokens of the frozen encoder (efficient probing, arXiv 2506.10178)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from patchloom.data.loader import plain_batches
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.stats import normalize
from patchloom.evaluate.attentive import AttentiveClassifier, CrossPool, EfficientPool, begin_attentive
from patchloom.evaluate.classification import note_recordings, plan_for, test_classifiers, training_report
from patchloom.evaluate.classifier import class_names
from patchloom.evaluate.frozen import INSTEAD
from patchloom.evaluate.lars_probe import refuse_accumulation
from patchloom.evaluate.recipes import ATTENTIVE, AttentiveRecipe
from patchloom.evaluate.select import Candidate, Fitted, recipe_sentences, train_candidates
from patchloom.evaluate.settings import EvalSettings, parts_of, place_in_run, share_steps
from patchloom.evaluate.subjects import Subject, open_subjects
from patchloom.look.image_grid import to_pixels
from patchloom.look.query_attention import draw_queries
from patchloom.nets.encode import attention_heads, grid_size, patch_count, width
from patchloom.nets.finetune import with_variant
from patchloom.nets.swin import refuse_hierarchical
from patchloom.options.protocols import Attentive
from patchloom.results.evaluation import Drawing, Evaluation
from patchloom.system.distributed import rank

_PICTURED = 6  # images


def attentive(run: str | Path, data: DataLike, settings: EvalSettings, options: Attentive) -> Evaluation:
    """Train queries that pool the frozen encoder's tokens, and a linear classifier on them.

    A linear probe on the mean token ranks masked image modelling below its worth; an attentive one is nearer to
    fine-tuning, at the cost of a linear probe.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: unknown encoder, data or recipe, data without labels, a Swin, queries that do not divide the
            width, or tokens that do not fit into memory.
    """
    refuse_accumulation(settings)
    share_steps(settings)
    subjects = open_subjects(run, settings)
    vit = refuse_hierarchical(subjects.ours.vit, "attentive", INSTEAD)
    parts = parts_of(data, settings, card=subjects.ours.card, run=run)
    precision, changes = options.precision, options.changes()
    plan = plan_for(options.recipe, changes, vit, parts, settings, precision, ATTENTIVE, begin_attentive)
    classes = len(class_names(parts.train))

    def build(subject: Subject, recipe: AttentiveRecipe) -> AttentiveClassifier:
        d = width(subject.vit)
        pool: Any = CrossPool(d, attention_heads(subject.vit))
        if recipe.form == "efficient":
            pool = EfficientPool(d, recipe.queries, recipe.reduce)
        return AttentiveClassifier(with_variant(subject.vit, subject.card), classes, pool, recipe.whole)

    trained = [subjects.ours, *(subjects.controls if options.control else [])]
    candidates = [Candidate(one.name, one.card, partial(build, one)) for one in trained]
    values = plan.recipe.plain()
    pooled = "one learned query attends to the patch tokens of the frozen encoder by multi-head attention"
    if values["form"] == "efficient":
        pooled = (
            f"{values['queries']} learned queries attend to the patch tokens of the frozen encoder, which are their "
            "own keys (efficient probing)"
        )
    done = f"Attentive probe: {pooled}; batch norm and a linear layer classify what they pool."
    fitted = train_candidates(candidates, plan)
    rows, found = test_classifiers("attentive", fitted, plan, precision)
    said, title = [done, recipe_sentences(plan), *note_recordings(plan)], f"Attentive probe ({options.recipe}): "
    report = training_report("attentive", title, said, rows, parts, settings, found[-1]).with_differences(True)
    place = place_in_run(run, data, options.recipe, settings.seed, "pictures", ".png", "attentive-")
    return replace(report, drawings=_drawings(place, fitted[0], parts.test, settings))


def _drawings(place: Path | None, fitted: Fitted, test: Source, settings: EvalSettings) -> tuple[Drawing, ...]:
    """Return the picture of the encoder's queries on the first test images."""
    if place is None or rank():
        return ()
    model, card = fitted.model, fitted.candidate.card
    some = test.subset(range(min(_PICTURED, len(test))))
    batches = plain_batches(some, model.size, _PICTURED, channels=model.channels)
    views = next(iter(batches)).views[0]
    with torch.inference_mode():
        images = normalize(views, card.mean, card.std)
        # class token and registers come first
        maps = model.pool.attention(model.features(images))[..., -patch_count(model.encoder) :]
    pictures = to_pixels(images, card.mean, card.std)
    content = {"pictures": pictures, "maps": maps.unflatten(-1, grid_size(model.encoder)).numpy()}
    content["title"] = f"Queries of the attentive probe of {card.name}"
    return (Drawing(draw_queries, place, content),)
