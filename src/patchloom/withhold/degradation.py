"""A degradation of the picture with its strengths, of which each image draws its own (Beyond Masking)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.withhold import degrade
from patchloom.withhold.degrade import centre_crop
from patchloom.withhold.draws import draw_from, draw_index, draw_uniform, random_kernels, random_places
from patchloom.withhold.encoder_input import EncoderInput

Kind = Literal["masked", "zoom_in", "zoom_out", "fisheye", "blur", "decolorize", "none"]


@dataclass(frozen=True)
class Degradation:
    """One degradation with its strengths, of which each image draws its own.

    Attributes:
        kind: which one; masked and none leave the picture as it is.
        size: height and width that the encoder sees.
        canvas: height and width of the images that come, of which the encoder may see a part.
        strengths: what is drawn from: shares of the side, bounds of the twist, sides of kernels, or saturations.
    """

    kind: Kind
    size: tuple[int, int]
    canvas: tuple[int, int]
    strengths: tuple[float, ...]

    @property
    def changes_pixels(self) -> bool:
        """Whether visible patches lose something, too, so that they have something to answer."""
        return self.kind not in ("masked", "none")

    def __call__(
        self, given: EncoderInput, mean: Tensor, std: Tensor, generator: torch.Generator | None = None
    ) -> EncoderInput:
        """The same patches of degraded images.

        Args:
            given: with images [b c H W] of the canvas's size.
            mean, std: [c 1 1] by which they are normalised.
            generator: source of the strengths.
        """
        images = given.images
        b, device = len(images), images.device
        if self.kind == "zoom_in":
            if self.canvas != self.size:
                side_share = torch.full((b,), self.size[0] / self.canvas[0], device=device)
                return replace(given, images=centre_crop(images, self.size), side_share=side_share)
            side_share = draw_from(self.strengths, b, generator, device)
            return replace(given, images=degrade.zoom_in(images, side_share), side_share=side_share)
        if self.kind == "zoom_out":
            sizes = [tuple(max(1, round(side * one)) for side in self.size) for one in self.strengths]
            which = draw_index(len(sizes), b, generator, device)
            places = random_places(sizes, which, self.size, generator, device)
            images = degrade.zoom_out(images, sizes, which, *places)
        elif self.kind == "fisheye":
            centre = draw_uniform(-1, 1, (b, 2), generator, device)
            twist = draw_uniform(min(self.strengths), max(self.strengths), (b,), generator, device)
            images = centre_crop(degrade.fisheye(images, centre, twist), self.size)
        elif self.kind == "blur":
            sides = [round(side) for side in self.strengths]
            kernels = random_kernels(sides, draw_index(len(sides), b, generator, device), generator, device)
            images = degrade.blur(images, kernels)
        elif self.kind == "decolorize":
            saturation = draw_from(self.strengths, b, generator, device)
            plain = (images * std + mean).clamp(0, 1)
            images = (degrade.decolorize(plain, saturation) - mean) / std
        return replace(given, images=images)

    def frame(self, images: Tensor) -> Tensor:
        """The clean picture [b c h w] that is to be recovered from canvas images [b c H W]."""
        if self.canvas == self.size:
            return images
        if self.kind == "fisheye":
            return centre_crop(images, self.size)
        return F.interpolate(images, self.size, mode="area")

    def in_frame(self, images: Tensor, side_share: Tensor | None) -> Tensor:
        """What was seen [b c h w] at its place in the frame, its edges drawn out: a guess that needs no learning.

        Args:
            images: [b c h w].
            side_share: [b] share of the frame's side that they show; None: all of it.
        """
        if side_share is None:
            return images
        scale = torch.zeros(len(images), 2, 3, device=images.device)
        scale[:, 0, 0] = scale[:, 1, 1] = 1 / side_share
        grid = F.affine_grid(scale, list(images.shape), align_corners=False)
        return F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
