"""Folders of images or recordings: their splits, their classes, and files that are left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from patchloom.data.notes import limit_examples, note_on_splits
from patchloom.data.source import Data, in_classes, number_words
from patchloom.data.sources.files import Files
from patchloom.data.sources.label_maps import without_label_maps
from patchloom.data.sources.names import TEST, choose_splits, split_of
from patchloom.data.sources.scandir import list_files, note_on_others, select_kind, some_images, without_runs
from patchloom.errors import PatchloomError


def open_folder(folder: Path, name: str, suffixes: frozenset[str] = frozenset()) -> Data:
    """Open a folder of images, by their suffixes (see `Listing.of`), or of recordings, at any depth.

    Hidden files are skipped; a folder that links reach twice is read once. Sub-folders ``train`` and one of ``test``,
    ``val``, ``validation`` are the splits, also inside another folder, as in ``images/train``. Of several that could be
    the test, the first is used, and the others are left out. Label maps are left out, too. First-level sub-folders are
    classes if at least two of them hold images and no image lies beside them. A test split with images directly in it
    has no labels, even if the training split has some.
    """
    listed, of_runs = without_runs(folder, list_files(folder, suffixes))
    listed, sound, beside = select_kind(listed, name)
    everything = Files(name, folder, some_images(listed, name).paths, sound=sound)
    paths, notes = (listed.paths, list[str]()) if sound else without_label_maps(folder, listed)
    whole = Files(name, folder, paths, sound=sound)
    others = [*of_runs, *beside, *note_on_others(listed)]
    children: dict[str, list[str]] = {"": []}  # of the folder itself, and of those directly in it
    for one in filter(None, listed.folders):
        parent, _, child = one.rpartition("/")
        if not parent or "/" not in parent and len(paths.under(f"{one}/")):
            children.setdefault(parent, []).append(child)
    within = [parent for parent, inside in children.items() if parent and None not in choose_splits(inside)]
    if None not in choose_splits(children[""]):
        return _open_splits(folder, everything, whole, children[""], {}, [*notes, *others])
    if len(within) == 1:
        (parent,) = within
        elsewhere = {"other folders": len(whole) - len(paths.under(f"{parent}/"))}
        kept = everything.inside(parent), whole.inside(parent)
        return _open_splits(folder, *kept, children[parent], elsewhere, [*notes, *others])
    if within:
        where = limit_examples(within)
        notes.append(f"Train and test within several folders are not used as splits: all are trained on ({where})")
    if len(whole) < len(everything) and whole.only_folder:
        whole = whole.inside(whole.only_folder)
    return Data(_in_folders(whole, folder), None, (*notes, *others))


def _open_splits(
    folder: Path, everything: Files, whole: Files, children: list[str], elsewhere: Mapping[str, int], notes: list[str]
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
            some_images(list_files(parts[split].root), f"{whole.name} ({split})")  # which says what is there instead
            raise PatchloomError(f"{whole.name} ({split}) holds no {whole.noun}: put some into it")
    itself = "the folder itself" if whole.root == folder else f"{_name_of(whole, folder)} itself"
    left = {_name_of(part, folder): len(part) for child, part in parts.items() if child not in (train, test)}
    left |= {itself: len(whole) - sum(len(whole.paths.under(f"{child}/")) for child in children), **elsewhere}
    left = {where: count for where, count in left.items() if count}
    trained, tested = (f"{_name_of(parts[split], folder)} ({len(parts[split]):,})" for split in (train, test))
    if left:
        total = len(parts[train]) + len(parts[test]) + sum(left.values())
        counts = {where: f"{count:,}" for where, count in left.items()}
        sentence = note_on_splits(trained, tested, counts, f"move {{}} into {train}")
        notes = [f"Of {total:,} {whole.noun}, {sentence}", *notes]
    elif split_of(test) != TEST:
        notes = [f"{tested} is the test, since no folder is called test", *notes]
    source = _in_folders(parts.pop(train), folder)
    tests = in_classes(_in_folders(parts.pop(test), folder, 1), source.classes, test)
    others = {
        child: in_classes(_in_folders(part, folder, 1), source.classes)
        for child, part in parts.items()
        if split_of(child) and len(part)
    }
    return Data(source, tests, tuple(notes), others)


def _in_folders(part: Files, folder: Path, least: int = 2) -> Files:
    """Return the files of a part with the first-level sub-folders as classes, if there are ``least`` of them."""
    tops = [path.partition("/")[0] if "/" in path else "" for path in part.paths]
    outside = next((path for path in part.paths if "/" not in path), None)
    classes = sorted({*tops} - {""})
    if len(classes) >= least and outside is None:
        part.classes, part.labels = number_words(tops, by_value=False)
    elif classes and outside is not None:
        where = _name_of(part, folder, outside)
        part.no_labels = f"labels are the names of sub-folders, but {where} lies outside of them"
    elif classes:
        where = _name_of(part, folder, classes[0])
        part.no_labels = f"labels are the names of sub-folders, and there is only one ({where})"
    return part


def _name_of(part: Files, folder: Path, inside: str = "") -> str:
    """Return the path of a part, or of something in it, within the user's folder."""
    return (part.root / inside).relative_to(folder).as_posix()
