"""NEPA: next-embedding prediction (2025, arXiv 2512.16922)."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.nets.encode import embed_content
from patchloom.nets.geometry import Geometry
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.tasks import NEPAOptions
from patchloom.patches.pictures import WITHHELD
from patchloom.patches.tokens import patchify, unpatchify
from patchloom.questions.features import mean_of_others
from patchloom.questions.question import ROWS, Encoded, Measure, Outcome, Question, Sheet
from patchloom.tasks.task import Task
from patchloom.withhold.encoder_input import EncoderInput


class NextEmbedding(Question):
    """Prediction of the next patch's embedding, without its position, by the encoder's output for a patch.

    The last class or register token predicts the first patch; without such a token it is not predicted.

    Args:
        geometry: geometry of the encoder.
    """

    pictured: ClassVar[int] = 4 * ROWS  # the nearest patches are those of all other images

    def __init__(self, geometry: Geometry):
        super().__init__(geometry)
        self.first = 0 if geometry.prefix else 1  # index of the first patch that is predicted

    def embeddings(self, encoded: Encoded) -> Tensor:
        """Return the embeddings [b n d] of all patches.

        They are computed without gradient: the encoder could otherwise make all of them equal, and each prediction
        right.
        """
        b, n = len(encoded.images), self.geometry.n
        every = torch.arange(n, device=encoded.images.device).expand(b, n)
        with torch.no_grad():
            return embed_content(cast(PlainViT, encoded.encoder), EncoderInput(encoded.images, every)).float()

    def answers(self, encoded: Encoded) -> Tensor:
        """Return the predicted embeddings [b n-first d]."""
        return encoded.tokens[:, max(self.geometry.prefix - 1, 0) :].float()

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """Return 1 minus the mean cosine; spread and rank of the embeddings are metrics of a collapse.

        ``embedding_spread`` is √(1 - ‖mean‖²) of the normalised embeddings, 0 if all are equal. ``embedding_rank`` is
        the participation ratio (Σλ)² / Σλ² of the eigenvalues of their covariance: the number of directions in use.
        """
        embeddings = self.embeddings(encoded)
        loss = 1 - F.cosine_similarity(self.answers(encoded), embeddings[:, self.first :], dim=-1).mean()
        with torch.autocast(embeddings.device.type, enabled=False):
            flat = F.normalize(embeddings, dim=-1).flatten(0, 1)
            mean = flat.mean(0)
            spread = (1 - mean.square().sum()).clamp_min(0).sqrt()
            covariance = (flat - mean).T @ (flat - mean) / len(flat)
            rank = covariance.trace().square() / covariance.square().sum().clamp_min(1e-20)
        return Outcome(loss, {"embedding_spread": spread, "embedding_rank": rank})

    def measure(self, encoded: Encoded) -> Measure:
        """Measure the cosine, beside those of the previous patch's embedding and of the mean embedding of each place.

        Both have to be beaten. The mean is over the other images, and stands in for the patch before the first.
        """
        embeddings = self.embeddings(encoded)
        mean = mean_of_others(embeddings)
        previous = torch.cat([mean[:, :1], embeddings[:, :-1]], dim=1)

        def score(predicted: Tensor) -> Tensor:
            return F.cosine_similarity(predicted, embeddings[:, self.first :], dim=-1).mean(1)

        baselines = {"previous patch": score(previous[:, self.first :]), "mean embedding": score(mean[:, self.first :])}
        found = score(self.answers(encoded))
        return Measure("cosine with the next embedding", found, baselines, tuple(baselines), True, unit="")

    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Draw original | patches of other images nearest to the predictions | those nearest to the true embeddings."""
        b = len(encoded.images)
        embeddings, answers = self.embeddings(encoded), self.answers(encoded)
        found, truth = self.nearest(encoded, answers, embeddings), self.nearest(encoded, embeddings, embeddings)
        true = embeddings[:, self.first :]
        cosine, before = (
            F.cosine_similarity(one, true[:, -one.shape[1] :], dim=-1).mean().item()
            for one in (answers, embeddings[:, :-1])
        )
        columns = {encoded.modality.item: encoded.images, "predicted": found, "best possible": truth}
        caption = (
            f"Each place shows a patch of {b - 1} other {encoded.modality.noun}. Predicted: the patch whose embedding "
            "is nearest to the prediction, which is made from the true patches before that place. Best possible: the "
            f"nearest to the true embedding. The mean cosine of the predictions is {cosine:.3f}, that of the patch "
            f"before {before:.3f}."
        )
        if not b - 1:
            caption = f"Patches are taken from other {encoded.modality.noun}, and there are none."
        shown = {name: column[:ROWS] for name, column in columns.items()}
        return [
            Sheet(
                "next",
                caption,
                shown,
                f"not predicted, or no other {encoded.modality.item}",
                "Patches nearest to the predicted embeddings",
                f"Patches of other {encoded.modality.noun}, chosen by the predicted and by the true embedding of each "
                "place. The closer the predicted ones come to the best possible, the better.",
            )
        ]

    def nearest(self, encoded: Encoded, wanted: Tensor, embeddings: Tensor) -> Tensor:
        """Paint, at the last m places of the first images, the patch of another image nearest to ``wanted`` [b m d]."""
        g, images = self.geometry, encoded.images
        b, m = wanted.shape[:2]
        patches = patchify(images, g.p)
        canvas = torch.full_like(patches[:ROWS], WITHHELD)
        table = F.normalize(embeddings, dim=-1)
        for i in range(len(canvas) if b > 1 else 0):
            others = torch.arange(b, device=images.device) != i
            scores = F.normalize(wanted[i], dim=-1) @ table[others].flatten(0, 1).T
            canvas[i, g.n - m :] = patches[others].flatten(0, 1)[scores.argmax(1)]
        return unpatchify(canvas, g.p, g.grid)


class NEPA(Task):
    """Prediction of the embedding of the next patch, row by row, from the patches before it (causal attention).

    There is no decoder, mask or teacher. The encoder has causal attention in this training alone: exported, it is a
    stock model, in which all patches attend to one another.

    Args:
        encoder: ViT to train.

    Raises:
        PatchloomError: if an image has a single patch.
    """

    native_crops = True
    only_encoder = True
    encoder: PlainViT

    @takes(NEPAOptions)
    def __init__(self, encoder: PlainViT, options: NEPAOptions) -> None:
        super().__init__(encoder, options)
        self.questions["next"] = NextEmbedding(self.geometry)

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return all patches but the last one, row by row, each with the patches before it alone as context."""
        n = self.geometry.n
        order = torch.arange(n, device=images.device).expand(len(images), n)
        return EncoderInput(images, order[:, : n - 1], masked=order[:, n - 1 :], causal=True)
