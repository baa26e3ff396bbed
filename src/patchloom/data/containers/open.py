"""Choice of the reader of a file by its name, and the extra that brings it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from patchloom.data.containers import arrays, film, microscopes
from patchloom.data.containers.base import Box, Container
from patchloom.data.decode import DICOM, FILMS, IMAGE_SUFFIXES, read_image
from patchloom.errors import PatchloomError, pip_install

# suffixes, by the module that reads them, and the extra that installs it; others need none
_EXTRAS = {
    "openslide": (microscopes.SLIDES, "slides"),
    "zarr": (arrays.ZARR, "zarr"),
    "nibabel": (arrays.NIFTI, "nifti"),
    "nd2": (microscopes.ND2, "nd2"),
    "pylibCZIrw": (microscopes.CZI, "czi"),
    "av": (FILMS, "film"),
    "pydicom": (DICOM, "dicom"),
}
_TIFF = frozenset({".tif", ".tiff", ".btf", ".tf8", ".svs", ".qptiff"})
PLANES = _TIFF | microscopes.SLIDES | arrays.ZARR | arrays.NIFTI | microscopes.ND2 | microscopes.CZI
PLANES |= DICOM | IMAGE_SUFFIXES


def suffix_of(path: str | Path) -> str:
    """Return the suffix that chooses a file's reader, in small letters; ``.nii.gz`` is one."""
    name = os.fspath(path).lower()  # no Path, as a folder may have a million files
    return ".nii.gz" if name.endswith(".nii.gz") else os.path.splitext(name)[1]


def check_readers(paths: Iterable[str]) -> None:
    """Refuse files whose reader is not installed, with the command that installs it."""
    suffixes = {*map(suffix_of, paths)}
    for module, (own, extra) in _EXTRAS.items():
        if (needed := suffixes & own) and find_spec(module) is None:
            raise PatchloomError(f"{', '.join(sorted(needed))} files are read by {module}: {pip_install(extra)}")


class PictureContainer(Container):
    """A picture that is decoded whole for each window.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:  # type: ignore[override]  # needed when files are listed only
        _, height, width = self._shape
        return ((height, width),)

    @cached_property
    def channels(self) -> int:  # type: ignore[override]  # likewise
        return self._shape[0]

    @cached_property
    def _shape(self) -> torch.Size:
        return read_image(self._path).shape

    def read(self, box: Box) -> Tensor:
        whole = read_image(self._path)
        return whole[self.bands, box.top : box.top + box.height, box.left : box.left + box.width]


def open_container(path: Path, *, stack: bool, window: tuple[float, float] | None, fps: float | None) -> Container:
    """Open a file.

    Args:
        path: path of the file, or of the folder of a Zarr array.
        stack: whether pages of unknown meaning are slices.
        window: values that become 0 and 1; None for the range of their type, or a volume's own.
        fps: frames to take from each second of a film.
    """
    suffix = suffix_of(path)
    if suffix in FILMS:
        assert fps is not None
        return film.FilmContainer(path, fps)
    if suffix in microscopes.SLIDES:
        return microscopes.SlideContainer(path)
    if suffix in arrays.ZARR:
        return arrays.ZarrContainer(path, window)
    if suffix in arrays.NIFTI:
        return arrays.NiftiContainer(path, window)
    if suffix in microscopes.ND2:
        return microscopes.Nd2Container(path, window)
    if suffix in microscopes.CZI:
        return microscopes.CziContainer(path, window)
    if suffix == ".npy":
        return arrays.NpyContainer(path, window)
    if suffix not in _TIFF:
        return PictureContainer(path)
    from patchloom.data.containers.tiff import TiffContainer  # it imports imagecodecs, which few formats need

    return TiffContainer(path, stack, window)
