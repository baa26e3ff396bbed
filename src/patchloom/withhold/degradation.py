"""Degradations of the image, with strengths drawn per image (Beyond Masking)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from patchloom.options.tasks import CanvasFit, CropPlace, DegradationKind, Fill, KernelInit, KernelOf
from patchloom.patches.partition import random_block
from patchloom.sizes import scaled
from patchloom.withhold import canvas, degrade
from patchloom.withhold.degrade import (
    draw_from,
    draw_index,
    draw_uniform,
    random_corners,
    random_kernels,
    random_others,
    random_places,
)
from patchloom.withhold.encoder_input import EncoderInput, check_images, mask_patches

_AROUND = {"black": " on black", "images": " amid patches of other images", "none": " without padding"}


@dataclass(frozen=True)
class Degradation:
    """Degradation with strengths, drawn per image.

    Attributes:
        kind: kind of degradation; masked and none leave the image unchanged.
        size: height and width of the encoder's input.
        canvas: height and width of the incoming images; the input may be a part of them.
        strengths: values to draw from: fractions of the side, bounds of the twist or the amplitude, sides of kernels,
            or saturations.
        patch: rows and columns of pixels of the encoder's patches.
        zoom_place: part of the image that zoom_in shows.
        fill: surroundings of the small image of zoom_out; none: only the patches that it covers enter.
        kernel_init: initialisation of the kernels of blur.
        kernel_of: one blur kernel per channel of an image, or one for all channels.
        canvas_fit: reduction of a bent canvas to ``size``.
    """

    kind: DegradationKind
    size: tuple[int, int]
    canvas: tuple[int, int]
    strengths: tuple[float, ...]
    patch: tuple[int, int] = (1, 1)
    zoom_place: CropPlace = "centre"
    fill: Fill = "mirror"
    kernel_init: KernelInit = "normal"
    kernel_of: KernelOf = "channel"
    canvas_fit: CanvasFit = "resize"

    @property
    def changes_pixels(self) -> bool:
        """Whether visible patches lose content as well, so that they have something to predict."""
        return self.kind not in ("masked", "none")

    @property
    def padded(self) -> bool:
        """Whether every patch of the encoder's image enters; False if zoom_out fills nothing."""
        return self.kind != "zoom_out" or self.fill != "none"

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the patches that enter, before masking."""
        share = 1.0 if self.padded else self.strengths[0]
        return scaled(self._whole_grid, share)

    @property
    def _whole_grid(self) -> tuple[int, int]:
        return self.size[0] // self.patch[0], self.size[1] // self.patch[1]

    @property
    def title(self) -> str:
        """Description of the degradation for captions."""
        if self.kind == "zoom_in":
            return self.kind + " at a random place" * (self.zoom_place == "random")
        if self.kind == "blur":
            said = self.kind + f" by {self.kernel_init} kernels" * (self.kernel_init != "normal")
            return said + ", alike for all channels" * (self.kernel_of == "image")
        if self.kind in ("fisheye", "wave") and self.canvas != self.size:
            return f"{self.kind} of a larger picture, {'resized' if self.canvas_fit == 'resize' else 'cropped'}"
        return self.kind + _AROUND.get(self.fill, "") * (self.kind == "zoom_out")

    def __call__(
        self, given: EncoderInput, mean: Tensor, std: Tensor, generator: torch.Generator | None = None
    ) -> EncoderInput:
        """Degrade the images of an input; fewer patches enter if zoom_out fills nothing.

        Args:
            given: input with all patches of images [b c H W] of the canvas's size.
            mean, std: [c 1 1] statistics that normalise them.
            generator: random generator for the strengths.
        """
        images = given.images
        check_images(images, len(mean), self.canvas, "this degradation")
        b, device = len(images), images.device
        if self.kind == "zoom_in":
            return self._zoomed_in(given, generator)
        if self.kind == "zoom_out":
            return self._zoomed_out(given, -mean / std, generator)
        if self.kind == "fisheye":
            centre = draw_uniform(-1, 1, (b, 2), generator, device)
            twist = draw_uniform(min(self.strengths), max(self.strengths), (b,), generator, device)
            return self._fitted(given, degrade.fisheye(images, centre, twist))
        if self.kind == "wave":
            amplitude = draw_uniform(min(self.strengths), max(self.strengths), (b,), generator, device)
            phase = draw_uniform(0, 1, (b,), generator, device)
            return self._fitted(given, degrade.wave(images, amplitude, phase))
        if self.kind == "blur":
            sides = [round(side) for side in self.strengths]
            which = draw_index(len(sides), b, generator, device)
            channels = images.shape[1] if self.kernel_of == "channel" else 1
            kernels = random_kernels(sides, which, generator, device, self.kernel_init, channels)
            images = degrade.blur(images, kernels)
        elif self.kind == "decolorize":
            saturation = draw_from(self.strengths, b, generator, device)
            plain = (images * std + mean).clamp(0, 1)
            images = (degrade.decolorize(plain, saturation) - mean) / std
        return replace(given, images=images)

    def _zoomed_in(self, given: EncoderInput, generator: torch.Generator | None) -> EncoderInput:
        images, corner, on_canvas = given.images, None, self.canvas != self.size
        if on_canvas:
            share = torch.full((len(images),), self.size[0] / self.canvas[0], device=images.device)
        else:
            share = draw_from(self.strengths, len(images), generator, images.device)
        if self.zoom_place == "random":
            room = [whole - seen for whole, seen in zip(self.canvas, self._seen(share).unbind(1), strict=True)]
            corner = random_corners(torch.stack(room, 1), generator)
        if not on_canvas:
            images = degrade.zoom_in(images, share, corner)
        elif corner is None:
            images = canvas.centre_crop(images, self.size)
        else:
            images = canvas.crop_at(images, self.size, corner)
        return replace(given, images=images, side_share=share, corner=corner)

    def _zoomed_out(self, given: EncoderInput, black: Tensor, generator: torch.Generator | None) -> EncoderInput:
        images, p, around = given.images, self.patch, None
        b, device = len(images), images.device
        if not self.padded:
            whole, (rows, columns) = self._whole_grid, self.grid
            covered, empty = random_block(b, whole, (rows, columns), generator, device)
            which, corner = torch.zeros(b, dtype=torch.int64, device=device), covered[:, 0]
            places = corner // whole[1] * p[0], corner % whole[1] * p[1]
            # the surroundings are in none of the patches that enter
            images = canvas.zoom_out(images, [(rows * p[0], columns * p[1])], which, *places)
            return mask_patches(replace(given, images=images), covered, empty)
        sizes = [scaled(self.size, one) for one in self.strengths]
        which = draw_index(len(sizes), b, generator, device)
        places = random_places(sizes, which, self.size, generator, device)
        if self.fill == "black":
            around = black
        elif self.fill == "images":
            around = canvas.patches_of_others(images, p, *random_others(b, given.visible.shape[1], generator, device))
        return replace(given, images=canvas.zoom_out(images, sizes, which, *places, around))

    def _fitted(self, given: EncoderInput, bent: Tensor) -> EncoderInput:
        """Reduce bent images [b c H W] to the size of the input."""
        if self.canvas == self.size:
            return replace(given, images=bent)
        if self.canvas_fit == "crop":
            return replace(given, images=canvas.centre_crop(bent, self.size))
        share = torch.full((len(bent),), self.canvas[0] / self.size[0], device=bent.device)
        return replace(given, images=canvas.shrink(bent, self.size), side_share=share)

    def _seen(self, side_share: Tensor) -> Tensor:
        """Return height and width [b 2] in pixels of the part of the canvas that zoom_in shows."""
        if self.canvas == self.size:
            return degrade.seen_pixels(side_share, self.size)
        sides = [torch.full_like(side_share, side) for side in self.size]
        return torch.stack(sides, 1)

    def frame(self, images: Tensor) -> Tensor:
        """Return the clean target images [b c h w] of canvas images [b c H W]."""
        if self.canvas == self.size:
            return images
        if self.kind in ("fisheye", "wave"):
            return canvas.centre_crop(images, self.size)
        return canvas.resize_area(images, self.size)

    def in_frame(self, images: Tensor, side_share: Tensor | None, corner: Tensor | None = None) -> Tensor:
        """Return the input [b c h w] at its place in the target images, edges extended: a guess that needs no learning.

        Args:
            images: [b c h w].
            side_share: [b] fraction of the target's side that they show, above 1 if they show more; None: all of it.
            corner: [b 2] row and column of their upper left pixel on the canvas; None: they show its centre.
        """
        if side_share is None:
            return images
        scale = torch.zeros(len(images), 2, 3, device=images.device)
        scale[:, 0, 0] = scale[:, 1, 1] = 1 / side_share
        if corner is not None:
            seen = self._seen(side_share).unbind(1)
            for axis, whole in enumerate(self.canvas):  # its centre in [-1, 1]; x, the column, comes first
                middle = (2 * corner[:, axis] + seen[axis]) / whole - 1
                scale[:, 1 - axis, 2] = -middle / side_share
        return degrade.sample_affine(images.float(), scale, images.shape[2:])
