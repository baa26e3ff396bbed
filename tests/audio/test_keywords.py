"""Keyword spotting's three parts: ten words, silence, unknown; and plain folders of classes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from refusing import refusal

from patchloom.audio.config import Sound
from patchloom.audio.decode import read_recording
from patchloom.audio.keywords import TEN, KeywordParts, open_keywords
from patchloom.data.sources.open import open_data

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


def words_of(source, label: int) -> set[str]:
    return {Path(source.describe(i)).parent.name for i in np.flatnonzero(source.labels == label)}


def waves(source) -> list[bytes]:
    return [source.read(i).numpy().tobytes() for i in range(len(source))]


def counts(parts: KeywordParts) -> list[list[int]]:
    each = (parts.train, parts.validation, parts.test)
    return [np.bincount(one.labels, minlength=len(one.classes)).tolist() for one in each]


def test_the_layout_opens_like_other_data(commands):
    data = open_data(commands)
    assert data.train.classes == ("bed", "cat", "no", "up", "yes") == data.test.classes
    assert (len(data.train), len(data.test), len(data.others["val"])) == (30, 10, 10)
    assert {Path(path).name for path in named(data.test)} == {"8.wav", "9.wav"}
    assert not set(named(data.others["val"])) & set(named(data.train))
    assert "Of 50 recordings" in data.notes[0] and "_background_noise_ (1) is left out" in data.notes[1]
    for name in ("validation_list.txt", "testing_list.txt"):
        (commands / name).unlink()
    data = open_data(commands)
    assert len(data.train) == 50 and data.test is None and "_background_noise_" not in data.train.classes
    parts = open_keywords(commands, WORDS)
    assert [sum(each) for each in counts(parts)] == [5 * 7, 5 * 1, 5 * 2]
    assert [note.rpartition(": ")[2].split()[0] for note in parts.notes] == [
        "10",
        "4",
    ]  # are drawn for test, validation


def test_the_classes_and_their_numbers(commands):
    parts = open_keywords(commands, WORDS)
    for part in (parts.train, parts.validation, parts.test):
        assert part.classes == (*WORDS, "silence", "unknown")
    assert counts(parts) == [[6] * 5, [2] * 5, [2] * 5] and parts.notes == ()
    assert [words_of(parts.train, label) for label in (0, 1, 2, 4)] == [*({word} for word in WORDS), {"bed", "cat"}]
    assert len({*named(parts.train)}) == 30 and not {*named(parts.train)[:18]} & {
        *named(parts.test),
        *named(parts.validation),
    }


def test_silence_is_noise_at_random_volume_and_never_that_of_the_training(commands):
    parts = open_keywords(commands, WORDS)
    noise = read_recording(commands / "_background_noise_" / "rain.wav", 16_000).flatten().float()
    spans = {"train": (0, 12 * 16_000), "validation": (12 * 16_000, 216_000), "test": (216_000, 15 * 16_000)}
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
    half = parts.heard_as(replace(Sound(), rate=8_000, seconds=0.5))
    assert counts(half) == counts(parts)
    assert {half.train.read(i).shape[-1] for i in np.flatnonzero(half.train.labels == 3)} == {4_000}
    assert half.noise.read(0).shape[-1] == 12 * 8_000 and half.test.read(0).shape[-1] == 800


def test_the_seed_draws_the_training_part_alone(commands):
    one, again, other = (open_keywords(commands, WORDS, seed) for seed in (0, 0, 1))
    assert waves(one.train) == waves(again.train) and one.train.fingerprint() == again.train.fingerprint()
    assert waves(one.train) != waves(other.train) and one.train.fingerprint() != other.train.fingerprint()
    assert waves(one.train)[:18] == waves(other.train)[:18]
    for part in ("validation", "test"):
        assert waves(getattr(one, part)) == waves(getattr(other, part))
    assert len({*one.train.contents().tolist()}) == len(one.train)


def test_ten_words_by_default(tmp_path, record):
    for word in TEN:
        for i in range(8):
            record(f"{word}/{i}.wav", seconds=0.02)
    for name, i in (("validation_list.txt", 0), ("testing_list.txt", 1)):
        (tmp_path / name).write_text("".join(f"{word}/{i}.wav\n" for word in TEN))
    parts = open_keywords(tmp_path)
    assert parts.train.classes == TEN and counts(parts) == [[6] * 10, [1] * 10, [1] * 10] and parts.noise is None
    without_noise, without_others = parts.notes
    assert "silence is not a class" in without_noise and "unknown is not a class" in without_others


def test_bad_words_and_lists_are_rejected(commands):
    lacks = "lacks down, left, right, on, off, stop, go of"
    for words, said in (
        (None, lacks),
        (["yess", "no"], "did you mean yes?"),
        (["yes", "yes"], "--words yes,yes"),
        (["yes"], "fewer than two"),
    ):
        assert said in refusal(open_keywords, commands, words)
    place = commands / "testing_list.txt"
    place.write_text(place.read_text() + "yes/gone.wav\n")
    (note,) = open_keywords(commands, WORDS).notes
    assert "1 of 11 recordings" in note and "(yes/gone.wav)" in note
    for content, said in (
        ("yes/6.wav\n", "both name yes/6.wav"),
        ("YES/gone.wav\n", "none of the 1 recordings that testing_list.txt names"),
        ("", "testing_list.txt names no recordings"),
    ):
        place.write_text(content)
        assert said in refusal(open_keywords, commands, WORDS)


@pytest.mark.parametrize("splits", [("train", "val", "test"), ("train", "test"), ()])
def test_a_plain_folder_of_classes(tmp_path, record, splits):
    for split in splits or ("",):
        for word in ("a", "b", "c"):
            for i in range(10 if split in ("", "train") else 4):
                record(f"{split}/{word}/{i}.wav".lstrip("/"), seconds=0.02)
    parts = open_keywords(tmp_path)
    assert parts.train.classes == ("a", "b", "c") == parts.validation.classes == parts.test.classes
    if splits:
        assert counts(parts) == ([[10] * 3, [4] * 3, [4] * 3] if "val" in splits else [[9] * 3, [1] * 3, [4] * 3])
    lacking = {"test": "test", "val": "validation"}
    drawn = [f"has no {part}" for split, part in lacking.items() if split not in splits]
    assert len(parts.notes) == len(drawn) and all(map(str.__contains__, parts.notes, drawn))
    everything = [*named(parts.train), *named(parts.validation), *named(parts.test)]
    assert len({*everything}) == len(everything) == {3: 54, 2: 42, 0: 30}[len(splits)]
    only = open_keywords(tmp_path, ["c", "a"])
    assert only.train.classes == ("c", "a") and [words_of(only.test, label) for label in (0, 1)] == [{"c"}, {"a"}]


def test_data_without_words(tmp_path, record, draw):
    record("sounds/a.wav"), record("sounds/b.wav"), draw("images/a.png"), draw("images/b.png")
    assert "has no labels" in refusal(open_keywords, tmp_path / "sounds")
    assert "holds images" in refusal(open_keywords, tmp_path / "images")


def test_a_part_without_a_word_is_rejected(commands):
    listed = {name: (commands / name).read_text() for name in ("validation_list.txt", "testing_list.txt")}
    for name, part in (("validation_list.txt", "validation"), ("testing_list.txt", "the test")):
        (commands / name).write_text("".join(f"cat/{i}.wav\n" for i in range(10) if f"cat/{i}" in listed[name]))
        assert f"no recordings of yes, no, up for {part}" in refusal(open_keywords, commands, WORDS)
        (commands / name).write_text(listed[name])
    more = "".join(f"no/{i}.wav\n" for i in range(6))
    (commands / "validation_list.txt").write_text(listed["validation_list.txt"] + more)
    assert "no recordings of no for training" in refusal(open_keywords, commands, WORDS)
