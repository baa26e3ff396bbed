"""Keyword spotting: classification of recordings as one of some words, silence, or any other word.

The task is that of Warden, "Speech Commands: A Dataset for Limited-Vocabulary Speech Recognition" (2018), section 7:
ten words, silence made from recorded noise, and unknown words; each of the latter two is as frequent as an average
word.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from patchloom.audio.config import Sound
from patchloom.data.duplicates import DRAWN_KIND, contents_of
from patchloom.data.source import Source, digest, in_classes
from patchloom.data.sources.concat import ConcatSource
from patchloom.data.sources.files import Files
from patchloom.data.sources.folder import open_folder
from patchloom.data.sources.in_memory import DataLike
from patchloom.data.sources.names import VALIDATION, split_of
from patchloom.data.sources.open import open_data
from patchloom.data.sources.speech_commands import (
    NOISE_FOLDER,
    SpeechCommands,
    is_speech_commands,
    read_speech_commands,
)
from patchloom.data.splits import hold_out, pick, split_for_test
from patchloom.errors import PatchloomError, closest_word

TEN = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
SILENCE_CLASS, UNKNOWN_CLASS = "silence", "unknown"

_FIXED = 0  # random seed of draws for validation and test
# stretch of each recording of noise for each part, so that no silence of the test occurs in training
_STRETCHES = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}
_FOR = {"train": "training", "validation": "validation", "test": "the test"}
_SHARE = 0.1  # share for validation, if the data has no validation part


@dataclass(frozen=True)
class KeywordParts:
    """Recordings for keyword spotting. The three parts have the same classes.

    Attributes:
        train, validation, test: recordings with labels.
        noise: noise to be mixed with training recordings, without the stretches used by the other parts; None if there
            is none.
        notes: a line on each kind of file that was left out, or read in an unexpected way.
    """

    train: Source
    validation: Source
    test: Source
    noise: Source | None
    notes: tuple[str, ...] = ()

    def heard_as(self, sound: Sound) -> KeywordParts:
        """Return the same recordings with another `Sound`, see `Source.heard_as`."""
        train, validation, test = (one.heard_as(sound) for one in (self.train, self.validation, self.test))
        noise = None if self.noise is None else self.noise.heard_as(sound)
        return replace(self, train=train, validation=validation, test=test, noise=noise)

    def with_noise(self) -> KeywordParts:
        """Return the same parts; training crops then add excerpts of the noise to training recordings."""
        if self.noise is None:
            return self
        train = copy(self.train)
        train.noise = tuple(map(self.noise.read, range(len(self.noise))))
        return replace(self, train=train)


class Noise(Source):
    """Recordings of noise: a stretch of each, or excerpts of these at random volume, which serve as silence.

    Args:
        source: source of a few recordings, which are kept in memory.
        stretch: beginning and end of the stretch of each, as shares of its length.
        count: number of excerpts, each of `Sound.samples`; None for the whole stretches.
        seed: random seed of the excerpts.
    """

    def __init__(self, source: Source, stretch: tuple[float, float], count: int | None = None, seed: int = 0) -> None:
        self.source, self.stretch, self.count, self.seed = source, stretch, count, seed
        self.name, self.sound = source.name, source.sound
        self._waves: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.source) if self.count is None else self.count

    def read(self, i: int) -> Tensor:
        if self.count is None:
            return self._stretch(i)
        assert self.sound is not None
        rng = np.random.default_rng((self.seed, round(1000 * self.stretch[0]), i))  # each part draws its own
        wave = self._stretch(int(rng.integers(len(self.source))))
        begin = int(rng.integers(max(1, wave.shape[-1] - self.sound.samples + 1)))
        excerpt = wave[..., begin : begin + self.sound.samples]
        return (excerpt * rng.random()).round().to(torch.int16)

    def _stretch(self, i: int) -> Tensor:
        if i not in self._waves:
            self._waves[i] = self.source.read(i)
        wave = self._waves[i]
        begin, end = (round(share * wave.shape[-1]) for share in self.stretch)
        return wave[..., begin:end]

    def _heard_as(self, sound: Sound) -> Source:
        heard = copy(self)  # keeps classes and labels that were assigned later
        heard.source, heard.sound, heard._waves = self.source.heard_as(sound), sound, {}
        return heard

    def contents(self, chosen: np.ndarray | None = None) -> np.ndarray:
        which = range(len(self)) if chosen is None else chosen.tolist()
        return contents_of(DRAWN_KIND, ([f"{self.fingerprint()} {i}".encode()] for i in which))

    def describe(self, i: int) -> str:
        return self.source.describe(i) if self.count is None else f"{self.name} {SILENCE_CLASS} #{i}"

    def fingerprint(self) -> str:
        return self._digest(self.source.fingerprint())

    def stamp(self) -> str | None:
        stamp = self.source.stamp()
        seconds = "" if self.sound is None else str(self.sound.seconds)
        return None if stamp is None else self._digest(f"{stamp} {seconds}")

    def _digest(self, recordings: str) -> str:
        return digest(["noise", recordings, *map(str, (*self.stretch, self.count, self.seed))])


def open_keywords(data: DataLike, words: Sequence[str] | None = None, seed: int = 0) -> KeywordParts:
    """Open recordings of words for keyword spotting.

    For a folder in Speech Commands' layout, the classes are the words, ``silence`` and ``unknown``. In each part, the
    latter two have as many recordings as an average word. Other data with labels keeps its classes; a missing
    validation or test part is drawn from its training recordings.
    """
    if isinstance(data, str | Path) and is_speech_commands(folder := Path(data).expanduser()):
        return _of_words(read_speech_commands(folder, os.fspath(data)), words, seed)
    return _of_classes(data, words)


def _of_words(found: SpeechCommands, words: Sequence[str] | None, seed: int) -> KeywordParts:
    train, notes = found.train, [*found.notes]
    chosen = _chosen(words, train.classes, train.name)
    rest = tuple(word for word in train.classes if word not in chosen)
    classes = (*chosen, *[SILENCE_CLASS] * (found.noise is not None), *[UNKNOWN_CLASS] * bool(rest))
    if found.noise is None:
        notes.append(
            f"{train.name} has no folder {NOISE_FOLDER}, so {SILENCE_CLASS} is not a class, and no noise is mixed in"
        )
    if not rest:
        notes.append(f"{train.name} has no other words, so {UNKNOWN_CLASS} is not a class")
    test, validation = (part if len(part) else None for part in (found.test, found.validation))
    parts: dict[str, Source] = {}
    for name, source in zip(_STRETCHES, _completed(train, validation, test, notes), strict=True):
        drawn = seed if name == "train" else _FIXED
        known = _spoken(source, chosen, name)
        average = round(len(known) / len(chosen))
        pieces = [_labelled(known, classes, _labels(known))]
        if found.noise is not None:
            silence = Noise(found.noise, _STRETCHES[name], average, drawn)
            pieces.append(_labelled(silence, classes, np.full(average, classes.index(SILENCE_CLASS))))
        if rest:
            others = _only(source, rest)
            unknown = others.subset(pick(_labels(others), average, drawn))
            pieces.append(_labelled(unknown, classes, np.full(len(unknown), classes.index(UNKNOWN_CLASS))))
        parts[name] = ConcatSource(source.name, pieces, classes)
    noise = None if found.noise is None else Noise(found.noise, _STRETCHES["train"])
    return KeywordParts(parts["train"], parts["validation"], parts["test"], noise, tuple(notes))


def _chosen(words: Sequence[str] | None, there: Sequence[str], name: str) -> tuple[str, ...]:
    """Return the words that are classes."""
    chosen = tuple(TEN if words is None else words)
    missing = [word for word in chosen if word not in there]
    if missing and words is None:
        raise PatchloomError(
            f"{name} lacks {', '.join(missing)} of the default ten words: give others with --words, from "
            f"{', '.join(there)}"
        )
    if missing:
        near = closest_word(missing[0], there)
        mean = f"did you mean {near}?" if near else f"choose from {', '.join(there)}"
        raise PatchloomError(f"{name} has no folder for the word {missing[0]}: {mean}")
    if len({*chosen}) < max(2, len(chosen)):
        raise PatchloomError(
            f"--words {','.join(chosen)} has fewer than two different words or repeats one: give each once"
        )
    return chosen


def _labelled(source: Source, classes: tuple[str, ...], labels: np.ndarray) -> Source:
    labelled = copy(source)
    labelled.classes, labelled.labels = classes, labels.astype(np.int64)
    return labelled


def _of_classes(data: DataLike, words: Sequence[str] | None) -> KeywordParts:
    opened = open_data(data)
    train, test, notes = opened.train, opened.test, [*opened.notes]
    if train.sound is None:
        raise PatchloomError(f"{train.name} holds images: give recordings, in one folder per word")
    if train.labels is None:
        why = f" ({train.no_labels})" if train.no_labels else ""
        raise PatchloomError(f"{train.name} has no labels{why}: put each word's recordings in a folder")
    known = np.flatnonzero(train.labels >= 0)
    if 0 < len(known) < len(train):  # before a test or validation part is drawn from them
        notes.append(f"{len(train) - len(known):,} training recordings without a label are left out")
        train = train.subset(known)
    validation = None
    if isinstance(test, Files) and isinstance(data, str | Path):
        # a sub-folder for validation may stand beside that of the test
        folder, taken = Path(data).expanduser(), {test.root, *test.root.parents}
        children = sorted(child for child in folder.iterdir() if child not in taken) if folder.is_dir() else []
        for child in children:
            if split_of(child.name) == VALIDATION and child.is_dir():
                validation = in_classes(open_folder(child, train.name).train, train.classes, child.name)
                # the note on splits says that it is left out
                notes = [note for note in notes if not note.startswith("Of ")]
                break
    if test is not None and test.labels is None:
        raise PatchloomError(f"the test recordings of {train.name} have no labels: put each word's in a folder there")
    train, validation, test = _completed(train, validation, test, notes)
    if words is not None:
        chosen = _chosen(words, train.classes, train.name)
        parts = zip(_STRETCHES, (train, validation, test), strict=True)
        train, validation, test = (_spoken(source, chosen, name) for name, source in parts)
        notes.append(f"{train.name}: recordings of other words than {', '.join(chosen)} are left out")
    return KeywordParts(train, validation, test, None, tuple(notes))


def _completed(train: Source, validation: Source | None, test: Source | None, notes: list[str]) -> list[Source]:
    """Return the three parts; missing ones are drawn from ``train``, with a line in ``notes``."""
    if test is None:
        train, test = split_for_test(train)
        notes.append(f"{train.name} has no test: {len(test):,} recordings are drawn for it")
    if validation is None:
        train, validation = hold_out(train, _SHARE)
        notes.append(f"{train.name} has no validation: {len(validation):,} training recordings are drawn for it")
    return [train, validation, test]


def _labels(source: Source) -> np.ndarray:
    assert source.labels is not None  # their words are labels
    return source.labels


def _spoken(source: Source, words: tuple[str, ...], part: str) -> Source:
    """Return a part's recordings of some words, which become the classes, and refuse a part that lacks them."""
    found = _only(source, words)
    missing = [word for i, word in enumerate(words) if i not in _labels(found)]
    if len(missing) == len(words) or part == "train" and missing:
        raise PatchloomError(
            f"{source.name} has no recordings of {', '.join(missing)} for {_FOR[part]}: move some from another part, "
            "or give other --words"
        )
    return found


def _only(source: Source, words: tuple[str, ...]) -> Source:
    """Return the recordings of some words, which become the classes."""
    number = [words.index(word) if word in words else -1 for word in source.classes]
    labels = np.array([*number, -1])[_labels(source)]
    return _labelled(source.subset(np.flatnonzero(labels >= 0)), words, labels[labels >= 0])
