"""Choice of the reader of a file by its name, and the extra that brings it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from patchloom.data.containers import arrays, film, microscopes, slides, volumes
from patchloom.data.containers.base import Container
from patchloom.data.containers.picture import PictureContainer
from patchloom.data.decode import FILMS, IMAGE_SUFFIXES
from patchloom.errors import PatchloomError, pip_install

# suffixes, by the module that reads them, and the extra that installs it; others need none
_EXTRAS = {
    "openslide": (slides.SUFFIXES, "slides"),
    "zarr": (arrays.ZARR, "zarr"),
    "nibabel": (arrays.NIFTI, "nifti"),
    "nd2": (microscopes.ND2, "nd2"),
    "pylibCZIrw": (microscopes.CZI, "czi"),
    "av": (FILMS, "film"),
    "pydicom": (volumes.SUFFIXES, "dicom"),
}
_TIFF = frozenset({".tif", ".tiff", ".btf", ".tf8", ".svs", ".qptiff"})
PLANES = _TIFF | slides.SUFFIXES | arrays.ZARR | arrays.NIFTI | microscopes.ND2 | microscopes.CZI
PLANES |= volumes.SUFFIXES | IMAGE_SUFFIXES


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
    if suffix in slides.SUFFIXES:
        return slides.SlideContainer(path)
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
