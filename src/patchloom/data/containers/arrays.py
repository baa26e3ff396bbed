"""Arrays and volumes as stacks: Zarr (the extra ``zarr``), NIfTI (``nifti``), series of DICOM files (``dicom``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from patchloom.data.containers.base import Box, Container
from patchloom.data.decode import HOUNSFIELD, from_array, load_npy, read_image, record_bands

ZARR = frozenset({".zarr"})
NIFTI = frozenset({".nii", ".nii.gz"})

_SAMPLE = 2**22  # values of a volume of which the range is measured
_RANGE = 0.5, 99.5  # percentiles of a volume that become 0 and 1
_MOST = 2**31  # bytes of a compressed volume, which is read whole


class ZarrContainer(Container):
    """An open Zarr array [.. y x], or an OME-Zarr image in several resolutions.

    Axes before the last two are planes, but an axis named c, whose entries are channels.

    Args:
        path: folder of the array or the group.
        window: values that become 0 and 1; None for the range of their type.
    """

    def __init__(self, path: Path, window: tuple[float, float] | None = None) -> None:
        import zarr  # an extra

        self.window = window
        root: Any = zarr.open(path, mode="r")
        about = dict(root.attrs)
        about = about.get("ome", about)  # from version 0.5 on
        scales = about.get("multiscales")
        if isinstance(root, zarr.Array):
            self._arrays, axes = [root], ["z"] * (root.ndim - 2) + ["y", "x"]
        elif isinstance(scales, list) and scales and isinstance(scales[0], dict):
            first = scales[0]
            self._arrays = [root[str(one["path"])] for one in first["datasets"]]
            axes = [str(one["name"] if isinstance(one, dict) else one) for one in first.get("axes", "tczyx")]
            units = [one.get("unit") for one in first.get("axes", ()) if isinstance(one, dict)]
            for one in first["datasets"][0].get("coordinateTransformations", ()):
                factors = one.get("scale") if isinstance(one, dict) else None
                if factors and units and units[-1] in ("micrometer", "micron"):
                    self.microns = float(factors[-1])
                    break
        else:
            raise ValueError("it is a Zarr group without the multiscales of OME-Zarr; give the array in it")
        if axes[-2:] != ["y", "x"] or any(one.ndim != len(axes) for one in self._arrays):
            raise ValueError(f"arrays of axes {''.join(axes)} are not supported; they must end in y and x")
        self.sizes = tuple((one.shape[-2], one.shape[-1]) for one in self._arrays)
        self._counts, self._channel = self._arrays[0].shape[:-2], axes.index("c") if "c" in axes else None
        self.channels = 1 if self._channel is None else self._counts[self._channel]
        labels = [str(one.get("label") or "") for one in about.get("omero", {}).get("channels", ())]
        self.names = tuple(labels) if len(labels) == self.channels and all(labels) else ()
        others = [count for i, count in enumerate(self._counts) if i != self._channel]
        self._others, self.planes = others, prod(others)

    def read(self, box: Box) -> Tensor:
        where: list[Any] = list(map(int, np.unravel_index(box.plane, self._others))) if self._others else []
        if self._channel is not None:
            where.insert(self._channel, slice(None))
        rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
        found = np.asarray(self._arrays[box.level][(*where, rows, columns)])
        return from_array(found if found.ndim == 2 else np.moveaxis(found[self.bands], 0, -1), self.window)


class NpyContainer(Container):
    """An array [h w] or [h w c] of NumPy, of which only the values of a window are read.

    Args:
        path: path of the ``.npy`` file.
        window: values that become 0 and 1; None for the range of their type.
    """

    def __init__(self, path: Path, window: tuple[float, float] | None = None) -> None:
        self._array = load_npy(path, "r")
        self.sizes, self.window = (self._array.shape[:2],), window
        self.channels = self._array.shape[2] if self._array.ndim == 3 else 1

    def read(self, box: Box) -> Tensor:
        part = self._array[box.top : box.top + box.height, box.left : box.left + box.width]
        return record_bands(from_array(part if part.ndim == 2 else part[..., self.bands], self.window))


class NiftiContainer(Container):
    """An open volume of NIfTI: planes along its third axis, the first two as columns and rows.

    Args:
        path: path of the file.
        window: values that become 0 and 1, such as Hounsfield units; None for two percentiles of the volume.
    """

    window: tuple[float, float]
    channels = 1

    def __init__(self, path: Path, window: tuple[float, float] | None = None) -> None:
        import nibabel  # an extra

        image: Any = nibabel.load(path)
        if len(image.shape) < 3 or prod(image.shape[3:]) != 1:
            raise ValueError(f"a volume has three axes, and this one {len(image.shape)}: {image.shape}")
        self._data, self.planes = image.dataobj, image.shape[2]
        if prod(image.shape) * 4 > _MOST:
            raise ValueError(f"a volume of {image.shape} values is too large; save it in parts")
        if path.suffix == ".gz":  # which cannot be read in part
            self._data = np.asarray(image.dataobj, np.float32)
        self.sizes = ((image.shape[1], image.shape[0]),)
        self.microns = float(image.header.get_zooms()[0]) * 1000  # of millimetres
        self.window = window or self._percentiles()

    def _percentiles(self) -> tuple[float, float]:
        step = max(1, self.planes * prod(self.sizes[0]) // _SAMPLE)
        sample = np.concatenate([self._plane(i)[::step].ravel() for i in range(self.planes)])
        low, high = np.percentile(sample[np.isfinite(sample)], _RANGE)
        return float(low), float(high if high > low else low + 1)

    def _plane(self, i: int) -> np.ndarray:
        found = np.asarray(self._data[:, :, i], np.float32)
        return found.reshape(found.shape[:2]).T  # rows come first

    def read(self, box: Box) -> Tensor:
        part = self._plane(box.plane)[box.top : box.top + box.height, box.left : box.left + box.width]
        return from_array(part, self.window)


# Series of DICOM files, a file for each slice, as one volume.


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
        position, directions = head.get("ImagePositionPatient"), head.get("ImageOrientationPatient")
        height = float(head.get("InstanceNumber") or 0)  # or rather millimetres along the normal of the slices
        if position is not None and directions is not None and len(position) == 3 and len(directions) == 6:
            along, across = np.asarray(directions, float).reshape(2, 3)
            height = float(np.cross(along, across) @ np.asarray(position, float))
        found.setdefault((path.parent, str(head.get("SeriesInstanceUID", path))), []).append((height, number, head))
    series = []
    for slices in found.values():
        ordered = sorted(slices, key=lambda one: one[:2])
        sizes = {(int(head.get("Rows", 0)), int(head.get("Columns", 0))) for *_, head in ordered}
        if len(sizes) > 1:
            raise ValueError(f"slices of one series have {len(sizes)} sizes, such as {' and '.join(map(str, sizes))}")
        steps = np.diff([height for height, *_ in ordered])
        missing = bool(len(steps) > 1 and steps.max() > _GAP * np.percentile(steps, 50, method="lower") > 0)
        spacing = ordered[0][2].get("PixelSpacing")
        microns = float(spacing[1]) * 1000 if spacing else None
        computed = all(head.get("Modality", "") == "CT" for *_, head in ordered)
        series.append(Series(tuple(number for _, number, _ in ordered), missing, sizes.pop(), microns, computed))
    return series


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
