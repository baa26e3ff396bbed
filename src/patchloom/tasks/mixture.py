"""Mixture: a composed pretext task, with any withholdings and any weighted questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.data.augment import RandomCrop, TwoViews
from patchloom.nets.decoders import Decoder, MAEDecoder
from patchloom.nets.encode import encode, final_norm
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.refusals import GAUSSIAN, POSITION_DECODER
from patchloom.options.tasks import BandTarget, Coloring, FeatureLoss, MixtureOptions, Sharing, counts_of
from patchloom.patches.partition import random_partition
from patchloom.questions.agreement import Agreement
from patchloom.questions.features import Features
from patchloom.questions.pixels import Restoration
from patchloom.questions.positions import DROPPOS_RATIOS, MP3_RATIOS, Positions
from patchloom.questions.question import Outcome
from patchloom.tasks.defaults import (
    AGREEMENT_UPDATES,
    MOMENTUM,
    agreement_heads,
    build_agreement_loss,
    build_instance_head,
    decoder_sizes,
    frozen_teacher,
    momentum_for,
    patch_decoder,
    teacher_momentum,
)
from patchloom.tasks.restore import band_loss, build_degradation, others_needed
from patchloom.tasks.task import Task
from patchloom.withhold.encoder_input import (
    EncoderInput,
    all_patches,
    blank_patches,
    drop_positions,
    limit_context,
    mask_patches,
)


class Mixture(Task):
    """Composed task: any withholdings and any weighted questions.

    Args:
        encoder: ViT to train.

    Raises:
        PatchloomError: a combination that cannot be answered, with the reason.
    """

    @takes(MixtureOptions)
    def __init__(self, encoder: PlainViT, options: MixtureOptions) -> None:
        super().__init__(encoder, options)
        g, withhold, ask = self.geometry, options.withheld, options.asked
        self.withhold = self.resolve_auto("withhold", options.withhold, withhold, "as DropPos, milder")
        self.question_weights = self.resolve_auto("ask", options.ask, ask, "as --task.withhold")
        view = self.resolve_auto("teacher", options.teacher, options.view, "matches --task.ask")
        self.counts, self.masks = counts_of(g.n, withhold), options.masks
        self.degradation = build_degradation(self, options.degraded(g.size))
        band = band_loss(self, options.has_band(g.size), options.band_weight, options.band_target)
        if self.degradation.canvas != g.size:
            self.augment = RandomCrop(self.degradation.canvas)
        if view == "second":
            own: Sharing = self.resolve_auto("crop", options.crop, "own", "as lut")
            colours: Coloring = self.resolve_auto("color", options.color, "none", "as lut")
            self.augment = TwoViews(self.augment.size, crop=own, color=colours)
        self.mask_token = nn.Parameter(torch.empty(g.width).normal_(std=0.02)) if "blank" in withhold else None
        partly = 0 < withhold.get("drop_positions", 0) < 1 and g.positions != "none"
        self.position_token = nn.Parameter(torch.empty(g.width).normal_(std=0.02)) if partly else None
        start = MOMENTUM
        if "agreement" in ask:
            start = teacher_momentum(self, options.momentum, options.agreement_loss)
        for name in ask:
            if name == "pixels":
                self.questions[name] = self._pixels(options, band)
            elif name == "positions":
                self.questions[name] = self._positions(options)
            elif name == "features":
                self.questions[name] = self._features(options)
            else:
                loss = options.agreement_loss
                heads = agreement_heads(self, options.head_width, options.head_out, loss=loss)
                class_head = build_instance_head(self, options.class_token, options.attention_blocks)
                weight, many = options.gaussian_weight, options.directions
                by = build_agreement_loss(self, loss, options.infonce_temperature, weight, many, "infonce_temperature")
                self.questions[name] = Agreement(encoder, *heads, start, options.class_token, class_head, by)

    def _pixels(self, options: MixtureOptions, band: tuple[float | None, BandTarget]) -> Restoration:
        """Build the question of Beyond Masking for masked and blank patches, or for all patches of a degraded image."""
        decoder = self._patch_decoder(options)
        blank, (weight, target) = self.counts.get("blank", 0), band
        return Restoration(self.geometry, decoder, self.degradation, True, blank, weight, band_target=target)

    def _features(self, options: MixtureOptions) -> Features:
        """Build the question about a frozen teacher's features, for the same patches."""
        by: FeatureLoss = self.resolve_auto("feature_loss", options.feature_loss, "cosine", "as EVA")
        teacher = frozen_teacher(self.geometry, options.features_of, options.features_model)
        decoder = self._patch_decoder(options, teacher.encoder.embed_dim)
        return Features(self.geometry, decoder, teacher, by, self.counts.get("blank", 0))

    def _patch_decoder(self, options: MixtureOptions, answers: int | None = None) -> MAEDecoder:
        """Build a decoder for all patches of a degraded image, else for the masked and blank ones."""
        asked = self.counts.get("blank", 0)
        if self.degradation.changes_pixels:
            asked = self.counts.get("mask", self.geometry.n)
        masks, sizes = "mask" in self.counts, (options.decoder_width, options.decoder_depth, options.decoder_heads)
        return patch_decoder(self, *sizes, answers=answers, has_masked=masks, visible_asked=asked)

    def _positions(self, options: MixtureOptions) -> Positions:
        """Build DropPos' question, or MP3's if every position is withheld."""
        g = self.geometry
        asked = options.decoder_width, options.position_depth, options.decoder_heads
        sizes = decoder_sizes(self, *asked, POSITION_DECODER, depth_option="position_depth")
        ratios = MP3_RATIOS if self.withhold["drop_positions"] == 1 else DROPPOS_RATIOS
        sigmas, tau = (options.sigma, options.sigma_end), options.position_temperature
        return Positions(g, Decoder(g.width, g.n, *sizes, g.prefix), ratios, *sigmas, temperature=tau)

    @classmethod
    def encoder_defaults(cls, options: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Return no positions if all of them are withheld, and a class token if it is the image representation."""
        withhold, found = options["withhold"], dict[str, tuple[Any, str]]()
        if isinstance(withhold, Mapping) and withhold.get("drop_positions") == 1:
            found["positions"] = "none", "the mixture withholds all of them"
        if options["class_token"] == "vit":
            found["class_token"] = True, "--task.class_token vit uses it"
        return found

    @classmethod
    def training_defaults(cls, options: Mapping[str, Any], updates: int) -> dict[str, tuple[Any, str]]:
        """Return a momentum that suits the length of the training, with agreement."""
        return {"task.momentum": momentum_for(updates)} if _has_teacher(options) else {}

    @classmethod
    def updates_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Return enough updates for a teacher that starts as a random network, with agreement."""
        return AGREEMENT_UPDATES if _has_teacher(options) else super().updates_needed(options)

    @classmethod
    def images_needed(cls, options: Mapping[str, Any]) -> tuple[int, str]:
        """Return 2 if patches of other images are shown, or if the images of a step are compared."""
        if options["agreement_loss"] != "byol":
            return 2, f"{options['agreement_loss']} compares the images of a step"
        return others_needed(options) or super().images_needed(options)

    def given(
        self,
        images: Tensor,
        generator: torch.Generator | None = None,
        *,
        masks: int = 1,
        mask_ratio: float | None = None,
        position_mask_ratio: float | None = None,
        context_mask_ratio: float | None = None,
    ) -> EncoderInput:
        """Return a batch after all withholdings; no patch loses both its content and its position.

        Several ``masks`` of an image are disjoint, and withhold from their own patches. With given ratios no patch is
        blank, because the position of a blank patch cannot be predicted.
        """
        counts = self.counts
        ratios = {"mask": mask_ratio, "drop_positions": position_mask_ratio, "limit_context": context_mask_ratio}
        if other := {name: ratio for name, ratio in ratios.items() if ratio is not None}:
            withhold = {name: share for name, share in self.withhold.items() if name != "blank"}
            counts = counts_of(self.geometry.n, withhold | other)
        b, n, device = len(images), self.geometry.n, images.device
        given = self.degradation(all_patches(images, n), self.mean, self.std, generator)
        if "mask" in counts:
            parts = random_partition(b, n, (counts["mask"],) * masks, generator, device)
            everything = {name: getattr(given, name).repeat(masks, 1) for name in ("visible", "masked")}
            given = mask_patches(replace(given, **everything), torch.cat(parts).sort(dim=1).values)
        k = given.visible.shape[1]

        def of_every_mask(*sizes: int) -> tuple[Tensor, ...]:
            drawn = [random_partition(b, k, sizes, generator, device) for _ in range(masks)]
            return tuple(map(torch.cat, zip(*drawn, strict=True)))

        sizes = counts.get("blank", 0), counts.get("drop_positions", 0)
        blank, _, dropped = of_every_mask(sizes[0], k - sum(sizes), sizes[1])  # the last ones, as in droppos
        given = blank_patches(given, blank) if "blank" in counts else given
        given = drop_positions(given, dropped) if "drop_positions" in counts else given
        if "limit_context" in counts:
            given = limit_context(given, of_every_mask(counts["limit_context"])[0])
        return given

    def encode_tokens(
        self, given: EncoderInput, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens; with class attention also those before the final norm."""
        if "agreement" not in self.questions or self.questions["agreement"].instance_head is None:
            return super().encode_tokens(given, generator)
        unnormed = encode(self.encoder, given, norm=False, **self.placeholders(given, generator))
        return final_norm(self.encoder, unnormed), unnormed

    def forward(
        self,
        *views: Tensor,
        progress: float = 0.0,
        generator: torch.Generator | None = None,
        given: EncoderInput | None = None,
    ) -> Outcome:
        """Return the loss of a step, over all masks of the images; see `Task.forward`."""
        if given is None:
            given = self.given(views[0], generator, masks=self.masks)
        return super().forward(*views, progress=progress, generator=generator, given=given)

    def placeholders(self, given: EncoderInput, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the mask token, and the position token, or zeros if all positions or none are withheld."""
        position = given.images.new_zeros(()) if self.position_token is None else self.position_token
        mask = {} if self.mask_token is None else {"mask_token": self.mask_token}
        return {"position_token": position, **mask}


def _has_teacher(options: Mapping[str, Any]) -> bool:
    """Return whether the options ask for agreement with a moving average."""
    return "agreement" in options["ask"] and options["agreement_loss"] not in GAUSSIAN
