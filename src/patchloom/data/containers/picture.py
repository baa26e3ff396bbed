"""Ordinary pictures as containers of one plane, for windows of large photographs."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from torch import Tensor

from patchloom.data.containers.base import Box, Container
from patchloom.data.decode import read_image


class PictureContainer(Container):
    """A picture that is decoded whole for each window.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:  # type: ignore[override]  # needed when files are listed only
        whole = read_image(self._path)
        return ((whole.shape[1], whole.shape[2]),)

    def read(self, box: Box) -> Tensor:
        whole = read_image(self._path)
        return whole[:, box.top : box.top + box.height, box.left : box.left + box.width]
