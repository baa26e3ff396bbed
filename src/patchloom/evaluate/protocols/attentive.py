"""Attentive probe: learned queries pool the tokens of the frozen encoder (efficient probing, arXiv 2506.10178)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.loss import LabelSmoothingCrossEntropy
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.data.loader import Batch, plain_batches
from patchloom.data.source import Source
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.stats import normalize
from patchloom.errors import PatchloomError
from patchloom.evaluate.classification import (
    ClassPredictions,
    fitted_report,
    labelled_training,
    plan_for,
    test_classifiers,
)
from patchloom.evaluate.features import ImageFeatures, class_names, one_pass
from patchloom.evaluate.frozen import INSTEAD
from patchloom.evaluate.protocols.linear import LinearClassifier, begin_probe, refuse_accumulation
from patchloom.evaluate.recipes import ATTENTIVE, AttentiveRecipe, ResolvedAttentiveRecipe, ResolvedRecipe
from patchloom.evaluate.select import Candidate, Fitted, Plan, train_candidates
from patchloom.evaluate.settings import EvalSettings, Parts, Subject, open_subjects, parts_of, place_in_run, share_steps
from patchloom.evaluate.trainer import Forward, Score, Trainer
from patchloom.look.attention import draw_queries
from patchloom.look.sheet import to_pixels
from patchloom.nets.checkpoints.format import EncoderCard
from patchloom.nets.encode import (
    attention_heads,
    encode,
    grid_size,
    input_channels,
    patch_count,
    patch_size,
    prefix_count,
    width,
)
from patchloom.nets.finetune import with_variant
from patchloom.nets.optimizer import parameter_groups
from patchloom.nets.swin import Encoder, PlainViT, refuse_hierarchical
from patchloom.options.evaluate import Precision
from patchloom.options.protocols import Attentive
from patchloom.results.evaluation import Drawing, Evaluation
from patchloom.system.device import free_memory
from patchloom.system.distributed import rank
from patchloom.withhold.encoder_input import all_patches

_PICTURED = 6  # images
_FILLED = 0.8  # share of the free memory that tokens may take
_JOINED = 2  # copies of the tokens while the batches are joined


def attentive(run: str | Path, data: DataLike, settings: EvalSettings, options: Attentive) -> Evaluation:
    """Train queries that pool the frozen encoder's tokens, and a linear classifier on them.

    A linear probe on the mean token ranks masked image modelling below its worth; an attentive one is nearer to
    fine-tuning, at the cost of a linear probe.

    Args:
        run, data, settings, options: as in `patchloom.evaluate.protocols.evaluate`.

    Raises:
        PatchloomError: unknown encoder, data or recipe, data without labels, a Swin, queries that do not divide the
            width, or tokens that do not fit into memory.
    """
    refuse_accumulation(settings)
    share_steps(settings)
    subjects = open_subjects(run, settings)
    vit = refuse_hierarchical(subjects.ours.vit, "attentive", INSTEAD)
    parts = parts_of(data, settings, card=subjects.ours.card, run=run)
    precision, changes = options.precision, options.changes()
    plan = plan_for(options.recipe, changes, vit, parts, settings, precision, ATTENTIVE, begin_attentive)
    trained = [subjects.ours, *(subjects.controls if options.control else [])]
    report, fitted = attentive_report(trained, plan, precision)
    place = place_in_run(run, data, options.recipe, settings.seed, "pictures", ".png", "attentive-")
    if place is None or rank():
        return report
    model, card, test = fitted[0].model, fitted[0].candidate.card, parts.test
    some = test.subset(range(min(_PICTURED, len(test))))
    views = next(iter(plain_batches(some, model.size, _PICTURED, channels=model.channels))).views[0]
    with torch.inference_mode():
        images = normalize(views, card.mean, card.std)
        # class token and registers come first
        maps = model.pool.attention(model.features(images))[..., -patch_count(model.encoder) :]
    pictures = to_pixels(images, card.mean, card.std)
    content = {"pictures": pictures, "maps": maps.unflatten(-1, grid_size(model.encoder)).numpy()}
    content["title"] = f"Queries of the attentive probe of {card.name}"
    return replace(report, drawings=(Drawing(draw_queries, place, content),))


def small_plan(
    vit: PlainViT, parts: Parts[Source], settings: EvalSettings, precision: Precision = "auto"
) -> Plan[Source, ResolvedRecipe]:
    """Return the plan of the recipe small, with as many of its queries as share the width of the encoder."""
    queries = max(m for m in range(1, ATTENTIVE["small"][0].queries + 1) if width(vit) % m == 0)
    return plan_for("small", {"queries": queries}, vit, parts, settings, precision, ATTENTIVE, begin_attentive)


def candidate(subject: Subject, parts: Parts[Source], *, raw: bool = False) -> Candidate:
    """Return a candidate: an attentive classifier on a frozen encoder, or on the ``raw`` patches of its images."""
    classes = len(class_names(parts.train))

    def build(recipe: AttentiveRecipe) -> AttentiveClassifier:
        encoder, d = with_variant(subject.vit, subject.card), width(subject.vit)
        if raw:
            return PatchClassifier(encoder, classes, recipe.queries)
        pool: Any = CrossPool(d, attention_heads(subject.vit))
        if recipe.form == "efficient":
            pool = EfficientPool(d, recipe.queries, recipe.reduce)
        return AttentiveClassifier(encoder, classes, pool, recipe.whole)

    return Candidate(subject.name, subject.card, build)


def attentive_report(
    subjects: Sequence[Subject], plan: Plan[Source, ResolvedRecipe], precision: Precision, quiet: bool = False
) -> tuple[Evaluation, list[Fitted]]:
    """Train and test an attentive classifier on each subject; return the report, and what was trained."""
    values, parts = plan.recipe.plain(), plan.parts
    pooled = "one learned query attends to the patch tokens of the frozen encoder by multi-head attention"
    if values["form"] == "efficient":
        pooled = (
            f"{values['queries']} learned queries attend to the patch tokens of the frozen encoder, which are their "
            "own keys (efficient probing)"
        )
    done = f"Attentive probe: {pooled}; batch norm and a linear layer classify what they pool."
    fitted = train_candidates([candidate(one, parts) for one in subjects], plan, quiet=quiet)
    rows, found = test_classifiers("attentive", fitted, plan, precision)
    return fitted_report(f"Attentive probe ({plan.name})", done, rows, plan, found[-1]), fitted


class EfficientPool(nn.Module):
    """Pooling of efficient probing (arXiv 2506.10178, section 3; program of the authors).

    Each query attends to the tokens, which are their own keys, and gives one slice of the output: the tokens' mean by
    these weights, mapped by the same slice of the value matrix.

    Args:
        width: width d of the tokens.
        queries: number m of queries.
        reduce: the output has d / reduce channels, which the queries share evenly.

    Raises:
        PatchloomError: the queries cannot share the channels.
    """

    def __init__(self, width: int, queries: int = 32, reduce: int = 1) -> None:
        super().__init__()
        self.out, left = divmod(width, reduce)
        if left or self.out % queries:
            raise PatchloomError(
                f"{queries} queries cannot share {width} channels reduced by {reduce}: give --queries and --reduce "
                "that divide the width"
            )
        self.queries = nn.Parameter(0.02 * torch.randn(queries, width))
        self.values = nn.Linear(width, self.out, bias=False)

    def attention(self, tokens: Tensor) -> Tensor:
        """Return the attention [b m n] of each query to ``tokens`` [b n d]."""
        return (self.queries / math.sqrt(tokens.shape[-1]) @ tokens.mT).softmax(-1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return pooled features [b d/reduce] of ``tokens`` [b n d]."""
        means = self.attention(tokens) @ tokens  # [b m d]: the mean first, since d is larger than the slice
        slices = self.values.weight.view(len(self.queries), -1, tokens.shape[-1])
        return torch.einsum("bmd,mod->bmo", means, slices).flatten(1)


class CrossPool(nn.Module):
    """Pooling of AIM (El-Nouby et al. 2024, arXiv 2401.08541): multi-head cross-attention of one query.

    Batch norm without scale and shift on the tokens, keys and values without bias, and no output projection. V-JEPA's
    attentive probe is the same idea with an output projection and an MLP.

    Args:
        width: width d of the tokens.
        heads: number of attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.out, self.heads = width, heads
        self.norm = nn.BatchNorm1d(width, eps=1e-6, affine=False)
        self.query = nn.Parameter(0.02 * torch.randn(1, heads, 1, width // heads))
        self.keys, self.values = (nn.Linear(width, width, bias=False) for _ in range(2))

    def _split(self, tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [b heads n d/heads]

    def _normed(self, tokens: Tensor) -> Tensor:
        return self.norm(tokens.flatten(0, 1)).view_as(tokens)

    def attention(self, tokens: Tensor) -> Tensor:
        """Return the attention [b heads n] of the query to ``tokens`` [b n d]."""
        keys = self._split(self.keys(self._normed(tokens)))
        return (self.query / math.sqrt(keys.shape[-1]) @ keys.mT).softmax(-1)[:, :, 0]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return pooled features [b d] of ``tokens`` [b n d]."""
        normed = self._normed(tokens)
        query = self.query.expand(len(tokens), -1, -1, -1)
        pooled = F.scaled_dot_product_attention(query, self._split(self.keys(normed)), self._split(self.values(normed)))
        return pooled.flatten(1)


class AttentiveClassifier(LinearClassifier):
    """Attentive pooling, batch norm without scale and shift, and a linear layer on a frozen encoder's tokens.

    The tokens are those before the encoder's last norm, without class token and registers unless ``whole``. The encoder
    is not copied.
    """

    def __init__(self, encoder: Encoder, classes: int, pool: EfficientPool | CrossPool, whole: bool = False) -> None:
        super().__init__(encoder, classes, "mean")
        self.pool, self.whole = pool, whole
        self.pooling: Any = "attentive"
        self.norm = nn.BatchNorm1d(pool.out, eps=1e-6, affine=False)
        self.head = nn.Linear(pool.out, classes)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return tokens [b n d] float32 of normalised images [b channels h w], without gradients."""
        vit = self.encoder
        tokens = encode(vit, all_patches(images, patch_count(vit)), norm=False).float()
        return tokens if self.whole else tokens[:, prefix_count(vit) :]

    @property
    def token_width(self) -> int:
        """Width of the tokens that are pooled."""
        return width(self.encoder)

    def classify(self, features: Tensor) -> Tensor:
        """Return logits [b c] of tokens [b n d], in float32 even in mixed precision; only this part has gradients."""
        with torch.autocast(features.device.type, enabled=False):
            return super().classify(self.pool(features))

    def groups(self, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
        """Return parameter groups; LARS adapts the rates of matrices, not of the bias."""
        matrices, biases = parameter_groups(self, weight_decay)
        return [{**matrices, "always_adapt": True}, {**biases, "always_adapt": False}]


class PatchClassifier(AttentiveClassifier):
    """Attentive classifier of raw patches, the control without an encoder.

    The pixels of a patch are padded with zeros to a width that the queries share. The encoder gives the sizes only.
    """

    def __init__(self, encoder: Encoder, classes: int, queries: int) -> None:
        self.pixels = input_channels(encoder) * math.prod(patch_size(encoder))
        super().__init__(encoder, classes, EfficientPool(-(-self.pixels // queries) * queries, queries))

    @property
    def token_width(self) -> int:
        return self.pool.values.in_features

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return patches [b n pixels] float32 of normalised images [b channels h w], padded with zeros."""
        sides = patch_size(self.encoder)
        patches = F.unfold(images.float(), sides, stride=sides).mT
        return F.pad(patches, (0, self.token_width - self.pixels))


def begin_attentive(
    model: AttentiveClassifier,
    card: EncoderCard,
    recipe: ResolvedAttentiveRecipe,
    train: Source,
    held: Source | None,
    *,
    settings: EvalSettings,
    half: bool = False,
    kernels: str = "torch",
) -> Trainer:
    """Return the training of an attentive classifier, as `patchloom.evaluate.classification.begin_classifier` does.

    Tokens of centre crops are encoded once and kept in memory; without ``cached``, random crops are encoded in every
    epoch, as `begin_probe` does.
    """
    if not recipe.cached:
        return begin_probe(model, card, recipe, train, held, settings=settings, half=half, kernels=kernels)
    device, criterion = settings.torch_device, LabelSmoothingCrossEntropy(recipe.smoothing)
    precision: Precision = "bfloat16" if half else "float32"
    tokens = cached_tokens(model, card, train, settings, precision, recipe.test_crop)
    others = None if held is None else cached_tokens(model, card, held, settings, precision, recipe.test_crop)
    values, labels = tokens.tokens["tokens"], tokens.labels
    batch = min(recipe.course(len(train)).batch, len(values))
    each = len(values) // batch  # steps of an epoch, which is a permutation

    def batches(first: int, stop: int, workers: int) -> Iterator[Batch]:
        for step in range(first, stop):
            if step == first or step % each == 0:
                order = np.random.default_rng((settings.seed, step // each)).permutation(len(values))
            chosen = torch.from_numpy(order[step % each * batch :][:batch])
            yield Batch((values[chosen].to(device),), chosen, [])

    def loss(forward: Forward, batch: Batch) -> Tensor:
        return criterion(model.classify(batch.views[0]), labels[batch.indices].to(device))

    def validate(tested: AttentiveClassifier) -> Score:
        assert others is not None  # called with validation images only
        tested.eval()
        with torch.inference_mode():
            logits = [tested.classify(some.to(device)).cpu() for some in others.tokens["tokens"].split(batch)]
        return ClassPredictions(torch.cat(logits), others.labels, []).score()

    options: Any = {"settings": settings, "half": half, "kernels": kernels, "cached": (batches, validate)}
    return labelled_training(model, card, recipe, train, held, loss, **options)


def cached_tokens(
    model: AttentiveClassifier,
    card: EncoderCard,
    source: Source,
    settings: EvalSettings,
    precision: Precision,
    test_crop: float,
) -> ImageFeatures:
    """Return the tokens [images n d] of centre crops of labelled images, on the CPU.

    Raises:
        PatchloomError: they do not fit into memory.
    """
    if short := memory_shortfall(model.encoder, len(source), source.noun, model.token_width):
        raise PatchloomError(f"{short}: give --max_train, or --cached false, which keeps those of one step only")
    device = settings.torch_device
    return one_pass(
        model.encoder,
        card,
        source,
        lambda images: {"tokens": model.features(images)},
        device,
        precision=precision,
        test_crop=test_crop,
        what=f"tokens of {len(source):,} {source.noun}",
        **settings.reading(source),
    )


def memory_shortfall(vit: Encoder, images: int, noun: str, d: int | None = None) -> str:
    """Return a clause on the memory that the tokens of ``images`` lack, of width ``d`` or the encoder's; else ""."""
    need, free = 4.0 * _JOINED * images * patch_count(vit) * (d or width(vit)) / 2**30, free_memory("cpu")
    if need <= _FILLED * free:
        return ""
    return f"the tokens of {images:,} {noun} need {need:.1f} GiB of memory, and {free:.1f} are free"


# Work in products of two numbers, for a rule that no timing enters.


def encoder_products(vit: PlainViT) -> float:
    """Return the products of one image's way through an encoder, without patch embedding: 12 d² + 2 n d a token."""
    n, d = patch_count(vit), width(vit)
    return len(vit.feature_info) * n * (12 * d**2 + 2 * n * d)


def probe_products(vit: PlainViT, plan: Plan[Source, ResolvedRecipe]) -> float:
    """Return the products of one attentive probe by efficient probing, with cached tokens.

    Training and test images are encoded once, and a backward pass counts as two forward passes.
    """
    values, course, parts = plan.recipe.plain(), plan.course(), plan.parts
    n, d = patch_count(vit), width(vit)
    pooling = 2 * n * d * values["queries"] + d**2 / values["reduce"]
    validated = (
        0 if plan.recipe.validation == 0 else course.steps / course.every * plan.recipe.held_out(len(parts.train))
    )
    encoded = len(parts.train) + len(parts.test)
    return encoded * encoder_products(vit) + (3 * course.steps * course.batch + validated + len(parts.test)) * pooling
