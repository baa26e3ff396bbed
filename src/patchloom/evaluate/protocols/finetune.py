"""Fine-tuning of the whole encoder, with training from scratch as control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from patchloom.audio.compatibility import with_encoder_sound
from patchloom.data.source import Data, Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.display import print_line
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.classification import (
    SCRATCH,
    ClassPredictions,
    about_control,
    class_report,
    plan_for,
    predict_classes,
    results_of_predictions,
    train_and_test,
)
from patchloom.evaluate.classifier import (
    Classifier,
    ClassifierCard,
    Pool,
    calibrate,
    fresh_blocks,
    load_classifier,
    read_classifier,
    save_classifier,
    variant_of,
)
from patchloom.evaluate.features import FeatureOptions, class_names
from patchloom.evaluate.recipes import Recipe, ResolvedRecipe
from patchloom.evaluate.select import Candidate, Plan
from patchloom.evaluate.settings import (
    EvalSettings,
    Parts,
    Subject,
    Subjects,
    named_file,
    open_subjects,
    parts_of,
    place_in_run,
    share_steps,
)
from patchloom.nets.encode import patch_positions
from patchloom.nets.finetune import with_variant
from patchloom.nets.heads import check_pooling, tokens_of
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.options.evaluate import PositionChoice, Precision
from patchloom.options.protocols import Blocks, Ensemble, Finetune
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
    subjects = open_subjects(run, settings, tuned=True, fresh=SCRATCH)
    ours, start, scratch = subjects
    check_train_positions(changes, positions, ours.vit)
    parts = parts_of(data, settings, card=ours.card, run=run)
    plan = plan_for(recipe, changes, ours.vit, parts, settings, precision)
    candidates = [candidate(scratch, positions, parts)]
    if not options.from_scratch:
        place = named_file(options.out, settings, "remove --out")
        place = place or place_in_run(run, data, recipe, settings.seed, "finetuned", ".safetensors")
        candidates = saved_candidates(subjects, positions, plan, precision, place, options.control)
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


def saved_candidates(
    subjects: Subjects,
    positions: PositionChoice,
    plan: Plan[Source, ResolvedRecipe],
    precision: Precision,
    place: Path | None,
    control: bool,
    settings: Mapping[str, Any] | None = None,
) -> list[Candidate]:
    """Return the encoder, whose classifier is calibrated and saved at ``place``, and its control if wanted.

    ``settings`` are as for `candidate`.
    """
    (ours, start, scratch), parts = subjects, plan.parts
    card, classes = ours.card, class_names(parts.train)

    def calibration(model: Classifier, held: Source) -> dict[str, Any]:
        found = predict_classes(model, held, card, plan.settings, precision, test_crop=plan.recipe.test_crop)
        return {"calibration": calibrate(found.logits, found.labels).plain()}

    def save(model: Classifier, its: dict[str, Any]) -> None:
        if place is None:
            print_line(f"  {card.name} is not a local file, so its classifier was not saved: use --out FILE")
            return
        about = ClassifierCard(
            encoder=card,
            positions=variant_of(positions, ours.vit),
            pooling=model.pooling,
            classes=classes,
            data=parts.train.name,
            test=parts.test.fingerprint(),
            seed=plan.settings.seed,
            settings={name: value for name, value in its.items() if name != "calibration"},
            fresh_norm=model.norm is not None,
            instance={} if model.instance is None else model.instance.sizes,
            stem={} if model.stem is None else model.stem.sizes,
            calibration=its.get("calibration", {}),
        )
        save_classifier(model, about, place)
        said = "not calibrated, as no validation images were held out"
        if about.calibrated is not None:
            said = about.calibrated.sentence(parts.train.noun)
        print_line(f"  {card.name}: saved as {place}, {said}")

    first = replace(candidate(ours, positions, parts, settings=settings), save=save, calibrate=calibration)
    return [first, *[candidate(start or scratch, positions, parts, settings=settings)] * control]


# Non-linear probe of Beyond Masking: new transformer blocks and a linear head on a frozen encoder's tokens.

_UNUSED = {
    "layer_decay": 1.0,
    "drop_path": 0.0,
    "dropout": 0.0,
    "fresh_norm": False,  # there always is one behind the blocks
    "train_positions": False,
}  # values of a recipe that do not affect a frozen encoder


def blocks(run: str | Path, data: DataLike, settings: EvalSettings, options: Blocks) -> Evaluation:
    """Train new transformer blocks on the frozen encoder's tokens (blocks:2, blocks:4), with controls.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: as for `finetune`; no blocks, or a pooling that the encoder lacks.
    """
    count, changes = options.count, options.changes()
    if count < 1:
        raise PatchloomError(f"blocks:{count} trains no blocks: use blocks:2 or linear")
    for name in _UNUSED:
        if name in changes:
            raise PatchloomError(f"--{name} has no effect in blocks:{count}, where the encoder is frozen: leave it out")
    share_steps(settings)
    subjects = open_subjects(run, settings)
    vit = subjects.ours.vit
    parts = parts_of(data, settings, card=subjects.ours.card, run=run)
    plan = plan_for(options.recipe, {**changes, **_UNUSED}, vit, parts, settings, options.precision)
    check_pooling(plan.recipe.pooling, tokens_of(vit, None))
    classes = len(class_names(parts.train))

    def build(subject: Subject, recipe: Recipe) -> Classifier:
        encoder = with_variant(subject.vit, subject.card)
        return Classifier(encoder, classes, recipe.pooling, body=fresh_blocks(subject.vit, count))

    trained = [subjects.ours, *(subjects.controls if options.control else [])]
    candidates = [Candidate(one.name, one.card, partial(build, one), {"blocks": count}) for one in trained]
    title = f"{count} block{'s'[: count > 1]}"
    done = (
        f"Non-linear probe: {title} of a transformer, a norm and a linear head, newly initialised, were trained on the "
        "tokens of the frozen encoder."
    )
    return train_and_test(f"blocks:{count}", f"Probe of {title}", done, candidates, plan, options.precision)


# Ensemble of fine-tuned classifiers whose encoders were pre-trained by different tasks (MP3 section 4.2.3).

_ENSEMBLE = "ensemble"


def ensemble(run: str | Path, data: DataLike, settings: EvalSettings, options: Ensemble) -> Evaluation:
    """Average the softmax outputs of two or more fine-tuned classifiers.

    Args:
        run: classifier saved by finetune, or folder of a run that has one for this data and seed.
        data: labelled images on which the classifiers were fine-tuned.
        settings: common settings of all protocols; without test images the seed must be that of fine-tuning.
        options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: fewer than two classifiers, or classifiers with other classes or another split.
    """
    others, test_crop = options.others, options.test_crop
    paths = [str(run), *(others.split(",") if isinstance(others, str) else others)]
    paths = [path.strip() for path in paths if path.strip()]
    if len(paths) < 2:
        raise PatchloomError("an ensemble needs two or more classifiers: add others as --others A,B")
    parts = parts_of(data, settings)
    if test_crop is not None:
        FeatureOptions(test_crop).check(parts.test)
    members = [_member(path, parts.test, settings) for path in paths]
    names = listing([name for name, *_ in members], "and")
    settings.end_if_dry(parts.test, f"ensemble would average {names} on {len(parts.test):,} {parts.test.noun}.")
    said = [
        predict_classes(
            model,
            with_encoder_sound(Data(parts.test, None), card.encoder.sound, card.encoder.name).train,
            card.encoder,
            settings,
            options.precision,
            name,
            card.test_crop if test_crop is None else test_crop,
        )
        for name, model, card in members
    ]
    # the fraction of images for which two classifiers predict the same class, averaged over all pairs
    answers = [found.logits.argmax(1) for found in said]
    same = [(one == other).double().mean().item() for one, other in combinations(answers, 2)]
    mean, agreement = average(said), sum(same) / len(same)
    row_settings: dict[str, Any] = {} if test_crop is None else {"test_crop": test_crop}
    row_settings |= {"members": len(members), "agreement": agreement}
    rows = results_of_predictions(_ENSEMBLE, "ensemble", row_settings, parts.test, settings, mean)
    for (name, model, _), found in zip(members, said, strict=True):
        rows += results_of_predictions(name, "ensemble", {"pooling": model.pooling}, parts.test, settings, found)
    done = (
        f"Ensemble: the mean of the softmax outputs of {len(members)} fine-tuned classifiers; nothing was trained or "
        f"chosen. Two of them predict the same class for {agreement:.1%} of the test {parts.test.noun}"
        f"{' on average' if len(members) > 2 else ''}."
    )
    return class_report(f"Ensemble of {len(members)}", [done], rows, parts, settings, mean)


def average(said: Sequence[ClassPredictions]) -> ClassPredictions:
    """Average predictions: the logits are the logarithms of the mean softmax outputs."""
    mean = torch.stack([found.logits.double().softmax(1) for found in said]).mean(0)
    return replace(said[0], logits=mean.log())


def _member(place: str, test: Source, settings: EvalSettings) -> tuple[str, Classifier, ClassifierCard]:
    """Return a classifier of an ensemble and its card, with its name."""
    path, data, seed = Path(place), test.name, settings.seed
    if path.is_dir():
        found = []
        for file in sorted((path / "finetuned").glob("*.safetensors")):
            card = read_classifier(file)
            found += [file] * (card.data == data and card.seed == seed)
        if not found:
            raise PatchloomError(
                f"{path} has no classifier of {data} and seed {seed}: create one by patchloom evaluate finetune"
            )
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise PatchloomError(f"{path} has several classifiers of {data} and seed {seed}: name one of {names}")
        path = found[0]
    model, card = load_classifier(path)
    classes = class_names(test)
    if len(card.classes) != len(classes):
        raise PatchloomError(
            f"{path} has {len(card.classes)} classes of {card.data}, and {test.name} has {len(classes)}: "
            "give classifiers of the same data"
        )
    if card.classes != classes:
        raise PatchloomError(f"{path} was fine-tuned on {card.data}, with other class names than {test.name}")
    if card.test != test.fingerprint():
        raise PatchloomError(
            f"{path} was fine-tuned with another split (data {card.data}, seed {card.seed}), so it may have been "
            f"trained on these test images: use the same data and --seed {card.seed}"
        )
    return f"{card.encoder.name} ({path.stem})", model, card
