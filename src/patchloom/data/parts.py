"""Resizing of random crops on the device: readers cut parts out of images, and send them packed.

An antialiased bicubic resize is two products with tables of weights, for columns and for rows. They follow torch's
resize of bytes on a CPU, which rounds weights to multiples of a power of two, and values after each product.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patchloom.data.augment import ImagePart, resize_part
from patchloom.system.device import float32_products

_MOST = 4  # times the pixels of a view: a reader resizes larger parts itself, since sending them would take longer
_MEAN = 2.5  # bound of their mean, by crops of a fifth of an image to all of it
_AT_ONCE = 2**24  # padded values that are resized at once: 64 MiB
_BITS, _BEHIND = 15, 22  # of a weight in torch's resize, and the most of them behind the point


def pixels_sent(augment: Any) -> float:
    """Return a bound of the mean number of pixels that readers send for one of a view by ``augment``."""
    if getattr(augment, "resizes", True):
        return 1
    return _MEAN if getattr(augment, "scale", (1.0, 1.0))[0] <= 0.2 else _MOST


class PackedParts(NamedTuple):
    """Parts of the images of a batch, which `on` resizes to views.

    Attributes:
        pixels: uint8 [n], the parts [h w c] one after the other, and some bytes without meaning.
        layout: int64 [b 4], first byte, height and width of each part, and whether its view is mirrored; on the CPU.
        channels: number of channels.
        size: (h, w) of the views.
    """

    pixels: Tensor
    layout: Tensor
    channels: int
    size: tuple[int, int]

    @classmethod
    def of(cls, parts: Sequence[ImagePart]) -> PackedParts:
        """Pack parts of uint8 images with the same number of channels, for views of one size."""
        size, cut = parts[0].size, list[Tensor]()
        for image, (top, left, h, w), _, _ in parts:
            large = h * w > _MOST * prod(size)
            one = resize_part(image, top, left, h, w, size) if large else image[:, top : top + h, left : left + w]
            cut.append(one.permute(1, 2, 0))
        ends = torch.tensor([one.numel() for one in cut]).cumsum(0).tolist()
        begins = [0, *ends[:-1]]
        # the device reads each row in the width of the widest part
        pixels = torch.zeros(ends[-1] + max(one[0].numel() for one in cut), dtype=torch.uint8)
        for one, begin, end in zip(cut, begins, ends, strict=True):
            pixels[begin:end].view(one.shape).copy_(one)
        rows = [(begin, *one.shape[:2], part.mirrored) for begin, one, part in zip(begins, cut, parts, strict=True)]
        return cls(pixels, torch.tensor(rows, dtype=torch.int64), cut[0].shape[2], size)

    def first(self, count: int) -> PackedParts:
        """Return the parts of the first ``count`` images."""
        return self._replace(layout=self.layout[:count])

    def on(self, device: torch.device | str) -> Tensor:
        """Copy the parts to a device, asynchronously, and resize them there: uint8 [b c h w]."""
        pixels, layout = (one.to(device, non_blocking=True) for one in (self.pixels, self.layout))
        each = max(1, _AT_ONCE // (self.channels * prod(self.layout[:, 1:3].amax(0).tolist())))
        views = []
        with float32_products():  # the 10 bits of TF32 are too few for the weights
            for here, there in zip(self.layout.split(each), layout.split(each), strict=True):
                tallest, widest = here[:, 1:3].amax(0).tolist()
                views.append(_views(pixels, there, tallest, widest, self.channels, self.size))
        return torch.cat(views)


def _views(pixels: Tensor, layout: Tensor, tallest: int, widest: int, c: int, size: tuple[int, int]) -> Tensor:
    """Resize parts [b 4], of at most ``tallest`` x ``widest`` pixels, on their device: uint8 [b c h w]."""
    begin, heights, widths, mirrored = layout.unbind(1)
    b, rows = len(layout), torch.arange(tallest, device=layout.device)
    # Rows of the widest part's length. What lies behind a part has weights of 0, so that it may be another's.
    begins = begin[:, None] + (rows * (rows < heights[:, None])) * (c * widths)[:, None]
    values = pixels.unfold(0, c * widest, 1)[begins].view(b, tallest, widest, c).transpose(2, 3).contiguous()
    values = values.view(b, tallest * c, widest).to(torch.float32)
    values = values @ _weights(widths, size[1], widest, mirrored).mT
    values = values.clamp_(0, 255).add_(0.5).floor_()
    values = _weights(heights, size[0], tallest) @ values.view(b, tallest, c * size[1])
    values = values.clamp_(0, 255).add_(0.5).to(torch.uint8)  # which cuts off what is behind the point
    return values.view(b, size[0], c, size[1]).transpose(1, 2).contiguous()


def _weights(sides: Tensor, size: int, longest: int, mirrored: Tensor | None = None) -> Tensor:
    """Return the weights of the pixels of lines with ``sides`` [b] pixels in lines of ``size``: [b size ``longest``].

    They are those of the cubic convolution with a = -0.5 (Keys 1981), stretched by the factor of reduction, as Pillow's
    and torch's. Lines that are ``mirrored`` [b] are mirrored afterwards.
    """
    device = sides.device
    exact = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no other
    side, to = sides[:, None, None], torch.arange(size, device=device)[:, None]
    if mirrored is not None:
        to = torch.where(mirrored[:, None, None] > 0, size - 1 - to, to)
    # few pixels have a weight: those whose centre is nearer than two units, each of a pixel of the longer line
    unit, centre, reach = side.clamp(min=size), (2 * to + 1) * side, 4 * max(longest, size) // size + 2
    begin = (centre - 4 * unit - size).div(2 * size, rounding_mode="floor")
    place = begin + torch.arange(reach, device=device)
    apart = ((2 * place + 1) * size - centre).to(exact).abs_() / (2 * unit)  # in whole numbers up to the division
    near, far = (1.5 * apart - 2.5) * apart**2 + 1, ((2.5 - 0.5 * apart) * apart - 4) * apart + 2
    weights = torch.where(apart < 1, near, torch.where(apart < 2, far, 0)) * ((place >= 0) & (place < side))
    weights /= weights.sum(-1, keepdim=True)
    powers = 2 ** torch.arange(1, _BEHIND + 1, device=device)
    fit = (weights.amax((1, 2))[:, None] * powers + 0.5).floor() < 2**_BITS
    scale = (2 ** fit.sum(1))[:, None, None]
    weights = (weights * scale + weights.sign() / 2).trunc() / scale
    table = torch.zeros(len(sides), size, longest + 2 * reach, device=device)
    return table.scatter_(2, place + reach, weights.to(torch.float32))[..., reach : reach + longest]
