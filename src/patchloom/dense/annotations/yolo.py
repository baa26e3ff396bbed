"""Boxes and outlines as YOLO's text has them: a file an image, a line an object, in shares of width and height."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from patchloom.data.notes import limit_examples
from patchloom.data.sources.names import TRAIN, is_role, split_of
from patchloom.data.sources.scandir import Listing, list_files, some_images
from patchloom.dense.annotations.base import (
    MOST_CLASSES,
    PARTS,
    by_folder,
    files_in,
    note_on_lost,
    read_document,
    read_lines,
    refuse_repeated,
)
from patchloom.dense.annotations.boxes import Annotations, ImageAnnotation, in_parts
from patchloom.display import track_progress
from patchloom.errors import PatchloomError
from patchloom.system.documents import parse_number
from patchloom.system.files import read_yaml

_NAMES = ("classes.txt", "classes.names", "obj.names", "names.txt", "labels.txt")
_PIXELS = 2.0  # a share beyond that is no share


def yaml_files(root: Path) -> list[str]:
    """Return the YAML files directly in a folder that name classes and images to train on, as ``data.yaml`` does."""
    files = files_in(root, [""], (".yaml", ".yml"))
    return [file for file in files if "names" in (found := _read_yaml(root / file)) and "train" in found]


def text_files(root: Path, listed: Listing) -> list[str]:
    """Return the text files that may be labels, sorted: in ``labels``, or beside images whose names they have."""
    inside = [one for one in listed.folders if "labels" in one.lower().split("/")]
    if inside:
        return [file for file in files_in(root, inside, (".txt",)) if os.path.basename(file).lower() not in _NAMES]
    stems = {os.path.splitext(image)[0] for image in listed.paths}
    return [file for file in files_in(root, listed.folders, (".txt",)) if file[:-4] in stems]


def find_yolo(name: str, root: Path, listed: Listing, files: Sequence[str]) -> Annotations:
    """Return the images, boxes and outlines of a folder ``images`` beside one called ``labels``, or of both in one.

    An image without a text file has no objects. Class names are the lines of ``classes.txt``.
    """
    images = [*listed.paths]
    in_role = [image for image in images if any(map(is_role, image.split("/")[:-1]))]
    parts, notes = by_folder(root, in_role or images)
    folders = dict.fromkeys(["", *(os.path.dirname(file) for file in files), "labels"])
    there = (root / folder / one for folder in folders for one in _NAMES)
    path = next((one for one in there if one.is_file()), None)
    classes = None if path is None else _names([line for line in read_lines(path) if line], path)
    return _annotations(name, root, parts, classes, files, notes)


def find_yaml(name: str, path: Path) -> Annotations:
    """Return the images, boxes and outlines that a ``data.yaml`` names.

    It has ``names``, a list or numbers with names, and for ``train``, ``val`` and ``test`` a folder of images, a text
    file that lists them, or several; they are relative to its ``path``, or to the file itself.
    """
    content = _read_yaml(path)
    if not ("names" in content and "train" in content):
        raise PatchloomError(f"{path} is not as YOLO's data.yaml is: it needs names, the classes, and train, a folder")
    names = content["names"]
    if isinstance(names, dict):
        if [*names] != [*range(len(names))]:
            raise PatchloomError(f"{path} numbers its names {', '.join(map(str, names))}: number them 0, 1, 2 ...")
        names = [*names.values()]
    if not isinstance(names, list):
        raise PatchloomError(f"{path} has names that are no list: write names: [a, b]")
    if isinstance(content.get("nc"), int) and content["nc"] != len(names):
        raise PatchloomError(f"{path} says nc: {content['nc']}, and has {len(names)} names: mend one of them")
    root, base = path.parent, os.path.join(os.path.abspath(path.parent), "")
    bases = [root / str(content["path"]), root] if content.get("path") else [root]
    parts: dict[str, list[str]] = {}
    notes: list[str] = []
    for part in PARTS:
        given: Any = next((value for key, value in content.items() if value and split_of(str(key)) == part), [])
        places = [given] if isinstance(given, str) else given
        if not (isinstance(places, list) and all(isinstance(place, str) for place in places)):
            raise PatchloomError(f"{path} has for {part} no folder and no list of folders, but {given}")
        found: list[Path | None] = []
        for place in places:  # Roboflow's paths start one folder too high
            words = place, re.sub(r"^(?:\.\./)+", "", place)
            tried = (one / word for word in words for one in bases)
            found.append(next((one for one in tried if os.path.exists(one)), None))
        lost = [place for place, there in zip(places, found, strict=True) if there is None]
        if lost and part == TRAIN:
            raise PatchloomError(f"{path} has {lost[0]} for train, which does not exist: mend the path")
        if lost:
            notes.append(f"The part {part} is left out, as {lost[0]}, which {path} names, does not exist")
        elif found:
            parts[part] = []
            for there in filter(None, found):
                if there.is_dir():
                    images = [there / image for image in some_images(list_files(there), str(there)).paths]
                else:
                    images = [there.parent / line for line in read_lines(there) if line]
                plain = (os.path.normpath(os.path.abspath(image)).removeprefix(base) for image in images)
                parts[part] += [image.replace(os.sep, "/") for image in plain]
    listed = list_files(root)
    return _annotations(name, root, parts, _names(names, path), text_files(root, listed), notes)


def _annotations(
    name: str,
    root: Path,
    parts: dict[str, list[str]],
    classes: tuple[str, ...] | None,
    files: Sequence[str],
    notes: list[str],
) -> Annotations:
    """Read the labels of some images.

    The text file of one is in ``labels`` instead of ``images``, or beside it, or in ``labels`` beside it.
    """
    label_of: dict[str, str | None] = {}
    image_of: dict[str, str] = {}
    for image in chain.from_iterable(parts.values()):
        *folders, file = image.split("/")
        stem = f"{os.path.splitext(file)[0]}.txt"
        swaps = [i for i in reversed(range(len(folders))) if is_role(folders[i])]
        tried = [[*folders[:i], "labels", *folders[i + 1 :], stem] for i in swaps]
        tried += [[*folders, stem], [*folders, "labels", stem]]
        label = next((one for one in map("/".join, tried) if os.path.isfile(root / one)), None)
        label_of[image] = label
        if label is not None and (other := image_of.setdefault(label, image)) != image:
            raise PatchloomError(
                f"{root / label} may be of {root / other} or of {root / image}: give each image a unique name"
            )
    notes += note_on_lost(root, [file for file in files if file not in image_of], len(files), "text files")
    sheets: dict[str, ImageAnnotation] = {}
    for image, label in track_progress(label_of.items(), len(label_of), f"reading the labels of {name}"):
        sheets[image] = ImageAnnotation(str(root / image), relative=True)
        if label is not None:
            sheets[image] = read_yolo(root / label, None if classes is None else len(classes))
    without = [image for image, label in label_of.items() if label is None]
    if without:
        notes.append(
            f"{len(without):,} of {len(label_of):,} images have no text file, and are taken as images without objects "
            f"({limit_examples(root / image for image in without)})"
        )
    if classes is None:
        count = max((label for sheet in sheets.values() for label in sheet.labels), default=-1) + 1
        classes = tuple(map(str, range(count)))
        notes.append(f"Classes are called by their numbers, as {name} has no classes.txt and no data.yaml")
    return Annotations(classes, in_parts(name, root, parts, sheets), notes)


def read_yolo(path: Path, classes: int | None) -> ImageAnnotation:
    """Read the labels of one image: ``class x y w h``, the centre first, or ``class x y x y x y ...``, an outline."""
    sheet = ImageAnnotation(str(path), relative=True)
    for number, line in enumerate(read_lines(path), 1):
        words = line.split()
        if not words:
            continue
        where = f"{path}, line {number},"
        try:
            label, *values = map(parse_number, words)
        except ValueError as error:
            raise PatchloomError(f"{where} cannot be read: {error}") from error
        if len(values) != 4 and (len(values) < 6 or len(values) % 2):
            raise PatchloomError(f"{where} has {len(words)} numbers: write class x y w h, or class x y x y x y ...")
        if not 0 <= label < (MOST_CLASSES if classes is None else classes) or label % 1:
            known = "" if classes is None else f", and there are {classes}"
            raise PatchloomError(f"{where} is of class {words[0]}: classes are counted from 0{known}")
        if any(abs(value) > _PIXELS for value in values):
            raise PatchloomError(
                f"{where} has pixels where YOLO has shares of width and height, 0 to 1: divide by them"
            )
        if len(values) == 4:
            x, y, w, h = values
            sheet.add((x - w / 2, y - h / 2, x + w / 2, y + h / 2), int(label))
        else:
            xs, ys = values[::2], values[1::2]
            sheet.add((min(xs), min(ys), max(xs), max(ys)), int(label), outline=[values])
    return sheet


def _read_yaml(path: Path) -> dict[str, Any]:
    found = read_document(path, "YAML", read_yaml)
    return found if isinstance(found, dict) else {}


def _names(names: Iterable[Any], path: Path) -> tuple[str, ...]:
    said = tuple(map(str, names))
    if not said:
        raise PatchloomError(f"{path} has no names of classes: write one for each")
    if len(said) > MOST_CLASSES:
        raise PatchloomError(f"{path} has {len(said):,} names of classes: give up to {MOST_CLASSES:,}")
    refuse_repeated(path, "classes", said, "name")
    return said
