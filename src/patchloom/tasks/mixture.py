"""A pretext task of your own: any withholdings, any weighted questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchloom.data import TwoViews
from patchloom.errors import PatchloomError
from patchloom.hints import check
from patchloom.nets.encode import encode, patch_positions
from patchloom.objectives.agreement import momentum
from patchloom.tasks.degradations import Degradation, build_degrader
from patchloom.tasks.measure import Measure
from patchloom.tasks.positions_drawn import CONTEXT_RATIOS, POSITION_GRID
from patchloom.tasks.questions import Agreement, Pixels, Positions, Seen
from patchloom.tasks.siamese import GALLERY, check_momentum, hidden
from patchloom.tasks.task import Outcome, Sheet, Size, Task
from patchloom.views.positions import Placed
from patchloom.views.tokens import deal, share_of
from patchloom.views.view import View, blank_patches, drop_positions, limit_context, mask_patches, whole

Second = Literal["same", "second", "none"]

_SHARES = ("mask", "blank", "drop_positions", "limit_context")
# a degradation, and the option that says how strong it is
_STRENGTHS = {"zoom_in": "scale", "zoom_out": "scale", "fisheye": "twist", "blur": "kernel", "decolorize": "saturation"}
_QUESTIONS = ("pixels", "positions", "agreement")
# what is withheld at the ratios of `Mixture.place`
_RATIOS = {"mask_ratio": "mask", "position_mask_ratio": "drop_positions", "context_mask_ratio": "limit_context"}


class Mixture(Task):
    """Any withholdings and any weighted questions, as you compose them.

    Args:
        encoder: the ViT to train.
        withhold: what and how much. mask takes the share of the patches that is removed; blank, drop_positions and
            limit_context the shares of the others that lose content, position, or their use as keys and values, no
            patch both of the first two. One of zoom_in, zoom_out (share of the side), fisheye (twist), blur (side of
            the kernel) and decolorize (share of the colour that stays) degrades the picture before. auto: mask 0.5 and
            drop_positions 0.75.
        ask: the questions and their weights: pixels, positions, agreement; the first is the one that is reported. auto:
            pixels and positions, 1 each.
        teacher: with agreement, whether the teacher sees the same crop of the image or a second one; auto: the same one
            if agreement is asked, else none.
        sigma: of position smoothing at the start, as DropPos does; falls to 0 over the training.
        momentum: of the teacher at the start; it rises to 1 along a half cosine.
        head_width: hidden width of the heads for agreement; auto: 4096, or 4 encoder widths below ViT-S.
        head_out: width of their output; auto: 256, or the encoder's below ViT-S.
        decoder_width: width of the decoders; auto: 512, or the encoder's own below ViT-S.
        decoder_depth: blocks of the pixel decoder; auto: 8, or 2 below ViT-S.
        decoder_heads: attention heads of the decoders; auto: 16, or one for every 32 channels below ViT-S.
        position_depth: blocks of the position decoder, 0 for a linear one as MP3 has it; auto: 2.

    Raises:
        PatchloomError: a combination that cannot be answered, with the reason.
    """

    pictured = GALLERY

    def __init__(
        self,
        encoder: VisionTransformer,
        withhold: dict[str, float] | Literal["auto"] = "auto",
        ask: dict[str, float] | Literal["auto"] = "auto",
        teacher: Second | Literal["auto"] = "auto",
        sigma: float = 1.0,
        momentum: float = 0.996,
        head_width: Size = "auto",
        head_out: Size = "auto",
        decoder_width: Size = "auto",
        decoder_depth: Size = "auto",
        decoder_heads: Size = "auto",
        position_depth: Size = "auto",
    ):
        super().__init__(encoder)
        self.withhold = self.choose("withhold", withhold, {"mask": 0.5, "drop_positions": 0.75}, "as DropPos, milder")
        self.ask = self.choose("ask", ask, {"pixels": 1.0, "positions": 1.0}, "what is withheld")
        asked_of = "same" if "agreement" in self.ask else "none"
        self.second = self.choose("teacher", teacher, asked_of, "goes with what is asked")
        self._check()
        self.counts = self._count(self.withhold)
        for name, count in self.counts.items():
            if name != "limit_context" and count == (self.patches if name == "mask" else 0):
                raise PatchloomError(
                    f"{name} {self.withhold[name]} takes none of the patches: raise it in --task.withhold"
                )
        degradations = [name for name in self.withhold if name in _STRENGTHS]
        kind: Degradation = degradations[0] if degradations else "none"
        strengths = {_STRENGTHS[kind]: float(self.withhold[kind])} if degradations else {}
        self.degrader = build_degrader(self, kind, min(encoder.patch_embed.img_size), strengths)
        if self.second == "second":
            self.augment = TwoViews(self.augment.size, crop="own", color="none")
        check_momentum(momentum)
        if sigma < 0:
            raise PatchloomError(f"--task.sigma must be 0 or more, not {sigma}")
        d = encoder.embed_dim
        self.momentum = momentum
        self.mask_token = nn.Parameter(torch.empty(d).normal_(std=0.02)) if "blank" in self.withhold else None
        partly = 0 < self.withhold.get("drop_positions", 0) < 1
        self.position_token = nn.Parameter(torch.empty(d).normal_(std=0.02)) if partly else None
        if "agreement" not in self.ask:
            self.refuse_unused("agreement is not asked", head_width=head_width, head_out=head_out)
        if "pixels" not in self.ask:
            self.refuse_unused("pixels are not asked", decoder_depth=decoder_depth)
        if "positions" not in self.ask:
            self.refuse_unused("positions are not asked", position_depth=position_depth)
        sizes = decoder_width, decoder_depth, decoder_heads
        builders = {
            "pixels": lambda: Pixels(self, self.degrader, self.counts, sizes),
            "positions": lambda: Positions(self, sigma, (decoder_width, position_depth, decoder_heads)),
            "agreement": lambda: Agreement(self, head_width, head_out),
        }
        self.questions = nn.ModuleDict({name: builders[name]() for name in self.ask})

    @classmethod
    def encoder_wishes(cls, options: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """No positions where all of them are withheld."""
        withhold = options["withhold"]
        if isinstance(withhold, Mapping) and withhold.get("drop_positions") == 1:
            return {"positions": ("none", "the mixture withholds them all")}
        return {}

    def _check(self) -> None:
        """Refuse what cannot be answered."""
        for option, given, known in (
            ("withhold", self.withhold, (*_SHARES, *_STRENGTHS)),
            ("ask", self.ask, _QUESTIONS),
        ):
            for name in given:
                if name not in known:
                    raise PatchloomError(f"--task.{option} knows no {name}: choose among {', '.join(known)}")
        check("task.teacher", self.second, Second)
        if not self.ask or min(self.ask.values()) <= 0:
            raise PatchloomError("--task.ask needs one question or more, each with a weight above 0")
        for name in _SHARES:
            share = self.withhold.get(name)
            if share is not None and not 0 < share < 1 and (name, share) != ("drop_positions", 1):
                raise PatchloomError(f"--task.withhold {name} is a share between 0 and 1, not {share}")
        if sum(name in _STRENGTHS for name in self.withhold) > 1:
            raise PatchloomError("--task.withhold takes one degradation of the picture at a time")
        order = list(self.withhold)
        if "limit_context" in order and "mask" in order and order.index("limit_context") < order.index("mask"):
            raise PatchloomError("limit_context chooses among the patches that enter: put it after mask")
        content = [name for name in order if name in ("mask", "blank", *_STRENGTHS)]
        if "pixels" in self.ask and not content:
            raise PatchloomError("no pixels are withheld, so asking for them teaches nothing: add mask, blank or blur")
        has_positions = patch_positions(self.encoder) is not None
        dropped = self.withhold.get("drop_positions")
        if "positions" in self.ask and dropped is None:
            raise PatchloomError(
                "no visible patch's position is withheld, and of a masked patch nothing enters that could say where it "
                "was: add drop_positions to --task.withhold"
            )
        if dropped is not None and has_positions == (dropped == 1):
            state, remedy = ("has", "none") if has_positions else ("has no", "sincos")
            raise PatchloomError(
                f"drop_positions {dropped} does not go with an encoder that {state} positions: use --positions {remedy}"
            )
        if "agreement" in self.ask and self.second == "none":
            raise PatchloomError("agreement needs somebody to agree with: give --task.teacher same or second")
        if "agreement" not in self.ask and self.second != "none":
            raise PatchloomError("nobody asks the teacher: add agreement to --task.ask, or leave out --task.teacher")
        if self.ask.keys() == {"agreement"} and self.second == "same" and not self.withhold:
            raise PatchloomError(
                "the student sees all that the teacher sees: withhold something, or give --task.teacher second"
            )

    def _count(self, withhold: Mapping[str, float]) -> dict[str, int]:
        """How many patches each withholding leaves (mask, limit_context) or takes (blank, drop_positions)."""
        counts, entering = {}, self.patches
        if "mask" in withhold:
            counts["mask"] = entering = self.visible_of(withhold["mask"])
        for name in ("blank", "drop_positions", "limit_context"):
            if name in withhold:
                kept = share_of(entering, 1 - withhold[name])
                counts[name] = max(1, kept) if name == "limit_context" else entering - kept
        taken = counts.get("blank", 0) + counts.get("drop_positions", 0)
        if "blank" in counts and taken > entering:
            raise PatchloomError(
                f"of {entering} patches that enter, {counts['blank']} would be blank and {counts['drop_positions']} "
                "without a position, so some would have neither and could answer nothing: lower one of the shares"
            )
        if counts.get("blank", 0) == entering:
            raise PatchloomError("every patch would be blank: lower blank in --task.withhold")
        return counts

    def forward(
        self, images: Tensor, others: Tensor | None = None, *, progress: float = 0.0, generator=None
    ) -> Outcome:
        """The weighted sum of all questions' losses on a batch, with the teacher's view if it is another."""
        seen = self.see(images, images if others is None else others, generator)
        losses = {name: question.loss(seen, progress) for name, question in self.questions.items()}
        metrics = {f"{name}_loss": loss.detach() for name, loss in losses.items()}
        return Outcome(sum(self.ask[name] * loss for name, loss in losses.items()), metrics)

    def see(self, images: Tensor, others: Tensor, generator: torch.Generator | None, counts=None) -> Seen:
        """Withhold from a batch, and encode what is left."""
        degraded, share = self.degrader(images, self.mean, self.std, generator)
        view = self.view(degraded, generator, counts)
        position_token = images.new_zeros(()) if self.position_token is None else self.position_token
        tokens = encode(self.encoder, view, mask_token=self.mask_token, position_token=position_token)
        masked = hidden(view.visible, self.patches)
        return Seen(images, others, view, share, tokens, masked, self.mean, self.std)

    def view(self, images: Tensor, generator: torch.Generator | None, counts=None) -> View:
        """What the encoder may know of degraded images: no patch loses both its content and its position."""
        b, device, counts = len(images), images.device, self.counts if counts is None else counts
        view = whole(images, self.patches)
        if "mask" in counts:
            visible, _ = deal(b, self.patches, (counts["mask"], self.patches - counts["mask"]), generator, device)
            view = mask_patches(view, visible.sort(dim=1).values)
        entering = view.visible.shape[1]
        blank, dropped = deal(b, entering, (counts.get("blank", 0), counts.get("drop_positions", 0)), generator, device)
        view = blank_patches(view, blank) if "blank" in counts else view
        view = drop_positions(view, dropped) if "drop_positions" in counts else view
        if "limit_context" in counts:
            view = limit_context(view, deal(b, entering, (counts["limit_context"],), generator, device)[0])
        return view

    def position_axes(self) -> dict[str, tuple[float, ...]]:
        """DropPos' grid, or MP3's η where every position is withheld."""
        if "positions" not in self.ask:
            return {}
        return CONTEXT_RATIOS if self.withhold["drop_positions"] == 1 else POSITION_GRID

    def place(self, images: Tensor, generator: torch.Generator, **ratios: float) -> Placed:
        """Predict positions at other ratios; nothing is blanked, since of a blank patch no position can be asked."""
        withhold = {name: share for name, share in self.withhold.items() if name != "blank"}
        counts = self._count(withhold | {_RATIOS[name]: ratio for name, ratio in ratios.items()})
        return self.questions["positions"].place(self.see(images, images, generator, counts))

    def after_step(self, progress: float) -> None:
        """The teacher follows, if there is one."""
        if "agreement" in self.questions:
            asked = self.questions["agreement"]
            parts = {"encoder": self.encoder, "projection": asked.projection}
            asked.teacher.follow(momentum(progress, self.momentum), **parts)

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """The first question's measure."""
        seen = self.see(images, images, generator)
        return self.questions[next(iter(self.ask))].measure(seen)

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Every question's pictures."""
        seen = self.see(images, images, generator)
        return [sheet for question in self.questions.values() for sheet in question.draw(seen)]
