"""Draws that say how strongly each image of a batch is degraded, made from a generator.

No value is read back, so that a GPU need not stop and wait; for the same reason only shapes and plain numbers are
checked, never what is inside a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from patchloom.processes import draw

Device = torch.device | str


def draw_uniform(
    low: float, high: float, shape: Sequence[int], generator: torch.Generator | None = None, device: Device = "cpu"
) -> Tensor:
    """Numbers of ``shape`` (b first) uniform from ``low`` to ``high``."""
    noise = draw(torch.rand, shape, generator, device)
    return (low + (high - low) * noise).to(device, non_blocking=True)


def draw_index(n: int, b: int, generator: torch.Generator | None = None, device: Device = "cpu") -> Tensor:
    """One of 0 ... ``n`` - 1 for each of ``b`` images: [b] int64. ValueError if there is none."""
    if n < 1:
        raise ValueError("there is nothing to draw from")
    return draw(torch.randint, (b,), generator, device, n).to(device, non_blocking=True)


def draw_from(
    choices: Sequence[float], b: int, generator: torch.Generator | None = None, device: Device = "cpu"
) -> Tensor:
    """One of the ``choices`` for each of ``b`` images: [b]. ValueError if there is none."""
    which = draw_index(len(choices), b, generator, device)
    return table(choices, device)[which]


def random_places(
    sizes: Sequence[tuple[int, int]],
    which: Tensor,
    size: tuple[int, int],
    generator: torch.Generator | None = None,
    device: Device | None = None,
) -> tuple[Tensor, Tensor]:
    """Row and column, [b] int64 each, of the upper left corner of images shrunk to ``sizes[which]``, (s, t) pixels.

    Every place where the image fits on the canvas of ``size`` (h, w) is as likely. The places are on ``device``, or
    else where ``which`` [b] is.

    Raises:
        ValueError: there is no size, or one does not fit on the canvas.
    """
    check_sizes(sizes, size)
    device = which.device if device is None else device
    room = table(size, device) - table(sizes, device)[which.to(device, non_blocking=True)] + 1  # [b 2] places
    top, left = (draw_uniform(0, 1, room.shape, generator, device) * room).long().unbind(1)
    return top, left


def random_kernels(
    sizes: Sequence[int], which: Tensor, generator: torch.Generator | None = None, device: Device | None = None
) -> Tensor:
    """Kernels [b k k] of side ``sizes[which]`` that blur: weights normal around 1/side² with deviation 0.02.

    k is the largest side; a smaller kernel lies in the centre of zeros, so that one convolution serves all. The
    kernels are float32 and on ``device``, or else where ``which`` [b] is.

    Raises:
        ValueError: there is no side, or one is even or not positive.
    """
    if not sizes:
        raise ValueError("blurring needs at least one kernel side")
    for side in sizes:
        check_odd(side)
    k = max(sizes)
    device = which.device if device is None else device
    noise = draw(torch.randn, (len(which), k, k), generator, device).to(device, non_blocking=True)
    side = table(sizes, device)[which.to(device, non_blocking=True)][:, None, None]
    away = (torch.arange(k, device=device) - k // 2).abs()
    inside = torch.maximum(away[:, None], away) <= side // 2  # [b k k]
    return torch.where(inside, 1 / side**2 + 0.02 * noise, 0)


def table(values: Sequence[Any], device: Device) -> Tensor:
    """Numbers, or equally long rows of them; the device itself writes them, so that no copy is waited for."""
    if isinstance(values[0], Sequence):
        return torch.stack([table(row, device) for row in values])
    return torch.stack([torch.full((), value, device=device) for value in values])


def check_sizes(sizes: Sequence[tuple[int, int]], size: tuple[int, int]) -> None:
    """Refuse sizes (s, t) that do not fit on a canvas of ``size`` (h, w)."""
    if not sizes:
        raise ValueError("zooming out needs at least one size to shrink to")
    h, w = size
    for s, t in sizes:
        if not (1 <= s <= h and 1 <= t <= w):
            raise ValueError(f"an image of {s}x{t} pixels cannot be placed on a canvas of {h}x{w}")


def check_odd(side: int) -> None:
    """Refuse a kernel's side without a middle."""
    if side < 1 or side % 2 == 0:
        raise ValueError(f"a kernel has an odd side, so that it has a centre, not {side}")
