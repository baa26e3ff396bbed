"""LUT: learning with unmasked tokens drives stronger vision learners (Kim et al., ECCV 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchloom.data import TwoViews
from patchloom.errors import PatchloomError
from patchloom.hints import check
from patchloom.nets.encode import encode
from patchloom.nets.heads import mlp
from patchloom.nets.teacher import Teacher, aside
from patchloom.objectives.agreement import byol_loss, momentum
from patchloom.objectives.pixels import pixel_loss, pixel_targets
from patchloom.tasks.mae import pixel_decoder, recovery_sheet
from patchloom.tasks.measure import Measure
from patchloom.tasks.siamese import (
    GALLERY,
    ROWS,
    agreement_measure,
    check_momentum,
    head_sizes,
    hidden,
    neighbours_sheet,
    views_sheet,
)
from patchloom.tasks.simmim import patches_of_unit, pixel_head
from patchloom.tasks.task import Outcome, Sheet, Size, Task
from patchloom.views.tokens import deal_units, share_of, take
from patchloom.views.view import blank_patches, mask_patches, whole

Base = Literal["mae", "simmim"]


class LUT(Task):
    """Patches are withheld from two views in disjoint hands; pixels, and agreement on the other view, are asked.

    Args:
        encoder: the ViT to train.
        base: mae removes masked patches and decodes their pixels; simmim replaces them by a mask token.
        mask_ratio: share γ of the patches withheld from each view; auto: 0.75 on mae, 0.6 on simmim.
        context_weight: of the broader-context loss on the unmasked tokens.
        pixel_weight: of the pixel loss on the first view; 0 trains by the broader-context loss alone.
        normalized_pixels: ask for pixels normalised within each patch; auto: true on mae, false on simmim.
        mask_unit: side of a mask unit in pixels on simmim; auto: two patches. On mae it is one patch.
        momentum: of the teacher at the start; it rises to 1 along a half cosine.
        head_width: hidden width of head and predictor; auto: 4096, or four times the encoder's below ViT-S.
        decoder_width: on mae, width of the decoder; auto: 512, or the encoder's own below ViT-S.
        decoder_depth: on mae, transformer blocks of the decoder; auto: 8, or 2 below ViT-S.
        decoder_heads: on mae, attention heads of the decoder; auto: 16, or one for every 32 channels below ViT-S.

    Raises:
        PatchloomError: a mask ratio that does not leave two disjoint hands, or weights that ask nothing.
    """

    pictured = GALLERY

    def __init__(
        self,
        encoder: VisionTransformer,
        base: Base = "mae",
        mask_ratio: float | Literal["auto"] = "auto",
        context_weight: float = 0.25,
        pixel_weight: float = 1.0,
        normalized_pixels: bool | Literal["auto"] = "auto",
        mask_unit: Size = "auto",
        momentum: float = 0.996,
        head_width: Size = "auto",
        decoder_width: Size = "auto",
        decoder_depth: Size = "auto",
        decoder_heads: Size = "auto",
    ):
        super().__init__(encoder)
        check("task.base", base, Base)
        if min(context_weight, pixel_weight) < 0 or not context_weight:
            raise PatchloomError("lut asks for agreement: give --task.context_weight above 0, and no negative weight")
        check_momentum(momentum)
        sparse = base == "mae"
        mask_ratio = self.choose("mask_ratio", mask_ratio, 0.75 if sparse else 0.6, f"the paper's on {base}")
        self.normalized_pixels = self.choose("normalized_pixels", normalized_pixels, sparse, f"usual for {base}")
        if self.normalized_pixels and pixel_weight:
            self.check_normalizable()
        if sparse:
            self.refuse_unused("mae masks single patches", mask_unit=mask_unit)
        decoder = {"decoder_width": decoder_width, "decoder_depth": decoder_depth, "decoder_heads": decoder_heads}
        if not (sparse and pixel_weight):
            self.refuse_unused("nothing but mae with pixels has such a decoder", **decoder)
        self.unit = 1 if sparse else patches_of_unit(self, mask_unit)
        self.visible_of(mask_ratio)
        units = self.patches // self.unit**2
        visible = share_of(units, 1 - mask_ratio)
        if not 0 < 2 * visible <= units:
            raise PatchloomError(
                f"a mask ratio of {mask_ratio} leaves {visible} of {units} mask units visible, and two views need as "
                f"many each: {'raise' if visible else 'lower'} --task.mask_ratio"
            )
        self.hands = (visible, visible, units - 2 * visible)
        self.base, self.context_weight, self.pixel_weight, self.momentum = base, context_weight, pixel_weight, momentum
        self.augment = TwoViews(self.augment.size, crop="own", color="none")
        d = encoder.embed_dim
        hidden_width, _ = head_sizes(self, head_width, d)  # the heads give as many numbers as the encoder
        self.head = mlp((d, hidden_width, d), "batch")
        self.predictor = mlp((d, hidden_width, d), "batch")
        self.mask_token = None if sparse else nn.Parameter(torch.empty(d).normal_(std=0.02))
        self.decoder = None
        if pixel_weight and sparse:
            self.decoder = pixel_decoder(self, decoder_width, decoder_depth, decoder_heads)
        elif pixel_weight:
            self.decoder = pixel_head(self)
        self.teacher = Teacher(encoder=encoder, head=self.head)

    @classmethod
    def images_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Two, of which batch norm can take a variance."""
        return 2, "its batch norm compares the images of a step"

    def forward(self, one: Tensor, two: Tensor, *, progress: float = 0.0, generator=None, hands=None) -> Outcome:
        """The loss on a batch of two views; ``hands`` fixes the visible patches of each, [b k] twice."""
        hands = hands or self.deal(len(one), generator, one.device)
        images = torch.cat([one, two])
        tokens = self.encode(images, torch.cat(hands))
        students = self.predict(tokens, torch.cat(hands), views=2)
        with aside(self.teacher, images):
            teachers = self.teach(images).chunk(2)
        context = (byol_loss(students[0], teachers[1]) + byol_loss(students[1], teachers[0])) / 2
        if self.decoder is None:
            return Outcome(self.context_weight * context, {})
        masked = hidden(hands[0], self.patches)
        predicted = self.recover(tokens[: len(one)], hands[0], masked)
        target = pixel_targets(one, self.p, masked, self.normalized_pixels)
        pixels = pixel_loss(predicted, target, absolute=self.base == "simmim")
        loss = self.pixel_weight * pixels + self.context_weight * context
        return Outcome(loss, {"pixel_loss": pixels.detach(), "context_loss": context.detach()})

    def after_step(self, progress: float) -> None:
        """The teacher follows; the next step sees it updated."""
        self.teacher.follow(momentum(progress, self.momentum), encoder=self.encoder, head=self.head)

    def deal(self, b: int, generator, device) -> tuple[Tensor, Tensor]:
        """Draw what is visible of each view, [b k] twice, no patch in both."""
        return deal_units(b, self.grid, self.unit, self.hands, generator, device)[:2]

    def encode(self, images: Tensor, visible: Tensor) -> Tensor:
        """Tokens of a view: on mae [b prefix+k d] of the visible patches, on simmim [b prefix+n d] of all."""
        view = whole(images, self.patches)
        if self.base == "mae":
            return encode(self.encoder, mask_patches(view, visible))
        return encode(self.encoder, blank_patches(view, hidden(visible, self.patches)), mask_token=self.mask_token)

    def predict(self, tokens: Tensor, visible: Tensor, views: int = 1) -> tuple[Tensor, ...]:
        """The student's guess [b d] of the teacher's output for each of ``views``, from the mean of unmasked tokens.

        Views go through the heads one after the other, so that each has batch statistics of its own.
        """
        return tuple(self.predictor(self.head(view)) for view in self.summary(tokens, visible).chunk(views))

    def summary(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """Mean [b d] of the unmasked patches' tokens, which on simmim have to be picked from all."""
        unmasked = tokens[:, self.prefix :] if self.base == "mae" else take(tokens, visible + self.prefix)
        return unmasked.mean(1)

    def teach(self, images: Tensor) -> Tensor:
        """The teacher's output [b d] for whole images."""
        return self.teacher.head(self.describe(self.teacher.encoder, images))

    def describe(self, encoder: VisionTransformer, images: Tensor) -> Tensor:
        """Mean of the patch tokens [b d] of whole images."""
        return encode(encoder, whole(images, self.patches))[:, self.prefix :].mean(1)

    def recover(self, tokens: Tensor, visible: Tensor, masked: Tensor) -> Tensor:
        """Predicted pixels [b m f] of the masked patches of one view from its tokens."""
        if self.base == "mae":
            return self.decoder(tokens, visible, masked)
        return self.decoder(take(tokens, masked + self.prefix))

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """Agreement with the teacher from a masked view, beside that with the teacher's outputs for other images."""
        visible = self.deal(len(images), generator, images.device)[0]
        (student,) = self.predict(self.encode(images, visible), visible)
        return agreement_measure(student, self.teach(images))

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Views and masks of a step, nearest neighbours by teacher and student, and what came back as pixels."""
        one, two = self.augmented(images[:ROWS], generator)
        hands = tuple(hand[:ROWS] for hand in self.deal(len(images), generator, images.device))
        views = {"image": (images[:ROWS], None)}
        for number, view, hand in ((1, one, hands[0]), (2, two, hands[1])):
            views |= {f"teacher, view {number}": (view, None), f"student, view {number}": (view, hand)}
        seen = f"{hands[0].shape[1] / self.patches:.0%}"
        caption = f"What a training step sees. The student has {seen} of the patches of each view, at different places."
        masked_view = self.encode(images[:ROWS], hands[0])
        found = {
            "teacher": (self.describe(self.teacher.encoder, images),) * 2,
            "student": (self.summary(masked_view, hands[0]), self.describe(self.encoder, images)),
        }
        told = (
            f"The nearest of {len(images) - 1} other images by the cosine of their mean patch tokens. The teacher sees "
            f"all of the image, the student {seen} of its patches."
        )
        sheets = [views_sheet(self, views, caption), neighbours_sheet(images, found, told)]
        if self.decoder is not None:
            masked = hidden(hands[0], self.patches)
            recovered = self.recover(masked_view, hands[0], masked)
            sheets.append(recovery_sheet(self, images[:ROWS], hands[0], masked, recovered))
        return sheets
