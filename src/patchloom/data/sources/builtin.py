"""Built-in data sets: synthetic shapes and recordings, scikit-learn's digits, and downloads by torchvision."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor

from patchloom.data.decode import from_pil, unreadable
from patchloom.data.duplicates import PIXEL_KIND, contents_of, contents_on_disc
from patchloom.data.source import Data, Source, digest, stamp_of_files
from patchloom.data.sources.in_memory import InMemorySource, stored_labels
from patchloom.data.sources.names import FETCHED
from patchloom.data.sources.synthetic import Shapes, Tones
from patchloom.data.splits import pick
from patchloom.errors import PatchloomError, one_line
from patchloom.system.files import cache_root
from patchloom.system.network import network_error

# Index of the first test image or recording, so large that training ones never reach it.
_TEST = 2**40


# by name: the class, the default numbers of training and test items, and the name of the items
_MADE = {"shapes": (Shapes, 5000, 2000, "images"), "tones": (Tones, 5000, 1000, "recordings")}


class Torchvision(Source):
    """Split of a torchvision data set."""

    def __init__(self, name: str, split: str, dataset: Any) -> None:
        self.name, self.split, self.dataset = name, split, dataset
        self.classes, self.labels = stored_labels(dataset) or ((), None)

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, i: int) -> Tensor:
        with unreadable(self.describe(i), "an image"):
            return from_pil(self.dataset[i][0])

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray | None:
        """Return hashes of the pixels if they are in memory, otherwise of the files, if torchvision names them."""
        if (pixels := self._pixels()) is not None:
            return contents_of(PIXEL_KIND, ([one] for one in pixels[... if chosen is None else chosen]))
        files = self._files()
        return None if files is None else contents_on_disc(self, files.__getitem__, chosen)

    def _pixels(self) -> np.ndarray | None:
        pixels = getattr(self.dataset, "data", None)
        return np.ascontiguousarray(pixels) if isinstance(pixels, np.ndarray | Tensor) else None

    def _files(self) -> list[str | Path] | None:
        found = (getattr(self.dataset, attribute, None) for attribute in ("_image_files", "_images", "samples"))
        files = next((files for files in found if files is not None), None)
        return None if files is None else [file[0] if isinstance(file, tuple) else file for file in files]

    def describe(self, i: int) -> str:
        return f"{self.name} {self.split} #{i}"

    def fingerprint(self) -> str:
        return digest([type(self.dataset).__name__, self.split, str(len(self))])

    def stamp(self) -> str | None:
        if (pixels := self._pixels()) is not None:
            return hashlib.sha256(pixels.data).hexdigest()[:16]
        files = self._files()
        return None if files is None else stamp_of_files(files)


def is_builtin(data: str) -> bool:
    """Return whether ``data`` is the name of a data set of this file."""
    return data == "digits" or data.partition(":")[0] in _MADE or data.partition("@")[0] in FETCHED


def open_builtin(data: str, seed: int = 0, fetch: bool = True) -> Data:
    """Open data by one of its names: ``shapes``, ``shapes:N``, ``tones``, ``digits``, ``cifar10``, ``cifar10@ROOT``."""
    made, _, number = data.partition(":")
    if made in _MADE:
        source, usual, tests, noun = _MADE[made]
        count = number or str(usual)
        if not (count.isascii() and count.isdigit()):
            raise PatchloomError(f"{data} does not say how many {noun}: write a whole number, as in {made}:{usual}")
        return Data(source(int(count), seed, name=data), source(tests, seed, first=_TEST, name=data))
    if data == "digits":
        return _open_digits()
    name, _, root = data.partition("@")
    folder = Path(root).expanduser() if root else cache_root()
    dataset, training, testing = FETCHED[name]
    train = Torchvision(data, "train", _download(name, dataset, folder, training, fetch))
    if testing is None:
        return Data(train, None)
    return Data(train, Torchvision(data, "test", _download(name, dataset, folder, testing, fetch)))


def _open_digits() -> Data:
    from sklearn.datasets import load_digits  # slow to import, and few runs need it

    digits = load_digits()
    images = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8))[:, None]
    labels = digits.target.astype(np.int64)
    test = pick(labels, 360, seed=0)  # independent of the run's seed, so that scores can be compared
    sources = list[InMemorySource]()
    for chosen in (np.setdiff1d(np.arange(len(labels)), test), test):
        source = InMemorySource("digits", images[chosen], "digits")
        source.classes, source.labels = tuple("0123456789"), labels[chosen]
        sources.append(source)
    return Data(sources[0], sources[1])


def _download(name: str, dataset: str, folder: Path, arguments: dict[str, Any], fetch: bool) -> Any:
    if not fetch:
        try:
            return getattr(torchvision.datasets, dataset)(root=folder, download=False, **arguments)
        except Exception as error:  # missing or damaged files raise many kinds of exceptions
            raise PatchloomError(
                f"{name} is not in {folder}, and is downloaded only if you type its name: give it as the data"
            ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return getattr(torchvision.datasets, dataset)(root=folder, download=True, **arguments)
    except Exception as error:  # no network, a dead mirror, a full disc, a missing package: the remedy is the same
        raise network_error(
            f"{name} could not be downloaded ({one_line(error)}): put the files of torchvision.datasets.{dataset} into "
            f"{folder}, or name the folder that has them as {name}@FOLDER",
            error,
        ) from error
