"""Opening of images with boxes; the format is inferred from the files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchloom.data.decode import Unreadable
from patchloom.data.notes import count_of, limit_examples
from patchloom.data.source import digest
from patchloom.data.sources.builtin import is_builtin, open_builtin
from patchloom.data.sources.files import PackedStrings
from patchloom.data.sources.huggingface import Hub, is_hub
from patchloom.data.sources.in_memory import DataLike, is_object
from patchloom.data.sources.names import TRAIN, is_role
from patchloom.data.sources.scandir import list_files, note_on_foreign
from patchloom.data.sources.synthetic import Shapes
from patchloom.dense.annotations.base import (
    FEW_LOST,
    PARTS,
    Annotated,
    AnnotatedData,
    Header,
    Missing,
    Objects,
    as_stored,
    files_in,
    header_of,
    hub_parts,
    note_on_turned,
)
from patchloom.dense.annotations.boxes import (
    AnnotatedFiles,
    Annotations,
    BoxedImages,
    ImageAnnotation,
    compress_outline,
    number_labels,
    told_size,
)
from patchloom.dense.annotations.coco import find_coco, json_files, read_json
from patchloom.dense.annotations.voc import find_voc
from patchloom.dense.annotations.yolo import find_yaml, find_yolo, text_files, yaml_files
from patchloom.display import StatusMessage, track_progress
from patchloom.errors import PatchloomError, listing
from patchloom.system.files import no_such_path

# Boxes of Hugging Face data sets with columns ``image`` and ``objects``.


_OBJECTS = "objects"
_LABEL = ("category", "label", "category_id", "categories", "labels", "class")
_CROWD = ("iscrowd", "is_crowd")


def find_hub(name: str) -> Annotations:
    """Return the images and boxes of ``hf:FOLDER`` or ``hf:NAME``, as `open_hub` takes them.

    The column ``objects`` has for each image a list of objects, or a dict of lists, with ``bbox``, COCO's x y w h in
    pixels, and ``category`` or ``label``: a ClassLabel, text, or a number.
    """
    parts: dict[str, AnnotatedFiles] = {}
    classes: tuple[str, ...] = ()
    splits, notes = hub_parts(name)
    for part, (split, dataset, state) in splits.items():
        if _OBJECTS not in dataset.column_names:
            raise PatchloomError(
                f"{name} has no column {_OBJECTS} in {split}, but {listing(dataset.column_names, 'and')}: each image "
                "needs its objects, with bbox and category"
            )
        here = _classes(dataset.features[_OBJECTS])
        if parts and here != classes:
            raise PatchloomError(f"{name} has other classes in {split} than before: use one ClassLabel")
        classes = here
        wanted = [column for column in (_OBJECTS, "width", "height") if column in dataset.column_names]
        rows = dataset.with_format(None).select_columns(wanted)
        sheets: list[ImageAnnotation] = []
        for i, row in enumerate(track_progress(rows, len(dataset), f"reading the boxes of {name} {split}")):
            sheets.append(_sheet(f"{name} {split} #{i}", row))
        parts[part] = AnnotatedFiles(Hub(name, split, dataset, state), sheets)
    every = [sheet for part in parts.values() for sheet in part.sheets]
    numbers: dict[str | int, int]
    if classes:
        numbers = {key: k for k, word in enumerate(classes) for key in (k, word)}
    else:
        found = {label for sheet in every for label in sheet.labels}
        numbers = {one: k for k, one in enumerate(sorted(found, key=lambda one: (isinstance(one, str), one)))}
        classes = tuple(map(str, numbers))
        if classes and all(isinstance(one, int) for one in numbers):
            notes.append(f"Classes are called by their numbers, as {name} has no ClassLabel for them")
    number_labels(every, numbers)
    return Annotations(classes, parts, notes)


def _classes(feature: Any) -> tuple[str, ...]:
    """Return the names of the ClassLabel within a feature, however deep; () if there is none."""
    from datasets import ClassLabel

    if isinstance(feature, ClassLabel):
        return tuple(feature.names)
    within = [*feature.values()] if isinstance(feature, Mapping) else feature if isinstance(feature, list) else []
    inner = getattr(feature, "feature", None)
    return next(filter(None, map(_classes, [*within, *([] if inner is None else [inner])])), ())


def _sheet(where: str, row: dict[str, Any]) -> ImageAnnotation:
    """Return the annotation of a row; labels are numbers or names, as the objects have them."""
    sheet = ImageAnnotation(where, told_size(row))
    objects = row[_OBJECTS] or []
    if isinstance(objects, dict):
        lists = {key: values for key, values in objects.items() if isinstance(values, list)}
        counts = {len(values) for values in lists.values()}
        if len(counts) > 1:
            raise PatchloomError(f"{where} has lists of {listing(sorted(counts), 'and')} in its objects: one a box")
        objects = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    for one in objects:
        label = next((one[key] for key in _LABEL if one.get(key) is not None), None)
        try:
            x, y, w, h = map(float, one["bbox"])
        except (KeyError, TypeError, ValueError):
            raise PatchloomError(f"{where} has an object whose bbox is not x y w h: {one.get('bbox')}") from None
        if not isinstance(label, str | int):
            raise PatchloomError(f"{where} has an object without a class: give it a category")
        sheet.add((x, y, x + w, y + h), label, any(bool(one.get(key)) for key in _CROWD))
    return sheet


# What can be wrong with boxes, found before anything is trained on them: a sentence that names the file, or a note.


_ROUNDING = 2  # pixels by which a box may reach out of its image, and is clipped
_CLIPPED = 0.05  # pixels: less than that is no news
_FEW_BAD = 1e-4  # share of the boxes that may be of no area or outside, and are left out: COCO's own has two such


def check_annotations(found: Annotations) -> AnnotatedData[Objects]:
    """Check annotations against their images, and pack them."""
    seen: dict[str, str] = {}  # by image, its part: what is trained on must not be tested on
    for name, part in found.parts.items():
        for image in map(part.images.describe, range(len(part.sheets))):
            if (other := seen.setdefault(image, name)) != name:
                both = listing(sorted((other, name), key=PARTS.index), "and")
                raise PatchloomError(f"{image} is in two parts, {both}: leave it in one of them alone")
    sheets = [sheet for part in found.parts.values() for sheet in part.sheets]
    total = sum(len(sheet.boxes) for sheet in sheets)
    without = sum(outline is None for sheet in sheets for outline in sheet.outlines)
    masks, notes = without == 0 < total, list[str]()
    if 0 < without < total:
        first = next(sheet.file for sheet in sheets if None in sheet.outlines)
        notes.append(
            f"Masks are left out, and boxes alone are taken: {without:,} of {total:,} objects have no segmentation "
            f"(the first in {first})"
        )
    parts: dict[str, BoxedImages] = {}
    for name, part in found.parts.items():
        parts[name], said = _boxed(part, found, masks)
        before = f"{name.capitalize()}: " if len(found.parts) > 1 else ""
        notes += [f"{before}{sentence}" for sentence in said]
    if TRAIN not in parts:
        there = ", ".join(f"{name} ({count_of(len(part), 'image')})" for name, part in parts.items())
        raise PatchloomError(f"the data has no part to train on, only {there}: call a folder or file of it train")
    if not len(parts[TRAIN].labels):
        first = found.parts[TRAIN].sheets[0].file
        raise PatchloomError(f"{first} and all others to train on hold no objects: annotate some")
    counts = np.bincount(parts[TRAIN].labels, minlength=len(found.classes))
    if unseen := [name for name, count in zip(found.classes, counts, strict=True) if not count]:
        many = "1 class has" if len(unseen) == 1 else f"{len(unseen):,} classes have"
        notes.append(f"{many} no object to train on ({limit_examples(unseen)})")
    return AnnotatedData.of_parts(parts, [*found.notes, *notes])


def _boxed(part: AnnotatedFiles, found: Annotations, masks: bool) -> tuple[BoxedImages, list[str]]:
    """Return the images of a part that are there, with their objects, and notes."""
    headers, notes = _headers(part)
    there = {i: header for i, header in enumerate(headers) if header is not None}
    kept = [*there]
    sheets = [part.sheets[i] for i in kept]
    images = part.images if len(kept) == len(part.sheets) else part.images.subset(kept)
    sizes = np.array([header.size for header in there.values()], np.int64).reshape(-1, 2)
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
        texts = []
        for sheet, (h, w) in zip(sheets, sizes.tolist(), strict=True):
            for outline in sheet.outlines:
                try:
                    if sheet.relative:
                        outline = [[one * (w, h)[k % 2] for k, one in enumerate(polygon)] for polygon in outline]
                    texts.append(compress_outline(outline, h, w))
                except ValueError as error:
                    raise PatchloomError(f"{sheet.file} has a segmentation {error}: mend it or take it out") from error
        outlines = PackedStrings([text for text, good in zip(texts, fine, strict=True) if good])
    counts = np.bincount(owner[fine], minlength=len(sheets)).astype(np.int64)
    packed = boxes[fine].astype(np.float32), labels[fine], crowd[fine]
    return BoxedImages(images, found.classes, sizes, counts, *packed, outlines, found.ids), notes


def _headers(part: AnnotatedFiles) -> tuple[list[Header | None], list[str]]:
    """Return the header of each image, None for one that is left out; and notes on these, and on turned ones."""
    headers: list[Header | None] = []
    missing: list[int] = []
    broken: dict[int, str] = {}
    reading = track_progress(part.sheets, len(part.sheets), "reading the sizes of annotated images")
    for i, sheet in enumerate(reading):
        header = None
        try:
            header = header_of(part.images, i)
        except Missing:
            missing.append(i)
        except Unreadable as error:
            broken[i] = str(error)
        if header is not None and sheet.size is not None and sheet.size != header.size:
            image, (h, w), (have_h, have_w) = part.images.describe(i), sheet.size, header.size
            if header.orientation >= 5 and sheet.size == (have_w, have_h):
                raise as_stored(f"{sheet.file} has boxes", image, header.size)
            raise PatchloomError(
                f"{sheet.file} says that {image} has {w} x {h} pixels, but it has {have_w} x {have_h}: put the image "
                "that was annotated in its place, or annotate this one"
            )
        headers.append(header)
    total = len(headers)
    if len(missing) > FEW_LOST * total:
        raise PatchloomError(
            f"{part.images.describe(missing[0])} is not there, and {part.sheets[missing[0]].file} names it "
            f"({len(missing):,} of {total:,} images are missing): put the images where the annotations name them"
        )
    if len(broken) > FEW_LOST * total:
        raise PatchloomError(f"{broken[min(broken)]} ({len(broken):,} of {total:,} images)")
    notes = []
    for what, those in (("are not there", missing), ("cannot be read", [*broken])):
        if those:
            names = limit_examples(map(part.images.describe, those))
            notes.append(f"{len(those):,} of {total:,} images {what}, and are left out ({names})")
    turned = [
        part.images.describe(i) for i, header in enumerate(headers) if header is not None and header.orientation > 1
    ]
    return headers, notes + note_on_turned(turned, total, "boxes")


def _within(
    boxes: np.ndarray, sides: np.ndarray, sheets: Sequence[ImageAnnotation]
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return boxes clipped to their images, which of them are fine (bool [m]), and notes; ``sides`` are w h w h."""
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


class DrawnObjects(Annotated[Objects]):
    """Drawn shapes, each with its box and its mask."""

    def __init__(self, images: Shapes) -> None:
        self.shapes, self.images, self.classes = images, images, images.classes

    def truth(self, i: int) -> Objects:
        label, box, mask = self.shapes.annotation(i)
        boxes, labels = torch.tensor([box], dtype=torch.float32), torch.tensor([label])
        return Objects(boxes, labels, torch.from_numpy(mask)[None], torch.zeros(1, dtype=torch.bool))

    def fingerprint(self) -> str:
        return digest(["objects", self.shapes.fingerprint()])


_LAYOUTS = (
    "COCO JSON, Pascal VOC XML or YOLO text, such as images/ beside annotations/ or labels/, or the JSON or data.yaml"
)


def open_boxes(data: DataLike, seed: int = 0) -> AnnotatedData[Objects]:
    """Open images with boxes and, where the data has them, masks."""
    if is_object(data) or not isinstance(data, str | os.PathLike):
        raise PatchloomError(
            f"boxes are read from one place, and not from objects or a list: give a folder with {_LAYOUTS}"
        )
    name = os.fspath(data)
    if isinstance(data, str) and is_builtin(name):
        if name.partition(":")[0] != "shapes":
            raise PatchloomError(f"{name} has no boxes: of the built-in data, only shapes has")
        opened = open_builtin(name, seed)
        assert isinstance(opened.train, Shapes) and isinstance(opened.test, Shapes)
        return AnnotatedData(DrawnObjects(opened.train), None, DrawnObjects(opened.test))
    with StatusMessage(f"looking for the boxes of {name}"):
        return check_annotations(find_hub(name) if is_hub(name) else _in_folder(name))


def _in_folder(name: str) -> Annotations:
    path = Path(name).expanduser()
    if os.path.isfile(path):
        suffix = path.suffix.lower()
        if suffix in (".yaml", ".yml"):
            return find_yaml(name, path)
        if suffix != ".json":
            raise PatchloomError(f"{name} is no JSON and no YAML file: give a folder with {_LAYOUTS}")
        if (content := read_json(path)) is None:
            raise PatchloomError(f"{name} is no COCO JSON, as it has no list of images")
        root = path.absolute().parent  # images lie in the folder of the file, or beside it
        root = root.parent if is_role(root.name) else root
        within = {path.absolute().relative_to(root).as_posix(): content}
        return find_coco(name, root, list_files(root), within, alone=True)
    if not os.path.isdir(path):
        raise no_such_path(name, path, f"give a folder with {_LAYOUTS}, or shapes")
    listed = list_files(path)
    read = {file: read_json(path / file) for file in json_files(path, listed)}
    coco = {file: content for file, content in read.items() if content is not None}
    voc, yamls = files_in(path, listed.folders, (".xml",)), yaml_files(path)
    text = [] if yamls else text_files(path, listed)
    there = {"COCO JSON": [*coco], "Pascal VOC XML": voc, "YOLO text": yamls or text}
    there = {kind: files for kind, files in there.items() if files}
    if len(there) > 1:
        which = listing([f"{kind} ({files[0]})" for kind, files in there.items()], "and")
        raise PatchloomError(
            f"{name} holds {which}: move all but one away, or give the JSON or data.yaml instead of the folder"
        )
    if len(yamls) > 1:
        raise PatchloomError(f"{name} holds {listing(yamls, 'and')}: give one of them instead of the folder")
    if coco:
        found = find_coco(name, path, listed, coco)
    elif voc:
        found = find_voc(name, path, listed, voc)
    elif yamls:
        found = find_yaml(name, path / yamls[0])
    elif text:
        found = find_yolo(name, path, listed, text)
    elif read:
        raise PatchloomError(
            f"{path / next(iter(read))} is no COCO JSON, as it has no list of images: give a folder with {_LAYOUTS}"
        )
    else:
        raise PatchloomError(f"{name} holds no annotations that are known: give a folder with {_LAYOUTS}")
    found.notes += note_on_foreign(listed)
    return found
