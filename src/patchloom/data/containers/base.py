"""Interface of files that hold many images: planes, each in one or several resolutions, read window by window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Box:
    """Place of a window in a container.

    Attributes:
        plane: number of the plane: a slice, a frame, or 0.
        level: number of the resolution, 0 for the finest.
        top, left: first row and column, in pixels of that level.
        height, width: size in pixels of that level; the window lies within the plane.
    """

    plane: int
    level: int
    top: int
    left: int
    height: int
    width: int


class Container(ABC):
    """An open file of planes of one size. One thread at a time may read it.

    Attributes:
        planes: number of planes: slices of a stack, or frames of a film.
        sizes: height and width of a plane by level, the finest first.
        microns: side of a pixel of the finest level in micrometres; None if the file does not say it.
        window: values that become 0 and 1; None for the range of their type.
        place_on_earth: tags of a GeoTIFF by number, which place the finest level; empty for other files.
        channels: number of channels in the file.
        names: names of these channels; empty if the file has none.
        bands: channels to read, in this order; a list of places, or the slice of all.
    """

    planes: int = 1
    sizes: tuple[tuple[int, int], ...]
    microns: float | None = None
    window: tuple[float, float] | None = None
    place_on_earth: Mapping[int, Any] = MappingProxyType({})
    channels: int = 3
    names: tuple[str, ...] = ()
    bands: list[int] | slice = slice(None)

    @abstractmethod
    def read(self, box: Box) -> Tensor:
        """Read a window of the chosen ``bands``: [c h w], uint8, or float32 in [0, 1].

        Raises:
            Exception: of any type, if the file is damaged, as decoders do.
        """

    def close(self) -> None:  # noqa: B027  # some hold nothing open
        """Close the file."""

    def reduction(self, level: int) -> float:
        """Return how many pixels of the finest level a pixel of ``level`` spans in each direction."""
        return self.sizes[0][1] / self.sizes[level][1]
