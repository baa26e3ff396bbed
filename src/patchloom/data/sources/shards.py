"""Shards: tar files of images and labels, as WebDataset lays them out, read in any order.

An index of every shard (which image begins where, and its label) is made once. It is cached in
``cache_root()/shards/index``, under a digest of the shard's address and state.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch import Tensor

from patchloom.data.contents import contents_on_disc
from patchloom.data.read import IMAGE_SUFFIXES, Unreadable, decode_image
from patchloom.data.sources.addresses import Shard, addresses_of, in_words, is_address, states_of
from patchloom.data.sources.base import TEST_SPLITS, Data, Source, digest
from patchloom.data.sources.fetch import check_room, open_shard, part_of
from patchloom.data.sources.files import Files, Names
from patchloom.data.workers import in_threads
from patchloom.errors import PatchloomError
from patchloom.files import cache_root, write_whole

WINDOW = 8  # shards that are read at the same time: an order far from that of the files, from a few of them
_FORMAT = "index 1"  # for changes of the code that makes an index
_PAUSE = 10  # seconds between two lines of progress
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


@dataclass(frozen=True)
class _Index:
    """Of each image in a shard the name, where its bytes begin, how many they are, and its label if it has one.

    size: of the shard, in bytes.
    """

    names: list[str]
    starts: list[int]
    sizes: list[int]
    labels: list[str | None]
    size: int


class Shards(Source):
    """Images in tar files. at: int64 [n 3], of each image its shard, where its bytes begin, and how many they are."""

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
        """Shards come in random order, and the images of each are spread over the time of `WINDOW` shards.

        So at any time those of `WINDOW` shards are mixed. The pass is a circle: what reaches beyond its end comes at
        its beginning, which is mixed as well as the rest. Up to `WINDOW` shards are shuffled all together.
        """
        shard = self.at[:, 0] if chosen is None else self.at[chosen, 0]
        count = len(self.shards)
        turn = rng.permutation(count)[shard] + min(WINDOW, count) * rng.random(len(shard))
        return np.argsort(turn % count, kind="stable")

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray | None:
        """Of the images' files in the shards; None if shards would have to be fetched for it."""
        return contents_on_disc(self, self._pieces, chosen) if all(shard.local for shard in self.shards) else None

    def _pieces(self, i: int) -> list[bytes]:
        number, start, size = self.at[i].tolist()
        return [part_of(self.shards[number], start, size)]

    def describe(self, i: int) -> str:
        return f"{self.shards[self.at[i, 0]].address}:{self.names[i]}"

    def fingerprint(self) -> str:
        """Of the index, and of names, sizes and times of local shards, and addresses and states of others."""
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
    """Whether what the user typed names shards and not a folder or a list."""
    return is_address(name) or re.search(r"\.(tar|tgz|tar\.\w+)$", name) is not None


def holds_shards(folder: Path) -> bool:
    """Whether a folder holds tar files, but neither images nor folders."""
    entries = [path for path in folder.iterdir() if not path.name.startswith(".")]
    suffixes = {path.suffix.lower() for path in entries}
    return ".tar" in suffixes and not suffixes & IMAGE_SUFFIXES and not any(path.is_dir() for path in entries)


def open_shards(pattern: str, name: str, say: Callable[[str], None] = print) -> Data:
    """Shards by a path, an address that fsspec knows, or a `pipe:` command, with braces and, but for commands, `*`.

    say: takes lines of progress, if it takes long.

    Raises: PatchloomError if there are none, one is missing, damaged or compressed, they hold no images, a sample has
    several, labels are numbers here and words there, or there is too little room for shards from elsewhere.
    """
    return Data(_source(addresses_of(pattern), name, None, say), None)


def open_shard_folder(folder: Path, name: str, say: Callable[[str], None] = print) -> Data:
    """All tar files of a folder; or `train-*.tar` and one of `test-*`, `val-*`, `validation-*`, if it has both.

    Raises: as `open_shards`, and PatchloomError if the test split has a class that the training split lacks.
    """
    by_split: dict[str, list[str]] = {}
    for path in sorted(folder.absolute().glob("*.tar")):
        if not path.name.startswith("."):
            by_split.setdefault(re.split("[-_.]", path.name)[0], []).append(os.fspath(path))
    test = next((split for split in TEST_SPLITS if split in by_split), None)
    if test is None or "train" not in by_split:
        return Data(_source(list(chain.from_iterable(by_split.values())), name, None, say), None)
    train = _source(by_split["train"], name, None, say)
    return Data(train, _source(by_split[test], f"{name} ({test})", train.classes, say))


def _source(addresses: list[str], name: str, classes: tuple[str, ...] | None, say: Callable[[str], None]) -> Shards:
    """classes: of the training images, which others must not exceed."""
    shards, reported = states_of(addresses), time.monotonic()
    check_room(shards, 2 * WINDOW, name)  # workers are not all at the same place
    indices: list[_Index] = []
    with closing(in_threads(_index, shards)) as made:  # or threads would go on after an exception
        for number, index in enumerate(made):
            shards[number] = replace(shards[number], size=index.size)
            indices.append(index)
            if shards[number].pipe:  # its size was not known before
                check_room(shards, 2 * WINDOW, name)
            if time.monotonic() - reported > _PAUSE:
                say(f"  {number + 1:,} of {len(shards):,} shards of {name} are indexed")
                reported = time.monotonic()
    names = [image for index in indices for image in index.names]
    if not names:
        some = shards[0].address if len(shards) == 1 else f"the {len(shards)} shards of {name}"
        raise PatchloomError(f"{some}: no sample has an image, which ends in {', '.join(sorted(IMAGE_SUFFIXES))}")
    numbers = np.repeat(np.arange(len(shards)), [len(index.names) for index in indices])
    starts = [start for index in indices for start in index.starts]
    sizes = [size for index in indices for size in index.sizes]
    texts = [text for index in indices for text in index.labels]
    found, labels = _labelled(texts, names, name, classes)
    return Shards(name, shards, names, np.stack([numbers, starts, sizes], 1).astype(np.int64), found, labels)


def _index(shard: Shard) -> _Index:
    cached = cache_root() / "shards" / "index" / f"{digest([_FORMAT, shard.address, shard.state])}.json"
    try:
        return _Index(**json.loads(cached.read_text("utf-8")))
    except (OSError, ValueError, TypeError):  # none there, or damaged
        pass
    with open_shard(shard) as file:
        index = _read_index(file, shard.address)
    write_whole(cached, json.dumps(asdict(index)))
    return index


def _read_index(file: BinaryIO, name: str) -> _Index:
    """Raises: PatchloomError."""
    samples: dict[str, list[tarfile.TarInfo]] = {}
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isfile() and not _base(member).startswith("."):
                    samples.setdefault(member.name.removesuffix(_suffix(member)), []).append(member)
            end = tar.offset
    except Exception as error:  # tarfile's own, and whatever wrong numbers in a header lead to
        file.seek(0)
        if file.read(8).startswith(_COMPRESSED):
            raise PatchloomError(
                f"{name} is compressed, so that no sample can be read alone: unpack it, or give the command that does, "
                "such as 'pipe:gzip -dc {000..012}.tar.gz'"
            ) from error
        raise PatchloomError(f"{name} is no tar file, or is damaged ({in_words(error)}): make it again") from error
    file.seek(end)
    rest = file.read(tarfile.RECORDSIZE)
    if not rest or rest.strip(b"\0"):  # tarfile ends in silence wherever it finds no header
        raise PatchloomError(f"{name} is cut off or damaged after byte {end:,}: make it again")
    index = _Index([], [], [], [], file.seek(0, os.SEEK_END))
    for members in samples.values():
        image = _image(members, name)
        if image is not None:
            index.names.append(image.name)
            index.starts.append(image.offset_data)
            index.sizes.append(image.size)
            index.labels.append(_label(file, members))
    return index


def _base(member: tarfile.TarInfo) -> str:
    return member.name.rpartition("/")[2]


def _suffix(member: tarfile.TarInfo) -> str:
    """Of a member, from the first dot on: what comes before it, all members of a sample share."""
    return member.name[len(member.name) - len(_base(member).partition(".")[2]) - 1 :] if "." in _base(member) else ""


def _image(members: list[tarfile.TarInfo], shard: str) -> tarfile.TarInfo | None:
    """The image of a sample: NAME.jpg and the like if there is one, else NAME.npy, else NAME.WORD.jpg and the like."""
    suffixes = [_suffix(member).lower() for member in members]
    kinds: list[list[tarfile.TarInfo]] = [[], [], []]
    for member, suffix in zip(members, suffixes, strict=True):
        if suffix in IMAGE_SUFFIXES:
            kinds[suffix == ".npy"].append(member)
        elif os.path.splitext(suffix[1:])[1] in IMAGE_SUFFIXES:
            kinds[2].append(member)
    found = next(filter(None, kinds), [])
    if len(found) > 1:
        raise PatchloomError(
            f"{shard} has several images in one sample ({found[0].name}, {found[1].name}): leave one, since names that "
            "are alike up to their first dot make one sample"
        )
    return found[0] if found else None


def _label(file: BinaryIO, members: list[tarfile.TarInfo]) -> str | None:
    """The text of NAME.cls; a number loses its leading zeros."""
    for member in members:
        if _suffix(member).lower() == ".cls":
            file.seek(member.offset_data)
            text = file.read(member.size).decode("utf-8", "replace").strip()
            return str(int(text)) if text.isdecimal() else text or None
    return None


def _labelled(
    texts: list[str | None], names: list[str], name: str, classes: tuple[str, ...] | None
) -> tuple[tuple[str, ...], np.ndarray | None]:
    """Classes, in order, and labels; with `classes`, these."""
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
