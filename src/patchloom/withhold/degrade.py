"""Degraded pictures: zoomed in, distorted, blurred, with less colour. Beyond Masking asks for the original.

What is smaller than its canvas, such as a picture that is zoomed out, is in `patchloom.withhold.canvas`.

Every function takes a batch, works where the batch is, and treats each image by its own draw; no image sees another.
Draws are arguments: places, centres, kernels, which `patchloom.withhold.draws` makes from a generator. Shapes
never depend on values and no value is read back, so that a GPU need not stop and wait; for the same reason only shapes
and plain numbers are checked, never what is inside a tensor.

Letters: b batch, c channels, h w height width of the images, k side of a kernel.
"""

from __future__ import annotations

from math import pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.withhold.checks import check_images, check_odd, check_shape


def zoom_in(images: Tensor, scale: float | Tensor, corner: Tensor | None = None) -> Tensor:
    """A part of each image, enlarged to the whole (Beyond Masking, degradation a).

    Of h x w pixels the part has `seen_pixels`. Enlarging is bilinear: pixels between others, never beyond their range.
    That is also what an antialiased resize does, which differs only where it shrinks.

    Args:
        images: [b c h w].
        scale: share of the side that is seen, in (0, 1]; one for all, or [b].
        corner: [b 2] row and column of the part's upper left pixel (appendix A.3); None: the part is the centre.

    Raises:
        ValueError: the scale is outside (0, 1], or there is not one per image.
    """
    check_images(images)
    b, _, h, w = images.shape
    if not isinstance(scale, Tensor):
        if not 0 < scale <= 1:
            raise ValueError(f"zooming in shows a share of the side in (0, 1], not {scale}")
        scale = torch.full((b,), float(scale), device=images.device)
    check_shape("scale", scale, (b,))
    if corner is not None:
        check_shape("corner", corner, (b, 2))
    seen = seen_pixels(scale, (h, w))
    starts = (None, None) if corner is None else corner.unbind(1)
    rows, columns = (_enlarged(*one) for one in zip((h, w), seen.unbind(1), starts, strict=True))
    grid = torch.stack(torch.broadcast_tensors(columns[:, None, :], rows[:, :, None]), -1)
    return _sample(images, grid, padding_mode="border", align_corners=False)


def seen_pixels(scale: Tensor, size: tuple[int, int]) -> Tensor:
    """Height and width [b 2] in whole pixels of the share ``scale`` [b] of images of ``size`` (h, w); at least 1."""
    return torch.stack([(scale.float() * side).round().clamp(1, side) for side in size], 1)


def fisheye(images: Tensor, centre: Tensor, twist: Tensor) -> Tensor:
    """Bend each image around a point (Beyond Masking, degradation c).

    The pixel at g shows what was at ``g + (centre - g) * |centre - g| * twist``, sampled bilinearly. Coordinates go
    from -1 at the first pixel's middle to 1 at the last one's. A positive twist leaves the centre as it is, enlarges
    more the further away, and shows nothing from outside as long as ``|centre - g| * twist <= 1``; beyond 1/2 it shows
    again, mirrored, what lies nearer. What does come from outside, with a negative twist, is 0: images are normalised
    when they come here, and 0 is then their mean colour.

    Args:
        images: [b c h w].
        centre: [b 2], x to the right and y down, in [-1, 1].
        twist: [b]; the paper draws from 0.20 to 0.25.

    Raises:
        ValueError: there is not one centre or twist per image.
    """
    check_images(images)
    b, _, h, w = images.shape
    check_shape("centre", centre, (b, 2))
    check_shape("twist", twist, (b,))
    x, y = (torch.linspace(-1, 1, side, device=images.device) for side in (w, h))
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)  # [h w 2], float32 whatever the images are
    away = centre.float()[:, None, None] - grid
    grid = grid + away * away.norm(dim=-1, keepdim=True) * twist.float()[:, None, None, None]
    return _sample(images, grid, padding_mode="zeros", align_corners=True)


def wave(images: Tensor, amplitude: Tensor, phase: Tensor, waves: float = 1.5) -> Tensor:
    """A sine wave that runs through each image from left to right (Beyond Masking, appendix A.3: a horizontal wave).

    The column at x, from 0 at the first pixel's middle to 1 at the last one's, shows what was lower by
    ``amplitude * sin(2 pi * (waves * x + phase))`` heights, sampled bilinearly. Columns move up and down as a whole, so
    that nothing moves sideways. What comes from outside is 0, the mean colour of normalised images.

    Args:
        images: [b c h w].
        amplitude: [b] share of the height.
        phase: [b] share of a wave by which it starts later.
        waves: how many there are from the left edge to the right one.

    Raises:
        ValueError: there is not one amplitude or phase per image.
    """
    check_images(images)
    b, _, h, w = images.shape
    check_shape("amplitude", amplitude, (b,))
    check_shape("phase", phase, (b,))
    x, y = (torch.linspace(-1, 1, side, device=images.device) for side in (w, h))
    turns = waves * (x + 1) / 2 + phase.float()[:, None]
    lower = amplitude.float()[:, None] * torch.sin(2 * pi * turns) * (2 * h / max(1, h - 1))  # h-1 pixels are 2
    grid = torch.stack(torch.broadcast_tensors(x, y[None, :, None] + lower[:, None]), -1)
    return _sample(images, grid, padding_mode="zeros", align_corners=True)


def blur(images: Tensor, kernels: Tensor) -> Tensor:
    """Convolve each channel of each image with a random kernel (Beyond Masking, degradation d).

    No bias. Around the image lies 0, the mean colour of normalised images, so that the size stays.

    Args:
        images: [b c h w].
        kernels: [b c k k], one for each channel of an image, or [b 1 k k], one for all; k odd. From `random_kernels`.

    Raises:
        ValueError: the kernel's side is even, or there is not one kernel per channel or per image.
    """
    check_images(images)
    b, c, h, w = images.shape
    k = kernels.shape[-1]
    shared = kernels.ndim == 4 and kernels.shape[1] == 1
    check_shape("kernels", kernels, (b, 1 if shared else c, k, k))
    check_odd(k)
    weights = kernels.float().expand(b, c, k, k).reshape(b * c, 1, k, k)
    # Autocast would round images to bfloat16 on their way to the encoder, which rounds them itself only once.
    with torch.autocast(images.device.type, enabled=False):
        blurred = F.conv2d(images.float().reshape(1, b * c, h, w), weights, padding=k // 2, groups=b * c)
    return blurred.reshape(b, c, h, w).to(images.dtype)


def decolorize(images: Tensor, saturation: Tensor) -> Tensor:
    """Each image with its HSV saturation multiplied, hue and value kept (Beyond Masking, degradation e).

    A channel x of a pixel becomes v + saturation * (x - v), v the largest of the three. Unlike the other degradations
    this one needs colours in [0, 1], before they are normalised.

    Args:
        images: [b 3 h w], red, green, blue.
        saturation: [b] in [0, 1]; the paper's best is 0.3.

    Raises:
        ValueError: the images have other than 3 channels, or there is not one saturation per image.
    """
    check_images(images)
    b, c, _, _ = images.shape
    if c != 3:
        raise ValueError(f"only red, green and blue have a saturation, and these images have channels: {c}, not 3")
    check_shape("saturation", saturation, (b,))
    value = images.amax(1, keepdim=True)
    return value.lerp(images, saturation.to(images.dtype)[:, None, None, None])  # exact at 0 and at 1


def _enlarged(side: int, seen: Tensor, start: Tensor | None) -> Tensor:
    """Where in [-1, 1], from edge to edge, the ``side`` pixels of an enlarged part are taken: [b side].

    The part has ``seen`` [b] pixels from ``start`` [b] on; None: those in the centre.
    """
    seen = seen[:, None]
    # in the centre as torchvision's centre crop; a half goes to the even neighbour
    start = ((side - seen) / 2).round() if start is None else start[:, None]
    at = (torch.arange(side, device=seen.device) + 0.5) * (seen / side) - 0.5
    # kept inside the part, whose surroundings must not shine through at its edge
    at = start + torch.minimum(at.clamp(min=0), seen - 1)
    return (2 * at + 1) / side - 1


def _sample(images: Tensor, grid: Tensor, **how: Any) -> Tensor:
    """Images read bilinearly at ``grid`` [b h w 2]; in float32, since bfloat16 cannot tell one pixel from the next."""
    return F.grid_sample(images.float(), grid, mode="bilinear", **how).to(images.dtype)
