"""Folders of recordings work like folders of images: splits, classes, lists, tables, patterns, groups."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusing import refusal, refused

from patchloom.audio.config import Sound
from patchloom.audio.keywords import open_keywords
from patchloom.data.sources import scandir
from patchloom.data.sources.open import open_data
from patchloom.data.splits import hold_out, with_groups
from patchloom.errors import PatchloomError

soundfile = pytest.importorskip("soundfile")


def test_splits(tmp_path, record):
    for split, count in {"train": 3, "val": 2, "test": 1}.items():
        for word in ("no", "yes"):
            for i in range(count):
                record(f"{split}/{word}/{i}.wav")
    data = open_data(tmp_path)
    assert (len(data.train), len(data.test), data.test.noun) == (6, 2, "recordings")
    (note,) = data.notes
    assert note.startswith("Of 12 recordings, train (6) is trained on, test (2) is the test, and val (4) is")
    assert {name: len(part) for name, part in data.others.items()} == {"val": 4}
    for i in range(4):  # recordings are never label maps
        record(f"more/images/{i}.wav"), record(f"more/masks/{i}.wav")
    assert len(open_data(tmp_path / "more").train) == 8


@pytest.mark.parametrize("form", ["folder", "list", "table", "given"])
def test_every_form(tmp_path, record, form):
    rows = [(record(f"a/{word}/{i}.{end}"), word) for word in ("no", "yes") for i, end in enumerate(("wav", "flac"))]
    (tmp_path / "l.txt").write_text("".join(f"{path}\t{word}\n" for path, word in rows))
    (tmp_path / "t.csv").write_text("file,class\n" + "".join(f"{path},{word}\n" for path, word in rows))
    forms = {"folder": tmp_path / "a", "list": tmp_path / "l.txt", "table": tmp_path / "t.csv", "given": rows}
    train = open_data(forms[form]).train
    assert train.noun == "recordings" and train.sound == Sound()
    assert train.classes == ("no", "yes") and train.labels.tolist() == [0, 0, 1, 1]
    for i, (path, _) in enumerate(rows):
        wave = train.read(i)
        assert train.describe(i) == path and wave.dtype == torch.int16 and wave.shape == (1, 1, 1600)
        assert wave.flatten().tolist() == soundfile.read(path, dtype="int16")[0].tolist()


def test_other_sound_settings(tmp_path, record):
    for word in ("no", "yes"):
        for i in range(4):
            record(f"{word}/{i}.wav")
    data = with_groups(open_data([tmp_path / "no", tmp_path / "yes"]), "^(.)")
    half = replace(Sound(), rate=8_000, seconds=0.5)
    heard = data.heard_as(half)
    assert data.train.sound == Sound() and heard.train.sound == half and heard.train.groups is data.train.groups
    part = hold_out(heard.train, 0.3)[0].subset([0, 1]).heard_as(replace(half, rate=4_000))
    assert heard.train.read(0).shape[-1] == 800 and part.read(1).shape[-1] == 400 and part.sound.rate == 4_000
    assert data.train.read(0).shape[-1] == 1600
    assert heard.train.fingerprint() == data.train.fingerprint()  # the content is the same
    assert heard.train.stamp() != data.train.stamp()  # what is read is not


def test_a_few_files_of_the_other_kind_are_left_out(tmp_path, record, draw):
    first = Path(record("0.wav", seconds=0.01))
    for i in range(1, 150):
        shutil.copy(first, tmp_path / f"{i}.wav")
    draw("cover.jpg")
    data = open_data(tmp_path)
    (note,) = data.notes
    assert len(data.train) == 150 and note.startswith("1 image was left out") and "(cover.jpg)" in note


def test_both_kinds_are_refused(tmp_path, record, draw):
    record("train/a.wav"), record("train/b.wav"), draw("test/c.png")
    both = r"1 image \(.*c.png\) and 2 recordings \(.*a.wav, .*b.wav\)"
    (tmp_path / "list.txt").write_text("train/a.wav\ntrain/b.wav\ntest/c.png\n")
    for data in (
        tmp_path,
        [tmp_path / name for name in ("train/a.wav", "train/b.wav", "test/c.png")],
        tmp_path / "list.txt",
    ):
        refused(data, both)
    refused([tmp_path / "train", tmp_path / "test"], "holds recordings and .* holds images")
    images = open_data(tmp_path / "test")
    assert images.train.sound is None and images.train.noun == "images"
    assert "holds images, which have no rate" in refusal(images.heard_as, Sound())


def test_without_soundfile_the_extra_is_named(tmp_path, record, monkeypatch):
    record("a.wav"), record("b.flac")
    (tmp_path / "list.txt").write_text("a.wav\nb.flac\n")
    for path in ("yes/0.wav", "yes/1.wav", "no/0.wav", "no/1.wav", "_background_noise_/rain.wav"):
        record(f"words/{path}")
    (tmp_path / "words" / "validation_list.txt").write_text("yes/0.wav\n")
    (tmp_path / "words" / "testing_list.txt").write_text("no/0.wav\n")
    assert len(open_data(tmp_path / "words").train) == 2
    monkeypatch.setattr(scandir, "SOUND_SUFFIXES", frozenset())
    refused(tmp_path, r"holds no images, .*.flac \(pip install 'soundfile")
    for opened in (open_data, open_keywords):  # the layout of Speech Commands
        with pytest.raises(PatchloomError, match=r"holds recordings \(.wav\).*pip install 'soundfile"):
            opened(tmp_path / "words")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    refused(tmp_path / "list.txt", "pip install 'soundfile")


def test_a_column_of_recordings(tmp_path, record):
    datasets = pytest.importorskip("datasets")
    paths = [Path(record(f"files/{i}.flac", seconds=0.1 + i / 10)) for i in range(4)]
    stored = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({"sound": stored, "word": datasets.ClassLabel(names=["no", "yes"])})
    content = [{"bytes": path.read_bytes(), "path": None} for path in paths]
    table = datasets.Dataset.from_dict({"sound": content, "word": [0, 1, 0, 1]}, features=features)
    datasets.DatasetDict(train=table.cast_column("sound", datasets.Audio())).save_to_disk(tmp_path / "saved")
    train, files = open_data(f"hf:{tmp_path / 'saved'}").train, open_data(tmp_path / "files").train
    assert train.noun == "recordings" and train.labels.tolist() == [0, 1, 0, 1]
    assert all(torch.equal(train.read(i), files.read(i)) for i in range(4))
    slow = train.heard_as(replace(Sound(), rate=8_000))
    assert slow.read(1).shape[-1] == 1600 and slow.stamp() != train.stamp()
