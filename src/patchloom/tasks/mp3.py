"""MP3: position prediction as an effective pretraining strategy (Zhai et al., ICML 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.errors import PatchloomError
from patchloom.nets.build import initialize
from patchloom.nets.encode import encode, patch_positions
from patchloom.tasks.measure import Measure
from patchloom.tasks.positions_drawn import CONTEXT_RATIOS, mixed_sheet, position_measure, rebuilt_sheet
from patchloom.tasks.task import Outcome, Sheet, Task
from patchloom.views.positions import Placed
from patchloom.views.tokens import deal, share_of
from patchloom.views.view import View, drop_positions, limit_context, whole

RATIOS_DRAWN = (0.0, 0.25, 0.5, 0.75)


class Hands(NamedTuple):
    """What is dealt for a batch: context and barred patches [b m], [b n-m], and those without a position [b j]."""

    context: Tensor
    barred: Tensor
    dropped: Tensor


class MP3(Task):
    """Positions are withheld, and most patches barred from keys and values; where every patch was is asked.

    Args:
        encoder: the ViT to train; without position embeddings, unless a share of the patches keeps its position.
        context_mask_ratio: share η of the patches that may ask but serve as neither key nor value; auto: the paper's
            0.75 for ImageNet, 0.5 where there are fewer than 100 patches.
        known_positions: share of the patches that keep their position embedding (5 % in the paper's speech models).

    Raises:
        PatchloomError: ratios that leave nothing to ask or to see, or an encoder whose positions do not go with them.
    """

    def __init__(
        self,
        encoder: VisionTransformer,
        context_mask_ratio: float | Literal["auto"] = "auto",
        known_positions: float = 0.0,
    ):
        super().__init__(encoder)
        if self.patches < 2:
            raise PatchloomError("an image of one patch has no positions to ask: use smaller patches or larger images")
        usual = (0.75, "the paper's for ImageNet") if self.patches >= 100 else (0.5, "the paper's for small grids")
        self.context_mask_ratio = self.choose("context_mask_ratio", context_mask_ratio, *usual)
        if not 0 <= self.context_mask_ratio < 1 or share_of(self.patches, 1 - self.context_mask_ratio) < 1:
            raise PatchloomError(
                f"--task.context_mask_ratio {self.context_mask_ratio} leaves no patch as context: lower it"
            )
        if not 0 <= known_positions < 1:
            raise PatchloomError(f"--task.known_positions is a share from 0 to below 1, not {known_positions}")
        self.told = min(share_of(self.patches, known_positions), self.patches - 1)
        has_positions = patch_positions(encoder) is not None
        if self.told and not has_positions:
            raise PatchloomError("known positions need an encoder that has them: use --positions sincos")
        if has_positions and not self.told:
            raise PatchloomError(
                "mp3 withholds every position, so the encoder must have none: use --positions none, or let a share of "
                "the patches keep theirs with --task.known_positions"
            )
        self.head = nn.Linear(encoder.embed_dim, self.patches)
        initialize(self.head)

    @classmethod
    def encoder_wishes(cls, options: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """No positions unless some are told, and no class token: nothing would ask one."""
        wishes: dict[str, tuple[Any, str]] = {"class_token": (False, "mp3 asks patches only")}
        if not options["known_positions"]:
            wishes["positions"] = ("none", "mp3 withholds them all")
        return wishes

    def forward(self, images: Tensor, *, progress: float = 0.0, generator=None, hands: Hands | None = None) -> Outcome:
        """The loss on one batch; ``hands`` fixes context and dropped positions."""
        hands = hands or self.deal(len(images), generator, images.device)
        logits = self.answer(images, hands)
        truth = hands.dropped
        asked = logits.gather(1, truth[..., None].expand(-1, -1, self.patches)) if self.told else logits
        loss = F.cross_entropy(asked.flatten(0, 1).float(), truth.flatten())
        with torch.no_grad():
            found = {f"{name}_accuracy": values.mean() for name, values in self.accuracies(logits, hands).items()}
        return Outcome(loss, found)

    def deal(self, b: int, generator, device, context_mask_ratio: float | None = None) -> Hands:
        """Hands for ``b`` images; by default at the task's η."""
        ratio = self.context_mask_ratio if context_mask_ratio is None else context_mask_ratio
        serving = max(1, share_of(self.patches, 1 - ratio))
        context, barred = deal(b, self.patches, (serving, self.patches - serving), generator, device)
        _, dropped = deal(b, self.patches, (self.told, self.patches - self.told), generator, device)
        return Hands(context, barred, dropped.sort(dim=1).values)

    def view(self, images: Tensor, hands: Hands) -> View:
        """What the encoder may know: patches without positions, few of which serve as keys and values."""
        view = drop_positions(whole(images, self.patches), hands.dropped)
        return limit_context(view, hands.context) if hands.barred.shape[1] else view

    def answer(self, images: Tensor, hands: Hands) -> Tensor:
        """Logits [b n n]: where each patch of the grid was."""
        tokens = encode(self.encoder, self.view(images, hands), position_token=images.new_zeros(()))
        return self.head(tokens[:, self.prefix :])

    def position_axes(self) -> dict[str, tuple[float, ...]]:
        """The η at which the paper measures positions, whatever the task's own."""
        return CONTEXT_RATIOS

    def place(self, images: Tensor, generator, context_mask_ratio: float | None = None) -> Placed:
        """Predict positions, by default at the task's η, for measures and pictures."""
        hands = self.deal(len(images), generator, images.device, context_mask_ratio)
        return self.placed(self.answer(images, hands), hands)

    def placed(self, logits: Tensor, hands: Hands) -> Placed:
        """Logits [b n n] beside what was asked."""
        everywhere = torch.arange(self.patches, device=logits.device).expand(len(logits), -1)
        return Placed(everywhere, torch.zeros_like(everywhere).scatter(1, hands.dropped, 1).bool(), logits)

    def accuracies(self, logits: Tensor, hands: Hands) -> dict[str, Tensor]:
        """Top-1 and top-5 accuracy [b] over the patches asked, for context and other patches apart.

        A kind of which there are no patches is left out.
        """
        truth = torch.arange(self.patches, device=logits.device).expand(len(logits), -1)
        best = logits.topk(min(5, self.patches), dim=-1).indices == truth[..., None]
        asked = torch.zeros_like(truth).scatter(1, hands.dropped, 1)
        among_context = torch.zeros_like(truth).scatter(1, hands.context, 1)
        found = {}
        for kind, those in {"context": among_context, "other": 1 - among_context}.items():
            if kind == "other" and not hands.barred.shape[1]:
                continue
            counted = asked * those
            for name, right in {f"{kind}_top1": best[..., 0], f"{kind}_top5": best.any(-1)}.items():
                # an image all of whose patches of this kind were told counts nothing
                found[name] = (right * counted).sum(1) / counted.sum(1).clamp_min(1)
        return found

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """Share of the positions that are found, beside the exact chance level; context and others apart as details."""
        hands = self.deal(len(images), generator, images.device)
        logits = self.answer(images, hands)
        return replace(position_measure(self.placed(logits, hands)), details=self.accuracies(logits, hands))

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Images rebuilt by putting each patch where it was predicted, at several η; and two images in one context."""
        rebuilt = {f"η = {ratio}": self.place(images, generator, ratio).places() for ratio in RATIOS_DRAWN}
        sheets = [rebuilt_sheet(self, images, rebuilt, generator)]
        if len(images) > 1 and not self.told:
            sheets.append(mixed_sheet(self, images, self.place_mixed(images, generator)))
        return sheets

    def place_mixed(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Predicted places [b n] of each image's patches when it shares one context with the image before it.

        Half of the context's patches are each image's, as many in all as one image has.
        """
        both = torch.cat([images, images.roll(1, 0)], dim=2)  # one image above the other: a grid of twice the rows
        half = max(1, self.patches // 2)
        mine, theirs = (deal(len(images), self.patches, (half,), generator, images.device)[0] for _ in range(2))
        view = limit_context(whole(both, 2 * self.patches), torch.cat([mine, theirs + self.patches], dim=1))
        tokens = encode(self.encoder, view)
        return self.head(tokens[:, self.prefix : self.prefix + self.patches]).argmax(-1)
