"""Bytes of image files, for tests."""

from io import BytesIO
from typing import Any

import numpy as np
import tifffile
from PIL import Image


def tiff(array: np.ndarray, **how: Any) -> bytes:
    """Return an array as a TIFF that tifffile writes."""
    file = BytesIO()
    tifffile.imwrite(file, array, **how)
    return file.getvalue()


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **how: Any) -> bytes:
    """Return an image as a file that Pillow writes."""
    file = BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, kind, **how)
    return file.getvalue()
