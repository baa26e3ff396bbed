"""Keyword spotting's three parts: ten words, silence, unknown; and plain folders of classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from patchloom.audio.config import Sound
from patchloom.audio.decode import read_recording
from patchloom.audio.keywords import SILENCE_CLASS, TEN, UNKNOWN_CLASS, KeywordParts, open_keywords
from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError

pytest.importorskip("soundfile")

WORDS = ("yes", "no", "up")


@pytest.fixture
def commands(tmp_path, record):
    """Speech Commands' layout: five words; of each 6 are for training, 2 for validation, 2 for the test."""
    lists: dict[str, list[str]] = {"validation_list.txt": [], "testing_list.txt": []}
    for word in ("yes", "no", "up", "bed", "cat"):
        for i in range(10):
            record(f"{word}/{i}.wav")
        lists["validation_list.txt"] += [f"{word}/{i}.wav" for i in (6, 7)]
        lists["testing_list.txt"] += [f"{word}/{i}.wav" for i in (8, 9)]
    for name, paths in lists.items():
        (tmp_path / name).write_text("\n".join(paths) + "\n")
    record("_background_noise_/rain.wav", seconds=15)
    return tmp_path


def named(source) -> list[str]:
    return [source.describe(i) for i in range(len(source))]


def waves(source) -> list[bytes]:
    return [source.read(i).numpy().tobytes() for i in range(len(source))]


def counts(parts: KeywordParts) -> list[list[int]]:
    return [
        np.bincount(one.labels, minlength=len(one.classes)).tolist()
        for one in (parts.train, parts.validation, parts.test)
    ]


def test_the_layout_opens_like_other_data(commands):
    data = open_data(commands)
    assert data.train.classes == ("bed", "cat", "no", "up", "yes") == data.test.classes
    assert (len(data.train), len(data.test)) == (30, 10)
    assert {Path(path).name for path in named(data.test)} == {"8.wav", "9.wav"}
    assert len(data.others["val"]) == 10 and not set(named(data.others["val"])) & set(named(data.train))
    assert data.notes == (
        "Of 50 recordings, what no list names (30) is trained on, what testing_list.txt names (10) is the test, and "
        "validation_list.txt (10) is neither: choose between runs by it, or empty it to train on it",
        "_background_noise_ (1) is left out: it is not a word",
    )


def test_without_lists_the_noise_is_still_no_class(commands):
    for name in ("validation_list.txt", "testing_list.txt"):
        (commands / name).unlink()
    data = open_data(commands)
    assert len(data.train) == 50 and data.test is None and "_background_noise_" not in data.train.classes
    parts = open_keywords(commands, WORDS)
    assert [sum(each) for each in counts(parts)] == [5 * 7, 5 * 1, 5 * 2]
    assert [note.rpartition(": ")[2] for note in parts.notes] == [
        "10 recordings are drawn for it",
        "4 training recordings are drawn for it",
    ]


def test_the_classes_and_their_numbers(commands):
    parts = open_keywords(commands, WORDS)
    assert (
        parts.train.classes == (*WORDS, SILENCE_CLASS, UNKNOWN_CLASS) == parts.validation.classes == parts.test.classes
    )
    assert counts(parts) == [[6] * 5, [2] * 5, [2] * 5] and parts.notes == ()
    for label, word in enumerate(WORDS):
        assert {Path(parts.train.describe(i)).parent.name for i in np.flatnonzero(parts.train.labels == label)} == {
            word
        }
    unknown = [parts.train.describe(i) for i in np.flatnonzero(parts.train.labels == 4)]
    assert {Path(path).parent.name for path in unknown} == {"bed", "cat"} and len({*unknown}) == 6
    assert not {*named(parts.train)[:18]} & {*named(parts.test), *named(parts.validation)}


def test_silence_is_noise_at_random_volume_and_never_that_of_the_training(commands):
    parts = open_keywords(commands, WORDS)
    noise = read_recording(commands / "_background_noise_" / "rain.wav", 16_000).flatten().float()
    spans = {
        "train": (0, 12 * 16_000),
        "validation": (12 * 16_000, 13.5 * 16_000),
        "test": (13.5 * 16_000, 15 * 16_000),
    }
    volumes = []
    for name, (low, high) in spans.items():
        part = getattr(parts, name)
        for i in np.flatnonzero(part.labels == 3):
            wave = part.read(i).flatten().float()
            assert wave.shape == (16_000,)
            found = torch.nn.functional.conv1d(noise[None, None], wave[None, None, :400]).argmax().item()
            volume = (wave.norm() / noise[found : found + 16_000].norm()).item()
            assert (wave - volume * noise[found : found + 16_000]).abs().max() < 60
            assert low <= found and found + 16_000 <= high
            volumes.append(volume)
    assert min(volumes) < 0.3 < 0.7 < max(volumes) and len({*volumes}) == len(volumes)
    assert parts.noise.read(0).flatten().tolist() == noise[: 12 * 16_000].tolist()


def test_the_seed_draws_the_training_part_alone(commands):
    one, again, other = (open_keywords(commands, WORDS, seed) for seed in (0, 0, 1))
    assert waves(one.train) == waves(again.train) and one.train.fingerprint() == again.train.fingerprint()
    assert waves(one.train) != waves(other.train) and one.train.fingerprint() != other.train.fingerprint()
    assert waves(one.train)[:18] == waves(other.train)[:18]
    for part in ("validation", "test"):
        assert waves(getattr(one, part)) == waves(getattr(other, part))
    assert len({*one.train.contents().tolist()}) == len(one.train)


def test_other_sound_settings(commands):
    half = replace(Sound(), rate=8_000, seconds=0.5)
    parts = open_keywords(commands, WORDS).heard_as(half)
    assert counts(parts) == [[6] * 5, [2] * 5, [2] * 5]
    lengths = {parts.train.read(i).shape[-1] for i in np.flatnonzero(parts.train.labels == 3)}
    assert lengths == {4_000} and parts.noise.read(0).shape[-1] == 12 * 8_000 and parts.test.read(0).shape[-1] == 800


def refused(words: str, folder, *asked) -> None:
    with pytest.raises(PatchloomError, match=words):
        open_keywords(folder, *asked)


def test_missing_words(commands):
    refused(
        "lacks down, left, right, on, off, stop, go of .* ten words: give others with --words, from bed, ", commands
    )
    refused("word yess: did you mean yes?", commands, ["yess", "no"])
    refused("--words yes,yes has fewer than two different words or repeats one", commands, ["yes", "yes"])
    refused("--words yes has fewer than two", commands, ["yes"])


def test_ten_words_by_default(tmp_path, record):
    for word in TEN:
        for i in range(8):
            record(f"{word}/{i}.wav", seconds=0.02)
    for name, i in (("validation_list.txt", 0), ("testing_list.txt", 1)):
        (tmp_path / name).write_text("".join(f"{word}/{i}.wav\n" for word in TEN))
    parts = open_keywords(tmp_path)
    assert parts.train.classes == TEN and counts(parts) == [[6] * 10, [1] * 10, [1] * 10] and parts.noise is None
    without_noise, without_others = parts.notes
    assert "has no folder _background_noise_, so silence is not a class" in without_noise
    assert "has no other words, so unknown is not a class" in without_others


def test_lists_with_missing_files(commands):
    place = commands / "testing_list.txt"
    place.write_text(place.read_text() + "yes/gone.wav\n")
    assert open_keywords(commands, WORDS).notes == (
        "1 of 11 recordings that testing_list.txt names do not exist (yes/gone.wav)",
    )
    place.write_text("yes/6.wav\n")
    refused("validation_list.txt and testing_list.txt both name yes/6.wav", commands, WORDS)
    place.write_text("YES/gone.wav\n")
    refused("none of the 1 recordings that testing_list.txt names exists, beginning with YES/gone.wav", commands, WORDS)
    place.write_text("")
    refused("testing_list.txt names no recordings: write one path per line", commands, WORDS)


@pytest.mark.parametrize("splits", [("train", "val", "test"), ("train", "test"), ()])
def test_a_plain_folder_of_classes(tmp_path, record, splits):
    for split in splits or ("",):
        for word in ("a", "b", "c"):
            for i in range(10 if split in ("", "train") else 4):
                record(f"{split}/{word}/{i}.wav".lstrip("/"), seconds=0.02)
    parts = open_keywords(tmp_path)
    assert parts.train.classes == ("a", "b", "c") == parts.validation.classes == parts.test.classes
    wanted = {3: [[10] * 3, [4] * 3, [4] * 3], 2: [[9] * 3, [1] * 3, [4] * 3], 0: None}[len(splits)]
    assert wanted is None or counts(parts) == wanted
    lacking = {"test": "test", "val": "validation"}
    drawn = [f"has no {part}" for split, part in lacking.items() if split not in splits]
    assert len(parts.notes) == len(drawn) and all(map(str.__contains__, parts.notes, drawn))
    assert sum(map(sum, counts(parts))) == {3: 54, 2: 42, 0: 30}[len(splits)]
    everything = [named(part) for part in (parts.train, parts.validation, parts.test)]
    assert len({*sum(everything, [])}) == len(sum(everything, []))
    only = open_keywords(tmp_path, ["c", "a"])
    assert only.train.classes == ("c", "a") and {Path(p).parent.name for p in named(only.test)} == {"a", "c"}


def test_data_without_words(tmp_path, record, draw):
    record("sounds/a.wav"), record("sounds/b.wav"), draw("images/a.png"), draw("images/b.png")
    refused("has no labels", tmp_path / "sounds")
    refused("holds images", tmp_path / "images")


@pytest.mark.parametrize(("file", "part"), [("validation_list.txt", "validation"), ("testing_list.txt", "the test")])
def test_a_part_without_any_of_the_words_is_refused(commands, file, part):
    listed = (commands / file).read_text().splitlines()
    (commands / file).write_text("\n".join(path for path in listed if path.startswith("cat/")))
    with pytest.raises(PatchloomError, match=f"has no recordings of yes, no, up for {part}: move some"):
        open_keywords(commands, WORDS)


def test_a_word_that_the_training_lacks_is_refused(commands):
    with (commands / "validation_list.txt").open("a") as listed:
        listed.writelines(f"no/{i}.wav\n" for i in range(6))
    with pytest.raises(PatchloomError, match="has no recordings of no for training: move some"):
        open_keywords(commands, WORDS)


def test_flat_folders_have_no_labels(tmp_path, record):
    for i in range(4):
        record(f"{i}.wav")
    with pytest.raises(PatchloomError, match="has no labels: put each word's recordings in a folder"):
        open_keywords(tmp_path)
