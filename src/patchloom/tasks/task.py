"""What every pretext task is: what is withheld from an encoder (`given`), and the questions that it asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from patchloom.data.augment import RandomCrop
from patchloom.data.modality import IMAGES, Modality
from patchloom.errors import PatchloomError
from patchloom.nets.encode import encode
from patchloom.nets.geometry import Geometry
from patchloom.nets.swin import Encoder, is_hierarchical
from patchloom.patches.partition import complement
from patchloom.patches.pictures import WITHHELD, paint_patches
from patchloom.questions.question import ROWS, Encoded, Measure, Outcome, Question, Sheet
from patchloom.withhold.encoder_input import EncoderInput

T = TypeVar("T")

Size = int | Literal["auto"]


class Task(nn.Module, ABC):
    """A pretext task: what is withheld from an encoder, times what is asked of it.

    A task of one's own sets ``questions`` in ``__init__`` and says in `given` what the encoder is given; all the rest
    has a default.

    Attributes:
        serves_swin: whether the encoder may be a Swin, of which patches are taken away by uniform masks alone.
        native_crops: whether ``--crop_scale auto`` may cut crops at native scale: nothing is asked that depends on how
            much of an image a crop shows.
        encoder: the ViT or Swin that is being trained; `patchloom export` writes its ``state_dict``.
        geometry: of its images and tokens.
        questions: what is asked, by name; the first one is what `measure` reports, unless it is overridden.
        question_weights: of the questions' losses, by name; 1 where none is named.
        augment: turns one image and a random generator into the views that `forward` takes.
        chosen: by option, what each ``auto`` became, and why.
        mean, std: [c 1 1] by which the images were normalised; `normalized_by` sets them.
        modality: what its images are pictures of.
    """

    serves_swin: ClassVar[bool] = False
    native_crops: ClassVar[bool] = False
    encoder: Encoder
    mean: Tensor
    std: Tensor
    modality: Modality = IMAGES

    def __init__(self, encoder: Encoder):
        super().__init__()
        self.refuse_swin(is_hierarchical(encoder))
        self.encoder = encoder
        self.geometry = Geometry.of(encoder)
        self.questions = cast(dict[str, Question], nn.ModuleDict())
        self.question_weights: Mapping[str, float] = {}
        self.augment = RandomCrop(self.geometry.size)
        self.chosen: dict[str, tuple[Any, str]] = {}
        self.register_buffer("mean", torch.zeros(self.geometry.channels, 1, 1), persistent=False)
        self.register_buffer("std", torch.ones(self.geometry.channels, 1, 1), persistent=False)

    @classmethod
    def refuse_swin(cls, hierarchical: bool) -> None:
        """Refuse a ``hierarchical`` encoder where the task is made for the tokens of a plain ViT."""
        if hierarchical and not cls.serves_swin:
            raise PatchloomError(
                f"{cls.__name__} needs a plain ViT: a Swin is trained by mae, simmim and droppos, so choose one of "
                "these, or another --model"
            )

    @classmethod
    def encoder_defaults(cls, options: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """What the encoder should be where the user leaves it open: "positions" or "class_token", each with a reason.

        ``options`` are the task's own, all of them.
        """
        return {}

    @classmethod
    def training_defaults(cls, options: Mapping[str, Any], updates: int) -> dict[str, tuple[Any, str]]:
        """What a training should be where the user leaves it open: "weight_decay" or ``task.OPTION``.

        Each stands with a reason. ``options`` are the task's own, all of them; ``updates`` are those of the weights in
        the whole training.
        """
        return {}

    @classmethod
    def updates_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """How many updates of the weights a training should have, with the reason; ``options`` are all the task's.

        For their sake a batch size that is left open becomes smaller where the images are few.
        """
        return 1, "nothing asks for more"

    @classmethod
    def images_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """How many images a step needs, of all processes together, with the reason; ``options`` are all the task's."""
        return 1, "a step without images has nothing to ask"

    def resolve_auto(self, option: str, asked: T | Literal["auto"], value: T, why: str) -> T:
        """``value`` if ``asked`` is auto, which is noted with its reason; else what was asked."""
        if asked != "auto":
            if isinstance(asked, int) and not abs(asked) <= 2**16:
                raise PatchloomError(f"--task.{option} must be 65536 or less, not {asked}")
            return asked
        self.chosen[option] = (value, why)
        return value

    @property
    def views(self) -> float:
        """The factor r of effective epochs, which are epochs times r (DropPos, appendix A; iBOT).

        It is the area of all different crops of an image that a step gives to encoders, over that of the encoder's
        images. Masks and other colours make no other crop, and what is only asked for is not given.
        """
        return float(getattr(self.augment, "crops", 1))

    def normalized_by(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Tell the task by which statistics per channel, in [0, 1] units, its images are normalised."""
        for buffer, values in ((self.mean, mean), (self.std, std)):
            buffer.copy_(torch.tensor(values).view(-1, 1, 1))

    @abstractmethod
    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """What the encoder is given of a batch.

        Args:
            images: [b c h w] normalised.
            generator: source of what is random, on any device; the global one if absent.

        A task with `Positions` also takes their ``ratios`` by name: how much is withheld where it is other than in
        training.
        """

    def placeholders(self, given: EncoderInput, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """What stands for withheld content (``mask_token``) and positions (``position_token``), each to [b k d]."""
        return {}

    def encode(
        self,
        images: Tensor,
        given: EncoderInput,
        generator: torch.Generator | None = None,
        teacher_images: Tensor | None = None,
    ) -> Encoded:
        """A batch with the encoder's tokens of what it is given, as the questions take it."""
        stand_ins: Any = self.placeholders(given, generator)  # by the names of `encode`'s arguments
        tokens = encode(self.encoder, given, **stand_ins)
        seen_by_teacher = images if teacher_images is None else teacher_images
        return Encoded(images, given, tokens, self.encoder, seen_by_teacher, self.mean, self.std, self.modality)

    def forward(
        self,
        *views: Tensor,
        progress: float = 0.0,
        generator: torch.Generator | None = None,
        given: EncoderInput | None = None,
    ) -> Outcome:
        """One step's loss: the weighted sum of the questions'.

        Args:
            views: what `augment` gave, batched and normalised, each [b c h w]: the images, and perhaps a teacher's.
            progress: share of the training that is done, in [0, 1]; replaces every stateful schedule.
            generator: source of what is random, on any device; the global one if absent.
            given: what the encoder is given, instead of drawing it.
        """
        images = views[0]
        encoded = self.encode(images, given or self.given(images, generator), generator, *views[1:])
        return self.weighted_sum({name: question(encoded, progress) for name, question in self.questions.items()})

    def weighted_sum(self, outcomes: Mapping[str, Outcome]) -> Outcome:
        """The weighted sum of the questions' losses; of several, each is a metric, too."""
        weighted = [self.question_weights.get(name, 1.0) * outcome.loss for name, outcome in outcomes.items()]
        loss = sum(weighted[1:], weighted[0])
        metrics = {name: value for outcome in outcomes.values() for name, value in outcome.metrics.items()}
        if len(outcomes) > 1:
            metrics |= {f"{name}_loss": outcome.loss.detach() for name, outcome in outcomes.items()}
        return Outcome(loss, metrics)

    def after_step(self, progress: float) -> None:
        """Called after each update of the weights; moving-average teachers follow here."""
        for question in self.questions.values():
            question.after_step(progress, self.encoder)

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """How well the first question is answered on held-out ``images`` [b c h w], beside trivial answers."""
        encoded = self.encode(images, self.given(images, generator), generator)
        return next(iter(self.questions.values())).measure(encoded)

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Picture sheets of the task on ``images`` [b c h w]."""
        encoded = self.encode(images, self.given(images, generator), generator)
        return [sheet for question in self.questions.values() for sheet in question.sheets(encoded)]

    @property
    def pictured(self) -> int:
        """How many images `draw` wants; of these the first few are shown."""
        return max((question.pictured for question in self.questions.values()), default=ROWS)

    def extra_modules(self) -> dict[str, nn.Module]:
        """What is saved beside the encoder, by file name without suffix: modules whose ``sizes`` build them again."""
        return {name: one for question in self.questions.values() for name, one in question.extra_modules().items()}


# What ExtreMA and LUT show of their two views.


def augment_views(task: Task, images: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The views [b c h w] that a task's augmentation makes of normalised images [b c h w], for pictures.

    Of recordings both are the middle: the picture does not have the samples from which a shifted excerpt is cut.
    """
    if not task.modality.resizable:
        return images, images
    rng = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
    plain, white = (images * task.std + task.mean).clamp(0, 1), 1
    levels = (plain * 255).round()
    if torch.equal((levels / 255 - task.mean) / task.std, images):  # of 8 bits, in which training crops them, too
        plain, white = levels.byte(), 255
    views = zip(*(task.augment(image, rng) for image in plain.cpu()), strict=True)
    return tuple((torch.stack(view).to(images.device) / white - task.mean) / task.std for view in views)


def views_sheet(geometry: Geometry, views: dict[str, tuple[Tensor, Tensor | None]], caption: str) -> Sheet:
    """The views of the first images; by heading, images [b c h w] and the patches [b k] of them that are seen."""
    columns = {}
    for heading, (images, visible) in views.items():
        columns[heading] = images
        if visible is not None:
            columns[heading] = paint_patches(images, geometry.p, complement(visible, geometry.n), WITHHELD)
    return Sheet("views", caption, columns)
