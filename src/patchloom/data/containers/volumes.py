"""Series of DICOM files, a file for each slice, as one volume: the extra ``dicom``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor

from patchloom.data.containers.base import Box, Container
from patchloom.data.decode import DICOM, HOUNSFIELD, read_image

SUFFIXES = DICOM

_TAGS = ["SeriesInstanceUID", "ImagePositionPatient", "ImageOrientationPatient", "InstanceNumber", "Rows", "Columns"]
_TAGS += ["PixelSpacing", "Modality"]
_GAP = 1.5  # distances of neighbouring slices, relative to the usual one, from which one is missing


@dataclass(frozen=True)
class Series:
    """Files of one series, in the order of their slices.

    Attributes:
        numbers: numbers of the files.
        missing: whether a distance between two slices is larger than the others.
        size: rows and columns of a slice.
        microns: distance of two pixels in a row; None if it is unknown.
        computed: whether it is of computed tomography, whose values are Hounsfield units.
    """

    numbers: tuple[int, ...]
    missing: bool
    size: tuple[int, int]
    microns: float | None
    computed: bool


def find_series(paths: Sequence[Path]) -> list[Series]:
    """Sort files into series, by the identifier in their headers; within one, along the normal of the slices.

    Raises:
        ValueError: the slices of a series have different sizes.
    """
    import pydicom  # an extra

    found: dict[tuple[Path, str], list[tuple[float, int, pydicom.Dataset]]] = {}
    for number, path in enumerate(paths):
        head = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=_TAGS)
        key = path.parent, str(head.get("SeriesInstanceUID", path))
        found.setdefault(key, []).append((_height(head), number, head))
    return [_series(slices) for slices in found.values()]


def _height(head: object) -> float:
    """Return the place of a slice along the normal of its plane in millimetres, or else its number."""
    position, directions = getattr(head, "ImagePositionPatient", None), getattr(head, "ImageOrientationPatient", None)
    if position is None or directions is None or len(position) != 3 or len(directions) != 6:
        return float(getattr(head, "InstanceNumber", None) or 0)
    along, across = np.asarray(directions, float).reshape(2, 3)
    return float(np.cross(along, across) @ np.asarray(position, float))


def _series(slices: Iterable[tuple[float, int, object]]) -> Series:
    ordered = sorted(slices, key=lambda one: one[:2])
    sizes = {(int(getattr(head, "Rows", 0)), int(getattr(head, "Columns", 0))) for *_, head in ordered}
    if len(sizes) > 1:
        raise ValueError(f"slices of one series have {len(sizes)} sizes, such as {' and '.join(map(str, sizes))}")
    steps = np.diff([height for height, *_ in ordered])
    missing = bool(len(steps) > 1 and steps.max() > _GAP * np.percentile(steps, 50, method="lower") > 0)
    spacing = getattr(ordered[0][2], "PixelSpacing", None)
    microns = float(spacing[1]) * 1000 if spacing else None
    computed = all(getattr(head, "Modality", "") == "CT" for *_, head in ordered)
    return Series(tuple(number for _, number, _ in ordered), missing, sizes.pop(), microns, computed)


class SeriesContainer(Container):
    """The slices of a series as planes.

    Args:
        paths: files in the order of their slices.
        size: height and width of each.
        microns: distance of two pixels.
        window: Hounsfield units that become 0 and 1; None for all.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        size: tuple[int, int] = (0, 0),
        microns: float | None = None,
        window: tuple[float, float] | None = None,
    ) -> None:
        self._paths, self.planes, self.sizes, self.microns = paths, len(paths), (size,), microns
        self.window = window

    @cached_property
    def channels(self) -> int:  # type: ignore[override]  # needed when channels are chosen only
        return len(read_image(self._paths[0]))

    def read(self, box: Box) -> Tensor:
        whole = read_image(self._paths[box.plane])
        part = whole[self.bands, box.top : box.top + box.height, box.left : box.left + box.width]
        if self.window is None:
            return part
        (air, dense), (low, high) = HOUNSFIELD, self.window
        return ((part * (dense - air) + air - low) / (high - low)).clamp(0, 1)
