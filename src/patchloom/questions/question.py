"""What every question is: a loss, a measure beside baselines that need no learning, and pictures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchloom.nets.geometry import Geometry
from patchloom.patches.pictures import WITHHELD
from patchloom.patches.tokens import patchify, unpatchify
from patchloom.questions.measure import Measure
from patchloom.sound import Sound
from patchloom.withhold.encoder_input import EncoderInput

ROWS = 8  # images of a sheet that are shown


class Outcome(NamedTuple):
    """What a forward pass returns, of every question and task.

    Attributes:
        loss: scalar with gradient, float32.
        metrics: scalars worth a column in ``metrics.csv``, without gradient.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class Sheet(NamedTuple):
    """One picture sheet: a row an image, a column a stage.

    Attributes:
        name: file name without suffix.
        caption: what is shown, and what was taken from the original.
        columns: by heading, images [b c h w] in normalised pixels; nan is hatched as empty, inf crossed as wrong.
        empty: what it means that something is empty, for the legend.
    """

    name: str
    caption: str
    columns: dict[str, Tensor]
    empty: str = "withheld"


@dataclass(frozen=True)
class Encoded:
    """A batch, what the encoder was given of it, and what it made of that: all that a question may look at.

    Attributes:
        images: [b c h w] as they came: clean, normalised, and larger than the encoder's where it sees only a part.
        given: what the encoder was given of them.
        tokens: [b prefix+k d] the encoder's.
        encoder: which made them, for questions that ask it again.
        teacher_images: [b c h w] what a teacher sees, of which nothing is withheld.
        mean, std: [c 1 1] by which the images are normalised.
        sound: how recordings became these images; None where they are no recordings.
    """

    images: Tensor
    given: EncoderInput
    tokens: Tensor
    encoder: VisionTransformer
    teacher_images: Tensor
    mean: Tensor
    std: Tensor
    sound: Sound | None = None

    def plain(self, images: Tensor) -> Tensor:
        """Normalised images [b c h w] in [0, 1]."""
        return images * self.std + self.mean

    def normalized(self, images: Tensor) -> Tensor:
        """Images [b c h w] in [0, 1], normalised."""
        return (images - self.mean) / self.std


class Question(nn.Module, ABC):
    """Something asked of an encoder's tokens. What only it needs, such as a decoder or a teacher, is its own.

    Attributes:
        geometry: of the encoder's images and tokens.
        pictured: how many images `sheets` wants; of these the first `ROWS` are shown.
    """

    pictured: ClassVar[int] = ROWS

    def __init__(self, geometry: Geometry):
        super().__init__()
        self.geometry = geometry

    @abstractmethod
    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """The loss on a batch; ``progress`` is the share of the training that is done, in [0, 1]."""

    @abstractmethod
    def measure(self, encoded: Encoded) -> Measure:
        """How well held-out images are answered, beside baselines that need no learning."""

    @abstractmethod
    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Pictures of the answers."""

    def given_picture(self, given: EncoderInput) -> Tensor:
        """What the encoder was given [b c h w]; empty where it was nothing."""
        g, images = self.geometry, given.images
        shown = torch.zeros(len(images), g.n, dtype=torch.bool, device=images.device)
        shown = shown.scatter(1, given.visible, given.has_content())
        return unpatchify(torch.where(shown[..., None], patchify(images, g.p), WITHHELD), g.p, g.grid)

    def after_step(self, progress: float, encoder: VisionTransformer) -> None:
        """Called after each update of the weights; a moving-average teacher follows the ``encoder`` here."""

    def extra_modules(self) -> dict[str, nn.Module]:
        """What is saved beside the encoder, by file name without suffix: modules whose ``sizes`` build them again."""
        return {}
