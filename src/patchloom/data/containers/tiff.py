"""TIFF files read window by window: pyramids, OME-TIFF, SVS, GeoTIFF, and stacks of pages.

Only the tiles or strips that a window touches are read and decoded, by tifffile and imagecodecs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import tifffile
from torch import Tensor

from patchloom.data.codestreams import SIZED, part_size
from patchloom.data.containers.base import Box, Container
from patchloom.data.decode import channel_names, from_tiff, read_series, refuse_signed

SCALE, TIEPOINT, TRANSFORM = 33550, 33922, 34264  # tags of GeoTIFF: places of pixels
PLACE_ON_EARTH = SCALE, TIEPOINT, TRANSFORM, 34735, 34736, 34737  # and the system of coordinates

_LARGEST_PART = 2**25  # pixels of a tile or a strip, which is decoded whole for each window that touches it
_APERIO = re.compile(r"\|\s*MPP\s*=\s*([0-9.]+)")
_OME = re.compile(r"PhysicalSizeX\s*=\s*\"([0-9.eE+-]+)\"")
_OME_UNIT = re.compile(r"PhysicalSizeXUnit\s*=\s*\"([^\"]*)\"")
_MICRONS = {"": 1.0, "µm": 1.0, "um": 1.0, "μm": 1.0, "&#181;m": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "m": 1e6}
_CENTIMETRE = 3  # unit of a resolution
_COLOURS = {0, 1, 2, 6}  # white or black is zero, RGB, and YCbCr, which the decoder of JPEG converts


class TiffContainer(Container):
    """An open TIFF file.

    Args:
        path: path of the file.
        stack: whether pages of unknown meaning are slices; otherwise they are channels, as for a whole image.
        window: values that become 0 and 1; None for the range of their type.

    Raises:
        ValueError: no windows can be read of a file of this kind; the message says what to do.
    """

    def __init__(self, path: Path, stack: bool = False, window: tuple[float, float] | None = None) -> None:
        self.window = window
        self._file = tifffile.TiffFile(path)
        try:
            series = read_series(self._file)
            page = series.keyframe
            self._check(page)
            leading = series.axes[: len(series.axes) - len(page.axes)]
            counts = series.shape[: len(leading)]
            if prod(counts) != len(series.pages):
                raise ValueError(f"its {len(series.pages):,} pages are not the {prod(counts):,} of axes {series.axes}")
            channel = leading.find("C")
            if channel < 0 and leading == "Q" and not stack:
                channel = 0
            numbers = np.arange(prod(counts)).reshape(counts)
            if channel < 0:
                numbers = numbers.reshape(-1, 1)
            else:
                numbers = np.moveaxis(numbers, channel, -1).reshape(-1, counts[channel])
            self._pages = numbers  # of each plane, those of its channels
            self._levels = [level for level in series.levels if level.keyframe.axes == page.axes]
            self.planes = len(numbers)
            self.sizes = tuple((level.keyframe.imagelength, level.keyframe.imagewidth) for level in self._levels)
            self._alpha = numbers.shape[1] == 1 and [int(kind) for kind in page.extrasamples][-1:] in ([1], [2])
            self.channels = numbers.shape[1] * page.samplesperpixel
            self.names = channel_names(self._file, self.channels)
            self.microns = _microns(self._file, page)
            self.place_on_earth = {code: page.tags[code].value for code in PLACE_ON_EARTH if code in page.tags}
        except BaseException:
            self._file.close()
            raise

    def _check(self, page: tifffile.TiffPage) -> None:
        if self.window is None:
            refuse_signed(page)
        if page.photometric not in _COLOURS:
            kind = getattr(page.photometric, "name", page.photometric)
            raise ValueError(f"windows of colours of kind {kind} are not supported; save it as RGB")
        if int(page.tags.valueof(274, 1)) != 1:
            raise ValueError("it is stored turned or mirrored, and windows are read as stored; save it upright")
        if page.axes not in ("YX", "YXS", "SYX"):
            raise ValueError(f"pages of axes {page.axes} are not supported; save a page for each slice")
        height, width = _part(page)
        if height * width > _LARGEST_PART and not page.is_memmappable:
            raise ValueError(
                f"it is compressed in parts of {height:,} x {width:,} pixels, which would be decoded for every window; "
                "save it in tiles (vips tiffsave --tile, or gdal_translate -co TILED=YES)"
            )

    def read(self, box: Box) -> Tensor:
        series = self._levels[box.level]
        page = series.keyframe
        numbers = self._pages[box.plane]
        apart = page.samplesperpixel == 1  # only the pages of the chosen channels are read
        pages = [series.pages[int(number)] for number in (numbers[self.bands] if apart else numbers)]
        each = [self._window(one, page, box) for one in pages if one is not None]  # `read_series` refuses missing ones
        whole = each[0] if len(each) == 1 else np.concatenate(each, axis=-1)
        # who chooses a channel that is marked as transparency takes it for data
        alpha = self._alpha and isinstance(self.bands, slice)
        return from_tiff(page, whole if apart else whole[..., self.bands], alpha, self.window)

    def _window(self, page: tifffile.TiffPage | tifffile.TiffFrame, key: tifffile.TiffPage, box: Box) -> np.ndarray:
        """Return the values [h w c] of one page; parts that the file leaves out are zero."""
        rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
        if key.is_memmappable and not key.is_tiled:
            whole = page.asarray(out="memmap")
            whole = np.moveaxis(whole, 0, -1) if key.axes == "SYX" else whole
            found = np.array(whole[rows, columns])
            return found if found.ndim == 3 else found[..., None]
        found = np.zeros((box.height, box.width, key.samplesperpixel), key.dtype)
        for number, samples in self._parts(key, box):
            if not page.databytecounts[number]:
                continue
            self._file.filehandle.seek(page.dataoffsets[number])
            data = self._file.filehandle.read(page.databytecounts[number])
            if key.compression in SIZED and prod(part_size(data, key.compression)) > _LARGEST_PART:
                raise ValueError("it is damaged: a part is larger than its header says")
            part, (_, _, top, left, _), (_, height, width, _) = key.decode(data, number, jpegtables=page.jpegtables)
            if part is None:
                continue
            first, last = max(top, rows.start), min(top + height, rows.stop)
            start, stop = max(left, columns.start), min(left + width, columns.stop)
            found[first - rows.start : last - rows.start, start - columns.start : stop - columns.start, samples] = part[
                0, first - top : last - top, start - left : stop - left
            ]
        return found

    def _parts(self, key: tifffile.TiffPage, box: Box) -> Iterator[tuple[int, slice]]:
        """Yield the numbers of the tiles or strips that a window touches, and the samples that each holds."""
        height, width = _part(key)
        down, across = -(-key.imagelength // height), -(-key.imagewidth // width)
        apart = key.axes == "SYX"
        rows = range(box.top // height, -(-(box.top + box.height) // height))
        columns = range(box.left // width, -(-(box.left + box.width) // width))
        chosen = np.arange(key.samplesperpixel)[self.bands].tolist() if apart else [0]
        for sample, row, column in product(chosen, rows, columns):
            samples = slice(sample, sample + 1) if apart else slice(None)
            yield (sample * down + row) * across + column, samples

    def close(self) -> None:
        self._file.close()


def _part(page: tifffile.TiffPage) -> tuple[int, int]:
    """Return height and width of the tiles of a page, or of its strips."""
    if page.is_tiled:
        return page.tilelength, page.tilewidth
    return min(page.rowsperstrip, page.imagelength), page.imagewidth


def _microns(file: tifffile.TiffFile, page: tifffile.TiffPage) -> float | None:
    """Return the side of a pixel by the metadata of OME or Aperio, or by a resolution in pixels per centimetre.

    A resolution in pixels per inch is ignored: programs write 72 or 96 for any picture.
    """
    text = file.ome_metadata or ""
    if found := _OME.search(text):
        unit = _OME_UNIT.search(text)
        scale = _MICRONS.get(unit[1] if unit else "")
        return float(found[1]) * scale if scale is not None and float(found[1]) > 0 else None
    if (found := _APERIO.search(page.description or "")) and float(found[1]) > 0:
        return float(found[1])
    if int(page.tags.valueof(296, 2)) == _CENTIMETRE:
        above, below = page.tags.valueof(282, (0, 1))
        return 1e4 * below / above if above > 0 else None
    return None
