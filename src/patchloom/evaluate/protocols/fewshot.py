"""Few labels: fine-tuning or a linear probe with a small part of the training images."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.errors import PatchloomError
from patchloom.evaluate.classification import SCRATCH, about_control, plan_for, train_and_test
from patchloom.evaluate.classifier import variant_of
from patchloom.evaluate.features import FeatureOptions, class_names, count_classes, labels_of
from patchloom.evaluate.frozen import FrozenStudy
from patchloom.evaluate.protocols.finetune import candidate, check_train_positions
from patchloom.evaluate.protocols.linear import logistic_probe
from patchloom.evaluate.settings import (
    EvalSettings,
    Parts,
    Subject,
    open_subjects,
    parts_of,
    share_nothing,
    share_steps,
    stratified_subset,
)
from patchloom.evaluate.trainer import temporary_seed
from patchloom.nets.heads import Stem
from patchloom.options.protocols import FewShot
from patchloom.results.claims import UNTRAINED
from patchloom.results.evaluation import Evaluation
from patchloom.runs.encoder import load_extra_module
from patchloom.system.files import LIST_FILE, read_text

_DEFAULT_SHARE = 0.1


def fewshot(run: str | Path, data: DataLike, settings: EvalSettings, options: FewShot) -> Evaluation:
    """Fine-tune, or fit a linear probe, with a small part of the labels.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: as for `finetune`; fewer images than classes, or a run without a projection.
    """
    head_on, recipe, positions = options.head_on, options.recipe, options.positions
    method, changes = options.method, options.changes()
    idle = [*changes]
    if method == "linear":
        share_nothing(settings, "few-shot --method linear")
        usual = {"head_on": (head_on, "features"), "recipe": (recipe, "small"), "positions": (positions, "auto")}
        idle += [name for name, (value, default) in usual.items() if value != default]
        if idle := [name for name in idle if name != "test_crop"]:
            raise PatchloomError(f"--{idle[0]} applies to --method finetune only: leave it out")
    share_steps(settings)
    tuned, projected = method == "finetune", head_on == "projection"
    fresh = SCRATCH if tuned else UNTRAINED
    subjects = open_subjects(run, settings, tuned=tuned, fresh=fresh, head=projected or not tuned)
    ours, start, scratch = subjects
    whole = parts_of(data, settings, card=ours.card, run=run)
    parts, what = subsample_training(whole, options.labels, options.per_class, settings.seed)
    if method == "linear":
        features = FeatureOptions(changes.get("test_crop", 1.0))
        title = f"With {len(parts.train):,} labels: Linear probe"
        more = {"method": "linear", **what}
        features.check(parts.test)
        study = FrozenStudy("few-shot", subjects, parts, settings, features)
        return logistic_probe(study, title, more=more, trained=True)
    if projected:
        if fixed := [name for name in ("pooling", "fresh_norm") if name in idle]:
            raise PatchloomError(f"--head_on projection has a fixed pooling and norm: leave --{fixed[0]} out")
        changes = {**changes, "fresh_norm": False}
    check_train_positions(changes, positions, ours.vit)
    plan = plan_for(recipe, changes, ours.vit, parts, settings, options.precision)
    row_settings: dict[str, Any] = {"head_on": head_on, **what}
    other, pooling, on = start or scratch, None, "a linear head"
    if projected:
        stem = load_stem(run, ours, settings)
        row_settings["pooling"] = pooling = stem.pooling  # not the recipe's
        on = f"the projection's first layer and a linear head on the {pooling} representation"
        ours = ours._replace(stem=stem)
        with temporary_seed(settings):
            other = other._replace(stem=Stem.fresh(**stem.sizes), head=scratch.head)
    trained = [ours, other] if options.control else [ours]
    candidates = [candidate(one, positions, parts, pooling=pooling, settings=row_settings) for one in trained]
    variant = variant_of(positions, ours.vit)
    done = f"Few labels: the encoder and {on} were trained together, positions: {variant}."
    if options.control:
        done += f" {about_control(start is not None)}"
    title = f"Fine-tuning with {len(parts.train):,} labels"
    return train_and_test("few-shot", title, done, candidates, plan, options.precision)


def subsample_training(
    parts: Parts[Source], labels: float | str | None, per_class: int | None, seed: int
) -> tuple[Parts[Source], dict[str, Any]]:
    """Return parts with a subset of the training images, and its description for the rows."""
    train = parts.train
    n = len(train)
    what: dict[str, Any]
    if labels is not None and per_class is not None:
        raise PatchloomError("--labels and --per_class both set the number of labels: give one of them")
    if isinstance(labels, str):
        some, said = _listed(train, Path(labels))
        what = {"labels": Path(labels).name}
    else:
        if per_class is not None:
            rng, chosen = np.random.default_rng(seed), list[np.ndarray]()
            known, what = labels_of(train).numpy(), {"per_class": per_class}
            for label in np.unique(known):
                members = np.flatnonzero(known == label)
                if len(members) < per_class:
                    have = f"class {class_names(train)[label]} has {len(members)} training {train.noun}"
                    raise PatchloomError(f"{have}: use --per_class {len(members)}")
                chosen.append(rng.permutation(members)[:per_class])
            some = train.subset(np.sort(np.concatenate(chosen)))
        else:
            labels, classes = _DEFAULT_SHARE if labels is None else labels, count_classes(train)
            if not (0 < labels <= 1 or (labels >= 2 and float(labels).is_integer())):
                raise PatchloomError(
                    f"--labels must be a fraction above 0 and up to 1, such as 0.01, or a number of {train.noun} of 2 "
                    f"or more, such as 50, not {labels:g}"
                )
            if labels > n:
                raise PatchloomError(f"--labels {labels:,.0f} is more than the {n:,} training {train.noun}: use fewer")
            count = round(labels * n) if labels <= 1 else int(labels)
            if count < classes:
                too_few, enough = f"--labels {count} is", f"{classes}"
                if labels <= 1:
                    too_few, enough = f"{labels:g} of {n:,} training {train.noun} is {count},", f"{classes / n:.2g}"
                raise PatchloomError(
                    f"{too_few} fewer than the {classes} classes: use --labels {enough} or more, or --per_class 1"
                )
            some = stratified_subset(train, count, seed)
            what = {"labels": labels if labels <= 1 else int(labels)}
        said = f"A stratified {len(some):,} of {n:,} training {train.noun} were used (seed {seed})."
    return replace(parts, train=some, story=f"{parts.story} {said}"), {**what, "labelled": len(some)}


def _listed(train: Source, file: Path) -> tuple[Source, str]:
    """Return the training images that a text file names, one per line, and a sentence.

    A name is the end of a path, such as ``n01632777_6514.JPEG`` or ``n01632777/n01632777_6514.JPEG``.
    """
    try:
        lines = read_text(file, "utf-8-sig", most=LIST_FILE, follow=True).splitlines()
    except FileNotFoundError:
        what = f"--labels takes a fraction, a number of {train.noun}, or a text file of names"
        with suppress(ValueError):
            if file.name.endswith("%"):
                what = f"write {float(file.name[:-1]) / 100:g} for a fraction"
        raise PatchloomError(f"there is no file {file}: {what}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise PatchloomError(f"{file} cannot be read as a list of names ({problem}): write one per line") from problem
    names = dict.fromkeys(line.strip().replace("\\", "/").removeprefix("./") for line in lines)
    named: dict[str, set[int]] = {name: set() for name in names if name}
    depths = {name.count("/") + 1 for name in named}
    for i in range(len(train)):
        for path in (train.describe(i), train.place(i) or ""):
            parts = path.replace("\\", "/").split("/")
            for end in ("/".join(parts[-depth:]) for depth in depths):
                if end in named:
                    named[end].add(i)
    found = np.array(sorted(set().union(*named.values())), np.int64)
    if not len(found):
        raise PatchloomError(
            f"{file} names none of the {len(train):,} training {train.noun}: write one name per line, such as "
            f"{PurePosixPath(train.place(0) or train.describe(0)).name}"
        )
    if double := next((name for name, its in named.items() if len(its) > 1), ""):
        raise PatchloomError(
            f"{double} in {file} names {len(named[double])} training {train.noun}: write the folder before it, too"
        )
    some = train.subset(found)
    said = f"The {len(found):,} of {len(train):,} training {train.noun} that {file.name} names were used."
    if lost := sum(not its for its in named.values()):
        said += f" {lost:,} of its {len(named):,} names are of no training {train.noun}."
    if (have := count_classes(some)) < (classes := count_classes(train)):
        said += f" They are of {have} of the {classes} classes."
    return some, said


def load_stem(run: str | Path, subject: Subject, settings: EvalSettings) -> Stem:
    """Load the first layer of a run's projection; the run's card names it and the module of its input."""
    stem = load_extra_module(run, "stem", settings.network or "student")
    if not isinstance(stem, Stem):
        raise PatchloomError(
            f"the task {subject.card.task} saved no projection with the encoder of {run}: use --head_on features"
        )
    if stem.pooling == "instance" and subject.head is None:
        raise PatchloomError(
            f"the projection of {run} needs the instance head, which is missing there: copy it from the run as well"
        )
    return stem
