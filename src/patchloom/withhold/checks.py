"""What degradations and their draws refuse. Only shapes and plain numbers are looked at, never inside a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def check_images(images: Tensor) -> None:
    """Refuse what is not a batch of images."""
    if images.ndim != 4 or not images.is_floating_point():
        kind = f"{list(images.shape)} of {str(images.dtype).removeprefix('torch.')}"
        raise ValueError(f"images to degrade are floating-point numbers [b c h w], not {kind}")


def check_shape(name: str, given: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor, called ``name``, of another shape than ``shape``."""
    if given.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, one for each image, but is {list(given.shape)}")


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
