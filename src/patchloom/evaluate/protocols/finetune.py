"""Fine-tuning of the whole encoder, with training from scratch as control."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import print_line
from patchloom.errors import PatchloomError
from patchloom.evaluate.classification import SCRATCH, about_control, calibration_of, plan_for, train_and_test
from patchloom.evaluate.classifier import Classifier, ClassifierCard, Pool, class_names, save_classifier, variant_of
from patchloom.evaluate.recipes import Recipe
from patchloom.evaluate.select import Candidate
from patchloom.evaluate.settings import EvalSettings, Parts, parts_of, place_in_run, share_steps
from patchloom.evaluate.subjects import Subject, open_subjects
from patchloom.nets.encode import patch_positions
from patchloom.nets.finetune import with_variant
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.options.evaluate import PositionChoice
from patchloom.options.protocols import Finetune
from patchloom.results.evaluation import Evaluation


def finetune(run: str | Path, data: DataLike, settings: EvalSettings, options: Finetune) -> Evaluation:
    """Train the whole encoder and a linear head on labelled images, with training from scratch as control.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: unknown encoder, data or recipe, data without labels, or invalid values.
    """
    recipe, positions, precision, changes = options.recipe, options.positions, options.precision, options.changes()
    if options.from_scratch and options.out is not None:
        raise PatchloomError("--from_scratch saves no classifier: remove --out")
    share_steps(settings)
    ours, start, scratch = open_subjects(run, settings, tuned=True, fresh=SCRATCH)
    check_train_positions(changes, positions, ours.vit)
    parts = parts_of(data, settings, card=ours.card, run=run)
    plan = plan_for(recipe, changes, ours.vit, parts, settings, precision)
    if options.from_scratch:
        candidates = [candidate(scratch, positions, parts)]
    else:
        place = classifier_path(run, data, recipe, settings, options.out)
        save = partial(save_candidate, ours, positions, parts, settings.seed, place)
        calibrate = partial(calibration_of, plan, ours.card, precision)
        candidates = [replace(candidate(ours, positions, parts), save=save, calibrate=calibrate)]
        candidates += [candidate(start or scratch, positions, parts)] * options.control
    done = (
        "Fine-tuning: the encoder and a linear head were trained together, positions: "
        f"{variant_of(positions, ours.vit)}."
    )
    if len(candidates) > 1:
        done += f" {about_control(start is not None)}"
    return train_and_test("finetune", "Fine-tuning", done, candidates, plan, precision)


def check_train_positions(changes: Mapping[str, Any], positions: PositionChoice, vit: Encoder) -> None:
    """Refuse ``train_positions`` among a user's ``changes`` where there are no position embeddings to train."""
    variant = variant_of(positions, vit)
    if not changes.get("train_positions") or variant == "learned":
        return
    if variant != "keep":
        raise PatchloomError(
            f"--positions {variant} has no position embeddings to train: leave out --train_positions, or use "
            "--positions keep"
        )
    if is_hierarchical(vit) or patch_positions(vit) is None:
        raise PatchloomError("the encoder has no position embeddings to train: leave out --train_positions")


def candidate(
    subject: Subject,
    positions: PositionChoice,
    parts: Parts[Source],
    *,
    pooling: Pool | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Candidate:
    """Return a candidate: a classifier on a copy of an encoder, on its stem if it has one.

    ``pooling`` None is that of the recipe; ``settings`` are those of the results, besides the positions.
    """
    variant, classes = variant_of(positions, subject.vit), len(class_names(parts.train))

    def build(recipe: Recipe) -> Classifier:
        pool = pooling or recipe.pooling
        rates, trained = (recipe.drop_path, recipe.dropout), recipe.train_positions
        encoder = with_variant(subject.vit, subject.card, variant, pool == "class", *rates, trained)
        stem, head = deepcopy(subject.stem), deepcopy(subject.head)
        return Classifier(encoder, classes, pool, instance=head, stem=stem, fresh_norm=recipe.fresh_norm)

    return Candidate(subject.name, subject.card, build, {"positions": variant, **(settings or {})})


def save_candidate(
    subject: Subject,
    positions: PositionChoice,
    parts: Parts[Source],
    seed: int,
    place: Path | None,
    model: Classifier,
    settings: dict[str, Any],
) -> None:
    """Save a trained classifier, with the values of the recipe that its training had, and its calibration."""
    card, settings = subject.card, dict(settings)
    calibration = settings.pop("calibration", {})
    if place is None:
        print_line(f"  {card.name} is not a local file, so its classifier was not saved: use --out FILE")
        return
    trained_on = class_names(parts.train), parts.train.name, parts.test.fingerprint(), seed
    variant = variant_of(positions, subject.vit)
    about = ClassifierCard(
        card,
        variant,
        model.pooling,
        *trained_on,
        settings,
        fresh_norm=model.norm is not None,
        instance={} if model.instance is None else model.instance.sizes,
        stem={} if model.stem is None else model.stem.sizes,
        calibration=calibration,
    )
    save_classifier(model, about, place)
    known = about.calibrated
    said = (
        "not calibrated, as no validation images were held out" if known is None else known.sentence(parts.train.noun)
    )
    print_line(f"  {card.name}: saved as {place}, {said}")


def classifier_path(
    run: str | Path, data: DataLike, label: str, settings: EvalSettings, out: str | None, what: str = ""
) -> Path | None:
    """Return the path of the saved classifier, whose name begins with ``what``; None if it is not saved."""
    if out is not None:
        if settings.seeds > 1:
            raise PatchloomError(f"--out names one file, but --seeds {settings.seeds} writes several: remove --out")
        return Path(out)
    return place_in_run(run, data, label, settings.seed, "finetuned", ".safetensors", what)
