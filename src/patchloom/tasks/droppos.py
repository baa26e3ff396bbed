"""DropPos: pre-training vision transformers by reconstructing dropped positions (Wang et al., NeurIPS 2023)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.nets.decoders import Decoder
from patchloom.nets.encode import has_positions, has_rotations, patch_positions, patch_rotations, rotations_at
from patchloom.nets.geometry import Geometry
from patchloom.nets.swin import Encoder
from patchloom.options.declare import takes
from patchloom.options.tasks import DropPosOptions
from patchloom.patches.partition import random_dropped, random_partition
from patchloom.patches.tokens import gather_tokens
from patchloom.questions.pixels import Pixels
from patchloom.questions.positions import DROPPOS_RATIOS, PositionPrediction, Positions, figure_3
from patchloom.questions.question import Sheet
from patchloom.system.distributed import draw
from patchloom.tasks.defaults import check_normalizable, check_smoothing, decoder_sizes, patch_decoder
from patchloom.tasks.masking import UNIFORM, check_uniform, partition, visible_of
from patchloom.tasks.task import PAPERS, Task
from patchloom.withhold.encoder_input import EncoderInput, all_patches, drop_positions, mask_patches

_ENOUGH = 16  # with fewer visible patches there is too little context to tell positions
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
        super().__init__(encoder)
        if not has_positions(encoder):
            raise PatchloomError("droppos needs an encoder with position embeddings: use --positions sincos")
        n = self.geometry.n
        self.mask_ratio = self.resolve_auto("mask_ratio", options.mask_ratio, *self._usual_mask())
        self.position_mask_ratio = options.position_mask_ratio
        usual, why = 0.1, PAPERS
        if self.mask_ratio <= 0:
            usual, why = float("inf"), "nothing is masked"
        divisor = self.resolve_auto("temperature", options.temperature, usual, why)
        check_smoothing(options.sigma, options.sigma_end)
        if options.smoothing == "program":
            _check_program_map(self.geometry)
        visible = visible_of(self.geometry, self.mask_ratio, least=2)
        check_uniform(self.geometry, self.mask_ratio)
        if options.pixels and visible == n:
            raise PatchloomError("with --task.mask_ratio 0 no pixels are hidden: leave out --task.pixels")
        g, begins, why = self.geometry, "learned", PAPERS
        if g.hierarchical:
            begins, why = "zeros", "the exported encoder has no positions either"
        self.placeholder = self.resolve_auto("placeholder", options.placeholder, begins, why)
        self.shuffle = options.shuffle
        learned = self.placeholder == "learned"
        token = learned and patch_positions(encoder) is not None
        self.position_token = nn.Parameter(torch.empty(g.token_width).normal_(std=0.02)) if token else None
        # a place, as coordinates in the encoder's units: a vector would not be a rotation
        place = learned and has_rotations(encoder)
        self.position_place = nn.Parameter(torch.zeros(1, 2)) if place else None
        sizes = decoder_sizes(self, options.decoder_width, options.decoder_depth, options.decoder_heads, (512, 2, 16))
        decoder = Decoder(g.width, n, *sizes, g.prefix)
        ratios = DROPPOS_RATIOS
        if g.hierarchical:
            ratios = DROPPOS_RATIOS | {"mask_ratio": (0.0,) if any(side % 2 for side in g.grid) else (0.0, UNIFORM)}
        self.questions["positions"] = Positions(
            g, decoder, ratios, options.sigma, options.sigma_end, options.smoothing, divisor
        )
        if options.pixels:
            if options.normalized_pixels:
                check_normalizable(g)
            decoder = patch_decoder(
                self, options.decoder_width, options.pixel_decoder_depth, options.decoder_heads, "pixel_decoder_depth"
            )
            self.questions["pixels"] = Pixels(g, decoder, options.normalized_pixels)

    def _usual_mask(self) -> tuple[float, str]:
        """Return the mask ratio that auto becomes, and the reason."""
        n, grid = self.geometry.n, self.geometry.grid
        usual = max(0.0, min(UNIFORM, 1 - _ENOUGH / n))
        if usual == UNIFORM:
            if self.geometry.hierarchical and any(side % 2 for side in grid):
                return (
                    0.0,
                    f"uniform masking needs even sides, and {grid[0]}x{grid[1]} are not: give another --img_size",
                )
            return usual, PAPERS
        if self.geometry.hierarchical:
            return 0.0, f"uniform masking would leave only {n // 4} patches visible"
        return usual, f"keeps {min(_ENOUGH, n)} patches visible"

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
        k = visible_of(self.geometry, self.mask_ratio if mask_ratio is None else mask_ratio)
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


def _check_program_map(g: Geometry) -> None:
    """Refuse a grid to which the authors' program cannot apply its map, which has a place for each pixel of a patch."""
    (rows, columns), (high, wide) = g.grid, g.p
    if rows != columns or high != wide:
        why = f"knows square images and patches only, not a grid of {rows}x{columns} patches of {high}x{wide} pixels"
    elif g.n > high * wide:
        why = f"has labels for as many patches as one has pixels, {high * wide} here, and the grid has {g.n}"
    else:
        return
    raise PatchloomError(f"--task.smoothing program: the authors' map {why}: use --task.smoothing paper")


def another_patch(visible: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
    """Return the index of another patch for each visible patch [b k], uniform over the ``n`` - 1 others."""
    step = draw(torch.randint, visible.shape, generator, visible.device, 1, n)
    return (visible + step.to(visible.device, non_blocking=True)) % n
