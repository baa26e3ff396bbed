"""What every question is: a loss, a measure beside baselines that need no learning, and pictures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from patchloom.claims import Effect, MeasureResult, effect_of, mean_interval
from patchloom.data.modality import IMAGES, Modality
from patchloom.nets.geometry import Geometry
from patchloom.nets.swin import Encoder
from patchloom.patches.pictures import WITHHELD
from patchloom.patches.tokens import patchify, unpatchify
from patchloom.questions.collapse import effective_rank, output_spread
from patchloom.withhold.encoder_input import EncoderInput

# How well a task is done: results image by image, beside what needs no learning.


# Below these a teacher's outputs count as collapsed: two images' outputs have a mean cosine above 0.99, or they differ
# in hardly more directions than one. ExtreMA on CIFAR-10 fell from 28 to 3 where its learning rate was too high, and
# its kNN accuracy with it.
_LEAST_SPREAD, _LEAST_RANK = 0.1, 4.0
# Above this agreement on other images little is left by which the image itself could be told, and half of so little
# looks like much: 0.973 against 0.934 is 59 % of the way to 1.
_ALIKE = 0.9


@dataclass(frozen=True)
class Measure:
    """How well a task is done on held-out images, beside what needs no learning.

    Attributes:
        name: what is measured, in words.
        values: [b] the result on each image. `effect` takes 1 as perfect if higher is better, and 0 if lower is: of a
            loss, report what is above the least that it can be.
        baselines: [b] each, results of answers that need no learning by name, such as chance.
        to_beat: the baseline that has to be beaten before anything is learnt, or several, of which the best one on the
            mean has to be; others may know what the network does not.
        higher_is_better: which way is up.
        form: how a result is written, as for `format`.
        details: [b] each, further results by name, on the same scale.
        outputs: [b d] of the teacher, for tasks that could collapse; None for the others.
    """

    name: str
    values: Tensor
    baselines: dict[str, Tensor]
    to_beat: str | tuple[str, ...]
    higher_is_better: bool
    form: str = ".1%"
    details: dict[str, Tensor] = field(default_factory=dict)
    outputs: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[Measure]) -> Measure:
        """One measure of the images of several batches."""

        def whole(of: Callable[[Measure], dict[str, Tensor]]) -> dict[str, Tensor]:
            return {name: torch.cat([of(part)[name] for part in parts]) for name in of(parts[0])}

        outputs = [part.outputs for part in parts if part.outputs is not None]
        return replace(
            parts[0],
            values=torch.cat([part.values for part in parts]),
            baselines=whole(lambda part: part.baselines),
            details=whole(lambda part: part.details),
            outputs=torch.cat(outputs) if len(outputs) == len(parts) else None,
        )

    def show(self, value: float) -> str:
        """A result as people read it."""
        return format(value, self.form)

    @cached_property
    def diversity(self) -> dict[str, float]:
        """Spread (0 to 1) and effective rank of the teacher's outputs; empty for tasks that cannot collapse."""
        if self.outputs is None:
            return {}
        return {"spread": output_spread(self.outputs), "effective rank": effective_rank(self.outputs)}

    def collapsed(self) -> bool:
        """Whether the teacher gives nearly the same answer to every image, so that agreeing with it means little.

        Of fewer than 16 images nothing is said: their outputs cannot differ in many directions.
        """
        if self.outputs is None or len(self.outputs) < 16:
            return False
        found = self.diversity
        return found["spread"] < _LEAST_SPREAD or found["effective rank"] < _LEAST_RANK

    def alike(self) -> bool:
        """Whether the teacher's outputs of different images agree so much that agreement on one of them says little."""
        return self.outputs is not None and self.means()[self.baseline_to_beat()] > _ALIKE

    def baseline_to_beat(self) -> str:
        """The name of the baseline that has to be beaten."""
        means = self.means()
        return (max if self.higher_is_better else min)(self._to_beat(), key=means.__getitem__)

    def has_to_be_beaten(self, baseline: str) -> bool:
        """Whether a baseline is one of those to beat; others may know what the network does not."""
        return baseline in self._to_beat()

    def _to_beat(self) -> tuple[str, ...]:
        return (self.to_beat,) if isinstance(self.to_beat, str) else self.to_beat

    @property
    def value(self) -> float:
        """The mean result."""
        return self.values.mean().item()

    def means(self) -> dict[str, float]:
        """The mean of each baseline."""
        return {name: values.mean().item() for name, values in self.baselines.items()}

    def effect(self, baseline: str | None = None) -> Effect:
        """Where the result is on the way from a baseline to perfect; by default from the one that has to be beaten.

        It is taken image by image, since some images are easier than others for both.
        """
        base = self.baselines[baseline or self.baseline_to_beat()]
        return effect_of(self.values.tolist(), base.tolist(), 1.0 if self.higher_is_better else 0.0)

    @cached_property
    def result(self) -> MeasureResult:
        """The measure without its images, as files keep it; made once, since it is read from the device."""
        return MeasureResult(
            self.name,
            self.value,
            *mean_interval(self.values.tolist()),
            self.means(),
            {name: self.effect(name) for name in self.baselines},
            self.baseline_to_beat(),
            self._to_beat(),
            self.higher_is_better,
            self.form,
            self.diversity,
        )

    def plain(self) -> dict[str, Any]:
        """The `result` as values for JSON."""
        return self.result.plain()


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
        columns: by heading, images [b c h w] in normalised pixels; nan is hatched as empty, inf crossed as wrong. Of
            recordings all of them are drawn as spectrograms, upside down and coloured.
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
        modality: what these images are pictures of.
    """

    images: Tensor
    given: EncoderInput
    tokens: Tensor
    encoder: Encoder
    teacher_images: Tensor
    mean: Tensor
    std: Tensor
    modality: Modality = IMAGES

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

    def after_step(self, progress: float, encoder: Encoder) -> None:
        """Called after each update of the weights; a moving-average teacher follows the ``encoder`` here."""

    def extra_modules(self) -> dict[str, nn.Module]:
        """What is saved beside the encoder, by file name without suffix: modules whose ``sizes`` build them again."""
        return {}
