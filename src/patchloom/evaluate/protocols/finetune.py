"""Fine-tuning of the whole encoder, with training from scratch as control."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

from torch import nn

from patchloom.arguments import takes_recipe
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import print_line
from patchloom.errors import PatchloomError, check_options
from patchloom.evaluate.classifier import (
    Classifier,
    ClassifierCard,
    Pool,
    PositionChoice,
    class_names,
    save_classifier,
    variant_of,
)
from patchloom.evaluate.features import Precision
from patchloom.evaluate.recipes import Recipe
from patchloom.evaluate.settings import EvalSettings, Parts, parts_of, place_in_run, share_steps
from patchloom.evaluate.training import SCRATCH, Build, Candidate, about_control, plan_for, train_and_test
from patchloom.nets.checkpoints.format import EncoderCard, untrained_twin
from patchloom.nets.encode import patch_positions
from patchloom.nets.finetune import with_variant
from patchloom.nets.heads import InstanceHead
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.results.claims import START
from patchloom.results.evaluation import Evaluation
from patchloom.runs.encoder import load_start


@partial(takes_recipe, kind=Recipe)
def finetune(
    run: str | Path,
    data: DataLike,
    settings: EvalSettings,
    *,
    recipe: str = "small",
    positions: PositionChoice = "auto",
    control: bool = True,
    from_scratch: bool = False,
    precision: Precision = "auto",
    out: str | None = None,
    **changes: Any,
) -> Evaluation:
    """Train the whole encoder and a linear head on labelled images, with training from scratch as control.

    Args:
        run, data, settings: as in `patchloom.evaluate.protocols.evaluate`.
        recipe: small (ours), or from a paper: mae, mae-normalized, droppos, mp3, mp3-300, mp3-cifar100,
            mp3-tiny-imagenet, mp3-speech, restore, simmim, extrema, extrema-22k, extrema-few or lut; options below
            override it.
        positions: position embeddings: keep, fixed (sine-cosine), learned, relative (attention bias) or none; auto is
            keep, or learned for an encoder without positions.
        control: control training from the start of a run with --init or --from, or else from scratch.
        from_scratch: training from scratch only.
        precision: precision of products in training: float32 or bfloat16; auto is that of pretrain.
        out: output file of the classifier; by default finetuned/DATA-RECIPE-SEED.safetensors in the run.
        changes: overrides of the recipe's values.

    Raises:
        PatchloomError: unknown encoder, data or recipe, data without labels, or invalid values.
    """
    check_options(finetune, locals())
    if from_scratch and out is not None:
        raise PatchloomError("--from_scratch saves no classifier: remove --out")
    share_steps(settings)
    vit, card = settings.encoder(run, tuned=True)
    check_train_positions(changes, positions, vit)
    parts = parts_of(data, settings, card=card, run=run)
    plan = plan_for(recipe, changes, vit, card, parts.train, settings, precision)
    variant, classes = variant_of(positions, vit), class_names(parts.train)
    place = None if from_scratch else classifier_path(run, data, recipe, settings, out)
    candidates = [] if from_scratch else [pretrained_candidate(vit, card, positions, parts, settings, place)]
    start = None if from_scratch else load_start(run)
    if control and start is not None:
        candidates.append(start_candidate(start, positions, len(classes)))
    elif control or from_scratch:
        candidates.append(scratch_candidate(card, positions, len(classes), settings))
    done = f"Fine-tuning: the encoder and a linear head were trained together, positions: {variant}."
    if len(candidates) > 1:
        done += f" {about_control(start is not None)}"
    return train_and_test("finetune", "Fine-tuning", done, candidates, plan, parts)


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


def pretrained_candidate(
    vit: Encoder,
    card: EncoderCard,
    positions: PositionChoice,
    parts: Parts,
    settings: EvalSettings,
    place: Path | None,
    more: Mapping[str, Any] | None = None,
) -> Candidate:
    """Return the encoder as a candidate whose classifier is saved after training."""
    variant, classes = variant_of(positions, vit), class_names(parts.train)

    def save(model: Classifier, all_settings: dict[str, Any]) -> None:
        if place is None:
            print_line(f"  {card.name} is not a local file, so its classifier was not saved: use --out FILE")
            return
        trained_on = parts.train.name, parts.test.fingerprint(), settings.seed
        own = variant, model.pooling, classes, *trained_on, all_settings, model.norm is not None
        save_classifier(model, ClassifierCard(card, *own), place)
        print_line(f"  {card.name}: saved as {place}")

    return Candidate(
        card.name, classifier_builder(vit, card, positions, len(classes)), {"positions": variant, **(more or {})}, save
    )


def start_candidate(
    start: tuple[Encoder, EncoderCard], positions: PositionChoice, classes: int, **more: Any
) -> Candidate:
    """Return the control of a run that adapts weights: the same training from its start, with its normalisation."""
    vit, card = start
    build = classifier_builder(vit, card, positions, classes, **more)
    return Candidate(START, build, {"positions": variant_of(positions, vit)}, card=card)


def scratch_candidate(
    card: EncoderCard, positions: PositionChoice, classes: int, settings: EvalSettings, **more: Any
) -> Candidate:
    """Return the control: the same architecture with new weights."""
    twin, _ = untrained_twin(card, seed=settings.seed)
    variant = variant_of(positions, twin)
    return Candidate(SCRATCH, classifier_builder(twin, card, positions, classes, **more), {"positions": variant})


class OwnParts(TypedDict, total=False):
    """Optional parts of a classifier besides encoder and head, as arguments of `Classifier`."""

    instance: InstanceHead | None
    body: nn.Module | None
    stem: nn.Module | None
    width: int | None


def classifier_builder(
    vit: Encoder,
    card: EncoderCard,
    positions: PositionChoice,
    classes: int,
    pooling: Pool | None = None,
    **parts: Unpack[OwnParts],
) -> Build:
    """Return a function that builds a classifier on a copy of an encoder."""

    def build(recipe: Recipe) -> Classifier:
        pool = pooling or recipe.pooling
        rates, trained = (recipe.drop_path, recipe.dropout), recipe.train_positions
        encoder = with_variant(vit, card, variant_of(positions, vit), pool == "class", *rates, trained)
        return Classifier(encoder, classes, pool, **deepcopy(parts), fresh_norm=recipe.fresh_norm)

    return build


def classifier_path(
    run: str | Path, data: DataLike, label: str, settings: EvalSettings, out: str | None, what: str = ""
) -> Path | None:
    """Return the path of the saved classifier, by the recipe or another label; None if it is not saved.

    Its name begins with ``what``.

    Raises:
        PatchloomError: a single file for several seeds.
    """
    if out is not None:
        if settings.seeds > 1:
            raise PatchloomError(f"--out names one file, but --seeds {settings.seeds} writes several: remove --out")
        return Path(out)
    return place_in_run(run, data, label, settings.seed, "finetuned", ".safetensors", what)
