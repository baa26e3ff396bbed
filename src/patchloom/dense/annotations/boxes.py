"""Images with boxes, packed in the same way for every file format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchloom.data.source import Source, digest
from patchloom.data.sources.files import Files, PackedStrings
from patchloom.dense.annotations.base import Annotated, Objects
from patchloom.dense.metrics import coco_tool, from_run_lengths
from patchloom.errors import PatchloomError

LARGEST_ID = 2**53  # of a category: every program reads such a number in JSON
_FARTHEST = 2**20  # pixels, of corners and of the sides of a polygon together: drawing it takes some 40 bytes a pixel


def compress_outline(outline: Any, height: int, width: int) -> str:
    """Return COCO's compressed run lengths of an object's mask; raise ValueError if the outline cannot be drawn.

    ``outline`` is COCO's segmentation: polygons in pixels, or run lengths, compressed or not.
    """
    codec, size = coco_tool("mask"), [height, width]
    if isinstance(outline, dict):
        if outline.get("size") != size:
            raise ValueError(f"whose size is {outline.get('size')} [h, w], in an image of {size}")
        counts = outline.get("counts")
        try:
            runs = codec.frPyObjects(outline, height, width) if isinstance(counts, list) else outline
            codec.decode({"size": size, "counts": runs["counts"]})  # which checks that they fill the image
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            raise ValueError(f"of {height * width:,} pixels with run lengths that are malformed") from error
    else:
        try:
            polygons = [np.asarray(polygon, np.float64) for polygon in outline]
        except (TypeError, ValueError, OverflowError):
            polygons = []
        good = (one.ndim == 1 and len(one) >= 6 and len(one) % 2 == 0 and np.isfinite(one).all() for one in polygons)
        if not polygons or not all(good):
            raise ValueError("that is no list of polygons of at least three points")
        for polygon in polygons:
            points = polygon.reshape(-1, 2)
            if np.abs(points).max() > _FARTHEST:
                raise ValueError(f"with a polygon that reaches {_FARTHEST:,} pixels far")
            if np.abs(points - np.roll(points, 1, axis=0)).max(1).sum() > _FARTHEST:
                raise ValueError(f"with a polygon whose sides are longer than {_FARTHEST:,} pixels together")
        runs = codec.merge(codec.frPyObjects([polygon.tolist() for polygon in polygons], height, width))
    found = runs["counts"]
    return found.decode() if isinstance(found, bytes) else found


def told_size(about: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (h, w) of an image according to a row of its annotation; None if these are no sizes."""
    h, w = about.get("height"), about.get("width")
    return (h, w) if isinstance(h, int) and isinstance(w, int) and min(h, w) > 0 else None


@dataclass
class ImageAnnotation:
    """Annotation of one image, as its file has it.

    Attributes:
        file: file of the annotation, for messages.
        size: (h, w) of the image according to the annotation; None if it is not given.
        image: name of the image according to the annotation; "" if it is not given.
        boxes: x0 y0 x1 y1 of each object, in pixels or, if ``relative``, as fractions of width and height.
        labels: class of each object: its number, or what the file says until `number_labels`.
        crowd: whether each object is a group, or doubtful.
        outlines: outline of each object, as for `compress_outline`; None if there is none.
        relative: whether coordinates are fractions of width and height, also in ``outlines``.
    """

    file: str
    size: tuple[int, int] | None = None
    image: str = ""
    boxes: list[tuple[float, float, float, float]] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    crowd: list[bool] = field(default_factory=list)
    outlines: list[Any] = field(default_factory=list)
    relative: bool = False

    def add(
        self, box: tuple[float, float, float, float], label: int | str, crowd: bool = False, outline: Any = None
    ) -> None:
        """Add an object."""
        self.boxes.append(box)
        self.labels.append(label)
        self.crowd.append(crowd)
        self.outlines.append(outline)


@dataclass
class AnnotatedFiles:
    """Images of one part of the data, all that the annotations name, and the annotation of each in the same order."""

    images: Source
    sheets: list[ImageAnnotation]


@dataclass
class Annotations:
    """Annotations from the files of one format, not yet checked against the images.

    Attributes:
        classes: names of the classes.
        parts: parts of the data by name.
        notes: sentences on skipped items.
        ids: COCO's category id of each class; () in other formats.
    """

    classes: tuple[str, ...]
    parts: dict[str, AnnotatedFiles]
    notes: list[str]
    ids: tuple[int, ...] = ()


def in_parts(
    name: str, root: Path, parts: Mapping[str, Sequence[str]], sheets: Mapping[str, ImageAnnotation]
) -> dict[str, AnnotatedFiles]:
    """Return the images of each part, files below ``root``, with their annotations."""
    return {
        part: AnnotatedFiles(Files(name, root, images), [sheets[image] for image in images])
        for part, images in parts.items()
    }


def number_labels(sheets: Iterable[ImageAnnotation], numbers: Mapping[Any, int]) -> None:
    """Replace what files say of the class of each object by its number."""
    for sheet in sheets:
        for label in sheet.labels:
            if label not in numbers:
                count = len({*numbers.values()})
                raise PatchloomError(f"{sheet.file} has an object of class {label}, and there are {count} classes")
        sheet.labels = [numbers[label] for label in sheet.labels]


def category_ids(annotated: Annotated[Objects]) -> tuple[int, ...]:
    """Return COCO's category id of each class, to write detections with; counted from 1 if there are none."""
    ids = annotated.ids
    return ids if ids and 0 <= min(ids) and max(ids) <= LARGEST_ID else tuple(range(1, len(annotated.classes) + 1))


class BoxedImages(Annotated[Objects]):
    """Images with boxes and optional outlines, stored in a few arrays.

    Args:
        images, classes, ids: as in `Annotated`.
        sizes: int64 [n 2], h and w of each upright image.
        counts: int64 [n], number of objects of each image.
        boxes: float32 [m 4], boxes of all images in order.
        labels: int64 [m].
        crowd: bool [m].
        outlines: outline of each object from `compress_outline`, decoded on access; None if there are none.
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
        ids: tuple[int, ...] = (),
    ) -> None:
        self.images, self.classes, self.sizes, self.ends = images, classes, sizes, np.cumsum(counts)
        self.counts, self.boxes, self.labels, self.crowd, self.outlines = counts, boxes, labels, crowd, outlines
        self.ids = ids

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
        there, outlines, size = slice(end - int(self.counts[i]), end), self.outlines, self.size(i)

        def mask(k: int) -> torch.Tensor:
            assert outlines is not None  # otherwise it is not used
            return from_run_lengths([{"size": [*size], "counts": outlines[there.start + k]}], size)[0]

        return Objects(
            torch.from_numpy(self.boxes[there].copy()),
            torch.from_numpy(self.labels[there].copy()),
            None,
            torch.from_numpy(self.crowd[there].copy()),
            None if outlines is None else mask,
        )

    def fingerprint(self) -> str:
        arrays = (self.sizes, self.counts, self.boxes, self.labels, self.crowd)
        content = [hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() for array in arrays]
        return digest([self.images.fingerprint(), *self.classes, *content, *(self.outlines or ())])
