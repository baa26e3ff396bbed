"""Boxes of Hugging Face data sets with columns ``image`` and ``objects``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchloom.data.annotated.boxed import Annotations, Part, Sheet
from patchloom.data.annotated.layout import TRAIN, part_named
from patchloom.data.sources.hub import Hub, splits_of
from patchloom.errors import PatchloomError
from patchloom.hints import listing
from patchloom.waiting import Waiting

if TYPE_CHECKING:  # slow to import, and an extra
    from datasets import Dataset

_OBJECTS = "objects"
_LABEL = ("category", "label", "category_id", "categories", "labels", "class")
_CROWD = ("iscrowd", "is_crowd")


def find_hub(name: str) -> Annotations:
    """The images and boxes of ``hf:FOLDER`` or ``hf:NAME``, as `open_hub` takes them.

    The column ``objects`` has for each image a list of objects, or a dict of lists, with ``bbox``, COCO's x y w h in
    pixels, and ``category`` or ``label``: a ClassLabel, text, or a number.

    Raises:
        PatchloomError: there is no such column, or an object is not as the others are.
    """
    splits, state = splits_of(name)
    parts: dict[str, Part] = {}
    notes: list[str] = []
    names: list[list[str | int]] = []  # of the objects of each sheet
    classes: tuple[str, ...] = ()
    for split, dataset in splits.items():
        part = part_named(split) or (TRAIN if len(splits) == 1 else None)
        if part is None or part in parts:
            notes.append(f"The split {split} is left out: only train, validation and test are taken")
            continue
        if _OBJECTS not in dataset.column_names:
            raise PatchloomError(
                f"{name} has no column {_OBJECTS} in {split}, but {listing(dataset.column_names, 'and')}: each image "
                "needs its objects, with bbox and category"
            )
        told = _classes(dataset.features[_OBJECTS])
        if parts and told != classes:
            raise PatchloomError(f"{name} has other classes in {split} than before: give all the same ClassLabel")
        classes = told
        sheets: list[Sheet] = []
        with Waiting(f"reading the boxes of {name} {split}", len(dataset)) as waiting:
            for i, row in enumerate(_rows(dataset)):
                waiting.advance()
                sheet, those = _sheet(f"{name} {split} #{i}", row)
                sheets.append(sheet)
                names.append(those)
        images = Hub(name, split, dataset, state(split))
        parts[part] = Part(images, sheets, lambda i, images=images: _stored(images, i))
    number = _numbered(classes, names)
    if not classes:
        classes = tuple(str(one) for one in number)
        if classes and all(isinstance(one, int) for one in number):
            notes.append(f"Classes are called by their numbers, as {name} has no ClassLabel for them")
    for sheet, those in zip((sheet for part in parts.values() for sheet in part.sheets), names, strict=True):
        for one in those:
            if one not in number:
                raise PatchloomError(f"{sheet.file} has an object of class {one}, and there are {len(classes)} classes")
        sheet.labels = [number[one] for one in those]
    return Annotations(classes, parts, notes)


def _numbered(classes: tuple[str, ...], names: list[list[str | int]]) -> dict[str | int, int]:
    """The number of a class by what objects say."""
    if classes:
        return dict(zip([*range(len(classes)), *classes], [*range(len(classes))] * 2, strict=True))
    said = {one for those in names for one in those}
    return {one: k for k, one in enumerate(sorted(said, key=lambda one: (isinstance(one, str), one)))}


def _classes(feature: Any) -> tuple[str, ...]:
    """The names of the ClassLabel within a feature, however deep; () if there is none."""
    from datasets import ClassLabel

    if isinstance(feature, ClassLabel):
        return tuple(feature.names)
    within = [*feature.values()] if isinstance(feature, Mapping) else feature if isinstance(feature, list) else []
    inner = getattr(feature, "feature", None)
    return next(filter(None, map(_classes, [*within, *([] if inner is None else [inner])])), ())


def _rows(dataset: Dataset) -> Iterator[dict[str, Any]]:
    wanted = [column for column in (_OBJECTS, "width", "height") if column in dataset.column_names]
    yield from dataset.with_format(None).select_columns(wanted)


def _sheet(where: str, row: dict[str, Any]) -> tuple[Sheet, list[str | int]]:
    """What a row says, and the class of each object."""
    size = row.get("height"), row.get("width")
    known = all(isinstance(side, int) and side > 0 for side in size)
    sheet = Sheet(where, size if known else None)
    objects = row[_OBJECTS] or []
    if isinstance(objects, dict):
        lists = {key: values for key, values in objects.items() if isinstance(values, list)}
        counts = {len(values) for values in lists.values()}
        if len(counts) > 1:
            raise PatchloomError(f"{where} has lists of {listing(sorted(counts), 'and')} in its objects: one a box")
        objects = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    names: list[str | int] = []
    for one in objects:
        label = next((one[key] for key in _LABEL if one.get(key) is not None), None)
        try:
            x, y, w, h = map(float, one["bbox"])
        except (KeyError, TypeError, ValueError):
            raise PatchloomError(f"{where} has an object whose bbox is not x y w h: {one.get('bbox')}") from None
        if not isinstance(label, str | int):
            raise PatchloomError(f"{where} has an object without a class: give it a category")
        sheet.add((x, y, x + w, y + h), -1, any(bool(one.get(key)) for key in _CROWD))
        names.append(label)
    return sheet, names


def _stored(images: Hub, i: int) -> Path | bytes:
    stored = images.stored(i)
    return stored if isinstance(stored, bytes) else Path(stored)
