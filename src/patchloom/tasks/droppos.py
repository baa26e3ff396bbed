"""DropPos: pre-training vision transformers by reconstructing dropped positions (Wang et al., NeurIPS 2023)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from patchloom.nets.decoders import Decoder
from patchloom.nets.encode import patch_positions, patch_rotations, rotations_at
from patchloom.nets.swin import Encoder
from patchloom.options.declare import takes
from patchloom.options.refusals import PAPERS, POSITION_DECODER, UNIFORM
from patchloom.options.tasks import DropPosOptions, Placeholder
from patchloom.patches.partition import random_dropped, random_partition
from patchloom.patches.tokens import gather_tokens
from patchloom.questions.pixels import Pixels
from patchloom.questions.positions import DROPPOS_RATIOS, PositionPrediction, Positions, figure_3
from patchloom.questions.question import Sheet
from patchloom.sizes import share_of
from patchloom.system.distributed import draw
from patchloom.tasks.defaults import decoder_sizes, patch_decoder
from patchloom.tasks.masking import partition
from patchloom.tasks.task import Task
from patchloom.withhold.encoder_input import EncoderInput, all_patches, drop_positions, mask_patches

_MOST_DROPPED = 0.95  # fraction γ_pos of Fig. 3


class DropPos(Task):
    """Prediction of dropped positions, after other patches were removed.

    A Swin (Table S2) is masked uniformly: one patch of each 2x2 stays, where a patch is the area of one token of its
    last stage. That token predicts the position.

    Args:
        encoder: ViT or Swin to train.

    Raises:
        PatchloomError: ratios that leave nothing to predict or to see, or an encoder without position embeddings.
    """

    serves_swin = True

    @takes(DropPosOptions)
    def __init__(self, encoder: Encoder, options: DropPosOptions) -> None:
        super().__init__(encoder, options)
        g = self.geometry
        self.mask_ratio = self.resolve_auto("mask_ratio", options.mask_ratio, *options.usual_mask(g))
        self.position_mask_ratio = options.position_mask_ratio
        usual = (0.1, PAPERS) if self.mask_ratio > 0 else (float("inf"), "nothing is masked")
        divisor = self.resolve_auto("temperature", options.temperature, *usual)
        begins: Placeholder = "zeros" if g.hierarchical else "learned"
        why = "the exported encoder has no positions either" if g.hierarchical else PAPERS
        self.placeholder = self.resolve_auto("placeholder", options.placeholder, begins, why)
        self.shuffle = options.shuffle
        learned = self.placeholder == "learned"
        token = learned and g.positions != "none"
        self.position_token = nn.Parameter(torch.empty(g.token_width).normal_(std=0.02)) if token else None
        # a place, as coordinates in the encoder's units: a vector would not be a rotation
        self.position_place = nn.Parameter(torch.zeros(1, 2)) if learned and g.rotations else None
        width, heads = options.decoder_width, options.decoder_heads
        decoder = Decoder(
            g.width, g.n, *decoder_sizes(self, width, options.decoder_depth, heads, POSITION_DECODER), g.prefix
        )
        ratios = DROPPOS_RATIOS
        if g.hierarchical:
            ratios = DROPPOS_RATIOS | {"mask_ratio": (0.0,) if any(side % 2 for side in g.grid) else (0.0, UNIFORM)}
        self.questions["positions"] = Positions(
            g, decoder, ratios, options.sigma, options.sigma_end, options.smoothing, divisor
        )
        if options.pixels:
            pixels = patch_decoder(self, width, options.pixel_decoder_depth, heads, "pixel_decoder_depth")
            self.questions["pixels"] = Pixels(g, pixels, options.normalized_pixels)

    def given(
        self,
        images: Tensor,
        generator: torch.Generator | None = None,
        *,
        mask_ratio: float | None = None,
        position_mask_ratio: float | None = None,
    ) -> EncoderInput:
        """Return the visible patches with some of their positions; at least one position is dropped."""
        b, n, device = len(images), self.geometry.n, images.device
        k = max(1, share_of(n, 1 - (self.mask_ratio if mask_ratio is None else mask_ratio)))
        visible, masked = partition(self.geometry, b, k, generator, device)
        if not self.shuffle:
            visible = visible.sort(dim=1).values
        elif self.geometry.hierarchical:  # uniform masks are not drawn in random order
            visible = gather_tokens(visible, random_partition(b, k, (k,), generator, device)[0])
        ratio = self.position_mask_ratio if position_mask_ratio is None else position_mask_ratio
        dropped = random_dropped(b, k, ratio, generator, device)
        return drop_positions(mask_patches(all_patches(images, n), visible, masked), dropped)

    def placeholders(self, given: EncoderInput, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the stand-in for a dropped position, and for a dropped rotation if the encoder has them."""
        if self.placeholder == "learned":
            found: dict[str, Tensor] = {} if self.position_token is None else {"position_token": self.position_token}
            if self.position_place is not None:
                found["rotation"] = rotations_at(self.encoder, self.position_place)[:, None]
            return found
        if self.placeholder == "zeros":  # without a stand-in a dropped rotation is by no angle
            return {"position_token": given.images.new_zeros(())}
        foreign = another_patch(given.visible, self.geometry.n, generator)
        table, rotations = patch_positions(self.encoder), patch_rotations(self.encoder)
        found = {} if table is None else {"position_token": table[foreign]}
        return found if rotations is None else {**found, "rotation": rotations[:, :, foreign].transpose(1, 2)}

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Draw the answers with as much withheld as in training, then the paper's Fig. 3 of images."""
        question = cast(Positions, self.questions["positions"])
        encoded = self.encode(images, self.given(images, generator), generator)
        sheets = question.sheets(encoded)
        if not self.modality.column_seconds:

            def predict(mask_ratio: float) -> PositionPrediction:
                given = self.given(images, generator, mask_ratio=mask_ratio, position_mask_ratio=_MOST_DROPPED)
                return question.predict(self.encode(images, given, generator))

            sheets += figure_3(self.geometry, images, predict, generator, question.ratios["mask_ratio"])
        if "pixels" in self.questions:
            sheets += self.questions["pixels"].sheets(encoded)
        return sheets


def another_patch(visible: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
    """Return the index of another patch for each visible patch [b k], uniform over the ``n`` - 1 others."""
    step = draw(torch.randint, visible.shape, generator, visible.device, 1, n)
    return (visible + step.to(visible.device, non_blocking=True)) % n
