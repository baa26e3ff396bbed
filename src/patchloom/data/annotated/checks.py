"""What can be wrong with boxes, found before anything is trained on them: a sentence that names the file, or a note."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np

from patchloom.data.annotated.base import AnnotatedData, Objects
from patchloom.data.annotated.boxed import Annotations, Boxed, Part, Sheet
from patchloom.data.annotated.header import Header, header_of
from patchloom.data.annotated.layout import PARTS, TEST, TRAIN, VALIDATION, images_in_words, named_parts
from patchloom.data.noticed import some_of
from patchloom.data.read import Unreadable
from patchloom.data.sources.files import Names
from patchloom.errors import PatchloomError
from patchloom.hints import listing
from patchloom.waiting import Waiting

_ROUNDING = 2  # pixels by which a box may reach out of its image, and is clipped
_CLIPPED = 0.05  # pixels: less than that is no news
_FEW_LOST = 0.05  # share of the images that may be missing or unreadable
_FEW_BAD = 1e-4  # share of the boxes that may be of no area or outside, and are left out: COCO's own has two such


def examined(found: Annotations) -> AnnotatedData[Objects]:
    """What was found, compared with its images.

    Raises:
        PatchloomError: an image or a box is not as the annotations say.
    """
    _refuse_shared(found)
    masks, notes = _outlined(found)
    parts: dict[str, Boxed] = {}
    for name, part in found.parts.items():
        parts[name], said = _boxed(part, found.classes, masks)
        before = f"{name.capitalize()}: " if len(found.parts) > 1 else ""
        notes += [f"{before}{sentence}" for sentence in said]
    if TRAIN not in parts:
        there = ", ".join(f"{name} ({images_in_words(len(part))})" for name, part in parts.items())
        raise PatchloomError(f"the data has no part to train on, only {there}: call a folder or file of it train")
    if not len(parts[TRAIN].labels):
        first = found.parts[TRAIN].sheets[0].file
        raise PatchloomError(f"{first} and all others to train on hold no objects: annotate some")
    seen = np.bincount(parts[TRAIN].labels, minlength=len(found.classes))
    if unseen := [name for name, count in zip(found.classes, seen, strict=True) if not count]:
        many = "1 class has" if len(unseen) == 1 else f"{len(unseen):,} classes have"
        notes.append(f"{many} no object to train on ({some_of(unseen, len(unseen))})")
    becomes, said = named_parts({name: len(part) for name, part in parts.items()})
    by_name = {becomes[name]: part for name, part in parts.items()}
    return AnnotatedData(by_name[TRAIN], by_name.get(VALIDATION), by_name.get(TEST), (*found.notes, *said, *notes))


def _refuse_shared(found: Annotations) -> None:
    """Refuse an image that is in two parts: what is trained on tests nothing."""
    seen: dict[str, str] = {}
    for name, part in found.parts.items():
        for i in range(len(part.sheets)):
            image = part.images.describe(i)
            if (other := seen.setdefault(image, name)) != name:
                both = listing(sorted((other, name), key=PARTS.index), "and")
                raise PatchloomError(f"{image} is in two parts, {both}: leave it in one of them alone")


def _outlined(found: Annotations) -> tuple[bool, list[str]]:
    """Whether there are masks: where all objects have an outline."""
    sheets = [sheet for part in found.parts.values() for sheet in part.sheets]
    total = sum(len(sheet.boxes) for sheet in sheets)
    without = sum(outline is None for sheet in sheets for outline in sheet.outlines)
    if not 0 < without < total:
        return without < total, []
    first = next(sheet.file for sheet in sheets if None in sheet.outlines)
    return False, [
        f"Masks are left out, and boxes alone are taken: {without:,} of {total:,} objects have no segmentation (the "
        f"first in {first})"
    ]


def _boxed(part: Part, classes: tuple[str, ...], masks: bool) -> tuple[Boxed, list[str]]:
    """The images of a part that are there, with their objects, and notes."""
    headers, notes = _headers(part)
    kept = [i for i, header in enumerate(headers) if header is not None]
    sheets = [part.sheets[i] for i in kept]
    images = part.images if len(kept) == len(part.sheets) else part.images.subset(kept)
    sizes = np.array([headers[i].size for i in kept], np.int64).reshape(-1, 2)
    counts = np.array([len(sheet.boxes) for sheet in sheets], np.int64)
    owner = np.repeat(np.arange(len(sheets)), counts)
    boxes = np.array([box for sheet in sheets for box in sheet.boxes], np.float64).reshape(-1, 4)
    labels = np.array([label for sheet in sheets for label in sheet.labels], np.int64)
    crowd = np.array([crowd for sheet in sheets for crowd in sheet.crowd], bool)
    relative = np.array([sheet.relative for sheet in sheets], bool)[owner]
    sides = sizes[owner][:, [1, 0, 1, 0]].astype(np.float64)  # w h w h of each box's image
    boxes[relative] *= sides[relative]
    boxes, fine, said = _within(boxes, sides, [sheets[i] for i in owner])
    notes += said
    if empty := int((counts == 0).sum()):
        first = images.describe(int(np.flatnonzero(counts == 0)[0]))
        notes.append(f"{empty:,} of {len(sheets):,} images are without objects (the first is {first})")
    outlines = None
    if masks:
        texts = [
            _outline(outline, sheet, (int(h), int(w)))
            for sheet, (h, w) in zip(sheets, sizes, strict=True)
            for outline in sheet.outlines
        ]
        outlines = Names([text for text, good in zip(texts, fine, strict=True) if good])
    counts = np.bincount(owner[fine], minlength=len(sheets)).astype(np.int64)
    packed = boxes[fine].astype(np.float32), labels[fine], crowd[fine]
    return Boxed(images, classes, sizes, counts, *packed, outlines), notes


def _headers(part: Part) -> tuple[list[Header | None], list[str]]:
    """The header of each image, None for one that is left out; and notes on these, and on those that are turned."""
    headers: list[Header | None] = []
    missing: list[int] = []
    broken: dict[int, str] = {}
    turned: list[int] = []
    with Waiting("reading the sizes of annotated images", len(part.sheets)) as waiting:
        for i, sheet in enumerate(part.sheets):
            waiting.advance()
            try:
                header = header_of(part.stored(i), part.images.describe(i))
            except FileNotFoundError:
                missing.append(i)
                headers.append(None)
                continue
            except Unreadable as error:
                broken[i] = str(error)
                headers.append(None)
                continue
            _compare(sheet, header, part.images.describe(i))
            turned += [i] if header.turned else []
            headers.append(header)
    allowed = _FEW_LOST * len(part.sheets)
    if len(missing) > allowed:
        raise PatchloomError(
            f"{part.images.describe(missing[0])} is not there, and {part.sheets[missing[0]].file} names it "
            f"({len(missing):,} of {len(part.sheets):,} images are missing): put the images where the annotations name "
            "them"
        )
    if len(broken) > allowed:
        raise PatchloomError(f"{broken[min(broken)]} ({len(broken):,} of {len(part.sheets):,} images)")
    notes = []
    for what, those in (("are not there", missing), ("cannot be read", sorted(broken))):
        if those:
            names = some_of(map(part.images.describe, those), len(those))
            notes.append(f"{len(those):,} of {len(headers):,} images {what}, and are left out ({names})")
    if turned:
        names = some_of(map(part.images.describe, turned), len(turned))
        notes.append(
            f"{len(turned):,} of {len(headers):,} images are turned by their EXIF orientation: their boxes are taken "
            f"to be those of the upright image ({names})"
        )
    return headers, notes


def _compare(sheet: Sheet, header: Header, image: str) -> None:
    """Refuse an image of another size than its annotation says."""
    if sheet.size is None or sheet.size == header.size:
        return
    (h, w), (have_h, have_w) = sheet.size, header.size
    if header.swapped and sheet.size == (have_w, have_h):
        raise PatchloomError(
            f"{sheet.file} has boxes of {image} as it is stored ({w} x {h}), but its EXIF orientation makes it "
            f"{have_w} x {have_h}: take that mark away (exiftool -Orientation= FILE), or annotate the upright image"
        )
    raise PatchloomError(
        f"{sheet.file} says that {image} has {w} x {h} pixels, but it has {have_w} x {have_h}: put the image that was "
        "annotated in its place, or annotate this one"
    )


def _within(boxes: np.ndarray, sides: np.ndarray, sheets: Sequence[Sheet]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Boxes clipped to their images, which of them are fine (bool [m]), and notes.

    Args:
        boxes: float64 [m 4].
        sides: [m 4], w h w h of the image of each.
        sheets: that of each.
    """
    if not np.isfinite(boxes).all():
        bad = int(np.flatnonzero(~np.isfinite(boxes).all(1))[0])
        raise PatchloomError(f"{sheets[bad].file} has a box with a number that is not finite: mend it or take it out")
    inside = np.clip(boxes, 0, sides)
    beyond = np.abs(inside - boxes).max(1, initial=0)
    outside = beyond > _ROUNDING
    flat = (inside[:, 2:] <= inside[:, :2]).any(1)
    wrong = outside | flat
    notes = []
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        said = "[" + ", ".join(f"{side:g}" for side in boxes[bad]) + "]"
        why = "of no area" if (boxes[bad, 2:] <= boxes[bad, :2]).any() else "that reaches out of its image"
        w, h = sides[bad, :2].astype(int)
        sentence = f"{sheets[bad].file} has a box {why} (x0 y0 x1 y1 {said}, in an image of {w} x {h} pixels)"
        count = int(wrong.sum())
        if count > _FEW_BAD * len(boxes):
            more = f"; {count:,} of {len(boxes):,} boxes are of no area or outside" if count > 1 else ""
            raise PatchloomError(f"{sentence}: mend it or take it out{more}")
        notes.append(f"{count:,} of {len(boxes):,} boxes are of no area or outside, and left out: {sentence}")
    clipped = ~wrong & (beyond > _CLIPPED)
    if clipped.any():
        first = sheets[int(np.flatnonzero(clipped)[0])].file
        notes.append(
            f"{int(clipped.sum()):,} of {len(boxes):,} boxes reach out of their image by up to {_ROUNDING} pixels, and "
            f"are clipped (the first in {first})"
        )
    return inside, ~wrong, notes


def _outline(outline: Any, sheet: Sheet, size: tuple[int, int]) -> str:
    """An outline in JSON, in pixels.

    Raises:
        PatchloomError: it is none, or is of another image.
    """
    if isinstance(outline, dict):
        if [*outline.get("size", ())] != [*size] or not isinstance(outline.get("counts"), list | str):
            raise PatchloomError(
                f"{sheet.file} has a mask whose size is {outline.get('size')} [h, w], in an image of {[*size]}: mend "
                "it or take it out"
            )
        return json.dumps(outline, separators=(",", ":"))
    try:
        good = all(len(one) >= 6 and len(one) % 2 == 0 and all(map(isfinite, one)) for one in outline)
    except TypeError:
        good = False
    if not (good and outline):
        raise PatchloomError(
            f"{sheet.file} has a segmentation that is no list of polygons of at least three points: mend it or take it "
            "out"
        )
    if sheet.relative:
        height, width = size
        outline = [[one * (width, height)[k % 2] for k, one in enumerate(polygon)] for polygon in outline]
    return json.dumps(outline, separators=(",", ":"))
