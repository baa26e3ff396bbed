"""Interface of annotated images, and subsets of them."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from xml.etree import ElementTree

import numpy as np
from PIL import Image
from torch import Tensor
from yaml import YAMLError

from patchloom.data.decode import (
    Unreadable,
    open_pillow,
    read_orientation,
    silence_decoders,
)
from patchloom.data.notes import count_of, left_out, limit_examples
from patchloom.data.source import Source, digest
from patchloom.data.sources.huggingface import splits_of
from patchloom.data.sources.names import TEST, TRAIN, VALIDATION, is_role, split_of
from patchloom.errors import PatchloomError, one_line
from patchloom.system.files import LIST_FILE, SMALL_FILE, read_bytes, read_text, regular

if TYPE_CHECKING:
    from datasets import Dataset

IGNORED = -1  # in label maps: pixels that do not count


@dataclass(frozen=True)
class Objects:
    """Annotated objects of an image. Letters: m objects, h w height and width of the image in pixels.

    Attributes:
        boxes: float32 [m 4], x0 y0 x1 y1 in pixels, x1 and y1 exclusive.
        labels: int64 [m], numbers of classes, from 0.
        masks: bool [m h w]; None if the data has only boxes.
        crowd: bool [m], groups or doubtful objects: detections there are neither right nor wrong.
        decode: returns the mask of object k, bool [h w]; used instead of ``masks`` to save memory.
    """

    boxes: Tensor
    labels: Tensor
    masks: Tensor | None
    crowd: Tensor
    decode: Callable[[int], Tensor] | None = None

    @property
    def has_masks(self) -> bool:
        """True if objects have masks, decoded or not."""
        return self.masks is not None or self.decode is not None

    def mask(self, k: int) -> Tensor:
        """Return the mask of object k, bool [h w]."""
        if self.decode is not None:
            return self.decode(k)
        assert self.masks is not None
        return self.masks[k]


T = TypeVar("T", Tensor, Objects)


class Annotated(ABC, Generic[T]):
    """Images with annotations: a label map each, int16 [h w] with `IGNORED`, or `Objects`.

    Attributes:
        images: the images without annotations, in the same order.
        classes: names of the classes.
        ids: number of each class in the data's own files; () if these have none.
        pixels: int64 [n k], number of pixels of each class in each image; None if they have not been counted.
    """

    images: Source
    classes: tuple[str, ...]
    ids: tuple[int, ...] = ()
    pixels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.images)

    @abstractmethod
    def truth(self, i: int) -> T:
        """Return the annotation of image i."""

    def outlined(self, i: int) -> T:
        """Return `truth`, with masks that are decoded one at a time where the data store outlines."""
        return self.truth(i)

    def size(self, i: int) -> tuple[int, int]:
        """Return (h, w) of image i in pixels."""
        height, width = self.images.read(i).shape[1:]
        return height, width

    @abstractmethod
    def fingerprint(self) -> str:
        """Return 16 hex digits that change when an image or an annotation does."""

    def subset(self, indices: Sequence[int] | np.ndarray) -> Annotated[T]:
        """Return only these images, in this order."""
        return AnnotatedSubset(self, indices)


class AnnotatedSubset(Annotated[T]):
    """Some images of others, in the order of ``indices``, with the same classes."""

    whole: Annotated[T]

    def __init__(self, whole: Annotated[T], indices: Sequence[int] | np.ndarray) -> None:
        self.whole, self.indices = whole, np.asarray(indices, dtype=np.int64)
        self.images, self.classes, self.ids = whole.images.subset(self.indices), whole.classes, whole.ids
        self.pixels = None if whole.pixels is None else whole.pixels[self.indices]

    def truth(self, i: int) -> T:
        return self.whole.truth(int(self.indices[i]))

    def outlined(self, i: int) -> T:
        return self.whole.outlined(int(self.indices[i]))

    def size(self, i: int) -> tuple[int, int]:
        return self.whole.size(int(self.indices[i]))

    def fingerprint(self) -> str:
        return digest(chain([self.whole.fingerprint()], map(str, self.indices)))


PARTS = (TRAIN, VALIDATION, TEST)


@dataclass(frozen=True)
class AnnotatedData(Generic[T]):
    """Annotated images of each part.

    Attributes:
        train: images to train on.
        validation: images to choose by; None if the data brings none.
        test: images to test on; None if the data brings none.
        notes: a line for each thing that was left out or read in an unexpected way.
    """

    train: Annotated[T]
    validation: Annotated[T] | None
    test: Annotated[T] | None
    notes: tuple[str, ...] = ()

    @classmethod
    def of_parts(cls, parts: Mapping[str, Annotated[T]], notes: Iterable[str]) -> AnnotatedData[T]:
        """Create from parts by name. Without a test part, that for validation is the test."""
        validation, test = parts.get(VALIDATION), parts.get(TEST)
        if validation is None or test is not None:
            return cls(parts[TRAIN], validation, test, tuple(notes))
        renamed = f"The validation part ({count_of(len(validation), 'image')}) is the test, as there is no other"
        return cls(parts[TRAIN], None, validation, (*notes, renamed))


# The names of classes, and the numbers by which label maps mean them: ``classes.txt``, ADE20K's list, or numbers.


CLASSES, ADE_CLASSES = "classes.txt", "objectInfo150.txt"
ADE_COUNT = 150

_NUMBERED = re.compile(r"(\d{1,18})(?:\s*[:,;=]\s*|\s+)(\S.*)")  # "7 road", "7: road"
_COLOURED = re.compile(r"(\d{1,18})[\s,]+(\d{1,18})[\s,]+(\d{1,18})[\s,:]+(\S.*)")  # "128 64 128 road"
_SPARSE = 32  # numbers from which on a list of classes is asked for where few of them occur
MOST_CLASSES = 2**15 - 1  # classes, as label maps become int16


@dataclass(frozen=True)
class ClassList:
    """Classes in order.

    Attributes:
        names: names of the classes.
        ids: number of each class in the stored label maps.
        colours: uint8 [k 3], colour of each class in colour-coded label maps, if the list has them.
        source: the file, or a description of the origin of the names.
    """

    names: tuple[str, ...]
    ids: tuple[int, ...]
    colours: np.ndarray | None
    source: str

    def without(self, ignored: Collection[int]) -> ClassList:
        """Return the same without the classes that have these numbers in label maps."""
        kept = [place for place, number in enumerate(self.ids) if number not in ignored]
        return replace(self, names=tuple(self.names[i] for i in kept), ids=tuple(self.ids[i] for i in kept))


def read_classes(file: Path) -> ClassList:
    """Read ``classes.txt``: a name a line, line i (from 0) being class i; or ``ID NAME``, ``ID: NAME``, ``R G B
    NAME``.
    """
    lines = read_lines(file)
    if not lines:
        raise PatchloomError(f"{file} is empty: write the name of a class a line")
    if "" in lines:
        raise PatchloomError(
            f"line {lines.index('') + 1} of {file} is empty: write the name of a class in every line, as they count"
        )
    numbers: Sequence[int] = range(len(lines))
    colours = None
    if all(rows := [_COLOURED.fullmatch(line) for line in lines]):
        names = [row[4] for row in rows if row]
        values = [tuple(map(int, row.groups()[:3])) for row in rows if row]
        if wrong := next((line for line, value in zip(lines, values, strict=True) if max(value) > 255), None):
            raise PatchloomError(f"{file} has the line {wrong}: colours are three numbers from 0 to 255")
        refuse_repeated(file, "classes", values, "colour")
        colours = np.array(values, np.uint8)
    elif all(rows := [_NUMBERED.fullmatch(line) for line in lines]):
        names, numbers = [row[2] for row in rows if row], [int(row[1]) for row in rows if row]
        refuse_repeated(file, "classes", numbers, "number")
    else:
        names = lines
    refuse_repeated(file, "classes", names, "name")
    if max(numbers) > 65535 or len(names) > MOST_CLASSES:
        raise PatchloomError(f"{file} has classes up to {max(numbers):,}: label maps hold numbers up to 65,535")
    return ClassList(tuple(names), tuple(numbers), colours, str(file))


def read_ade_classes(file: Path) -> ClassList:
    """Read ADE20K's ``objectInfo150.txt``: a table whose last column is the name, the first being the number."""
    rows = [line.split("\t") for line in read_lines(file)[1:] if line]
    firsts = [row[0].strip() for row in rows]
    if firsts != [str(number + 1) for number in range(ADE_COUNT)]:
        raise PatchloomError(f"{file} is not ADE20K's list of 150 classes: give it as it was published, or none")
    full = [row[-1].strip() for row in rows]
    short = [re.split("[,;]", name)[0].strip() for name in full]
    names = [brief if short.count(brief) == 1 else whole for brief, whole in zip(short, full, strict=True)]
    return ClassList(tuple(names), tuple(range(1, ADE_COUNT + 1)), None, str(file))


def numbered_classes(occurring: Collection[int], ignored: Collection[int], name: str) -> ClassList:
    """Return the classes of label maps without a list: all numbers from 0 to the largest that counts, called so."""
    counted = sorted({number for number in occurring if number not in ignored})
    ids = [number for number in range(counted[-1] + 1 if counted else 0) if number not in ignored]
    if len(ids) > _SPARSE and 4 * len(counted) < len(ids):
        raise PatchloomError(
            f"label maps of {name} hold {len(counted)} numbers up to {counted[-1]:,}: say in {CLASSES} which are "
            f"classes, a line for each, such as {counted[-1]} NAME; or, if they show one thing before a background, "
            f"make two classes of them by --threshold {middle(counted[0], counted[-1])}"
        )
    return ClassList(tuple(map(str, ids)), tuple(ids), None, "the numbers in label maps")


def middle(low: int, high: int) -> int:
    """Return the value for --threshold that makes two classes of numbers: half of the largest, if the smallest is 0.

    A mask that was smoothed has kept its edge there. The largest number is that of the data, since a thin or small
    structure loses height when it is smoothed.
    """
    return (low + high + 1) // 2


def read_lines(file: Path, errors: str = "strict") -> list[str]:
    """Return the lines of a text file in UTF-8, without space around each, up to the last that is not empty."""
    try:
        text = read_text(file, "utf-8-sig", errors, most=LIST_FILE, follow=True)
    except (OSError, UnicodeDecodeError) as problem:
        raise PatchloomError(f"{file} cannot be read as text: {problem}") from problem
    return [line.strip() for line in text.rstrip().splitlines()]


def read_document(path: Path, kind: str, parse: Callable[[bytes], Any], most: int = SMALL_FILE) -> Any:
    """Return what ``parse`` makes of the content of a file, such as "JSON"; an error says what is wrong with it."""
    content = b" "
    try:
        content = read_bytes(path, most, follow=True)
        return parse(content)
    except (OSError, ValueError, RecursionError, ElementTree.ParseError, YAMLError) as error:
        why = one_line(error) if content.strip() else "it is empty"
        if isinstance(error, UnicodeDecodeError):
            why = "it is not in UTF-8, so save it as that"
        raise PatchloomError(f"{path} cannot be read as {kind}: {why}") from error


def refuse_repeated(file: Path, items: str, values: Iterable[Hashable], key: str) -> None:
    """Raise an error if two of the ``items`` of a file have the same value of ``key``, such as a name."""
    if repeated := [value for value, count in Counter(values).items() if count > 1]:
        raise PatchloomError(f"{file} has several {items} with the {key} {repeated[0]}: give each a unique one")


# How folders of annotated images are laid out: what lies there, to which part it belongs, and what goes together.


FEW_LOST = 0.05  # share of the annotation files without an image, or of the images that cannot be read, at most


def part_from_path(path: str) -> str | None:
    """Return the part to which a file belongs, by the innermost of its folders that is called so."""
    return next(filter(None, map(split_of, reversed(path.split("/")[:-1]))), None)


def by_folder(root: Path, images: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the images of each part, by the names of their folders, and a note on those in none.

    Without such folders, all are for training.
    """
    parts: dict[str, list[str]] = {}
    nowhere: list[str] = []
    for image in images:
        part = part_from_path(image)
        (nowhere if part is None else parts.setdefault(part, [])).append(image)
    if not parts:
        return {TRAIN: nowhere}, []
    return parts, left_out([str(root / image) for image in nowhere], ", in no folder such as train or test", "image")


def hub_parts(name: str) -> tuple[dict[str, tuple[str, Dataset, str]], list[str]]:
    """Open a Hugging Face data set: the split of each part with its rows and its state for `Hub`, and notes."""
    splits, state = splits_of(name)
    parts: dict[str, tuple[str, Dataset, str]] = {}
    notes = []
    for split, dataset in splits.items():
        part = split_of(split) or (TRAIN if len(splits) == 1 else None)
        if part is None or part in parts:
            notes.append(f"The split {split} is left out: only train, validation and test are taken")
        else:
            parts[part] = split, dataset, state(split)
    if TRAIN not in parts:
        raise PatchloomError(f"{name} has the splits {', '.join(splits)}, and none is called train: rename one")
    return parts, notes


def annotation_key(path: str) -> str:
    """Return the key that an image shares with its annotation: its path without suffix and `is_role` folders."""
    *folders, name = path.split("/")
    return "/".join([*(one for one in folders if not is_role(one)), os.path.splitext(name)[0]])


def match_images(root: Path, images: Iterable[str], named: Mapping[str, str]) -> dict[str, str]:
    """Return the annotation file of each image that has one; all paths are relative to ``root``.

    An image of a file has the same `annotation_key`; or else, alone among all images, the same name; or else the name
    that the file says.

    Args:
        root: common folder.
        images: paths of images.
        named: path of each annotation file, with the name of its image that it says, or "".
    """
    by_key: dict[str, list[str]] = {}
    by_stem: dict[str, list[str]] = {}
    for image in images:
        key = annotation_key(image)
        by_key.setdefault(key, []).append(image)
        by_stem.setdefault(key.rpartition("/")[2], []).append(image)
    taken: dict[str, str] = {}
    for annotation, name in named.items():
        key = annotation_key(annotation)
        stem = key.rpartition("/")[2]
        also = os.path.splitext(name.replace("\\", "/").rpartition("/")[2])[0]
        beside = f"{key[: len(key) - len(stem)]}{also}"
        for known, word in ((by_key, key), (by_stem, stem), (by_key, beside), (by_stem, also)):
            if len(found := known.get(word, [])) > 1:
                raise PatchloomError(
                    f"{root / annotation} may be of {root / found[0]} or of {root / found[1]}: give each image a "
                    "unique name"
                )
            if found:
                if (other := taken.setdefault(found[0], annotation)) != annotation:
                    raise PatchloomError(
                        f"{root / found[0]} has two annotations, {root / other} and {root / annotation}: take one of "
                        "them away"
                    )
                break
    return taken


def note_on_unnamed(root: Path, images: Sequence[str], count: int) -> list[str]:
    """Return a sentence on those of ``count`` images that no annotation names; none if there are none."""
    return left_out([str(root / image) for image in images], f" (of {count:,}), as no annotation names them", "image")


def note_on_lost(root: Path, lost: Sequence[str], count: int, files: str) -> list[str]:
    """Return a sentence on annotation files without an image; raise an error if there are many."""
    if not lost:
        return []
    if len(lost) > FEW_LOST * count:
        raise PatchloomError(
            f"{root / lost[0]} has no image of its name ({len(lost):,} of {count:,} {files} have none): put the images "
            "beside them, or into images/"
        )
    some = limit_examples(root / file for file in lost)
    return [f"{len(lost):,} of {count:,} {files} are left out, as they have no image ({some})"]


def files_in(root: Path, folders: Iterable[str], suffixes: Iterable[str]) -> list[str]:
    """Sorted paths, relative to ``root``, of the files with these suffixes directly in some of its folders."""
    ends, found = tuple(suffixes), list[str]()
    for folder in folders:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(root / folder) as entries:
            there = [one.name for one in entries if one.name.lower().endswith(ends) and one.is_file()]
            found += [f"{folder}/{name}" if folder else name for name in there if not name.startswith(".")]
    return sorted(found)


# The size of an image from the head of its file, without decoding it.


_SWAPPED = 5  # first orientation that exchanges height and width
_PARTLY_READ = (".tif", ".tiff", ".dcm", ".dicom", ".heic", ".heif", ".hif")  # PIL alone does not read all of them


class Header(NamedTuple):
    """Header of an image file.

    Attributes:
        size: (h, w) of the upright image.
        orientation: EXIF orientation, 1 to 8: from 2 on it turns the image, and from 5 on it swaps rows and columns.
    """

    size: tuple[int, int]
    orientation: int = 1


def as_stored(what: str, image: str, size: tuple[int, int]) -> PatchloomError:
    """Return the error for an annotation of an image before its EXIF orientation is applied; ``size`` is after it."""
    height, width = size
    return PatchloomError(
        f"{what} of {image} as stored ({height} x {width}), but its EXIF orientation makes it {width} x {height}: "
        "remove that tag (exiftool -Orientation= FILE), or annotate the upright image"
    )


def note_on_turned(images: Sequence[str], of: int, what: str) -> list[str]:
    """Return a sentence on images that their EXIF orientation turns, with annotations such as "boxes"."""
    if not images:
        return []
    are = "is" if len(images) == 1 else "are"
    return [
        f"{len(images):,} of {of:,} images {are} turned by EXIF orientation ({limit_examples(images)}): "
        f"their {what} are taken to be those of the upright image; if they are of the stored one, remove that tag "
        "(exiftool -Orientation= FILE)"
    ]


class Missing(Unreadable):
    """An image is not there."""


def header_of(images: Source, i: int) -> Header:
    """Return the header of image i, without decoding it if it has a file."""
    stored = images.stored(i)
    if isinstance(stored, Path) and not os.path.exists(stored):
        raise Missing(f"{images.describe(i)} is not there")
    suffix = stored.suffix.lower() if isinstance(stored, Path) else ""
    if stored is not None and suffix not in _PARTLY_READ:
        with suppress(Exception), silence_decoders():  # whatever it is, decoding says it better, or can do it
            file = regular(stored, follow=True) if isinstance(stored, Path) else BytesIO(stored)
            if suffix == ".npy":
                h, w = np.load(file, mmap_mode="r", allow_pickle=False).shape[:2]
                return Header((h, w))
            with open_pillow(file) as image:
                width, height = image.size
                orientation = 1 if image.format == "TIFF" else orientation_of(image)  # PIL has turned that of a TIFF
            return Header((width, height) if orientation >= _SWAPPED else (height, width), orientation)
    _, h, w = images.read(i).shape
    return Header((h, w))


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8, of a file that PIL has opened."""
    # of a PNG without this in its head, PIL would decode all pixels to look behind them
    if image.format == "PNG" and not {"exif", "XML:com.adobe.xmp"} & set(image.info):
        return 1
    return read_orientation(image)
