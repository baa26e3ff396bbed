"""Label maps among images: pictures whose pixels name classes, as ``masks/`` holds them beside ``images/``.

They are recognised by three things together: each has the name of an image (in a sibling folder, in the folder above,
or beside it but for an ending such as ``_mask`` or a beginning such as ``mask_``), it has few values, and that image
has many more. Only a sample of the files is read.
So a class folder that is called "masks" and holds photographs stays, and so do black-and-white images
without partners.
"""

from __future__ import annotations

import glob
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from patchloom.data.conversions import MAX_EXAMPLES, limit_examples
from patchloom.data.decode import Unreadable, open_pillow, read_image, silence_decoders
from patchloom.data.sources.files import PackedStrings
from patchloom.data.sources.scandir import Listing, count_files_were

_T = TypeVar("_T")

_WORDS = "mask label annot segment trimap matte truth panoptic"  # anywhere in the name of a folder of label maps
_TOKENS = "gts?|gtfine|gtcoarse|seg|semantic|instances?"  # only as a whole word
_MAPS = re.compile(rf"{'|'.join(_WORDS.split())}|(?<![a-z])({_TOKENS})(?![a-z])")
_IMAGES = re.compile(r"image|img|photo|picture|frame|rgb|jpe?g|scan|input|(?<![a-z])(orig|original|raw|x)s?(?![a-z])")
# endings of the names of label maps; and the same words as a whole listing is searched for them first, which is fast
_ENDINGS = (
    "masks?|labels?|label_?maps?|label_?(train_?)?ids?|instance_?ids?|annot(ation)?|gt(fine|coarse)?|ground_?truth"
    "|seg(mentation)?|matte|trimap|colou?r|L"
)
MAP_ENDING = re.compile(rf"(([ _.-]({_ENDINGS}))+([ _-]?\d+)?)$", re.IGNORECASE)
_MAP_START = re.compile(r"(masks?|labels?|annot(?:ation)?|gt|seg(?:mentation)?|matte|trimap)(?:[ _.-]+|(?=\d))", re.I)
_IMAGE_START = re.compile(r"(image|img|photo|picture|frame|rgb|input)(?:[ _.-]+|(?=\d))", re.I)
_SIGNS = b" _.-"
_BESIDE = {
    word: [bytes([sign]) + word for sign in _SIGNS] + [word + bytes([sign]) for sign in _SIGNS + b"0123456789"]
    for word in b"mask label annot gt seg matte trimap truth".split()
}
IMAGE_ENDING = re.compile(r"[ _-](leftImg8bit|image|img|rgb|sat|orig|original)$", re.IGNORECASE)

_SIBLINGS = 8  # in a folder of no more sub-folders, those without a telling name are looked at, too
_KINDS = 64  # of folders that are looked at, at most
_NAMED, _READ = 32, 6  # files whose names are looked for, and files that are read, of each kind
_SHARE = 0.9  # of the names that must be found, and of the pixels that the commonest values must have
_FEW, _FEWEST = 128, 32  # values of a label map; of one that little else speaks for
_LARGE = 2**27  # bytes, and pixels: larger files are not read
_LOOKED_AT = 512  # pixels of a side, spread over the image


class _Kind(NamedTuple):
    """Two sub-folders, by name, in all folders that have both: one may hold the label maps of the other.

    ``images`` may be "", for what lies in the parent itself.
    """

    maps: str
    images: str
    parents: list[str]

    @property
    def by_name(self) -> bool:
        return is_map_folder(self.maps)

    @property
    def images_by_name(self) -> bool:
        return is_image_folder(self.images)

    @property
    def beyond_doubt(self) -> bool:
        return self.by_name and self.images_by_name


class _Look(NamedTuple):
    """What the pixels of a file are like.

    Attributes:
        sides: the shorter one first, since either file may be turned.
        values: how many different ones there are.
        common: share of the pixels that have one of the eight commonest values.
        codes: they are numbers in a palette, or small.
    """

    sides: list[int]
    values: int
    common: float
    codes: bool

    @property
    def few(self) -> bool:
        return self.values <= _FEW or self.common >= _SHARE


def without_label_maps(root: Path, listed: Listing, where: str = "") -> tuple[PackedStrings, list[str]]:
    """The images that are no label maps, and a sentence on those that are, if there are any."""
    search = _Search(root, listed.paths)
    kept = np.ones(len(listed.paths), bool)
    for kind in _kinds(listed.folders):
        parents = [p for p in kind.parents if all(kept[search.under(p, c)].any() for c in (kind.maps, kind.images))]
        if parents and search.are_maps(kind._replace(parents=parents)):
            for parent in parents:
                kept[search.under(parent, kind.maps)] = False
    kept[search.beside(kept)] = False
    count = len(kept) - int(kept.sum())
    if not count:
        return listed.paths, []
    examples = [where + listed.paths[int(i)] for i in np.flatnonzero(~kept)[:MAX_EXAMPLES]]
    return listed.paths.where(kept), [
        f"{count_files_were(count)} left out as label maps: they have few values, and the images beside them many "
        f"({limit_examples(examples, count)}); to keep them, name the files by a pattern, such as "
        f"'{glob.escape(str(root))}/**/*{Path(examples[0]).suffix}'"
    ]


def is_map_folder(folder: str) -> bool:
    """Whether a folder is called as one of label maps."""
    return bool(_MAPS.search(folder.lower())) and not folder.lower().startswith("un")  # as in "unlabelled"


def is_image_folder(folder: str) -> bool:
    """Whether a folder is called as one of images beside others."""
    return bool(_IMAGES.search(folder.lower()))


def _is_image_ending(rest: str) -> bool:
    """Whether this follows the stem in the name of an image: a suffix, perhaps behind an ending such as ``_rgb``."""
    ending, _, suffix = rest.rpartition(".")
    return bool(suffix) and "/" not in rest and (not ending or IMAGE_ENDING.fullmatch(ending) is not None)


def _kinds(folders: Sequence[str]) -> list[_Kind]:
    """Pairs of sub-folders to look at, those with telling names first."""
    children: dict[str, list[str]] = {}
    for folder in folders:
        parent, _, child = folder.rpartition("/")
        if child:
            children.setdefault(parent, []).append(child)
    found: dict[tuple[str, str], list[str]] = {}
    for parent, those in children.items():
        telling = [child for child in those if is_map_folder(child)][:_SIBLINGS]
        few = len(those) <= _SIBLINGS
        others = [child for child in those if not is_map_folder(child)] if few or telling else []
        others = sorted(others, key=lambda child: not _IMAGES.search(child.lower()))[:_SIBLINGS]
        for maps in those if few else telling:
            for images in others:
                if maps != images:
                    found.setdefault((maps, images), []).append(parent)
    for parent, those in children.items():  # photos/masks beside photos/*.jpg; last, since images may lie in neither
        for maps in [child for child in those if is_map_folder(child)][:_SIBLINGS]:
            found.setdefault((maps, ""), []).append(parent)
    kinds = [_Kind(*pair, parents) for pair, parents in found.items()]
    return sorted(kinds, key=lambda kind: (not kind.beyond_doubt, not kind.by_name))[:_KINDS]


class _Search:
    """Looks for label maps among the files of a folder.

    Args:
        root: the folder.
        paths: of its files, sorted.
    """

    def __init__(self, root: Path, paths: PackedStrings) -> None:
        self.root, self.paths = root, paths
        self._looks: dict[str, _Look | None] = {}

    def under(self, parent: str, child: str) -> slice:
        """The places of the files in a sub-folder of a folder, or in the folder if the name of the other is ""."""
        folder = "/".join(filter(None, (parent, child)))
        there = self.paths.under(f"{folder}/") if folder else range(len(self.paths))
        return slice(there.start, there.stop)

    def are_maps(self, kind: _Kind) -> bool:
        """Whether the first of two sub-folders holds the label maps of the second."""
        some = list(self._spread(kind))
        pairs = [(path, self._partner(parent, kind, path)) for parent, path in some]
        named = [(path, image) for path, image in pairs if image]
        if named and len(named) >= _SHARE * len(pairs):
            return self._judge(kind, _some(named, _READ))
        if not kind.beyond_doubt:
            return False
        # one file an object, or names of another kind: any image of the same folder serves for comparison
        firsts = ((path, self.under(parent, kind.images).start) for parent, path in some)
        return self._judge(kind, _some([(path, self.paths[first]) for path, first in firsts], _READ))

    def beside(self, kept: np.ndarray) -> np.ndarray:
        """The places of those that are label maps of an image in the same folder, by the ends of their names."""
        letters = self.paths.letters.lower()
        by_word: dict[str, list[tuple[int, str]]] = {}
        there = any(word in letters and any(one in letters for one in endings) for word, endings in _BESIDE.items())
        names = (path.rpartition("/")[2] for path in self.paths) if there else ()
        starts = ["", *sorted({start[0] for name in names if (start := _IMAGE_START.match(name))})]
        for i, path in enumerate(self.paths) if there else ():
            word, image = self._image_beside(path, starts) if kept[i] else ("", "")
            if image:
                by_word.setdefault(word, []).append((i, image))
        found: list[int] = []
        for pairs in by_word.values():
            if self._judge(_Kind("masks", "", []), [(self.paths[i], image) for i, image in _some(pairs, _READ)]):
                found += [i for i, _ in pairs]
        return np.array(found, np.int64)

    def _image_beside(self, path: str, starts: Sequence[str]) -> tuple[str, str]:
        """Return the word that calls a file a label map, and its image in the same folder; "" twice without either."""
        folder, slash, name = path[: path.rfind(".")].rpartition("/")
        ending, start = MAP_ENDING.search(name), _MAP_START.match(name)
        if ending and ending.start():
            word, short = ending[2], name[: ending.start()]
        elif start:
            word, short = start[1] + "_", name[start.end() :]
        else:
            return "", ""
        for begin in starts if short else ():
            image = self._with_stem(f"{folder}{slash}{begin}{short}")
            if image and image != path:
                return word.lower(), image
        return "", ""

    def _spread(self, kind: _Kind) -> Iterator[tuple[str, str]]:
        """A sample of the files that may be label maps: parent and path."""
        parents = _some(kind.parents, _NAMED)
        for parent in parents:
            there = range(len(self.paths))[self.under(parent, kind.maps)]
            yield from ((parent, self.paths[i]) for i in _some(there, -(-_NAMED // len(parents))))

    def _partner(self, parent: str, kind: _Kind, path: str) -> str:
        """The image in the other sub-folder that has the name of this file; "" if there is none."""
        start = f"{parent}/" if parent else ""
        stem = path[len(start) + len(kind.maps) + 1 : path.rfind(".")]
        start += f"{kind.images}/" if kind.images else ""
        while stem:  # folders/within/0001: also as within/0001 and as 0001
            for name in dict.fromkeys((stem, MAP_ENDING.sub("", stem))):
                if found := self._with_stem(f"{start}{name}"):
                    return found
            stem = stem.partition("/")[2]
        return ""

    def _with_stem(self, stem: str) -> str:
        """An image of this path but for its suffix, or an ending such as ``_rgb``; "" if there is none."""
        for sign in "._- ":
            first = bisect_left(self.paths, stem + sign)
            for i in range(first, min(first + 4, len(self.paths))):
                path = self.paths[i]
                if path.startswith(stem) and _is_image_ending(path[len(stem) :]):
                    return path
        return ""

    def _judge(self, kind: _Kind, pairs: Sequence[tuple[str, str]]) -> bool:
        """Whether the contents of files, beside those of their partners, are those of label maps."""
        if not kind.by_name and any(path.lower().endswith((".jpg", ".jpeg", ".webp")) for path, _ in pairs):
            return False  # in which few values would have become many
        tried = agreed = 0
        for path, partner in pairs:
            look = self._look(path)
            if look is None:
                continue
            tried += 1
            if look.few and (image := self._look(partner)) is not None:
                fits = look.sides == image.sides or kind.beyond_doubt
                clear = image.values > 2 * look.values or look.common > image.common + (1 - _SHARE)
                known = kind.by_name or (1 < look.values <= _FEWEST and (look.codes or kind.images_by_name))
                agreed += fits and known and (clear or (kind.beyond_doubt and look.values <= _FEWEST))
            if tried - agreed > 1:  # one may be broken, or strange
                return False
        return agreed > 0 and (agreed == tried or tried > 2)

    def _look(self, path: str) -> _Look | None:
        if path not in self._looks:
            self._looks[path] = _looked_at(self.root / path)
        return self._looks[path]


def _some(those: Sequence[_T], count: int) -> list[_T]:
    """Up to ``count`` of them, evenly spread."""
    n = len(those)
    return [those[i * n // count] for i in range(count)] if n > count else list(those)


def _looked_at(path: Path) -> _Look | None:
    """What a file's pixels are like; None if it cannot be read, or is too large to be read for this."""
    try:
        if path.stat().st_size > _LARGE:
            return None
        with silence_decoders(), open_pillow(path) as image:
            mode = image.mode
            if image.width * image.height > _LARGE:
                return None
            array = np.asarray(image)  # a palette is not looked up: its numbers are what counts
    except Exception:  # any exception means that PIL does not read this file
        try:
            array, mode = read_image(path).permute(1, 2, 0).numpy(), ""
        except Unreadable:
            return None
    height, width = array.shape[:2]
    step = max(1, -(-max(height, width) // _LOOKED_AT))
    array = array[::step, ::step]
    pixels = array.reshape(array.shape[0] * array.shape[1], -1)[:, :3]
    if pixels.shape[1] > 1 and pixels.dtype == np.uint8:  # a colour is one value
        pixels = pixels.astype(np.uint32) @ np.array([1, 256, 65536], np.uint32)[: pixels.shape[1]]
    values, counts = np.unique(pixels, return_counts=True)
    codes = mode == "P" or (array.ndim == 2 and array.dtype != np.float32 and 0 < values[-1] < _FEW / 2)
    # a tiny image has few values, whatever it shows
    number = len(values) if len(values) <= counts.sum() / 16 else max(_FEW + 1, len(values))
    return _Look(sorted((height, width)), number, float(np.sort(counts)[-8:].sum() / counts.sum()), bool(codes))
