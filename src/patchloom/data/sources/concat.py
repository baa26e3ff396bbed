"""Concatenation of several sources: folders, lists, names and shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np

from patchloom.audio.config import Sound
from patchloom.data.notes import limit_examples
from patchloom.data.source import Data, Source, View, digest, in_classes
from patchloom.errors import PatchloomError


class ConcatSource(View):
    """Several sources, concatenated. Classes of the same name are one class.

    Args:
        name: name as the user typed it.
        sources: sources to concatenate.
        classes: names of the classes, including those of all sources; () without labels.
    """

    def __init__(self, name: str, sources: Sequence[Source], classes: tuple[str, ...] = ()) -> None:
        self.name, self.sources, self.classes = name, tuple(sources), classes
        self.ends = np.cumsum([len(source) for source in sources])
        if classes and any(source.labels is not None for source in sources):
            self.labels = np.full(len(self), -1, np.int64)
            for source, end in zip(sources, self.ends, strict=True):
                if source.labels is not None:
                    self.labels[end - len(source) : end] = in_classes(source, classes).labels
        self.no_labels = next((source.no_labels for source in sources if source.no_labels), "")
        self.to_label = sources[0].to_label if sources else self.to_label
        self.sound = sources[0].sound if sources else None
        if any(source.groups is not None for source in sources):
            each = []  # different in each; an image of a source without groups is a group
            for source, end in zip(sources, self.ends.tolist(), strict=True):
                own = source.groups
                numbers = np.arange(len(source)) if own is None else np.unique(own, return_inverse=True)[1]
                each.append(numbers.astype(np.int64) + end - len(source))
            self.groups = np.concatenate(each)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def _at(self, i: int) -> tuple[Source, int]:
        part = int(np.searchsorted(self.ends, i, side="right"))
        return self.sources[part], int(i - (self.ends[part - 1] if part else 0))

    def _in_each(self, chosen: np.ndarray | None) -> list[tuple[Source, np.ndarray | None, np.ndarray]]:
        """Return (source, its images among ``chosen``, their places in ``chosen``) for each source; None means all."""
        starts = [0, *self.ends[:-1].tolist()]
        if chosen is None:
            return [(one, None, np.arange(a, a + len(one))) for one, a in zip(self.sources, starts, strict=True)]
        part = np.searchsorted(self.ends, chosen, side="right")
        places = [np.flatnonzero(part == number) for number in range(len(self.sources))]
        return [(one, chosen[at] - a, at) for one, a, at in zip(self.sources, starts, places, strict=True)]

    def _heard_as(self, sound: Sound) -> Source:
        heard = copy(self)  # keeps groups that were assigned later
        heard.sources, heard.sound = tuple(source.heard_as(sound) for source in self.sources), sound
        return heard

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray | None:
        parts = [(source.contents(some), places) for source, some, places in self._in_each(chosen)]
        found = [contents for contents, _ in parts if contents is not None]
        if len(found) < len(parts):  # copies would only be found among some of the images
            return None
        contents = np.concatenate(found)
        ordered = np.empty_like(contents)
        ordered[np.concatenate([places for _, places in parts])] = contents
        return ordered

    def order(self, rng: np.random.Generator, chosen: np.ndarray | None = None) -> np.ndarray:
        """Draw the sources' own orders, mixed at random: uniform if theirs are."""
        parts = [places[source.order(rng, some)] for source, some, places in self._in_each(chosen)]
        turn = rng.permutation(np.repeat(np.arange(len(parts)), [len(part) for part in parts]))
        mixed = np.empty(len(turn), np.int64)
        for number, part in enumerate(parts):
            mixed[turn == number] = part
        return mixed

    def column(self, name: str) -> Sequence[str] | None:
        each = [source.column(name) for source in self.sources]
        found = [values for values in each if values is not None]
        return None if len(found) < len(each) else [value for values in found for value in values]

    def column_names(self) -> Sequence[str]:
        first, *others = (source.column_names() for source in self.sources)
        return [name for name in first if all(name in names for names in others)]

    def fingerprint(self) -> str:
        return digest(["several", *self.classes, *(source.fingerprint() for source in self.sources)])

    def stamp(self) -> str | None:
        stamps = [source.stamp() for source in self.sources]
        known = [stamp for stamp in stamps if stamp is not None]
        return None if len(known) < len(stamps) else digest(["several", *known])


def concat_data(parts: Sequence[Data], name: str) -> Data:
    """Combine several opened sources into one, called ``name``.

    A file that several sources give is taken once, and is not trained on if it is in a test or another split of one.
    """
    if len(parts) == 1:
        return parts[0]
    kinds = {part.train.noun: part.train.name for part in parts}
    if len(kinds) > 1:
        raise PatchloomError(
            f"{kinds['recordings']} holds recordings and {kinds['images']} holds images: an encoder learns from one "
            "kind: give only images, or only recordings"
        )
    parts, repeated = _each_file_once(parts, name)
    training = [part.train for part in parts if len(part.train)]
    classes = tuple(dict.fromkeys(word for source in training for word in source.classes))
    notes = [*(note for part in parts for note in part.notes), *repeated]
    with_labels = [source for source in training if source.labels is not None]
    if with_labels and len(with_labels) < len(training):
        without = [source.name for source in training if source.labels is None]
        notes.append(f"{_joined(without)}: images without labels, combined with others that have some")
    tests = [part.test for part in parts if part.test is not None]
    without = [part.train.name for part in parts if part.test is None and len(part.train)]
    if tests and without:
        notes.append(
            f"{_joined(without)}: no test images; those of {_joined([test.name for test in tests])} are the test"
        )
    test = ConcatSource(name, tests, classes) if tests else None
    others: dict[str, list[Source]] = {}
    for split, source in (each for part in parts for each in part.others.items()):
        others.setdefault(split, []).append(source)
    rest = {split: ConcatSource(name, sources, classes) for split, sources in others.items()}
    return Data(ConcatSource(name, training, classes), test, tuple(notes), rest)


def _each_file_once(parts: Sequence[Data], name: str) -> tuple[list[Data], list[str]]:
    """Keep each file in one split of one source, and return notes on what was left out.

    Tests come before other splits, and these before training images. Of training images, those with a label stay.
    """
    taken: dict[tuple[int, int], str] = {}  # name of the source that has a file, outside of its training images
    again = 0

    def once(source: Source, files: Sequence[tuple[int, int] | None]) -> Source:
        nonlocal again
        kept = [i for i, file in enumerate(files) if file not in taken]
        taken.update((file, source.name) for i in kept if (file := files[i]) is not None)
        again += len(source) - len(kept)
        return source if len(kept) == len(source) else source.subset(kept)

    tests = [None if part.test is None else once(part.test, _file_ids(part.test)) for part in parts]
    others = [{split: once(source, _file_ids(source)) for split, source in part.others.items()} for part in parts]
    reserved, notes = dict(taken), list[str]()
    training = [part.train for part in parts]
    for number in sorted(range(len(parts)), key=lambda number: training[number].labels is None):
        source, files = training[number], _file_ids(training[number])
        owners = [None if file is None else reserved.get(file) for file in files]
        tested = [i for i, owner in enumerate(owners) if owner is not None]
        if tested:
            names = limit_examples(map(source.describe, tested))
            of = _joined([str(owners[i]) for i in tested])
            notes.append(
                f"{len(tested):,} of {len(source):,} {source.noun} of {source.name} are not trained on, as they are in "
                f"the test or another split of {of} ({names})"
            )
            rest = [i for i, owner in enumerate(owners) if owner is None]
            source, files = source.subset(rest), [files[i] for i in rest]
        training[number] = once(source, files)
    if again:
        notes.append(f"{again:,} {training[0].noun} are given by several of the sources: each is taken once")
    if not any(map(len, training)):
        raise PatchloomError(f"{name} leaves no {training[0].noun} to train on: all are in a test")
    made = zip(parts, training, tests, others, strict=True)
    return [replace(part, train=train, test=test, others=more) for part, train, test, more in made], notes


def _file_ids(source: Source) -> list[tuple[int, int] | None]:
    """Return device and inode of each image's file, which links share; None for an image that is no file of its own."""
    ids = list[tuple[int, int] | None]()
    for i in range(len(source)):
        try:
            found = os.stat(source.describe(i))
            ids.append((found.st_dev, found.st_ino))
        except (OSError, ValueError):  # not a path
            ids.append(None)
    return ids


def join_names(names: Sequence[str | Path]) -> str:
    """Return a common name for several sources."""
    return ",".join(map(str, names)) if len(names) <= 3 else f"{os.fspath(names[0])} and {len(names) - 1:,} more"


def split_commas(name: str) -> list[str]:
    """Split a text at commas outside of braces: ``a,b-{0,1}`` has two parts."""
    parts, depth = [""], 0
    for letter in name:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in map(str.strip, parts) if part]


def _joined(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def refuse_twice(names: Sequence[str | Path]) -> None:
    """Refuse names of the same folder or file, and those within another one."""
    there: dict[str, str] = {}
    for name in map(str, names):
        with suppress(ValueError):  # no path can have such a name, as opening it will say
            real = os.path.realpath(os.path.expanduser(name))
            if real in there:
                raise PatchloomError(f"{name} and {there[real]} are the same: give it once")
            if os.path.exists(real):
                there[real] = name
    for real, name in there.items():
        outer = next((there[str(one)] for one in Path(real).parents if str(one) in there), None)
        if outer is not None:
            raise PatchloomError(f"{name} lies within {outer}, so its images would count twice: leave it out")
