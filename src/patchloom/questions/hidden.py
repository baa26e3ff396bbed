"""Prediction of hidden layers of a moving-average teacher that sees the whole image (I-JEPA, data2vec 2.0, Bootleg)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.nets.compiling import compilable
from patchloom.nets.decoders import ConvDecoder, MAEDecoder
from patchloom.nets.encode import encode_layers, layer_names
from patchloom.nets.geometry import Geometry
from patchloom.nets.swin import Encoder, PlainViT
from patchloom.nets.teacher import Teacher, no_grad_autocast
from patchloom.options.tasks import Combine, HiddenLoss, LayerOutput
from patchloom.questions.agreement import momentum_at
from patchloom.questions.features import features_sheet, mean_of_others
from patchloom.questions.question import Encoded, Measure, Outcome, Question, Sheet
from patchloom.withhold.encoder_input import all_patches


class HiddenLayers(Question):
    """Prediction of the teacher's hidden layers at masked patches.

    The patches to predict are ``targets["asked"]`` of the encoder's input, [v*b t m]: t sets of m patches for each of v
    masks per image. The sets of a mask are predicted separately.

    Args:
        encoder: the student; the teacher is a moving average of it.
        predictor: decoder with as many outputs per patch as the targets have numbers: see ``combine``.
        layers: numbers of the predicted blocks, counted from 1.
        momentum: momentum of the teacher at the start; it rises to 1 along a half cosine.
        combine: each: all layers, each normalised within the token (Bootleg; a single one: I-JEPA). mean: their mean,
            each normalised over the tokens of an image, and the mean within the token (data2vec 2.0).
        source: tokens after a block, of the last one after the final norm (block), or output of its MLP (mlp).
        loss: smooth_l1, with a threshold of 1, or mse.
    """

    def __init__(
        self,
        encoder: PlainViT,
        predictor: MAEDecoder | ConvDecoder,
        layers: Sequence[int],
        momentum: float,
        combine: Combine = "each",
        source: LayerOutput = "block",
        loss: HiddenLoss = "smooth_l1",
    ):
        super().__init__(Geometry.of(encoder))
        self.predictor, self.layers, self.momentum = predictor, list(layers), momentum
        self.combine, self.source, self.loss = combine, source, loss
        self.last = len(layer_names(encoder)) - 2  # number of the last block
        self.teacher = Teacher(encoder=encoder)

    def teacher_features(self, images: Tensor) -> Tensor:
        """Return the targets [b n f] of whole images [b c h w], in float32."""
        given = all_patches(images, self.geometry.n)
        if self.source == "mlp":
            wanted = [layer - 1 for layer in self.layers]
        else:
            wanted = [layer + (layer == self.last) for layer in self.layers]
        return self._combined(encode_layers(self.teacher.encoder, given, wanted, self.source == "mlp"))

    @compilable
    def _combined(self, layers: list[Tensor]) -> Tensor:
        found = [tokens[:, self.geometry.prefix :].float() for tokens in layers]
        if self.combine == "each":
            return torch.cat([_normed(tokens) for tokens in found], dim=-1)
        return _normed(torch.stack([F.instance_norm(tokens.mT).mT for tokens in found]).mean(0))

    def answer(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Return patches [t*v*b m] and the predictions for them [t*v*b m f], in float32."""
        asked = encoded.given.targets["asked"]
        t = asked.shape[1]
        tokens, visible = encoded.tokens.repeat(t, 1, 1), encoded.given.visible.repeat(t, 1)
        rows = asked.transpose(0, 1).flatten(0, 1)
        return rows, self.predictor(tokens, visible, rows).float()

    def errors(self, answers: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every number [r m f]."""
        loss = F.smooth_l1_loss if self.loss == "smooth_l1" else F.mse_loss
        return loss(answers, targets, reduction="none")

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """Return the mean loss; deviations of the targets, 0 to 1, are metrics of a collapse.

        ``target_deviation`` is 0 if all tokens are equal, and ``target_deviation_within`` if those of each image are.
        """
        with no_grad_autocast(self.teacher, encoded.teacher_images):
            targets = self.teacher_features(encoded.teacher_images)
        asked, answers = self.answer(encoded)
        return Outcome(*self._loss(answers, targets, asked))

    @compilable
    def _loss(self, answers: Tensor, targets: Tensor, asked: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.errors(answers, _at(targets, asked)).mean()
        # a token has a variance of 1, so these are at most 1
        overall, within = (
            (targets - mean).square().mean().sqrt() for mean in (targets.mean((0, 1)), targets.mean(1, keepdim=True))
        )
        return loss, {"target_deviation": overall, "target_deviation_within": within}

    def after_step(self, progress: float, encoder: Encoder, applied: float | Tensor = 1.0) -> None:
        """Update the teacher after an update of the weights."""
        self.teacher.follow(momentum_at(progress, self.momentum), applied, encoder=encoder)

    def teacher_modules(self) -> dict[str, nn.Module]:
        """Return the teacher's encoder."""
        return {"encoder": self.teacher.encoder}

    def measure(self, encoded: Encoded) -> Measure:
        """Measure the loss, beside those of the mean feature of each place and of the image's own visible patches.

        The second one comes from a teacher that saw the whole image, so it need not be beaten.
        """
        targets = self.teacher_features(encoded.teacher_images)
        asked, answers = self.answer(encoded)
        right = _at(targets, asked)
        visible = encoded.given.visible.repeat(encoded.given.targets["asked"].shape[1], 1)
        guesses = {
            "": answers,
            "mean feature": _at(mean_of_others(targets), asked),
            "mean of the visible": _at(targets, visible).mean(1, keepdim=True).expand_as(right),
        }
        b = len(targets)
        found = {name: self.errors(one, right).mean((1, 2)).view(-1, b).mean(0) for name, one in guesses.items()}
        outputs = targets.mean(1)
        return Measure("feature error", found.pop(""), found, "mean feature", False, "", outputs=outputs)

    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Draw original | input | first three principal components of the target | those of the prediction."""
        b, given = len(encoded.images), encoded.given
        one_mask = replace(given, visible=given.visible[:b], targets={"asked": given.targets["asked"][:b]})
        encoded = replace(encoded, given=one_mask, tokens=encoded.tokens[:b])
        targets = self.teacher_features(encoded.teacher_images)
        asked, answers = self.answer(encoded)
        # the mean where several sets overlap; 0 / 0 is nan: not predicted
        at = asked.unflatten(0, (-1, b)).transpose(0, 1).flatten(1)
        sums = torch.zeros_like(targets)
        sums.scatter_add_(
            1,
            at[..., None].expand(-1, -1, targets.shape[-1]),
            answers.unflatten(0, (-1, b)).transpose(0, 1).flatten(1, 2),
        )
        counts = torch.zeros_like(targets[..., 0]).scatter_add_(1, at, torch.ones_like(at, dtype=targets.dtype))
        everywhere = sums / counts[..., None]
        return [features_sheet(self.geometry, encoded, self.given_picture(one_mask), targets, everywhere)]


def _normed(tokens: Tensor) -> Tensor:
    """Normalise each token [... d] to mean 0 and deviation 1."""
    return F.layer_norm(tokens, tokens.shape[-1:])


def _at(features: Tensor, asked: Tensor) -> Tensor:
    """Return the features [r m f] at patches [r m] of images [b n f], which repeat r / b times."""
    rows = torch.arange(len(features), device=asked.device).repeat(len(asked) // len(features))
    return features[rows[:, None], asked]
