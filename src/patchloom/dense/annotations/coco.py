"""Boxes and masks in COCO JSON (Lin et al. 2014, arXiv 1405.0312): one file for the images of a part."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from patchloom.data.sources.names import TRAIN, is_role, split_of
from patchloom.data.sources.scandir import Listing
from patchloom.dense.annotations.base import (
    by_folder,
    files_in,
    note_on_unnamed,
    part_from_path,
    read_document,
    refuse_repeated,
)
from patchloom.dense.annotations.boxes import AnnotatedFiles, Annotations, ImageAnnotation, in_parts, told_size
from patchloom.errors import PatchloomError, listing
from patchloom.system.documents import parse_json
from patchloom.system.files import LIST_FILE

_SEARCHED = 100  # folders of images that are searched for JSON files
_NEAR = re.compile("instances|coco|annot|train|val|test|label", re.IGNORECASE)  # in the names of such files
_SAMPLED = 20  # images of a file by which the folder of all is found


def json_files(root: Path, listed: Listing) -> list[str]:
    """Return the JSON files that may be COCO's, sorted: in it, or in ``annotations``, ``train`` and the like.

    Where some are called ``instances_...``, as COCO's own are, the others (keypoints, captions) are none of them.
    """
    folders = [one for one in listed.folders if all(is_role(word) or split_of(word) for word in one.split("/") if one)]
    files = files_in(root, folders, (".json",))
    return [file for file in files if os.path.basename(file).startswith("instances")] or files


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON file; return None if it is not COCO JSON, which has a list of images."""
    found = read_document(path, "JSON", parse_json, LIST_FILE)
    return found if isinstance(found, dict) and isinstance(found.get("images"), list) else None


def find_coco(
    name: str, root: Path, listed: Listing, files: Mapping[str, dict[str, Any]], alone: bool = False
) -> Annotations:
    """Return the images, boxes and masks of a folder.

    A file is of the part that its name or its folder says, as in ``instances_val2017.json``; a single one that says
    none is of the parts in whose folders its images lie, or else for training. Categories are numbered in the order of
    their ids. ``iscrowd`` is taken as `Objects.crowd`.
    """
    parts: dict[str, AnnotatedFiles] = {}
    notes: list[str] = []
    known, named = set(listed.paths), set()
    categories: list[dict[str, Any]] = []
    first: Path | None = None
    for part, file in ({None: next(iter(files))} if alone else _parts(name, [*files])).items():
        path, content = root / file, files[file]
        if "annotations" not in content and part not in (TRAIN, None):
            notes.append(f"{path} is left out, as it has images without annotations")
            continue
        here = _entries(path, content, "categories", {"id": int, "name": str})
        if not here:
            raise PatchloomError(f"{path} has no categories: name the classes of its annotations")
        for key in ("id", "name"):
            refuse_repeated(path, "categories", [one[key] for one in here], key)
        here = sorted(({"id": one["id"], "name": one["name"]} for one in here), key=lambda one: one["id"])
        if first is not None and here != categories:
            raise PatchloomError(f"{path} has other categories than {first}: give both the same ids and names")
        categories, first = here, path
        images, sheets = _sheets(path, content, {one["id"]: k for k, one in enumerate(here)})
        paths = _image_paths(images, file, part, listed.folders, known)
        if repeated := [image for image, count in Counter(paths).items() if count > 1]:
            raise PatchloomError(f"{path} has {repeated[0]} more than once: give each image one entry")
        within, said = by_folder(root, paths) if part is None else ({part: paths}, [])
        if alone and TRAIN not in within:
            within, said = {TRAIN: paths}, []
        notes += said
        parts |= in_parts(name, root, within, dict(zip(paths, sheets, strict=True)))
        named.update(paths)
    notes += note_on_unnamed(root, sorted(known - named), len(known | named))
    ids = tuple(one["id"] for one in categories)
    return Annotations(tuple(str(one["name"]) for one in categories), parts, notes, ids)


def image_ids(images: Sequence[Path]) -> tuple[dict[Path, int], list[Path]]:
    """Find the ids that COCO JSON files give to images, and return those files, too.

    The files lie in a folder of the images or in one of two folders above all of them, or in ``annotations`` there. The
    names in them have to be the ends of the images' paths. Of several files, those of the image's folder or part count;
    an image that these number differently has no id.
    """
    if not images:
        return {}, []
    folders = sorted({image.parent for image in images})
    shared = Path(os.path.commonpath(folders))
    places = dict.fromkeys([shared, *shared.parents[:2], *folders[:_SEARCHED]])
    files = [place / one for place in places for one in files_in(place, ["", "annotations"], (".json",))]
    files = [file for file in files if _NEAR.search(file.stem)]
    files = [file for file in files if file.name.startswith("instances")] or files
    by_name: dict[str, list[tuple[str, int, Path]]] = {}
    for file in dict.fromkeys(files):
        with suppress(PatchloomError):  # of other programs
            content = read_json(file) or {"images": []}
            for one in _entries(file, content, "images", {"id": int, "file_name": str}):
                name = _plain(one["file_name"])
                by_name.setdefault(name.rpartition("/")[2], []).append((name, one["id"], file))
    found: dict[Path, int] = {}
    used: dict[Path, None] = {}
    for image in images:
        part, whole = part_from_path(image.as_posix()), f"/{image.as_posix()}"
        those = [known for known in by_name.get(image.name, []) if whole.endswith(f"/{known[0]}")]
        those = [known for known in those if known[2].parent == image.parent] or those
        those = [known for known in those if _part_of(str(known[2])) == part] or those
        if len({number for _, number, _ in those}) == 1:
            found[image] = those[0][1]
            used |= dict.fromkeys(file for _, _, file in those)
    return found, [*used]


def _parts(name: str, files: Sequence[str]) -> dict[str | None, str]:
    """Return the file of each part; of a single one that does not say its part, it is None."""
    found: dict[str | None, list[str]] = {}
    for file in files:
        found.setdefault(_part_of(file), []).append(file)
    several = next((those for those in found.values() if len(those) > 1), [])
    if None in found and len(found) > 1 or several:
        which = listing(several or files, "and")
        raise PatchloomError(
            f"{name} holds {which}, and it is not clear which is for training: call them train.json, val.json and "
            "test.json, or give one of them instead of the folder"
        )
    return {part: those[0] for part, those in found.items()}


def _part_of(file: str) -> str | None:
    """Return the part that the name or the folder of a file says."""
    words = re.split(r"[^A-Za-z]+", os.path.splitext(os.path.basename(file))[0])
    return next(filter(None, map(split_of, words)), part_from_path(file))


def _sheets(path: Path, content: dict[str, Any], number: Mapping[int, int]) -> tuple[list[str], list[ImageAnnotation]]:
    """Return the names of the images of a file, and their sheets."""
    images = _entries(path, content, "images", {"id": int, "file_name": str})
    annotations = _entries(path, content, "annotations", {"image_id": int, "category_id": int, "bbox": list})
    if not annotations:
        raise PatchloomError(f"{path} has no annotations: annotate some of its images")
    refuse_repeated(path, "images", [one["id"] for one in images], "id")
    given = [one["id"] for one in annotations if isinstance(one.get("id"), int | str)]
    refuse_repeated(path, "annotations", given, "id")
    sheets: dict[int, ImageAnnotation] = {}
    for image in images:
        sheets[image["id"]] = ImageAnnotation(f"{path}, image {image['file_name']},", told_size(image))
    for one in annotations:
        sheet, label = sheets.get(one["image_id"]), number.get(one["category_id"])
        if sheet is None or label is None:
            what = f"category {one['category_id']}" if label is None else f"image {one['image_id']}"
            raise PatchloomError(f"{path} has an annotation (id {one.get('id')}) of {what}, which it does not list")
        try:
            x, y, w, h = map(float, one["bbox"])
        except (TypeError, ValueError):
            raise PatchloomError(
                f"{path} has an annotation (id {one.get('id')}) whose bbox {one['bbox']} is not four numbers x y w h"
            ) from None
        sheet.add((x, y, x + w, y + h), label, bool(one.get("iscrowd")), one.get("segmentation") or None)
    return [image["file_name"] for image in images], [*sheets.values()]


def _entries(path: Path, content: dict[str, Any], what: str, needed: Mapping[str, type]) -> list[dict[str, Any]]:
    """Return one of the lists of a file, after checking the required fields of its entries."""
    found = content.get(what, [])
    if not isinstance(found, list):
        raise PatchloomError(f"{path} is not as COCO JSON is: its {what} are no list")
    for one in found:
        for key, kind in needed.items():
            value = one.get(key) if isinstance(one, dict) else None
            if not isinstance(value, kind) or isinstance(value, bool):
                known = f" (id {one['id']})" if isinstance(one, dict) and "id" in one else ""
                raise PatchloomError(
                    f"{path} is not as COCO JSON is: an entry of its {what}{known} has {key} {json.dumps(value)[:50]}"
                )
    return found


def _image_paths(
    images: Sequence[str], file: str, part: str | None, folders: Iterable[str], known: set[str]
) -> list[str]:
    """Return the paths of the images of a file, relative to the common root.

    COCO files do not state the folder of their images. It is the one that contains most of a sample: the folder of the
    file before those of its part, before others. If none contains any, folders in the names are ignored.
    """
    plain = [_plain(image) for image in images]
    bare = [image.rpartition("/")[2] for image in plain]
    own = os.path.dirname(file)
    ranked = sorted(folders, key=lambda one: (one != own, part_from_path(f"{one}/") != part, one.count("/"), one))
    step = max(1, len(images) // _SAMPLED)
    for names in (plain, bare):
        there = [sum(_joined(folder, one) in known for one in names[::step]) for folder in ranked]
        if any(there):
            folder = ranked[there.index(max(there))]
            return [_joined(folder, one) for one in names]
    return [_joined(own, one) for one in plain]


def _plain(name: str) -> str:
    return os.path.normpath(name.replace("\\", "/")).replace(os.sep, "/")


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
