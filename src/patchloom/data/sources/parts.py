"""Windows of slides, slices of stacks and frames of films as images, read where they lie."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.data.channels import choose_channels, collect_channels, record_names
from patchloom.data.containers.base import Box, Container
from patchloom.data.containers.open import check_readers, open_container, suffix_of
from patchloom.data.containers.volumes import SUFFIXES as DICOM
from patchloom.data.containers.volumes import SeriesContainer, find_series
from patchloom.data.decode import FILMS, silence_decoders, unreadable
from patchloom.data.duplicates import contents_of
from patchloom.data.notes import count_of, limit_examples
from patchloom.data.source import Data, Source, digest
from patchloom.data.sources.division import Division
from patchloom.data.sources.files import Files
from patchloom.display import StatusMessage
from patchloom.errors import PatchloomError
from patchloom.system.files import cache_root, read_cached, write_sealed

_PART_KIND = b"w"  # contents of parts of files
_FORMAT = "windows 2"
_HELD_OPEN = 32  # files a process keeps open
_END = 2**20  # bytes at either end of a file by which copies of it are found
_CELLS = 8  # a window's contrast is measured on the means of this many cells in each direction
_BAND = 2**24  # pixels of the strips in which a plane is read for its contrast
_FINER = 1.05  # factor by which windows may be enlarged to the asked resolution
_BLOCKS = 8  # blocks in each direction that stay together where all images are of one file
_RUNS = 10  # and runs of slices or frames
_PART = np.dtype([("unit", np.int32), ("plane", np.int32), ("top", np.int32), ("left", np.int32)])


@dataclass(frozen=True)
class Unit:
    """A file, or the files of one series of slices, that are divided together.

    Attributes:
        paths: its files.
        file: number of the first one in the source of files.
        size: height and width of its windows, in pixels of ``level``.
        level: resolution that is read.
        whole: height and width of a plane at that level.
        planes: number of planes.
        microns: side of a pixel of the images that are made; None if it is unknown.
        window: values that become 0 and 1; None for the range of their type.
        bands: places of the channels that are read; () for all.
        names: names of the channels that are read; () without.
        about: a remark for the notes, such as a missing slice; "" without.
    """

    paths: tuple[Path, ...]
    file: int
    size: tuple[int, int]
    level: int
    whole: tuple[int, int]
    planes: int
    microns: float | None
    window: tuple[float, float] | None = None
    bands: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    about: str = ""


class Parts(Source):
    """Parts of files: windows, slices or frames.

    Args:
        source: the files.
        division: how they are divided.
        units: files that are divided.
        parts: parts to read, `_PART` [n]: numbers of their units, and places in these.
        rows: number of each part in the source, int64 [n], if it lists single parts; None: it lists whole files.
    """

    def __init__(
        self,
        source: Source,
        division: Division,
        units: Sequence[Unit],
        parts: np.ndarray,
        rows: np.ndarray | None = None,
    ) -> None:
        self.source, self.division, self.units, self.parts = source, division, tuple(units), parts
        self.name, self.classes, self.no_labels = source.name, source.classes, source.no_labels
        self.to_label, self.subjects = source.to_label, source.subjects
        self._listed = rows is not None
        self._file = np.array([unit.file for unit in units], np.int64)[parts["unit"]] if rows is None else rows
        self.labels = None if source.labels is None else source.labels[self._file]
        self.groups = self._groups()
        self._open = _OpenFiles()

    def _groups(self) -> np.ndarray | None:
        """Return the groups of the files, or each file, or blocks of a single one; None where a file is one image."""
        if self.source.groups is not None:
            return self.source.groups[self._file]
        if len(self.parts) == len(self.units):
            return None
        if len(self.units) > 1:
            return self.parts["unit"].astype(np.int64)
        unit, (height, width) = self.units[0], self.units[0].whole
        if self.division.tile is None:
            return (self.parts["plane"].astype(np.int64) * _RUNS) // unit.planes
        down, across = (self.parts["top"] * _BLOCKS) // height, (self.parts["left"] * _BLOCKS) // width
        return (down * _BLOCKS + across).astype(np.int64)

    def __len__(self) -> int:
        return len(self.parts)

    def read(self, i: int) -> Tensor:
        number, plane, top, left = self.parts[i].tolist()
        unit = self.units[number]
        half = self.division.slices // 2
        planes = [min(max(plane + step, 0), unit.planes - 1) for step in range(-half, half + 1)]
        with _readable(self.describe(i)), self._open.borrow(unit, self.division) as container:
            each = [container.read(Box(one, unit.level, top, left, *unit.size)) for one in planes]
        record_names(lambda: unit.names * len(planes))
        return _resized(torch.cat(each) if len(each) > 1 else each[0], self.division.tile or unit.size)

    def _place(self, i: int) -> str:
        number, plane, top, left = self.parts[i].tolist()
        said = [f"second={plane / self.division.fps:g}"] if self.division.fps is not None else []
        said += [f"slice={plane}"] if self.division.slices else []
        said += [f"y={top},x={left}"] if self.division.tile is not None else []
        return f"#{','.join(said)}" if said else ""

    def describe(self, i: int) -> str:
        return f"{self.source.describe(int(self._file[i]))}{self._place(i)}"

    def place(self, i: int) -> str | None:
        whole = self.source.place(int(self._file[i]))
        return None if whole is None else f"{whole}{self._place(i)}"

    def column(self, name: str) -> Sequence[str] | None:
        values = self.source.column(name)
        return None if values is None else [values[i] for i in self._file.tolist()]

    def column_names(self) -> Sequence[str]:
        return self.source.column_names()

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Return contents by the sizes of the files, their first and last MiB, and the places in them."""
        ends = self._ends
        parts = self.parts if chosen is None else self.parts[chosen]
        return contents_of(_PART_KIND, ([ends[number], str(place).encode()] for number, *place in parts.tolist()))

    @cached_property
    def _ends(self) -> list[bytes]:
        return [one.tobytes() for one in contents_of(_PART_KIND, (_ends(unit.paths) for unit in self.units))]

    def fingerprint(self) -> str:
        return digest([self.source.fingerprint(), *self._words()])

    def stamp(self) -> str | None:
        files = self.source.stamp()
        return None if files is None else digest([files, *self._words()])

    def _words(self) -> list[str]:
        """Return what tells a choice of parts of the same files from others."""
        return [self.division.plain(), *[self.parts.tobytes().hex()] * self._listed]


class _OpenFiles:
    """The files that a process holds open, the most recently used ones."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._found: OrderedDict[tuple[Path, ...], Container] = OrderedDict()

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        self._clear()

    @contextmanager
    def borrow(self, unit: Unit, division: Division) -> Iterator[Container]:
        """Give an open file to one thread."""
        if self._process != os.getpid():  # a forked process would move its parent's places in the files
            self._clear()
        with self._lock:
            found = self._found.pop(unit.paths, None) or _opened(unit.paths, division, unit)
            self._found[unit.paths] = found
            while len(self._found) > _HELD_OPEN:
                self._found.popitem(last=False)[1].close()
            yield found


def divided(data: Data, division: Division) -> Data:
    """Divide the files of data into images, with notes on what was found and left out."""
    notes = list(data.notes)
    train = _divide(data.train, division, notes)
    test = None if data.test is None else _divide(data.test, division, notes)
    others = {split: _divide(source, division, notes) for split, source in data.others.items()}
    return replace(data, train=train, test=test, others=others, notes=tuple(notes))


def _divide(source: Source, division: Division, notes: list[str]) -> Parts:
    """Open each file of a source once, and list its parts."""
    paths = [path for i in range(len(source)) if isinstance(path := source.stored(i), Path)]
    if source.sound is not None or len(paths) < len(source):
        raise PatchloomError(f"{source.name} cannot be divided by @{division.plain()}: that is for files of images")
    check_readers(map(str, paths))
    _check_kinds(paths, source.name, division)
    if isinstance(source, Files) and source.parts is not None:
        return _divide_listed(source, paths, source.parts, division, notes)
    units, parts, small = list[Unit](), list[np.ndarray](), list[Unit]()
    with StatusMessage(f"looking for the images in the files of {source.name}", len(paths)) as waiting:
        for unit, container in _units(paths, division):
            if min(np.subtract(unit.whole, unit.size)) < 0:
                small.append(unit)
            else:
                parts.append(_parts_of(unit, division, len(units)))
                units.append(unit)
            container.close()
            waiting.advance(len(unit.paths))
    if small:
        names = limit_examples(source.describe(unit.file) for unit in small)
        notes.append(f"{count_of(len(small), 'file', 'are')} smaller than a window, and left out ({names})")
    if not units:
        raise PatchloomError(f"no file of {source.name} is as large as a window: give a smaller tile, or a finer level")
    found = np.concatenate(parts)
    if division.tile is not None and division.blank:
        kept = _with_contrast(source, division, units, found)
        if not kept.any():
            raise PatchloomError(f"all windows of {source.name} are blank: add blank=0 after @ to keep them")
    else:
        kept = np.ones(len(found), bool)
    made = Parts(source, division, units, found[kept])
    notes += _notes(made, int(len(found) - kept.sum()))
    return made


def _divide_listed(
    source: Source, paths: Sequence[Path], listed: Sequence[str], division: Division, notes: list[str]
) -> Parts:
    """Open each file of a source once, whose images are the parts that it lists."""
    rows_of: dict[Path, list[int]] = {}
    for row, path in enumerate(paths):
        rows_of.setdefault(path, []).append(row)
    if any(suffix_of(path) in DICOM for path in rows_of):
        raise PatchloomError(f"{source.name} lists parts of DICOM series: list their files, or volumes of NIfTI")
    units, parts = list[Unit](), np.empty(len(paths), _PART)
    for unit, container in _units([*rows_of], division):
        container.close()
        rows = rows_of[unit.paths[0]]
        for row in rows:
            parts[row] = (len(units), *_place_of(listed[row], unit, division, source.describe(row)))
        units.append(replace(unit, file=rows[0]))
    made = Parts(source, division, units, parts, np.arange(len(paths)))
    notes += _notes(made, 0)
    return made


def _place_of(words: str, unit: Unit, division: Division, name: str) -> tuple[int, int, int]:
    """Return plane, top and left of a part by its name, such as ``slice=3,y=0,x=256``."""
    keys = ["second"] * (division.fps is not None) + ["slice"] * bool(division.slices)
    keys += ["y", "x"] * (division.tile is not None)
    pairs = [word.partition("=") for word in words.split(",")]
    try:
        given = {key: float(value) if key == "second" else int(value) for key, _, value in pairs}
    except ValueError:
        given = {}
    if sorted(given) != sorted(keys):
        like = ",".join(f"{key}=0" for key in keys)
        raise PatchloomError(f"{name}#{words} is no part by @{division.plain()}: write its place as #{like}")
    plane = round(given.get("second", 0) * (division.fps or 0)) or int(given.get("slice", 0))
    top, left = int(given.get("y", 0)), int(given.get("x", 0))
    ends = unit.planes - 1, unit.whole[0] - unit.size[0], unit.whole[1] - unit.size[1]
    if not all(0 <= value <= end for value, end in zip((plane, top, left), ends, strict=True)):
        raise PatchloomError(f"{name}#{words} lies outside of the file: take it out of the table, or correct its place")
    return plane, top, left


def _check_kinds(paths: Iterable[Path], name: str, division: Division) -> None:
    for path in paths:
        if (suffix_of(path) in FILMS) != (division.fps is not None):
            kind, remedy = ("a film", "add fps=1") if division.fps is None else ("no film", "leave out fps")
            raise PatchloomError(f"{path} is {kind}: {remedy} after @, or give other files than {name}")


def _units(paths: Sequence[Path], division: Division) -> Iterator[tuple[Unit, Container]]:
    """Yield each file, or series of files, with its open container."""
    slices = {path for path in paths if suffix_of(path) in DICOM}
    for i, path in enumerate(paths):
        if path not in slices:
            with _readable(str(path)):
                container = _opened((path,), division)
            yield _unit((path,), i, container, division, str(path)), container
    if slices:
        numbers = [i for i, path in enumerate(paths) if path in slices]
        with _readable(str(paths[numbers[0]].parent)):
            series = find_series([paths[i] for i in numbers])
        for one in series:
            files = tuple(paths[numbers[k]] for k in one.numbers)
            if division.window and not one.computed:
                raise PatchloomError(f"{files[0].parent} is no CT, so its values have no unit: leave out window")
            volume = SeriesContainer(files, one.size, one.microns, division.window)
            first = numbers[one.numbers[0]]
            about = f"{files[0].parent}: a slice is missing, by the distances of the others" * one.missing
            yield replace(_unit(files, first, volume, division, str(files[0])), about=about), volume


def _opened(paths: tuple[Path, ...], division: Division, unit: Unit | None = None) -> Container:
    """Open a file; its ``unit`` has its channels, and the range of a volume, which is found in a pass over it."""
    window = division.window or (unit.window if unit is not None else None)
    found: Container = (
        SeriesContainer(paths, window=division.window)
        if suffix_of(paths[0]) in DICOM
        else open_container(paths[0], stack=bool(division.slices), window=window, fps=division.fps)
    )
    if unit is not None and unit.bands:
        found.bands = list(unit.bands)
    return found


@contextmanager
def opened(unit: Unit, division: Division) -> Iterator[Container]:
    """Open a file of a source for a while."""
    with silence_decoders(), closing(_opened(unit.paths, division, unit)) as container:
        yield container


def _unit(paths: tuple[Path, ...], file: int, container: Container, division: Division, name: str) -> Unit:
    """Choose the level of a file, and the size of a window in it."""
    if container.planes > 1 and not division.slices and division.fps is None:
        raise PatchloomError(
            f"{name} has {container.planes:,} slices: add slices=1 after @ to read each as an image, or slices=3 to "
            "read each with its neighbours as channels"
        )
    if division.window and container.window is None:
        raise PatchloomError(f"{name} has colours of 8 bits, or values that are scaled already: leave out window")
    level, scale, microns = division.level, 1.0, container.microns
    if level >= len(container.sizes):
        raise PatchloomError(f"{name} has {len(container.sizes)} resolutions, and none of number {level}: give less")
    if division.microns is not None:
        if microns is None:
            raise PatchloomError(f"{name} does not say how large a pixel is: give level instead of microns")
        factor = division.microns / microns
        if factor * _FINER < 1:
            raise PatchloomError(
                f"{name} has pixels of {microns:g} microns, larger than {division.microns:g}: give more"
            )
        finer = [i for i in range(len(container.sizes)) if container.reduction(i) <= factor * _FINER]
        level = max(finer, key=container.reduction)
        scale, microns = factor / container.reduction(level), division.microns
    elif microns is not None:
        microns *= container.reduction(level)
    whole = container.sizes[level]
    height, width = (max(1, round(side * scale)) for side in division.tile) if division.tile else whole
    bands = choose_channels(division.bands, container.names, container.channels, name) if division.bands else ()
    names = tuple(container.names[band] for band in bands) if bands and container.names else container.names
    size = height, width
    return Unit(paths, file, size, level, whole, container.planes, microns, container.window, bands, names)


def steps_of(unit: Unit, division: Division) -> tuple[float, float]:
    """Return the distances of neighbouring windows down and across, in pixels of the level that is read."""
    (height, width), (high, wide) = unit.size, division.tile or unit.size
    return height * (1 - division.overlap / high), width * (1 - division.overlap / wide)


def _parts_of(unit: Unit, division: Division, number: int) -> np.ndarray:
    """Return the parts of a unit, `_PART` [n]; the last windows of a row and of a column end at its border."""
    tops, lefts = (
        np.unique([*range(0, whole - size + 1, max(1, round(step))), whole - size])
        for whole, size, step in zip(unit.whole, unit.size, steps_of(unit, division), strict=True)
    )
    planes = np.arange(0, unit.planes, division.every)
    places = np.stack(np.meshgrid(planes, tops, lefts, indexing="ij"), -1).reshape(-1, 3)
    found = np.empty(len(places), _PART)
    found["unit"] = number
    for column, values in zip(("plane", "top", "left"), places.T, strict=True):
        found[column] = values
    return found


# Blank windows, which are left out.


def _with_contrast(source: Source, division: Division, units: Sequence[Unit], parts: np.ndarray) -> np.ndarray:
    """Return which windows are not blank, bool [n]; the answer is cached until a file changes."""
    stamp = source.stamp()
    place = None if stamp is None else cache_root() / "windows" / digest([_FORMAT, stamp, division.plain()])
    known = None if place is None else read_cached(place)
    if known is not None and len(known) == len(parts):
        return np.frombuffer(known, bool)
    found = np.empty(len(parts), bool)
    with StatusMessage(f"looking for blank windows in the files of {source.name}", len(units)) as waiting:
        for number, unit in enumerate(units):
            own = parts["unit"] == number
            with _readable(source.describe(unit.file)):
                found[own] = _contrast(unit, division, parts[own]) >= division.blank
            waiting.advance()
    if place is not None:
        with suppress(PatchloomError):  # a full or read-only disc only costs another pass
            write_sealed(place, found.tobytes())
    return found


def _contrast(unit: Unit, division: Division, parts: np.ndarray) -> np.ndarray:
    """Return the contrast of windows [n], relative to that of their file.

    A window is seen as 8 x 8 cells, each the mean of its pixels. Its contrast is the difference of its second brightest
    and second darkest cell, so that a single speck does not count; that of the file is the difference of the first and
    the 99th percentile of all cells. The largest over the channels is taken.
    """
    planes = np.unique(parts["plane"]).tolist()
    with opened(unit, division) as container:
        cells = {plane: overview(container, unit, plane) for plane in planes}
    each = np.stack([*cells.values()])  # [planes c rows columns]
    low, high = np.percentile(each, (1, 99), axis=(0, 2, 3))
    rows, columns = np.array(each.shape[2:]) / unit.whole
    steps, found = np.arange(_CELLS), np.empty(len(parts))
    for plane, grid in cells.items():
        own = parts["plane"] == plane
        down = np.minimum(np.round(parts["top"][own] * rows).astype(int)[:, None] + steps, grid.shape[1] - 1)
        across = np.minimum(np.round(parts["left"][own] * columns).astype(int)[:, None] + steps, grid.shape[2] - 1)
        inside = np.sort(grid[:, down[:, :, None], across[:, None, :]].reshape(len(grid), own.sum(), -1), axis=-1)
        spread = (inside[..., -2] - inside[..., 1]) / np.maximum(high - low, 1e-6)[:, None]
        found[own] = spread.max(axis=0)
    return found


def overview(container: Container, unit: Unit, plane: int) -> np.ndarray:
    """Return a plane as means of cells, float32 [c rows columns], with 8 x 8 cells for each window.

    The coarsest resolution that has a pixel for each cell is read, in strips.
    """
    rows, columns = (max(1, round(whole * _CELLS / size)) for whole, size in zip(unit.whole, unit.size, strict=True))
    level = max(i for i, (h, w) in enumerate(container.sizes) if i == unit.level or (h >= rows and w >= columns))
    height, width = container.sizes[level]
    strips = max(1, height * width // _BAND)
    found = list[Tensor]()
    for first, last in pairwise(np.linspace(0, rows, min(strips, rows) + 1).round().astype(int).tolist()):
        top, bottom = first * height // rows, max(last * height // rows, first * height // rows + 1)
        with collect_channels() as seen:
            read = container.read(Box(plane, level, top, 0, bottom - top, width))
        scaled = read.float() / (1 if read.is_floating_point() else 255)
        if seen.missing is not None:
            scaled = scaled.masked_fill(torch.from_numpy(seen.missing).permute(2, 0, 1), torch.nan)
        found.append(F.interpolate(scaled[None], size=(last - first, columns), mode="area")[0])
    cells = torch.cat(found, dim=1)
    # cells without values are of one colour, so that windows of nothing else are blank
    return torch.where(cells.isnan(), cells.nanmean((1, 2), keepdim=True).nan_to_num(), cells).numpy()


# Words and pixels.


def _resized(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Return an image [c h w] of another size, by its own kind of values."""
    if image.shape[1:] == size:
        return image
    found = F.interpolate(image[None].float(), size=size, mode="bicubic", antialias=True)[0]
    deep = image.is_floating_point()
    return found.clamp_(0, 1) if deep else found.round_().clamp_(0, 255).to(torch.uint8)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Convert errors of decoders to `Unreadable`, and suppress their warnings."""
    with unreadable(name, "an image"), silence_decoders():
        yield


def _ends(paths: Sequence[Path]) -> Iterator[bytes]:
    """Yield what tells files from others: their sizes, and their first and last bytes."""
    for path in paths:
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                begin = file.read(_END)
                file.seek(max(0, size - _END))
                yield from (str(size).encode(), begin, file.read(_END))
        except OSError:  # a folder of Zarr, or a file that is gone
            yield os.fsencode(path)


def _notes(made: Parts, blank: int) -> list[str]:
    """Return sentences on the parts: their number and size, and what was left out."""
    division, units = made.division, made.units
    files = count_of(len(units), "film" if division.fps else "file" if len(units[0].paths) == 1 else "volume")
    if division.tile is not None:
        height, width = division.tile
        what = f"{count_of(len(made), 'window')} of {height} x {width} pixels"
    else:
        what = count_of(len(made), "frame" if division.fps else "slice" if division.slices else "plane")
    sides = sorted({round(unit.microns, 4) for unit in units if unit.microns is not None})
    ends = dict.fromkeys(f"{side:g}" for side in (*sides[:1], *sides[-1:]))
    said = f" at {' to '.join(ends)} microns a pixel" if ends else ""
    windows = sorted({unit.window for unit in units if unit.window is not None})
    ranges = dict.fromkeys("{:.4g} to {:.4g}".format(*window) for window in (*windows[:1], *windows[-1:]))
    said += f"; values of {', or '.join(ranges)} become 0 to 1" * bool(ranges)
    said += ", each volume by its own range (window=LOW:HIGH after @ sets one for all)" * (len(windows) > 1)
    left = ""
    if blank:
        left = (
            f"; {count_of(blank, 'blank one', 'are')} left out, with a contrast below {division.blank:.0%} of that of "
            "their file (blank=0 after @ keeps them)"
        )
    stay = "; each file stays in one split" if len(units) > 1 else "; blocks of it stay in one split"
    found = [f"{made.name}: {files}, {what}{said}{left}{'' if made.groups is None else stay}"]
    return [*found, *(unit.about for unit in units if unit.about)]
