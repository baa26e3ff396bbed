"""Label maps as they are stored: a number a pixel, which is never looked up as a colour."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import tifffile

from patchloom.data.annotated.header import orientation_of
from patchloom.data.arrays import refuse_bomb, upright
from patchloom.data.read import Unreadable, open_pillow, silent
from patchloom.errors import PatchloomError

_ORIENTATION = 274  # TIFF's tag
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_LOSSY = ("JPEG", "MPO", "WEBP")
_SPREAD = {2: 85, 4: 17}  # what PIL multiplies grey values of so few bits by, to fill 8


def read_ids(source: Path | bytes, name: str, colours: np.ndarray | None = None) -> np.ndarray:
    """The numbers in a label map: PNG, TIFF, BMP or GIF of 1 to 16 bits, grey or with a palette, or a ``.npy`` array.

    A palette is not looked up: its indices are the numbers. EXIF orientation is applied, as to images.

    Args:
        source: the file, or its bytes.
        name: of the file, with which messages begin.
        colours: uint8 [k 3], of which a colour-coded map becomes the places.

    Returns:
        Not negative, of an integer dtype [h w].

    Raises:
        Unreadable: it is missing, broken or of an unknown format.
        PatchloomError: it is no label map, or has a colour that ``colours`` lacks.
    """
    try:
        with silent():
            array, kind = _decoded(source if isinstance(source, bytes) else source.read_bytes())
    except Exception as error:  # decoders raise nearly anything on broken bytes
        reason = (
            " ".join(str(error).replace(str(source), "it").split()) if isinstance(source, Path) else "it is damaged"
        )
        raise Unreadable(f"{name} cannot be read as a label map: {reason or type(error).__name__}") from error
    if kind in _LOSSY:
        raise PatchloomError(f"{name} is of a format that changes numbers to make files small: save label maps as PNG")
    return _checked(array, name, colours)


def ids_in(array: np.ndarray, name: str) -> np.ndarray:
    """A label map that is given as an array [h w], as `read_ids` returns it.

    Raises:
        PatchloomError: it is no label map.
    """
    return _checked(array, name, None)


def _decoded(content: bytes) -> tuple[np.ndarray, str]:
    """The values of a file, and its format as PIL calls it."""
    if content.startswith(b"\x93NUMPY"):
        return np.load(BytesIO(content), allow_pickle=False), "NPY"
    if content.startswith(_TIFF):
        with tifffile.TiffFile(BytesIO(content)) as tiff:
            page = tiff.pages.first
            refuse_bomb(page.imagelength, page.imagewidth)
            return upright(page.asarray(), int(page.tags.valueof(_ORIENTATION, 1))), "TIFF"
    with open_pillow(BytesIO(content)) as image:
        kind, orientation = str(image.format), orientation_of(image)
        array = np.asarray(image)
        if kind == "PNG" and content[25:26] == b"\0":  # grey: bits follow width and height in the head, then colours
            array = array // np.uint8(_SPREAD[content[24]]) if content[24] in _SPREAD else array
        return upright(array, orientation), kind


def _checked(array: np.ndarray, name: str, colours: np.ndarray | None) -> np.ndarray:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.ndim == 3 and array.shape[2] in (3, 4) and array.dtype == np.uint8:
        if colours is not None:
            return _places(array, colours, name)
        raise PatchloomError(
            f"{name} shows classes by colours: save one number a pixel, or name the colours in classes.txt, a line "
            "'R G B NAME' for each"
        )
    if array.ndim != 2 or array.dtype.kind not in "uib":
        channels = f"{array.shape[2]} channels" if array.ndim == 3 else "values that are no whole numbers"
        raise PatchloomError(f"{name} has {channels}: a label map has one whole number a pixel")
    if array.dtype.kind == "i" and array.size and array.min() < 0:
        raise PatchloomError(f"{name} holds the number {array.min()}: label maps hold numbers from 0 to 65,535")
    return array.astype(np.uint8) if array.dtype == np.bool_ else array


def _places(array: np.ndarray, colours: np.ndarray, name: str) -> np.ndarray:
    """The place in ``colours`` [k 3] of each pixel's colour, int64 [h w]."""
    weights = np.array([65536, 256, 1], np.int64)
    known, pixels = colours @ weights, array[..., :3] @ weights
    order = np.argsort(known)
    places = order[np.searchsorted(known[order], pixels).clip(max=len(known) - 1)]
    if (strange := known[places] != pixels).any():
        colour = tuple(map(int, array[strange][0, :3]))
        raise PatchloomError(f"{name} has the colour {colour}, which classes.txt does not name: add a line for it")
    return places
