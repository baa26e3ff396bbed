"""Candidates that are trained alike, each with the recipe that is best on held-out images, and tested once, at the end.

A candidate is the encoder or a control. Everything is chosen before the first test image is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from patchloom.display import StatusMessage, duration, is_first, print_line
from patchloom.errors import PatchloomError, listing
from patchloom.estimate import time_steps
from patchloom.evaluate.recipes import Course, Resolved
from patchloom.evaluate.settings import D, EvalSettings, Parts, images_of, split_part
from patchloom.evaluate.trainer import Trainer, temporary_seed
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.pace import Pace
from patchloom.system.device import memory_shortage
from patchloom.system.distributed import world
from patchloom.system.load import BackgroundLoad

RECIPE_SHARE = 0.1  # of the training images, held out to choose one of several recipes
_MEASURED_FROM = 50  # updates: shorter trainings are not announced


R = TypeVar("R", bound=Resolved)


@dataclass(frozen=True)
class Candidate:
    """Model to be trained and tested.

    Attributes:
        name: name in the report.
        card: card of its encoder, with mean and std to normalise images.
        build: function from a recipe to the model; random values come from torch's global generator.
        settings: additional settings of its results.
        save: function called with the trained model and all settings, before test images are read.
        calibrate: function from the trained model and the validation images that chose its weights to settings for
            ``save`` alone; all processes call it.
    """

    name: str
    card: EncoderCard
    build: Callable[[Any], Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    save: Callable[[Any, dict[str, Any]], None] | None = None
    calibrate: Callable[[Any, Any], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Plan(Generic[D, R]):
    """Training that all candidates share.

    Attributes:
        name: name of the recipe.
        recipes: recipes to choose from, which differ in the learning rate.
        parts: the images.
        settings: settings of the evaluation.
        begin: function that prepares a training: of a model, its encoder's card, a recipe, training images, and
            validation images or None.
        score: function from a model, its encoder's card and images to its score, higher being better.
        half: whether matrix products of the training are in bfloat16.
        unused: values of the recipe without effect here.
        timed: number of images whose scoring is timed.
        foresee: function that prints how much memory the candidates will need, and refuses what does not fit.
    """

    name: str
    recipes: tuple[R, ...]
    parts: Parts[D]
    settings: EvalSettings
    begin: Callable[[Any, EncoderCard, R, D, D | None], Trainer]
    score: Callable[[Any, EncoderCard, D], float]
    half: bool
    unused: Sequence[str] = ()
    timed: int = 32
    foresee: Callable[[Sequence[Candidate], Plan[D, R]], None] | None = None

    @property
    def recipe(self) -> R:
        """The first recipe; they differ in the learning rate only."""
        return self.recipes[0]

    def course(self, recipe: R | None = None, n: int | None = None) -> Course:
        """Return the course of a recipe, by default the first, with ``n`` training images, by default all."""
        recipe, n = recipe or self.recipe, len(self.parts.train) if n is None else n
        held = 0 if self.parts.validation is not None else recipe.held_out(n)
        return recipe.course(n - held, self.settings.accumulate)

    def values(self, recipe: R | None = None) -> dict[str, Any]:
        """Return the values of a recipe, by default the first, that have an effect; ``lr`` is the peak."""
        own = {**(recipe or self.recipe).plain(), "lr": self.course(recipe).peak}
        idle = {*self.unused, *(["validation"] if self.parts.validation is not None else [])}
        return {name: value for name, value in own.items() if name not in idle}


@dataclass(frozen=True)
class Fitted:
    """Trained candidate, on the CPU, and all settings of its results."""

    candidate: Candidate
    model: Any
    settings: dict[str, Any]


def train_candidates(candidates: Sequence[Candidate], plan: Plan[D, R], *, quiet: bool = False) -> list[Fitted]:
    """Train every candidate; no test image is read. ``quiet`` prints nothing, and so times nothing beforehand.

    Of several recipes, each candidate gets the one with the best score on a held-out, stratified tenth of the training
    images; ties go to the first.
    """
    end_if_dry(candidates, plan)
    if plan.foresee is not None:
        with temporary_seed(plan.settings), _enough_memory(plan):
            plan.foresee(candidates, plan)
    pace = Pace(len(candidates) * plan.course().steps) if quiet else _announce(candidates, plan)
    found = list[Fitted]()
    for candidate in candidates:
        recipe, chosen = plan.recipe, dict[str, Any]()
        if len(plan.recipes) > 1:
            rest, held = split_part(plan.parts.train, round(RECIPE_SHARE * len(plan.parts.train)), plan.settings.seed)
            scores = []
            for one in plan.recipes:
                name = f"{candidate.name}, lr {plan.course(one, len(rest)).peak:g}"
                trained = _trained(candidate, one, replace(plan.parts, train=rest), plan, name, pace)
                scores.append(plan.score(trained.model, candidate.card, held))
                if is_first():
                    print_line(f"  {name}: {scores[-1]:.1%} of {len(held):,} held-out {images_of(held).noun}")
            recipe = plan.recipes[int(np.argmax(scores))]
            chosen = {"held_out_accuracy": max(scores), "held_out": len(held)}
        trained = _trained(candidate, recipe, plan.parts, plan, candidate.name, pace, quiet)
        precision = "bfloat16" if plan.half else "float32"
        settings = {"recipe": plan.name, **plan.values(recipe), "precision": precision, **candidate.settings}
        settings |= {**chosen, **trained.chosen}
        about = {}
        if candidate.calibrate is not None:
            _, validation = plan.parts.trained_on(recipe, plan.settings)
            about = {} if validation is None else candidate.calibrate(trained.model, validation)
        if candidate.save is not None and is_first():
            candidate.save(trained.model, {**settings, **about})
        found.append(Fitted(candidate, trained.model.cpu(), settings))
    return found


def _trained(
    candidate: Candidate, recipe: R, parts: Parts[D], plan: Plan[D, R], name: str, pace: Pace, quiet: bool = False
) -> Any:
    with temporary_seed(plan.settings), _enough_memory(plan):
        trainer = plan.begin(candidate.build(recipe), candidate.card, recipe, *parts.trained_on(recipe, plan.settings))
        return trainer.fit(name, pace, quiet)


def end_if_dry(candidates: Sequence[Candidate], plan: Plan[D, R]) -> None:
    """End a dry run with what would be trained and tested."""
    parts, test, course = plan.parts, images_of(plan.parts.test), plan.course()
    train, held = parts.trained_on(plan.recipe, plan.settings) if plan.settings.dry_run else (parts.train, None)
    choosing = "" if held is None else f", with {len(held):,} others to choose the {course.unit},"
    plan.settings.end_if_dry(
        test,
        f"{listing([one.name for one in candidates], 'and')} would be trained on {len(train):,} {test.noun}{choosing} "
        f"for {describe_length(course)} each, and tested on {len(test):,} others. Recipe {plan.name}: "
        f"{format_values(plan)}.",
        parts.story,
    )


def describe_length(course: Course) -> str:
    """Return the length of a course in its unit and another."""
    if course.unit == "epoch":
        return f"{course.length} of {course.per_epoch} step{'s' * (course.per_epoch != 1)}"
    return f"{course.length} of {course.batch} images"


def format_values(plan: Plan[D, R]) -> str:
    """Return the values of a plan's recipe, for a sentence."""
    values = {**plan.values(), "batch": plan.course().batch}  # may be fewer than the recipe's
    for name in ("blr", "lr"):
        if name in values:
            values[name] = " or ".join(dict.fromkeys(f"{plan.values(one)[name]:g}" for one in plan.recipes))
    if plan.recipe.plain()["lr"]:
        values.pop("blr", None)  # it is not used
    return ", ".join(f"{name.replace('_', ' ')} {format_recipe_value(value)}" for name, value in values.items())


def format_recipe_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def recipe_sentences(plan: Plan[D, R]) -> str:
    parts, recipe, course = plan.parts, plan.recipe, plan.course()
    noun, n = images_of(parts.train).noun, len(parts.train)
    by = f" by {world()} processes" if world() > 1 else ""
    precision = "bfloat16" if plan.half else "float32"
    said = [f"Trained on {n:,} {noun}{by} with the recipe {plan.name}: {format_values(plan)}, precision {precision}."]
    if len(plan.recipes) > 1:
        said.append(
            f"The learning rate was chosen for each model separately on a stratified {RECIPE_SHARE:.0%} of the "
            f"training {noun}; the final training used all of them."
        )
    if recipe.validation:
        if parts.validation is None:
            chosen = f"{recipe.held_out(n):,} of them, held out from training"
        else:
            chosen = f"the data's own {len(parts.validation):,} validation {noun}"
        if course.patience < 1:
            patience = f"{course.patience:.0%} of the {course.unit}s"
            chosen += f"; early stopping after the warm-up and {patience} without improvement"
        said.append(f"The tested {course.unit} was chosen on {chosen}.")
    return " ".join([*said, f"Tested once, on {len(parts.test):,} others."])


def _announce(candidates: Sequence[Candidate], plan: Plan[D, R]) -> Pace:
    """Print the planned trainings and their duration, estimated from a few steps and images."""
    parts, course, several = plan.parts, plan.course(), len(plan.recipes)
    n = len(parts.train)
    tried = several * plan.course(n=n - max(1, round(RECIPE_SHARE * n))).steps if several > 1 else 0
    pace = Pace(len(candidates) * (course.steps + tried))
    if pace.total < _MEASURED_FROM:
        return pace
    with temporary_seed(plan.settings), StatusMessage("measuring a few steps"), _enough_memory(plan):
        train, held = parts.trained_on(plan.recipe, plan.settings)
        recipe, times = plan.recipe.timed(len(train))
        candidate, others = candidates[0], BackgroundLoad()
        trainer = plan.begin(candidate.build(recipe), candidate.card, recipe, train, held)
        pace.before = times * trainer.seconds_of_step()
        few: Any = train.subset(range(min(len(train), plan.timed)))
        seconds = time_steps(lambda: plan.score(trainer.tested, candidate.card, few), least=1)[0] / len(few)
        validations = 0 if held is None else math.ceil(course.steps / course.every) * len(held)
        scoring = len(candidates) * (validations + len(parts.test)) * seconds
        load = others.load()
    if is_first():
        names = ", then ".join(candidate.name for candidate in candidates)
        by = f" by {world()} processes" if world() > 1 else ""
        choosing = f", and {several} learning rates to choose from" if several > 1 else ""
        sooner = ", or less with early stopping" if course.patience < 1 and held is not None else ""
        whole = pace.total * pace.before
        print_line(
            f"Training {names}{by}: {describe_length(course)} each{choosing}. This takes about "
            f"{duration(whole + scoring)} in total{sooner}: {duration(whole)} of steps, and {duration(scoring)} of "
            "validation and test."
        )
        if busy := load.sentence():
            print_line(f"  {busy}")
    return pace


@contextmanager
def _enough_memory(plan: Plan[D, R]) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as problem:
        if (need := memory_shortage(problem)) is None:
            raise
        images, noun = -(-plan.course().batch // world() // plan.settings.accumulate), images_of(plan.parts.train).noun
        size = "" if plan.foresee is None else ", or lower --size"
        raise PatchloomError(
            f"there is too little memory for {images} {noun} at once ({need}): raise --accumulate, or lower "
            f"--batch_size{size}"
        ) from problem
