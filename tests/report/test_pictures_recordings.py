"""Tests of the recordings on a page: they are those of the source, cut to the budget."""

import base64
import io
import wave
from dataclasses import replace

import numpy as np
import pytest

from patchloom.data.sources.open import open_data
from patchloom.errors import PatchloomError
from patchloom.report.pictures import recordings_of


@pytest.fixture(scope="module")
def tones():
    source = open_data("tones:20").train
    return source.heard_as(replace(source.sound, mean=(0.0,) * 40, std=(1.0,) * 40))


def decoded(recording):
    content = base64.b64decode(recording.sound.removeprefix("data:audio/wav;base64,"))
    with wave.open(io.BytesIO(content)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2")


def test_recordings_sound_as_they_are(tones):
    found = recordings_of(tones, 5)
    assert len(found) == 5
    rate, samples = decoded(found[-1])
    assert rate == 16_000 and np.array_equal(samples, tones.read(19).flatten().numpy())
    assert found[0].picture.width > found[0].picture.height > 40 and "Left to right: 1 s" in found[0].caption
    assert tones.classes[int(tones.labels[0])] in found[0].caption


def test_long_ones_are_cut(tones):
    found = recordings_of(tones, 4, budget=4 * 16_000)
    assert sum(len(one.sound) for one in found) <= 4 * 16_000 + 4 * 100  # and the headers
    rate, samples = decoded(found[0])
    assert 0.3 < len(samples) / rate < 0.5 and "first 0.375 s" in found[0].caption


def test_images_cannot_be_decoded(images):
    with pytest.raises(PatchloomError, match="not recordings"):
        recordings_of(open_data(images).train)
