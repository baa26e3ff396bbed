"""Speech Commands' layout: one folder per word, and two lists that name the recordings of validation and test.

Warden, "Speech Commands: A Dataset for Limited-Vocabulary Speech Recognition" (2018), section 5.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from patchloom.data.decode import EXTRAS
from patchloom.data.notes import left_out, limit_examples, note_on_splits
from patchloom.data.source import Data
from patchloom.data.sources.files import Files, PackedStrings
from patchloom.data.sources.scandir import list_files, note_on_others, select_kind
from patchloom.errors import PatchloomError, pip_install
from patchloom.system.files import LIST_FILE, read_text

VALIDATION_LIST, TEST_LIST, NOISE_FOLDER = "validation_list.txt", "testing_list.txt", "_background_noise_"


class SpeechCommands(NamedTuple):
    """Recordings of words in three parts, whose common classes are the words.

    Attributes:
        train: recordings in neither list.
        validation, test: recordings that the lists name; empty without a list.
        noise: recordings without a word; None if there are none.
        notes: a line on each kind of file that was left out.
    """

    train: Files
    validation: Files
    test: Files
    noise: Files | None
    notes: tuple[str, ...]


def is_speech_commands(folder: Path) -> bool:
    """Return whether a folder has the lists of Speech Commands, or its folder of noise."""
    if (folder / VALIDATION_LIST).is_file() and (folder / TEST_LIST).is_file():
        return True
    return (folder / NOISE_FOLDER).is_dir() and not (folder / "train").is_dir()  # with train/, noise is left out


def open_speech_commands(folder: Path, name: str) -> Data:
    """Open a folder of words like other data: validation is another split, and the noise is left out."""
    found = read_speech_commands(folder, name)
    tested = f"what {TEST_LIST} names ({len(found.test):,})" if len(found.test) else ""
    notes = [*found.notes]
    if len(found.validation):
        taken, left = f"what no list names ({len(found.train):,})", {VALIDATION_LIST: f"{len(found.validation):,}"}
        total = len(found.train) + len(found.validation) + len(found.test)
        notes.insert(0, f"Of {total:,} recordings, {note_on_splits(taken, tested, left, 'empty {}')}")
    if found.noise is not None:
        notes.append(f"{NOISE_FOLDER} ({len(found.noise):,}) is left out: it is not a word")
    others = {"val": found.validation} if len(found.validation) else {}
    return Data(found.train, found.test if len(found.test) else None, tuple(notes), others)


def read_speech_commands(folder: Path, name: str) -> SpeechCommands:
    """Read the three parts of a folder of words, and its noise."""
    listed, sound, notes = select_kind(list_files(folder), name)
    if sound is None:
        unread = [suffix for suffix in listed.others if EXTRAS.get(suffix) == "audio"]
        if unread:
            raise PatchloomError(
                f"{name} holds recordings ({', '.join(sorted(unread))}), which are read by soundfile: "
                f"{pip_install('audio')}"
            )
        raise PatchloomError(f"{name} is laid out as Speech Commands, but holds no recordings: add a folder per word")
    paths = [*listed.paths]
    noise = [path for path in paths if path.startswith(f"{NOISE_FOLDER}/")]
    outside = [path for path in paths if "/" not in path]
    spoken = [path for path in paths if "/" in path and not path.startswith(f"{NOISE_FOLDER}/")]
    notes += left_out(outside, ", outside of the words' folders", "recording")
    classes = tuple(sorted({path.partition("/")[0] for path in spoken}))
    named = {file: _listed(folder / file, name, set(spoken), notes) for file in (VALIDATION_LIST, TEST_LIST)}
    if both := named[VALIDATION_LIST] & named[TEST_LIST]:
        raise PatchloomError(f"{name}: {VALIDATION_LIST} and {TEST_LIST} both name {min(both)}: remove it from one")

    def part(kept: list[str]) -> Files:
        labels = np.array([classes.index(path.partition("/")[0]) for path in kept], np.int64)
        return Files(name, folder, PackedStrings(kept), classes, labels, sound=sound)

    train = part([path for path in spoken if not any(path in some for some in named.values())])
    if not len(train):
        raise PatchloomError(
            f"{name}: {VALIDATION_LIST} and {TEST_LIST} name all recordings, so none is left to train on"
        )
    held, tested = (part([path for path in spoken if path in named[file]]) for file in (VALIDATION_LIST, TEST_LIST))
    others = Files(name, folder, PackedStrings(noise), sound=sound) if noise else None
    return SpeechCommands(train, held, tested, others, (*notes, *note_on_others(listed)))


def _listed(file: Path, name: str, there: set[str], notes: list[str]) -> set[str]:
    """Return the recordings that a list names and that are ``there``; add a note on missing ones to ``notes``."""
    if not file.is_file():
        return set()
    lines = [
        line.strip().removeprefix("./")
        for line in read_text(file, "utf-8-sig", most=LIST_FILE, follow=True).splitlines()
    ]
    wanted = [line for line in lines if line]
    missing = [line for line in wanted if line not in there]
    if not wanted:
        raise PatchloomError(f"{name}: {file.name} names no recordings: write one path per line, as WORD/FILE.wav")
    if len(missing) == len(wanted):
        raise PatchloomError(
            f"{name}: none of the {len(wanted):,} recordings that {file.name} names exists, beginning with "
            f"{missing[0]}: give paths relative to the folder, in the same upper and lower case as the files"
        )
    if missing:
        some = limit_examples(missing)
        notes.append(f"{len(missing):,} of {len(wanted):,} recordings that {file.name} names do not exist ({some})")
    return there.intersection(wanted)
