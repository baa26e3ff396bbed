"""DICOM files, by pydicom, which the extra ``dicom`` installs."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pydicom
from pydicom.pixels import apply_color_lut, apply_rescale, pixel_array

from patchloom.data.conversions import record_conversion
from patchloom.data.decode import refuse_bomb

_AIR, _DENSE = -1024, 3071  # Hounsfield units: what 12 bits hold, from air to beyond bone


def read_dicom(source: Path | BytesIO) -> np.ndarray:
    """The first frame of a DICOM file.

    CT becomes Hounsfield units by the rescale slope and intercept, of which -1,024 to 3,071 become 0 to 1, so that
    scanners agree. Any other stored value is divided by the largest that its bits can hold; the window is not applied,
    as it is made for eyes. White is 1, also where it is stored as 0 (MONOCHROME1).

    Returns:
        [h w] or [h w 3], uint8 for 8 bits, otherwise float32 in [0, 1].
    """
    if isinstance(source, BytesIO):
        source.seek(0)
    data = pydicom.dcmread(source)
    if "Rows" not in data or "Columns" not in data:
        raise ValueError("it is a DICOM file without pixels")
    refuse_bomb(int(data.Rows), int(data.Columns))
    if int(data.get("NumberOfFrames") or 1) > 1:
        record_conversion("frames")
    array = pixel_array(data, index=0)
    kind = str(data.get("PhotometricInterpretation", ""))
    if kind == "PALETTE COLOR":
        record_conversion("palette")
        array = apply_color_lut(array, data)
        top = np.iinfo(array.dtype).max
        return array if top == 255 else (array / np.float32(top)).astype(np.float32)
    if data.get("Modality") == "CT" and array.ndim == 2:
        record_conversion("CT")
        units = apply_rescale(array, data).astype(np.float32)
        image = np.clip((units - _AIR) / np.float32(_DENSE - _AIR), 0, 1)
    elif array.dtype == np.uint8 and int(data.BitsStored) == 8:
        image = array
    else:
        record_conversion("bits")
        least = -(2 ** (int(data.BitsStored) - 1)) if int(data.PixelRepresentation) else 0
        most = np.float32(2 ** int(data.BitsStored) - 1)
        image = np.clip((array.astype(np.float32) - least) / most, 0, 1)
    if kind == "MONOCHROME1":
        record_conversion("inverted")
        image = (255 if image.dtype == np.uint8 else np.float32(1)) - image
    return image
