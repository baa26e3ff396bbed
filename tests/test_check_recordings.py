"""``check`` on recordings: lengths, sampling rates, broken and silent files, copies."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

from patchloom.audio.config import Sound
from patchloom.check import advice_on_lengths, check, column_of
from patchloom.data.near_duplicates import near_copies
from patchloom.data.scan import survey
from patchloom.data.sources.open import open_data

pytest.importorskip("soundfile")


@pytest.fixture
def mixed(tmp_path, record):
    """Recordings of two words in several formats, with a silent one, two copies and a broken one."""
    for i in range(12):
        record(f"no/{i}.wav", seconds=1 + i / 100)
    for i in range(3):
        record(f"yes/{i}.flac", rate=8_000, seconds=0.5, subtype="PCM_24")
    record("yes/stereo.ogg", rate=44_100, seconds=2)
    record("yes/silent.wav", loud=0.0009)
    record("yes/soft.wav", loud=0.002)
    for copy in ("3", "4"):
        shutil.copy(tmp_path / "no" / "0.wav", tmp_path / "yes" / f"{copy}.wav")
    (tmp_path / "yes" / "broken.wav").write_text("no sound")
    return tmp_path


def test_survey_of_recordings(mixed):
    found = survey(open_data(mixed).train, workers=0)
    assert len(found.rows) == 20 and [found.name(i) for i in found.flat] == [str(mixed / "yes" / "silent.wav")]
    ((broken, reason),) = found.broken
    assert found.name(broken).endswith("broken.wav") and reason.startswith("it is not a WAV")
    assert found.repeated == 2 and found.noticed.counts == {"resampled": 4}
    assert column_of(found) == {
        "files": "WAV 16 bits (16), FLAC 24 bits (3), OGG (1)",
        "rate": "16,000 Hz (16), 8,000 Hz (3), 44,100 Hz (1)",
        "channels": "1",
        "seconds": "0.10 to 2.00, 1.02 at the median; 18 s in all",
        **{"unreadable": "1", "copies": "2", "silent": "1"},
    }
    (advice,) = advice_on_lengths(found, Sound())
    assert "5 of 20 recordings are shorter than 1 s" in advice and "11 of 20 are longer" in advice
    assert advice_on_lengths(survey(open_data(mixed / "no").train.subset([0]), workers=0), Sound()) == []
    slow = survey(open_data(mixed).train.heard_as(replace(Sound(), rate=8_000)), workers=0)
    assert column_of(slow)["seconds"] == column_of(found)["seconds"], "whatever the rate"


@pytest.mark.usefixtures("quick_probe")
def test_check_says_nothing_of_pixels_or_images(mixed):
    said = check(mixed, device="cpu", workers=0, estimate=False)
    assert said.table()[:3] == [("", "train"), ("recordings", "21"), ("classes", "no (12), yes (9)")]
    text = "\n".join(said.sentences())
    assert not any(word in text for word in ("image", "pixel", "colour"))
    for word in (
        "1 of 21 recordings are silent",
        "2 of 21 recordings are copies",
        "4 of 20 recordings have another rate",
    ):
        assert word in text
    assert "18 different recordings are few" in text


def test_neighbours_in_name_are_not_compared(mixed, tmp_path):
    source = open_data(mixed).train
    assert len(source) >= 12 and near_copies(source) is None
    assert np.unique(source.contents()).size == 19


def test_a_constant_offset_is_silence(tmp_path, record):
    import soundfile

    record("a.wav")
    soundfile.write(tmp_path / "offset.wav", np.full(16_000, 0.25), 16_000)
    found = survey(open_data(tmp_path).train, workers=0)
    assert [found.name(i) for i in found.flat] == [str(tmp_path / "offset.wav")]
