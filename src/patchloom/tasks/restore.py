"""Beyond Masking: demystifying token-based pre-training for vision transformers (Tian et al. 2022)."""

from __future__ import annotations

from typing import Literal

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from patchloom.data import RandomCrop
from patchloom.errors import PatchloomError
from patchloom.hints import check
from patchloom.nets.encode import encode
from patchloom.objectives.pixels import paint_patches, spread
from patchloom.objectives.restoration import answer_of, canvas_errors, restoration_targets
from patchloom.tasks.degradations import Degradation, Strength, build_degrader
from patchloom.tasks.mae import check_masks_something, pixel_decoder
from patchloom.tasks.measure import Measure
from patchloom.tasks.task import WITHHELD, Outcome, Sheet, Size, Task
from patchloom.views.tokens import (
    by_grid,
    deal,
    deal_block,
    patch_channel_statistics,
    patchify,
    put,
    take,
    unpatchify,
)
from patchloom.views.view import mask_patches, whole

Sampling = Literal["random", "block"]


class Restore(Task):
    """Part of a picture, its geometry, sharpness or colour (and patches) are withheld; the original pixels are asked.

    Args:
        encoder: the ViT to train.
        degradation: zoom_in shows the centre of a larger picture; zoom_out a small copy amid its mirror images; fisheye
            bends it; blur convolves it with a random kernel; decolorize takes colour; masked and none leave it.
        mask_ratio: share γ of the patches that is removed besides; auto: 0.75 for zoom_in and masked, else 0.
        sampling: which patches stay visible: random ones, or one block.
        canvas: shorter side in pixels of the picture of which zoom_in or fisheye shows the centre; auto: 10/7 of the
            image for zoom_in (320 for 224), the image itself for fisheye.
        band_weight: with zoom_in and masks, share of the loss on what lies around the input; the rest is on the masks.
            auto: 0.2.
        scale: share of the side that zoom_in shows (on images of the usual size) or to which zoom_out shrinks; a number
            or a list to draw from; auto: 0.714.
        twist: of fisheye; a number, or the two bounds from between which it is drawn; auto: 0.2 to 0.25.
        kernel: side of blur's kernel in pixels, odd; a number or a list to draw from; auto: 9 for 224 pixels, and in
            proportion.
        saturation: share of the colour that decolorize leaves; a number or a list to draw from; auto: 0.3.
        normalized_pixels: ask for pixels normalised in each channel of each patch instead of plain ones.
        decoder_width: width of the decoder; auto: 384, or the encoder's own below ViT-S.
        decoder_depth: transformer blocks of the decoder; auto: 4, or 2 below ViT-S.
        decoder_heads: attention heads of the decoder; auto: 6, or one for every 32 channels below ViT-S.

    Raises:
        PatchloomError: options that do not go together, or that leave nothing to ask or to see.
    """

    pictured = 100  # the paper's number of images for the mean error

    def __init__(
        self,
        encoder: VisionTransformer,
        degradation: Degradation = "zoom_in",
        mask_ratio: float | Literal["auto"] = "auto",
        sampling: Sampling = "random",
        canvas: Size = "auto",
        band_weight: float | Literal["auto"] = "auto",
        scale: Strength = "auto",
        twist: Strength = "auto",
        kernel: Strength = "auto",
        saturation: Strength = "auto",
        normalized_pixels: bool = True,
        decoder_width: Size = "auto",
        decoder_depth: Size = "auto",
        decoder_heads: Size = "auto",
    ):
        super().__init__(encoder)
        check("task.sampling", sampling, Sampling)
        strengths = {"scale": scale, "twist": twist, "kernel": kernel, "saturation": saturation}
        self.degrader = build_degrader(self, degradation, canvas, strengths)
        usual = 0.75 if degradation in ("masked", "zoom_in") else 0.0
        mask_ratio = self.choose(
            "mask_ratio", mask_ratio, usual, "the paper's" if usual else "the degradation is enough"
        )
        visible = self.visible_of(mask_ratio)
        self.block = block_of(self.grid, 1 - mask_ratio) if sampling == "block" else None
        if self.block is not None:
            visible = self.block[0] * self.block[1]
        if degradation == "masked":
            check_masks_something(self, visible, mask_ratio)
        if normalized_pixels:
            self.check_normalizable(each_channel=True)
        self.hands = (visible, self.patches - visible)
        self.augment = RandomCrop(self.degrader.canvas)
        self.normalized_pixels = normalized_pixels
        masks = visible < self.patches
        self.two_losses = masks and degradation == "zoom_in" and self.degrader.canvas != self.degrader.size
        if self.two_losses:
            band_weight = self.choose("band_weight", band_weight, 0.2, "the authors' program's")
            if not 0 <= band_weight <= 1:
                raise PatchloomError(f"--task.band_weight is a share from 0 to 1, not {band_weight}")
        else:
            self.refuse_unused("only zooming in with masks and a canvas has two losses", band_weight=band_weight)
        self.band_weight = band_weight
        # where nothing but patches is missing, the visible ones have nothing to answer
        self.asks_all = not masks or degradation not in ("masked", "none")
        sizes = decoder_width, decoder_depth, decoder_heads
        asked = visible if self.asks_all else 0
        self.decoder = pixel_decoder(self, *sizes, usual=(384, 4, 6), refills=masks, visible_asked=asked)

    def forward(self, images: Tensor, *, progress: float = 0.0, generator=None, hands=None) -> Outcome:
        """The loss on a batch of canvases; ``hands`` fixes visible and masked patches ([b k], [b m])."""
        seen = self.degrader(images, self.mean, self.std, generator).images
        visible, masked = hands or self.deal(len(images), generator, images.device)
        errors = self.errors(self.recover(seen, visible, masked), images, masked)
        metrics = {name: values.detach().mean() for name, values in errors.items() if name != "loss"}
        return Outcome(errors["loss"].mean(), metrics)

    def deal(self, b: int, generator, device) -> tuple[Tensor, Tensor]:
        """Draw the visible [b k] and the masked [b m] patches."""
        if self.block is not None:
            return deal_block(b, self.grid, self.block, generator, device)
        visible, masked = deal(b, self.patches, self.hands, generator, device)
        return visible.sort(dim=1).values, masked

    def recover(self, seen: Tensor, visible: Tensor, masked: Tensor) -> Tensor:
        """Predicted pixels of a degraded picture: [b n f] by the grid, or [b m f] where only the masked are asked."""
        view = mask_patches(whole(seen, self.patches), visible)
        answers = self.decoder(encode(self.encoder, view), visible, masked).float()
        return by_grid(answers, visible, masked) if self.asks_all else answers

    def errors(self, predicted: Tensor, images: Tensor, masked: Tensor) -> dict[str, Tensor]:
        """Squared errors [b] of an answer: "loss", and with masks in a canvas its two parts."""
        plain = images * self.std + self.mean
        if self.two_losses:
            picture = unpatchify(predicted, self.p, self.grid)
            inside, band = canvas_errors(picture, plain, self.p, masked, self.normalized_pixels)
            loss = (1 - self.band_weight) * inside + self.band_weight * band
            return {"loss": loss, "mask_loss": inside, "band_loss": band}
        asked = None if self.asks_all else masked
        target = restoration_targets(self.degrader.frame(plain), self.p, asked, self.normalized_pixels)
        return {"loss": (predicted - target).square().mean((1, 2))}

    def measure(self, images: Tensor, generator: torch.Generator) -> Measure:
        """The loss of each image beside those of patches of one colour and of what was given, put at its place.

        The holes of what was given are filled by a blur of what is around them.
        """
        seen, share = self.degrader(images, self.mean, self.std, generator)
        visible, masked = self.deal(len(images), generator, images.device)
        errors = self.errors(self.recover(seen, visible, masked), images, masked)["loss"]
        given = self.given(seen, share, visible)
        truth = self.degrader.frame(images * self.std + self.mean)
        answer = answer_of(given, truth, self.p, self.normalized_pixels)
        colour = patch_channel_statistics(patchify(truth, self.p), self.channels)[0]
        colour = torch.zeros_like(colour) if self.normalized_pixels else colour
        yardsticks = {}
        for name, guess in {"flat patches": colour, "what was given": answer}.items():
            guess = guess if self.asks_all else take(guess, masked)
            yardsticks[name] = self.errors(guess, images, masked)["loss"]
        return Measure("error", errors, yardsticks, bar=tuple(yardsticks), higher_is_better=False, form=".3f")

    def given(self, seen: Tensor, share: Tensor | None, visible: Tensor) -> Tensor:
        """The degraded picture [b c h w] in [0, 1], holes blurred over, at its place in the picture that is asked."""
        filled = seen if visible.shape[1] == self.patches else spread(seen, self.p, visible)
        return self.degrader.placed(filled * self.std + self.mean, share)

    def draw(self, images: Tensor, generator: torch.Generator) -> list[Sheet]:
        """Original | degraded | recovered, with the mean squared error over all images given."""
        seen, share = self.degrader(images, self.mean, self.std, generator)
        visible, masked = self.deal(len(images), generator, images.device)
        predicted = self.recover(seen, visible, masked)
        truth = self.degrader.frame(images * self.std + self.mean)
        shown = paint_patches(seen, self.p, masked, WITHHELD) if masked.shape[1] else seen
        columns = {"original": images, "given": shown}
        ways = {"recovered": None}
        if self.normalized_pixels:
            ways = {"recovered, own statistics": truth, "guessed statistics": self.given(seen, share, visible)}
        for heading, source in ways.items():
            columns[heading] = (self.picture(predicted, truth, masked, source) - self.mean) / self.std
        recovered = next(image for heading, image in columns.items() if heading.startswith("recovered"))
        off = (recovered - self.degrader.frame(images)).mul(self.std).square().mean()
        error = self.errors(predicted, images, masked)["loss"].mean()
        caption = (
            f"Degradation: {self.degrader.kind}, {masked.shape[1] / self.patches:.0%} of the patches masked (black). "
            f"Mean over {len(images)} images: loss {error:.3f}, mean squared error {off:.4f} in pixels from 0 to 1."
        )
        if self.normalized_pixels:
            caption += (
                " Pixels are predicted normalised in each patch. Own statistics: each patch's mean and deviation come "
                "from the original (the error is of these). Guessed: from what was given, so nothing withheld is shown."
            )
        return [Sheet("recovered", caption, columns)]

    def picture(self, predicted: Tensor, truth: Tensor, masked: Tensor, source: Tensor | None) -> Tensor:
        """Predictions as pictures [b c h w] in [0, 1]; normalised ones are put back by the statistics of ``source``."""
        asked = None if self.asks_all else masked
        if source is not None:
            mean, deviation = patch_channel_statistics(patchify(source, self.p, asked), self.channels)
            predicted = predicted * deviation + mean
        if not self.asks_all:
            predicted = put(predicted, masked, patchify(truth, self.p))
        return unpatchify(predicted, self.p, self.grid)


def block_of(grid: tuple[int, int], share: float) -> tuple[int, int]:
    """Rows and columns of a rectangle like the ``grid``, of about ``share`` of its patches."""
    rows, columns = (max(1, round(side * share**0.5)) for side in grid)
    return rows, columns
