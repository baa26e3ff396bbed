"""What the protocols that train have in common: a base learning rate is chosen, controls are trained alike, and the
test images are read once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer

from patchloom.data import Source, hold_out
from patchloom.errors import PatchloomError
from patchloom.evaluate.classifier import Classifier, class_names
from patchloom.evaluate.features import classes_of
from patchloom.evaluate.fit import Answers, Precision, answers, halves, seeded, train
from patchloom.evaluate.frozen import majority
from patchloom.evaluate.recipes import Recipe, recipe_for
from patchloom.evaluate.report import Report, Row, lost_images
from patchloom.evaluate.settings import How, Parts
from patchloom.nets.weights import EncoderCard

SCRATCH = "from scratch"
HELD_OUT_SHARE = 0.1

Build = Callable[[Recipe], Classifier]


@dataclass(frozen=True)
class Plan:
    """How every subject is trained.

    Attributes:
        name: of the recipe.
        recipe: settled.
        rates: base learning rates, of which the best is chosen.
        card: its mean and std normalise the images.
        how: seed, device and workers.
        precision: of the products.
    """

    name: str
    recipe: Recipe
    rates: tuple[float, ...]
    card: EncoderCard
    how: How
    precision: Precision


@dataclass(frozen=True)
class Subject:
    """Something that is trained and tested.

    Attributes:
        name: in the report.
        build: gives a fresh classifier; what is random in it follows from torch's seed.
        settings: what is particular to it.
        keep: is called once with the trained classifier and its settings, before any test image is read.
    """

    name: str
    build: Build
    settings: Mapping[str, Any]
    keep: Callable[[Classifier, dict[str, Any]], None] | None = None


def plan_for(
    name: str,
    changes: Mapping[str, Any],
    vit: VisionTransformer,
    card: EncoderCard,
    train_on: Source,
    how: How,
    precision: Precision,
) -> Plan:
    """The recipe of that name, settled for an encoder and training images; ``changes`` may have a list as ``blr``.

    Raises:
        PatchloomError: no such recipe, a value that cannot be, or too few images for their classes.
    """
    given = changes.get("blr")
    rates = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not rates:
        raise PatchloomError("--blr has no rate to choose from: give numbers, such as '[1e-4, 1e-3]'")
    recipes = [recipe_for(name, vit, {**changes, "blr": rate}) for rate in rates]
    classes, n = classes_of(train_on), len(train_on)
    if classes < 2:
        raise PatchloomError(f"{train_on.name} has images of one class only: a classifier needs two or more")
    if n < len(class_names(train_on)):
        raise PatchloomError(
            f"{n} training images are too few for {len(class_names(train_on))} classes: give at least one of each"
        )
    recipe = recipes[0].settled(n, how.at.type)
    return Plan(name, recipe, tuple(sorted({recipe.blr for recipe in recipes})), card, how, precision)


def fit(subject: Subject, plan: Plan, source: Source) -> tuple[Classifier, dict[str, Any]]:
    """Train a subject on all images, after choosing the base learning rate on a stratified tenth of them.

    Of equally good rates the lowest wins.

    Returns:
        The classifier and its settings.
    """
    recipe, chosen = plan.recipe, {}
    if len(plan.rates) > 1:
        rest, held = hold_out(source, HELD_OUT_SHARE, len(source), plan.how.seed)
        found = []
        for rate in plan.rates:
            model = _fitted(subject, replace(recipe, blr=rate), plan, rest, f"{subject.name}, blr {rate:g}")
            found.append(answers(model, held, plan.card, plan.how, plan.precision).accuracy())
            print(f"  {subject.name}, blr {rate:g}: {found[-1]:.1%} of {len(held):,} held-out images", flush=True)
        best = int(np.argmax(found))
        recipe = replace(recipe, blr=plan.rates[best])
        chosen = {"held_out_accuracy": found[best], "held_out": len(held)}
    precision = "bfloat16" if halves(plan.how.at, plan.precision) else "float32"
    settings = {"recipe": plan.name, **recipe.plain(), "precision": precision, **subject.settings, **chosen}
    return _fitted(subject, recipe, plan, source, subject.name), settings


def _fitted(subject: Subject, recipe: Recipe, plan: Plan, source: Source, name: str) -> Classifier:
    with seeded(plan.how.seed):
        model = subject.build(recipe)
    return train(model, source, recipe, plan.card, plan.how, plan.precision, name)


def measure(protocol: str, title: str, done: str, subjects: Sequence[Subject], plan: Plan, parts: Parts) -> Report:
    """Train every subject, then read the test images and see what each says of them.

    Args:
        protocol: as the rows call it.
        title: as the headline calls it.
        done: what was trained, in words.
        subjects: the encoder's first, then its controls.
        plan: how they are trained.
        parts: on what.
    """
    fitted = []
    for subject in subjects:
        model, settings = fit(subject, plan, parts.train)
        if subject.keep is not None:
            subject.keep(model, settings)
        fitted.append((subject, model.cpu(), settings))
    # all that is chosen has been chosen: now the test images are read
    rows, found = [], None
    for subject, model, settings in fitted:
        found = answers(model, parts.test, plan.card, plan.how, plan.precision)
        row = Row.of(subject.name, model.pooling, protocol, settings, found.accuracy(), len(found.labels))
        rows.append(row)
        model.cpu()
    said = [done, _told(plan, parts, rows[0].settings)]
    return report_of(protocol, f"{title} ({plan.name}): ", said, rows, parts, plan.how, found)


def report_of(
    protocol: str, title: str, said: list[str], rows: list[Row], parts: Parts, how: How, found: Answers
) -> Report:
    """A report of rows that are all quoted, beside the majority class.

    Args:
        protocol: as the rows call it.
        title: how the headline begins.
        said: sentences; those on the data are added.
        rows: the encoder's first, then its controls.
        parts, how: on what and how it was measured.
        found: any subject's answers.
    """
    n = len(found.labels)
    chance = majority(protocol, torch.from_numpy(parts.train.labels), found.labels)
    said = [*said, parts.story, *lost_images(found.unreadable, "test images")]
    beside = [f"{row.number()} {row.encoder}" for row in (*rows[1:], chance)]
    first = rows[0].text() if rows[0].encoder != SCRATCH else f"{SCRATCH} {rows[0].text()}"
    against = f"{', '.join(beside[:-1])} and {beside[-1]}" if len(beside) > 1 else beside[0]
    return Report(
        rows=[*rows, chance],
        protocol=" ".join(said),
        headline=f"{title}{first} against {against} on {n:,} test images.",
        quoted=tuple(rows),
        data=parts.test.name,
        fingerprint=parts.test.fingerprint(),
        seed=how.seed,
        n_test=n,
    )


def _told(plan: Plan, parts: Parts, settings: Mapping[str, Any]) -> str:
    values = {name: settings[name] for name in (*plan.recipe.plain(), "precision")}
    values["blr"] = " or ".join(f"{rate:g}" for rate in plan.rates)
    recipe = ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in values.items())
    chosen = ""
    if len(plan.rates) > 1:
        chosen = (
            f" The base learning rate was chosen, for each subject by itself, on a stratified {HELD_OUT_SHARE:.0%} of "
            "the training images, then all of them were trained on."
        )
    return (
        f"Trained on {len(parts.train):,} images by the recipe {plan.name}: {recipe}.{chosen} Tested once, on "
        f"{len(parts.test):,} others."
    )


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
