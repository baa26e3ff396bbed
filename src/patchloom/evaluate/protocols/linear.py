"""Linear probe: logistic regression on frozen features, or the papers' probe by LARS on random crops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import print_line, track_progress
from patchloom.errors import PatchloomError
from patchloom.evaluate.answers import results_of_answers
from patchloom.evaluate.calibration import Calibration, calibrate
from patchloom.evaluate.classification import plan_for, train_and_test
from patchloom.evaluate.classifier import Classifier, ClassifierCard, class_names, save_classifier
from patchloom.evaluate.features import USUAL_FEATURES, FeatureOptions, ImageFeatures
from patchloom.evaluate.frozen import (
    FeatureExtractor,
    Wording,
    blend_drawings,
    blend_row,
    blend_shares,
    chosen_poolings,
    circumstances,
    extractors,
    frozen_report,
    plan_frozen,
)
from patchloom.evaluate.lars_probe import LinearClassifier, begin_probe, refuse_accumulation
from patchloom.evaluate.logistic import (
    CHOICE_VALIDATION_SHARE,
    L2_STRENGTHS,
    Choice,
    Probe,
    fit_path,
    hold_out_for_choice,
    linear_probe,
)
from patchloom.evaluate.protocols.knn import knn_results
from patchloom.evaluate.recipes import PROBES, ProbeRecipe, Recipe, ResolvedRecipe, published_recipe
from patchloom.evaluate.select import Candidate, Plan, format_recipe_value
from patchloom.evaluate.settings import EvalSettings, Parts, parts_of, place_in_run, share_nothing, share_steps
from patchloom.evaluate.subjects import Subject, Subjects, open_probed, open_subjects
from patchloom.nets.encode import has_class_token
from patchloom.nets.finetune import with_variant, without_last_norm
from patchloom.nets.heads import check_pooling, tokens_of
from patchloom.options.evaluate import Pooling
from patchloom.options.protocols import Linear
from patchloom.results.classes import quoted_measure
from patchloom.results.evaluation import Evaluation
from patchloom.results.result import Result
from patchloom.runs.encoder import has_teacher

_LOGISTIC = "logistic"
_LEAST = 0.5 * 50_000 * 90 * 0.1  # images · epochs · base rate: the layer moves by about four times its norm
_PAPERS = {"mae": "MAE (Table 10)", "extrema": "ExtreMA (Table 14)"}


def linear(run: str | Path, data: DataLike, settings: EvalSettings, options: Linear) -> Evaluation:
    """Train a linear classifier on frozen features.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: unknown encoder, data or recipe, data without labels, or a pooling that the encoder lacks.
    """
    recipe, pooling, precision, out = options.recipe, options.pooling, options.precision, options.out
    changes = options.changes()
    if recipe == _LOGISTIC:
        usual = {"control": (options.control, True), "precision": (precision, "auto")}
        own = {name: changes.pop(name) for name in ("test_crop", "last_norm") if name in changes}
        features = FeatureOptions(**own)
        if idle := [*changes] + [name for name, (value, default) in usual.items() if value != default]:
            raise PatchloomError(
                f"--{idle[0]} applies to --recipe {' or '.join(PROBES)} only, not to logistic: leave it out"
            )
        share_nothing(settings, "linear --recipe logistic")
        shares = blend_shares(options.blend, run, pooling, settings)
        saved = probe_path(run, data, settings, options.save, out)
        subjects = open_probed(run, settings, pooling)
        parts = parts_of(data, settings, card=subjects.ours.card, run=run)
        more: Any = {"pooling": pooling, "options": features, "shares": shares}
        keep = None if saved is None else partial(save_probe, saved, parts, settings, features)
        report = logistic_probe("linear", "Linear probe", subjects, parts, settings, **more, keep=keep)
        return replace(report, drawings=blend_drawings(report, run))
    if options.save or out is not None:
        raise PatchloomError(f"--save and --out apply to --recipe logistic only, not to {recipe}: leave them out")
    if recipe not in PROBES:
        raise PatchloomError(f"there is no recipe {recipe}: choose one of {', '.join((_LOGISTIC, *PROBES))}")
    if options.blend is not None:
        raise PatchloomError(f"--blend applies to --recipe logistic only, not to {recipe}: leave it out")
    if pooling in ("both", "prefix"):
        raise PatchloomError(f"--pooling {pooling} applies to --recipe logistic only: choose class, mean or instance")
    refuse_accumulation(settings)
    share_steps(settings)
    wanted = PROBES[recipe][0].network
    if settings.network is None and wanted == "teacher" and has_teacher(run):
        settings = replace(settings, network=wanted)
    subjects = open_subjects(run, settings, head=True)
    vit, fresh = subjects.ours.vit, subjects.fresh
    paper = published_recipe(recipe, vit, PROBES)
    asked = paper.pooling if pooling == "all" else pooling
    stands_in = pooling == "all" and asked == "class" and not has_class_token(vit)
    pool = "mean" if stands_in else asked
    check_pooling(pool, tokens_of(vit, subjects.ours.head))
    parts = parts_of(data, settings, card=subjects.ours.card, run=run)
    plan = plan_for(recipe, {**changes, "pooling": pool}, vit, parts, settings, precision, PROBES, begin_probe)
    classes = len(class_names(parts.train))

    def build(subject: Subject, recipe: ProbeRecipe) -> LinearClassifier:
        encoder = with_variant(subject.vit, subject.card)
        encoder = encoder if recipe.last_norm else without_last_norm(encoder)
        # the start has no instance head: it gets a new one, as the untrained encoder
        return LinearClassifier(encoder, classes, recipe.pooling, subject.head or fresh.head)

    trained = [subjects.ours, *(subjects.controls if options.control else [])]
    candidates = [Candidate(one.name, one.card, partial(build, one)) for one in trained]
    done = _differences(plan, paper, stands_in)
    if wanted == "teacher" != settings.network:
        done += " The paper's program probes the teacher; this is the student."
    report = train_and_test("linear", f"Linear probe, {pool}", done, candidates, plan, precision)
    return report.with_setting("network", "teacher") if settings.network == "teacher" else report


def _differences(plan: Plan[Source, ResolvedRecipe], paper: Recipe, stands_in: bool) -> str:
    """Describe the training and its differences from the paper."""
    recipe, n = plan.recipe, len(plan.parts.train)
    batch, own, now, rates = plan.course().batch, paper.plain(), recipe.plain(), [one.blr for one in plan.recipes]
    now["blr"] = rates[0] if len(rates) == 1 else " or ".join(f"{rate:g}" for rate in rates)
    said = (
        f"The linear probe of {_PAPERS[plan.name]}: a batch norm without scale and shift, then a linear layer, trained "
        f"by {now['optimizer']} on random {'excerpts' if recipe.recordings else 'crops'} seen by the frozen encoder."
    )
    # values that do not apply to recordings are described with the recipe
    changed = [name for name in now if now[name] != own.get(name, now[name]) and name not in ("batch", "pooling")]
    differs = [
        f"{name.replace('_', ' ')} {format_recipe_value(now[name])}, not {format_recipe_value(own[name])}"
        for name in changed
    ]
    if batch != own["batch"]:
        why = f" (there are {n:,} {'recordings' if recipe.recordings else 'images'})" if n < own["batch"] else ""
        differs.append(f"batch {batch:,}, not {own['batch']:,}{why}, with the rate in proportion")
    if recipe.pooling != own["pooling"]:
        why = " (there is no class token)" if stands_in else ""
        differs.append(f"pooling {recipe.pooling}, not {own['pooling']}{why}")
    values = ", ".join(name.replace("_", " ") for name in now)
    said += (
        f" Differences from the paper: {'; '.join(differs)}."
        if differs
        else f" The recipe's values are the paper's: {values}."
    )
    if now["optimizer"] == "LARS" and n * recipe.epochs * recipe.blr < _LEAST:
        said += (
            " LARS moves the layer by a small fraction of its norm per step, and these are too few steps to leave the "
            "random initialisation behind: use --recipe logistic, or raise --blr or --epochs."
        )
    return said


# Logistic regression.


def logistic_probe(
    protocol: str,
    title: str,
    subjects: Subjects,
    parts: Parts[Source],
    settings: EvalSettings,
    *,
    pooling: Pooling | Literal["all"] = "all",
    options: FeatureOptions = USUAL_FEATURES,
    shares: Sequence[float] = (),
    more: Mapping[str, Any] | None = None,
    trained: bool = False,
    keep: Callable[[Subject, ImageFeatures, dict[str, tuple[Probe, Choice]]], None] | None = None,
) -> Evaluation:
    """Evaluate an encoder and its controls by a logistic regression on their features.

    ``shares`` are those of the encoder in blends with its start, ``more`` are settings of the rows, ``trained`` means
    that another draw of labels would give other results, and ``keep`` is called with the encoder, its training features
    and its probes before test images are read.
    """
    options.check(parts.test)
    plan_frozen(protocol, subjects, parts, settings)
    rows, blends, cached = list[Result](), list[Result](), list[str]()
    for one in extractors(subjects, settings, options=options, shares=shares):
        train = one.features_of(parts.train)
        probes = fit_probes(one.name, train, chosen_poolings(train, pooling), settings)
        if keep is not None and one.subject is subjects.ours:
            keep(one.subject, train, probes)
        # all choices are made: read the test images
        test = one.features_of(parts.test)
        about = {**options.plain(), **(more or {})}
        found = linear_results(one.name, probes, test, parts.test, settings, protocol, about)
        cached += [one.name] * (train.cached or test.cached)
        if one.share is not None:
            measure = quoted_measure(test.labels.numpy())
            usual = [row for row in found if row.pooling != "instance" and row.measure == measure]
            best = max(usual, key=_on_held_out)
            blends.append(blend_row(best, one.share, _on_held_out(best)))
        if not one.is_blend:
            rows += found
    instance = any(row.pooling == "instance" for row in rows)
    around = circumstances(subjects, parts, train, test, cached, options, instance)
    wording = linear_wording(rows, train, test, title)
    return frozen_report(wording, rows, parts, settings, train, test, around, trained=trained, blends=blends)


def fit_probes(
    name: str, train: ImageFeatures, poolings: Sequence[str], settings: EvalSettings
) -> dict[str, tuple[Probe, Choice]]:
    """Fit a logistic regression to the features of the subject ``name`` for each pooling."""
    probe = partial(linear_probe, seed=settings.seed, device=settings.torch_device, groups=train.groups)
    shown = track_progress(poolings, len(poolings), f"{name}: linear")
    return {pooling: probe(train.pooled(pooling), train.labels) for pooling in shown}


def probe_path(run: str | Path, data: DataLike, settings: EvalSettings, save: bool, out: str | None) -> Path | None:
    """Return the path of the saved probe; None if it is not saved."""
    if out is not None:
        if settings.seeds > 1:
            raise PatchloomError(f"--out names one file, but --seeds {settings.seeds} gives several: use --save true")
        return Path(out)
    place = place_in_run(run, data, "linear", settings.seed, "probed", ".safetensors") if save else None
    if save and place is None:
        raise PatchloomError(f"{run} has no folder for its classifier: give --out FILE")
    return place


def save_probe(
    place: Path,
    parts: Parts[Source],
    settings: EvalSettings,
    options: FeatureOptions,
    subject: Subject,
    train: ImageFeatures,
    probes: dict[str, tuple[Probe, Choice]],
) -> None:
    """Save an encoder with the probe that is best on held-out images as a classifier, which computes the same.

    Its temperature is fitted to the held-out images, with a probe that was fitted without them.
    """
    pooling = max(probes, key=lambda name: probes[name][1].accuracy)
    probe, choice = probes[pooling]
    features = train.pooled(pooling)
    rest, held = hold_out_for_choice(train.labels, settings.seed, train.groups)
    strengths = [one for one in L2_STRENGTHS if one >= choice.strength]
    partly = fit_path(features[rest], train.labels[rest], strengths, settings.torch_device)[-1]
    known = torch.isin(train.labels[held], partly.classes.cpu())  # a class whose images are all held out has no column
    targets = torch.searchsorted(partly.classes.cpu(), train.labels[held][known])
    calibration = calibrate(partly.logits(features[held][known]), targets).plain()
    names = class_names(parts.train)
    classes = tuple(names[k] for k in probe.classes.tolist())
    vit = with_variant(subject.vit, subject.card)
    encoder = vit if options.last_norm else without_last_norm(vit)
    head = subject.head if pooling == "instance" else None
    model = Classifier(encoder, len(classes), cast(Pooling, pooling), instance=head, probe=True)
    weights, biases = probe.folded()
    model.head.load_state_dict({"weight": weights.T, "bias": biases})
    about = {"recipe": _LOGISTIC, "l2": choice.strength, **asdict(options)}
    card = ClassifierCard(
        subject.card,
        "keep",
        model.pooling,
        classes,
        parts.train.name,
        parts.test.fingerprint(),
        settings.seed,
        about,
        probe=True,
        instance={} if head is None else head.sizes,
        calibration=calibration,
    )
    save_classifier(model, card, place)
    said = Calibration(**calibration).sentence(parts.train.noun)
    print_line(f"  {subject.name}: probe ({pooling}) saved as {place}, {said}")


def linear_results(
    name: str,
    probes: Mapping[str, tuple[Probe, Choice]],
    test: ImageFeatures,
    source: Source,
    settings: EvalSettings,
    protocol: str = "linear",
    more: Mapping[str, Any] | None = None,
) -> list[Result]:
    """Return the results of each pooling's probe on the images ``source``, with ``more`` settings.

    The best on held-out images is quoted.
    """
    rows, best = list[Result](), max(probes, key=lambda pooling: probes[pooling][1].accuracy)
    for pooling, (probe, choice) in probes.items():
        about = {"pooling": pooling, "l2": choice.strength, "held_out_accuracy": choice.accuracy}
        about |= {"held_out": choice.held_out, **(more or {})}
        features, quoted = test.pooled(pooling), pooling == best
        given = probe.predict(features), probe.scores(features) if quoted and settings.all_measures else None
        its = name, protocol, about, source, settings
        rows += results_of_answers(*its, test.labels, *given, test.groups, quoted=quoted)
    return rows


def _on_held_out(row: Result) -> float:
    return float(row.settings["held_out_accuracy"])


def linear_wording(
    rows: Sequence[Result], train: ImageFeatures, test: ImageFeatures, title: str = "Linear probe"
) -> Wording:
    """Describe the logistic regression, for its report."""
    ours = next(row for row in rows if row.quoted)
    method = (
        f"Linear probe: a logistic regression on the frozen, standardised features of {len(train.labels):,} training "
        f"{train.noun}, tested on {len(test.labels):,} others; its L2 strength (of {len(L2_STRENGTHS)} from "
        f"{min(L2_STRENGTHS):g} to {max(L2_STRENGTHS):g}) and the quoted pooling were chosen on a stratified "
        f"{100 * CHOICE_VALIDATION_SHARE:.0f} % of the training {train.noun}; the final fit used all of them."
    )
    return Wording(f"{title} ({ours.pooling})", method, "Fitted on")


def knn_and_linear(
    extracted: Iterable[FeatureExtractor],
    parts: Parts[Source],
    settings: EvalSettings,
    pooling: Pooling | Literal["all"] = "all",
) -> tuple[list[Result], list[Result], ImageFeatures, ImageFeatures]:
    """Return the results of kNN and of linear probes on the same features, and the last subject's features."""
    near, probed = list[Result](), list[Result]()
    for one in extracted:
        train = one.features_of(parts.train)
        poolings = chosen_poolings(train, pooling)
        probes = fit_probes(one.name, train, poolings, settings)
        # all choices are made: read the test images
        test = one.features_of(parts.test)
        near += knn_results(one.name, train, test, parts.test, poolings, settings)
        probed += linear_results(one.name, probes, test, parts.test, settings)
    return near, probed, train, test
