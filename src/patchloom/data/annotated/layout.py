"""How folders of annotated images are laid out: what lies there, to which part it belongs, and what goes together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from patchloom.data.noticed import some_of
from patchloom.errors import PatchloomError

TRAIN, VALIDATION, TEST = "train", "validation", "test"
PARTS = (TRAIN, VALIDATION, TEST)
_WORDS = {
    TRAIN: ("train", "training", "trainval"),
    VALIDATION: ("val", "valid", "validation", "dev"),
    TEST: ("test", "testing"),
}
_PART = {word: part for part, words in _WORDS.items() for word in words}
_FEW_LOST = 0.05  # share of the annotation files that may have no image
# folders that say what kind of file they hold, and nothing about which image
_ROLES = frozenset(
    "images image imgs img jpegimages photos frames annotations annotation annots xmls xml labels label".split()
)


def part_named(word: str) -> str | None:
    """The part that a word, such as ``val`` or ``train2017``, stands for; None if it is no such word."""
    return _PART.get(word.lower().rstrip("0123456789"))


def part_of(path: str) -> str | None:
    """The part to which a file belongs, by the innermost of its folders that is called so."""
    return next(filter(None, map(part_named, reversed(path.split("/")[:-1]))), None)


def by_folder(root: Path, images: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The images of each part, by the names of their folders, and a note on those in none.

    Without such folders, all are for training.

    Args:
        root: to which their paths are relative.
        images: their paths.
    """
    parts: dict[str, list[str]] = {}
    nowhere: list[str] = []
    for image in images:
        part = part_of(image)
        (nowhere if part is None else parts.setdefault(part, [])).append(image)
    if not parts:
        return {TRAIN: nowhere}, []
    if not nowhere:
        return parts, []
    names = some_of((str(root / image) for image in nowhere), len(nowhere))
    return parts, [f"{images_are(len(nowhere))} left out, in no folder such as train or test ({names})"]


def images_in_words(count: int) -> str:
    """As "12 images"."""
    return "1 image" if count == 1 else f"{count:,} images"


def images_are(count: int) -> str:
    """As "12 images are"."""
    return f"{images_in_words(count)} {'is' if count == 1 else 'are'}"


def is_role(word: str) -> bool:
    """Whether a folder of this name says what kind of file it holds, as ``images`` and ``annotations`` do."""
    return word.lower() in _ROLES


def key_of(path: str) -> str:
    """What an image and its annotation have in common.

    It is the path without its suffix and without folders such as ``images`` and ``annotations``.
    """
    *folders, name = path.split("/")
    return "/".join([*(one for one in folders if not is_role(one)), os.path.splitext(name)[0]])


class Partners:
    """Finds the image of an annotation file, and remembers which were asked for.

    Args:
        root: to which the paths are relative, for messages.
        images: their paths.
    """

    def __init__(self, root: Path, images: Sequence[str]) -> None:
        self.root, self.images = root, images
        self._by_key: dict[str, list[str]] = {}
        self._by_stem: dict[str, list[str]] = {}
        for image in images:
            key = key_of(image)
            self._by_key.setdefault(key, []).append(image)
            self._by_stem.setdefault(key.rpartition("/")[2], []).append(image)
        self._taken: dict[str, str] = {}

    def image_of(self, annotation: str, named: str = "") -> str | None:
        """The image of an annotation file; None if there is none.

        It has the same `key_of`; or else, alone among all images, the same name; or else the name that the file says.

        Args:
            annotation: path of the file.
            named: the name of the image that it says.

        Raises:
            PatchloomError: several images may be meant, or the image has an annotation already.
        """
        key = key_of(annotation)
        stem = key.rpartition("/")[2]
        also = os.path.splitext(named.replace("\\", "/").rpartition("/")[2])[0]
        beside = f"{key[: len(key) - len(stem)]}{also}"
        for known, word in ((self._by_key, key), (self._by_stem, stem), (self._by_key, beside), (self._by_stem, also)):
            found = known.get(word, [])
            if len(found) > 1:
                raise PatchloomError(
                    f"{self.root / annotation} may be of {self.root / found[0]} or of {self.root / found[1]}: give "
                    "each image a name of its own"
                )
            if found:
                if (other := self._taken.setdefault(found[0], annotation)) != annotation:
                    raise PatchloomError(
                        f"{self.root / found[0]} has two annotations, {self.root / other} and "
                        f"{self.root / annotation}: take one of them away"
                    )
                return found[0]
        return None

    def others(self) -> list[str]:
        """The images that no annotation has asked for."""
        return [image for image in self.images if image not in self._taken]


def note_on_unnamed(root: Path, images: Sequence[str], count: int) -> list[str]:
    """A sentence on images that no annotation names; none if there are none.

    Args:
        root: to which their paths are relative.
        images: their paths.
        count: of all images.
    """
    if not images:
        return []
    names = some_of((str(root / image) for image in images), len(images))
    return [f"{images_are(len(images))} left out (of {count:,}), as no annotation names them ({names})"]


def note_on_lost(root: Path, lost: Sequence[str], count: int, files: str) -> list[str]:
    """A sentence on annotation files without an image; none if there are none.

    Args:
        root: to which their paths are relative.
        lost: their paths.
        count: of all annotation files.
        files: what they are called.

    Raises:
        PatchloomError: they are many.
    """
    if len(lost) > _FEW_LOST * count:
        raise PatchloomError(
            f"{root / lost[0]} has no image of its name ({len(lost):,} of {count:,} {files} have none): put the images "
            "beside them, or into images/"
        )
    names = some_of((str(root / file) for file in lost), len(lost))
    return [f"{len(lost):,} of {count:,} {files} are left out, as they have no image ({names})"] if lost else []


def files_in(root: Path, folders: Iterable[str], suffixes: Iterable[str]) -> list[str]:
    """Sorted paths, relative to ``root``, of the files with these suffixes directly in some of its folders."""
    ends = tuple(suffixes)
    return sorted(
        f"{folder}/{entry.name}" if folder else entry.name
        for folder in folders
        for entry in _entries(root / folder)
        if entry.name.lower().endswith(ends) and not entry.name.startswith(".") and entry.is_file()
    )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [*entries]
    except (FileNotFoundError, NotADirectoryError):
        return []


def named_parts(there: Mapping[str, int]) -> tuple[dict[str, str], list[str]]:
    """Which of the parts that data brings are trained on, chosen by and tested on.

    Args:
        there: the number of images of each part, by its name in `PARTS`.

    Returns:
        The part that each part's images become, and a note where that is not what they are called.
    """
    if VALIDATION in there and TEST not in there:
        return (
            {TRAIN: TRAIN, VALIDATION: TEST},
            [f"The validation part ({images_in_words(there[VALIDATION])}) is the test, as there is no other"],
        )
    return {part: part for part in there}, []
