"""Linear probe: logistic regression on frozen features, or the papers' probe by LARS on random crops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import torch
from timm.loss import LabelSmoothingCrossEntropy
from torch import Tensor, nn

from patchloom.data.loader import Batch
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.stats import normalize
from patchloom.display import print_line, track_progress
from patchloom.errors import PatchloomError
from patchloom.evaluate.classification import labelled_training, plan_for, results_of_answers, train_and_test
from patchloom.evaluate.classifier import Calibration, Classifier, ClassifierCard, Pool, calibrate, save_classifier
from patchloom.evaluate.features import FeatureOptions, ImageFeatures, class_names, labels_of
from patchloom.evaluate.frozen import (
    FeatureExtractor,
    FrozenStudy,
    blend_drawings,
    blend_row,
    blend_shares,
    chosen_poolings,
    frozen_report,
    open_frozen,
)
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
from patchloom.evaluate.recipes import (
    PROBES,
    ProbeRecipe,
    Recipe,
    ResolvedProbeRecipe,
    ResolvedRecipe,
    named_recipe,
    published_recipe,
)
from patchloom.evaluate.select import Candidate, Plan, format_recipe_value
from patchloom.evaluate.settings import (
    EvalSettings,
    Parts,
    Subject,
    named_file,
    open_subjects,
    parts_of,
    place_in_run,
    share_nothing,
    share_steps,
)
from patchloom.evaluate.trainer import Forward, Trainer
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import encode, has_class_token, patch_count, pooled_norm, prefix_count, width
from patchloom.nets.finetune import with_variant, without_last_norm
from patchloom.nets.heads import InstanceHead, check_pooling, represent, tokens_of
from patchloom.nets.swin import Encoder
from patchloom.options.evaluate import Pooling
from patchloom.options.protocols import Linear
from patchloom.results.classes import quoted_measure
from patchloom.results.evaluation import Evaluation
from patchloom.results.result import Result
from patchloom.runs.encoder import has_teacher
from patchloom.system.distributed import gathered, smallest, world
from patchloom.withhold.encoder_input import all_patches

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
        saved = named_file(out, settings)
        if saved is None and options.save:
            saved = place_in_run(run, data, "linear", settings.seed, "probed", ".safetensors")
            if saved is None:
                raise PatchloomError(f"{run} has no folder for its classifier: give --out FILE")
        study = open_frozen("linear", run, data, settings, features, pooling=pooling)
        keep = None if saved is None else partial(save_probe, saved, study)
        report = logistic_probe(study, "Linear probe", pooling=pooling, shares=shares, keep=keep)
        return replace(report, drawings=blend_drawings(report, run))
    if options.save or out is not None:
        raise PatchloomError(f"--save and --out apply to --recipe logistic only, not to {recipe}: leave them out")
    named_recipe(recipe, {_LOGISTIC: None, **PROBES})
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
    study: FrozenStudy,
    title: str,
    *,
    pooling: Pooling | Literal["all"] = "all",
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
    rows, blends, parts, settings = list[Result](), list[Result](), study.parts, study.settings
    for one in study.each(shares=shares):
        train = one.features_of(parts.train)
        probes = fit_probes(one.name, train, chosen_poolings(train, pooling), settings)
        if keep is not None and one.subject is study.subjects.ours:
            keep(one.subject, train, probes)
        # all choices are made: read the test images
        test = one.features_of(parts.test)
        about = {**study.options.plain(), **(more or {})}
        found = linear_results(one.name, probes, test, parts.test, settings, study.protocol, about)
        if one.share is not None:
            measure = quoted_measure(test.labels.numpy())
            usual = [row for row in found if row.pooling != "instance" and row.measure == measure]
            best = max(usual, key=lambda row: row.settings["held_out_accuracy"])
            blends.append(blend_row(best, one.share, best.settings["held_out_accuracy"]))
        if one.share in (None, 0, 1):
            rows += found
    around = study.around(train, test, any(row.pooling == "instance" for row in rows))
    return linear_report(rows, parts, settings, train, test, around, title=title, trained=trained, blends=blends)


def fit_probes(
    name: str, train: ImageFeatures, poolings: Sequence[str], settings: EvalSettings
) -> dict[str, tuple[Probe, Choice]]:
    """Fit a logistic regression to the features of the subject ``name`` for each pooling."""
    probe = partial(linear_probe, seed=settings.seed, device=settings.torch_device, groups=train.groups)
    shown = track_progress(poolings, len(poolings), f"{name}: linear")
    return {pooling: probe(train.pooled(pooling), train.labels) for pooling in shown}


def save_probe(
    place: Path,
    study: FrozenStudy,
    subject: Subject,
    train: ImageFeatures,
    probes: dict[str, tuple[Probe, Choice]],
) -> None:
    """Save an encoder with the probe that is best on held-out images as a classifier, which computes the same.

    Its temperature is fitted to the held-out images, with a probe that was fitted without them.
    """
    parts, settings, options = study.parts, study.settings, study.options
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


def linear_report(
    rows: Sequence[Result],
    parts: Parts[Source],
    settings: EvalSettings,
    train: ImageFeatures,
    test: ImageFeatures,
    around: str,
    *,
    title: str = "Linear probe",
    **options: Any,
) -> Evaluation:
    """Return the report of logistic regressions; ``options`` are those of `frozen_report`."""
    ours = next(row for row in rows if row.quoted)
    method = (
        f"Linear probe: a logistic regression on the frozen, standardised features of {len(train.labels):,} training "
        f"{train.noun}, tested on {len(test.labels):,} others; its L2 strength (of {len(L2_STRENGTHS)} from "
        f"{min(L2_STRENGTHS):g} to {max(L2_STRENGTHS):g}) and the quoted pooling were chosen on a stratified "
        f"{100 * CHOICE_VALIDATION_SHARE:.0f} % of the training {train.noun}; the final fit used all of them."
    )
    title, images = f"{title} ({ours.pooling})", (parts, settings, train, test)
    return frozen_report(title, method, "Fitted on", rows, *images, around, **options)


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


# The papers' linear probe: batch norm and a linear layer on a frozen encoder, trained by LARS on random crops.


def refuse_accumulation(settings: EvalSettings) -> None:
    """Refuse accumulation for probes of frozen encoders, whose batch norm needs the features of the whole step."""
    if settings.accumulate != 1:
        raise PatchloomError(
            "--accumulate has no effect here, since steps are encoded 256 images at a time: leave it out"
        )


class LinearClassifier(Classifier):
    """Linear layer on the features of a frozen encoder, with a batch norm without scale and shift.

    Features are the class token or the mean of the patch tokens, after the encoder's last norm, or the instance
    representation. Encoder and instance head are not copied.
    """

    def __init__(self, encoder: Encoder, classes: int, pooling: Pool, instance: InstanceHead | None = None) -> None:
        super().__init__(encoder, classes, pooling, instance=instance if pooling == "instance" else None)
        # the encoder is frozen, so all batches have equal weight in the mean and variance for testing
        self.norm = nn.BatchNorm1d(width(encoder), eps=1e-6, momentum=None, affine=False)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        self.frozen = (encoder,) if self.instance is None else (encoder, self.instance)
        for net in self.frozen:
            net.requires_grad_(False)

    def groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Return parameter groups; LARS scales rates by the norm of the weight, not of the bias, as MAE's code."""
        adapted = {"params": [self.head.weight], "weight_decay": weight_decay, "always_adapt": True}
        return [adapted, {"params": [self.head.bias], "weight_decay": 0.0, "always_adapt": False}]

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return features [b d] float32 of normalised images [b channels h w], without gradients."""
        vit = self.encoder
        tokens = encode(vit, all_patches(images, patch_count(vit)), norm=self.pooling != "instance")
        if self.pooling == "instance":
            assert self.instance is not None  # required for this pooling
            return represent(vit, self.instance, tokens).float()
        pooled = tokens[:, 0] if self.pooling == "class" else tokens[:, prefix_count(vit) :].float().mean(1)
        return pooled_norm(vit, pooled).float()

    def classify(self, features: Tensor) -> Tensor:
        """Return logits [b c] of features [b d], in float32 even in mixed precision; only this part has gradients."""
        with torch.autocast(features.device.type, enabled=False):
            assert self.norm is not None  # set in every linear classifier
            return self.head(self.norm(features))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [b c] of normalised images [b channels h w]."""
        return self.classify(self.features(images))


def begin_probe(
    model: LinearClassifier,
    card: EncoderCard,
    recipe: ResolvedProbeRecipe,
    train: Source,
    held: Source | None,
    *,
    settings: EvalSettings,
    half: bool = False,
    kernels: str = "torch",
) -> Trainer:
    """Return the training of a linear classifier, as `patchloom.evaluate.classification.begin_classifier` does.

    A step has thousands of images: they arrive in parts, and only their features are held in memory. Each of several
    processes encodes its images of every part; then all have the features of the whole step, which the batch norm
    needs, and make the same update.
    """
    device, labels = settings.torch_device, labels_of(train)
    criterion = LabelSmoothingCrossEntropy(recipe.smoothing)

    def encode_steps(read: Any, parts: int) -> Iterator[Batch]:
        """Yield batches with features [b d] instead of views."""
        with closing(read):
            while step := [*islice(read, parts)]:
                with torch.autocast(device.type, torch.bfloat16, enabled=half):
                    features = [model.features(normalize(part.views[0], card.mean, card.std)) for part in step]
                unreadable = [name for part in step for name in part.unreadable]
                batch = Batch((torch.cat(features),), torch.cat([part.indices for part in step]), unreadable)
                batch = batch.first(smallest(len(batch.indices)))
                whole = gathered(batch.indices.to(device)).cpu() if world() > 1 else batch.indices
                yield batch._replace(views=(gathered(batch.views[0]),), indices=whole)

    def loss(forward: Forward, batch: Batch) -> Tensor:
        targets = labels[batch.indices].to(device, non_blocking=True)
        return criterion(model.classify(batch.views[0]).float(), targets)

    return labelled_training(
        model, card, recipe, train, held, loss, settings=settings, half=half, kernels=kernels, encode=encode_steps
    )
