"""Degradations of images: zoom, distortion, blur, less colour. Beyond Masking predicts the original.

Images smaller than their canvas, such as after zooming out, are in `patchloom.withhold.canvas`.

Every function takes a batch on any device and treats each image by its own draw; no image depends on another. Draws
are arguments: places, centres, kernels, which `patchloom.withhold.degrade` makes from a generator. Shapes do not depend
on values and no value is read back, so that a GPU never has to wait; for the same reason only shapes and plain numbers
are validated, never the contents of a tensor.

Letters: b batch, c channels, h w height width of the images, k side of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.options.tasks import KernelInit
from patchloom.system.distributed import draw, world

# Validation of degradations and their draws. Only shapes and plain numbers are checked, never tensor contents.


def check_batch(images: Tensor) -> None:
    """Raise ValueError unless ``images`` is a batch of images."""
    if images.ndim != 4 or not images.is_floating_point():
        kind = f"{list(images.shape)} of {str(images.dtype).removeprefix('torch.')}"
        raise ValueError(f"images to degrade are floating-point numbers [b c h w], not {kind}")


def check_shape(name: str, given: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor called ``name`` has the shape ``shape``."""
    if given.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, one for each image, but is {list(given.shape)}")


def check_sizes(sizes: Sequence[tuple[int, int]], size: tuple[int, int]) -> None:
    """Raise ValueError if sizes (s, t) do not fit on a canvas of ``size`` (h, w)."""
    if not sizes:
        raise ValueError("zooming out needs at least one size to shrink to")
    h, w = size
    for s, t in sizes:
        if not (1 <= s <= h and 1 <= t <= w):
            raise ValueError(f"an image of {s}x{t} pixels cannot be placed on a canvas of {h}x{w}")


def check_odd(side: int) -> None:
    """Raise ValueError unless a kernel's side is odd."""
    if side < 1 or side % 2 == 0:
        raise ValueError(f"the side of a kernel must be odd, not {side}")


def zoom_in(images: Tensor, scale: float | Tensor, corner: Tensor | None = None) -> Tensor:
    """Enlarge a part of each image to the whole (Beyond Masking, degradation a).

    The part has `seen_pixels` of h x w pixels. Enlarging is bilinear and interpolates inside the part only. An
    antialiased resize gives the same, because it differs only when it shrinks.

    Args:
        images: [b c h w].
        scale: fraction of the side that is seen, in (0, 1]; one for all, or [b].
        corner: [b 2] row and column of the part's upper left pixel (appendix A.3); None: the part is the centre.
    """
    check_batch(images)
    b, _, h, w = images.shape
    if not isinstance(scale, Tensor):
        if not 0 < scale <= 1:
            raise ValueError(f"zooming in shows a fraction of the side in (0, 1], not {scale}")
        scale = torch.full((b,), float(scale), device=images.device)
    check_shape("scale", scale, (b,))
    if corner is not None:
        check_shape("corner", corner, (b, 2))
    coordinates = []  # [b side], in [-1, 1] from edge to edge
    for axis, (side, seen) in enumerate(zip((h, w), seen_pixels(scale, (h, w)).split(1, 1), strict=True)):
        # the centre as in torchvision's center_crop: halves are rounded to even
        start = ((side - seen) / 2).round() if corner is None else corner[:, axis, None]
        at = (torch.arange(side, device=seen.device) + 0.5) * (seen / side) - 0.5
        # clamped to the part, so that its surroundings do not bleed in at the edge
        at = start + torch.minimum(at.clamp(min=0), seen - 1)
        coordinates.append((2 * at + 1) / side - 1)
    rows, columns = coordinates
    grid = torch.stack(torch.broadcast_tensors(columns[:, None, :], rows[:, :, None]), -1)
    return _sample(images, grid, padding_mode="border", align_corners=False)


def seen_pixels(scale: Tensor, size: tuple[int, int]) -> Tensor:
    """Return height and width [b 2], 1 or more pixels, of the fraction ``scale`` [b] of images of ``size`` (h, w)."""
    return torch.stack([(scale.float() * side).round().clamp(1, side) for side in size], 1)


def fisheye(images: Tensor, centre: Tensor, twist: Tensor) -> Tensor:
    """Bend each image around a point (Beyond Masking, degradation c).

    The pixel at g shows the input at ``g + (centre - g) * |centre - g| * twist``, sampled bilinearly. Coordinates go
    from -1 at the centre of the first pixel to 1 at that of the last. A positive twist keeps the centre, enlarges more
    with distance from it, and shows nothing from outside as long as ``|centre - g| * twist <= 1``; beyond 1/2 it shows
    nearer places again, mirrored. Outside, reached with a negative twist, is 0, the mean colour of normalised images.

    Args:
        images: [b c h w].
        centre: [b 2], x to the right and y down, in [-1, 1].
        twist: [b]; the paper draws from 0.20 to 0.25.
    """
    check_batch(images)
    b, _, h, w = images.shape
    check_shape("centre", centre, (b, 2))
    check_shape("twist", twist, (b,))
    x, y = (torch.linspace(-1, 1, side, device=images.device) for side in (w, h))
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)  # [h w 2], always float32
    away = centre.float()[:, None, None] - grid
    grid = grid + away * away.norm(dim=-1, keepdim=True) * twist.float()[:, None, None, None]
    return _sample(images, grid, padding_mode="zeros", align_corners=True)


def wave(images: Tensor, amplitude: Tensor, phase: Tensor, waves: float = 1.5) -> Tensor:
    """Shift the columns of each image along a sine wave (Beyond Masking, appendix A.3: a horizontal wave).

    The column at x, from 0 at the centre of the first pixel to 1 at that of the last, shows the input from
    ``amplitude * sin(2 pi * (waves * x + phase))`` heights further down, sampled bilinearly. Whole columns
    move up and down; nothing moves sideways. Outside is 0, the mean colour of normalised images.

    Args:
        images: [b c h w].
        amplitude: [b] fraction of the height.
        phase: [b] phase as a fraction of a wave.
        waves: number of waves across the width.
    """
    check_batch(images)
    b, _, h, w = images.shape
    check_shape("amplitude", amplitude, (b,))
    check_shape("phase", phase, (b,))
    x, y = (torch.linspace(-1, 1, side, device=images.device) for side in (w, h))
    turns = waves * (x + 1) / 2 + phase.float()[:, None]
    lower = amplitude.float()[:, None] * torch.sin(2 * pi * turns) * (2 * h / max(1, h - 1))  # h-1 pixels span 2
    grid = torch.stack(torch.broadcast_tensors(x, y[None, :, None] + lower[:, None]), -1)
    return _sample(images, grid, padding_mode="zeros", align_corners=True)


def blur(images: Tensor, kernels: Tensor) -> Tensor:
    """Convolve each channel of each image with a random kernel (Beyond Masking, degradation d).

    No bias. Zero padding, the mean colour of normalised images, keeps the size.

    Args:
        images: [b c h w].
        kernels: [b c k k], one for each channel of an image, or [b 1 k k], one for all; k odd. From `random_kernels`.
    """
    check_batch(images)
    b, c, h, w = images.shape
    k = kernels.shape[-1]
    shared = kernels.ndim == 4 and kernels.shape[1] == 1
    check_shape("kernels", kernels, (b, 1 if shared else c, k, k))
    check_odd(k)
    weights = kernels.float().expand(b, c, k, k).reshape(b * c, 1, k, k)
    # Autocast would round images to bfloat16 before the encoder, which rounds them itself only once.
    with torch.autocast(images.device.type, enabled=False):
        blurred = F.conv2d(images.float().reshape(1, b * c, h, w), weights, padding=k // 2, groups=b * c)
    return blurred.reshape(b, c, h, w).to(images.dtype)


def decolorize(images: Tensor, saturation: Tensor) -> Tensor:
    """Multiply the HSV saturation of each image, with hue and value unchanged (Beyond Masking, degradation e).

    A channel x of a pixel becomes v + saturation * (x - v), where v is the largest of the three. Unlike the other
    degradations this one needs colours in [0, 1], before normalisation.

    Args:
        images: [b 3 h w], red, green, blue.
        saturation: [b] in [0, 1]; the paper's best is 0.3.
    """
    check_batch(images)
    b, c, _, _ = images.shape
    if c != 3:
        raise ValueError(f"saturation needs 3 channels (red, green, blue), not {c}")
    check_shape("saturation", saturation, (b,))
    value = images.amax(1, keepdim=True)
    return value.lerp(images, saturation.to(images.dtype)[:, None, None, None])  # exact at 0 and at 1


def _sample(images: Tensor, grid: Tensor, **how: Any) -> Tensor:
    """Sample images bilinearly at ``grid`` [b h w 2]; in float32, because bfloat16 cannot address single pixels."""
    return F.grid_sample(images.float(), grid, mode="bilinear", **how).to(images.dtype)


def sample_affine(images: Tensor, maps: Tensor, size: Sequence[int]) -> Tensor:
    """Sample images [b c h w] at ``size``, bilinearly, with edges extended.

    The coordinates are float32, also under autocast: bfloat16 would round them by their place in the image.

    Args:
        images: the images.
        maps: [b 2 3] from the coordinates of the result to those of the images, both in [-1, 1], x first.
        size: height and width of the result.
    """
    with torch.autocast(images.device.type, enabled=False):
        grid = F.affine_grid(maps.float(), [*images.shape[:2], *size], align_corners=False)
        return _sample(images, grid, padding_mode="border", align_corners=False)


# Random strengths per image, drawn from a generator.


Device = torch.device | str


def draw_uniform(
    low: float, high: float, shape: Sequence[int], generator: torch.Generator | None = None, device: Device = "cpu"
) -> Tensor:
    """Draw numbers of ``shape`` (b first), uniform from ``low`` to ``high``."""
    noise = draw(torch.rand, shape, generator, device)
    return (low + (high - low) * noise).to(device, non_blocking=True)


def draw_index(n: int, b: int, generator: torch.Generator | None = None, device: Device = "cpu") -> Tensor:
    """Draw one of 0 ... ``n`` - 1 for each of ``b`` images: [b] int64. ValueError if ``n`` is 0."""
    if n < 1:
        raise ValueError("there is nothing to draw from")
    return draw(torch.randint, (b,), generator, device, n).to(device, non_blocking=True)


def draw_from(
    choices: Sequence[float], b: int, generator: torch.Generator | None = None, device: Device = "cpu"
) -> Tensor:
    """Draw one of the ``choices`` for each of ``b`` images: [b]. ValueError if there are none."""
    which = draw_index(len(choices), b, generator, device)
    return table(choices, device)[which]


def random_places(
    sizes: Sequence[tuple[int, int]],
    which: Tensor,
    size: tuple[int, int],
    generator: torch.Generator | None = None,
    device: Device | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw row and column, [b] int64 each, of the upper left corner of images shrunk to ``sizes[which]`` (s, t) pixels.

    Uniform over all places where the image fits on the canvas of ``size`` (h, w). The result is on ``device``, by
    default that of ``which`` [b].
    """
    check_sizes(sizes, size)
    device = which.device if device is None else device
    room = table(size, device) - table(sizes, device)[which.to(device, non_blocking=True)]
    top, left = random_corners(room, generator).unbind(1)
    return top, left


def random_corners(room: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw row and column [b 2] int64, uniform from 0 to ``room`` [b 2], on its device."""
    return (draw_uniform(0, 1, room.shape, generator, room.device) * (room + 1)).long()


def random_others(
    b: int, n: int, generator: torch.Generator | None = None, device: Device = "cpu"
) -> tuple[Tensor, Tensor]:
    """Draw one of the other images of all processes, and one of its patches, for ``n`` patches of ``b`` images.

    Returns:
        ``step`` and ``place`` [b n] int64 for `patchloom.withhold.canvas.patches_of_others`.
    """
    others = max(1, world() * b - 1)
    step, place = (draw(torch.randint, (b, n), generator, device, bound) for bound in (others, n))
    return step.to(device, non_blocking=True), place.to(device, non_blocking=True)


def random_kernels(
    sizes: Sequence[int],
    which: Tensor,
    generator: torch.Generator | None = None,
    device: Device | None = None,
    init: KernelInit = "normal",
    channels: int = 1,
) -> Tensor:
    """Draw kernels [b channels k k] of side ``sizes[which]``, one per convolved channel of an image.

    Weights are normal. ``normal``: around 1/side² with deviation 0.02, which blurs (Beyond Masking, degradation d; the
    paper says normal alone, its program has 1/49 and 0.02).
    ``kaiming`` and ``xavier``: around 0, like initial convolutions (appendix A.1, where both fail), with deviation
    sqrt(2 / side²) by He et al. (2015), and sqrt(2 / (side² + side²)) by Glorot and Bengio (2010).

    k is the largest side; smaller kernels are centred and padded with zeros, so that one convolution serves all. The
    kernels are float32 on ``device``, by default that of ``which`` [b].
    """
    if not sizes:
        raise ValueError("blurring needs at least one kernel side")
    for side in sizes:
        check_odd(side)
    k = max(sizes)
    device = which.device if device is None else device
    noise = draw(torch.randn, (len(which), channels, k, k), generator, device).to(device, non_blocking=True)
    sides = table(sizes, device)[which.to(device, non_blocking=True)][:, None, None, None]
    away = (torch.arange(k, device=device) - k // 2).abs()
    inside = torch.maximum(away[:, None], away) <= sides // 2  # [b 1 k k]
    if init == "normal":
        weights = 1 / sides**2 + 0.02 * noise
    else:
        weights = noise * {"kaiming": 2**0.5, "xavier": 1.0}[init] / sides
    return torch.where(inside, weights, 0)


def table(values: Sequence[Any], device: Device) -> Tensor:
    """Build a tensor of numbers, or of equally long rows of them, on the device itself, without a blocking copy."""
    if isinstance(values[0], Sequence):
        return torch.stack([table(row, device) for row in values])
    return torch.stack([torch.full((), value, device=device) for value in values])
