"""DropPos: pre-training vision transformers by reconstructing dropped positions (Wang et al., NeurIPS 2023)."""

from __future__ import annotations

from typing import Literal

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchloom.errors import PatchloomError
from patchloom.hints import check
from patchloom.nets.decode import Decoder
from patchloom.nets.encode import encode, patch_positions
from patchloom.nets.teacher import aside
from patchloom.objectives.pixels import pixel_loss, pixel_targets
from patchloom.objectives.positions import (
    affinity,
    foreign_places,
    loss_weights,
    position_cross_entropy,
    weighted_mean,
)
from patchloom.tasks.mae import pixel_decoder, recovery_sheet
from patchloom.tasks.measure import Measure
from patchloom.tasks.positions_drawn import POSITION_GRID, position_measure, position_sheets
from patchloom.tasks.task import Outcome, Sheet, Size, Task
from patchloom.views.positions import Placed, deal_dropped, smoothed_positions
from patchloom.views.tokens import deal
from patchloom.views.view import View, drop_positions, mask_patches, whole

_ENOUGH = 16  # visible patches below which there is too little context to tell positions

Placeholder = Literal["learned", "zeros", "foreign"]


class DropPos(Task):
    """Patches are removed, and the positions of most visible ones are dropped; where each was is asked.

    Args:
        encoder: the ViT to train.
        mask_ratio: share γ of the patches that is removed; auto: the paper's 0.75, lowered until 16 patches stay.
        position_mask_ratio: share γ_pos of the visible patches whose position embedding is dropped.
        sigma: σ of position smoothing at the start; falls linearly to 0 over the training (Eq. 7). 0 switches it off.
        squared_distances: smooth as the authors' program does (squared distances, columns normalised), not as Eq. 5-6.
        temperature: τ of attentive reconstruction (Eq. 9); inf weighs all patches alike. auto: the paper's 0.1, but
            inf where nothing is masked, since its look at the whole image would add a third to the step.
        placeholder: what stands for a dropped position: a learned vector, zeros, or another patch's position.
        shuffle: let visible patches enter in random order instead of row by row. No order changes the mathematics.
        pixels: also ask for the pixels of the removed patches, with MAE's decoder; the two losses are added.
        normalized_pixels: with ``pixels``, ask for pixels normalised within each patch.
        decoder_width: width of the decoders; auto: 512, or the encoder's own below ViT-S.
        decoder_depth: transformer blocks of the position decoder; auto: 2.
        decoder_heads: attention heads of the decoders; auto: 16, or one for every 32 channels below ViT-S.
        pixel_decoder_depth: transformer blocks of the pixel decoder; auto: 8, or 2 below ViT-S.

    Raises:
        PatchloomError: ratios that leave nothing to ask or to see, or an encoder without position embeddings.
    """

    def __init__(
        self,
        encoder: VisionTransformer,
        mask_ratio: float | Literal["auto"] = "auto",
        position_mask_ratio: float = 0.75,
        sigma: float = 1.0,
        squared_distances: bool = False,
        temperature: float | Literal["auto"] = "auto",
        placeholder: Placeholder = "learned",
        shuffle: bool = False,
        pixels: bool = False,
        normalized_pixels: bool = True,
        decoder_width: Size = "auto",
        decoder_depth: Size = "auto",
        decoder_heads: Size = "auto",
        pixel_decoder_depth: Size = "auto",
    ):
        super().__init__(encoder)
        check("task.placeholder", placeholder, Placeholder)
        if patch_positions(encoder) is None:
            raise PatchloomError("droppos needs an encoder with position embeddings, and this one has none")
        if not 0 < position_mask_ratio <= 1:
            raise PatchloomError(f"--task.position_mask_ratio must lie in (0, 1], not at {position_mask_ratio}")
        usual = max(0.0, min(0.75, 1 - _ENOUGH / self.patches))
        why = "the paper's" if usual == 0.75 else f"lets {min(_ENOUGH, self.patches)} patches stay visible"
        mask_ratio = self.choose("mask_ratio", mask_ratio, usual, why)
        usual, why = (
            (0.1, "the paper's") if mask_ratio > 0 else (float("inf"), "nothing is masked, so no guide is needed")
        )
        temperature = self.choose("temperature", temperature, usual, why)
        if temperature <= 0:
            raise PatchloomError(f"--task.temperature must be above 0 (inf switches it off), not {temperature}")
        if sigma < 0:
            raise PatchloomError(f"--task.sigma must be 0 or more, not {sigma}")
        self.mask_ratio, self.position_mask_ratio = mask_ratio, position_mask_ratio
        visible = self.visible_of(mask_ratio, least=2)
        if pixels and visible == self.patches:
            raise PatchloomError("with --task.mask_ratio 0 no pixels are hidden: leave out --task.pixels")
        self.sigma, self.squared_distances, self.temperature = sigma, squared_distances, temperature
        if temperature < float("inf"):
            self.half_aside = False
        self.placeholder, self.shuffle, self.normalized_pixels = placeholder, shuffle, normalized_pixels
        d = encoder.embed_dim
        self.position_token = nn.Parameter(torch.empty(d).normal_(std=0.02)) if placeholder == "learned" else None
        sizes = self.decoder_sizes(decoder_width, decoder_depth, decoder_heads, (512, 2, 16))
        self.decoder = Decoder(d, self.patches, *sizes, self.prefix)
        self.pixel_decoder = None
        if pixels:
            if normalized_pixels:
                self.check_normalizable()
            depth_option = "pixel_decoder_depth"
            self.pixel_decoder = pixel_decoder(self, decoder_width, pixel_decoder_depth, decoder_heads, depth_option)

    def forward(self, images: Tensor, *, progress: float = 0.0, generator=None, hands=None) -> Outcome:
        """The loss on one batch; ``hands`` fixes the draw: visible [b k], masked [b m], dropped [b j] among visible."""
        visible, masked, dropped = hands or self.deal(len(images), generator, images.device)
        view = self.view(images, visible, dropped)
        tokens = self.encode(view, generator)
        logits = self.decoder(tokens)
        labels = smoothed_positions(self.grid, self.sigma * (1 - progress), self.squared_distances, images.device)
        weights = loss_weights(view.dropped, visible, self.affinities(images))
        loss = weighted_mean(position_cross_entropy(logits, labels[visible]), weights)
        found = (logits.detach().argmax(-1) == visible) & view.dropped  # picking the dropped would wait for a GPU
        metrics = {"position_accuracy": found.sum() / view.dropped.sum()}
        if self.pixel_decoder is not None:
            predicted = self.pixel_decoder(tokens, visible, masked)
            pixels = pixel_loss(predicted, pixel_targets(images, self.p, masked, self.normalized_pixels))
            metrics |= {"position_loss": loss.detach(), "pixel_loss": pixels.detach()}
            loss = loss + pixels
        return Outcome(loss, metrics)

    def deal(self, b: int, generator, device, mask_ratio=None, position_mask_ratio=None) -> tuple[Tensor, ...]:
        """Draw what is visible [b k], masked [b n-k], and dropped [b j] (places among the visible).

        At least one position is dropped. By default the ratios are the task's.
        """
        visible = self.visible_of(self.mask_ratio if mask_ratio is None else mask_ratio)
        ratio = self.position_mask_ratio if position_mask_ratio is None else position_mask_ratio
        seen, masked = deal(b, self.patches, (visible, self.patches - visible), generator, device)
        if not self.shuffle:
            seen = seen.sort(dim=1).values
        return seen, masked, deal_dropped(b, visible, ratio, generator, device)

    def view(self, images: Tensor, visible: Tensor, dropped: Tensor) -> View:
        """What the encoder may know: the visible patches, and only some of their positions."""
        return drop_positions(mask_patches(whole(images, self.patches), visible), dropped)

    def encode(self, view: View, generator: torch.Generator | None = None) -> Tensor:
        """Features [b prefix+k d], with the placeholder where positions were dropped."""
        if self.placeholder == "learned":
            token = self.position_token
        elif self.placeholder == "zeros":
            token = view.images.new_zeros(())
        else:  # foreign
            token = patch_positions(self.encoder)[foreign_places(view.visible, self.patches, generator)]
        return encode(self.encoder, view, position_token=token)

    def affinities(self, images: Tensor) -> Tensor | None:
        """Weights [b n] of attentive reconstruction from the encoder's view of the whole image, without gradient."""
        if self.temperature == float("inf"):
            return None
        training = self.encoder.training
        self.encoder.eval()  # drop path would make noise of the weights
        with aside(self, images):
            features = encode(self.encoder, whole(images, self.patches)).float()
        self.encoder.train(training)
        return affinity(features, self.prefix, self.temperature, self.encoder.has_class_token)

    def position_axes(self) -> dict[str, tuple[float, ...]]:
        """The shares of patches and of positions of the paper's Tables S3-S5."""
        return POSITION_GRID

    def place(self, images: Tensor, generator, mask_ratio=None, position_mask_ratio=None) -> Placed:
        """Predict positions, by default at the task's ratios, for measures and pictures."""
        visible, _, dropped = self.deal(len(images), generator, images.device, mask_ratio, position_mask_ratio)
        view = self.view(images, visible, dropped)
        return Placed(visible, view.dropped, self.decoder(self.encode(view, generator)))

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """Share of the dropped positions that are found, beside the exact chance level."""
        return position_measure(self.place(images, generator))

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """The picture of the paper's Fig. 3, and the images rebuilt by putting patches where they were predicted."""
        sheets = position_sheets(self, images, generator)
        if self.pixel_decoder is not None:
            visible, masked, dropped = self.deal(len(images), generator, images.device)
            tokens = self.encode(self.view(images, visible, dropped), generator)
            sheets.append(recovery_sheet(self, images, visible, masked, self.pixel_decoder(tokens, visible, masked)))
        return sheets
