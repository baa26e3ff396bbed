"""Draws that say how strongly each image of a batch is degraded, made from a generator.

No value is read back, so that a GPU need not stop and wait; for the same reason only shapes and plain numbers are
checked, never what is inside a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from patchloom.processes import draw, world
from patchloom.withhold.checks import check_odd, check_sizes

Device = torch.device | str
KernelInit = Literal["normal", "kaiming", "xavier"]
KernelOf = Literal["channel", "image"]


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
    room = table(size, device) - table(sizes, device)[which.to(device, non_blocking=True)]
    top, left = random_corners(room, generator).unbind(1)
    return top, left


def random_corners(room: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Row and column [b 2] int64 from 0 to the ``room`` [b 2] that there is; each as likely, where the room is."""
    return (draw_uniform(0, 1, room.shape, generator, room.device) * (room + 1)).long()


def random_others(
    b: int, n: int, generator: torch.Generator | None = None, device: Device = "cpu"
) -> tuple[Tensor, Tensor]:
    """For each of ``n`` patches of ``b`` images, one of the other images of all processes, and one of its patches.

    Returns:
        ``step`` and ``place`` [b n] int64, as `patchloom.withhold.canvas.patches_of_others` takes them.
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
    """Draw kernels [b channels k k] of side ``sizes[which]``, each to convolve a channel of an image with.

    Their weights are normal. ``normal``: around 1/side² with deviation 0.02, which blurs (Beyond Masking, degradation
    d). ``kaiming`` and ``xavier``: around 0, as convolutions are initialised (appendix A.1, where both fail): with
    deviation sqrt(2 / side²) by He et al. (2015), and sqrt(2 / (side² + side²)) by Glorot and Bengio (2010).

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
    noise = draw(torch.randn, (len(which), channels, k, k), generator, device).to(device, non_blocking=True)
    side = table(sizes, device)[which.to(device, non_blocking=True)][:, None, None, None]
    away = (torch.arange(k, device=device) - k // 2).abs()
    inside = torch.maximum(away[:, None], away) <= side // 2  # [b 1 k k]
    weights = (
        1 / side**2 + 0.02 * noise if init == "normal" else noise * {"kaiming": 2**0.5, "xavier": 1.0}[init] / side
    )
    return torch.where(inside, weights, 0)


def table(values: Sequence[Any], device: Device) -> Tensor:
    """Numbers, or equally long rows of them; the device itself writes them, so that no copy is waited for."""
    if isinstance(values[0], Sequence):
        return torch.stack([table(row, device) for row in values])
    return torch.stack([torch.full((), value, device=device) for value in values])
