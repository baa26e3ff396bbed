"""Recordings of every format become one channel of 16 bits at one rate; broken ones are refused with a reason."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from refusing import refusal

from patchloom.audio.decode import decode_recording, head_of, read_recording, resample
from patchloom.data.conversions import collect_conversions
from patchloom.data.decode import Unreadable

soundfile = pytest.importorskip("soundfile")

RATE = 16_000


def tone(hertz: float, rate: int = RATE, seconds: float = 0.5) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)


def written(path: Path, wave: np.ndarray, rate: int = RATE, subtype: str | None = None) -> Path:
    if path.suffix[1:].upper() not in soundfile.available_formats():
        pytest.skip("this libsndfile does not write it")
    soundfile.write(path, wave, rate, subtype)
    return path


def decoded(path: Path, rate: int = RATE) -> np.ndarray:
    return read_recording(path, rate).numpy().ravel() / 2**15


@pytest.mark.parametrize("ending", ["wav", "flac"])
def test_16_bits_at_the_rate_are_unchanged(tmp_path, ending):
    wave = np.random.default_rng(0).integers(-(2**15), 2**15, 999, dtype=np.int16)
    path = written(tmp_path / f"a.{ending}", wave)
    with collect_conversions() as seen:
        found = read_recording(path, RATE)
    assert found.dtype == torch.int16 and found.shape == (1, 1, 999) and not seen.words
    assert found.flatten().tolist() == wave.tolist()
    assert torch.equal(decode_recording(path.read_bytes(), "a", RATE), found)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW"])
def test_every_depth_is_the_same_tone(tmp_path, subtype):
    path = written(tmp_path / "a.wav", tone(440), subtype=subtype)
    known = {"PCM_U8": " 8 bits", "PCM_24": " 24 bits", "PCM_32": " 32 bits", "ULAW": ""}
    assert head_of(path) == (f"WAV{known.get(subtype, ' float')}", RATE, 1, 8000)
    found = decoded(path)
    assert np.abs(found - tone(440)).max() < (0.02 if subtype in ("PCM_U8", "ULAW") else 2**-15)


@pytest.mark.parametrize("ending", ["ogg", "mp3"])
def test_lossy_formats(tmp_path, ending):
    wave = tone(440, RATE, 1)
    found = decoded(written(tmp_path / f"a.{ending}", wave))
    spectrum = np.abs(np.fft.rfft(found[: 2**13] * np.hanning(2**13)))
    assert abs(len(found) - len(wave)) < 1200 and abs(spectrum.argmax() * RATE / 2**13 - 440) < 2


def test_mixing_and_clipping_are_recorded(tmp_path):
    left, right = tone(440), tone(1000)
    with collect_conversions() as seen:
        found = decoded(written(tmp_path / "a.wav", np.stack([left, right], 1)))
    assert seen.words == {"mixed"} and np.abs(found - (left + right) / 2).max() < 2**-14
    with collect_conversions() as seen:
        found = read_recording(written(tmp_path / "a.wav", np.array([0.5, 3, -3, 1]), subtype="FLOAT"), RATE)
    assert seen.words == {"clipped"} and found.flatten().tolist() == [2**14, 2**15 - 1, -(2**15), 2**15 - 1]


@pytest.mark.parametrize("own", [8_000, 11_025, 44_100, 48_000])
def test_a_tone_stays_that_tone_at_another_rate(tmp_path, own):
    with collect_conversions() as seen:
        found = decoded(written(tmp_path / "a.wav", tone(440, own), own))
    assert seen.words == {"resampled"} and abs(len(found) - 8000) <= 1
    inner = slice(400, 7000)  # the filter reaches beyond the ends
    assert np.abs(found[inner] - tone(440)[inner]).max() < 2e-3


@pytest.mark.parametrize("own, hertz", [(44_100, 8_200), (44_100, 15_000), (48_000, 23_000), (16_000, 7_000)])
def test_frequencies_above_half_the_new_rate_are_removed(own, hertz):
    rate = 16_000 if own > 16_000 else 8_000
    found = resample(tone(hertz, own).astype(np.float32), own, rate)[400:-400]
    assert np.abs(found).max() < 0.5 * 1e-3  # 60 dB below


def reason_of(path: Path, rate: int = RATE) -> str:
    """Return why a file is unreadable, without the file's name."""
    with pytest.raises(Unreadable) as error:
        read_recording(path, rate)
    name, reason = str(error.value).split(" cannot be read as a recording: ")
    assert name == str(path) and reason and "\n" not in reason and "BytesIO" not in reason
    return reason


def test_resampling_equals_an_independent_implementation():
    soxr = pytest.importorskip("soxr")
    rng, own = np.random.default_rng(0), 44_100
    wave = sum(rng.random() * tone(hertz, own, 1) for hertz in rng.uniform(50, 6_500, 12)).astype(np.float32) / 12
    ours, theirs = resample(wave, own, RATE), soxr.resample(wave, own, RATE, "VHQ")
    assert abs(len(ours) - len(theirs)) <= 1
    assert np.abs(ours[400:15_500] - theirs[400:15_500]).max() < 1e-3 * np.abs(wave).max()


@pytest.mark.parametrize("ending", ["wav", "flac", "ogg", "mp3"])
def test_a_file_that_is_cut_short_is_refused(tmp_path, ending):
    whole = written(tmp_path / f"a.{ending}", tone(440, RATE, 2)).read_bytes()
    for keep in (0.6, 0.995):
        (tmp_path / f"a.{ending}").write_bytes(whole[: int(len(whole) * keep)])
        assert reason_of(tmp_path / f"a.{ending}")


def test_headers_without_samples_and_other_files_are_refused(tmp_path):
    flac = written(tmp_path / "a.flac", tone(440))
    flac.write_bytes(flac.read_bytes()[:42])
    (tmp_path / "empty.mp3").touch()
    (tmp_path / "text.wav").write_text("This is a text, and nobody has spoken it yet.\n" * 40)
    for path, said in (
        (written(tmp_path / "a.wav", np.zeros(0)), "only a header"),
        (flac, "or broken"),
        (tmp_path / "empty.mp3", "empty"),
        (tmp_path / "text.wav", "not a WAV, FLAC, Ogg or MP3"),
        (tmp_path / "none.wav", "No such file"),
        (tmp_path, "not a regular file"),
        (written(tmp_path / "b.wav", np.array([0.5, np.nan]), subtype="FLOAT"), "not finite"),
        (written(tmp_path / "c.wav", np.zeros(9), 4_000_037), "4,000,037 samples per second, and at most 768,000"),
    ):
        assert said in reason_of(path)


def test_a_wav_from_a_pipe_has_no_length_in_its_header(tmp_path):
    path = written(tmp_path / "a.wav", tone(440))
    content = bytearray(path.read_bytes())
    content[40:44] = b"\xff" * 4
    path.write_bytes(content)
    assert read_recording(path, RATE).shape[-1] == 8000


def test_a_missing_soundfile_is_named(tmp_path, monkeypatch):
    path = written(tmp_path / "a.wav", tone(440))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert "pip install 'soundfile" in refusal(read_recording, path, RATE)


def test_silence_of_days_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    # 2 bytes a sample: more than 60,000 of any file, and more than 16 a byte of it
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 10_000)
    path = written(tmp_path / "a.flac", np.zeros((31_000, 2)))
    assert 16 * path.stat().st_size < 62_000 and "62,000, and could be" in reason_of(path)
    assert read_recording(written(tmp_path / "b.flac", np.zeros(29_000)), RATE).shape == (1, 1, 29_000)
    noise = np.random.default_rng(0).uniform(-1, 1, 100_000)
    assert read_recording(written(tmp_path / "c.flac", noise), RATE).shape == (1, 1, 100_000)
    slow = written(tmp_path / "d.wav", np.zeros(1000), 800)
    assert "120,000, and could be" in reason_of(slow, 48_000)  # at the rate that is asked for


@pytest.mark.parametrize("own", [7, 1, 100, 767_999, 500_001])
def test_rates_without_a_usual_ratio_are_refused_at_once(tmp_path, own):
    path = written(tmp_path / "a.wav", np.zeros(1000), own)
    assert f"{own:,} samples per second" in reason_of(path)
    assert read_recording(path, own).shape == (1, 1, 1000)


@pytest.mark.parametrize("channels", [1, 7])
def test_blocks_are_no_seams(tmp_path, monkeypatch, channels):
    waves = np.random.default_rng(0).uniform(-1, 1, (5003, channels)).astype(np.float32)
    paths = [written(tmp_path / "a.wav", waves, subtype="FLOAT"), written(tmp_path / "a.flac", waves)]
    whole = [read_recording(path, rate) for path in paths for rate in (RATE, 8000)]
    monkeypatch.setattr("patchloom.audio.decode._BLOCK", 64)
    assert all(map(torch.equal, whole, (read_recording(path, rate) for path in paths for rate in (RATE, 8000))))
