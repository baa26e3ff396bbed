"""Encoder with a classification head, trained by `fit`; saved and loaded here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.errors import PatchloomError, conforms, typed_fields
from patchloom.nets.build import initialize
from patchloom.nets.checkpoints.format import (
    CLASSIFIER_FORMAT,
    EncoderCard,
    checked_card,
    read_about,
    refuse_larger,
    save_net,
    untrained_twin,
)
from patchloom.nets.checkpoints.read import expect_intact, read_weights
from patchloom.nets.encode import (
    attention_heads,
    encode,
    final_norm,
    has_positions,
    last_norms,
    patch_count,
    pooled_norm,
    prefix_count,
)
from patchloom.nets.encode import width as token_width
from patchloom.nets.finetune import Variant, with_variant, without_last_norm
from patchloom.nets.heads import InstanceHead, OnEncoder, Stem, pooled_tokens, represent, select_pooling
from patchloom.nets.swin import Encoder
from patchloom.options.evaluate import Pooling, PositionChoice
from patchloom.withhold.encoder_input import all_patches

# Calibration of a classifier's probabilities by one temperature (Guo et al., ICML 2017, arXiv 1706.04599).
_COLDEST, _HOTTEST = 0.02, 50.0
_BINS = 15  # of confidence, as in the paper


@dataclass(frozen=True)
class Calibration:
    """Temperature that was fitted to validation images, and the errors of their probabilities.

    Both errors are those of the same images that the temperature was fitted to: on new images they are larger.

    Attributes:
        temperature: divisor of the logits.
        images: number of images.
        nll_before, nll: mean negative log-likelihood in nats, of the uncalibrated and the calibrated probabilities.
        ece_before, ece: expected calibration error in [0, 1], of the same.
    """

    temperature: float
    images: int
    nll_before: float
    nll: float
    ece_before: float
    ece: float

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Calibration:
        """Validate the values of `plain` from a file."""
        ranges = {"temperature": (_COLDEST, _HOTTEST), "images": (1, 2**62), "ece_before": (0, 1), "ece": (0, 1)}
        found = typed_fields(cls, given, ranges)
        if len(found) < len(cls.__dataclass_fields__):
            raise ValueError("its calibration lacks a value")
        return cls(**found)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self, noun: str = "images") -> str:
        """Return a sentence on the temperature, and on the errors before and after."""
        return (
            f"calibrated by the temperature {self.temperature:.3g} on {self.images:,} validation {noun}: NLL "
            f"{self.nll_before:.3f} before, {self.nll:.3f} after; ECE {100 * self.ece_before:.1f} % before, "
            f"{100 * self.ece:.1f} % after (on the same {noun}, so new ones have larger errors)"
        )


def describe_calibration(known: Calibration | None) -> str:
    """Return how probabilities are calibrated, for the end of a sentence."""
    if known is None:
        return "not calibrated, as no validation images were held out when the classifier was trained"
    return f"calibrated by the temperature {known.temperature:.3g}, fitted to {known.images:,} validation images"


def calibrate(logits: Tensor, labels: Tensor) -> Calibration:
    """Fit the temperature that minimises the negative log-likelihood of labels.

    The temperature is sought from 0.02 to 50: without a bound, it would fall to 0 if every label is predicted right.

    Args:
        logits: [n c] of images that the classifier was not trained on.
        labels: [n] int64.
    """
    from scipy.optimize import minimize_scalar  # takes 0.1 s to import

    logits = logits.double()

    def loss(temperature: float) -> float:
        return F.cross_entropy(logits / temperature, labels).item()

    # the loss is convex in 1 / temperature, so it has a single minimum along the logarithm as well
    bounds = math.log(_COLDEST), math.log(_HOTTEST)
    search: dict[str, Any] = {"bounds": bounds, "method": "bounded", "options": {"xatol": 1e-5}}
    found = math.exp(minimize_scalar(lambda logarithm: loss(math.exp(logarithm)), **search).x)
    found = min(max(found, _COLDEST), _HOTTEST)
    before, after = logits.softmax(1), (logits / found).softmax(1)
    return Calibration(
        found,
        len(labels),
        loss(1.0),
        loss(found),
        calibration_error(before, labels),
        calibration_error(after, labels),
    )


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = _BINS) -> float:
    """Return the expected calibration error in [0, 1]: mean distance of accuracy and confidence in bins of confidence.

    The bins have equal widths, each with its upper end, and are weighted by their numbers of images (Guo et al. 2017,
    equation 3). The error is biased upwards where bins hold few images.

    Args:
        probabilities: [n c].
        labels: [n] int64.
        bins: number of bins.
    """
    confidence, predicted = (values.numpy() for values in probabilities.double().max(1))
    right = predicted == labels.numpy()
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gap = np.bincount(place, right, bins) - np.bincount(place, confidence, bins)
    return float(np.abs(gap).sum() / len(right))


_WIDEST = 2**14
Pool = Literal["class", "mean", "instance"]


class Classifier(OnEncoder):
    """Classifier of images. Letters: b batch, d width, c classes.

    Args:
        encoder: encoder, not copied.
        classes: number of classes.
        pooling: input of the head: class token, mean of the patch tokens, or the output of ``instance``.
        instance: instance head, required for that pooling.
        body: new blocks on the encoder's tokens; the encoder is then frozen, and a LayerNorm follows the pooling.
        stem: layer between the pooling and the linear layer, such as the first of ExtreMA's projection.
        fresh_norm: put a new LayerNorm before the head instead of the encoder's last norm, as the programs of MAE,
            DropPos, LUT, ExtreMA and SimMIM do; not on an instance representation.
        probe: take the features of a linear probe, whose tokens are normed before they are pooled, and which have more
            poolings; ``encoder`` is frozen.
    """

    def __init__(
        self,
        encoder: Encoder,
        classes: int,
        pooling: Pooling,
        *,
        instance: InstanceHead | None = None,
        body: nn.Module | None = None,
        stem: Stem | None = None,
        fresh_norm: bool = False,
        probe: bool = False,
    ) -> None:
        super().__init__()
        self.encoder, self.pooling, self.instance, self.body, self.stem = encoder, pooling, instance, body, stem
        self.probe = probe
        new_norm = body is not None or fresh_norm
        self.norm: nn.Module | None = nn.LayerNorm(token_width(encoder), eps=1e-6) if new_norm else None
        width = token_width(encoder) * (1 + (pooling == "both"))
        self.head = nn.Linear(width if stem is None else stem.sizes["hidden"], classes)
        nn.init.trunc_normal_(self.head.weight, std=2e-5)  # as in MAE: all classes are equally likely at first
        nn.init.zeros_(self.head.bias)
        if body is not None:
            self.frozen = (encoder,)
        if body is not None or probe:
            self.encoder.requires_grad_(False)
        elif fresh_norm:
            for unused in last_norms(encoder):
                unused.requires_grad_(False)

    @property
    def classes(self) -> int:
        return self.head.out_features

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [b c] of normalised images [b channels h w]."""
        pooled = self.pooled(images)
        return self.head(pooled if self.stem is None else self.stem(pooled))

    def pooled(self, images: Tensor) -> Tensor:
        """Return the input of the stem or head [b d]. The mean is normed, as in MAE's code, which trains faster."""
        vit, frozen = self.encoder, self.body is not None
        if self.probe:
            return select_pooling(self.pooling, pooled_tokens(vit, images, self.instance))
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            tokens = encode(vit, all_patches(images, patch_count(vit)), norm=frozen)
        if self.pooling == "instance":
            assert self.instance is not None  # required for this pooling
            return represent(vit, self.instance, tokens)
        tokens = tokens if self.body is None else self.body(tokens)
        pooled = tokens[:, 0] if self.pooling == "class" else tokens[:, prefix_count(vit) :].mean(1)
        return pooled_norm(vit, final_norm(vit, pooled)) if self.norm is None else self.norm(pooled)


def fresh_blocks(vit: Encoder, count: int) -> nn.Sequential:
    """Return ``count`` freshly initialised transformer blocks with the encoder's width and heads."""
    norm: Any = partial(nn.LayerNorm, eps=1e-6)  # timm's type is a class, but it is only called
    made = (Block(token_width(vit), attention_heads(vit), qkv_bias=True, norm_layer=norm) for _ in range(count))
    body = nn.Sequential(*made)
    initialize(body)
    return body


def variant_of(positions: PositionChoice, vit: Encoder) -> Variant:
    """Resolve ``auto``: keep the encoder's positions; learned ones where it has none (MP3, section 3.3)."""
    if positions == "auto":
        return "keep" if has_positions(vit) else "learned"
    return positions


@dataclass(frozen=True)
class ClassifierCard:
    """Metadata of a fine-tuned classifier's weights.

    Attributes:
        encoder: card of the encoder that was fine-tuned.
        positions, pooling: options of fine-tuning.
        classes: class names in the order of the logits.
        data: name of the training data.
        test: fingerprint of the test images, the only ones on which the classifier may be tested.
        seed: random seed of split and training.
        settings: values of the recipe.
        fresh_norm: whether the head has a norm of its own.
        probe: whether it is a linear probe on frozen features.
        instance, stem: sizes of an instance head and of a stem; {} without them.
        calibration: values of its `Calibration`; {} without one.
    """

    encoder: EncoderCard
    positions: Variant
    pooling: Pooling
    classes: tuple[str, ...]
    data: str
    test: str
    seed: int
    settings: dict[str, Any]
    fresh_norm: bool = False
    probe: bool = False
    instance: dict[str, int] = field(default_factory=dict)
    stem: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)

    @property
    def test_crop(self) -> float:
        """Side of the centre crop of its test images over the short side of the resized image."""
        value = self.settings.get("test_crop", 1.0)
        if not conforms(value, float) or not 0 < value <= 1:
            raise ValueError("test_crop is no fraction")
        return value

    @property
    def last_norm(self) -> bool:
        """Whether the tokens of a linear probe pass the encoder's last norm."""
        return self.settings.get("last_norm") is not False

    @property
    def calibrated(self) -> Calibration | None:
        """Calibration of its probabilities; None without validation images."""
        return Calibration.of(self.calibration) if self.calibration else None


def save_classifier(model: Classifier, card: ClassifierCard, path: Path) -> None:
    save_net(model, CLASSIFIER_FORMAT, asdict(card), path)


def load_classifier(path: str | Path) -> tuple[Classifier, ClassifierCard]:
    """Load a fine-tuned or probed classifier in eval mode and its card.

    Args:
        path: file from `evaluate finetune`, or from `evaluate linear` with ``--save``.

    Returns:
        The classifier, a module from images [b c h w], normalised by ``card.encoder.mean`` and ``card.encoder.std``, to
        logits [b classes]; and its card, with the names of the classes and the calibration.

    Raises:
        PatchloomError: if there is no such file, or it is damaged or something else.
    """
    card, weights = read_classifier(path), read_weights(Path(path))
    refuse_larger(card.encoder, weights, Path(path))
    with expect_intact(path), torch.random.fork_rng(devices=[]):
        twin, _ = untrained_twin(card.encoder)
        encoder = with_variant(twin, card.encoder, card.positions, card.pooling == "class" and not card.probe)
        if card.probe and not card.last_norm:
            encoder = without_last_norm(encoder)
        instance = InstanceHead(**card.instance) if card.instance else None
        stem = Stem.fresh(**card.stem) if card.stem else None
        parts: dict[str, Any] = {"instance": instance, "stem": stem, "probe": card.probe}
        model = Classifier(encoder, len(card.classes), card.pooling, fresh_norm=card.fresh_norm, **parts)
        model.load_state_dict(weights, strict=True)
    return model.eval(), card


def read_classifier(path: str | Path) -> ClassifierCard:
    """Read the card of a classifier's file; errors as in `load_classifier`."""
    path = Path(path)
    if not path.is_file():
        raise PatchloomError(f"there is no classifier at {path}: create one by patchloom evaluate finetune")
    about = read_about(path, CLASSIFIER_FORMAT, "a classifier")
    with expect_intact(path):
        card = checked_card(ClassifierCard, about)
        card.test_crop, card.calibrated  # noqa: B018  # raise if the file has another value
        # sizes of the parts of the head, from an untrusted file
        sizes = {**card.instance, **{name: value for name, value in card.stem.items() if name != "pooling"}}
        if not all(isinstance(value, int) and 0 < value <= _WIDEST for value in sizes.values()):
            raise ValueError("its head has invalid sizes")
        if card.instance and {*card.instance} != {"width", "heads", "depth"}:
            raise ValueError("its instance head has other sizes")
        if card.stem and {*card.stem} != {"width", "hidden", "pooling"}:
            raise ValueError("its stem has other sizes")
    return card
