"""Base class of pretext tasks."""

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
from patchloom.options.refusals import PAPERS, refuse
from patchloom.options.tasks import TaskOptions
from patchloom.patches.partition import complement
from patchloom.patches.pictures import paint_patches
from patchloom.questions.anchor import Anchor
from patchloom.questions.question import ROWS, Encoded, Measure, Outcome, Question, Sheet
from patchloom.withhold.encoder_input import EncoderInput, check_images

T = TypeVar("T")


_STEP = {"progress", "generator", "given", "indices"}  # named arguments of `Task.forward` that are no views


class Task(nn.Module, ABC):
    """Pretext task: an input from which something is withheld, and questions about it.

    A custom task sets ``questions`` in ``__init__`` and implements `given`, which returns the encoder's input. All
    other methods have defaults.

    Attributes:
        serves_swin: whether the encoder may be a Swin, whose patches can be removed by uniform masks only.
        uses_indices: whether `forward` also takes ``indices``, int64 [b], the places of the images in the training set.
        only_encoder: whether the encoder answers by itself, without a decoder, head or token that is new.
        measured: whether the task has a measure and pictures; a run of one without holds nothing out.
        native_crops: whether ``--crop_scale auto`` may cut crops at native scale; False if a question depends on the
            area that a crop shows.
        cuts_crops: whether the task cuts crops out of its images; ``--crop_scale auto`` then leaves the images whole.
        encoder: the ViT or Swin in training; `patchloom export` writes its ``state_dict``.
        geometry: sizes of its images and tokens.
        questions: questions by name; `measure` reports the first one unless it is overridden.
        question_weights: weights of the questions' losses by name; 1 for a missing name.
        augment: function of one image and a random generator that returns the views for `forward`.
        chosen: resolved value and reason of every option that was ``auto``.
        mean, std: [c 1 1] statistics that normalise the images; set by `normalized_by`.
        modality: kind of data that the images show.
    """

    serves_swin: ClassVar[bool] = False
    native_crops: ClassVar[bool] = False
    only_encoder: ClassVar[bool] = False
    cuts_crops: ClassVar[bool] = False
    uses_indices: ClassVar[bool] = False
    measured: ClassVar[bool] = True
    encoder: Encoder
    mean: Tensor
    std: Tensor
    modality: Modality = IMAGES

    def __init__(self, encoder: Encoder, options: TaskOptions | None = None):
        super().__init__()
        if not isinstance(encoder, Encoder):
            raise PatchloomError(
                f"{type(self).__name__} trains a VisionTransformer, Eva or SwinTransformer of timm, and "
                f"{type(encoder).__name__} is none: give one, such as timm.create_model('vit_tiny_patch16_224') makes"
            )
        self.refuse_swin(is_hierarchical(encoder))
        self.encoder = encoder
        self.geometry = Geometry.of(encoder)
        if options is not None:
            refuse(options.refusals(self.geometry))
        self.questions = cast(dict[str, Question], nn.ModuleDict())
        self.question_weights: Mapping[str, float] = {}
        self.augment = RandomCrop(self.geometry.size)
        self.chosen: dict[str, tuple[Any, str]] = {}
        self.register_buffer("mean", torch.zeros(self.geometry.channels, 1, 1), persistent=False)
        self.register_buffer("std", torch.ones(self.geometry.channels, 1, 1), persistent=False)
        # a hook, because tasks override `forward`
        self.register_forward_pre_hook(_check_views, with_kwargs=True)

    @classmethod
    def refuse_swin(cls, hierarchical: bool) -> None:
        """Raise an error if the encoder is ``hierarchical`` and the task needs the tokens of a plain ViT."""
        if hierarchical and not cls.serves_swin:
            raise PatchloomError(
                f"{cls.__name__} needs a plain ViT: choose another --model, or a task that trains a Swin (mae, simmim "
                "or droppos)"
            )

    @classmethod
    def encoder_defaults(cls, options: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Return defaults of the encoder, each with a reason: "positions" or "class_token".

        ``options`` holds all options of the task.
        """
        return {}

    @classmethod
    def training_defaults(cls, options: Mapping[str, Any], updates: int) -> dict[str, tuple[Any, str]]:
        """Return defaults of the training, each with a reason: "weight_decay" or ``task.OPTION``.

        ``options`` holds all options of the task; ``updates`` is the number of updates of the whole training.
        """
        return {}

    @classmethod
    def data_defaults(cls, options: Mapping[str, Any], n: int, noun: str) -> dict[str, tuple[Any, str]]:
        """Return options that depend on the training set, ``task.OPTION``, each with a reason.

        ``options`` holds all options of the task; ``n`` is the number of training images, and ``noun`` names them.

        Raises:
            PatchloomError: if the task cannot be trained on so many.
        """
        return {}

    @classmethod
    def updates_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Return the number of updates that a training should have, with the reason.

        If there are few images, an ``auto`` batch size is reduced to reach it. ``options`` holds all options of the
        task.
        """
        return 1, "the task has no minimum"

    @classmethod
    def images_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Return the number of images that a step needs over all processes, with the reason."""
        return 1, "a step has at least one image"

    def resolve_auto(self, option: str, asked: T | Literal["auto"], value: T, why: str) -> T:
        """Return ``asked``, or ``value`` if it is "auto"; record the choice and its reason in ``chosen``."""
        if asked != "auto":
            return asked
        self.chosen[option] = (value, why)
        return value

    def fitted(self) -> dict[str, tuple[Any, str]]:
        """Return value and reason of every option that ``auto`` fitted to the images, the model or the training."""
        return {option: one for option, one in self.chosen.items() if one[1] != PAPERS}

    @property
    def views(self) -> float:
        """Factor r of the effective epochs, epochs · r (DropPos, appendix A; iBOT).

        Area of all distinct crops of an image that a step feeds to encoders, relative to the encoder's input. Masks and
        colour changes add no crop, and targets do not count.
        """
        return float(getattr(self.augment, "crops", 1))

    def normalized_by(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Set the statistics per channel, in [0, 1] units, that normalise the images."""
        for buffer, values in ((self.mean, mean), (self.std, std)):
            buffer.copy_(torch.tensor(values).view(-1, 1, 1))

    @abstractmethod
    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return the encoder's input for a batch.

        A task with `Positions` also takes their ``ratios`` by name, to withhold another fraction than in training.

        Args:
            images: [b c h w] normalised.
            generator: random generator on any device; None: the global one.
        """

    def placeholders(self, given: EncoderInput, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return stand-ins, the keyword arguments of `patchloom.nets.encode.encode`.

        Those for content (``mask_token``) and positions (``position_token``) are broadcast to [b k d], those for
        rotations (``rotation``) to [l b h k 2e].
        """
        return {}

    def encode(
        self,
        images: Tensor,
        given: EncoderInput,
        generator: torch.Generator | None = None,
        teacher_images: Tensor | None = None,
    ) -> Encoded:
        """Encode a batch, for the questions."""
        check_images(images, self.geometry.channels, getattr(self.augment, "size", None), type(self).__name__)
        if not isinstance(given, EncoderInput):
            raise PatchloomError(
                f"{type(self).__name__}.given returned {type(given).__name__}: return an EncoderInput, such as "
                "all_patches(images, n)"
            )
        tokens, unnormed = self.encode_tokens(given, generator)
        seen_by_teacher = images if teacher_images is None else teacher_images
        norms = self.mean, self.std
        return Encoded(images, given, tokens, self.encoder, seen_by_teacher, *norms, self.modality, generator, unnormed)

    def encode_tokens(
        self, given: EncoderInput, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens [b prefix+k d] for the questions, and those before the final norm if one needs them."""
        stand_ins: Any = self.placeholders(given, generator)  # keyword arguments of `encode`
        return encode(self.encoder, given, **stand_ins), None

    def forward(
        self,
        *views: Tensor,
        progress: float = 0.0,
        generator: torch.Generator | None = None,
        given: EncoderInput | None = None,
    ) -> Outcome:
        """Return the loss of a step: the weighted sum of the questions' losses.

        Args:
            views: output of `augment`, batched and normalised, each [b c h w]: the images, and perhaps a teacher's.
            progress: fraction of the training that is done, in [0, 1]; replaces stateful schedules.
            generator: random generator on any device; None: the global one.
            given: the encoder's input; None: drawn by `given`.
        """
        images = views[0]
        encoded = self.encode(images, given or self.given(images, generator), generator, *views[1:])
        return self.weighted_sum({name: question(encoded, progress) for name, question in self.questions.items()})

    def weighted_sum(self, outcomes: Mapping[str, Outcome]) -> Outcome:
        """Return the weighted sum of the questions' losses; several losses also become metrics."""
        weighted = [self.question_weights.get(name, 1.0) * outcome.loss for name, outcome in outcomes.items()]
        loss = sum(weighted[1:], weighted[0])
        metrics = {name: value for outcome in outcomes.values() for name, value in outcome.metrics.items()}
        if len(outcomes) > 1:
            metrics |= {f"{name}_loss": outcome.loss.detach() for name, outcome in outcomes.items()}
        return Outcome(loss, metrics)

    def anchor_to_start(self, weight: float) -> None:
        """Add the loss of `Anchor` with a ``weight``; the present encoder is the start."""
        Anchor(self.encoder, weight).attach(self)

    def after_step(self, progress: float, applied: float | Tensor = 1.0) -> None:
        """Update moving-average teachers after an update of the weights.

        ``applied`` is 1; or 0 if the update was skipped, because loss or gradient were not finite, and nothing may
        change. In training it is a scalar on the device, where a branch would wait for it: give it to
        `patchloom.nets.teacher.Teacher.follow`, which multiplies by it.
        """
        for question in self.questions.values():
            question.after_step(progress, self.encoder, applied)

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """Measure the answers to the first question on held-out ``images`` [b c h w], beside trivial baselines."""
        encoded = self.encode(images, self.given(images, generator), generator)
        return next(iter(self.questions.values())).measure(encoded)

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Return picture sheets of the task on ``images`` [b c h w]."""
        encoded = self.encode(images, self.given(images, generator), generator)
        return [sheet for question in self.questions.values() for sheet in question.sheets(encoded)]

    @property
    def pictured(self) -> int:
        """Number of images that `draw` uses; the sheets show the first few of them."""
        return max((question.pictured for question in self.questions.values()), default=ROWS)

    def extra_modules(self) -> dict[str, nn.Module]:
        """Return modules to save beside the encoder, by file name without suffix; their ``sizes`` rebuild them."""
        return {name: one for question in self.questions.values() for name, one in question.extra_modules().items()}

    def teacher_modules(self) -> dict[str, nn.Module]:
        """Return the first question's moving average of the encoder and its modules, as `Question.teacher_modules`."""
        found = (question.teacher_modules() for question in self.questions.values())
        return next((modules for modules in found if modules), {})


class TaskWithoutPositions(Task):
    """Task whose patches enter without positions, and without a stand-in that is trained in their place."""

    def placeholders(self, given: EncoderInput, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return zeros as the stand-in for withheld positions; withheld rotations are by no angle."""
        return {"position_token": given.images.new_zeros(())}


def _check_views(task: Task, views: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raise an error for views that are not those that the task's augmentation makes: number, shape and type.

    The first has the size that ``task.augment`` makes; others may have another, and the encoder checks it.
    """
    needed = getattr(task.augment, "n_views", len(views))
    if views and len(views) != needed and named.keys() <= _STEP:
        given, wanted = (f"{n} view{'s' * (n != 1)}" for n in (len(views), needed))
        raise PatchloomError(
            f"{type(task).__name__} got {given} of the images, and takes {wanted}: give all that its augment returns, "
            "batched and normalised"
        )
    size = getattr(task.augment, "size", None)
    for i, view in enumerate(views):
        check_images(view, task.geometry.channels, None if i else size, type(task).__name__)
        if len(view) != len(views[0]):
            raise PatchloomError(
                f"the views have {len(views[0])} and {len(view)} images: give the same images in each view"
            )


# Sheets of tasks with two views (ExtreMA, LUT).


def augment_views(task: Task, images: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return the views [b c h w] that a task's augmentation makes of normalised images [b c h w], for pictures.

    For recordings both views are the middle excerpt: a picture lacks the samples that a shifted excerpt would need.
    """
    if not task.modality.resizable:
        return images, images
    rng = np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))
    plain, white = (images * task.std + task.mean).clamp(0, 1), 1
    levels = (plain * 255).round()
    if torch.equal((levels / 255 - task.mean) / task.std, images):  # 8-bit images: training crops them as bytes, too
        plain, white = levels.byte(), 255
    views = zip(*(task.augment(image, rng) for image in plain.cpu()), strict=True)
    return tuple((torch.stack(view).to(images.device) / white - task.mean) / task.std for view in views)


def views_sheet(geometry: Geometry, views: dict[str, tuple[Tensor, Tensor | None]], caption: str) -> Sheet:
    """Return a sheet of views of the first images; by heading, images [b c h w] and their visible patches [b k]."""
    columns = {}
    for heading, (images, visible) in views.items():
        columns[heading] = images
        if visible is not None:
            columns[heading] = paint_patches(images, geometry.p, complement(visible, geometry.n))
    return Sheet(
        "views",
        caption,
        columns,
        page_title="Views of a training step",
        page_text="Each row shows views of the same origin as the network gets them, with masked patches hatched. If "
        "you cannot recognise that they belong together, the augmentation or the masking is probably too strong.",
    )
