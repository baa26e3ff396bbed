"""Label maps among images: ``masks/`` beside ``images/``, ``a_mask.png`` beside ``a.png``, ``a.png`` beside ``a.jpg``.

A word such as ``mask`` marks a file: in the name of a folder, or at either end of the file's own name. A marked file is
a label map if an unmarked image has the same name without that word, or if its folder lies beside a folder of images.
Files of one name in two formats are compared: those of one format are label maps if they have few values.
Pre-training leaves label maps out; segmentation pairs them with their images.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from patchloom.data.containers.open import suffix_of
from patchloom.data.decode import IMAGE_SUFFIXES, open_pillow, silence_decoders
from patchloom.data.notes import count_of, left_out, limit_examples
from patchloom.data.sources.files import PackedStrings
from patchloom.data.sources.scandir import Listing

_MAPS = (
    r"(?:png)?masks?|label[ _-]?maps?|label[ _-]?(?:train[ _-]?)?ids?|labels?|annotations?|annots?|anno"
    r"|gt[ _-]?(?:fine|coarse)|gts?|ground[ _-]?truths?|truth|segmentation[ _-]?(?:class|object)(?:[ _-]?aug)?"
    r"|segmentations?|segs?|semantic|panoptic|instance[ _-]?ids?|instances?|trimaps?|mattes?"
)
_IMAGES = (
    r"left[ _-]?img8bit|(?:jpe?g|png|rgb)?images?|imgs?|photos?|pictures?|frames?|rgb|jpe?gs?|scans?|inputs?|originals?"
    r"|orig|raw|sat"
)
_PARTS = "train training val valid validation dev test testing".split()
# a whole word, or one that is joined to the name of a split, as in trainannot
_WHOLE = rf"(?:(?<![a-z])|{'|'.join(f'(?<={part})' for part in _PARTS)})(?:{{}})(?:(?![a-z])|(?={'|'.join(_PARTS)}))"
_MAP_WORD, _IMAGE_WORD = (re.compile(_WHOLE.format(words)) for words in (_MAPS, _IMAGES))
_CAPITALS = re.compile(r"(?<=[a-z])(?=[A-Z])")  # SegmentationClass
_MAP_ENDS = re.compile(
    rf"^(?:{_MAPS})(?:[ _.-]+|(?=\d)|$)|(?:[ _.-](?:{_MAPS}|colou?r|L))+(?:[ _-]?\d+)?$", re.IGNORECASE
)
_IMAGE_ENDS = re.compile(rf"^(?:{_IMAGES})(?:[ _.-]+|(?=\d)|$)|[ _.-](?:{_IMAGES})$", re.IGNORECASE)
# parts of these words, for a quick search of all paths at once
_TRACES = [*b"mask label anno gt truth seg semantic panoptic instance trimap matte _l. -l. .l.".split(), b" l."]


class Folder(NamedTuple):
    """Interpretation of the path of a folder.

    Attributes:
        maps: whether it contains a word for label maps.
        top: path up to the first name with such a word, or else with one for images; "" without either.
        rest: its names in lower case, without such words.
    """

    maps: bool
    top: str
    rest: tuple[str, ...]


def read_folders(folders: Iterable[str]) -> dict[str, Folder]:
    """Interpret the paths of folders. The name of one with both images and label maps in sub-folders is ignored."""
    levels = {folder: _prefixes(folder) for folder in folders}
    words = {path: _words(path.rpartition("/")[2]) for paths in levels.values() for path in paths}
    said = [{path for path, word in words.items() if kind.search(word)} for kind in (_MAP_WORD, _IMAGE_WORD)]
    around = [{outer for path in some for outer in _prefixes(path)[:-1]} for some in said]
    both = around[0] & around[1]
    others = {word: _IMAGE_WORD.sub("", _MAP_WORD.sub("", word)) for word in {*words.values()}}
    others = {word: " ".join(re.split(r"[ _.-]+", other)).strip() for word, other in others.items()}
    found = {}
    for folder, paths in levels.items():
        maps, images = (next((path for path in paths if path in some and path not in both), "") for some in said)
        found[folder] = Folder(bool(maps), maps or images, tuple(others[words[path]] for path in paths))
    return found


@lru_cache(maxsize=2**16)
def _words(name: str) -> str:
    return _CAPITALS.sub("_", name).lower()


def _prefixes(path: str) -> list[str]:
    """Return the path and all folders above it: ``a``, ``a/b`` and ``a/b/c`` for ``a/b/c``."""
    return [*accumulate(path.split("/"), "{}/{}".format)]


def is_map_name(name: str) -> bool:
    """Return whether the name of a folder or a column contains a word for label maps."""
    return _MAP_WORD.search(_words(name)) is not None


def marked_paths(paths: Iterable[str], folders: Mapping[str, Folder]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the files in marked folders, each with its `Folder.top`, and the files marked by their own names."""
    by_folder, by_name = {}, {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folders[folder].maps:
            by_folder[path] = folders[folder].top
        elif _MAP_ENDS.search(os.path.splitext(name)[0]):
            by_name[path] = ""
    return by_folder, by_name


def partners(
    marked: Mapping[str, str],
    images: Iterable[str],
    folders: Mapping[str, Folder],
    part: Callable[[str], str | None] = lambda word: None,
    ignore_parts: bool = False,
) -> dict[str, list[str]]:
    """Find for each marked file the images that it may be the label map of.

    Their folders and file names must agree, apart from the words. If no file of a folder of label maps has such an
    image, the folder of the images may have any name: ``stills/a.png`` for ``labels/a.png``.

    Args:
        marked: paths, each with `Folder.top` if the folder marks it, else with "".
        images: paths that are not marked.
        folders: interpretations of all folders.
        part: function that returns the split meant by a word such as ``val``; file and image must be of one split.
        ignore_parts: whether the splits need not agree.
    """
    depths = {top.count("/") for top in marked.values() if top}

    @lru_cache(maxsize=2**16)
    def place(folder: str) -> tuple[Hashable, Hashable]:
        rest = folders[folder].rest
        said = next(filter(None, map(part, rest)), "")
        return "" if ignore_parts else said, tuple(word for word in rest if word and not part(word))

    def neighbours(folder: str, depth: int) -> Hashable:
        names = folder.split("/")
        return place(folder)[0], depth, *names[:depth], *names[depth + 1 :]

    def keys(path: str) -> Iterator[list[Hashable]]:
        folder, name = _folder_and_stem(path)
        short = _MAP_ENDS.sub("", name)
        exact = dict.fromkeys((name, short) if marked[path] else (short,))
        core = _IMAGE_ENDS.sub("", short)
        yield [*((place(folder), one) for one in exact), (place(folder), core, "core")]
        if top := marked[path]:
            yield [(neighbours(folder, top.count("/")), one) for one in exact]

    asked = {path: [*keys(path)] for path in marked}
    wanted = {key for stages in asked.values() for stage in stages for key in stage}
    found: dict[Hashable, list[str]] = {}
    for image in images:
        folder, name = _folder_and_stem(image)
        own: list[Hashable] = [(place(folder), name), (place(folder), _IMAGE_ENDS.sub("", name), "core")]
        own += [(neighbours(folder, depth), name) for depth in depths if depth < len(folders[folder].rest)]
        for key in own:
            if key in wanted:
                found.setdefault(key, []).append(image)
    answers = {
        path: [next((found[key] for key in stage if key in found), []) for stage in stages]
        for path, stages in asked.items()
    }
    paired = {marked[path] for path, (those, *_) in answers.items() if those}
    return {path: stages[0] if marked[path] in paired else stages[-1] for path, stages in answers.items()}


def _folder_and_stem(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return folder, os.path.splitext(name)[0]


def without_label_maps(root: Path, listed: Listing) -> tuple[PackedStrings, list[str]]:
    """Leave label maps out of the images of a folder.

    Returns:
        The remaining images, and notes on the label maps, and on files that may be label maps but stay.
    """
    letters = listed.paths.letters.lower()
    names = letters, "\n".join(listed.folders).encode(errors="surrogateescape").lower()
    marked = any(trace in some for some in names for trace in _TRACES)
    marked = marked or any(_IMAGE_WORD.search(_words(folder)) for folder in listed.folders)
    if not marked and sum(suffix.encode() in letters for suffix in IMAGE_SUFFIXES) < 2:
        return listed.paths, []
    paths = [*listed.paths]
    left, doubtful = set[str](), set[str]()
    if marked:
        folders = read_folders({path.rpartition("/")[0] for path in paths})
        by_folder, by_name = marked_paths(paths, folders)
        unmarked = [path for path in paths if path not in by_folder and path not in by_name]
        left = _named_alike(partners(by_name, unmarked, folders))
        images = [path for path in paths if path not in by_folder and path not in left]
        of_images = {folders[path.rpartition("/")[0]].top for path in images} - {""}
        parents = {top.rpartition("/")[0] for top in of_images}
        left |= _mostly(by_folder, _named_alike(partners(by_folder, images, folders)))
        left |= {path for path, top in by_folder.items() if top.rpartition("/")[0] in parents}
        children: dict[str, set[str]] = {top.rpartition("/")[0]: set() for top in of_images}
        above = {folder: _prefixes(folder) for folder in {path.rpartition("/")[0] for path in images}}
        for folder in chain.from_iterable(above.values()):
            if (parent := folder.rpartition("/")[0]) in children and folder:
                children[parent].add(folder)
        alone = {folder for beside in children.values() if len(beside) == 2 for folder in beside - of_images}
        tops = {folder: top for folder, prefixes in above.items() for top in prefixes if top in alone}
        # files of folders that are the only one beside a folder of images
        others = {path: tops[folder] for path in images if (folder := path.rpartition("/")[0]) in tops}
        compared = partners(others, (path for path in images if path not in others), folders) if others else {}
        # marked files without an image, and unmarked ones that are named like images
        doubtful = {*(by_folder if images else ()), *_mostly(others, _named_alike(compared))} - left
    by_values = maps_by_values(root, [path for path in paths if path not in left])
    doubtful -= by_values.keys()
    remedy = f": to keep them, name the files by a pattern, such as '{glob.escape(str(root))}/**/*'"
    why = " as label maps, since they have few values and the name of an image beside them"
    notes = [
        *left_out(sorted(left), " as label maps of the images beside them", remedy=remedy),
        *left_out(sorted(by_values), why, remedy=remedy),
    ]
    if doubtful:
        notes.append(
            f"{count_of(len(doubtful), 'file', 'are')} used as images and may be label maps "
            f"({limit_examples(sorted(doubtful))}): if so, move them to masks/ beside images/, each with the name of "
            "its image, or elsewhere"
        )
    kept = np.array([path not in left and path not in by_values for path in paths], bool)
    return listed.paths.where(kept), notes


def _named_alike(found: Mapping[str, list[str]]) -> set[str]:
    """Return the files with images in exactly one folder: in several, files are numbered alike in each class."""
    return {path for path, images in found.items() if len({image.rpartition("/")[0] for image in images}) == 1}


def _mostly(tops: Mapping[str, str], named: set[str]) -> set[str]:
    """Return the files of the folders in which at least half of the files have an image."""
    balance: Counter[str] = Counter()
    for path, top in tops.items():
        balance[top] += 1 if path in named else -1
    return {path for path, top in tops.items() if balance[top] >= 0}


# Label maps by their values, for files of one name in two formats. All pairs of two formats are judged together.


_SAMPLED_PAIRS = 12  # of two formats, evenly spaced; a quarter of them may look otherwise
_SAMPLED_ROWS = 256
_MOST_VALUES = 256  # in a label map, also one with smoothed edges
_FEW, _SHARE = 16, 0.5  # so many values cover this share of the pixels: less in depth maps
_CONSTANT = 0.8  # share of the pixels that equal the one on their left: less in photographs
_SIDE = 64  # of the thumbnails that are compared
_COPY = 0.98  # correlation from which on two files show the same picture


def maps_by_values(root: Path, paths: Sequence[str]) -> dict[str, str]:
    """Return the image of each label map, for files of one name in two formats of which one has few values.

    A few pairs are read. A picture that was saved in two formats has no label map.

    Args:
        root: folder that the paths are relative to.
        paths: paths of images and label maps.
    """
    usual = Counter(path[path.rfind(".") :].lower() for path in paths).most_common(1)
    # a million images may be of one format: only names of the others can make pairs
    rare = {os.path.splitext(path)[0] for path in paths if not path.lower().endswith(usual[0][0])}
    by_name: dict[str, list[str]] = {}
    for path in paths:
        if path[: path.rfind(".")] in rare:
            by_name.setdefault(os.path.splitext(path)[0], []).append(path)
    pairs: dict[tuple[str, ...], list[list[str]]] = {}
    for those in by_name.values():
        if len(those) == 2:
            those.sort(key=suffix_of)
            pairs.setdefault(tuple(map(suffix_of, those)), []).append(those)
    found: dict[str, str] = {}
    for some in pairs.values():
        places = np.unique(np.linspace(0, len(some) - 1, _SAMPLED_PAIRS).astype(int)).tolist()
        for image, label in ((0, 1), (1, 0)):
            values = [_values_of_map(root / some[place][image], root / some[place][label]) for place in places]
            if values.count(0) <= len(places) // 4 and max(values) > 1:
                found |= {pair[label]: pair[image] for pair in some}
                break
    return found


def _values_of_map(image: Path, label: Path) -> int:
    """Return the number of values in the label map of an image; 0 if the file does not look like one."""
    try:
        with silence_decoders(), open_pillow(label) as two:
            width, height = two.size
            array = np.asarray(two)[:: max(1, height // _SAMPLED_ROWS)]
            if array.ndim == 3:  # a colour is a number
                array = array.astype(np.int64) @ 256 ** np.arange(array.shape[2])
            counts = np.sort(np.unique(array, return_counts=True)[1])[::-1]
            constant = (array[:, 1:] == array[:, :-1]).mean() if width > 1 else 0
            if len(counts) > _MOST_VALUES or counts[:_FEW].sum() < _SHARE * array.size or constant < _CONSTANT:
                return 0
            map_small = _thumbnail(two)
        with silence_decoders(), open_pillow(image) as one:
            if sorted(one.size) != sorted((width, height)):
                return 0
            one.draft("L", (_SIDE, _SIDE))
            image_small = _thumbnail(one)
    except Exception:  # decoders raise nearly anything on broken bytes
        return 0
    deviations = image_small.std(), map_small.std()
    if min(deviations) == 0:
        return len(counts) if deviations[0] else 0  # a plain image says nothing
    return 0 if abs(np.corrcoef(image_small.ravel(), map_small.ravel())[0, 1]) > _COPY else len(counts)


def _thumbnail(image: Image.Image) -> np.ndarray:
    """Return the grey values of a small picture, float32 [64 64]."""
    grey = image if image.mode in ("L", "F") or image.mode.startswith("I") else image.convert("L")
    floats = Image.fromarray(np.asarray(grey).astype(np.float32))
    return np.asarray(floats.resize((_SIDE, _SIDE), Image.Resampling.BOX))
