"""Recordings of every format become one channel of 16 bits at one rate; broken ones are refused with a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from patchloom.audio.decode import decode_recording, head_of, read_recording, resample
from patchloom.data.conversions import collect_conversions
from patchloom.data.decode import Unreadable
from patchloom.errors import PatchloomError

soundfile = pytest.importorskip("soundfile")

RATE = 16_000


def tone(hertz: float, rate: int, seconds: float = 0.5) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)


def written(path: Path, wave: np.ndarray, rate: int = RATE, subtype: str | None = None) -> Path:
    soundfile.write(path, wave, rate, subtype)
    return path


@pytest.mark.parametrize("ending", ["wav", "flac"])
def test_16_bits_at_the_rate_are_unchanged(tmp_path, ending):
    wave = np.random.default_rng(0).integers(-(2**15), 2**15, 999, dtype=np.int16)
    path = written(tmp_path / f"a.{ending}", wave)
    with collect_conversions() as words:
        found = read_recording(path, RATE)
    assert found.dtype == torch.int16 and found.shape == (1, 1, 999) and not words
    assert found.flatten().tolist() == wave.tolist()
    assert torch.equal(decode_recording(path.read_bytes(), "a", RATE), found)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW"])
def test_every_depth_is_the_same_tone(tmp_path, subtype):
    wave = tone(440, RATE)
    found = read_recording(written(tmp_path / "a.wav", wave, subtype=subtype), RATE).numpy().ravel() / 2**15
    assert np.abs(found - wave).max() < (0.02 if subtype in ("PCM_U8", "ULAW") else 2**-15)


@pytest.mark.parametrize("ending", ["ogg", "mp3"])
def test_lossy_formats(tmp_path, ending):
    if ending.upper() not in soundfile.available_formats():
        pytest.skip("this libsndfile does not write it")
    wave = tone(440, RATE, 1)
    found = read_recording(written(tmp_path / f"a.{ending}", wave), RATE).numpy().ravel() / 2**15
    spectrum = np.abs(np.fft.rfft(found[: 2**13] * np.hanning(2**13)))
    assert abs(len(found) - len(wave)) < 1200 and abs(spectrum.argmax() * RATE / 2**13 - 440) < 2


def test_channels_are_mixed_by_their_mean_and_that_is_recorded(tmp_path):
    left, right = tone(440, RATE), tone(1000, RATE)
    with collect_conversions() as words:
        found = read_recording(written(tmp_path / "a.wav", np.stack([left, right], 1)), RATE).numpy().ravel()
    assert words == {"mixed"} and np.abs(found / 2**15 - (left + right) / 2).max() < 2**-14


def test_samples_beyond_one_are_clipped_and_that_is_recorded(tmp_path):
    with collect_conversions() as words:
        found = read_recording(written(tmp_path / "a.wav", np.array([0.5, 3, -3, 1]), subtype="FLOAT"), RATE)
    assert words == {"clipped"} and found.flatten().tolist() == [2**14, 2**15 - 1, -(2**15), 2**15 - 1]


@pytest.mark.parametrize("own", [8_000, 11_025, 44_100, 48_000])
def test_a_tone_stays_that_tone_at_another_rate(tmp_path, own):
    with collect_conversions() as words:
        found = read_recording(written(tmp_path / "a.wav", tone(440, own), own), RATE).numpy().ravel() / 2**15
    wanted = tone(440, RATE)
    assert words == {"resampled"} and abs(len(found) - len(wanted)) <= 1
    inner = slice(400, 7000)  # the filter reaches beyond the ends
    assert np.abs(found[inner] - wanted[inner]).max() < 2e-3


@pytest.mark.parametrize("own, hertz", [(44_100, 8_200), (44_100, 15_000), (48_000, 23_000), (16_000, 7_000)])
def test_frequencies_above_half_the_new_rate_are_removed(own, hertz):
    rate = 16_000 if own > 16_000 else 8_000
    found = resample(tone(hertz, own).astype(np.float32), own, rate)[400:-400]
    assert np.abs(found).max() < 0.5 * 1e-3  # 60 dB below


def test_resampling_equals_an_independent_implementation():
    soxr = pytest.importorskip("soxr")
    rng, own = np.random.default_rng(0), 44_100
    wave = sum(rng.random() * tone(hertz, own, 1) for hertz in rng.uniform(50, 6_500, 12)).astype(np.float32) / 12
    ours, theirs = resample(wave, own, RATE), soxr.resample(wave, own, RATE, "VHQ")
    assert abs(len(ours) - len(theirs)) <= 1
    assert np.abs(ours[400:15_500] - theirs[400:15_500]).max() < 1e-3 * np.abs(wave).max()


def broken(path: Path, ending: str, keep: float) -> Path:
    whole = written(path.with_suffix(f".{ending}"), tone(440, RATE, 2)).read_bytes()
    path = path.with_suffix(f".{ending}")
    path.write_bytes(whole[: int(len(whole) * keep)])
    return path


@pytest.mark.parametrize("ending", ["wav", "flac", "ogg", "mp3"])
@pytest.mark.parametrize("keep", [0.6, 0.995])
def test_a_file_that_is_cut_short_is_refused(tmp_path, ending, keep):
    if ending.upper() not in soundfile.available_formats():
        pytest.skip("this libsndfile does not write it")
    path = broken(tmp_path / "a", ending, keep)
    with pytest.raises(Unreadable, match="a.* cannot be read as a recording: .") as error:
        read_recording(path, RATE)
    assert "\n" not in str(error.value) and "BytesIO" not in str(error.value)


def test_headers_without_samples_and_other_files_are_refused(tmp_path):
    def reason_of(path: Path) -> str:
        with pytest.raises(Unreadable) as error:
            read_recording(path, RATE)
        return str(error.value).removeprefix(f"{path} cannot be read as a recording: ")

    assert reason_of(written(tmp_path / "a.wav", np.zeros(0))) == "it has no samples, only a header"
    flac = written(tmp_path / "a.flac", tone(440, RATE))
    flac.write_bytes(flac.read_bytes()[:42])
    assert "or broken" in reason_of(flac)
    for ending in ("wav", "flac", "ogg", "mp3"):
        (tmp_path / f"b.{ending}").touch()
        assert reason_of(tmp_path / f"b.{ending}") == "the file is empty"
        (tmp_path / f"c.{ending}").write_text("This is a text, and nobody has spoken it yet.\n" * 40)
        assert reason_of(tmp_path / f"c.{ending}").startswith("it is not a WAV, FLAC, Ogg or MP3")
    assert reason_of(tmp_path / "d.wav") == "No such file or directory"
    assert reason_of(tmp_path) == "it is not a file"
    written(tmp_path / "e.wav", np.array([0.5, np.nan]), subtype="FLOAT")
    assert reason_of(tmp_path / "e.wav") == "it has samples that are not finite"
    soundfile.write(tmp_path / "f.wav", np.zeros(9), 4_000_037)
    assert reason_of(tmp_path / "f.wav").startswith("its header says 4,000,037 samples per second, and at most 768,000")


def test_a_wav_from_a_pipe_has_no_length_in_its_header(tmp_path):
    path = written(tmp_path / "a.wav", tone(440, RATE))
    content = bytearray(path.read_bytes())
    content[40:44] = b"\xff" * 4
    path.write_bytes(content)
    assert read_recording(path, RATE).shape[-1] == 8000


def test_without_soundfile_the_extra_is_named(tmp_path, monkeypatch):
    path = written(tmp_path / "a.wav", tone(440, RATE))
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(PatchloomError, match=r"pip install 'soundfile"):
        read_recording(path, RATE)


def test_header(tmp_path):
    head = head_of(written(tmp_path / "a.wav", np.zeros((900, 2)), 44_100, "PCM_24"))
    assert head == ("WAV 24 bits", 44_100, 2, 900)


def test_silence_of_days_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    # 2 bytes a sample: more than 60,000 of any file, and more than 16 a byte of it
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 10_000)
    path = written(tmp_path / "a.flac", np.zeros((31_000, 2)), RATE)
    assert 16 * path.stat().st_size < 62_000
    with pytest.raises(Unreadable, match="62,000, and could be a decompression bomb; cut it into shorter recordings"):
        read_recording(path, RATE)
    assert read_recording(written(tmp_path / "b.flac", np.zeros(29_000), RATE), RATE).shape == (1, 1, 29_000)
    noise = np.random.default_rng(0).uniform(-1, 1, 100_000)
    assert read_recording(written(tmp_path / "c.flac", noise, RATE), RATE).shape == (1, 1, 100_000)
    with pytest.raises(Unreadable, match="120,000, and could be"):  # at the rate that is asked for
        read_recording(written(tmp_path / "d.wav", np.zeros(1000), 800), 48_000)


@pytest.mark.parametrize("own, asked", [(7, 16_000), (1, 16_000), (100, 16_000), (767_999, 16_000), (500_001, 16_000)])
def test_rates_without_a_usual_ratio_are_refused_at_once(tmp_path, own, asked):
    with pytest.raises(Unreadable, match=f"its header says {own:,} samples per second"):
        read_recording(written(tmp_path / "a.wav", np.zeros(1000), own), asked)
    assert read_recording(tmp_path / "a.wav", own).shape == (1, 1, 1000)


@pytest.mark.parametrize("channels", [1, 2, 7])
def test_blocks_are_no_seams(tmp_path, monkeypatch, channels):
    waves = np.random.default_rng(0).uniform(-1, 1, (5003, channels)).astype(np.float32)
    for ending, subtype in (("wav", "FLOAT"), ("flac", "PCM_16")):
        path = written(tmp_path / f"a.{ending}", waves, RATE, subtype)
        whole = [read_recording(path, rate) for rate in (RATE, 8000)]
        monkeypatch.setattr("patchloom.audio.decode._BLOCK", 64)
        assert all(torch.equal(read_recording(path, r), one) for r, one in zip((RATE, 8000), whole, strict=True))
        monkeypatch.undo()
