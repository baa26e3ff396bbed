"""Shards: tar files of images and labels in WebDataset's layout, with random access.

Which images a shard holds, and where, is in its index (`shard_index`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
from torch import Tensor

from patchloom.data.contents import contents_on_disc
from patchloom.data.formats import IMAGE_SUFFIXES
from patchloom.data.read import Unreadable, decode_image
from patchloom.data.sources.addresses import Shard, addresses_of, is_address, states_of
from patchloom.data.sources.base import TEST_SPLITS, Data, Source, digest, in_classes, note_on_splits
from patchloom.data.sources.fetch import check_room, part_of
from patchloom.data.sources.files import Files, Names
from patchloom.data.sources.shard_index import ShardIndex, index_of
from patchloom.data.workers import in_threads
from patchloom.errors import PatchloomError
from patchloom.waiting import Waiting

WINDOW = 8  # shards whose images are mixed with each other at any time


class Shards(Source):
    """Images in tar files.

    Args:
        name: what the user typed.
        shards: the tar files.
        names: of the images' members.
        at: int64 [n 3], for each image the number of its shard, its offset and its size in bytes.
        classes: names of the classes.
        labels: int64 [n], indices into ``classes``, -1 for none.
    """

    def __init__(
        self,
        name: str,
        shards: Sequence[Shard],
        names: Sequence[str],
        at: np.ndarray,
        classes: tuple[str, ...] = (),
        labels: np.ndarray | None = None,
    ) -> None:
        self.name, self.shards, self.names, self.at = name, tuple(shards), Names(names), at
        self.classes, self.labels = classes, labels

    def __len__(self) -> int:
        return len(self.at)

    def read(self, i: int) -> Tensor:
        number, start, size = self.at[i].tolist()
        try:
            content = part_of(self.shards[number], start, size)
        except Unreadable as error:
            raise Unreadable(f"{self.describe(i)}: {error}") from error
        if len(content) < size:
            raise Unreadable(f"{self.describe(i)} cannot be read as an image: its shard was cut off")
        return decode_image(content, self.describe(i))

    def order(self, rng: np.random.Generator, chosen: np.ndarray | None = None) -> np.ndarray:
        """Shards in random order, with the images of each spread over the span of `WINDOW` shards.

        So the images of `WINDOW` shards are mixed at any time, and only these have to be at hand. The span wraps around
        the end of the epoch to its beginning. Up to `WINDOW` shards are shuffled uniformly.
        """
        shard = self.at[:, 0] if chosen is None else self.at[chosen, 0]
        count = len(self.shards)
        turn = rng.permutation(count)[shard] + min(WINDOW, count) * rng.random(len(shard))
        return np.argsort(turn % count, kind="stable")

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray | None:
        """Hashes of the images' bytes in the shards; None if shards would have to be fetched for it."""
        return contents_on_disc(self, self._pieces, chosen) if all(shard.local for shard in self.shards) else None

    def _pieces(self, i: int) -> list[bytes]:
        number, start, size = self.at[i].tolist()
        return [part_of(self.shards[number], start, size)]

    def describe(self, i: int) -> str:
        return f"{self.shards[self.at[i, 0]].address}:{self.names[i]}"

    def place(self, i: int) -> str:
        return f"{self.shards[self.at[i, 0]].address.rpartition('/')[2]}/{self.names[i]}"

    def fingerprint(self) -> str:
        """Of the index, of name, size and mtime of local shards, and of address and state of remote ones."""
        paths = [Path(shard.address) for shard in self.shards if shard.local]
        here = [Files(self.name, path.parent, [path.name]).fingerprint() for path in paths]
        away = [f"{shard.address}\t{shard.state}" for shard in self.shards if not shard.local]
        labels = [] if self.labels is None else self.labels.tolist()
        return digest(chain(self.classes, map(str, labels), [self._places()], here, away))

    def stamp(self) -> str | None:
        now = states_of(shard.address for shard in self.shards)
        if not all(shard.certain for shard in now):
            return None
        return digest(chain([self._places()], (f"{shard.address}\t{shard.state}" for shard in now)))

    def _places(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.at)).hexdigest()


def is_shards(name: str) -> bool:
    """Whether the user typed shards, and not a folder or a list."""
    return is_address(name) or re.search(r"\.(tar|tgz|tar\.\w+)$", name) is not None


def holds_shards(folder: Path) -> bool:
    """Whether a folder holds tar files, and neither images nor folders."""
    entries = [path for path in folder.iterdir() if not path.name.startswith(".")]
    suffixes = {path.suffix.lower() for path in entries}
    return ".tar" in suffixes and not suffixes & IMAGE_SUFFIXES and not any(path.is_dir() for path in entries)


def open_shards(pattern: str, name: str) -> Data:
    """Open shards by a pattern.

    Args:
        pattern: a path, an address for fsspec, or a ``pipe:`` command, with braces and, except for commands, ``*``.
        name: what the user typed.

    Raises:
        PatchloomError: there are none; one is missing, damaged or compressed; they hold no images, or several in a
            sample; labels are partly numbers and partly words; or there is too little space for remote shards.
    """
    return Data(_source(addresses_of(pattern), name, None), None)


def open_shard_folder(folder: Path, name: str) -> Data:
    """Open all tar files of a folder; ``train-*.tar`` and ``test-*``, ``val-*`` or ``validation-*`` are splits.

    Beside two of them, those of any other name are left out.

    Raises:
        PatchloomError: as `open_shards`, or a class in the test split that the training split lacks.
    """
    by_split: dict[str, list[str]] = {}
    for path in sorted(folder.absolute().glob("*.tar")):
        if not path.name.startswith("."):
            by_split.setdefault(re.split("[-_.]", path.name)[0], []).append(os.fspath(path))
    test = next((split for split in TEST_SPLITS if split in by_split), None)
    if test is None or "train" not in by_split:
        return Data(_source(list(chain.from_iterable(by_split.values())), name, None), None)
    train = _source(by_split["train"], name, None)
    sizes = {split: "1 shard" if len(some) == 1 else f"{len(some):,} shards" for split, some in by_split.items()}
    taken = [f"{split} ({sizes.pop(split)})" for split in ("train", test)]
    notes = (note_on_splits(*taken, sizes, "name {} train-*"),) if sizes else ()
    tested = _source(by_split[test], f"{name} ({test})", train.classes)
    others = {split: _source(by_split[split], f"{name} ({split})", None) for split in TEST_SPLITS if split in sizes}
    return Data(train, tested, notes, {split: in_classes(one, train.classes) for split, one in others.items()})


def _source(addresses: list[str], name: str, classes: tuple[str, ...] | None) -> Shards:
    """Index shards; with ``classes``, those of the training images, no other class may occur."""
    shards = states_of(addresses)
    check_room(shards, 2 * WINDOW, name)  # twice, because workers are at different places
    indices: list[ShardIndex] = []
    waiting = Waiting(f"indexing the shards of {name}", len(shards))
    with waiting, closing(in_threads(index_of, shards)) as made:  # else threads would continue after an exception
        for number, index in enumerate(made):
            waiting.advance()
            shards[number] = replace(shards[number], size=index.size)
            indices.append(index)
            if shards[number].pipe:  # its size was not known before
                check_room(shards, 2 * WINDOW, name)
    names = [image for index in indices for image in index.names]
    if not names:
        some = shards[0].address if len(shards) == 1 else f"the {len(shards)} shards of {name}"
        wanted = ", ".join(sorted(IMAGE_SUFFIXES))
        raise PatchloomError(
            f"{some}: no sample has an image, which ends in {wanted}; recordings are read from folders, not from shards"
        )
    numbers = np.repeat(np.arange(len(shards)), [len(index.names) for index in indices])
    starts = [start for index in indices for start in index.starts]
    sizes = [size for index in indices for size in index.sizes]
    texts = [text for index in indices for text in index.labels]
    found, labels = _labelled(texts, names, name, classes)
    return Shards(name, shards, names, np.stack([numbers, starts, sizes], 1).astype(np.int64), found, labels)


def _labelled(
    texts: list[str | None], names: list[str], name: str, classes: tuple[str, ...] | None
) -> tuple[tuple[str, ...], np.ndarray | None]:
    """Classes and labels, int64 [n]; ``classes``: as in `_source`."""
    words = {text for text in texts if text is not None}
    numbers = {word for word in words if word.isdecimal()}
    if numbers and numbers != words:
        one, other = (next(i for i, text in enumerate(texts) if text in some) for some in (numbers, words - numbers))
        raise PatchloomError(
            f"{name} mixes labels: {names[one]} has the number {texts[one]} and {names[other]} the word "
            f"{texts[other]}, so write all of them in one way"
        )
    if not words or classes == ():
        return classes or (), None
    found = tuple(sorted(words, key=lambda word: (int(word) if numbers else 0, word)))
    if classes is not None and not words <= set(classes):
        strange = next(word for word in found if word not in classes)
        raise PatchloomError(f"{name} has the class {strange}, which train lacks: give both the same classes")
    classes = classes or found
    number = {word: i for i, word in enumerate(classes)}
    return classes, np.array([-1 if text is None else number[text] for text in texts], dtype=np.int64)
