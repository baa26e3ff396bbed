"""LUT: learning with unmasked tokens drives stronger vision learners (Kim et al., ECCV 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from patchloom.data.augment import TwoViews
from patchloom.nets.decoders import PatchHead
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.refusals import GAUSSIAN, masked_units
from patchloom.options.tasks import LUTOptions
from patchloom.patches.partition import complement, random_unit_partition
from patchloom.questions.agreement import Agreement
from patchloom.questions.pixels import Pixels
from patchloom.questions.question import ROWS, Encoded, Measure, Outcome, Sheet
from patchloom.tasks.defaults import (
    AGREEMENT_UPDATES,
    agreement_heads,
    build_agreement_loss,
    momentum_for,
    patch_decoder,
    teacher_momentum,
)
from patchloom.tasks.masking import patches_of_unit
from patchloom.tasks.task import Task, augment_views, views_sheet
from patchloom.withhold.encoder_input import EncoderInput, all_patches, blank_patches, mask_patches


class LUT(Task):
    """Pixel reconstruction and agreement with a teacher, from disjoint parts of two views.

    Args:
        encoder: ViT to train.

    Raises:
        PatchloomError: a mask ratio that does not leave two disjoint parts, or weights without agreement.
    """

    encoder: PlainViT

    @takes(LUTOptions)
    def __init__(self, encoder: PlainViT, options: LUTOptions) -> None:
        super().__init__(encoder, options)
        losses = build_agreement_loss(
            self, options.loss, options.temperature, options.gaussian_weight, options.directions
        )
        start = teacher_momentum(self, options.momentum, options.loss)
        g = self.geometry
        self.sparse = sparse = options.base == "mae"
        ratio = self.resolve_auto(
            "mask_ratio", options.mask_ratio, options.usual_mask, f"the paper's on {options.base}"
        )
        normalized = self.resolve_auto(
            "normalized_pixels", options.normalized_pixels, sparse, f"usual for {options.base}"
        )
        self.unit = 1 if sparse else patches_of_unit(self, options.mask_unit)
        visible, masked = masked_units(g, ratio, self.unit)
        self.sizes = (visible, visible, masked - visible)
        self.augment = TwoViews(self.augment.size, crop="own", color=options.color)
        heads = agreement_heads(self, options.head_width, g.width, layers=(2, 2), norm="batch", loss=options.loss)
        self.mask_token = None if sparse else nn.Parameter(torch.empty(g.width).normal_(std=0.02))
        if options.pixel_weight and sparse:
            decoder = patch_decoder(self, options.decoder_width, options.decoder_depth, options.decoder_heads)
            self.questions["pixels"] = Pixels(g, decoder, normalized)
        elif options.pixel_weight:
            blank = g.n - visible * self.unit**2
            head = PatchHead(g.width, g.patch_dim, g.prefix, blank)
            self.questions["pixels"] = Pixels(g, head, normalized, absolute=True, blank=blank)
        self.questions["agreement"] = Agreement(encoder, *heads, start, loss=losses)
        self.question_weights = {"pixels": options.pixel_weight, "agreement": options.context_weight}

    @classmethod
    def training_defaults(cls, options: Mapping[str, Any], updates: int) -> dict[str, tuple[Any, str]]:
        """Return a teacher's momentum that suits the length of the training."""
        if options["loss"] in GAUSSIAN:
            return {}
        return {"task.momentum": momentum_for(updates)}

    @classmethod
    def updates_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Return enough updates for a teacher that starts as a random network."""
        return super().updates_needed(options) if options["loss"] in GAUSSIAN else AGREEMENT_UPDATES

    @classmethod
    def images_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Return 2, the least for batch statistics."""
        return 2, "its batch norm needs several images in a step"

    @property
    def agreement(self) -> Agreement:
        """Question about the teacher's outputs."""
        return cast(Agreement, self.questions["agreement"])

    def given(self, images: Tensor, generator: torch.Generator | None = None) -> EncoderInput:
        """Return a part of each image's patches as the input of one view, for measures."""
        return self.given_parts(images, self.random_parts(len(images), generator, images.device)[0])

    def random_parts(self, b: int, generator: torch.Generator | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Draw the visible patches of the two views, twice [b k], disjoint."""
        first, second, *_ = random_unit_partition(b, self.geometry.grid, self.unit, self.sizes, generator, device)
        return first, second

    def given_parts(self, images: Tensor, visible: Tensor) -> EncoderInput:
        """Return the patches ``visible`` [b k] of images [b c h w], the others removed (mae) or blank (simmim)."""
        everything = all_patches(images, self.geometry.n)
        if self.sparse:
            return mask_patches(everything, visible)
        return blank_patches(everything, complement(visible, self.geometry.n))

    def placeholders(self, given: EncoderInput, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the mask token of simmim."""
        return {} if self.mask_token is None else {"mask_token": self.mask_token}

    def forward(  # type: ignore[override]  # its own augment gives two views
        self,
        one: Tensor,
        two: Tensor,
        *,
        progress: float = 0.0,
        generator: torch.Generator | None = None,
        given: EncoderInput | None = None,
    ) -> Outcome:
        """Return the loss on two views: pixels of the first, and for each the teacher's output for the other.

        ``given`` replaces the random inputs of both views, one after the other [2*b ...].
        """
        images = torch.cat([one, two])
        if given is None:
            parts = self.random_parts(len(one), generator, one.device)
            given = self.given_parts(images, torch.cat(parts))
        elif len(given.visible) != len(images):
            raise ValueError(f"the input has {len(given.visible)} rows for {len(images)} images in two views")
        encoded = self.encode(images, given)
        guesses, agree = self.guesses(encoded), self.agreement
        if agree.teacher is None:  # the heads run on one view after the other, as in `guesses`
            whole = torch.stack([agree.target(self.encoder, view) for view in images.chunk(2)])
            outcomes = {"agreement": agree.disagreement(torch.stack(guesses), whole, generator)}
        else:
            targets = reversed(agree.target(self.encoder, images).chunk(2))
            losses = [agree.disagreement(*pair).loss for pair in zip(guesses, targets, strict=True)]
            outcomes = {"agreement": Outcome((losses[0] + losses[1]) / 2, {})}
        if "pixels" in self.questions:
            b, given = len(one), encoded.given
            rows_of: dict[str, Any] = {name: rows[:b] for name, rows in vars(given).items() if isinstance(rows, Tensor)}
            first = replace(encoded, images=one, given=replace(given, **rows_of), tokens=encoded.tokens[:b])
            outcomes = {"pixels": self.questions["pixels"](first, progress)} | outcomes
        return self.weighted_sum(outcomes)

    def guesses(self, encoded: Encoded) -> tuple[Tensor, ...]:
        """Predict the teacher's output [b d] for each of the two views.

        The heads run on one view after the other, so that each view has its own batch statistics.
        """
        summary = self.agreement.summary(encoded.tokens, encoded.given)
        return tuple(self.agreement.predict(view) for view in summary.chunk(2))

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """Measure agreement with the whole from a masked view, beside that with the outputs for other images."""
        return self.agreement.measure(self.encode(images, self.given(images, generator)))

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Draw views and masks of a step, nearest neighbours by teacher and student, and recovered pixels."""
        shown = images[:ROWS]
        one, two = augment_views(self, shown, generator)
        parts = [part[:ROWS] for part in self.random_parts(len(images), generator, images.device)]
        views: dict[str, tuple[Tensor, Tensor | None]] = {self.modality.item: (shown, None)}
        whole = "teacher" if self.agreement.teacher is not None else "whole"
        for number, view, part in ((1, one, parts[0]), (2, two, parts[1])):
            views |= {f"{whole}, view {number}": (view, None), f"student, view {number}": (view, part)}
        share = f"{parts[0].shape[1] / self.geometry.n:.0%}"
        caption = f"Input of a training step. The student has {share} of the patches of each view, at different places."
        encoded = self.encode(shown, self.given_parts(shown, parts[0]))
        summary = self.agreement.summary(encoded.tokens, encoded.given)
        everything = self.agreement.represent(self.encoder, all_patches(images, self.geometry.n))
        seen, student = self.agreement.seen(self.modality, share), {"student": (summary, everything)}
        neighbours = self.agreement.neighbours(self.encoder, images, student, seen, self.modality)
        sheets = [views_sheet(self.geometry, views, caption), neighbours]
        return sheets + (self.questions["pixels"].sheets(encoded) if "pixels" in self.questions else [])
