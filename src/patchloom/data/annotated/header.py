"""The size of an image from the head of its file, without decoding it."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from patchloom.data.read import Unreadable, decode_image, open_pillow, read_image, silent

_ORIENTATION = 274  # EXIF's tag
_SWAPPED = range(5, 9)  # orientations that exchange height and width
_ARRAYS = (".npy", ".tif", ".tiff", ".dcm", ".dicom", ".heic", ".heif", ".hif")  # PIL alone does not read all of them


class Header(NamedTuple):
    """What the head of an image file says.

    Attributes:
        size: (h, w) of the image as it is read, upright.
        turned: its EXIF orientation turns or mirrors it.
        swapped: the file's own rows are the columns of the upright image.
    """

    size: tuple[int, int]
    turned: bool = False
    swapped: bool = False


def header_of(stored: Path | bytes, name: str) -> Header:
    """The header of an image file.

    Args:
        stored: its path, or its bytes.
        name: with which messages about bytes begin.

    Raises:
        FileNotFoundError: there is no such file.
        Unreadable: it cannot be read as an image.
    """
    if isinstance(stored, Path) and stored.suffix.lower() in _ARRAYS:
        return _of_array(stored)
    try:
        with silent(), open_pillow(stored if isinstance(stored, Path) else BytesIO(stored)) as image:
            width, height = image.size
            orientation = 1 if image.format == "TIFF" else orientation_of(image)  # of a TIFF PIL has turned the size
    except FileNotFoundError:
        raise
    except Exception:  # whatever it is, decoding says it better, or can do it
        size = read_image(stored).shape[1:] if isinstance(stored, Path) else decode_image(stored, name).shape[1:]
        return Header((int(size[0]), int(size[1])))
    swapped = orientation in _SWAPPED
    return Header((width, height) if swapped else (height, width), orientation in range(2, 9), swapped)


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8, of a file that PIL has opened."""
    # of a PNG without this in its head, PIL would decode all pixels to look behind them
    if image.format == "PNG" and not {"exif", "XML:com.adobe.xmp"} & set(image.info):
        return 1
    return int(image.getexif().get(_ORIENTATION, 1))


def _of_array(path: Path) -> Header:
    if not path.exists():
        raise FileNotFoundError(path)
    if path.suffix.lower() == ".npy":
        try:
            shape = np.load(path, mmap_mode="r", allow_pickle=False).shape
        except Exception as error:  # NumPy raises several on broken files
            raise Unreadable(f"{path} cannot be read as an image: {error}") from error
    else:
        shape = tuple(read_image(path).shape[1:])
    return Header((int(shape[0]), int(shape[1])))
