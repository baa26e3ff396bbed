"""Division of files into images, typed after a name: ``slides/@tile=256,microns=0.5``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import inf, isfinite
from typing import Any

from patchloom.data.sources.names import split_settings
from patchloom.errors import PatchloomError
from patchloom.options.pretrain import MAX_SIDE


@dataclass(frozen=True)
class Division:
    """Division of files into images: windows, slices or frames.

    Attributes:
        tile: height and width of a window in pixels; None for whole planes.
        overlap: pixels that neighbouring windows share in each direction.
        level: resolution of a pyramid, 0 for the finest.
        microns: side of a pixel in micrometres, to which windows are resampled; None for that of the level.
        blank: contrast of a window, relative to that of its file, below which it is left out.
        slices: slices of a stack that become the channels of one image, centred at each slice; 0: files have no slices.
        every: distance of the slices that are taken.
        window: values that become 0 and 1, such as Hounsfield units; None for the range of their type or volume.
        fps: frames to take from each second of a film.
        bands: channels to read, in this order: numbers, from 1, or names that the files give them; () for all.
    """

    tile: tuple[int, int] | None = None
    overlap: int = 0
    level: int = 0
    microns: float | None = None
    blank: float = 0.05
    slices: int = 0
    every: int = 1
    window: tuple[float, float] | None = None
    fps: float | None = None
    bands: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether each file is one image."""
        return self.tile is None and not self.slices and self.fps is None

    def plain(self) -> str:
        """Return the settings that differ from the defaults, in the form in which users type them."""
        said = []
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                parts = value if isinstance(value, tuple) else (value,)
                joint = {"window": ":", "bands": "+"}.get(one.name, "x")
                words = joint.join(part if isinstance(part, str) else f"{part:g}" for part in parts)
                said.append(f"{one.name}={words}")
        return ",".join(said)


def _number(least: float, most: float = inf, whole: bool = True) -> Callable[[str], float]:
    def read(word: str) -> float:
        value: float = int(word) if whole else float(word)
        if not least <= value <= most or not isfinite(value):
            raise ValueError
        return value

    return read


def _tile(word: str) -> tuple[int, int]:
    sides = [int(side) for side in word.lower().split("x")]
    if len(sides) not in (1, 2) or not all(8 <= side <= MAX_SIDE for side in sides):
        raise ValueError
    return sides[0], sides[-1]


def _window(word: str) -> tuple[float, float]:
    low, high = map(float, word.split(":"))
    if not (isfinite(low) and isfinite(high) and low < high):
        raise ValueError
    return low, high


def _odd(word: str) -> int:
    value = int(word)
    if value % 2 == 0 or not 1 <= value <= 63:
        raise ValueError
    return value


def _bands(word: str) -> tuple[str, ...]:
    found = tuple(one.strip() for one in word.split("+"))
    if not all(found):
        raise ValueError
    return found


# by name: the reader of its value, and what such a value is
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "tile": (_tile, f"a side of 8 to {MAX_SIDE:,} pixels, as 256, or height x width, as 256x512"),
    "overlap": (_number(0), "a number of pixels"),
    "level": (_number(0, 63), "the number of a resolution, 0 for the finest"),
    "microns": (_number(1e-3, 1e9, whole=False), "the side of a pixel in micrometres, as 0.5"),
    "blank": (_number(0, 1, whole=False), "a share of the contrast of the file, from 0 (keep all) to 1"),
    "slices": (_odd, "an odd number: 1 for each slice as an image, 3 for each with its neighbours as channels"),
    "every": (_number(1), "a distance of slices, from 1"),
    "window": (_window, "two values, as -1000:400"),
    "bands": (_bands, "numbers or names of channels with + between, as 4+3+2 or B04+B03+B02"),
    "fps": (_number(1e-4, 1000, whole=False), "frames a second, as 1 or 0.2"),
}
_OF_TILE = "overlap", "microns", "blank"


def split_division(name: str) -> tuple[str, Division | None]:
    """Return a name without its division, and the division; None if it has none.

    Other words after @, such as the columns of a table, stay in the name.

    Raises:
        PatchloomError: a value is not of its kind, or settings contradict each other.
    """
    file, settings = split_settings(name)
    given = {key: value for key, value in settings.items() if key in _READERS}
    if not given:
        return name, None
    rest = ",".join(f"{key}={value}" for key, value in settings.items() if key not in _READERS)
    found = Division(**{key: _read(name, key, word) for key, word in given.items()})
    _check(name, found, given)
    return f"{file}@{rest}" if rest else file, found


def _read(name: str, key: str, word: str) -> Any:
    read, kind = _READERS[key]
    try:
        return read(word)
    except ValueError:
        raise PatchloomError(f"{name}: {key}={word} must be {kind}") from None


def _check(name: str, found: Division, given: Mapping[str, str]) -> None:
    if found.tile is None:
        if alone := next((key for key in _OF_TILE if key in given), None):
            raise PatchloomError(f"{name}: {alone} is of windows: give tile, too, as tile=256")
    elif found.overlap >= min(found.tile):
        raise PatchloomError(f"{name}: an overlap of {found.overlap} leaves no step between windows: give less")
    if found.microns is not None and found.level:
        raise PatchloomError(f"{name}: level and microns both set the resolution: give one")
    if found.fps is not None and found.slices:
        raise PatchloomError(f"{name}: slices are of stacks, and fps is of films: give one")
    if "every" in given and not found.slices:
        raise PatchloomError(f"{name}: every is of slices: give them, too, as slices=1")
