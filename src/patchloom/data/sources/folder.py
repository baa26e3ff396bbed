"""Folders of images or recordings: their splits, their classes, and files that are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from patchloom.audio.config import Sound
from patchloom.audio.recordings import modality_of
from patchloom.data.conversions import limit_examples
from patchloom.data.source import TEST_SPLITS, Data, note_on_splits
from patchloom.data.sources.files import Files, PackedStrings
from patchloom.data.sources.label_maps import without_label_maps
from patchloom.data.sources.media_type import select_kind
from patchloom.data.sources.scandir import (
    Listing,
    images_in,
    list_files,
    list_top,
    note_on_others,
    some_images,
    without_runs,
)
from patchloom.errors import PatchloomError

__all__ = ["images_in", "open_folder"]

_TRAIN = ("train", "training")
_TEST = ("test", "testing", *TEST_SPLITS[1:], "valid")  # in order of preference


@dataclass(frozen=True)
class _Part:
    """Images or recordings of a folder.

    Attributes:
        root: folder that the paths are relative to.
        paths: paths of the images.
        where: name of the folder in notes, relative to the user's folder, with a trailing slash; "" for that folder.
        sound: settings with which recordings are read; None for images.
    """

    root: Path
    paths: PackedStrings
    where: str
    sound: Sound | None

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def only_folder(self) -> str:
        """First-level sub-folder that holds all images; "" if there is none."""
        top, slash, _ = self.paths[0].partition("/") if len(self) else ("", "", "")
        return top if slash and len(self.paths.under(f"{top}/")) == len(self) else ""

    def inside(self, folder: str) -> _Part:
        """Return the images in a first-level sub-folder."""
        kept = np.zeros(len(self), bool)
        there = self.paths.under(f"{folder}/")
        kept[there.start : there.stop] = True
        cut = len(f"{folder}/".encode("utf-8", "surrogateescape"))
        return replace(self, root=self.root / folder, paths=self.paths.where(kept, cut), where=f"{self.where}{folder}/")


def open_folder(folder: Path, name: str) -> Data:
    """Open a folder of images or recordings, at any depth.

    Hidden files are skipped; a folder that links reach twice is read once. Sub-folders ``train`` and one of ``test``,
    ``val``, ``validation`` are the splits, also inside another folder, as in ``images/train``. Of several that could be
    the test, the first is used, and the others are left out. Label maps are left out, too. First-level sub-folders are
    classes if at least two of them hold images and no image lies beside them. A test split with images directly in it
    has no labels, even if the training split has some.
    """
    if any((folder / case(word)).is_dir() for word in _TRAIN for case in (str.lower, str.title, str.upper)):
        top, children = list_top(folder)  # only now: there may be a million files
        if splits := _splits(children):
            return _split_here(folder, name, children, splits, top)
    found, of_runs = without_runs(folder, list_files(folder))
    kinds, sound, beside = select_kind({"": found}, name)
    listed = some_images(kinds[""], name)
    paths, notes = listed.paths, list[str]()
    if sound is None:
        images, notes = without_label_maps(folder, {"": listed})
        paths = images[""]
    whole = _Part(folder, paths, "", sound)
    others = [*of_runs, *beside, *note_on_others({"": listed})]
    split_within: dict[str, list[str]] = {}
    for one in listed.folders:
        parent, _, child = one.rpartition("/")
        if parent and "/" not in parent and len(paths.under(f"{one}/")):
            split_within.setdefault(parent, []).append(child)
    split_within = {parent: inside for parent, inside in split_within.items() if _splits(inside)}
    if len(split_within) == 1:
        ((parent, inside),) = split_within.items()
        within = whole.inside(parent)
        parts = {child: within.inside(child) for child in sorted(inside)}
        directly = len(within) - sum(map(len, parts.values()))
        elsewhere = {f"{parent} itself": directly, "other folders": len(whole) - len(within)}
        return _of_splits(name, parts, _splits(inside), elsewhere, [*notes, *others])
    if split_within:
        where = limit_examples(split_within, len(split_within))
        notes.append(f"Train and test within several folders are not used as splits: all are trained on ({where})")
    if len(paths) < len(listed.paths) and whole.only_folder:
        whole = whole.inside(whole.only_folder)
    return Data(_source(name, whole), None, (*notes, *others))


def _splits(folders: Iterable[str]) -> tuple[str, str] | None:
    """Return the folders for training and for the test among some folders; None unless there are both."""
    known = {folder.lower(): folder for folder in folders}
    train, test = (next((known[word] for word in words if word in known), None) for words in (_TRAIN, _TEST))
    return None if train is None or test is None else (train, test)


def _split_here(folder: Path, name: str, children: list[str], splits: tuple[str, str], top: Listing) -> Data:
    """Open a folder that holds the splits. Each is listed separately, since links may lead from one to another."""
    here, notes = {"": top}, list[str]()
    for child in children:
        here[f"{child}/"], of_runs = without_runs(folder / child, list_files(folder / child), f"{child}/")
        notes += of_runs
    here, sound, beside = select_kind(here, name)
    listings = {child: here[f"{child}/"] for child in children}
    for split in splits:
        some_images(listings[split], f"{name} ({split})")
    images = {before: listed.paths for before, listed in here.items()}
    if sound is None:
        images, said = without_label_maps(folder, here)
        notes += said
    parts: dict[str, _Part] = {}
    holder = ""  # the sub-folder of a split that holds its images, beside one of label maps
    for child in [*splits, *(child for child in children if child not in splits)]:
        part = _Part(folder / child, images[f"{child}/"], f"{child}/", sound)
        left_out = len(part) < len(listings[child].paths)
        holder = part.only_folder if left_out and not holder else holder
        parts[child] = part.inside(holder) if holder and part.only_folder == holder else part
    notes += [*beside, *note_on_others(here)]
    return _of_splits(name, parts, splits, {"the folder itself": len(images[""])}, notes)


def _of_splits(
    name: str,
    parts: Mapping[str, _Part],
    splits: tuple[str, str] | None,
    elsewhere: Mapping[str, int],
    notes: list[str],
) -> Data:
    """Return the data of splits in folders side by side."""
    assert splits is not None
    train, test = (parts[split] for split in splits)
    left = {part.where.rstrip("/"): len(part) for child, part in parts.items() if child not in splits}
    left = {where: count for where, count in (left | dict(elsewhere)).items() if count}
    trained, tested = (f"{part.where.rstrip('/')} ({len(part):,})" for part in (train, test))
    if left:
        total = len(train) + len(test) + sum(left.values())
        counts = {where: f"{count:,}" for where, count in left.items()}
        sentence = note_on_splits(trained, tested, counts, f"move {{}} into {splits[0]}")
        notes = [f"Of {total:,} {modality_of(train.sound).noun}, {sentence}", *notes]
    elif splits[1].lower() not in _TEST[:2]:
        notes = [f"{tested} is the test, since no folder is called test", *notes]
    source = _source(name, train)
    others = {}
    for child, part in parts.items():
        if child not in splits and len(part) and child.lower() in (*_TRAIN, *_TEST):
            tops = {path.split("/")[0] for path in part.paths if "/" in path}
            # unknown classes are allowed in splits that are used neither for training nor as the test
            others[child] = _test_source(name, part, child, source.classes if tops <= set(source.classes) else ())
    return Data(source, _test_source(name, test, splits[1], source.classes), tuple(notes), others)


def _source(name: str, part: _Part) -> Files:
    tops = sorted({path.split("/")[0] for path in part.paths if "/" in path})
    outside = next((path for path in part.paths if "/" not in path), None)
    if len(tops) > 1 and outside is None:
        return Files(name, part.root, part.paths, tuple(tops), _labels(part.paths, tuple(tops)), sound=part.sound)
    source = Files(name, part.root, part.paths, sound=part.sound)
    if tops and outside is not None:
        source.no_labels = f"labels are the names of sub-folders, but {part.where}{outside} lies outside of them"
    elif tops:
        source.no_labels = f"labels are the names of sub-folders, and there is only one ({part.where}{tops[0]})"
    return source


def _test_source(name: str, part: _Part, split: str, classes: tuple[str, ...]) -> Files:
    paths = part.paths
    if not classes or any("/" not in path for path in paths):
        return Files(name, part.root, paths, sound=part.sound)
    strange = sorted({path.split("/")[0] for path in paths} - set(classes))
    if strange:
        raise PatchloomError(
            f"{name} has the class {strange[0]} in {split} but not in train: "
            "give the class folders the same names in both, or remove that one"
        )
    return Files(name, part.root, paths, classes, _labels(paths, classes), sound=part.sound)


def _labels(paths: PackedStrings, classes: tuple[str, ...]) -> np.ndarray:
    number = {word: i for i, word in enumerate(classes)}
    return np.array([number[path.split("/")[0]] for path in paths], dtype=np.int64)
