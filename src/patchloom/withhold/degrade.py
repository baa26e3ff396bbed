"""Degraded pictures: zoomed in, zoomed out, distorted, blurred, with less colour. Beyond Masking asks for the original.

Every function takes a batch, works where the batch is, and treats each image by its own draw; no image sees another.
Draws are arguments: indices, places, centres, kernels, which `patchloom.withhold.draws` makes from a generator. Shapes
never depend on values and no value is read back, so that a GPU need not stop and wait; for the same reason only shapes
and plain numbers are checked, never what is inside a tensor.

Letters: b batch, c channels, h w height width of the images, s t those of a shrunk image, k side of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.withhold.draws import check_odd, check_sizes, table


def zoom_in(images: Tensor, scale: float | Tensor) -> Tensor:
    """The centre of each image, enlarged to the whole (Beyond Masking, degradation a).

    Of h x w pixels the centre has round(scale * h) x round(scale * w). Enlarging is bilinear: pixels between others,
    never beyond their range. That is also what an antialiased resize does, which differs only where it shrinks.

    Args:
        images: [b c h w].
        scale: share of the side that is seen, in (0, 1]; one for all, or [b].

    Raises:
        ValueError: the scale is outside (0, 1], or there is not one per image.
    """
    _check_images(images)
    b, _, h, w = images.shape
    if not isinstance(scale, Tensor):
        if not 0 < scale <= 1:
            raise ValueError(f"zooming in shows a share of the side in (0, 1], not {scale}")
        scale = torch.full((b,), float(scale), device=images.device)
    _check_shape("scale", scale, (b,))
    rows, columns = _centre_of(h, scale), _centre_of(w, scale)
    grid = torch.stack(torch.broadcast_tensors(columns[:, None, :], rows[:, :, None]), -1)
    return _sample(images, grid, padding_mode="border", align_corners=False)


def zoom_out(images: Tensor, sizes: Sequence[tuple[int, int]], which: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """Each image shrunk and placed on a canvas of its old size, mirrored all around (Beyond Masking, degradation b).

    Shrinking is bilinear and antialiased, mirroring as in `mirror_canvas`. The batch is shrunk to every size and each
    image picks its own, so that shapes are the same whatever was drawn.

    Args:
        images: [b c h w].
        sizes: (s, t) in pixels to choose from.
        which: [b] int64, the size of each image.
        top: [b] int64, the row of its upper edge.
        left: [b] int64, the column of its left edge.

    Raises:
        ValueError: there is no size, one is larger than the images, or there is not one draw per image.
    """
    _check_images(images)
    b, _, h, w = images.shape
    check_sizes(sizes, (h, w))
    _check_shape("which", which, (b,))
    s, t = (max(sides) for sides in zip(*sizes, strict=True))
    shrunk = torch.stack([F.pad(_shrink(images, size), (0, t - size[1], 0, s - size[0])) for size in sizes])
    own = shrunk[which, torch.arange(b, device=images.device)]
    heights, widths = table(sizes, images.device)[which].unbind(1)
    return _mirror(own, heights, widths, (h, w), top, left)


def mirror_canvas(small: Tensor, size: tuple[int, int], top: Tensor, left: Tensor) -> Tensor:
    """Images [b c s t] on canvases of ``size`` (h, w), corner at ``top`` and ``left`` [b]: [b c h w].

    The rest is filled with mirror images, again and again if need be. Mirrors stand between pixels: the pixel at the
    edge comes twice, so that the canvas is continuous.

    Raises:
        ValueError: the canvas is smaller than the images, or there is not one place per image.
    """
    _check_images(small)
    b, _, s, t = small.shape
    check_sizes([(s, t)], size)
    heights, widths = (torch.full((b,), side, device=small.device) for side in (s, t))
    return _mirror(small, heights, widths, size, top, left)


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
    _check_images(images)
    b, _, h, w = images.shape
    _check_shape("centre", centre, (b, 2))
    _check_shape("twist", twist, (b,))
    x, y = (torch.linspace(-1, 1, side, device=images.device) for side in (w, h))
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)  # [h w 2], float32 whatever the images are
    away = centre.float()[:, None, None] - grid
    grid = grid + away * away.norm(dim=-1, keepdim=True) * twist.float()[:, None, None, None]
    return _sample(images, grid, padding_mode="zeros", align_corners=True)


def blur(images: Tensor, kernels: Tensor) -> Tensor:
    """Each image convolved with its own kernel, the same for every channel (Beyond Masking, degradation d).

    No bias. Around the image lies 0, the mean colour of normalised images, so that the size stays.

    Args:
        images: [b c h w].
        kernels: [b k k], k odd; from `random_kernels`.

    Raises:
        ValueError: the kernel's side is even, or there is not one kernel per image.
    """
    _check_images(images)
    b, c, h, w = images.shape
    k = kernels.shape[-1]
    _check_shape("kernels", kernels, (b, k, k))
    check_odd(k)
    weights = kernels.float()[:, None].expand(b, c, k, k).reshape(b * c, 1, k, k)
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
    _check_images(images)
    b, c, _, _ = images.shape
    if c != 3:
        raise ValueError(f"only red, green and blue have a saturation, and these images have channels: {c}, not 3")
    _check_shape("saturation", saturation, (b,))
    value = images.amax(1, keepdim=True)
    return value.lerp(images, saturation.to(images.dtype)[:, None, None, None])  # exact at 0 and at 1


def _mirror(
    images: Tensor, heights: Tensor, widths: Tensor, size: tuple[int, int], top: Tensor, left: Tensor
) -> Tensor:
    """Canvases [b c *size] of the upper left ``heights`` [b] x ``widths`` [b] pixels of ``images`` [b c s t]."""
    b, c, _, t = images.shape
    _check_shape("top", top, (b,))
    _check_shape("left", left, (b,))
    rows = _mirrored(size[0], heights[:, None], top[:, None])
    columns = _mirrored(size[1], widths[:, None], left[:, None])
    at = (rows[:, :, None] * t + columns[:, None, :]).flatten(1)  # [b h*w], flat: one gather is the quickest way
    return images.flatten(2).gather(2, at[:, None].expand(b, c, -1)).unflatten(2, size)


def _mirrored(length: int, side: Tensor, start: Tensor) -> Tensor:
    """Which of ``side`` [b 1] pixels, the first at ``start`` [b 1], is mirrored to each of ``length``: [b length]."""
    # there and back again is a period of two sides
    step = (torch.arange(length, device=side.device) - start).remainder(2 * side)
    return torch.minimum(step, 2 * side - 1 - step)


def _centre_of(side: int, scale: Tensor) -> Tensor:
    """Where in [-1, 1], from edge to edge, the ``side`` pixels of an enlarged centre are taken: [b side]."""
    seen = (scale.float() * side).round().clamp(1, side)[:, None]
    start = ((side - seen) / 2).round()  # as torchvision's centre crop; a half goes to the even neighbour
    at = (torch.arange(side, device=scale.device) + 0.5) * (seen / side) - 0.5
    # kept inside the centre, whose surroundings must not shine through at its edge
    at = start + torch.minimum(at.clamp(min=0), seen - 1)
    return (2 * at + 1) / side - 1


def _sample(images: Tensor, grid: Tensor, **how: Any) -> Tensor:
    """Images read bilinearly at ``grid`` [b h w 2]; in float32, since bfloat16 cannot tell one pixel from the next."""
    return F.grid_sample(images.float(), grid, mode="bilinear", **how).to(images.dtype)


def _shrink(images: Tensor, size: tuple[int, int]) -> Tensor:
    shrunk = images.float()
    # One axis at a time: of two at once torch 2.15 forgets the rows where a single column is left, on the CPU.
    for side in size:
        shrunk = F.interpolate(shrunk.mT, (shrunk.shape[3], side), mode="bilinear", antialias=True)
    return shrunk.to(images.dtype)


def centre_crop(images: Tensor, size: tuple[int, int]) -> Tensor:
    """The middle ``size`` (h, w) of images [b c H W], whose sides are longer by even numbers of pixels."""
    top, left = (images.shape[2] - size[0]) // 2, (images.shape[3] - size[1]) // 2
    return images[:, :, top : top + size[0], left : left + size[1]]


def _check_images(images: Tensor) -> None:
    if images.ndim != 4 or not images.is_floating_point():
        kind = f"{list(images.shape)} of {str(images.dtype).removeprefix('torch.')}"
        raise ValueError(f"images to degrade are floating-point numbers [b c h w], not {kind}")


def _check_shape(name: str, given: Tensor, shape: tuple[int, ...]) -> None:
    if given.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, one for each image, but is {list(given.shape)}")
