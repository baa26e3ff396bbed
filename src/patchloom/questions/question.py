"""Base classes of questions: a loss, a measure beside baselines that need no learning, and pictures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from patchloom.data.modality import IMAGES, Modality
from patchloom.nets.geometry import Geometry
from patchloom.nets.swin import Encoder
from patchloom.patches.pictures import WITHHELD
from patchloom.patches.tokens import patchify, unpatchify
from patchloom.questions.collapse import effective_rank, output_spread
from patchloom.results.intervals import mean_interval
from patchloom.results.result import Baseline, Result
from patchloom.results.shares import share_of_way
from patchloom.withhold.encoder_input import EncoderInput

# Measures: results per image, beside baselines that need no learning.


# Below these the outputs for whole images count as collapsed: those of two images have a mean cosine above 0.99, or
# hardly differ in more than one direction. ExtreMA on CIFAR-10 fell from rank 28 to 3 when its learning rate was too
# high, as did its kNN accuracy.
_LEAST_SPREAD, _LEAST_RANK = 0.1, 4.0
# Above this agreement on other images little room is left to recognise the image itself, and half of it looks large:
# 0.973 against 0.934 is 59 % of the way to 1.
_ALIKE = 0.9


@dataclass(frozen=True)
class Measure:
    """Result of a question on held-out images, beside baselines that need no learning.

    Attributes:
        name: the measured quantity, in words.
        values: [b] result per image. The share of the way takes 1 as perfect if higher is better, and 0 if lower is; so
            a loss is reported minus its least possible value.
        baselines: by name, [b] results of answers that need no learning, such as chance.
        to_beat: the baseline that has to be beaten before anything is learnt; of several, the one with the best mean.
            Other baselines may use information that the network does not have.
        higher_is_better: whether a larger result is better.
        unit: unit of a result: % for a fraction, else "".
        details: by name, [b] further results on the same scale.
        outputs: [b d] the targets, such as a teacher's outputs, if the task could collapse, else None.
        groups: [b] groups of the images, over which the intervals are; None: no groups.
    """

    name: str
    values: Tensor
    baselines: dict[str, Tensor]
    to_beat: str | tuple[str, ...]
    higher_is_better: bool
    unit: str = "%"
    details: dict[str, Tensor] = field(default_factory=dict)
    outputs: Tensor | None = None
    groups: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[Measure]) -> Measure:
        """Join the measures of several batches."""
        first, outputs = parts[0], [part.outputs for part in parts if part.outputs is not None]
        return replace(
            first,
            values=torch.cat([part.values for part in parts]),
            baselines={name: torch.cat([part.baselines[name] for part in parts]) for name in first.baselines},
            details={name: torch.cat([part.details[name] for part in parts]) for name in first.details},
            outputs=torch.cat(outputs) if len(outputs) == len(parts) else None,
        )

    @cached_property
    def diversity(self) -> dict[str, float]:
        """Spread (0 to 1) and effective rank of the targets; empty if the task cannot collapse."""
        if self.outputs is None:
            return {}
        return {"spread": output_spread(self.outputs), "effective rank": effective_rank(self.outputs)}

    def collapsed(self) -> bool:
        """Return whether the targets of all images are nearly the same; agreement then means little.

        False for fewer than 16 images: their outputs cannot differ in many directions.
        """
        if self.outputs is None or len(self.outputs) < 16:
            return False
        found = self.diversity
        return found["spread"] < _LEAST_SPREAD or found["effective rank"] < _LEAST_RANK

    def alike(self) -> bool:
        """Return whether the targets of different images are so alike that agreement means little."""
        if self.outputs is None or not self.higher_is_better:
            return False
        return self.means()[self.baseline_to_beat()] > _ALIKE

    def baseline_to_beat(self) -> str:
        """Return the name of the baseline that has to be beaten."""
        means = self.means()
        return (max if self.higher_is_better else min)(self._to_beat(), key=means.__getitem__)

    def has_to_be_beaten(self, baseline: str) -> bool:
        """Return whether ``baseline`` has to be beaten; others may use information that the network does not have."""
        return baseline in self._to_beat()

    def _to_beat(self) -> tuple[str, ...]:
        return (self.to_beat,) if isinstance(self.to_beat, str) else self.to_beat

    @property
    def value(self) -> float:
        """Mean result."""
        return self.values.mean().item()

    def means(self) -> dict[str, float]:
        """Return the mean of each baseline."""
        return {name: values.mean().item() for name, values in self.baselines.items()}

    def share(self, baseline: str) -> Result:
        """Return the share of the way from a baseline to perfect.

        Computed image by image, because the difficulty of an image affects both.
        """
        perfect = 1.0 if self.higher_is_better else 0.0
        return share_of_way(self.values.tolist(), self.baselines[baseline].tolist(), perfect, self.groups)

    @cached_property
    def result(self) -> Result:
        """The measure without its images, as stored in files; cached, because it is read from the device."""
        best, means = self.baseline_to_beat(), self.means()
        baselines = tuple(
            Baseline(name, mean, self.share(name), self.has_to_be_beaten(name), name == best)
            for name, mean in means.items()
        )
        return Result(
            self.name,
            self.value,
            *mean_interval(self.values.tolist(), accuracy=self.higher_is_better, groups=self.groups),
            len(self.values),
            unit=self.unit,
            digits=1 if self.unit else 3,
            groups=0 if self.groups is None else len(self.groups.unique()),
            higher_is_better=self.higher_is_better,
            baselines=baselines,
            also=self.diversity,
        )


ROWS = 8  # images shown on a sheet


class Outcome(NamedTuple):
    """Output of the forward pass of questions and tasks.

    Attributes:
        loss: scalar with gradient, float32.
        metrics: scalars without gradient, each a column of ``metrics.csv``.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class Sheet(NamedTuple):
    """Picture sheet: one row per image, one column per stage.

    Attributes:
        name: file name without suffix.
        caption: the contents of the sheet, and any parts taken from the original.
        columns: by heading, images [b c h w] in normalised pixels; nan is hatched as empty, inf crossed as wrong.
            Recordings are drawn as spectrograms, flipped vertically and coloured.
        empty: meaning of an empty place, for the legend.
        page_title: a few words for a report page; "": the name.
        page_text: one or two sentences there on what the sheet shows and what to look for.
    """

    name: str
    caption: str
    columns: dict[str, Tensor]
    empty: str = "withheld"
    page_title: str = ""
    page_text: str = ""


@dataclass(frozen=True)
class Encoded:
    """Encoded batch: the inputs and the tokens that a question works on.

    Attributes:
        images: [b c h w] clean and normalised; larger than the encoder's input if it sees only a part.
        given: the encoder's input.
        tokens: [b prefix+k d] output of the encoder, or [v*b prefix+k d] for v masks of every image.
        encoder: the encoder, for questions that run it again.
        teacher_images: [b c h w] images for a teacher, nothing withheld.
        mean, std: [c 1 1] statistics that normalise the images.
        modality: kind of data that the images show.
        generator: random generator of the step, for questions that draw; None: the global one.
        unnormed: the tokens before the encoder's final norm, for class attention; None if no question has it.
    """

    images: Tensor
    given: EncoderInput
    tokens: Tensor
    encoder: Encoder
    teacher_images: Tensor
    mean: Tensor
    std: Tensor
    modality: Modality = IMAGES
    generator: torch.Generator | None = None
    unnormed: Tensor | None = None

    def plain(self, images: Tensor) -> Tensor:
        """Return normalised images [b c h w] in [0, 1] units."""
        return torch.addcmul(self.mean, images, self.std)

    def normalized(self, images: Tensor) -> Tensor:
        """Return images [b c h w] in [0, 1] units, normalised."""
        return (images - self.mean) / self.std


class Question(nn.Module, ABC):
    """Question about an encoder's tokens. It owns the modules that only it needs, such as a decoder or a teacher.

    Attributes:
        geometry: sizes of the encoder's images and tokens.
        pictured: number of images that `sheets` uses; the first `ROWS` are shown.
    """

    pictured: ClassVar[int] = ROWS

    def __init__(self, geometry: Geometry):
        super().__init__()
        self.geometry = geometry

    @abstractmethod
    def forward(self, encoded: Encoded, progress: float) -> Outcome:
        """Return the loss on a batch; ``progress`` is the fraction of the training that is done, in [0, 1]."""

    @abstractmethod
    def measure(self, encoded: Encoded) -> Measure:
        """Measure the answers on held-out images, beside baselines that need no learning."""

    @abstractmethod
    def sheets(self, encoded: Encoded) -> list[Sheet]:
        """Draw picture sheets of the answers."""

    def given_picture(self, given: EncoderInput) -> Tensor:
        """Return the encoder's input as a picture [b c h w], empty where there was none."""
        g, images = self.geometry, given.images
        shown = torch.zeros(len(images), g.n, dtype=torch.bool, device=images.device)
        shown = shown.scatter(1, given.visible, given.has_content())
        return unpatchify(torch.where(shown[..., None], patchify(images, g.p), WITHHELD), g.p, g.grid)

    def after_step(self, progress: float, encoder: Encoder, applied: float | Tensor = 1.0) -> None:
        """Update a moving-average teacher of the ``encoder`` after an update of the weights.

        ``applied`` is as in `patchloom.tasks.task.Task.after_step`.
        """

    def extra_modules(self) -> dict[str, nn.Module]:
        """Return modules to save beside the encoder, by file name without suffix; their ``sizes`` rebuild them."""
        return {}

    def teacher_modules(self) -> dict[str, nn.Module]:
        """Return a moving average of the encoder as "encoder", with its own `extra_modules`; {} without a teacher."""
        return {}
