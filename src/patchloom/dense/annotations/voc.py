"""Boxes in the XML of Pascal VOC (Everingham et al. 2010): a file an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

from patchloom.data.notes import left_out
from patchloom.data.sources.names import TRAIN, split_of
from patchloom.data.sources.scandir import Listing
from patchloom.dense.annotations.base import (
    by_folder,
    match_images,
    note_on_lost,
    note_on_unnamed,
    read_document,
    read_lines,
)
from patchloom.dense.annotations.boxes import Annotations, ImageAnnotation, in_parts, number_labels
from patchloom.display import track_progress
from patchloom.errors import PatchloomError
from patchloom.system.documents import parse_number, parse_xml

_DEVKIT = "Annotations", "JPEGImages"  # folders of VOC's own sets
# files that say which image belongs to which part; trainval stands for train where there is no other
_LISTS = ("train", "val", "test", "trainval")


def find_voc(name: str, root: Path, listed: Listing, files: Sequence[str]) -> Annotations:
    """Return the images and boxes of a folder.

    It is as VOC's own sets are (``JPEGImages``, ``Annotations``, ``ImageSets/Main``), or has images and XML files of
    the same names, in two folders or side by side, with or without ``train``, ``val`` and ``test`` within or around.
    """
    kits = [folder for folder in listed.folders if folder.rpartition("/")[2] == _DEVKIT[0]]
    kits = [kit[: -len(_DEVKIT[0])] for kit in kits if f"{kit[: -len(_DEVKIT[0])]}{_DEVKIT[1]}" in listed.folders]
    if len(kits) > 1:
        raise PatchloomError(f"{name} holds several sets of Pascal VOC ({', '.join(kits)}): give the folder of one")
    images = [*listed.paths]
    if kits:
        images = [image for image in images if image.startswith(f"{kits[0]}{_DEVKIT[1]}/")]
        files = [file for file in files if file.startswith(f"{kits[0]}{_DEVKIT[0]}/")]
    reading = track_progress(files, len(files), f"reading the annotations of {name}")
    read = {file: read_voc(root / file) for file in reading}
    taken = match_images(root, images, {file: annotation.image for file, annotation in read.items()})
    of_image, used = {image: read[file] for image, file in taken.items()}, {*taken.values()}
    notes = note_on_unnamed(root, [image for image in images if image not in taken], len(images))
    notes += note_on_lost(root, [file for file in files if file not in used], len(files), "XML files")
    lists: dict[str, Path] = {}  # the file that lists the images of each part
    for word in _LISTS if kits else ():
        path = root / kits[0] / "ImageSets" / "Main" / f"{word}.txt"
        if path.is_file():
            lists.setdefault(str(split_of(word)), path)
    by_part, said = _by_list(root, lists, of_image) if lists else by_folder(root, sorted(of_image))
    parts = in_parts(name, root, by_part, of_image)
    sheets = [sheet for part in parts.values() for sheet in part.sheets]
    classes = tuple(sorted({label for sheet in sheets for label in sheet.labels}))
    number_labels(sheets, {one: k for k, one in enumerate(classes)})
    return Annotations(classes, parts, [*said, *notes])


def _by_list(
    root: Path, lists: dict[str, Path], of_image: dict[str, ImageAnnotation]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the images of each part, as the lists of VOC's own sets have them, and notes."""
    by_stem = {PurePosixPath(image).stem: image for image in of_image}
    parts: dict[str, list[str]] = {}
    notes: list[str] = []
    seen: dict[str, Path] = {}
    for part, path in lists.items():
        stems = [line.split()[0] for line in read_lines(path, errors="surrogateescape") if line]
        lost = [stem for stem in stems if stem not in by_stem]
        if stems and len(lost) == len(stems) and part != TRAIN:
            notes.append(f"The part {part} is left out, as none of its {len(stems):,} images is annotated ({path})")
            continue
        if lost:
            raise PatchloomError(
                f"{path} lists {lost[0]}, which has no image with an annotation ({len(lost):,} of {len(stems):,}): "
                "take such lines out"
            )
        for stem in stems:
            if stem in seen:
                raise PatchloomError(f"{path} lists {stem}, and {seen[stem]} does, too: take one of the lines out")
            seen[stem] = path
        parts[part] = [by_stem[stem] for stem in stems]
    left = [image for stem, image in by_stem.items() if stem not in seen]
    return parts, notes + left_out([str(root / image) for image in left], ", as no list of a part has them", "image")


def read_voc(path: Path) -> ImageAnnotation:
    """Read one XML file; labels are the names of the classes.

    VOC boxes are 1-based and inclusive, so x0 is ``xmin - 1`` and x1 is ``xmax``, and the same for y; this equals the
    box in COCO's or YOLO's format. ``difficult`` objects become `Objects.crowd`: VOC's scores count neither a detection
    nor a miss of them.
    """
    root = read_document(path, "XML", parse_xml)
    if root.tag != "annotation":
        raise PatchloomError(f"{path} is no annotation of Pascal VOC: it begins with <{root.tag}>, not <annotation>")
    height, width = (_number(path, root, f"size/{side}", "0") for side in ("height", "width"))
    size = (int(height), int(width)) if height > 0 and width > 0 else None
    sheet = ImageAnnotation(str(path), size, (root.findtext("filename") or "").strip())
    for thing in root.iterfind("object"):
        name = (thing.findtext("name") or "").strip()
        if not name:
            raise PatchloomError(f"{path} has an object without a name: say which class it is")
        x0, y0, x1, y1 = (_number(path, thing, f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax"))
        sheet.add((x0 - 1, y0 - 1, x1, y1), name, crowd=(thing.findtext("difficult") or "").strip() == "1")
    return sheet


def _number(path: Path, where: ElementTree.Element, what: str, default: str = "") -> float:
    try:
        return parse_number(where.findtext(what) or default)
    except ValueError as error:
        raise PatchloomError(f"{path} has no number in {what}: {error}") from error
