"""Training of classifiers by a recipe, their predictions, and the report on them. Letters: n images, c classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor
from torch.nn import functional as F

from patchloom.audio.compatibility import wrong_kind_error
from patchloom.data.augment import RandAugment, RandomCrop
from patchloom.data.loader import Augment, Batch, plain_batches
from patchloom.data.source import Source
from patchloom.data.splits import group_names
from patchloom.data.stats import normalize
from patchloom.display import track_progress
from patchloom.errors import PatchloomError, listing
from patchloom.evaluate.classifier import Classifier
from patchloom.evaluate.features import (
    ImageFeatures,
    class_names,
    count_classes,
    digest_tensors,
    groups_of,
    labels_of,
    results_ahead,
    runs_in_bfloat16,
    trains_in_bfloat16,
)
from patchloom.evaluate.recipes import (
    ONLY_FOR,
    RECIPES,
    Recipe,
    ResolvedRecipe,
    Sized,
    check_shares,
    images_per_step,
    recipe_for,
)
from patchloom.evaluate.select import Candidate, Fitted, Plan, recipe_sentences, train_candidates
from patchloom.evaluate.settings import EvalSettings, Parts
from patchloom.evaluate.trainer import Batches, Forward, Loss, Score, Trainer, Validate, image_batches
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import attention_heads
from patchloom.nets.performance import choose_kernels
from patchloom.nets.swin import Encoder
from patchloom.options.evaluate import Precision
from patchloom.results.claims import CONSTANT
from patchloom.results.classes import (
    Answers,
    called,
    class_results,
    explain_measure,
    headline_row,
    quoted_first,
    score_of_choice,
)
from patchloom.results.evaluation import Evaluation, as_control, note_unreadable
from patchloom.results.result import Result
from patchloom.system.distributed import collected, rank, refused_by_all, world

# Results and reports of classifiers: the one place where classification protocols make theirs.
SCRATCH = "from scratch"


@dataclass(frozen=True)
class ClassPredictions:
    """Predictions of a classifier for labelled images.

    Attributes:
        logits: [n c] float32, on the CPU.
        labels: [n] int64.
        unreadable: names of the images that could not be read.
        groups: [n] groups of the images, as in `ImageFeatures`.
    """

    logits: Tensor
    labels: Tensor
    unreadable: list[str]
    groups: Tensor | None = None

    @property
    def right(self) -> Tensor:
        return self.logits.argmax(1) == self.labels

    def accuracy(self) -> float:
        """Top-1 accuracy in [0, 1]."""
        return self.right.double().mean().item()

    def choice(self) -> float:
        """Accuracy by which recipes and weights are chosen; balanced accuracy with a rare class."""
        return score_of_choice(self.right.double().numpy(), self.labels.numpy())

    def score(self) -> Score:
        """Score by `choice` and, for ties, by the loss."""
        return Score(self.choice(), -F.cross_entropy(self.logits.double(), self.labels).item())


def results_of_answers(
    encoder: str,
    protocol: str,
    about: Mapping[str, Any],
    test: Source,
    settings: EvalSettings,
    labels: Tensor,
    answers: Tensor,
    scores: Tensor | None = None,
    groups: Tensor | None = None,
    *,
    quoted: bool = True,
) -> list[Result]:
    """Return all results of the answers of one encoder to the readable images of ``test``.

    Args:
        encoder: name of the encoder or control.
        protocol: name of the protocol.
        about: settings of the results.
        test: test images, for the names of classes and groups.
        settings: common settings; ``measures`` tells how many results there are.
        labels: [n] true classes.
        answers: [n] predicted classes.
        scores: [n c] scores of the classes; None: without AUROC and average precision.
        groups: [n] groups of the images.
        quoted: whether the headline quotes this setting.
    """
    names = list[str]()  # of the groups, by their numbers
    if quoted and settings.all_measures and test.groups is not None and settings.group is not None:
        names = [str(number) for number in range(int(test.groups.max()) + 1)]
        for number, name in zip(test.groups.tolist(), group_names(test, settings.group), strict=True):
            names[number] = name or names[number]
    found = Answers(
        labels.numpy(),
        answers.cpu().numpy(),
        None if scores is None else scores.cpu().numpy(),
        None if groups is None else groups.numpy(),
        test.classes,
        names,
    )
    return class_results(encoder, protocol, about, found, quoted=quoted, every=settings.all_measures)


def results_of_predictions(
    name: str,
    protocol: str,
    about: Mapping[str, Any],
    test: Source,
    settings: EvalSettings,
    found: ClassPredictions,
) -> list[Result]:
    """Return all results of the predictions of one classifier; see `results_of_answers`."""
    given = found.labels, found.logits.argmax(1), found.logits, found.groups
    return results_of_answers(name, protocol, about, test, settings, *given)


def constant_answers(protocol: str, labels: Tensor, test: Source, groups: Tensor | None) -> list[Result]:
    """Return accuracy and balanced accuracy of the best constant answer to the images of ``test`` with ``labels`` [n].

    It is the most frequent class of the test images, not of the training images: what a classifier has to beat to show
    anything, whatever the two parts hold.
    """
    best = int(labels.bincount().argmax())
    answers = np.full(len(labels), best)
    found = Answers(labels.numpy(), answers, None, None if groups is None else groups.numpy(), test.classes)
    return class_results(CONSTANT, protocol, {"answer": found.name(best)}, found, quoted=False)


def class_report(
    title: str,
    said: Sequence[str],
    rows: Sequence[Result],
    parts: Parts[Source],
    settings: EvalSettings,
    tested: ImageFeatures | ClassPredictions,
    *,
    after: Sequence[str] | None = None,
    against: str = "",
    ending: str = "",
    curve: Sequence[Result] = (),
    quoted: Sequence[Result] = (),
    across: str = "",
) -> Evaluation:
    """Return a report on classifiers, with the row of the best constant answer.

    Args:
        title: start of the headline.
        said: sentences on the method.
        rows: results of the encoder, then of its controls; one of each is marked as quoted.
        tested: the readable test images.
        after: sentences behind those on the measure; by default on the origin of the images and unreadable ones.
        against: the controls in the headline; by default the quoted number of each, and the constant answer's.
        ending: further sentences of the headline, after a space.
        curve: further results, for a picture.
        quoted: those of them that are quoted.
        across: setting whose values are the columns of the table.
    """
    labels, noun = tested.labels, parts.test.noun
    constant = constant_answers(rows[0].protocol, labels, parts.test, tested.groups)
    ours, *controls = (row for row in rows if row.quoted)
    against = against or listing([as_control(row) for row in (*controls, headline_row(constant, labels))], "and")
    first = f"{f'{SCRATCH} ' * (ours.encoder == SCRATCH)}{called(ours)}{ours.text()}"
    after = [parts.story, *note_unreadable(tested.unreadable, f"test {noun}")] if after is None else after
    return Evaluation.of_test(
        parts.test,
        settings.seed,
        len(labels),
        results=[*quoted_first([*rows, *constant], labels), *curve],
        method=" ".join([*said, explain_measure(labels.numpy(), parts.test.classes, noun), *after]),
        headline=f"{title}: {first} against {against} on {len(labels):,} test {noun}.{ending}",
        quoted=(ours, *controls, *quoted),
        across=across,
        classes=class_names(parts.test),
    )


class Views:
    """Random crops of size (h, w) of an image with RandAugment, or the excerpts that a source cuts instead.

    Their number is the recipe's ``repeats``. Calls depend only on ``rng``. RandAugment fills gaps with ``mean``.
    """

    def __init__(self, size: tuple[int, int], recipe: Recipe, mean: tuple[float, ...], source: Source) -> None:
        change = RandAugment(recipe.randaugment, recipe.randaugment_std, mean) if recipe.randaugment else None
        own: dict[str, Any] = {"scale": (recipe.crop_scale, 1.0)}
        if isinstance(recipe.crop_scale, str):
            own = {"border": recipe.crop_scale}
        crop = RandomCrop(size, flip=recipe.flip, randaugment=change, **own)
        self.crop: Augment = source.cut(
            crop, shift=recipe.shift, noise_share=recipe.noise_share, noise_volume=recipe.noise_volume
        )
        self.size, self.repeats, self.n_views = size, recipe.repeats, recipe.repeats

    def __call__(self, image: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
        """Return views of an image [c h w] with the same dtype, resized to ``size``."""
        return tuple(view for _ in range(self.repeats) for view in self.crop(image, rng))


def predict_classes(
    model: Classifier,
    source: Source,
    card: EncoderCard,
    settings: EvalSettings,
    precision: Precision = "auto",
    name: str = "",
    test_crop: float = 1.0,
) -> ClassPredictions:
    """Predict the class of every labelled image of ``source``; arguments as in `logits_of`.

    ``name`` is that of the model on the line of progress.
    """
    what = name and f"  {name}: predictions for {source.name}"
    logits, indices, unreadable = logits_of(model, source, card, settings, precision, what, test_crop)
    return ClassPredictions(logits, labels_of(source, indices), unreadable, groups_of(source, indices))


@torch.inference_mode()
def logits_of(
    model: Classifier,
    source: Source,
    card: EncoderCard,
    settings: EvalSettings,
    precision: Precision = "auto",
    what: str = "",
    test_crop: float = 1.0,
) -> tuple[Tensor, Tensor, list[str]]:
    """Apply a classifier to every image of ``source``, labelled or not, centre-cropped as by `CentreCrop`.

    Several processes share the batches, and all must call this. ``what`` is the line of progress.

    Returns:
        Logits [n c] float32 on the CPU, indices [n] of the images, and the names of those that could not be read.
    """
    device = settings.torch_device
    model.to(device).eval()
    reading, count = {**settings.reading(source), "test_crop": test_crop}, settings.batches(source)
    first, stop = count * rank() // world(), count * (rank() + 1) // world()
    batches = plain_batches(
        source, model.size, **reading, first=first, stop=stop, channels=model.channels, device=device
    )
    with torch.autocast(device.type, torch.bfloat16, enabled=runs_in_bfloat16(device, precision)):
        found = results_ahead(
            track_progress(batches, stop - first, what),
            lambda batch: model(normalize(batch.views[0], card.mean, card.std)).float(),
        )
        each = collected([(logits, batch._replace(views=())) for batch, logits in found])
    if not each:
        raise refused_by_all(f"nothing in {source.name} could be read")
    logits = torch.cat([logits for logits, _ in each])
    if not logits.isfinite().all():
        raise refused_by_all("the classifier gives non-finite logits: lower --blr")
    indices = torch.cat([batch.indices for _, batch in each])
    return logits, indices, [name for _, batch in each for name in batch.unreadable]


def begin_classifier(
    model: Classifier,
    card: EncoderCard,
    recipe: ResolvedRecipe,
    train: Source,
    held: Source | None,
    *,
    settings: EvalSettings,
    half: bool = False,
    kernels: str = "torch",
) -> Trainer:
    """Return the training of a classifier on images with labels 0 ... c-1; ``held`` images choose the tested weights.

    Several processes give the same result as one within rounding, except for random draws of each process: mixup and
    cutmix pair images within a process and have factors per process, as erasing has places.
    """
    device, labels = settings.torch_device, labels_of(train)
    mix = Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.smoothing, num_classes=model.classes)
    erase = RandomErasing(recipe.erasing, mode="pixel", device=device)
    criterion: Any = SoftTargetCrossEntropy() if recipe.mixes else LabelSmoothingCrossEntropy(recipe.smoothing)

    def loss(forward: Forward, batch: Batch) -> Tensor:
        pixels = torch.cat(batch.views)
        targets = labels[batch.indices].repeat(len(batch.views)).to(device, non_blocking=True)
        if recipe.mixes and len(pixels) % 2:  # unreadable images made the batch odd
            pixels, targets = pixels[:-1], targets[:-1]
        pixels = erase(normalize(pixels, card.mean, card.std))
        if recipe.mixes:
            pixels, targets = mix(pixels, targets)
        return criterion(forward(pixels).float(), targets)

    return labelled_training(model, card, recipe, train, held, loss, settings=settings, half=half, kernels=kernels)


def labelled_training(
    model: Classifier,
    card: EncoderCard,
    recipe: ResolvedRecipe,
    train: Source,
    held: Source | None,
    loss: Loss,
    *,
    settings: EvalSettings,
    half: bool,
    kernels: str,
    encode: Callable[[Iterator[Batch], int], Iterator[Batch]] | None = None,
    cached: tuple[Batches, Validate] | None = None,
) -> Trainer:
    """Return the `Trainer` of a classifier on `Views`.

    ``encode`` is a function from batches and their number per step to batches of steps, the same in all processes;
    ``cached`` are batches and validation instead of those of `Views`.
    """
    images, _ = images_per_step(recipe, len(train), settings.accumulate)
    parts, views = recipe.parts(images), Views(model.size, recipe, card.mean, train)
    precision: Precision = "bfloat16" if half else "float32"

    read = image_batches(train, views, images // parts // world(), model.channels, settings)

    def batches(first: int, stop: int, workers: int) -> Iterator[Batch]:
        found = read(first * parts, stop * parts, workers)
        return found if encode is None else encode(found, parts)

    def validate(tested: Classifier) -> Score:
        assert held is not None  # called with validation images only
        return predict_classes(tested, held, card, settings, precision, test_crop=recipe.test_crop).score()

    return Trainer(
        model,
        loss,
        batches if cached is None else cached[0],
        recipe.course(len(train), settings.accumulate),
        validate if cached is None else cached[1],
        settings=settings,
        identity={
            "recipe": recipe.plain(),
            "numbers": [card.mean, card.std],
            # the weights show neither heads nor image size
            "sizes": [attention_heads(model.encoder), model.size],
            "images": [
                None if part is None else [part.fingerprint(), labels_of(part).tolist()] for part in (train, held)
            ],
            "sound": train.modality.plain(),
            "noise": digest_tensors({str(number): wave for number, wave in enumerate(train.noise)}),
        },
        validation_images=0 if held is None else len(held),
        noun=train.noun,
        half=half,
        kernels=kernels,
        workers=partial(settings.workers_for, train, trained=True),
        alike=encode is not None or cached is not None,
    )


def plan_for(
    name: str,
    changes: Mapping[str, Any],
    vit: Encoder,
    parts: Parts[Source],
    settings: EvalSettings,
    precision: Precision,
    known: Mapping[str, Sized] = RECIPES,
    begin: Callable[..., Trainer] = begin_classifier,
) -> Plan[Source, ResolvedRecipe]:
    """Return the plan for an encoder and training images, by a recipe of ``known`` with ``changes``.

    Of several ``blr`` in these, the best is chosen for each candidate.
    """
    train, validation = parts.train, parts.validation
    if settings.batch_size != "auto":
        changes = {**changes, "batch": settings.batch_size}
    given = changes.get("blr")
    rates = tuple(given) if isinstance(given, list | tuple) else (given,)
    requested = [recipe_for(name, vit, {**changes, "blr": rate}, known) for rate in rates]
    if train.noun == "recordings":
        requested = [one.for_recordings(bool(train.noise)) for one in requested]
    for option in (name for name, value in changes.items() if value is not None):
        if any(option in options for noun, options in ONLY_FOR.items() if noun != train.noun):
            raise wrong_kind_error(option, train)
        if option in ("noise_share", "noise_volume") and not train.noise:
            raise PatchloomError(
                f"--{option} needs recordings of noise: evaluate keywords takes them from the folder _background_noise_"
            )
    classes, n, device = count_classes(train), len(train), settings.torch_device
    if classes < 2:
        raise PatchloomError(f"{train.name} has {train.noun} of one class only: a classifier needs two or more")
    if n < (wanted := len(class_names(train))):
        raise PatchloomError(f"{n} training {train.noun} are too few for {wanted} classes: give at least one of each")
    recipes = [one.settled(n, device.type, validation is not None) for one in requested]
    recipes = [replace(recipes[0], blr=rate) for rate in sorted({one.blr for one in recipes})]
    recipe = recipes[0]
    check_shares(recipe, settings.accumulate)
    half = trains_in_bfloat16(device, precision)
    alone = half and not recipe.drop_path and not recipe.dropout
    kernels, _ = choose_kernels(vit, device.type, alone, recipe.batch // recipe.parts(recipe.batch))

    def score(model: Classifier, card: EncoderCard, images: Source) -> float:
        return predict_classes(model, images, card, settings, precision, test_crop=recipe.test_crop).choice()

    started = partial(begin, settings=settings, half=half, kernels=kernels)
    return Plan(name, tuple(recipes), parts, settings, started, score, half)


def about_control(start: bool) -> str:
    if start:
        return "Start is the same from the weights with which the run began, with their own normalisation."
    return f"{SCRATCH.capitalize()} is the same with newly initialised weights."


def train_and_test(
    protocol: str,
    title: str,
    done: str,
    candidates: Sequence[Candidate],
    plan: Plan[Source, ResolvedRecipe],
    precision: Precision,
) -> Evaluation:
    """Train every candidate, test each on the test images, which are not read earlier, and report on all.

    ``done`` are sentences on what was trained.
    """
    rows, found = test_classifiers(protocol, train_candidates(candidates, plan), plan, precision)
    return fitted_report(f"{title} ({plan.name})", done, rows, plan, found[-1])


def fitted_report(
    title: str, done: str, rows: Sequence[Result], plan: Plan[Source, ResolvedRecipe], found: ClassPredictions
) -> Evaluation:
    """Return the report of trained classifiers; ``done`` are sentences on what was trained."""
    said = [done, recipe_sentences(plan)]
    if plan.recipe.recordings:
        noise = "" if plan.parts.train.noise else "; no noise was added"
        said.append(f"Image augmentation (crops, mirroring, RandAugment, erasing, cutmix) does not apply{noise}.")
    return class_report(title, said, rows, plan.parts, plan.settings, found).with_differences(True)


def test_classifiers(
    protocol: str, fitted: Sequence[Fitted], plan: Plan[Source, ResolvedRecipe], precision: Precision
) -> tuple[list[Result], list[ClassPredictions]]:
    """Return the results of each trained candidate on the test images, and its predictions."""
    rows, found = list[Result](), list[ClassPredictions]()
    for one in fitted:
        name, crop = one.candidate.name, plan.recipe.test_crop
        its = predict_classes(one.model, plan.parts.test, one.candidate.card, plan.settings, precision, name, crop)
        settings = {"pooling": one.model.pooling, **one.settings}
        rows += results_of_predictions(name, protocol, settings, plan.parts.test, plan.settings, its)
        found.append(its)
        one.model.cpu()
    return rows, found
