"""Meanings of names: of built-in data sets, of splits, of kinds of folders, and of folders of other programs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

_FLAG = {"train": True}, {"train": False}
_SPLIT = {"split": "train"}, {"split": "test"}
# by name: a class of torchvision.datasets, and its arguments for training and test images (None: there are none)
FETCHED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "cifar10": ("CIFAR10", *_FLAG),
    "cifar100": ("CIFAR100", *_FLAG),
    "stl10": ("STL10", *_SPLIT),
    "svhn": ("SVHN", *_SPLIT),
    "fashionmnist": ("FashionMNIST", *_FLAG),
    "mnist": ("MNIST", *_FLAG),
    "flowers102": ("Flowers102", *_SPLIT),
    "food101": ("Food101", *_SPLIT),
    "oxfordiiitpet": ("OxfordIIITPet", {"split": "trainval"}, {"split": "test"}),
    "dtd": ("DTD", *_SPLIT),
    "eurosat": ("EuroSAT", {}, None),
}
BUILTIN = ("shapes", "tones", "digits", *FETCHED)

TRAIN, VALIDATION, TEST = "train", "validation", "test"
_SPLITS = {  # in order of preference
    **dict.fromkeys(("train", "training", "trainval"), TRAIN),
    **dict.fromkeys(("test", "testing"), TEST),
    **dict.fromkeys(("val", "validation", "valid", "dev"), VALIDATION),
}
# folders that say what kind of file they hold, and nothing about which image
_ROLES = frozenset(
    "images image imgs img jpegimages photos frames annotations annotation annots xmls xml labels label".split()
)
# folders in which other programs keep thumbnails, previews, deleted or recovered files: the ends of their paths
_FOREIGN = re.compile(
    r"""(?ix) (?: ^ | / ) (?:
        @eadir | @tmp | @sharebin | \#recycle | \#snapshot              # Synology
        | @recycle | @recently-snapshot | \.@__thumb                    # QNAP
        | \$recycle\.bin | system\ volume\ information | found\.\d{3}  # Windows
        | __macosx | \.appledouble | network\ trash\ folder | temporary\ items | \.trash[^/]*  # macOS, and Linux
        | lost\+found | \.thumbnails | \.picasaoriginals | \.dtrash | \.ipynb_checkpoints
        | [^/]+\.lrdata                                                # Lightroom
        | [^/]+\.(?:photo|photos|a|migratedphoto)library/(?!originals|masters)[^/]+  # Apple
    ) $"""
)


def split_settings(name: str) -> tuple[str, dict[str, str]]:
    """Return a name and the settings behind it, as in ``FILE@label=species,tile=256``; none for an existing path."""
    whole, at, words = name.rpartition("@")
    if not at or "=" not in words or os.path.exists(os.path.expanduser(name)):
        return name, {}
    return whole, {key: value for key, _, value in (word.partition("=") for word in words.split(","))}


def split_of(word: str) -> str | None:
    """Return the split that a word means, such as train for ``Training`` or ``train2017``; None for any other word."""
    return _SPLITS.get(_plain(word))


def choose_splits(words: Iterable[str]) -> tuple[str | None, str | None]:
    """Return which of the words are the splits for training and for the test: a test, or else one for validation."""
    ranked = sorted(filter(split_of, words), key=lambda word: [*_SPLITS].index(_plain(word)))
    train = next((word for word in ranked if split_of(word) == TRAIN), None)
    test = next((word for word in ranked if split_of(word) != TRAIN), None)
    return train, test


def _plain(word: str) -> str:
    return word.casefold().rstrip("0123456789")


def is_role(word: str) -> bool:
    """Return whether a folder of this name says what kind of file it holds, as ``images`` and ``annotations`` do."""
    return word.lower() in _ROLES


def is_foreign(folder: str) -> bool:
    """Return whether the last folder of a path belongs to another program, such as ``photos/@eaDir``."""
    return _FOREIGN.search(folder) is not None


def in_foreign(path: str) -> bool:
    """Return whether a file lies in a folder that `is_foreign`, at any depth."""
    folders = path.split("/")[:-1]
    return any(is_foreign("/".join(folders[: depth + 1])) for depth in range(len(folders)))
