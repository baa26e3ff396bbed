"""Which label map belongs to which image, and to which part of the data, by the names of files and folders alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from patchloom.data.annotated.layout import part_named
from patchloom.data.noticed import some_of
from patchloom.data.sources.label_maps import IMAGE_ENDING, MAP_ENDING, names_images, names_maps
from patchloom.errors import PatchloomError

# train_labels, trainannot, masks-val: a part and what lies in it, in one name
_WHAT = "labels?|masks?|annot|annotations?|gt|images?|imgs?|photos?|frames?"
_BOTH = re.compile(rf"(?P<split>[a-z]+?\d*)[ _.-]?({_WHAT})|({_WHAT})[ _.-]?(?P<other>[a-z]+\d*)")
# maps of something else than classes, or of classes in colours, as Cityscapes and VOC have them beside the others
_LESSER = re.compile(r"colou?r|instance|object|panoptic|polygon|visual|overlay|preview")
_LOSSY = (".jpg", ".jpeg", ".webp", ".heic", ".heif")


@dataclass(frozen=True)
class Layout:
    """Images with label maps. All paths are relative to the folder, with forward slashes.

    Attributes:
        parts: of "train", "validation" and "test" those that there are, each with the paths of its images, sorted, and
            of their label maps.
        words: what the folder calls each part, such as "val".
        folders: where a list of classes may lie: the folder itself (""), and those around label maps.
        notes: on what is left out.
    """

    parts: Mapping[str, tuple[list[str], list[str]]]
    words: Mapping[str, str]
    folders: tuple[str, ...]
    notes: tuple[str, ...]


class _Folder(NamedTuple):
    """What the name of a folder says: whether it holds label maps, or images; its part; and the rest of its path."""

    maps: bool
    images: bool
    split: str
    word: str
    rest: str
    top: str


def layout_of(paths: Sequence[str], name: str) -> Layout:
    """Find the label map of each image.

    Folders of label maps have one of their usual names (labels, masks, annotations, gt, SegmentationClass...), beside
    those of images; both may lie in ``train``, ``val`` and ``test``, or hold these. A label map has the name of its
    image, but for an ending such as ``_mask``. Without such folders, it lies beside its image with such an ending.

    Args:
        paths: of all pictures in the folder, sorted.
        name: what the user calls the folder.

    Raises:
        PatchloomError: there are no label maps, none has the name of an image, or one could be of several.
    """
    folders = {path: _read_folder(path) for path in {path.rpartition("/")[0] for path in paths}}
    found = {path: folders[path.rpartition("/")[0]] for path in paths}
    maps = [path for path in paths if found[path].maps] or _beside(paths)
    if not maps:
        raise PatchloomError(
            f"{name} holds no label maps: put them into labels/ beside images/, each with the name of its image"
        )
    taken = set(maps)
    images = [path for path in paths if path not in taken]
    if not images:
        raise PatchloomError(
            f"{name} holds label maps and no images ({some_of(maps, len(maps))}): put them into images/"
        )
    of_image, alone = _matched(images, maps, found)
    if not of_image:
        raise PatchloomError(
            f"none of the {len(maps):,} label maps of {name} has the name of an image: call {maps[0]} as its image, "
            f"such as {images[0]}"
        )
    chosen = {image: _chosen(image, of_image[image]) for image in images if image in of_image}
    owners: dict[str, str] = {}
    for image, label in chosen.items():
        if label in owners:
            raise PatchloomError(f"{label} may be the label map of {owners[label]} and of {image}: rename one of them")
        owners[label] = image
        if label.lower().endswith(_LOSSY):
            raise PatchloomError(
                f"{label} is of a format that changes numbers to make files small: save label maps as PNG"
            )
    parts: dict[str, tuple[list[str], list[str]]] = {}
    words: dict[str, str] = {}
    for image, label in chosen.items():
        folder = found[image]
        part = parts.setdefault(folder.split, ([], []))
        part[0].append(image)
        part[1].append(label)
        if (other := words.setdefault(folder.split, folder.word)) != folder.word:
            raise PatchloomError(f"{name} has {other} and {folder.word} for the same part: leave one of them")
    notes = []
    if "train" not in parts and "" not in parts:
        raise PatchloomError(f"{name} has {' and '.join(words.values())} and no train: name a folder so")
    if "" in parts and len(parts) > 1:
        outside = parts.pop("")[0] if "train" in parts else []
        if outside:
            notes.append(
                f"{_were(len(outside), 'image')} left out, in none of the parts ({some_of(outside, len(outside))})"
            )
    if "" in parts:
        parts["train"], words["train"] = parts.pop(""), words.pop("")
    lacking = [image for image in images if image not in of_image]
    if lacking:
        notes.append(f"{_were(len(lacking), 'image')} left out, without a label map ({some_of(lacking, len(lacking))})")
    if alone:
        notes.append(f"{_were(len(alone), 'label map')} left out, without an image ({some_of(alone, len(alone))})")
    tops = sorted({found[label].top for label in chosen.values()})
    around = dict.fromkeys(["", *(os.path.dirname(top) for top in tops), *tops])
    return Layout(parts, words, tuple(around), tuple(notes))


def _were(count: int, what: str) -> str:
    return f"1 {what} was" if count == 1 else f"{count:,} {what}s were"


@lru_cache(maxsize=2**16)
def _read_folder(path: str) -> _Folder:
    maps = images = False
    split = word = top = ""
    rest, above = [], []
    for name in filter(None, path.split("/")):
        above.append(name)
        lower = name.lower()
        both = _BOTH.fullmatch(lower)
        alone = part_named(lower)
        here = alone or (part_named(both["split"] or both["other"]) if both else None)
        if here and not split:
            split, word = here, name
        role = not (maps or images) and not alone
        if role and names_maps(name):
            maps, top = True, "/".join(above)
        elif role and names_images(name):
            images = True
        elif not here:
            rest.append(name)
    return _Folder(maps, images, split, word, "/".join(rest), top)


def _beside(paths: Sequence[str]) -> list[str]:
    """The label maps that lie beside their images, by the ends of their names."""
    stems = {_stem(path) for path in paths}
    return [path for path in paths if _without(MAP_ENDING, _stem(path)) in stems - {_stem(path)}]


def _stem(path: str) -> str:
    return os.path.splitext(path)[0]


def _without(ending: re.Pattern[str], stem: str) -> str:
    folder, _, name = stem.rpartition("/")
    return f"{folder}/{ending.sub('', name)}" if folder else ending.sub("", name)


def _matched(
    images: Iterable[str], maps: Iterable[str], found: Mapping[str, _Folder]
) -> tuple[dict[str, list[str]], list[str]]:
    """The label maps that each image may have, and those without an image."""
    split = any(found[path].split for path in maps)  # otherwise one folder holds those of all parts

    def key(path: str, name: str) -> tuple[str, str, str]:
        return found[path].split if split else "", found[path].rest, name

    by_name: dict[tuple[str, str, str], list[str]] = {}
    by_start: dict[tuple[str, str, str], list[str]] = {}
    for image in images:
        name = os.path.basename(_stem(image))
        by_name.setdefault(key(image, name), []).append(image)
        by_start.setdefault(key(image, IMAGE_ENDING.sub("", name)), []).append(image)
    of_image: dict[str, list[str]] = {}
    alone = []
    for path in maps:
        name = os.path.basename(_stem(path))
        short = MAP_ENDING.sub("", name)
        tried = (by_name.get(key(path, name)), by_name.get(key(path, short)), by_start.get(key(path, short)))
        those = next(filter(None, tried), [])
        if not those:
            alone.append(path)
        if len(those) > 1:
            raise PatchloomError(f"{path} may be the label map of {those[0]} and of {those[1]}: rename one of them")
        for image in those:
            of_image.setdefault(image, []).append(path)
    return of_image, alone


def _chosen(image: str, maps: Sequence[str]) -> str:
    """The label map of an image, of those that have its name."""
    if len(maps) > 1:
        maps = [path for path in maps if not _LESSER.search(path.lower())] or maps
    if len(maps) > 1:  # Cityscapes: its 19 classes, where they are beside its 34
        maps = [path for path in maps if re.search(r"train_?ids?$", _stem(path).lower())] or maps
    if len(maps) > 1:
        raise PatchloomError(f"{maps[0]} and {maps[1]} may both be the label map of {image}: take one out")
    return maps[0]
