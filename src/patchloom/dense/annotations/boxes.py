"""Images with boxes: what a file says of each, and all of it packed, whatever format it came in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchloom.data.source import Source, digest
from patchloom.data.sources.files import Files, PackedStrings
from patchloom.dense.annotations.base import Annotated, Objects
from patchloom.errors import PatchloomError

# Masks of objects as annotation files have them: polygons, and run lengths (RLE), as COCO writes both.


_FINE = 5  # steps a pixel in which COCO's tools follow an outline


def rasterize_outline(outline: Any, height: int, width: int) -> np.ndarray:
    """The mask of one object, bool [h w]."""
    if isinstance(outline, dict):
        if list(outline.get("size", ())) != [height, width]:
            raise ValueError(f"a mask of size {outline.get('size')} [h, w] in an image of {[height, width]}")
        return _of_runs(_counts(outline.get("counts")), height, width)
    mask = np.zeros((height, width), bool)
    for polygon in outline:
        points = np.asarray(polygon, np.float64)
        if points.ndim != 1 or len(points) < 6 or len(points) % 2:
            raise ValueError("a polygon that is not a list x y x y ... of at least three points")
        mask |= _of_polygon(points.reshape(-1, 2), height, width)
    return mask


def _of_runs(counts: np.ndarray, height: int, width: int) -> np.ndarray:
    if counts.sum() != height * width or (counts < 0).any():
        raise ValueError(f"run lengths of {counts.sum():,} pixels in an image of {height * width:,}")
    return np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(width, height).T


def _counts(counts: Any) -> np.ndarray:
    if isinstance(counts, bytes):
        counts = counts.decode("ascii", "replace")
    if isinstance(counts, str):
        return np.array(_numbers(counts), np.int64)
    if isinstance(counts, list | tuple) and all(isinstance(count, int) for count in counts):
        return np.array(counts, np.int64)
    raise ValueError("run lengths that are neither a list of whole numbers nor text")


def _numbers(text: str) -> list[int]:
    """COCO's compressed run lengths: groups of 5 bits, the lowest first, from the fourth on as the change from the
    number two before."""
    found: list[int] = []
    number = shift = 0
    for letter in text:
        bits = ord(letter) - 48
        if not 0 <= bits < 64:
            raise ValueError("run lengths with letters that COCO's compression does not have")
        number |= (bits & 31) << shift
        shift += 5
        if bits & 32:  # another group follows
            continue
        if bits & 16:  # the highest bit is the sign
            number -= 1 << shift
        found.append(number + (found[-2] if len(found) > 2 else 0))
        number = shift = 0
    return found


def _of_polygon(points: np.ndarray, height: int, width: int) -> np.ndarray:
    """Fill a polygon [k 2] of x and y by COCO's rule.

    Its corners are rounded to fifths of a pixel, each side is followed a fifth at a time, and a column of pixels
    changes between out and in wherever the outline passes its middle.
    """
    corners = (points * _FINE + 0.5).astype(np.int64)
    start, end = corners, np.roll(corners, -1, axis=0)
    far = np.abs(end - start)
    steep = far[:, 1] > far[:, 0]
    along = np.where(steep, 1, 0)  # the axis that is followed in whole steps
    sides = np.arange(len(corners))
    turned = start[sides, along] > end[sides, along]  # a side is rounded alike in both directions
    low, high = np.where(turned[:, None], end, start), np.where(turned[:, None], start, end)
    length = far.max(1)
    slope = (high - low)[sides, 1 - along] / np.maximum(length, 1)
    side = np.repeat(sides, length + 1)
    step = np.arange(len(side)) - np.repeat(np.cumsum(length + 1) - (length + 1), length + 1)
    step = np.where(turned[side], length[side] - step, step)
    whole = low[side, along[side]] + step
    other = (low[side, 1 - along[side]] + slope[side] * step + 0.5).astype(np.int64)
    x, y = np.where(steep[side], other, whole), np.where(steep[side], whole, other)
    passed = np.flatnonzero(np.diff(x))
    column = (np.minimum(x[passed], x[passed + 1]) + 0.5) / _FINE - 0.5
    row = (np.minimum(y[passed], y[passed + 1]) + 0.5) / _FINE - 0.5
    kept = (column == np.floor(column)) & (column >= 0) & (column <= width - 1)
    row = np.ceil(np.clip(row[kept], 0, height)).astype(np.int64)
    changes = np.sort(column[kept].astype(np.int64) * height + row)
    return _of_runs(np.diff(np.concatenate([[0], changes, [height * width]])), height, width)


@dataclass
class ImageAnnotation:
    """What an annotation says of one image.

    Attributes:
        file: which says so, for messages.
        size: (h, w) of the image as the annotation has it; None if it does not say.
        boxes: x0 y0 x1 y1 of each object, in pixels or, if ``relative``, as shares of width and height.
        labels: the class of each.
        crowd: whether each is a group, or doubtful.
        outlines: of each, as `rasterize_outline` takes it; None where there is none.
        relative: coordinates are shares of width and height, in ``outlines``, too.
    """

    file: str
    size: tuple[int, int] | None = None
    boxes: list[tuple[float, float, float, float]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    crowd: list[bool] = field(default_factory=list)
    outlines: list[Any] = field(default_factory=list)
    relative: bool = False

    def add(self, box: tuple[float, float, float, float], label: int, crowd: bool = False, outline: Any = None) -> None:
        """Add an object."""
        self.boxes.append(box)
        self.labels.append(label)
        self.crowd.append(crowd)
        self.outlines.append(outline)


@dataclass
class AnnotatedFiles:
    """The images of one part of the data, and a sheet for each.

    Attributes:
        images: all that the annotations name.
        sheets: in the same order.
        stored: path, or bytes, of the file of image i.
    """

    images: Source
    sheets: list[ImageAnnotation]
    stored: Callable[[int], Path | bytes]


@dataclass
class Annotations:
    """What the files of one format say, before it is compared with the images.

    Attributes:
        classes: their names.
        parts: by their names.
        notes: on what was left out.
    """

    classes: tuple[str, ...]
    parts: dict[str, AnnotatedFiles]
    notes: list[str]


def part_of_files(name: str, root: Path, paths: Sequence[str], sheets: list[ImageAnnotation]) -> AnnotatedFiles:
    """A part whose images are files."""
    return AnnotatedFiles(Files(name, root, paths), sheets, lambda i: root / paths[i])


class BoxedImages(Annotated[Objects]):
    """Images with boxes and, if there are, outlines, all in a few arrays.

    Args:
        images: of which the objects are.
        classes: their names.
        sizes: int64 [n 2], h and w of each image as it is read.
        counts: int64 [n], objects of each image.
        boxes: float32 [m 4], of all images, one after another.
        labels: int64 [m].
        crowd: bool [m].
        outlines: of each object in JSON, decoded when it is asked for; None if there are none.
    """

    def __init__(
        self,
        images: Source,
        classes: tuple[str, ...],
        sizes: np.ndarray,
        counts: np.ndarray,
        boxes: np.ndarray,
        labels: np.ndarray,
        crowd: np.ndarray,
        outlines: PackedStrings | None,
    ) -> None:
        self.images, self.classes, self.sizes, self.ends = images, classes, sizes, np.cumsum(counts)
        self.counts, self.boxes, self.labels, self.crowd, self.outlines = counts, boxes, labels, crowd, outlines

    def size(self, i: int) -> tuple[int, int]:
        return int(self.sizes[i, 0]), int(self.sizes[i, 1])

    def truth(self, i: int) -> Objects:
        found = self.outlined(i)
        if found.decode is None:
            return found
        masks = torch.zeros(len(found.labels), *self.size(i), dtype=torch.bool)
        for k, mask in enumerate(masks):
            mask.copy_(found.mask(k))
        return Objects(found.boxes, found.labels, masks, found.crowd)

    def outlined(self, i: int) -> Objects:
        end = int(self.ends[i])
        there = slice(end - int(self.counts[i]), end)
        return Objects(
            torch.from_numpy(self.boxes[there].copy()),
            torch.from_numpy(self.labels[there].copy()),
            None,
            torch.from_numpy(self.crowd[there].copy()),
            None if self.outlines is None else lambda k: torch.from_numpy(self._mask(i, there.start + k)),
        )

    def _mask(self, i: int, k: int) -> np.ndarray:
        assert self.outlines is not None
        try:
            return rasterize_outline(json.loads(self.outlines[k]), *self.size(i))
        except (ValueError, TypeError, KeyError) as error:
            raise PatchloomError(
                f"{self.images.describe(i)}: the segmentation of an object cannot be read ({error}): mend it or take "
                "it out"
            ) from error

    def fingerprint(self) -> str:
        arrays = (self.sizes, self.counts, self.boxes, self.labels, self.crowd)
        content = [hashlib.sha256(np.ascontiguousarray(array)).hexdigest() for array in arrays]
        return digest([self.images.fingerprint(), *self.classes, *content, *(self.outlines or ())])
