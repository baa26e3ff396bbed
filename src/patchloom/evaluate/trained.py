"""What the protocols that train share: the choice of a base learning rate, controls that are trained in the same way,
and test images that are read once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchloom.data import Source, hold_out
from patchloom.data.groups import splittable
from patchloom.data.sound.hearing import for_the_other_kind
from patchloom.errors import PatchloomError
from patchloom.evaluate.answers import Answers, answers
from patchloom.evaluate.classifier import Classifier, class_names
from patchloom.evaluate.features import Precision, classes_of, labels_of, trains_in_bfloat16
from patchloom.evaluate.fit import FitPlan, seconds_of_step, seeded, train
from patchloom.evaluate.frozen import majority
from patchloom.evaluate.loop import Trained
from patchloom.evaluate.pace import TimeLeft, waiting_for
from patchloom.evaluate.papers import RECIPES, Sized, recipe_for
from patchloom.evaluate.recipes import OF_IMAGES, OF_RECORDINGS, Recipe
from patchloom.evaluate.report import Report, Row, lost_images
from patchloom.evaluate.settings import EvalSettings, Parts
from patchloom.nets.native.choice import choose_kernels
from patchloom.nets.weights import EncoderCard
from patchloom.waiting import duration

SCRATCH = "from scratch"
RATE_VALIDATION_SHARE = 0.1
_MEASURED_FROM = 100  # steps: fewer are made sooner than told about

Build = Callable[[Recipe], Classifier]


@dataclass(frozen=True)
class Candidate:
    """A model to be trained and tested: the encoder or a control.

    Attributes:
        name: in the report.
        build: makes a classifier; random values come from torch's global generator.
        settings: its own, for the row.
        save: is called once with the trained classifier and all settings, before any test image is read.
    """

    name: str
    build: Build
    settings: Mapping[str, Any]
    save: Callable[[Classifier, dict[str, Any]], None] | None = None


def plan_for(
    name: str,
    changes: Mapping[str, Any],
    vit: VisionTransformer,
    card: EncoderCard,
    train_on: Source,
    settings: EvalSettings,
    precision: Precision,
    known: Mapping[str, Sized] = RECIPES,
    validation: Source | None = None,
    noise: Sequence[Tensor] = (),
) -> FitPlan:
    """The plan for an encoder and training images; ``changes`` of the recipe may have a list of values for ``blr``.

    The recipe is one of those that are ``known``; ``validation`` and ``noise`` are as `FitPlan` has them.

    Raises:
        PatchloomError: no such recipe, an invalid value, or too few images for their classes.
    """
    if settings.batch_size != "auto":
        changes = {**changes, "batch": settings.batch_size}
    given = changes.get("blr")
    rates = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not rates:
        raise PatchloomError("--blr has no rate to choose from: give numbers, such as '[1e-4, 1e-3]'")
    recipes = [recipe_for(name, vit, {**changes, "blr": rate}, known) for rate in rates]
    if train_on.sound is not None:
        recipes = [recipe.heard(bool(noise)) for recipe in recipes]
    _refuse_idle(changes, train_on, bool(noise))
    classes, n = classes_of(train_on), len(train_on)
    if classes < 2:
        raise PatchloomError(f"{train_on.name} has {train_on.noun} of one class only: a classifier needs two or more")
    if n < (wanted := len(class_names(train_on))):
        raise PatchloomError(
            f"{n} training {train_on.noun} are too few for {wanted} classes: give at least one of each"
        )
    device = settings.at
    recipe = recipes[0].settled(n, device.type, validation is not None)
    half = trains_in_bfloat16(device, precision)
    kernels, _ = choose_kernels(
        vit,
        device.type,
        half and not recipe.drop_path and not recipe.dropout,
        recipe.batch // recipe.parts(recipe.batch),
    )
    rates = tuple(sorted({recipe.blr for recipe in recipes}))
    plain = name, recipe, rates, card, settings, precision, half, kernels
    return FitPlan(*plain, validation=validation, noise=tuple(noise))


def _refuse_idle(changes: Mapping[str, Any], train_on: Source, noise: bool) -> None:
    """Refuse options that would not act.

    Raises:
        PatchloomError: one is for images and these are recordings, or the other way round, or there is no noise.
    """
    given = [name for name, value in changes.items() if value is not None]
    recordings = train_on.sound is not None
    for name in given:
        if name in (OF_IMAGES if recordings else OF_RECORDINGS):
            raise for_the_other_kind(name, train_on)
        if name in ("noise_share", "noise_volume") and not noise:
            raise PatchloomError(
                f"--{name} needs recordings of noise: evaluate keywords takes them from the folder _background_noise_"
            )


def fit(
    candidate: Candidate, plan: FitPlan, source: Source, left: TimeLeft | None = None
) -> tuple[Classifier, dict[str, Any]]:
    """Train a candidate, with the base learning rate chosen on a held-out, stratified tenth of the images.

    Of equally good rates the lowest is chosen.

    Returns:
        The classifier and its settings.
    """
    chosen = {}
    if len(plan.rates) > 1:
        rest, held = hold_out(splittable(source), RATE_VALIDATION_SHARE, len(source), plan.settings.seed)
        found = []
        for rate in plan.rates:
            model = _fitted(candidate, plan.at(rate), rest, f"{candidate.name}, blr {rate:g}", left).model
            found.append(answers(model, held, plan.card, plan.settings, plan.precision).accuracy())
            print(
                f"  {candidate.name}, blr {rate:g}: {found[-1]:.1%} of {len(held):,} held-out {source.noun}", flush=True
            )
        best = int(np.argmax(found))
        plan = plan.at(plan.rates[best])
        chosen = {"held_out_accuracy": found[best], "held_out": len(held)}
    trained = _fitted(candidate, plan, source, candidate.name, left)
    how = {"precision": "bfloat16" if plan.half else "float32", **candidate.settings, **chosen, **trained.chosen}
    return trained.model, {"recipe": plan.name, **plan.values(), "lr": plan.peak(len(source)), **how}


def _fitted(candidate: Candidate, plan: FitPlan, source: Source, name: str, left: TimeLeft | None) -> Trained:
    with seeded(plan.settings.seed):
        model = candidate.build(plan.recipe)
    return train(model, source, plan, name, left)


def _announced(candidates: Sequence[Candidate], plan: FitPlan, source: Source) -> TimeLeft:
    """Say what will be trained, and how long all of it takes, from a few steps."""
    n, rates = len(source), len(plan.rates)
    each = plan.steps(n)
    tried = plan.steps(n - max(1, round(RATE_VALIDATION_SHARE * n))) * rates if rates > 1 else 0
    left = TimeLeft(len(candidates) * (each + tried))
    if left.steps < _MEASURED_FROM:
        return left
    with seeded(plan.settings.seed), waiting_for("measuring a few steps"):
        model = candidates[0].build(plan.recipe)
        left.seconds = seconds_of_step(model, source, plan)
    names = ", then ".join(candidate.name for candidate in candidates)
    sooner = ", or less where the accuracy rises no more" if plan.recipe.validation and plan.recipe.patience < 1 else ""
    choosing = f", and {rates} rates to choose from" if rates > 1 else ""
    length = f"{plan.recipe.epochs:,} epochs of {plan.per_epoch(n):,} steps"
    if plan.recipe.updates:
        length = f"{each:,} updates, {each / plan.per_epoch(n):.3g} epochs,"
    whole = duration(left.steps * left.seconds)
    print(f"Training {names}: {length} each{choosing}. All of it takes about {whole}{sooner}.", flush=True)
    return left


def train_and_test(
    protocol: str, title: str, done: str, candidates: Sequence[Candidate], plan: FitPlan, parts: Parts
) -> Report:
    """Train every candidate, then test each on the test images, which are not read before.

    Args:
        protocol: its name in the rows.
        title: its name in the headline.
        done: a sentence on what was trained.
        candidates: the encoder's first, then its controls.
        plan: how they are trained.
        parts: training and test images.
    """
    rows, found = trained_and_tested(protocol, candidates, plan, parts)
    said = [done, recipe_sentence(plan, parts, rows[0].settings)]
    return report_of(protocol, f"{title} ({plan.name}): ", said, rows, parts, plan.settings, found[-1]).beside(True)


def trained_and_tested(
    protocol: str, candidates: Sequence[Candidate], plan: FitPlan, parts: Parts
) -> tuple[list[Row], list[Answers]]:
    """The row of each candidate, and its predictions for the test images; arguments as of `train_and_test`."""
    fitted, left = [], _announced(candidates, plan, parts.train)
    for candidate in candidates:
        model, row_settings = fit(candidate, plan, parts.train, left)
        if candidate.save is not None:
            candidate.save(model, row_settings)
        fitted.append((candidate, model.cpu(), row_settings))
    # every choice has been made: now the test images are read
    rows, found = [], []
    for candidate, model, row_settings in fitted:
        found.append(answers(model, parts.test, plan.card, plan.settings, plan.precision, candidate.name))
        rows.append(Row.of_images(candidate.name, model.pooling, protocol, row_settings, found[-1].right))
        model.cpu()
    return rows, found


def report_of(
    protocol: str, title: str, said: list[str], rows: list[Row], parts: Parts, settings: EvalSettings, found: Answers
) -> Report:
    """A report in which every row is quoted, beside the majority class.

    Args:
        protocol: its name in the rows.
        title: beginning of the headline.
        said: sentences on what was done; those on the data are added.
        rows: the encoder's first, then its controls.
        parts: training and test images.
        settings: of the evaluation.
        found: predictions of any candidate.
    """
    n = len(found.labels)
    chance = majority(protocol, labels_of(parts.train), found.labels)
    said = [*said, parts.story, *lost_images(found.unreadable, f"test {parts.test.noun}")]
    controls = [f"{row.number()} {row.encoder}" for row in (*rows[1:], chance)]
    first = rows[0].text() if rows[0].encoder != SCRATCH else f"{SCRATCH} {rows[0].text()}"
    against = f"{', '.join(controls[:-1])} and {controls[-1]}" if len(controls) > 1 else controls[0]
    return Report(
        rows=[*rows, chance],
        protocol=" ".join(said),
        headline=f"{title}{first} against {against} on {n:,} test {parts.test.noun}.",
        quoted=tuple(rows),
        data=parts.test.name,
        fingerprint=parts.test.fingerprint(),
        seed=settings.seed,
        n_test=n,
        noun=parts.test.noun,
    )


def recipe_sentence(plan: FitPlan, parts: Parts, row_settings: Mapping[str, Any]) -> str:
    """How everything was trained, and on what, from the settings of any row."""
    values = {name: row_settings[name] for name in (*plan.values(), "precision")}
    values["batch"] = plan.batch(len(parts.train))  # of which there may be fewer than the recipe's
    values["blr"] = " or ".join(f"{rate:g}" for rate in plan.rates)
    if plan.recipe.lr:  # no base learning rate has had a say
        del values["blr"]
    recipe = ", ".join(f"{name.replace('_', ' ')} {in_words(value)}" for name, value in values.items())
    noun, chosen = parts.train.noun, ""
    if plan.recipe.recordings:
        noise = "" if plan.noise else "; no noise was added"
        chosen = f" What recipes do to images (crops, mirroring, RandAugment, erasing, cutmix) does not act{noise}."
    if len(plan.rates) > 1:
        chosen += (
            " The base learning rate was chosen, for each model by itself, on a stratified "
            f"{RATE_VALIDATION_SHARE:.0%} of the training {noun}, then all of them were trained on."
        )
    if plan.recipe.validation:
        held, patience = row_settings["validation_images"], plan.recipe.patience
        unit, units = ("update", "updates") if plan.recipe.updates else ("epoch", "epochs")
        ended = f"; {patience:.0%} of the {units} without a higher accuracy end the training" if patience < 1 else ""
        of = (
            f"{held:,} of them, which were not trained on"
            if plan.validation is None
            else f"the data's own {held:,} {noun} for validation"
        )
        chosen += f" The {unit} that is tested was chosen on {of}{ended}."
    return (
        f"Trained on {len(parts.train):,} {noun} by the recipe {plan.name}: {recipe}.{chosen} Tested once, on "
        f"{len(parts.test):,} others."
    )


def in_words(value: Any) -> str:
    """A recipe's value, as a sentence has it."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
