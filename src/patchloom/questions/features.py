"""Prediction of features: those of a frozen teacher at the withheld patches (EVA, MaskDistill)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.nets.compiling import compilable
from patchloom.nets.decoders import MAEDecoder, PatchHead
from patchloom.nets.geometry import Geometry
from patchloom.nets.teacher import FrozenTeacher
from patchloom.options.tasks import FeatureLoss
from patchloom.patches.pictures import WITHHELD, principal
from patchloom.patches.tokens import gather_tokens, scatter_tokens, unpatchify
from patchloom.questions.pixels import PatchQuestion
from patchloom.questions.question import Encoded, Measure, Outcome, Sheet


class Features(PatchQuestion):
    """Prediction of the teacher's features of the whole image at masked, blank or degraded patches.

    Args:
        geometry: geometry of the encoder.
        decoder: decoder with as many outputs per patch as the teacher is wide.
        teacher: frozen; its features are normalised to mean 0 and deviation 1.
        loss: cosine: 1 - cos, as in EVA (Fang et al. 2023, section 2.1); smooth_l1: Huber's with a threshold of 1, as
            in MaskDistill (Peng et al. 2022, section 3).
        blank: number of visible patches that are blank, in every image.
    """

    def __init__(
        self,
        geometry: Geometry,
        decoder: MAEDecoder | PatchHead,
        teacher: FrozenTeacher,
        loss: FeatureLoss = "cosine",
        blank: int = 0,
    ):
        super().__init__(geometry, decoder, blank)
        self.teacher, self.loss = teacher, loss

    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """Return the mean loss over the predicted patches; their mean cosine is a metric."""
        asked, answers = self.predict(encoded)
        loss, cosine = self._loss(answers, self.teacher_features(encoded), asked)
        return Outcome(loss, {"feature_cosine": cosine})

    @compilable
    def _loss(self, answers: Tensor, features: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
        answers = answers.float()
        targets = gather_tokens(features.repeat(len(asked) // len(features), 1, 1), asked)  # for each of several masks
        cosine = F.cosine_similarity(answers, targets, dim=-1)
        loss = 1 - cosine.mean() if self.loss == "cosine" else F.smooth_l1_loss(answers, targets)
        return loss, cosine.detach().mean()

    def teacher_features(self, encoded: Encoded) -> Tensor:
        """Return the teacher's features [b n d] of the clean images."""
        return self.teacher(encoded.plain(encoded.images))

    def measure(self, encoded: Encoded) -> Measure:
        """Measure the cosine with the teacher's features, beside that of the mean feature of each place.

        The mean is over the other images; for a single image, over its own patches.
        """
        self.check_blank(encoded.given)
        asked, answers = self.answer(encoded)
        targets = self.teacher_features(encoded)
        of_place = gather_tokens(mean_of_others(targets), asked)
        targets = gather_tokens(targets, asked)
        found, blind = (F.cosine_similarity(one, targets, dim=-1).mean(1) for one in (answers, of_place))
        return Measure("feature cosine", found, {"mean feature": blind}, "mean feature", True, unit="")

    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Draw original | input | first three principal components of the target | those of the prediction."""
        asked, answers = self.answer(encoded)
        targets = self.teacher_features(encoded)
        # with the cosine loss a prediction has a direction but no length
        answers = F.layer_norm(answers, answers.shape[-1:])
        everywhere = scatter_tokens(answers, asked, torch.full_like(targets, WITHHELD))
        return [features_sheet(self.geometry, encoded, self.given_picture(encoded.given), targets, everywhere)]


def mean_of_others(features: Tensor) -> Tensor:
    """Return the mean [b n d] of the features [b n d] at each place over the other images.

    For a single image it is the mean over its own patches.
    """
    b = len(features)
    if b == 1:
        return features.mean(1, keepdim=True).expand_as(features)
    return (features.sum(0, keepdim=True) - features) / (b - 1)


def features_sheet(geometry: Geometry, encoded: Encoded, given: Tensor, targets: Tensor, answers: Tensor) -> Sheet:
    """Draw original | input | first three principal components of the target | those of the prediction.

    Args:
        geometry: geometry of the encoder.
        encoded: the batch.
        given: [b c h w] the encoder's input as a picture.
        targets: [b n d] the teacher's features.
        answers: [b n d] predicted features, nan where nothing was predicted.
    """
    columns = {"original": encoded.images, "given": given}
    axes = principal(targets.flatten(0, 1), geometry.channels)
    for name, features in {"teacher's features": targets, "answer": answers}.items():
        colours = axes.colours(features).to(encoded.images.device)
        pixels = colours.repeat_interleave(geometry.p[0] * geometry.p[1], dim=-1)
        columns[name] = encoded.normalized(unpatchify(pixels, geometry.p, geometry.grid))
    shown = {1: "Brightness is the first principal component", 2: "Magenta and green are the first two components"}
    first = shown.get(geometry.channels, "Red, green and blue are the first three principal components")
    caption = (
        f"{first} of the teacher's features over these {encoded.modality.noun}; the predictions are shown by the same."
    )
    return Sheet(
        "features",
        caption,
        columns,
        "not given, or not predicted",
        "The teacher's features and their prediction",
        "Patches of the same colour have similar features. If the predictions look the same in all rows, the model has "
        "learnt only the mean feature.",
    )
