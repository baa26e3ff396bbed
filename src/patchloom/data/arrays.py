"""What decoders give, as images: depth, orientation, transparency."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.noticed import notice


def channels_first(array: np.ndarray) -> Tensor:
    """An array [h w] or [h w c] as a tensor [c h w]."""
    # A view, not a copy: memory stays channels-last, for which torchvision's uint8 resize is fastest.
    return torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1)


def refuse_bomb(height: int, width: int) -> None:
    """Refuse an image that may be a decompression bomb.

    Raises:
        ValueError: it has too many pixels.
    """
    # PIL refuses at the same size; this serves the formats that do not pass through PIL.
    if Image.MAX_IMAGE_PIXELS is not None and height * width > 2 * Image.MAX_IMAGE_PIXELS:
        raise ValueError(f"{height} x {width} pixels could be a decompression bomb; cut it into smaller images")


def from_array(array: np.ndarray) -> Tensor:
    """An array [h w] or [h w c] of uint8, uint16 or floats in [0, 1] as a tensor [c h w].

    Raises:
        ValueError: it holds nothing, or other values, or too many.
    """
    if array.size == 0:
        raise ValueError("it holds no pixels")
    refuse_bomb(*array.shape[:2])
    if array.dtype == np.uint8:
        return channels_first(np.array(array))
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:  # of either byte order
        notice("deep")
        return channels_first(array.astype(np.float32) / np.float32(65535))
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())  # NaN anywhere makes both NaN, and so fails the comparison
        if not (low >= 0 and high <= 1):
            raise ValueError(f"its values run from {low:g} to {high:g}; scale floating-point images to [0, 1]")
        return channels_first(array.astype(np.float32))
    raise ValueError(f"values of type {array.dtype} are not supported; save them as uint8, uint16 or floats in [0, 1]")


def over_white(array: np.ndarray, premultiplied: bool) -> np.ndarray:
    """Composite [h w c+1] in [0, 1], alpha last, over white: [h w c]."""
    colour, alpha = array[..., :-1], array[..., -1:]
    return np.clip((colour if premultiplied else colour * alpha) + (1 - alpha), 0, 1)


def upright(array: np.ndarray, orientation: int) -> np.ndarray:
    """Undo an EXIF orientation (1 to 8) of an array [h w ...]."""
    if orientation in (5, 6, 7, 8):
        array = array.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        array = array[::-1]
    if orientation in (2, 3, 6, 7):
        array = array[:, ::-1]
    # np.ascontiguousarray would leave negative strides, which torch refuses, to sides of one pixel
    return array.copy() if orientation in range(2, 9) else array


def notice_alpha(alpha: np.ndarray, tiff: bool) -> None:
    """Notice an alpha channel in [0, 1] that hides anything; and, in a TIFF, one that may be data."""
    if (alpha < 1).any():
        between = ((alpha > 0) & (alpha < 1)).mean()
        notice("doubtful alpha" if tiff and between > 0.5 else "alpha")
