"""Opening images with label maps: a folder, a Hugging Face data set, pairs given in Python, or drawn shapes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from patchloom.calls import checked
from patchloom.data.annotated.base import Annotated, AnnotatedData
from patchloom.data.annotated.class_list import (
    ADE_CLASSES,
    ADE_COUNT,
    CLASSES,
    ClassList,
    numbered_classes,
    read_ade_classes,
    read_classes,
)
from patchloom.data.annotated.drawn import DrawnMaps
from patchloom.data.annotated.given_maps import given_maps, is_pairs
from patchloom.data.annotated.hub_maps import hub_maps
from patchloom.data.annotated.label_maps import LabelMaps, class_pixels
from patchloom.data.annotated.layout import TEST, TRAIN, VALIDATION, named_parts
from patchloom.data.annotated.pairs import Layout, layout_of
from patchloom.data.annotated.stored_maps import FileMaps, StoredMaps, ids_of
from patchloom.data.noticed import some_of
from patchloom.data.sources.base import Data, Source
from patchloom.data.sources.builtin import is_builtin, open_builtin
from patchloom.data.sources.files import Files
from patchloom.data.sources.hub import is_hub
from patchloom.data.sources.listing import list_files, some_images
from patchloom.data.sources.objects import DataLike
from patchloom.data.sources.shapes import Shapes
from patchloom.errors import PatchloomError
from patchloom.files import similar
from patchloom.hints import listing
from patchloom.waiting import Waiting

_KINDS = "give a folder of images/ and labels/, hf:FOLDER, shapes, or pairs of an image and a label map"


@checked
def open_label_maps(data: DataLike, ignore: int = 255, seed: int = 0) -> AnnotatedData[Tensor]:
    """Open images with label maps. All label maps are looked at, so that whatever is wrong is said before any training.

    What is called val is the validation where there is a test, too, and otherwise the test. Images without a pixel that
    counts are left out.

    Args:
        data: a folder with ``images/`` and ``labels/`` (or what else they are usually called), directly, or within or
            around ``train/``, ``val/`` and ``test/`` (see `layout_of`, `read_ids`), with the names of the classes in
            ``classes.txt`` (see `read_classes`; without it they are numbers); a Hugging Face data set, as ``hf:FOLDER``
            or ``hf:NAME``, with a column of images and one of label maps; the built-in ``shapes``; or a list of pairs
            of an image and a label map, each an array or a path, or a dict of such lists (train, validation, test).
        ignore: the number in label maps that does not count; -1: all count.
        seed: of the built-in shapes.

    Raises:
        PatchloomError: there are no such data; an image or a label map cannot be used; or fewer than two classes have
            pixels to train on.
    """
    if (drawn := _shapes_of(data, seed)) is not None:
        return drawn
    if is_pairs(data):
        given, words = given_maps(data)
        return assembled("the pairs given in Python", given, words, None, ignore, ())
    if not isinstance(data, str | os.PathLike):
        raise PatchloomError(f"these images have no label maps: {_KINDS}")
    name = os.fspath(data)
    if is_hub(name):
        listed = Path(name.partition(":")[2]).expanduser() / CLASSES
        classes = read_classes(listed) if listed.is_file() else None
        maps, words, notes = hub_maps(name, None if classes is None else classes.colours)
        return assembled(name, maps, words, classes, ignore, notes)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _open_folder(folder, name, ignore)
    near = similar(folder)
    raise PatchloomError(f"{name} does not exist: did you mean {near}?" if near else f"{name} is no folder: {_KINDS}")


def _shapes_of(data: DataLike, seed: int) -> AnnotatedData[Tensor] | None:
    """The label maps of drawn shapes, given by name or as an object."""
    if isinstance(data, str) and is_builtin(data):
        opened = open_builtin(data, seed) if data.partition(":")[0] == "shapes" else None
        if opened is None:
            raise PatchloomError(f"{data} has no label maps: {_KINDS}")
    elif isinstance(data, Data | Source):
        opened = data if isinstance(data, Data) else Data(data, None)
    else:
        return None
    train, test = (DrawnMaps(one) if isinstance(one, Shapes) else _refuse(one) for one in (opened.train, opened.test))
    assert train is not None
    return AnnotatedData(train, None, test)


def _refuse(source: Source | None) -> None:
    if source is not None:
        raise PatchloomError(f"{source.name} has no label maps: {_KINDS}")


def _open_folder(folder: Path, name: str, ignore: int) -> AnnotatedData[Tensor]:
    with Waiting(f"looking for the label maps of {name}"):
        layout = layout_of([*some_images(list_files(folder), name).paths], name)
        classes = _classes_of(folder, layout)
    colours = None if classes is None else classes.colours
    maps = {
        part: FileMaps(Files(name, folder, images), Files(name, folder, labels), colours)
        for part, (images, labels) in layout.parts.items()
    }
    ade = (layout.words.get(TRAIN), layout.words.get(VALIDATION)) == ("training", "validation")
    return assembled(name, maps, layout.words, classes, ignore, layout.notes, ade)


def _classes_of(folder: Path, layout: Layout) -> ClassList | None:
    """The list of classes in a folder, if there is one."""
    if (folder / ADE_CLASSES).is_file():
        return read_ade_classes(folder / ADE_CLASSES)
    places = [folder / place / CLASSES for place in layout.folders]
    return next((read_classes(place) for place in places if place.is_file()), None)


def assembled(
    name: str,
    maps: Mapping[str, StoredMaps],
    words: Mapping[str, str],
    classes: ClassList | None,
    ignore: int,
    notes: Collection[str],
    ade: bool = False,
) -> AnnotatedData[Tensor]:
    """Look at all label maps, and make the data of them.

    Args:
        name: what the user calls the data.
        maps: of "train", "validation" and "test" those that there are, "train" among them.
        words: what the data calls each; "" for all of it.
        classes: a list of classes; None: they are numbers.
        ignore: the number that does not count.
        notes: on what was left out.
        ade: the parts are called as ADE20K's are.

    Raises:
        PatchloomError: as `open_label_maps`.
    """
    said, ignored = [*notes], {ignore}
    rows = {part: ids_of(one, f"{name} {words[part]}".strip()) for part, one in maps.items()}
    numbers = np.unique(np.concatenate([found[:, 1] for found in rows.values()])).tolist()
    if known := _ade_classes(classes, numbers[-1], ade):
        classes, ignored = known, {ignore, 0}
        said.append(f"{name} is taken for ADE20K: 0 does not count, and 1 to {ADE_COUNT} are the classes")
    if ignore == 255 and numbers == [0, 255]:  # the commonest masks of two classes
        ignored = set()
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
        kept = np.flatnonzero(whole.counts.any(1))
        empty = np.flatnonzero(~whole.counts.any(1))
        examples = some_of((whole.maps.describe(int(i)) for i in empty), len(empty))
        if not len(kept):
            raise PatchloomError(
                f"no label map of {name} {words[part]} has a pixel that counts ({examples}): {_ignored(ignored)}"
            )
        if len(empty):
            said.append(f"{len(empty):,} of {len(whole):,} label maps have no pixel that counts: left out ({examples})")
        parts[part] = whole.subset(kept) if len(empty) else whole
    said += _on_classes(name, parts, words, numbers, ignored)
    becomes, renamed = named_parts({part: len(one) for part, one in parts.items()})
    by_name = {becomes[part]: one for part, one in parts.items()}
    return AnnotatedData(by_name[TRAIN], by_name.get(VALIDATION), by_name.get(TEST), (*said, *renamed))


def _ade_classes(classes: ClassList | None, largest: int, ade: bool) -> ClassList | None:
    """The classes of ADE20K, if that is what there is: 0 is not one of them."""
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
    """Notes on classes that nothing shows.

    Raises:
        PatchloomError: fewer than two have pixels to train on.
    """
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
        said.append(
            f"{len(lacking)} of {len(names)} classes have no pixel to train on ({some_of(lacking, len(lacking))})"
        )
    for part, tested in there.items():
        if (unseen := names[tested & ~trained]).size:
            said.append(f"{words[part]} has pixels of {some_of(unseen, len(unseen))}, which no image to train on has")
    return said


def _ignored(ignored: set[int]) -> str:
    """What to do where too little counts."""
    if not ignored:
        return "label maps of at least two classes are needed"
    numbers = listing(sorted(ignored), "and")
    return f"{numbers} {'does' if len(ignored) == 1 else 'do'} not count, so give another --ignore, or -1 if all do"
