"""Attentive probe: learned queries pool the tokens of the frozen encoder (efficient probing, arXiv 2506.10178)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from patchloom.data.loader import plain_batches
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.stats import normalize
from patchloom.evaluate.attentive import (
    AttentiveClassifier,
    CrossPool,
    EfficientPool,
    PatchClassifier,
    begin_attentive,
    shared_queries,
)
from patchloom.evaluate.classification import note_recordings, plan_for, test_classifiers, training_report
from patchloom.evaluate.classifier import class_names
from patchloom.evaluate.frozen import INSTEAD
from patchloom.evaluate.lars_probe import refuse_accumulation
from patchloom.evaluate.recipes import ATTENTIVE, AttentiveRecipe, ResolvedRecipe
from patchloom.evaluate.select import Candidate, Fitted, Plan, recipe_sentences, train_candidates
from patchloom.evaluate.settings import EvalSettings, Parts, parts_of, place_in_run, share_steps
from patchloom.evaluate.subjects import Subject, open_subjects
from patchloom.look.attention import draw_queries
from patchloom.look.sheet import to_pixels
from patchloom.nets.encode import attention_heads, grid_size, patch_count, width
from patchloom.nets.finetune import with_variant
from patchloom.nets.swin import PlainViT, refuse_hierarchical
from patchloom.options.evaluate import Precision
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
    trained = [subjects.ours, *(subjects.controls if options.control else [])]
    report, fitted = attentive_report(trained, plan, precision)
    place = place_in_run(run, data, options.recipe, settings.seed, "pictures", ".png", "attentive-")
    return replace(report, drawings=_drawings(place, fitted[0], parts.test, settings))


def small_plan(
    vit: PlainViT, parts: Parts[Source], settings: EvalSettings, precision: Precision = "auto"
) -> Plan[Source, ResolvedRecipe]:
    """Return the plan of the recipe small, with as many of its queries as share the width of the encoder."""
    queries = shared_queries(width(vit), ATTENTIVE["small"][0].queries)
    return plan_for("small", {"queries": queries}, vit, parts, settings, precision, ATTENTIVE, begin_attentive)


def candidate(subject: Subject, parts: Parts[Source], *, raw: bool = False) -> Candidate:
    """Return a candidate: an attentive classifier on a frozen encoder, or on the ``raw`` patches of its images."""
    classes = len(class_names(parts.train))

    def build(recipe: AttentiveRecipe) -> AttentiveClassifier:
        encoder, d = with_variant(subject.vit, subject.card), width(subject.vit)
        if raw:
            return PatchClassifier(encoder, classes, recipe.queries)
        pool: Any = CrossPool(d, attention_heads(subject.vit))
        if recipe.form == "efficient":
            pool = EfficientPool(d, recipe.queries, recipe.reduce)
        return AttentiveClassifier(encoder, classes, pool, recipe.whole)

    return Candidate(subject.name, subject.card, build)


def attentive_report(
    subjects: Sequence[Subject], plan: Plan[Source, ResolvedRecipe], precision: Precision, quiet: bool = False
) -> tuple[Evaluation, list[Fitted]]:
    """Train and test an attentive classifier on each subject; return the report, and what was trained."""
    values, parts = plan.recipe.plain(), plan.parts
    pooled = "one learned query attends to the patch tokens of the frozen encoder by multi-head attention"
    if values["form"] == "efficient":
        pooled = (
            f"{values['queries']} learned queries attend to the patch tokens of the frozen encoder, which are their "
            "own keys (efficient probing)"
        )
    done = f"Attentive probe: {pooled}; batch norm and a linear layer classify what they pool."
    fitted = train_candidates([candidate(one, parts) for one in subjects], plan, quiet=quiet)
    rows, found = test_classifiers("attentive", fitted, plan, precision)
    said, title = [done, recipe_sentences(plan), *note_recordings(plan)], f"Attentive probe ({plan.name}): "
    report = training_report("attentive", title, said, rows, parts, plan.settings, found[-1])
    return report.with_differences(True), fitted


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
