"""Ordinary pictures as containers of one plane, for windows of large photographs."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
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
