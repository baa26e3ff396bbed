"""ExtreMA: extreme masking for learning instance and distributed visual representations (Wu et al., TMLR 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from patchloom.data.augment import TwoViews
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.refusals import GAUSSIAN, PAPERS
from patchloom.options.tasks import ExtreMAOptions, Loss
from patchloom.patches.partition import random_partition
from patchloom.questions.agreement import Agreement
from patchloom.questions.question import ROWS, Measure, Outcome, Sheet
from patchloom.sizes import share_of
from patchloom.tasks.defaults import (
    AGREEMENT_UPDATES,
    agreement_heads,
    build_agreement_loss,
    build_instance_head,
    momentum_for,
    teacher_momentum,
)
from patchloom.tasks.task import Task, augment_views, views_sheet
from patchloom.withhold.encoder_input import EncoderInput, all_patches

# At 2,448 updates and fewer it showed no gain over random weights (benchmarks/README.md); the paper has 188,000.
# Not measured in between.
_ENOUGH_FOR_BYOL = 20_000


class ExtreMA(Task):
    """Agreement of several small parts of an image with a teacher that sees all of it.

    Args:
        encoder: ViT to train; without a class token, unless ``class_token`` is vit.

    Raises:
        PatchloomError: more masks than the patches allow, or an encoder without the class token needed.
    """

    encoder: PlainViT

    @takes(ExtreMAOptions)
    def __init__(self, encoder: PlainViT, options: ExtreMAOptions) -> None:
        super().__init__(encoder, options)
        by: Loss = self.resolve_auto("loss", options.loss, "byol", PAPERS)
        n = self.geometry.n
        visible = share_of(n, 1 - options.mask_ratio)
        usual = min(5, n // visible)
        parts = self.resolve_auto("masks", options.masks, usual, f"{usual} parts of {visible} of {n} patches")
        losses = build_agreement_loss(self, by, options.temperature, options.gaussian_weight, options.directions)
        start = teacher_momentum(self, options.momentum, by)
        self.augment = TwoViews(self.augment.size, crop=options.crop, color=options.color)
        self.sizes = (visible,) * parts
        head = build_instance_head(self, options.class_token, options.attention_blocks)
        heads = agreement_heads(self, options.head_width, options.head_out, loss=by)
        self.questions["agreement"] = Agreement(encoder, *heads, start, options.class_token, head, losses)

    @classmethod
    def encoder_defaults(cls, options: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Return a class token only if it is the image representation."""
        if options["class_token"] == "vit":
            return {"class_token": (True, "--task.class_token vit uses it")}
        return {"class_token": (False, f"--task.class_token {options['class_token']} needs none in the encoder")}

    @classmethod
    def training_defaults(cls, options: Mapping[str, Any], updates: int) -> dict[str, tuple[Any, str]]:
        """Return the paper's weight decay, and a loss and momentum that keep short trainings from collapsing."""
        if options["loss"] in GAUSSIAN:
            return {"weight_decay": (0.05, PAPERS)}
        loss = ("byol", PAPERS)
        if updates < _ENOUGH_FOR_BYOL:
            loss = ("infonce", f"byol showed no gain in 2,448 updates on CIFAR-10, and these are {updates:,}")
        return {"weight_decay": (0.1, PAPERS), "task.loss": loss, "task.momentum": momentum_for(updates)}

    @classmethod
    def updates_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Return enough updates for a teacher that starts as a random network."""
        return super().updates_needed(options) if options["loss"] in GAUSSIAN else AGREEMENT_UPDATES

    @classmethod
    def images_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Return 2 except with BYOL: the other losses, which auto may become, compare the images of a step."""
        if options["loss"] in GAUSSIAN:
            return 2, f"{options['loss']} tests the distribution over the images of a step"
        if options["loss"] != "byol":
            return 2, "infonce distinguishes the images of a step"
        return super().images_needed(options)

    @property
    def agreement(self) -> Agreement:
        """Question of the task."""
        return cast(Agreement, self.questions["agreement"])

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return several disjoint masks per image, [v*b k] visible patches of images [b c h w]."""
        parts = random_partition(len(images), self.geometry.n, self.sizes, generator, images.device)
        return EncoderInput(images, torch.cat(parts))

    def forward(  # type: ignore[override]  # its own augment gives two views
        self,
        student: Tensor,
        teacher: Tensor,
        *,
        progress: float = 0.0,
        generator: torch.Generator | None = None,
        given: EncoderInput | None = None,
    ) -> Outcome:
        """Return the loss on two views: each masked view of one predicts the output for the whole of the other."""
        given = given or self.given(student, generator)
        target = self.agreement.target(self.encoder, teacher)
        guesses = self.agreement.predict(self.agreement.represent(self.encoder, given))  # all masks in one batch
        return self.agreement.disagreement(guesses, target, generator)

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """Measure agreement with the whole from one mask, beside that with the outputs for other images."""
        one_mask = EncoderInput(images, self.given(images, generator).visible[: len(images)])
        guess = self.agreement.predict(self.agreement.represent(self.encoder, one_mask))
        return self.agreement.measured(guess, self.encoder, images, self.modality)

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Draw views and masks of a step, and the nearest neighbours of some images by teacher and student."""
        shown = images[:ROWS]
        student, teacher = augment_views(self, shown, generator)
        parts = [part[:ROWS] for part in self.given(images, generator).visible.chunk(len(self.sizes))]
        whole = "teacher" if self.agreement.teacher is not None else "whole"
        views: dict[str, tuple[Tensor, Tensor | None]] = {self.modality.item: (shown, None), whole: (teacher, None)}
        views |= {f"student, mask {i}": (student, part) for i, part in enumerate(parts, start=1)}
        share = f"{self.sizes[0] / self.geometry.n:.0%}"
        caption = f"Input of a training step. Each mask shows the student {share} of the patches, no patch twice."
        represent = self.agreement.represent
        features = (
            represent(self.encoder, EncoderInput(shown, parts[0])),
            represent(self.encoder, all_patches(images, self.geometry.n)),
        )
        seen = self.agreement.seen(self.modality, share)
        neighbours = self.agreement.neighbours(self.encoder, images, {"student": features}, seen, self.modality)
        return [views_sheet(self.geometry, views, caption), neighbours]
