"""Mixture: a composed pretext task, with any withholdings and any weighted questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from patchloom.data.augment import Coloring, RandomCrop, Sharing, TwoViews
from patchloom.errors import PatchloomError, check_type
from patchloom.nets.decoders import Decoder, MAEDecoder
from patchloom.nets.encode import encode, final_norm, has_positions, has_rotations, patch_positions
from patchloom.nets.swin import PlainViT
from patchloom.patches.partition import random_partition, share_of
from patchloom.questions.agreement import GAUSSIAN, Agreement, Loss, Representation
from patchloom.questions.features import FeatureLoss, Features
from patchloom.questions.pixels import BandTarget, Restoration
from patchloom.questions.positions import DROPPOS_RATIOS, MP3_RATIOS, Positions
from patchloom.questions.question import Outcome, Question
from patchloom.tasks.defaults import (
    AGREEMENT_UPDATES,
    MOMENTUM,
    agreement_heads,
    build_agreement_loss,
    build_instance_head,
    check_normalizable,
    check_smoothing,
    decoder_sizes,
    frozen_teacher,
    momentum_for,
    patch_decoder,
    refuse_unused,
    teacher_momentum,
)
from patchloom.tasks.masking import visible_of
from patchloom.tasks.restore import STRENGTHS, band_loss, build_degradation, others_needed
from patchloom.tasks.task import Size, Task
from patchloom.withhold.degradation import CanvasFit, CropPlace, DegradationKind
from patchloom.withhold.degrade import KernelInit, KernelOf
from patchloom.withhold.encoder_input import (
    EncoderInput,
    all_patches,
    blank_patches,
    drop_positions,
    limit_context,
    mask_patches,
)

Second = Literal["same", "second", "none"]
Padding = Literal["mirror", "black", "images"]

_SHARES = ("mask", "blank", "drop_positions", "limit_context")
_QUESTIONS = ("pixels", "positions", "agreement", "features")


class Mixture(Task):
    """Composed task: any withholdings and any weighted questions.

    Args:
        encoder: ViT to train.
        withhold: withholdings and their strengths. mask takes the fraction of the patches that is removed; blank,
            drop_positions and limit_context the fractions of the others that lose content, position, or their use as
            keys and values; no patch loses both content and position. One of zoom_in, zoom_out (fraction of the side),
            fisheye (twist), wave (amplitude), blur (side of the kernel) and decolorize (fraction of the colour that
            stays) degrades the image first. auto: mask 0.5 and drop_positions 0.75.
        ask: questions and their weights: pixels, positions, agreement, features; the first one is reported. auto:
            pixels and positions, 1 each.
        teacher: teacher's view for agreement: the student's crop (same), a second crop (second), or none; auto: same
            with agreement, else none.
        masks: number of disjoint masks per image, as in ExtreMA; each leaves what mask does not remove.
        crop: crop of the two views of ``teacher`` second: one each (auto: own), or one for both (shared).
        color: colour changes of these views: none (auto), the same for both (shared), or independent ones (own); or
            those of LUT's second view (second).
        class_token: image representation for agreement: the mean of the patch tokens (mean), the encoder's own class
            token (vit), or a class token in class-attention blocks after the encoder (cait), as in ExtreMA.
        attention_blocks: number of class-attention blocks of cait; auto: 2.
        agreement_loss: byol, infonce, or sigreg or visreg without a teacher, as ``loss`` of extrema.
        infonce_temperature: τ of infonce; auto: 0.2.
        gaussian_weight: λ of sigreg and visreg, as in extrema.
        directions: number of random directions of sigreg and visreg, as in extrema.
        sigma: σ of position smoothing at the start, as in DropPos.
        sigma_end: σ at the end of the training, reached linearly; equal to ``sigma``: constant.
        position_temperature: τ of attentive reconstruction, as in DropPos (there 0.1); inf weighs all patches alike.
        momentum: momentum of the teacher at the start; rises to 1 along a half cosine. auto: 0.996, less in short
            trainings.
        head_width: hidden width of the agreement heads; auto: 4096, or 4 encoder widths below ViT-S.
        head_out: output width of the agreement heads; auto: 256, or the encoder's width below ViT-S.
        decoder_width: width of the decoders; auto: 512, or the encoder's below ViT-S.
        decoder_depth: number of blocks of the pixel decoder; auto: 8, or 2 below ViT-S.
        decoder_heads: number of attention heads of the decoders; auto: 16, or one per 32 channels below ViT-S.
        features_of: frozen teacher of features: timm:NAME, a run's folder, or a file of weights.
        features_model: timm's name of that teacher's model, if features_of is a file of weights alone.
        feature_loss: loss on the features: cosine or smooth_l1; auto: cosine.
        canvas: shorter side in pixels of the image before zoom_in, fisheye or wave, as in restore; auto: the input's.
            zoom_in is then the input's fraction of it, such as 0.7 for 224 of 320.
        canvas_fit: reduction of a larger canvas to the input after fisheye or wave: resize (auto), or crop.
        band_weight: fraction of the pixel loss on the band around the input, with mask and zoom_in on a canvas; the
            rest is on the masked patches. auto: 0.2.
        band_target: target of the band, as in restore: grown (auto) or original.
        zoom_place: part that zoom_in shows: the centre (auto), or one at a random place.
        fill: surroundings of zoom_out's small copy: its mirror images (auto), black, or patches of other images.
        kernel_init: weights of blur's kernels: normal around the mean (auto), or around 0 as in kaiming or xavier.
        kernel_of: one blur kernel per channel of an image (auto: channel), or one for all channels (image).
        position_depth: number of blocks of the position decoder; 0: linear, as in MP3; auto: 2.

    Raises:
        PatchloomError: a combination that cannot be answered, with the reason.
    """

    def __init__(
        self,
        encoder: PlainViT,
        withhold: dict[str, float] | Literal["auto"] = "auto",
        ask: dict[str, float] | Literal["auto"] = "auto",
        teacher: Second | Literal["auto"] = "auto",
        masks: int = 1,
        crop: Sharing | Literal["auto"] = "auto",
        color: Coloring | Literal["auto"] = "auto",
        class_token: Representation = "mean",
        attention_blocks: Size = "auto",
        agreement_loss: Loss = "byol",
        infonce_temperature: float | Literal["auto"] = "auto",
        gaussian_weight: float | Literal["auto"] = "auto",
        directions: Size = "auto",
        sigma: float = 1.0,
        sigma_end: float = 0.0,
        position_temperature: float = float("inf"),
        momentum: float | Literal["auto"] = "auto",
        head_width: Size = "auto",
        head_out: Size = "auto",
        decoder_width: Size = "auto",
        decoder_depth: Size = "auto",
        decoder_heads: Size = "auto",
        position_depth: Size = "auto",
        features_of: str | None = None,
        features_model: str | None = None,
        feature_loss: FeatureLoss | Literal["auto"] = "auto",
        canvas: Size = "auto",
        canvas_fit: CanvasFit | Literal["auto"] = "auto",
        band_weight: float | Literal["auto"] = "auto",
        band_target: BandTarget | Literal["auto"] = "auto",
        zoom_place: CropPlace | Literal["auto"] = "auto",
        fill: Padding | Literal["auto"] = "auto",
        kernel_init: KernelInit | Literal["auto"] = "auto",
        kernel_of: KernelOf | Literal["auto"] = "auto",
    ):
        super().__init__(encoder)
        self.withhold = self.resolve_auto(
            "withhold", withhold, {"mask": 0.5, "drop_positions": 0.75}, "as DropPos, milder"
        )
        self.question_weights = self.resolve_auto("ask", ask, {"pixels": 1.0, "positions": 1.0}, "as --task.withhold")
        asked_of: Second = "same" if "agreement" in self.question_weights else "none"
        second = self.resolve_auto("teacher", teacher, asked_of, "matches --task.ask")
        self._check(second)
        self.counts = self._count(self.withhold)
        for name, count in self.counts.items():
            if name != "limit_context" and count == (self.geometry.n if name == "mask" else 0):
                raise PatchloomError(
                    f"{name} {self.withhold[name]} takes none of the patches: raise it in --task.withhold"
                )
        self.masks = self._check_masks(masks)
        degradations = [kind for kind in STRENGTHS if kind in self.withhold]  # one at most
        kind: DegradationKind = degradations[0] if degradations else "none"
        strengths = {STRENGTHS[kind]: float(self.withhold[kind])} if degradations else {}
        check_type("task.fill", fill, Padding | Literal["auto"])
        forms: dict[str, str] = {"zoom_place": zoom_place, "fill": fill, "canvas_fit": canvas_fit}
        forms |= {"kernel_init": kernel_init, "kernel_of": kernel_of}
        side = min(self.geometry.size) if canvas == "auto" else canvas
        if kind == "zoom_in" and side != min(self.geometry.size):
            self._check_canvas(side, strengths.pop("scale"))
        self.degradation = build_degradation(self, kind, side, strengths, forms)
        on_canvas = self.degradation.canvas != self.degradation.size
        if on_canvas and ("agreement" in self.question_weights or position_temperature < float("inf")):
            raise PatchloomError(
                "agreement and attentive reconstruction need images of the encoder's size: leave out --task.canvas, or "
                "these"
            )
        has_band = on_canvas and kind == "zoom_in" and "mask" in self.counts and "pixels" in self.question_weights
        if has_band and self.masks > 1:
            raise PatchloomError("the loss on the band of a canvas is for one mask: leave out --task.masks")
        band = band_loss(self, has_band, band_weight, band_target)
        if on_canvas:
            self.augment = RandomCrop(self.degradation.canvas)
        if second == "second":
            own: Sharing = self.resolve_auto("crop", crop, "own", "as lut")
            colours: Coloring = self.resolve_auto("color", color, "none", "as lut")
            self.augment = TwoViews(self.augment.size, crop=own, color=colours)
        else:
            refuse_unused("there is no second view", crop=crop, color=color)
        check_smoothing(sigma, sigma_end)
        d = encoder.embed_dim
        self.mask_token = nn.Parameter(torch.empty(d).normal_(std=0.02)) if "blank" in self.withhold else None
        partly = 0 < self.withhold.get("drop_positions", 0) < 1
        self.position_token = (
            nn.Parameter(torch.empty(d).normal_(std=0.02)) if partly and patch_positions(encoder) is not None else None
        )
        start = MOMENTUM
        if "agreement" in self.question_weights:
            start = teacher_momentum(self, momentum, agreement_loss)
        else:
            written = "auto" if momentum == MOMENTUM else momentum  # written by former versions for every run
            unused: dict[str, Any] = {"head_width": head_width, "head_out": head_out, "momentum": written}
            unused |= {"attention_blocks": attention_blocks, "infonce_temperature": infonce_temperature}
            unused |= {"gaussian_weight": gaussian_weight, "directions": directions}
            unused |= {"class_token": "auto" if class_token == "mean" else class_token}
            unused |= {"agreement_loss": "auto" if agreement_loss == "byol" else agreement_loss}
            refuse_unused("--task.ask has no agreement", **unused)
        if not {"pixels", "features"} & self.question_weights.keys():
            refuse_unused("--task.ask has neither pixels nor features", decoder_depth=decoder_depth)
        if "positions" not in self.question_weights:
            even: Any = "auto" if position_temperature == float("inf") else position_temperature
            ends: Any = sigma_end or "auto"
            unused = {"position_depth": position_depth, "position_temperature": even, "sigma_end": ends}
            refuse_unused("--task.ask has no positions", **unused)
        if position_temperature <= 0:
            raise PatchloomError(
                f"--task.position_temperature must be above 0 (inf switches it off), not {position_temperature}"
            )
        if "features" not in self.question_weights:
            given = {"features_of": features_of or "auto", "features_model": features_model or "auto"}
            refuse_unused("--task.ask has no features", **given, feature_loss=feature_loss)
        source = features_of, features_model
        builders: dict[str, Callable[[], Question]] = {
            "pixels": lambda: self._pixels(decoder_width, decoder_depth, decoder_heads, band),
            "positions": lambda: self._positions(
                decoder_width, position_depth, decoder_heads, (sigma, sigma_end), position_temperature
            ),
            "features": lambda: self._features(decoder_width, decoder_depth, decoder_heads, source, feature_loss),
            "agreement": lambda: Agreement(
                encoder,
                *agreement_heads(self, head_width, head_out, loss=agreement_loss),
                start,
                class_token,
                build_instance_head(self, class_token, attention_blocks),
                build_agreement_loss(
                    self,
                    agreement_loss,
                    infonce_temperature,
                    gaussian_weight,
                    directions,
                    ("agreement_loss", "infonce_temperature"),
                ),
            ),
        }
        for name in self.question_weights:
            self.questions[name] = builders[name]()

    def _pixels(self, width: Size, depth: Size, heads: Size, band: tuple[float | None, BandTarget]) -> Restoration:
        """Build the question of Beyond Masking for masked and blank patches, or for all patches of a degraded image."""
        check_normalizable(self.geometry, each_channel=True)
        decoder = self._patch_decoder(width, depth, heads)
        blank, (weight, target) = self.counts.get("blank", 0), band
        return Restoration(self.geometry, decoder, self.degradation, True, blank, weight, band_target=target)

    def _features(
        self,
        width: Size,
        depth: Size,
        heads: Size,
        of: tuple[str | None, str | None],
        loss: FeatureLoss | Literal["auto"],
    ) -> Features:
        """Build the question about a frozen teacher's features, for the same patches."""
        by: FeatureLoss = self.resolve_auto("feature_loss", loss, "cosine", "as EVA")
        check_type("task.feature_loss", by, FeatureLoss)
        teacher = frozen_teacher(self.geometry, *of)
        decoder = self._patch_decoder(width, depth, heads, teacher.encoder.embed_dim)
        return Features(self.geometry, decoder, teacher, by, self.counts.get("blank", 0))

    def _patch_decoder(self, width: Size, depth: Size, heads: Size, answers: int | None = None) -> MAEDecoder:
        """Build a decoder for all patches of a degraded image, else for the masked and blank ones."""
        asked = self.counts.get("blank", 0)
        if self.degradation.changes_pixels:
            asked = self.counts.get("mask", self.geometry.n)
        masks = "mask" in self.counts
        return patch_decoder(self, width, depth, heads, answers=answers, has_masked=masks, visible_asked=asked)

    def _positions(
        self, width: Size, depth: Size, heads: Size, sigma: tuple[float, float], temperature: float
    ) -> Positions:
        """Build DropPos' question, or MP3's if every position is withheld."""
        g = self.geometry
        sizes = decoder_sizes(self, width, depth, heads, (512, 2, 16), depth_option="position_depth")
        ratios = MP3_RATIOS if self.withhold["drop_positions"] == 1 else DROPPOS_RATIOS
        return Positions(g, Decoder(g.width, g.n, *sizes, g.prefix), ratios, *sigma, temperature=temperature)

    def _check_masks(self, masks: int) -> int:
        """Raise an error for more disjoint masks than there are patches for."""
        n, visible = self.geometry.n, self.counts.get("mask", self.geometry.n)
        if not 1 <= masks <= n // visible:
            raise PatchloomError(
                f"there are no {masks} disjoint masks of {visible} visible patches each in {n}: give --task.masks 1 to "
                f"{n // visible}, or raise mask in --task.withhold"
            )
        return masks

    def _check_canvas(self, side: int, share: float) -> None:
        """Raise an error if the input is not the ``share`` of a canvas that zoom_in states."""
        size = min(self.geometry.size)
        if abs(size / side - share) > 0.5 / size:
            raise PatchloomError(
                f"the input's {size} pixels are {size / side:.3f} of --task.canvas {side}, not zoom_in {share:g}: give "
                f"zoom_in {size / side:.3f} in --task.withhold, or another canvas"
            )

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

    def _check(self, second: Second) -> None:
        """Raise an error for a combination that cannot be answered."""
        for option, given, known in (
            ("withhold", self.withhold, (*_SHARES, *STRENGTHS)),
            ("ask", self.question_weights, _QUESTIONS),
        ):
            for name in given:
                if name not in known:
                    raise PatchloomError(f"--task.{option} has no entry {name}: choose among {', '.join(known)}")
        check_type("task.teacher", second, Second)
        if not self.question_weights or min(self.question_weights.values()) <= 0:
            raise PatchloomError("--task.ask needs one question or more, each with a weight above 0")
        for name in _SHARES:
            share = self.withhold.get(name)
            if share is not None and not 0 < share < 1 and (name, share) != ("drop_positions", 1):
                raise PatchloomError(f"--task.withhold {name} must be a fraction between 0 and 1, not {share}")
        if sum(name in STRENGTHS for name in self.withhold) > 1:
            raise PatchloomError("--task.withhold takes one degradation of the image at a time")
        order = list(self.withhold)
        if "limit_context" in order and "mask" in order and order.index("limit_context") < order.index("mask"):
            raise PatchloomError("limit_context chooses among the patches that enter: put it after mask")
        content = [name for name in order if name in ("mask", "blank", *STRENGTHS)]
        for name in ("pixels", "features"):
            if name in self.question_weights and not content:
                raise PatchloomError(f"no pixels are withheld, so {name} cannot be asked: add mask or blank")
        table = patch_positions(self.encoder) is not None
        lacking = not has_positions(self.encoder)
        dropped = self.withhold.get("drop_positions")
        if "positions" in self.question_weights and dropped is None:
            raise PatchloomError(
                "no visible patch's position is withheld, and a masked patch has no token to predict it from: add "
                "drop_positions to --task.withhold"
            )
        if dropped is not None and (table if dropped == 1 else lacking):
            without = "rotary" if has_rotations(self.encoder) else "none"
            state, remedy = ("has no", "sincos") if lacking else ("has", without)
            raise PatchloomError(
                f"drop_positions {dropped} does not go with an encoder that {state} positions: use --positions {remedy}"
            )
        if "agreement" in self.question_weights and second == "none":
            raise PatchloomError("agreement needs a whole view of the image: give --task.teacher same or second")
        if "agreement" not in self.question_weights and second != "none":
            raise PatchloomError("the teacher is not used: add agreement to --task.ask, or leave out --task.teacher")
        if self.question_weights.keys() == {"agreement"} and second == "same" and not self.withhold:
            raise PatchloomError(
                "the student sees all that the teacher sees: withhold something, or give --task.teacher second"
            )

    def _count(self, withhold: Mapping[str, float]) -> dict[str, int]:
        """Return how many patches each withholding leaves (mask, limit_context) or takes (blank, drop_positions)."""
        counts, entering = {}, self.geometry.n
        if "mask" in withhold:
            counts["mask"] = entering = visible_of(self.geometry, withhold["mask"])
        for name in ("blank", "drop_positions", "limit_context"):
            if name in withhold:
                kept = share_of(entering, 1 - withhold[name])
                counts[name] = max(1, kept) if name == "limit_context" else entering - kept
        taken = counts.get("blank", 0) + counts.get("drop_positions", 0)
        if "blank" in counts and taken > entering:
            raise PatchloomError(
                f"of {entering} patches that enter, {counts['blank']} would be blank and {counts['drop_positions']} "
                "without a position, so some would have neither: lower one of the fractions"
            )
        if counts.get("blank", 0) == entering:
            raise PatchloomError("every patch would be blank: lower blank in --task.withhold")
        return counts

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
            counts = self._count(withhold | other)
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
