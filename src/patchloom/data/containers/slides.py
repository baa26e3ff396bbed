"""Slides in formats of scanners that are no TIFF, or need to be put together: by OpenSlide, the extra ``slides``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from patchloom.data.containers.base import Box, Container
from patchloom.data.decode import channels_first

SUFFIXES = frozenset({".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide"})


class SlideContainer(Container):
    """An open slide.

    Args:
        path: path of the slide; of several files, the one that names the others.
    """

    def __init__(self, path: Path) -> None:
        import openslide  # an extra

        self._slide = openslide.OpenSlide(path)
        self.sizes = tuple((height, width) for width, height in self._slide.level_dimensions)
        microns = self._slide.properties.get(openslide.PROPERTY_NAME_MPP_X)
        self.microns = float(microns) if microns else None

    def read(self, box: Box) -> Tensor:
        scale = self._slide.level_downsamples[box.level]
        # places are in pixels of the finest level, and sizes in those of the level
        corner = round(box.left * scale), round(box.top * scale)
        pixels = np.asarray(self._slide.read_region(corner, box.level, (box.width, box.height)))
        alpha = pixels[..., 3:].astype(np.float32) / 255  # nothing was scanned where it is 0
        over = pixels[..., :3] * alpha + 255 * (1 - alpha)
        return channels_first(np.round(over[..., self.bands]).astype(np.uint8))

    def close(self) -> None:
        self._slide.close()
