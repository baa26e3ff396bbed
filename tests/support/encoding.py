"""Bytes of image files, for tests, and their refusal."""

import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from patchloom.data.decode import Unreadable, decode_image, read_image


def tiff(array: np.ndarray, **how: Any) -> bytes:
    file = BytesIO()
    tifffile.imwrite(file, array, **how)
    return file.getvalue()


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **how: Any) -> bytes:
    file = BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, kind, **how)
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    file = BytesIO()
    np.save(file, array)
    return file.getvalue()


def assert_unreadable(image: Path | bytes, why: str = "") -> None:
    """Assert that a file, or the bytes of one, is refused in one sentence that begins with its name."""
    name = "shard:a" if isinstance(image, bytes) else str(image)
    with pytest.raises(Unreadable, match=f"^{re.escape(name)} cannot be read as an image: .*({why})") as caught:
        decode_image(image, name) if isinstance(image, bytes) else read_image(image)
    assert not re.search("\n|BytesIO|BufferedReader", str(caught.value)), caught.value
