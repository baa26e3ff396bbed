"""Opening images with label maps: a folder, a Hugging Face data set, pairs given in Python, or drawn shapes."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from patchloom.arguments import validate_arguments
from patchloom.data.decode import (
    Unreadable,
    apply_orientation,
    check_page,
    open_checked,
    read_series,
    silence_decoders,
)
from patchloom.data.notes import left_out, limit_examples
from patchloom.data.source import Data, Source, digest
from patchloom.data.sources.builtin import is_builtin, open_builtin
from patchloom.data.sources.files import Files
from patchloom.data.sources.huggingface import Hub, is_hub
from patchloom.data.sources.in_memory import DataLike, open_objects
from patchloom.data.sources.label_maps import (
    Folder,
    is_map_name,
    maps_by_values,
    marked_paths,
    partners,
    read_folders,
)
from patchloom.data.sources.names import TRAIN, VALIDATION, split_of
from patchloom.data.sources.scandir import list_files, note_on_foreign, some_images
from patchloom.data.sources.synthetic import SHAPES, Shapes
from patchloom.data.workers import in_threads
from patchloom.dense.annotations.base import (
    ADE_CLASSES,
    ADE_COUNT,
    CLASSES,
    IGNORED,
    Annotated,
    AnnotatedData,
    ClassList,
    as_stored,
    header_of,
    hub_parts,
    middle,
    note_on_turned,
    numbered_classes,
    orientation_of,
    read_ade_classes,
    read_classes,
)
from patchloom.display import StatusMessage, track_progress
from patchloom.errors import PatchloomError, listing, one_line
from patchloom.system.files import LIST_FILE, cache_root, no_such_path, read_bytes, read_cached, write_sealed

if TYPE_CHECKING:
    from datasets import Dataset


# Label maps as they are stored: a number a pixel, which is never looked up as a colour.


_ORIENTATION = 274  # TIFF's tag
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_LOSSY_FORMATS = ("JPEG", "MPO", "WEBP")
_SPREAD = {2: 85, 4: 17}  # what PIL multiplies grey values of so few bits by, to fill 8


def read_ids(
    source: Path | bytes, name: str, colours: np.ndarray | None = None, threshold: int | None = None
) -> np.ndarray:
    """Read a label map: PNG, TIFF, BMP or GIF of 1 to 16 bits, grey or with a palette, or a ``.npy`` array.

    The indices into a palette are the numbers, unless its colours are all in ``colours``, at other places: then the
    colours count, since programs that make PNGs smaller write colours as a palette in any order. EXIF orientation is
    applied, as to images. The result is of an integer dtype [h w].

    Args:
        source: the file, or its bytes.
        name: name of the file, for messages.
        colours: uint8 [k 3]; a colour-coded map becomes the indices of its colours in this list.
        threshold: number from which on pixels become 255, and 0 below; then JPEG and grey in three channels are read.
    """
    try:
        with silence_decoders():
            array, kind = _decoded(
                source if isinstance(source, bytes) else read_bytes(source, LIST_FILE, follow=True), colours
            )
    except Exception as error:  # decoders raise nearly anything on broken bytes
        reason = one_line(error, str(source)) if isinstance(source, Path) else "it is damaged"
        raise Unreadable(f"{name} cannot be read as a label map: {reason}") from error
    if kind in _LOSSY_FORMATS and threshold is None:
        raise _refuse_lossy(name)
    return _checked(array, name, colours, threshold)


def _refuse_lossy(name: str) -> PatchloomError:
    return PatchloomError(
        f"{name} is of a format that changes numbers to make files small: save label maps as PNG, or make two classes "
        "of them by --threshold 128"
    )


def _decoded(content: bytes, colours: np.ndarray | None) -> tuple[np.ndarray, str]:
    """Return the values of a file, and its format as PIL calls it."""
    if content.startswith(b"\x93NUMPY"):
        return np.load(BytesIO(content), allow_pickle=False), "NPY"
    if content.startswith(_TIFF):
        import tifffile  # it imports imagecodecs, which few formats need

        with tifffile.TiffFile(BytesIO(content)) as tiff:
            page = tiff.pages.first
            check_page(page, len(content))
            read_series(tiff)  # which refuses a file that was cut short
            return apply_orientation(page.asarray(), int(page.tags.valueof(_ORIENTATION, 1))), "TIFF"
    with open_checked(BytesIO(content)) as image:
        kind, orientation = str(image.format), orientation_of(image)
        array = np.asarray(image)
        if image.mode == "P" and colours is not None:
            palette = np.zeros((256, 3), np.uint8)
            entries = np.asarray(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
            palette[: len(entries)] = entries
            own = {i: palette[i].tolist() for i in np.unique(array).tolist()}
            listed = colours.tolist()
            if all(colour in listed for colour in own.values()) and any(
                listed[i : i + 1] != [colour] for i, colour in own.items()
            ):
                array = palette[array]
        if kind == "PNG" and content[25:26] == b"\0":  # grey: bits follow width and height in the head, then colours
            array = array // np.uint8(_SPREAD[content[24]]) if content[24] in _SPREAD else array
        return apply_orientation(array, orientation), kind


def _checked(array: np.ndarray, name: str, colours: np.ndarray | None, threshold: int | None) -> np.ndarray:
    grey = array.ndim == 3 and threshold is not None and (array[..., :3] == array[..., :1]).all()
    if array.ndim == 3 and (array.shape[2] == 1 or grey):
        array = array[..., 0]
    if array.ndim == 3 and array.shape[2] in (3, 4) and array.dtype == np.uint8:
        if colours is None:
            raise PatchloomError(
                f"{name} shows classes by colours: save one number a pixel, or name the colours in classes.txt, a line "
                "'R G B NAME' for each"
            )
        weights = np.array([65536, 256, 1], np.int64)
        known, pixels = colours @ weights, array[..., :3] @ weights
        order = np.argsort(known)
        places = order[np.searchsorted(known[order], pixels).clip(max=len(known) - 1)]
        if (strange := known[places] != pixels).any():
            colour = tuple(map(int, array[strange][0, :3]))
            raise PatchloomError(f"{name} has the colour {colour}, which classes.txt does not name: add a line for it")
        return places
    if array.ndim != 2 or array.dtype.kind not in "uib":
        channels = f"{array.shape[2]} channels" if array.ndim == 3 else "values that are no whole numbers"
        raise PatchloomError(f"{name} has {channels}: a label map has one whole number a pixel")
    if array.dtype.kind == "i" and array.size and array.min() < 0:
        raise PatchloomError(f"{name} holds the number {array.min()}: label maps hold numbers from 0 to 65,535")
    if threshold is not None:
        array = np.where(array >= threshold, np.uint8(255), np.uint8(0))
    return array.astype(np.uint8) if array.dtype == np.bool_ else array


# Which label map belongs to which image, and to which part of the data, by the names of files and folders alone.


# maps of something else than classes, or of classes in colours, as Cityscapes and VOC have them beside the others
_LESSER = re.compile(r"colou?r|instance|object|panoptic|polygon|visual|overlay|preview")
_LOSSY_SUFFIXES = (".jpg", ".jpeg", ".webp", ".heic", ".heif")


@dataclass(frozen=True)
class Layout:
    """Images with label maps. All paths are relative to the folder, with forward slashes.

    Attributes:
        parts: sorted paths of the images of each part that exists, and the paths of their label maps.
        words: name of each part in the folder, such as "val".
        folders: folders that may have a list of classes.
        notes: sentences on skipped files.
    """

    parts: Mapping[str, tuple[list[str], list[str]]]
    words: Mapping[str, str]
    folders: tuple[str, ...]
    notes: tuple[str, ...]


def layout_of(root: Path, paths: Sequence[str], name: str, lossy: bool = False) -> Layout:
    """Find the label map of each image by `patchloom.data.sources.label_maps`, within ``train``, ``val`` and ``test``.

    Those marked by their own names count only where no folder is one of label maps, and those recognised by their
    values only where no name marks any. ``lossy`` allows JPEG.
    """
    folders = read_folders({path.rpartition("/")[0] for path in paths})
    maps, beside = marked_paths(paths, folders)
    split = {folder: _part_of(folder, said) for folder, said in folders.items()}
    if not maps:
        unmarked = [path for path in paths if path not in beside]
        maps = {path: "" for path, those in partners(beside, unmarked, folders, split_of).items() if those}
    by_values = {} if maps else maps_by_values(root, paths)
    maps = maps or dict.fromkeys(by_values, "")
    if not maps:
        raise PatchloomError(
            f"{name} holds no label maps: put them into labels/ beside images/, each with the name of its image"
        )
    images = [path for path in paths if path not in maps]
    if not images:
        raise PatchloomError(f"{name} holds label maps and no images ({limit_examples(maps)}): put them into images/")
    one_folder = not any(split[path.rpartition("/")[0]][0] for path in maps)  # holds those of all parts
    pairs = {path: [image] for path, image in by_values.items()}
    pairs = pairs or partners(maps, images, folders, split_of, ignore_parts=one_folder)
    of_image: dict[str, list[str]] = {}
    for path, those in pairs.items():
        if len(those) > 1:
            raise PatchloomError(f"{path} may be the label map of {those[0]} and of {those[1]}: rename one of them")
        for image in those:
            of_image.setdefault(image, []).append(path)
    if not of_image:
        first = next(iter(maps))
        raise PatchloomError(
            f"none of the {len(maps):,} label maps of {name} has the name of an image: call {first} as its image, "
            f"such as {images[0]}"
        )
    chosen = {image: _chosen(image, of_image[image]) for image in images if image in of_image}
    parts: dict[str, tuple[list[str], list[str]]] = {}
    words: dict[str, str] = {}
    for image, label in chosen.items():
        if label.lower().endswith(_LOSSY_SUFFIXES) and not lossy:
            raise _refuse_lossy(label)
        part, word = split[image.rpartition("/")[0]]
        those, labels = parts.setdefault(part, ([], []))
        those.append(image)
        labels.append(label)
        if (other := words.setdefault(part, word)) != word:
            raise PatchloomError(f"{name} has {other} and {word} for the same part: leave one of them")
    if TRAIN not in parts and "" not in parts:
        raise PatchloomError(f"{name} has {' and '.join(words.values())} and no train: name a folder so")
    notes = []
    if by_values:
        notes.append(
            f"The {len(by_values):,} label maps are the files that have few values and the name of an image beside "
            f"them ({limit_examples(sorted(by_values))})"
        )
    if "" in parts and len(parts) > 1:
        outside = parts.pop("")[0] if TRAIN in parts else []
        notes += left_out(outside, ", in none of the parts", "image")
    if "" in parts:
        parts[TRAIN], words[TRAIN] = parts.pop(""), words.pop("")
    notes += left_out([image for image in images if image not in of_image], ", without a label map", "image")
    notes += left_out([path for path, those in pairs.items() if not those], ", without an image", "label map")
    tops = sorted({maps[label] for label in chosen.values()})
    around = dict.fromkeys(["", *map(os.path.dirname, tops), *tops])
    return Layout(parts, words, tuple(around), tuple(notes))


def _part_of(path: str, folder: Folder) -> tuple[str, str]:
    """Return the part of the data that a folder belongs to, and what it is called; "" twice for none."""
    known = ((split_of(rest), name) for rest, name in zip(folder.rest, path.split("/"), strict=True))
    return next(((part, name) for part, name in known if part), ("", ""))


def _chosen(image: str, maps: Sequence[str]) -> str:
    """Return the label map of an image, of those that have its name."""
    if len(maps) > 1:
        maps = [path for path in maps if not _LESSER.search(path.lower())] or maps
    if len(maps) > 1:  # Cityscapes: its 19 classes, where they are beside its 34
        maps = [path for path in maps if re.search(r"train_?ids?$", os.path.splitext(path)[0].lower())] or maps
    if len(maps) > 1:
        raise PatchloomError(f"{maps[0]} and {maps[1]} may both be the label map of {image}: take one out")
    return maps[0]


# Images with their label maps as they are stored, wherever they lie, and one look at all of them before training.


_FORMAT = "label maps 3"  # to be raised with changes of the code that reads label maps


@dataclass(frozen=True)
class StoredMaps:
    """Images and the label map of each, in the same order, with ``colours`` and ``threshold`` as for `read_ids`."""

    images: Source
    labels: Source | GivenLabels
    colours: np.ndarray | None = None
    threshold: int | None = None

    def stamp(self) -> str | None:
        """Return a stamp of images and label maps, as `Source.stamp` does."""
        images, labels = self.images.stamp(), self.labels.stamp()
        if images is None or labels is None:
            return None
        return digest([images, labels, "" if self.colours is None else str(self.colours.tolist())])

    def ids(self, i: int) -> np.ndarray:
        """Return the numbers in the label map of image i, of an integer dtype [h w], as `read_ids` says."""
        stored = self.labels.stored(i)
        if isinstance(stored, bytes | Path):
            return read_ids(stored, self.labels.describe(i), self.colours, self.threshold)
        return _checked(np.asarray(stored), self.labels.describe(i), None, self.threshold)


def ids_of(maps: StoredMaps, where: str) -> np.ndarray:
    """Read all label maps, before anything is trained; the result is cached until a file changes.

    It has rows of image, number, pixels, whether the image but not its label map is turned by EXIF, and pixels on
    slopes (`_on_slopes`), int64 [m 5], sorted.
    """
    stamp = maps.stamp()
    place = None if stamp is None else cache_root() / "label_maps" / digest([_FORMAT, stamp, str(maps.threshold)])
    known = None if place is None else read_cached(place)
    if known is not None and len(known) % 40 == 0:
        return np.frombuffer(known, np.int64).reshape(-1, 5)
    found: list[np.ndarray] = []
    problems: list[PatchloomError] = []
    n = len(maps.images)
    with closing(in_threads(lambda i: _look(maps, i), range(n))) as looks:
        for i, look in enumerate(track_progress(looks, n, f"reading the label maps of {where}")):
            if isinstance(look, PatchloomError):
                problems.append(look)
            else:
                found.append(np.insert(look, 0, i, axis=1))
    if problems:
        more = f" ({len(problems) - 1:,} more of {n:,} cannot be used)" if len(problems) > 1 else ""
        raise PatchloomError(f"{problems[0]}{more}")
    rows = np.concatenate(found)
    if place is not None and maps.stamp() == stamp:  # otherwise files changed meanwhile
        with suppress(PatchloomError):  # a full or read-only disc only costs another pass
            write_sealed(place, rows.tobytes())
    return rows


def _look(maps: StoredMaps, i: int) -> np.ndarray | PatchloomError:
    """Return the rows of a label map as of `ids_of`, without the image, int64 [m 4]; or the error."""
    try:
        ids = maps.ids(i)
        header = header_of(maps.images, i)
        stored: Any = maps.labels.stored(i)
        turned = header.orientation > 1
        if turned:
            with suppress(Exception), silence_decoders():  # an array, or a file without such a tag
                with open_checked(stored if isinstance(stored, Path) else BytesIO(stored)) as own:
                    turned = orientation_of(own) == 1
        size = header.size
        if size != ids.shape:  # a head may tell another size than what decoding makes of the file
            _, h, w = maps.images.read(i).shape
            size = h, w
    except PatchloomError as problem:
        return problem
    label, image = maps.labels.describe(i), maps.images.describe(i)
    if size != ids.shape:
        (h, w), (height, width) = ids.shape, size
        if header.orientation >= 5 and size == (w, h):
            return as_stored(f"{label} is the label map", image, size)
        return PatchloomError(
            f"{label} has {h} x {w} pixels and its image {image} {height} x {width}: label maps have the size of their "
            "images"
        )
    if int(ids.max()) > 65535:
        return PatchloomError(f"{label} holds the number {ids.max()}: label maps hold numbers up to 65,535")
    counts = np.bincount(ids.ravel())
    numbers = np.flatnonzero(counts)
    slopes = np.zeros_like(counts)
    if len(numbers) >= _EDGE and numbers[-1] - numbers[0] >= _SMOOTHED:  # most maps of classes cost no more than before
        slopes = np.bincount(ids[_on_slopes(ids)], minlength=len(counts))
    return np.stack([numbers, counts[numbers], np.full_like(numbers, turned), slopes[numbers]], axis=1).astype(np.int64)


def _on_slopes(ids: np.ndarray) -> np.ndarray:
    """Tell the pixels whose number lies between those of two opposite neighbours, bool [h w].

    Nearly all pixels of a soft edge do, however narrow. Those of a class do not: within it all neighbours are equal,
    and at its border one of them is.
    """
    found = np.zeros(ids.shape, np.bool_)
    for values, on_slopes in ((ids, found), (ids.T, found.T)):
        before, here, after = values[:-2], values[1:-1], values[2:]
        on_slopes[1:-1] |= ((before < here) & (here < after)) | ((before > here) & (here > after))
    return found


# Images with a class for each pixel.


_NUMBERS = 2**16  # that a label map may hold
_UNKNOWN = -2  # for those that are neither a class nor ignored
# smoothed masks: least distance of the largest number from the smallest, numbers in a median map, share of the
# distance that is near an end, share of the pixels there, and of the others on slopes (over 0.7 in drawn masks, and
# under 0.03 in maps of classes)
_SMOOTHED, _EDGE, _NEAR, _ENDS, _SLOPES = 31, 4, 1 / 16, 0.5, 0.5


class LabelMaps(Annotated[Tensor]):
    """Images with stored label maps, of which `ids_of` returned ``rows``; ``ignored`` numbers do not count."""

    def __init__(self, maps: StoredMaps, classes: ClassList, ignored: Collection[int], rows: np.ndarray) -> None:
        self.maps, self.images, self.ignored = maps, maps.images, sorted(ignored)
        self.classes, self.ids, self.source = classes.names, classes.ids, classes.source
        self._numbers = np.full(_NUMBERS, _UNKNOWN, np.int16)
        self._numbers[list(classes.ids)] = np.arange(len(classes.ids))
        self._numbers[[number for number in ignored if 0 <= number < _NUMBERS]] = IGNORED
        numbers = self._numbers[rows[:, 1]]
        strange = rows[numbers == _UNKNOWN]
        if len(strange):
            raise self._unknown(int(strange[0, 0]), int(strange[0, 1]), len(np.unique(strange[:, 0])))
        known = numbers >= 0
        self.pixels: np.ndarray = np.zeros((len(self.images), len(self.classes)), np.int64)
        self.pixels[rows[known, 0], numbers[known]] = rows[known, 2]

    def truth(self, i: int) -> Tensor:
        ids = self.maps.ids(i)
        numbers = self._numbers[np.minimum(ids, _NUMBERS - 1) if ids.itemsize > 2 else ids]
        if (strange := numbers == _UNKNOWN).any():  # the file has changed since all were looked at
            raise self._unknown(i, int(ids[strange][0]), 1)
        return torch.from_numpy(numbers)

    def size(self, i: int) -> tuple[int, int]:
        return header_of(self.images, i).size

    def _unknown(self, i: int, number: int, files: int) -> PatchloomError:
        more = f" ({files - 1:,} more hold such numbers)" if files > 1 else ""
        return PatchloomError(
            f"{self.maps.labels.describe(i)} holds the number {number}, which is none of the {len(self.ids)} classes "
            f"of {self.source}{more}: add it there, or give --ignore {number} if it does not count"
        )

    def fingerprint(self) -> str:
        about = [*self.classes, *map(str, self.ids), str(self.ignored)]
        about += [] if self.maps.threshold is None else [f"from {self.maps.threshold}"]
        return digest([self.images.fingerprint(), self.maps.labels.fingerprint(), *about])


def class_pixels(annotated: Annotated[Tensor]) -> np.ndarray:
    """Count the pixels of each class in all images, int64 [k]."""
    return np.asarray(image_class_pixels(annotated).sum(0))


def image_class_pixels(annotated: Annotated[Tensor]) -> np.ndarray:
    """Count the pixels of each class in each image, int64 [n k]."""
    if annotated.pixels is not None:
        return annotated.pixels
    counts = np.zeros((len(annotated), len(annotated.classes)), np.int64)
    for i in track_progress(range(len(annotated)), len(annotated), "counting the pixels of each class"):
        truth = annotated.truth(i).numpy()
        counts[i] = np.bincount(truth[truth != IGNORED], minlength=counts.shape[1])
    return counts


def class_ids(annotated: Annotated[Tensor]) -> tuple[int, ...]:
    """Return the number of each class in the stored label maps, to write predictions in the same way."""
    return annotated.ids or tuple(range(len(annotated.classes)))


# Images with label maps that a program gives: pairs of arrays or paths.


@dataclass(frozen=True)
class GivenLabels:
    """Label maps of images, given in Python: arrays [h w], tensors, PIL images or paths."""

    images: Source
    maps: Sequence[Any]

    def stored(self, i: int) -> Any:
        label = self.maps[i]
        return Path(label).expanduser() if isinstance(label, str | os.PathLike) else label

    def describe(self, i: int) -> str:
        label = self.maps[i]
        is_path = isinstance(label, str | os.PathLike)
        return os.fspath(label) if is_path else f"the label map of {self.images.describe(i)}"

    def fingerprint(self) -> str:
        contents = []
        for stored in map(self.stored, range(len(self.maps))):
            array = None if isinstance(stored, Path) else np.asarray(stored)
            content = read_bytes(stored, LIST_FILE, follow=True) if array is None else array.tobytes()
            contents.append(content.hex() if array is None else f"{array.shape} {content.hex()}")
        return digest(contents)

    def stamp(self) -> None:
        """Return None: changes of an object cannot be noticed."""


def is_pairs(data: Any) -> bool:
    """Return whether this is a list of pairs of an image and a label map, or a dict of such lists."""
    if isinstance(data, Mapping):
        return bool(data) and all(map(split_of, map(str, data))) and all(map(is_pairs, data.values()))
    return (
        isinstance(data, list | tuple) and bool(data) and all(isinstance(one, tuple) and len(one) == 2 for one in data)
    )


# Images with label maps in a Hugging Face data set: two columns of images, one of which holds label maps.


class LabelColumn(Hub):
    """Label maps in a column of a data set."""

    def describe(self, i: int) -> str:
        return f"{self.image_column} of {super().describe(i)}"

    def fingerprint(self) -> str:
        return digest([super().fingerprint(), self.image_column])

    def stamp(self) -> str | None:
        stamp = super().stamp()
        return None if stamp is None else digest([stamp, self.image_column])


def _open_hub(name: str, ignore: int, threshold: int | None) -> AnnotatedData[Tensor]:
    """Open ``hf:...`` with a column of images and one of label maps, called label, annotation, mask or the like.

    Rows without a label map are left out.
    """
    listed = Path(name.partition(":")[2]).expanduser() / CLASSES
    classes = read_classes(listed) if listed.is_file() else None
    colours = None if classes is None else classes.colours
    maps: dict[str, StoredMaps] = {}
    words: dict[str, str] = {}
    splits, notes = hub_parts(name)
    for part, (split, dataset, state) in splits.items():
        image_column, label_column = _columns(name, dataset)
        images: Source = Hub(name, split, dataset.select_columns([image_column]), state)
        labels: Source = LabelColumn(name, split, dataset.select_columns([label_column]), state)
        rows = dataset.data.column(label_column)
        empty = rows.is_null().to_numpy() if rows.null_count else np.zeros(len(dataset), bool)
        if empty.all():
            raise PatchloomError(f"{name} {split} has no label map in the column {label_column}: fill it")
        if lacking := np.flatnonzero(empty).tolist():
            names = limit_examples(map(images.describe, lacking))
            notes.append(f"{len(lacking):,} of {len(dataset):,} rows of {split} have no label map: left out ({names})")
            kept = np.flatnonzero(~empty)
            images, labels = images.subset(kept), labels.subset(kept)
        maps[part], words[part] = StoredMaps(images, labels, colours, threshold), split
    return assemble_label_maps(name, maps, words, classes, ignore, notes, threshold)


def _columns(name: str, dataset: Dataset) -> tuple[str, str]:
    """Return the columns of images and of label maps."""
    from datasets import Image

    found = [column for column, feature in dataset.features.items() if isinstance(feature, Image)]
    labels = [column for column in found if is_map_name(column)]
    images = [column for column in found if column not in labels]
    if len(images) > 1 and "image" in images:
        images = ["image"]
    if len(images) != 1 or len(labels) != 1:
        raise PatchloomError(
            f"{name} has {'the columns ' + listing(found, 'and') if found else 'no columns'} of datasets.Image(): call "
            "that of the images image, and that of the label maps label"
        )
    return images[0], labels[0]


_KINDS = "give a folder of images/ and labels/, hf:FOLDER, shapes, or pairs of an image and a label map"


@validate_arguments
def open_label_maps(
    data: DataLike, ignore: int = 255, seed: int = 0, threshold: int | None = None
) -> AnnotatedData[Tensor]:
    """Open images with label maps. All label maps are read, so that errors are found before training.

    A part called val is used for validation if there is a test part, and for testing otherwise. Images without a pixel
    that counts are left out.

    Args:
        data: images with label maps.
        ignore: number of pixels that do not count.
        seed: random seed of drawn images.
        threshold: number from which on pixels are the second of two classes; then all pixels count.
    """
    if threshold is not None and ignore not in (-1, 255):
        raise PatchloomError(f"--ignore {ignore} has no effect with --threshold, where all pixels count: leave it out")
    drawn = data if isinstance(data, Data) else Data(data, None) if isinstance(data, Source) else None
    if isinstance(data, str) and is_builtin(data):
        if data.partition(":")[0] != "shapes":
            raise PatchloomError(f"{data} has no label maps: {_KINDS}")
        drawn = open_builtin(data, seed)
    if drawn is not None:
        train, test = DrawnMaps(drawn.train), None if drawn.test is None else DrawnMaps(drawn.test)
        if threshold is not None:
            raise PatchloomError("shapes has label maps of ten classes: leave out --threshold")
        return AnnotatedData(train, None, test)
    if is_pairs(data):
        lists: Any = data if isinstance(data, Mapping) else {TRAIN: data}
        words = {str(split_of(word)): word if isinstance(data, Mapping) else "" for word in lists}
        if TRAIN not in words:
            raise PatchloomError("a dict of images with label maps has the key train: name its parts so")
        maps = {}
        for word, pairs in lists.items():
            images = open_objects([image for image, _ in pairs]).train
            labels = GivenLabels(images, [label for _, label in pairs])
            maps[str(split_of(word))] = StoredMaps(images, labels, None, threshold)
        return assemble_label_maps("the pairs given in Python", maps, words, None, ignore, (), threshold)
    if not isinstance(data, str | os.PathLike):
        raise PatchloomError(f"these images have no label maps: {_KINDS}")
    name = os.fspath(data)
    if is_hub(name):
        return _open_hub(name, ignore, threshold)
    folder = Path(name).expanduser()
    if os.path.isdir(folder):
        return _open_folder(folder, name, ignore, threshold)
    raise no_such_path(name, folder, _KINDS)


class DrawnMaps(Annotated[Tensor]):
    """Drawn shapes on a background, which is a class, too."""

    classes = ("background", *SHAPES)

    def __init__(self, images: Source) -> None:
        if not isinstance(images, Shapes):
            raise PatchloomError(f"{images.name} has no label maps: {_KINDS}")
        self.shapes, self.images = images, images

    def truth(self, i: int) -> Tensor:
        drawn = self.shapes.annotation(i)
        return torch.from_numpy(drawn.mask.astype(np.int16) * np.int16(drawn.label + 1))

    def fingerprint(self) -> str:
        return digest(["label maps", self.shapes.fingerprint()])


def _open_folder(folder: Path, name: str, ignore: int, threshold: int | None) -> AnnotatedData[Tensor]:
    with StatusMessage(f"looking for the label maps of {name}"):
        listed = list_files(folder)
        paths = [*some_images(listed, name).paths]
        layout = layout_of(folder, paths, name, lossy=threshold is not None)
        places = [folder / place / CLASSES for place in layout.folders]
        classes = next((read_classes(place) for place in places if place.is_file()), None)
        if (folder / ADE_CLASSES).is_file():
            classes = read_ade_classes(folder / ADE_CLASSES)
    colours = None if classes is None else classes.colours
    maps = {
        part: StoredMaps(Files(name, folder, images), Files(name, folder, labels), colours, threshold)
        for part, (images, labels) in layout.parts.items()
    }
    notes = (*layout.notes, *note_on_foreign(listed))
    ade = (layout.words.get(TRAIN), layout.words.get(VALIDATION)) == ("training", "validation")
    return assemble_label_maps(name, maps, layout.words, classes, ignore, notes, threshold, ade)


def assemble_label_maps(
    name: str,
    maps: Mapping[str, StoredMaps],
    words: Mapping[str, str],
    classes: ClassList | None,
    ignore: int,
    notes: Collection[str],
    threshold: int | None,
    ade: bool = False,
) -> AnnotatedData[Tensor]:
    """Look at all label maps, and make the data of them."""
    said, ignored = [*notes], {ignore}
    rows = {part: ids_of(one, f"{name} {words[part]}".strip()) for part, one in maps.items()}
    turned = [maps[part].images.describe(i) for part, one in rows.items() for i in np.unique(one[one[:, 3] > 0, 0])]
    said += note_on_turned(turned, sum(len(one.images) for one in maps.values()), "label maps")
    numbers = np.unique(np.concatenate([found[:, 1] for found in rows.values()])).tolist()
    if threshold is not None:
        if len(numbers) < 2:
            where = "from it on" if numbers[0] else "below it"
            raise PatchloomError(f"--threshold {threshold} makes one class of {name}, as all numbers are {where}")
        if classes is not None and len(classes.names) != 2:
            raise PatchloomError(
                f"--threshold makes two classes, and {classes.source} names {len(classes.names)}: leave out one of them"
            )
        said.append(f"{name}: numbers from {threshold} on are one class (255), and those below are the other (0)")
        ignored, ignore = set(), 255
        classes = None if classes is None else ClassList(classes.names, (0, 255), None, classes.source)
    elif classes is None:
        _refuse_smoothed(name, np.concatenate([*rows.values()]))
    if known := _ade_classes(classes, numbers[-1], ade):
        classes, ignored = known, {ignore, 0}
        said.append(f"{name} is taken for ADE20K: 0 does not count, and 1 to {ADE_COUNT} are the classes")
    if ignore == 255 and numbers == [0, 255]:  # the commonest masks of two classes
        ignored = set()
        if threshold is None:
            said.append(f"{name} holds 0 and 255 alone: both are classes, and all pixels count")
        if classes is None:
            # where 0 has fewer pixels, it may well be the structure
            pixels = [sum(int(found[found[:, 1] == n, 2].sum()) for found in rows.values()) for n in numbers]
            names = ("background", "foreground") if pixels[0] > pixels[1] else ("0", "255")
            classes = ClassList(names, (0, 255), None, "the numbers in label maps")
    if classes is None:
        classes = numbered_classes(numbers, ignored, name)
    else:
        dropped = [one for one, number in zip(classes.names, classes.ids, strict=True) if number in ignored]
        said += [f"{one} ({ignore}) does not count, as it is ignored" for one in dropped]
        classes = classes.without(ignored)
    parts: dict[str, Annotated[Tensor]] = {}
    for part, one in maps.items():
        whole = LabelMaps(one, classes, ignored, rows[part])
        kept = np.flatnonzero(whole.pixels.any(1))
        empty = np.flatnonzero(~whole.pixels.any(1))
        examples = limit_examples(one.labels.describe(int(i)) for i in empty)
        if not len(kept):
            raise PatchloomError(
                f"no label map of {name} {words[part]} has a pixel that counts ({examples}): {_ignored(ignored)}"
            )
        if len(empty):
            said.append(f"{len(empty):,} of {len(whole):,} label maps have no pixel that counts: left out ({examples})")
        parts[part] = whole.subset(kept) if len(empty) else whole
    said += _on_classes(name, parts, words, numbers, ignored)
    return AnnotatedData.of_parts(parts, said)


def _refuse_smoothed(name: str, rows: np.ndarray) -> None:
    """Refuse label maps that look like masks of two values with soft edges; ``rows`` as of `ids_of`.

    Most pixels have numbers near the smallest or the largest, and most others lie on slopes between these.
    """
    numbers, pixels = rows[:, 1], rows[:, 2]
    low, high = int(numbers.min()), int(numbers.max())
    near = _NEAR * (high - low)
    between = (low + near <= numbers) & (numbers <= high - near)
    each = np.unique(rows[:, 0], return_counts=True)[1]
    several = each[each > 1]  # empty masks hold one number
    if high - low < _SMOOTHED or not between.any() or np.median(several) < _EDGE:
        return
    ends = 1 - pixels[between].sum() / pixels.sum()
    slopes = rows[between, 4].sum() / pixels[between].sum()
    if ends <= _ENDS or slopes <= _SLOPES:
        return
    raise PatchloomError(
        f"label maps of {name} hold {len(np.unique(numbers)):,} numbers from {low} to {high}, and {slopes:.0%} of the "
        "pixels between these lie on slopes, so they look like a mask of two values, smoothed: --threshold "
        f"{middle(low, high)} makes them so (if they are classes, name them in {CLASSES})"
    )


def _ade_classes(classes: ClassList | None, largest: int, ade: bool) -> ClassList | None:
    """Return the classes of ADE20K, if that is what there is: 0 is not one of them."""
    ids = tuple(range(1, ADE_COUNT + 1))
    if classes is not None and Path(classes.source).name == ADE_CLASSES:
        return classes
    if not ade or largest != ADE_COUNT:
        return None
    if classes is None:
        return ClassList(tuple(map(str, ids)), ids, None, "ADE20K")
    return ClassList(classes.names, ids, None, classes.source) if len(classes.names) == ADE_COUNT else None


def _on_classes(
    name: str, parts: Mapping[str, Annotated[Tensor]], words: Mapping[str, str], numbers: list[int], ignored: set[int]
) -> list[str]:
    """Notes on classes that nothing shows."""
    names = np.array(parts["train"].classes)
    there = {part: class_pixels(one) > 0 for part, one in parts.items()}
    trained = there.pop("train")
    if trained.sum() < 2:
        raise PatchloomError(
            f"{name} has pixels of {names[trained][0]} alone to train on, and none of another class: "
            f"{_ignored(ignored & {*numbers})}"
        )
    said = []
    if not trained.all():
        lacking = names[~trained]
        said.append(f"{len(lacking)} of {len(names)} classes have no pixel to train on ({limit_examples(lacking)})")
    for part, tested in there.items():
        if (unseen := names[tested & ~trained]).size:
            said.append(f"{words[part]} has pixels of {limit_examples(unseen)}, which no image to train on has")
    return said


def _ignored(ignored: set[int]) -> str:
    """Return the remedy if too few pixels count."""
    if not ignored:
        return "label maps of at least two classes are needed"
    numbers = listing(sorted(ignored), "and")
    return f"{numbers} {'does' if len(ignored) == 1 else 'do'} not count, so give another --ignore, or -1 if all do"
