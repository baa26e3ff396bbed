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

from patchloom.data.annotated.base import Annotated, Objects
from patchloom.data.annotated.outlines import filled
from patchloom.data.sources.base import Source, digest
from patchloom.data.sources.files import Files, Names
from patchloom.errors import PatchloomError


@dataclass
class Sheet:
    """What an annotation says of one image.

    Attributes:
        file: which says so, for messages.
        size: (h, w) of the image as the annotation has it; None if it does not say.
        boxes: x0 y0 x1 y1 of each object, in pixels or, if ``relative``, as shares of width and height.
        labels: the class of each.
        crowd: whether each is a group, or doubtful.
        outlines: of each, as `filled` takes it; None where there is none.
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
class Part:
    """The images of one part of the data, and a sheet for each.

    Attributes:
        images: all that the annotations name.
        sheets: in the same order.
        stored: path, or bytes, of the file of image i.
    """

    images: Source
    sheets: list[Sheet]
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
    parts: dict[str, Part]
    notes: list[str]


def part_of_files(name: str, root: Path, paths: Sequence[str], sheets: list[Sheet]) -> Part:
    """A part whose images are files.

    Args:
        name: what the user typed.
        root: to which the paths are relative.
        paths: of the images.
        sheets: of the images.
    """
    return Part(Files(name, root, paths), sheets, lambda i: root / paths[i])


class Boxed(Annotated[Objects]):
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
        outlines: Names | None,
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
            return filled(json.loads(self.outlines[k]), *self.size(i))
        except (ValueError, TypeError, KeyError) as error:
            raise PatchloomError(
                f"{self.images.describe(i)}: the segmentation of an object cannot be read ({error}): mend it or take "
                "it out"
            ) from error

    def fingerprint(self) -> str:
        arrays = (self.sizes, self.counts, self.boxes, self.labels, self.crowd)
        content = [hashlib.sha256(np.ascontiguousarray(array)).hexdigest() for array in arrays]
        return digest([self.images.fingerprint(), *self.classes, *content, *(self.outlines or ())])
