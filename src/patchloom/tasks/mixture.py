"""Mixture: a composed pretext task, with any withholdings and any weighted questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from patchloom.data.augment import RandomCrop, TwoViews
from patchloom.errors import PatchloomError
from patchloom.nets.decoders import Decoder, MAEDecoder
from patchloom.nets.encode import encode, final_norm, has_positions, has_rotations, patch_positions
from patchloom.nets.swin import PlainViT
from patchloom.options.declare import takes
from patchloom.options.tasks import (
    BandTarget,
    Coloring,
    DegradationKind,
    FeatureLoss,
    MixtureOptions,
    Second,
    Sharing,
)
from patchloom.patches.partition import random_partition, share_of
from patchloom.questions.agreement import GAUSSIAN, Agreement
from patchloom.questions.features import Features
from patchloom.questions.pixels import Restoration
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
from patchloom.tasks.restore import STRENGTHS, band_loss, build_degradation, forms_of, others_needed
from patchloom.tasks.task import Task
from patchloom.withhold.encoder_input import (
    EncoderInput,
    all_patches,
    blank_patches,
    drop_positions,
    limit_context,
    mask_patches,
)

_SHARES = ("mask", "blank", "drop_positions", "limit_context")
_QUESTIONS = ("pixels", "positions", "agreement", "features")


class Mixture(Task):
    """Composed task: any withholdings and any weighted questions.

    Args:
        encoder: ViT to train.

    Raises:
        PatchloomError: a combination that cannot be answered, with the reason.
    """

    @takes(MixtureOptions)
    def __init__(self, encoder: PlainViT, options: MixtureOptions) -> None:
        super().__init__(encoder)
        self.withhold = self.resolve_auto(
            "withhold", options.withhold, {"mask": 0.5, "drop_positions": 0.75}, "as DropPos, milder"
        )
        self.question_weights = self.resolve_auto(
            "ask", options.ask, {"pixels": 1.0, "positions": 1.0}, "as --task.withhold"
        )
        asked_of: Second = "same" if "agreement" in self.question_weights else "none"
        second = self.resolve_auto("teacher", options.teacher, asked_of, "matches --task.ask")
        self._check(second)
        self.counts = self._count(self.withhold)
        for name, count in self.counts.items():
            if name != "limit_context" and count == (self.geometry.n if name == "mask" else 0):
                raise PatchloomError(
                    f"{name} {self.withhold[name]} takes none of the patches: raise it in --task.withhold"
                )
        self.masks = self._check_masks(options.masks)
        degradations = [kind for kind in STRENGTHS if kind in self.withhold]  # one at most
        kind: DegradationKind = degradations[0] if degradations else "none"
        strengths = {STRENGTHS[kind]: float(self.withhold[kind])} if degradations else {}
        side = min(self.geometry.size) if options.canvas == "auto" else options.canvas
        if kind == "zoom_in" and side != min(self.geometry.size):
            self._check_canvas(side, strengths.pop("scale"))
        self.degradation = build_degradation(self, kind, side, strengths, forms_of(options))
        on_canvas = self.degradation.canvas != self.degradation.size
        if on_canvas and ("agreement" in self.question_weights or options.position_temperature < float("inf")):
            raise PatchloomError(
                "agreement and attentive reconstruction need images of the encoder's size: leave out --task.canvas, or "
                "these"
            )
        has_band = on_canvas and kind == "zoom_in" and "mask" in self.counts and "pixels" in self.question_weights
        if has_band and self.masks > 1:
            raise PatchloomError("the loss on the band of a canvas is for one mask: leave out --task.masks")
        band = band_loss(self, has_band, options.band_weight, options.band_target)
        if on_canvas:
            self.augment = RandomCrop(self.degradation.canvas)
        if second == "second":
            own: Sharing = self.resolve_auto("crop", options.crop, "own", "as lut")
            colours: Coloring = self.resolve_auto("color", options.color, "none", "as lut")
            self.augment = TwoViews(self.augment.size, crop=own, color=colours)
        else:
            refuse_unused("there is no second view", crop=options.crop, color=options.color)
        check_smoothing(options.sigma, options.sigma_end)
        d = encoder.embed_dim
        self.mask_token = nn.Parameter(torch.empty(d).normal_(std=0.02)) if "blank" in self.withhold else None
        partly = 0 < self.withhold.get("drop_positions", 0) < 1
        self.position_token = (
            nn.Parameter(torch.empty(d).normal_(std=0.02)) if partly and patch_positions(encoder) is not None else None
        )
        start = MOMENTUM
        if "agreement" in self.question_weights:
            start = teacher_momentum(self, options.momentum, options.agreement_loss)
        else:
            # 0.996 was written by former versions for every run
            written = "auto" if options.momentum == MOMENTUM else options.momentum
            unused: dict[str, Any] = {"head_width": options.head_width, "head_out": options.head_out}
            unused |= {"momentum": written}
            unused |= {"attention_blocks": options.attention_blocks, "infonce_temperature": options.infonce_temperature}
            unused |= {"gaussian_weight": options.gaussian_weight, "directions": options.directions}
            unused |= {"class_token": "auto" if options.class_token == "mean" else options.class_token}
            unused |= {"agreement_loss": "auto" if options.agreement_loss == "byol" else options.agreement_loss}
            refuse_unused("--task.ask has no agreement", **unused)
        if not {"pixels", "features"} & self.question_weights.keys():
            refuse_unused("--task.ask has neither pixels nor features", decoder_depth=options.decoder_depth)
        if "positions" not in self.question_weights:
            even: Any = "auto" if options.position_temperature == float("inf") else options.position_temperature
            ends: Any = options.sigma_end or "auto"
            unused = {"position_depth": options.position_depth, "position_temperature": even, "sigma_end": ends}
            refuse_unused("--task.ask has no positions", **unused)
        if "features" not in self.question_weights:
            given = {"features_of": options.features_of or "auto", "features_model": options.features_model or "auto"}
            refuse_unused("--task.ask has no features", **given, feature_loss=options.feature_loss)
        builders: dict[str, Callable[[], Question]] = {
            "pixels": lambda: self._pixels(options, band),
            "positions": lambda: self._positions(options),
            "features": lambda: self._features(options),
            "agreement": lambda: Agreement(
                encoder,
                *agreement_heads(self, options.head_width, options.head_out, loss=options.agreement_loss),
                start,
                options.class_token,
                build_instance_head(self, options.class_token, options.attention_blocks),
                build_agreement_loss(
                    self,
                    options.agreement_loss,
                    options.infonce_temperature,
                    options.gaussian_weight,
                    options.directions,
                    "infonce_temperature",
                ),
            ),
        }
        for name in self.question_weights:
            self.questions[name] = builders[name]()

    def _pixels(self, options: MixtureOptions, band: tuple[float | None, BandTarget]) -> Restoration:
        """Build the question of Beyond Masking for masked and blank patches, or for all patches of a degraded image."""
        check_normalizable(self.geometry, each_channel=True)
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
        sizes = decoder_sizes(self, *asked, (512, 2, 16), depth_option="position_depth")
        ratios = MP3_RATIOS if self.withhold["drop_positions"] == 1 else DROPPOS_RATIOS
        sigmas, tau = (options.sigma, options.sigma_end), options.position_temperature
        return Positions(g, Decoder(g.width, g.n, *sizes, g.prefix), ratios, *sigmas, temperature=tau)

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
