"""Folders of images or recordings: their splits, their classes, and files that are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from patchloom.audio.config import Sound
from patchloom.audio.recordings import modality_of
from patchloom.data.notes import limit_examples, note_on_splits
from patchloom.data.source import Data, in_classes, number_words
from patchloom.data.sources.files import Files, PackedStrings
from patchloom.data.sources.label_maps import without_label_maps
from patchloom.data.sources.media_type import select_kind
from patchloom.data.sources.names import TEST, choose_splits, split_of
from patchloom.data.sources.scandir import list_files, note_on_others, some_images, without_runs
from patchloom.errors import PatchloomError


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
    listed, of_runs = without_runs(folder, list_files(folder))
    listed, sound, beside = select_kind(listed, name)
    everything = _Part(folder, some_images(listed, name).paths, "", sound)
    paths, notes = (listed.paths, list[str]()) if sound else without_label_maps(folder, listed)
    whole = replace(everything, paths=paths)
    others = [*of_runs, *beside, *note_on_others(listed)]
    children: dict[str, list[str]] = {"": []}  # of the folder itself, and of those directly in it
    for one in filter(None, listed.folders):
        parent, _, child = one.rpartition("/")
        if not parent or "/" not in parent and len(paths.under(f"{one}/")):
            children.setdefault(parent, []).append(child)
    within = [parent for parent, inside in children.items() if parent and None not in choose_splits(inside)]
    if None not in choose_splits(children[""]):
        return _open_splits(name, everything, whole, children[""], {}, [*notes, *others])
    if len(within) == 1:
        (parent,) = within
        elsewhere = {"other folders": len(whole) - len(paths.under(f"{parent}/"))}
        kept = everything.inside(parent), whole.inside(parent)
        return _open_splits(name, *kept, children[parent], elsewhere, [*notes, *others])
    if within:
        where = limit_examples(within)
        notes.append(f"Train and test within several folders are not used as splits: all are trained on ({where})")
    if len(whole) < len(everything) and whole.only_folder:
        whole = whole.inside(whole.only_folder)
    return Data(_source(name, whole), None, (*notes, *others))


def _open_splits(
    name: str, everything: _Part, whole: _Part, children: list[str], elsewhere: Mapping[str, int], notes: list[str]
) -> Data:
    """Open the splits among the sub-folders ``children`` of a folder; ``everything`` has the label maps, too."""
    train, test = choose_splits(children)
    assert train is not None and test is not None
    parts = {child: whole.inside(child) for child in children}
    # sub-folders of the splits that hold their images, beside others with their label maps
    holders = {part.only_folder for child, part in parts.items() if len(part) < len(everything.inside(child))} - {""}
    parts = {
        child: part.inside(part.only_folder) if part.only_folder in holders else part for child, part in parts.items()
    }
    for split in (train, test):
        if not len(parts[split]):
            some_images(list_files(parts[split].root), f"{name} ({split})")  # which says what is there instead
            raise PatchloomError(f"{name} ({split}) holds no {modality_of(whole.sound).noun}: put some into it")
    itself = f"{whole.where.rstrip('/')} itself" if whole.where else "the folder itself"
    left = {part.where.rstrip("/"): len(part) for child, part in parts.items() if child not in (train, test)}
    left |= {itself: len(whole) - sum(len(whole.paths.under(f"{child}/")) for child in children), **elsewhere}
    left = {where: count for where, count in left.items() if count}
    trained, tested = (f"{parts[split].where.rstrip('/')} ({len(parts[split]):,})" for split in (train, test))
    if left:
        total = len(parts[train]) + len(parts[test]) + sum(left.values())
        counts = {where: f"{count:,}" for where, count in left.items()}
        sentence = note_on_splits(trained, tested, counts, f"move {{}} into {train}")
        notes = [f"Of {total:,} {modality_of(whole.sound).noun}, {sentence}", *notes]
    elif split_of(test) != TEST:
        notes = [f"{tested} is the test, since no folder is called test", *notes]
    source = _source(name, parts.pop(train))
    tests = in_classes(_source(name, parts.pop(test), 1), source.classes, test)
    others = {
        child: in_classes(_source(name, part, 1), source.classes)
        for child, part in parts.items()
        if split_of(child) and len(part)
    }
    return Data(source, tests, tuple(notes), others)


def _source(name: str, part: _Part, least: int = 2) -> Files:
    """Return the files of a part, with the first-level sub-folders as classes if there are ``least`` of them."""
    tops = [path.partition("/")[0] if "/" in path else "" for path in part.paths]
    outside = next((path for path in part.paths if "/" not in path), None)
    classes = sorted({*tops} - {""})
    if len(classes) >= least and outside is None:
        return Files(name, part.root, part.paths, *number_words(tops, by_value=False), sound=part.sound)
    source = Files(name, part.root, part.paths, sound=part.sound)
    if classes and outside is not None:
        source.no_labels = f"labels are the names of sub-folders, but {part.where}{outside} lies outside of them"
    elif classes:
        source.no_labels = f"labels are the names of sub-folders, and there is only one ({part.where}{classes[0]})"
    return source
